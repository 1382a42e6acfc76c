/* test_stages.c - the textbook's stages one by one, and that together they are mha_forward. */
#include "fixture.h"

/* Rounding of a sum of n products in float32: about sqrt(n) times half a unit in the last place
   of the largest partial sum. Four times that, of the largest result or 1. */
static double sum_tolerance(int n, double largest)
{
    return 4.0 / 16777216.0 * sqrt((double)n) * (largest > 1 ? largest : 1);
}

static double *doubles(size_t n)
{
    double *y = (double *)malloc((n ? n : 1) * sizeof *y);
    if (!y) abort();
    return y;
}

static double *widen(const float *x, size_t n)
{
    double *y = doubles(n);
    for (size_t i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

static void transpose(const float *w, int rows, int cols, float *to)
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) to[j * rows + i] = w[i * cols + j];
}

/* ---- the worked example: d_model 4, two heads of width 2 --------------------------------- */

static const float x_example[2 * 4] = { 1, 0.5f, -1, 2, -0.5f, 1, 0.3f, -2 };
static const float wq_example[2][8] = { { 0.1f, 0.4f, -0.2f, 0.3f, 1.0f, -0.5f, 0.5f, 0.2f },
                                        { -0.3f, 0.2f, 1.1f, 0.6f, -0.4f, 0.8f, 0.7f, -0.1f } };
static const float wk_example[2][8] = { { 0.2f, -0.1f, 0.7f, 0.4f, -0.3f, 0.9f, 0.1f, 0.5f },
                                        { 0.6f, 0.3f, -0.8f, 0.2f, 0.5f, -0.4f, 0.3f, 0.1f } };
static const float wv_example[2][8] = { { 1.0f, 0.0f, 0.5f, -0.5f, 0.2f, 0.8f, -0.6f, 0.3f },
                                        { -0.2f, 0.9f, 0.4f, 0.1f, 0.7f, -0.3f, 0.0f, 1.1f } };
static const float wo_example[4 * 4] = { 0.5f,  -0.2f, 1.1f, 0.3f, 0.1f, 0.8f,  -0.4f, 0.6f,
                                         -0.3f, 0.7f,  0.2f, 1.0f, 0.9f, -0.5f, 0.3f,  -0.8f };

TEST worked_example(mha_isa isa)
{
    /* [token][head 1, head 2]: the exact products */
    static const double q_want[2 * 4] = { 0, 1.45, 2.05, -0.5, -0.95, -0.45, -0.27, 0.94 };
    const float *const wq[2] = { wq_example[0], wq_example[1] };
    const float *const wk[2] = { wk_example[0], wk_example[1] };
    const float *const wv[2] = { wv_example[0], wv_example[1] };
    float fused[4 * 12], q[8], k[8], v[8], y[8], attn[8], lse[4];
    mha_config cfg;
    mha_weights w;
    mha_args a;
    mha_layer *layer;
    oracle_result want;

    memset(&cfg, 0, sizeof cfg);
    memset(&w, 0, sizeof w);
    memset(&a, 0, sizeof a);
    cfg.d_model = 4;
    cfg.n_heads = 2;
    cfg.isa = isa;
    ASSERT_STATUS(MHA_OK, mha_fuse_heads(&cfg, MHA_IN_OUT, wq, wk, wv, fused));
    w.qkv = fused;
    w.out = wo_example;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &w));
    a.batch = 1;
    a.seq = 2;
    a.x = x_example;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, q, k, v));
    ASSERT_CLOSE(q, q_want, 8, sum_tolerance(4, 2));

    a.y = y;
    a.attn = attn;
    a.lse = lse;
    want = oracle_forward(&cfg, &w, &a);
    ASSERT_STATUS(MHA_OK, mha_forward(layer, &a));
    ASSERT_CLOSE(y, want.y, 8, 1e-5 * max_abs(want.y, 8));
    ASSERT_CLOSE(attn, want.attn, 8, 2e-6);
    ASSERT_CLOSE(lse, want.lse, 4, 2e-6);
    oracle_free(&want);
    mha_layer_free(layer);
    PASS();
}

/* ---- split and merge --------------------------------------------------------------------- */

TEST split_and_merge(int B, int T, int H, int d)
{
    const size_t n = (size_t)B * (size_t)T * (size_t)H * (size_t)d;
    float *x = test_floats(n, 0), *apart = test_floats(n + 1, -1), *back = test_floats(n + 1, -1);
    for (size_t i = 0; i < n; i++) x[i] = (float)i;
    ASSERT_STATUS(MHA_OK, mha_split_heads(B, T, H, d, x, apart));
    ASSERT_STATUS(MHA_OK, mha_merge_heads(B, T, H, d, apart, back));
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++)
                for (int c = 0; c < d; c++)
                    ASSERT(bits_f(apart[((b * H + h) * T + t) * d + c]) ==
                           bits_f((float)(((b * T + t) * H + h) * d + c)));
    ASSERT(same_bits(x, back, n));
    ASSERT(bits_f(apart[n]) == bits_f(-1) && bits_f(back[n]) == bits_f(-1));
    free(x);
    free(apart);
    free(back);
    PASS();
}

/* ---- project_qkv ------------------------------------------------------------------------- */

TEST project_qkv(mha_isa isa)
{
    enum { B = 2, T = 19, S = 37, D = 45, H = 6, G = 2, DK = 7, DV = 11, DS = 33, DSV = 21 };
    net n = net_weights(isa, D, H, G, DK, DV, DS, DSV, 11);
    const size_t nq = B * T * H * DK, nk = B * S * G * DK, nv = B * S * G * DV;
    rng r = rng_make(12);
    float *x = rng_floats(&r, B * T * D), *xk = rng_floats(&r, B * S * DS);
    float *xv = rng_floats(&r, B * S * DSV);
    float *q = test_floats(nq, 0), *k = test_floats(nk, 0), *v = test_floats(nv, 0);
    float *again = test_floats(nq + nk + nv, 0);
    double *x2 = widen(x, B * T * D), *xk2 = widen(xk, B * S * DS), *xv2 = widen(xv, B * S * DSV);
    double *want = doubles(nq + nk + nv);
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.source_seq = S;
    a.x = x;
    a.source = xk;
    a.source_v = xv;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, q, k, v));
    oracle_project(x2, B * T, D, H * DK, n.w.q, MHA_IN_OUT, n.w.b_q, want);
    ASSERT_CLOSE(q, want, nq, sum_tolerance(D, max_abs(want, nq)));
    oracle_project(xk2, B * S, DS, G * DK, n.w.k, MHA_IN_OUT, n.w.b_k, want);
    ASSERT_CLOSE(k, want, nk, sum_tolerance(DS, max_abs(want, nk)));
    oracle_project(xv2, B * S, DSV, G * DV, n.w.v, MHA_IN_OUT, n.w.b_v, want);
    ASSERT_CLOSE(v, want, nv, sum_tolerance(DSV, max_abs(want, nv)));

    /* each alone: the same bits */
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, again, NULL, NULL));
    ASSERT(same_result(q, again, nq));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, NULL, again, NULL));
    ASSERT(same_result(k, again, nk));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, NULL, NULL, again));
    ASSERT(same_result(v, again, nv));

    free(x);
    free(xk);
    free(xv);
    free(q);
    free(k);
    free(v);
    free(again);
    free(x2);
    free(xk2);
    free(xv2);
    free(want);
    net_free(&n);
    PASS();
}

/* Keys and values from x itself, the fused matrix, in both layouts. */
TEST project_self(mha_isa isa, mha_layout layout)
{
    enum { B = 3, T = 23, D = 40, H = 4, G = 2, DK = 9, DV = 13, OUT = H * DK + G * DK + G * DV };
    rng r = rng_make(13);
    float *x = rng_floats(&r, B * T * D), *w = rng_floats(&r, D * OUT);
    float *out = rng_floats(&r, H * DV * D), *bias = rng_floats(&r, OUT);
    float *q = test_floats(B * T * H * DK, 0), *k = test_floats(B * T * G * DK, 0);
    float *v = test_floats(B * T * G * DV, 0);
    double *x2 = widen(x, B * T * D), *want = doubles(B * T * OUT);
    mha_config cfg;
    mha_weights weights;
    mha_layer *layer;
    mha_args a;

    memset(&cfg, 0, sizeof cfg);
    memset(&weights, 0, sizeof weights);
    memset(&a, 0, sizeof a);
    cfg.d_model = D;
    cfg.n_heads = H;
    cfg.n_kv_heads = G;
    cfg.d_k = DK;
    cfg.d_v = DV;
    cfg.isa = isa;
    weights.qkv = w;
    weights.b_qkv = bias;
    weights.out = out;
    weights.layout = layout;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &weights));
    a.batch = B;
    a.seq = T;
    a.x = x;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, q, k, v));
    oracle_project(x2, B * T, D, OUT, w, layout, bias, want);
    for (int row = 0; row < B * T; row++) {
        const double *p = want + row * OUT;
        const double tol = sum_tolerance(D, max_abs(p, OUT));
        ASSERT_CLOSE(q + row * H * DK, p, H * DK, tol);
        ASSERT_CLOSE(k + row * G * DK, p + H * DK, G * DK, tol);
        ASSERT_CLOSE(v + row * G * DV, p + H * DK + G * DK, G * DV, tol);
    }
    free(x);
    free(w);
    free(out);
    free(bias);
    free(q);
    free(k);
    free(v);
    free(x2);
    free(want);
    mha_layer_free(layer);
    PASS();
}

/* ---- project_out ------------------------------------------------------------------------- */

TEST project_out(mha_isa isa)
{
    enum { B = 2, T = 21, D = 35, H = 3, DV = 13 };
    net n = net_weights(isa, D, H, 1, 5, DV, 0, 0, 14);
    rng r = rng_make(15);
    float *o = rng_floats(&r, B * T * H * DV), *y = test_floats(B * T * D + 1, -1);
    double *o2 = widen(o, B * T * H * DV), *want = doubles(B * T * D);
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.y = y;
    ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &a, o));
    oracle_project(o2, B * T, H * DV, D, n.w.out, MHA_IN_OUT, n.w.b_out, want);
    ASSERT_CLOSE(y, want, B * T * D, sum_tolerance(H * DV, max_abs(want, B * T * D)));
    ASSERT(bits_f(y[B * T * D]) == bits_f(-1));
    free(o);
    free(y);
    free(o2);
    free(want);
    net_free(&n);
    PASS();
}

/* A row's projection depends on that row alone, however many terms it has: bit for bit. */
TEST rows_alone(mha_isa isa)
{
    enum { B = 3, T = 43, D = 1700, H = 3, DK = 6, N = H * DK, DV = 301 };
    net n = net_weights(isa, D, H, H, DK, DV, 0, 0, 20);
    rng r = rng_make(21);
    float *x = rng_floats(&r, B * T * D), *o = rng_floats(&r, B * T * H * DV);
    float *q = test_floats(B * T * N, 0), *k = test_floats(B * T * N, 0);
    float *v = test_floats(B * T * H * DV, 0), *y = test_floats(B * T * D, 0);
    float *q1 = test_floats(N, 0), *k1 = test_floats(N, 0), *v1 = test_floats(H * DV, 0);
    float *y1 = test_floats(D, 0);
    double *x2, *o2, *want;
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.y = y;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, q, k, v));
    ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &a, o));

    x2 = widen(x, D);
    o2 = widen(o, H * DV);
    want = doubles(D);
    oracle_project(x2, 1, D, N, n.w.q, MHA_IN_OUT, n.w.b_q, want);
    ASSERT_CLOSE(q, want, N, sum_tolerance(D, max_abs(want, N)));
    oracle_project(o2, 1, H * DV, D, n.w.out, MHA_IN_OUT, n.w.b_out, want);
    ASSERT_CLOSE(y, want, D, sum_tolerance(H * DV, max_abs(want, D)));

    a.batch = a.seq = 1;
    for (int row = 0; row < B * T; row += row < 30 ? 1 : 11) {
        a.x = x + row * D;
        a.y = y1;
        ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, q1, k1, v1));
        ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &a, o + row * H * DV));
        ASSERT(same_result(q1, q + row * N, N));
        ASSERT(same_result(k1, k + row * N, N));
        ASSERT(same_result(v1, v + row * H * DV, H * DV));
        ASSERT(same_result(y1, y + row * D, D));
    }
    free(x);
    free(o);
    free(q);
    free(k);
    free(v);
    free(y);
    free(q1);
    free(k1);
    free(v1);
    free(y1);
    free(x2);
    free(o2);
    free(want);
    net_free(&n);
    PASS();
}

/* ---- the five stages by hand are mha_forward, bit for bit -------------------------------- */

typedef struct shape {
    const char *name;
    int B, T, S, D, H, G, dk, dv, ds, dsv; /* S = 0: self-attention */
    mha_causal causal;
    int key_len, bias; /* 1: with one */
} shape;

static const shape shapes[] = {
    { "self", 2, 17, 0, 40, 5, 5, 8, 8, 0, 0, MHA_NOT_CAUSAL, 0, 0 },
    { "one_token", 1, 1, 0, 24, 3, 3, 8, 8, 0, 0, MHA_CAUSAL, 0, 0 },
    { "grouped_causal", 2, 70, 0, 33, 6, 2, 7, 12, 0, 0, MHA_CAUSAL, 0, 0 },
    { "cross", 3, 9, 31, 20, 4, 1, 5, 3, 14, 27, MHA_CAUSAL_UPPER_LEFT, 1, 0 },
    { "long", 1, 20, 530, 16, 2, 2, 16, 16, 0, 0, MHA_CAUSAL, 0, 1 },
    { "wide", 1, 35, 0, 64, 1, 1, 64, 64, 0, 0, MHA_NOT_CAUSAL, 0, 1 },
    { "wider", 1, 7, 0, 1600, 8, 8, 5, 130, 0, 0, MHA_CAUSAL, 0, 0 },
};

TEST by_hand(const shape *s, mha_isa isa)
{
    const int B = s->B, T = s->T, S = s->S ? s->S : s->T, D = s->D, H = s->H, G = s->G;
    const int dk = s->dk, dv = s->dv;
    net n = net_weights(isa, D, H, G, dk, dv, s->ds, s->dsv, 16);
    rng r = rng_make(17);
    const size_t ny = (size_t)(B * T * D), nq = (size_t)(B * T * H * dk);
    const size_t nk = (size_t)(B * S * G * dk), nv = (size_t)(B * S * G * dv);
    const size_t no = (size_t)(B * T * H * dv), na = (size_t)(B * H * T * S);
    float *x = rng_floats(&r, ny), *xk = rng_floats(&r, (size_t)(B * S * n.cfg.d_source));
    float *xv = rng_floats(&r, (size_t)(B * S * n.cfg.d_source_v));
    float *bias = rng_floats(&r, (size_t)(T * S));
    float *y = test_floats(ny, 0), *attn = test_floats(na, 0);
    float *lse = test_floats((size_t)(B * H * T), 0);
    float *q = test_floats(nq, 0), *k = test_floats(nk, 0), *v = test_floats(nv, 0);
    float *q2 = test_floats(nq, 0), *k2 = test_floats(nk, 0), *v2 = test_floats(nv, 0);
    float *o = test_floats(no, 0), *o2 = test_floats(no, 0);
    float *y2 = test_floats(ny, 0), *attn2 = test_floats(na, 0);
    float *lse2 = test_floats((size_t)(B * H * T), 0);
    const int len[3] = { S, S / 2, 1 };
    mha_args a;
    mha_sdpa_args c;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.source_seq = S;
    a.x = x;
    a.source = s->S ? xk : NULL;
    a.source_v = s->S && s->dsv ? xv : NULL;
    a.y = y;
    a.attn = attn;
    a.lse = lse;
    a.mask.causal = s->causal;
    a.mask.key_len = s->key_len ? len : NULL;
    a.mask.bias = s->bias ? bias : NULL;
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));

    /* the views of [B,T,H*d] as they come from the projection */
    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &a, q, k, v));
    memset(&c, 0, sizeof c);
    c.batch = B;
    c.heads = H;
    c.kv_heads = G;
    c.seq = T;
    c.source_seq = S;
    c.d_k = dk;
    c.d_v = dv;
    c.isa = isa;
    c.mask = a.mask;
    c.q = q;
    c.k = k;
    c.v = v;
    c.o = o;
    c.q_stride = (mha_stride){ (ptrdiff_t)T * H * dk, dk, (ptrdiff_t)H * dk };
    c.k_stride = (mha_stride){ (ptrdiff_t)S * G * dk, dk, (ptrdiff_t)G * dk };
    c.v_stride = (mha_stride){ (ptrdiff_t)S * G * dv, dv, (ptrdiff_t)G * dv };
    c.o_stride = (mha_stride){ (ptrdiff_t)T * H * dv, dv, (ptrdiff_t)H * dv };
    c.attn = attn2;
    c.lse = lse2;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&c));
    a.y = y2;
    ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &a, o));
    ASSERT(same_result(y, y2, ny));
    ASSERT(same_result(attn, attn2, na));
    ASSERT(same_result(lse, lse2, (size_t)(B * H * T)));

    /* split copies */
    ASSERT_STATUS(MHA_OK, mha_split_heads(B, T, H, dk, q, q2));
    ASSERT_STATUS(MHA_OK, mha_split_heads(B, S, G, dk, k, k2));
    ASSERT_STATUS(MHA_OK, mha_split_heads(B, S, G, dv, v, v2));
    c.q = q2;
    c.k = k2;
    c.v = v2;
    c.o = o2;
    memset(&c.q_stride, 0, sizeof c.q_stride);
    c.k_stride = c.v_stride = c.o_stride = c.q_stride;
    memset(attn2, 0xff, na * sizeof *attn2);
    ASSERT_STATUS(MHA_OK, mha_sdpa(&c));
    memset(o, 0xff, no * sizeof *o);
    ASSERT_STATUS(MHA_OK, mha_merge_heads(B, T, H, dv, o2, o));
    memset(y2, 0xff, ny * sizeof *y2);
    ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &a, o));
    ASSERT(same_result(y, y2, ny));
    ASSERT(same_result(attn, attn2, na));

    free(x);
    free(xk);
    free(xv);
    free(bias);
    free(y);
    free(attn);
    free(lse);
    free(q);
    free(k);
    free(v);
    free(q2);
    free(k2);
    free(v2);
    free(o);
    free(o2);
    free(y2);
    free(attn2);
    free(lse2);
    net_free(&n);
    PASS();
}

/* ---- the forms of the weights ------------------------------------------------------------ */

/* y of a causal self-attention with these weights. */
static enum greatest_test_res layer_run(const mha_config *cfg, const mha_weights *w, int B, int T,
                                        const float *x, float *y)
{
    mha_layer *layer;
    mha_args a;
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.y = y;
    a.mask.causal = MHA_CAUSAL;
    memset(y, 0xff, (size_t)(B * T * cfg->d_model) * sizeof *y);
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, cfg, w));
    ASSERT_STATUS(MHA_OK, mha_forward(layer, &a));
    mha_layer_free(layer);
    PASS();
}

/* The same layer given as separate matrices, fused, and as the matrices of each head, in both
   layouts, with the biases fused or separate: all the same bits. */
TEST weight_forms(mha_isa isa)
{
    enum { B = 2, T = 21, D = 37, H = 6, G = 3, DK = 7, DV = 10 };
    enum { NQ = H * DK, NK = G * DK, NV = G * DV, OUT = NQ + NK + NV };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 18);
    rng r = rng_make(19);
    float *x = rng_floats(&r, B * T * D), *y = test_floats(B * T * D, 0);
    float *y2 = test_floats(B * T * D, 0);
    float *fused = test_floats(D * OUT, 0), *fused_t = test_floats(D * OUT, 0);
    float *gathered = test_floats(D * OUT + 1, -1), *b_qkv = test_floats(OUT, 0);
    float *q_t = test_floats(D * NQ, 0), *k_t = test_floats(D * NK, 0);
    float *v_t = test_floats(D * NV, 0), *out_t = test_floats(H * DV * D, 0);
    float *head[2][3][H]; /* [layout][q k v][head] */
    const float *m[3] = { n.w.q, n.w.k, n.w.v };
    static const int heads[3] = { H, G, G }, width[3] = { DK, DK, DV };
    mha_weights w;
    int layout;

    /* columns of the fused matrix: q, k, v */
    for (int i = 0; i < D; i++) {
        float *row = fused + i * OUT;
        memcpy(row, n.w.q + i * NQ, NQ * sizeof *row);
        memcpy(row + NQ, n.w.k + i * NK, NK * sizeof *row);
        memcpy(row + NQ + NK, n.w.v + i * NV, NV * sizeof *row);
    }
    memcpy(b_qkv, n.w.b_q, NQ * sizeof *b_qkv);
    memcpy(b_qkv + NQ, n.w.b_k, NK * sizeof *b_qkv);
    memcpy(b_qkv + NQ + NK, n.w.b_v, NV * sizeof *b_qkv);
    transpose(fused, D, OUT, fused_t);
    transpose(n.w.q, D, NQ, q_t);
    transpose(n.w.k, D, NK, k_t);
    transpose(n.w.v, D, NV, v_t);
    transpose(n.w.out, H * DV, D, out_t);
    for (int p = 0; p < 3; p++)
        for (int h = 0; h < heads[p]; h++) {
            const int d = width[p];
            head[0][p][h] = test_floats((size_t)(D * d), 0);
            head[1][p][h] = test_floats((size_t)(D * d), 0);
            for (int i = 0; i < D; i++)
                for (int c = 0; c < d; c++)
                    head[0][p][h][i * d + c] = m[p][i * heads[p] * d + h * d + c];
            transpose(head[0][p][h], D, d, head[1][p][h]);
        }

    CHECK_CALL(layer_run(&n.cfg, &n.w, B, T, x, y));

    w = n.w; /* separate, biases fused */
    w.b_q = w.b_k = w.b_v = NULL;
    w.b_qkv = b_qkv;
    CHECK_CALL(layer_run(&n.cfg, &w, B, T, x, y2));
    ASSERT(same_result(y, y2, B * T * D));

    w = n.w; /* separate, the other layout */
    w.q = q_t;
    w.k = k_t;
    w.v = v_t;
    w.out = out_t;
    w.layout = MHA_OUT_IN;
    CHECK_CALL(layer_run(&n.cfg, &w, B, T, x, y2));
    ASSERT(same_result(y, y2, B * T * D));

    for (layout = 0; layout < 2; layout++) {
        const float *const *hq = (const float *const *)head[layout][0];
        const float *const *hk = (const float *const *)head[layout][1];
        const float *const *hv = (const float *const *)head[layout][2];
        w = n.w; /* fused, biases separate */
        w.q = w.k = w.v = NULL;
        w.qkv = layout ? fused_t : fused;
        w.out = layout ? out_t : n.w.out;
        w.layout = layout ? MHA_OUT_IN : MHA_IN_OUT;
        CHECK_CALL(layer_run(&n.cfg, &w, B, T, x, y2));
        ASSERT(same_result(y, y2, B * T * D));

        w.b_q = w.b_k = w.b_v = NULL; /* all fused */
        w.b_qkv = b_qkv;
        CHECK_CALL(layer_run(&n.cfg, &w, B, T, x, y2));
        ASSERT(same_result(y, y2, B * T * D));

        memset(gathered, 0xff, D * OUT * sizeof *gathered); /* the heads' own matrices */
        ASSERT_STATUS(MHA_OK, mha_fuse_heads(&n.cfg, w.layout, hq, hk, hv, gathered));
        ASSERT(same_bits(gathered, w.qkv, D * OUT));
        ASSERT(bits_f(gathered[D * OUT]) == bits_f(-1));
        w.qkv = gathered;
        CHECK_CALL(layer_run(&n.cfg, &w, B, T, x, y2));
        ASSERT(same_result(y, y2, B * T * D));
    }

    for (int p = 0; p < 3; p++)
        for (int h = 0; h < heads[p]; h++) {
            free(head[0][p][h]);
            free(head[1][p][h]);
        }
    free(x);
    free(y);
    free(y2);
    free(fused);
    free(fused_t);
    free(gathered);
    free(b_qkv);
    free(q_t);
    free(k_t);
    free(v_t);
    free(out_t);
    net_free(&n);
    PASS();
}

/* ---- all of them ------------------------------------------------------------------------- */

SUITE(stages_suite)
{
    static const int sizes[][4] = { { 1, 1, 1, 1 },   { 2, 3, 4, 5 }, { 3, 17, 2, 64 },
                                    { 1, 40, 8, 33 }, { 0, 3, 2, 4 }, { 2, 0, 2, 4 } };
    mha_isa isa[8];
    char suffix[64];
    const int n = test_isas(isa);

    for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]); i++) {
        const int *s = sizes[i];
        snprintf(suffix, sizeof suffix, "%dx%dx%dx%d", s[0], s[1], s[2], s[3]);
        greatest_set_test_suffix(suffix);
        RUN_TESTp(split_and_merge, s[0], s[1], s[2], s[3]);
    }
    RUN_ON_EACH_ISA(worked_example);
    RUN_ON_EACH_ISA(project_qkv);
    RUN_ON_EACH_ISA(project_out);
    RUN_ON_EACH_ISA(rows_alone);
    RUN_ON_EACH_ISA(weight_forms);
    for (int i = 0; i < n; i++) {
        snprintf(suffix, sizeof suffix, "in_out_%s", mha_isa_name(isa[i]));
        greatest_set_test_suffix(suffix);
        RUN_TESTp(project_self, isa[i], MHA_IN_OUT);
        snprintf(suffix, sizeof suffix, "out_in_%s", mha_isa_name(isa[i]));
        greatest_set_test_suffix(suffix);
        RUN_TESTp(project_self, isa[i], MHA_OUT_IN);
        for (int c = 0; c < (int)(sizeof shapes / sizeof shapes[0]); c++) {
            snprintf(suffix, sizeof suffix, "%s_%s", shapes[c].name, mha_isa_name(isa[i]));
            greatest_set_test_suffix(suffix);
            RUN_TESTp(by_hand, &shapes[c], isa[i]);
        }
    }
}
