/* test_props.c - what must hold whatever the numbers are. Most of it bit for bit. */
#include "fixture.h"

/* mha_sdpa is within 2e-6 max|v| of the exact result (mha.h's promise): two runs that differ in
   rounding only are within twice that of each other. */
static double twice_the_promise(const float *v, size_t n)
{
    double top = 0;
    for (size_t i = 0; i < n; i++)
        if (fabs((double)v[i]) > top) top = fabs((double)v[i]);
    return 4e-6 * top;
}

static int close_to(const float *a, const float *b, size_t n, double tol)
{
    for (size_t i = 0; i < n; i++)
        if (!is_finite(a[i]) || !is_finite(b[i]) || !(fabs((double)a[i] - (double)b[i]) <= tol))
            return 0;
    return 1;
}

static void shuffle(rng *r, int *order, int n)
{
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = rng_int(r, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

/* A problem without the attention weights, for runs with large S. */
static problem lean(mha_isa isa, int B, int H, int G, int T, int S, int dk, int dv, uint64_t seed)
{
    problem p = problem_make(isa, B, H, G, T, S, dk, dv, seed);
    p.a.attn = p.a.attn_mean = NULL;
    return p;
}

/* ---- heads ------------------------------------------------------------------------------- */

/* The layer is the sum of its heads: y = b_out + sum_h head_h W_O[h]. */
TEST sum_of_heads(mha_isa isa)
{
    enum { B = 2, T = 13, D = 30, H = 6, G = 3, DK = 7, DV = 5 };
    net all = net_weights(isa, D, H, G, DK, DV, 0, 0, 21);
    rng r = rng_make(22);
    float *x = rng_floats(&r, B * T * D), *y = test_floats(B * T * D, 0);
    float *part = test_floats(B * T * D, 0);
    double *sum = (double *)calloc(B * T * D, sizeof *sum);
    mha_args a;

    ASSERT(sum != NULL);
    ASSERT_STATUS(MHA_OK, net_create(&all));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.y = y;
    ASSERT_STATUS(MHA_OK, mha_forward(all.layer, &a));
    a.y = part;
    for (int h = 0; h < H; h++) {
        const int g = h / (H / G);
        net one = net_weights(isa, D, 1, 1, DK, DV, 0, 0, 1);
        for (int i = 0; i < D; i++) {
            memcpy(one.m[0] + i * DK, all.m[0] + i * H * DK + h * DK, DK * sizeof(float));
            memcpy(one.m[1] + i * DK, all.m[1] + i * G * DK + g * DK, DK * sizeof(float));
            memcpy(one.m[2] + i * DV, all.m[2] + i * G * DV + g * DV, DV * sizeof(float));
        }
        memcpy(one.m[3], all.m[3] + h * DV * D, DV * D * sizeof(float));
        memcpy(one.m[4], all.m[4] + h * DK, DK * sizeof(float));
        memcpy(one.m[5], all.m[5] + g * DK, DK * sizeof(float));
        memcpy(one.m[6], all.m[6] + g * DV, DV * sizeof(float));
        memcpy(one.m[7], all.m[7], D * sizeof(float));
        if (h > 0) one.w.b_out = NULL;
        ASSERT_STATUS(MHA_OK, net_create(&one));
        ASSERT_STATUS(MHA_OK, mha_forward(one.layer, &a));
        for (int i = 0; i < B * T * D; i++) sum[i] += (double)part[i];
        net_free(&one);
    }
    ASSERT_CLOSE(y, sum, B * T * D, 1e-5 * max_abs(sum, B * T * D));
    free(x);
    free(y);
    free(part);
    free(sum);
    net_free(&all);
    PASS();
}

/* Grouped heads are the same as every head with its own copy of the keys and values. Of one query,
   with as many heads as a tile has rows and more, keys are used where they lie. */
TEST grouped_is_repeated(mha_isa isa)
{
    static const struct {
        int H, G, T, DK;
    } cases[] = {
        { 6, 1, 11, 9 }, { 6, 2, 11, 9 }, { 6, 3, 11, 9 }, { 2, 1, 1, 32 }, { 3, 1, 1, 32 },
        { 4, 1, 1, 32 }, { 5, 1, 1, 32 }, { 6, 1, 1, 32 }, { 7, 1, 1, 32 }, { 9, 1, 1, 32 },
    };
    enum { B = 2, S = 270, DV = 20 };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int H = cases[c].H, G = cases[c].G, T = cases[c].T, DK = cases[c].DK, rep = H / G;
        problem p = problem_make(isa, B, H, G, T, S, DK, DV, 23);
        problem q = problem_make(isa, B, H, H, T, S, DK, DV, 23);
        p.a.mask.causal = q.a.mask.causal = MHA_CAUSAL;
        if (T == 1) p.a.attn = p.a.attn_mean = q.a.attn = q.a.attn_mean = NULL;
        memcpy(q.q, p.q, p.nq * sizeof(float));
        for (int b = 0; b < B; b++)
            for (int h = 0; h < H; h++) {
                memcpy(q.k + (b * H + h) * S * DK, p.k + (b * G + h / rep) * S * DK,
                       (size_t)(S * DK) * sizeof(float));
                memcpy(q.v + (b * H + h) * S * DV, p.v + (b * G + h / rep) * S * DV,
                       S * DV * sizeof(float));
            }
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_STATUS(MHA_OK, problem_run(&q));
        ASSERT(same_result(p.o, q.o, p.no));
        ASSERT(T == 1 || same_result(p.attn, q.attn, p.nattn));
        ASSERT(T == 1 || same_result(p.mean, q.mean, p.nmean));
        ASSERT(same_result(p.lse, q.lse, p.nlse));
        if (G == 1) { /* the same once more: H kv heads in one place, by a stride of 0 */
            q.a.k = p.k;
            q.a.v = p.v;
            q.a.k_stride = (mha_stride){ S * DK, 0, DK };
            q.a.v_stride = (mha_stride){ S * DV, 0, DV };
            ASSERT_STATUS(MHA_OK, problem_run(&q));
            ASSERT(same_result(p.o, q.o, p.no));
        }
        problem_free(&p);
        problem_free(&q);
    }
    PASS();
}

/* ---- keys and queries have no order of their own ----------------------------------------- */

TEST permuted_keys(mha_isa isa)
{
    enum { B = 2, H = 2, T = 9, S = 300, DK = 17, DV = 12 };
    problem p = lean(isa, B, H, H, T, S, DK, DV, 24);
    problem q = lean(isa, B, H, H, T, S, DK, DV, 24);
    rng r = rng_make(25);
    float *bias = rng_floats(&r, T * S), *bias2 = test_floats(T * S, 0);
    double tol;
    int order[S];

    shuffle(&r, order, S);
    for (int h = 0; h < B * H; h++)
        for (int j = 0; j < S; j++) {
            memcpy(q.k + (h * S + j) * DK, p.k + (h * S + order[j]) * DK, DK * sizeof(float));
            memcpy(q.v + (h * S + j) * DV, p.v + (h * S + order[j]) * DV, DV * sizeof(float));
        }
    for (int i = 0; i < T; i++)
        for (int j = 0; j < S; j++) bias2[i * S + j] = bias[i * S + order[j]];
    tol = twice_the_promise(p.v, p.nv);
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT_STATUS(MHA_OK, problem_run(&q));
    ASSERT(close_to(p.o, q.o, p.no, tol));
    ASSERT(close_to(p.lse, q.lse, p.nlse, 2e-6 * 8)); /* twice 1e-6 (1 + lse), lse about 7 */
    p.a.mask.bias = bias;
    q.a.mask.bias = bias2;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT_STATUS(MHA_OK, problem_run(&q));
    ASSERT(close_to(p.o, q.o, p.no, tol));
    free(bias);
    free(bias2);
    problem_free(&p);
    problem_free(&q);
    PASS();
}

/* A row of the output depends on its own query: permuting queries permutes rows, bit for bit. */
TEST permuted_queries(mha_isa isa)
{
    enum { H = 3, T = 75, S = 140, DK = 13, DV = 19 };
    problem p = problem_make(isa, 1, H, H, T, S, DK, DV, 26);
    problem q = problem_make(isa, 1, H, H, T, S, DK, DV, 26);
    rng r = rng_make(27);
    int order[T];

    shuffle(&r, order, T);
    for (int h = 0; h < H; h++)
        for (int i = 0; i < T; i++)
            memcpy(q.q + (h * T + i) * DK, p.q + (h * T + order[i]) * DK, DK * sizeof(float));
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT_STATUS(MHA_OK, problem_run(&q));
    for (int h = 0; h < H; h++)
        for (int i = 0; i < T; i++) {
            const int to = h * T + i, from = h * T + order[i];
            ASSERT(same_result(q.o + to * DV, p.o + from * DV, DV));
            ASSERT(same_result(q.lse + to, p.lse + from, 1));
            ASSERT(same_result(q.attn + to * S, p.attn + from * S, S));
        }
    problem_free(&p);
    problem_free(&q);
    PASS();
}

/* ---- causality: what comes later changes nothing ----------------------------------------- */

/* The first n tokens of a causal run are a run on n tokens. */
TEST causal_prefix(mha_isa isa)
{
    static const int prefix[] = { 1, 2, 15, 16, 17, 63, 64, 100, 255, 256, 257, 299 };
    enum { B = 2, H = 4, G = 2, N = 300, DK = 11, DV = 8, D = 24 };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 28);
    problem p = problem_make(isa, B, H, G, N, N, DK, DV, 29);
    rng r = rng_make(30);
    float *x = rng_floats(&r, B * N * D), *y = test_floats(B * N * D, 0);
    float *y2 = test_floats(N * D, 0);
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = N;
    a.x = x;
    a.y = y;
    a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    p.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));

    for (int c = 0; c < (int)(sizeof prefix / sizeof prefix[0]); c++) {
        const int t = prefix[c];
        problem q = problem_make(isa, B, H, G, t, t, DK, DV, 1);
        for (int kind = 0; kind < 2; kind++) {
            q.a.q = p.q;
            q.a.k = p.k;
            q.a.v = p.v;
            q.a.q_stride = (mha_stride){ H * N * DK, N * DK, DK };
            q.a.k_stride = (mha_stride){ G * N * DK, N * DK, DK };
            q.a.v_stride = (mha_stride){ G * N * DV, N * DV, DV };
            q.a.mask.causal = kind ? MHA_CAUSAL_UPPER_LEFT : MHA_CAUSAL;
            ASSERT_STATUS(MHA_OK, problem_run(&q));
            for (int h = 0; h < B * H; h++) {
                ASSERT(same_result(q.o + h * t * DV, p.o + h * N * DV, (size_t)(t * DV)));
                ASSERT(same_result(q.lse + h * t, p.lse + h * N, (size_t)t));
                for (int i = 0; i < t; i++)
                    ASSERT(
                        same_result(q.attn + (h * t + i) * t, p.attn + (h * N + i) * N, (size_t)t));
            }
        }
        problem_free(&q);

        for (int b = 0; b < B; b++) {
            a.batch = 1;
            a.seq = t;
            a.x = x + b * N * D;
            a.y = y2;
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            ASSERT(same_result(y2, y + b * N * D, (size_t)(t * D)));
        }
    }
    free(x);
    free(y);
    free(y2);
    net_free(&n);
    problem_free(&p);
    PASS();
}

/* All at once, in ragged chunks, and one by one, as a cache would do it: queries i0 .. i1-1 with
   the keys 0 .. i1-1, lower-right aligned. */
TEST chunks(mha_isa isa, int G, int d)
{
    enum { H = 4, N = 530 };
    problem p = lean(isa, 1, H, G, N, N, d, d, 31);
    problem q = lean(isa, 1, H, G, N, N, d, d, 31);
    rng r = rng_make(32);

    p.a.mask.causal = q.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int way = 0; way < 3; way++) { /* one by one, small chunks, large chunks */
        q.a.lse = NULL;
        memset(q.o, 0xff, q.no * sizeof(float));
        for (int i0 = 0, i1; i0 < N; i0 = i1) {
            float lse[H * N];
            i1 = i0 + (way == 0 ? 1 : rng_int(&r, 1, way == 1 ? 20 : 300));
            if (i1 > N) i1 = N;
            q.a.seq = i1 - i0;
            q.a.source_seq = i1;
            q.a.q = q.q + i0 * d;
            q.a.o = q.o + i0 * d;
            q.a.lse = lse;
            q.a.q_stride = (mha_stride){ H * N * d, N * d, d };
            q.a.k_stride = (mha_stride){ G * N * d, N * d, d };
            q.a.v_stride = q.a.k_stride;
            q.a.o_stride = q.a.q_stride;
            ASSERT_STATUS(MHA_OK, mha_sdpa(&q.a));
            for (int h = 0; h < H; h++)
                ASSERT(same_result(lse + h * (i1 - i0), p.lse + h * N + i0, (size_t)(i1 - i0)));
        }
        ASSERT(same_result(q.o, p.o, p.no));
    }
    problem_free(&p);
    problem_free(&q);
    PASS();
}

/* key_len = n is a source of n keys. */
TEST key_len_is_truncation(mha_isa isa)
{
    static const int len[] = { 0, 1, 16, 255, 256, 257, 300, 511, 513, 529, 530 };
    enum { B = 11, H = 2, G = 1, T = 7, S = 530, DK = 10, DV = 6 };
    problem p = problem_make(isa, B, H, G, T, S, DK, DV, 33);
    p.a.mask.key_len = len;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int b = 0; b < B; b++) {
        const int n = len[b];
        problem q = problem_make(isa, 1, H, G, T, n, DK, DV, 1);
        q.a.q = p.q + b * H * T * DK;
        q.a.k = p.k + b * G * S * DK;
        q.a.v = p.v + b * G * S * DV;
        q.a.k_stride = (mha_stride){ G * S * DK, S * DK, DK };
        q.a.v_stride = (mha_stride){ G * S * DV, S * DV, DV };
        ASSERT_STATUS(MHA_OK, problem_run(&q));
        ASSERT(same_result(q.o, p.o + b * H * T * DV, q.no));
        ASSERT(same_result(q.lse, p.lse + b * H * T, q.nlse));
        for (int row = 0; row < H * T; row++) {
            const float *attn = p.attn + (b * H * T + row) * S;
            ASSERT(same_result(q.attn + row * n, attn, (size_t)n));
            for (int j = n; j < S; j++) ASSERT(bits_f(attn[j]) << 1 == 0);
        }
        problem_free(&q);
    }
    problem_free(&p);
    PASS();
}

/* ---- masks that say the same ------------------------------------------------------------- */

/* Causal by name, as a boolean mask, and as an additive one. */
TEST causal_as_a_mask(mha_isa isa)
{
    static const int sizes[][2] = { { 33, 33 }, { 5, 300 }, { 300, 40 }, { 270, 290 }, { 1, 9 } };
    enum { B = 2, H = 4, G = 2, DK = 9, DV = 21 };
    for (int c = 0; c < (int)(sizeof sizes / sizeof sizes[0]); c++) {
        const int T = sizes[c][0], S = sizes[c][1];
        problem p = problem_make(isa, B, H, G, T, S, DK, DV, 34);
        unsigned char *allow = (unsigned char *)malloc((size_t)(T * S));
        float *bias = test_floats((size_t)(T * S), 0);
        result want;
        ASSERT(allow != NULL);
        for (int kind = 0; kind < 2; kind++) {
            memset(&p.a.mask, 0, sizeof p.a.mask);
            p.a.mask.causal = kind ? MHA_CAUSAL_UPPER_LEFT : MHA_CAUSAL;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            want = result_of(&p);
            for (int i = 0; i < T; i++)
                for (int j = 0; j < S; j++) {
                    allow[i * S + j] = (unsigned char)(j <= i + (kind ? 0 : S - T));
                    bias[i * S + j] = allow[i * S + j] ? 0.0f : F_NINF;
                }
            for (int way = 0; way < 3; way++) {
                memset(&p.a.mask, 0, sizeof p.a.mask);
                if (way != 1) p.a.mask.allow = allow;
                if (way != 0) p.a.mask.bias = bias;
                ASSERT_STATUS(MHA_OK, problem_run(&p));
                ASSERT(same_result(p.o, want.o, p.no));
                ASSERT(same_result(p.lse, want.lse, p.nlse));
                ASSERT(same_result(p.attn, want.attn, p.nattn));
                ASSERT(same_result(p.mean, want.mean, p.nmean));
            }
            result_free(&want);
        }
        free(allow);
        free(bias);
        problem_free(&p);
    }
    PASS();
}

/* Masks that exclude nothing and add nothing, in every shape they come in. */
TEST empty_masks(mha_isa isa)
{
    enum { B = 2, H = 3, T = 20, S = 280, DK = 15, DV = 10 };
    problem p = problem_make(isa, B, H, H, T, S, DK, DV, 35);
    static const mha_mask_stride strides[] = { { 0, 0, 0, 0 },     { S, 0, 0, 1 },
                                               { T * S, 0, S, 1 }, { H * T * S, T * S, S, 1 },
                                               { 0, 0, 1, T },     { 1, 0, 0, 0 } };
    unsigned char *allow = (unsigned char *)malloc(B * H * T * S);
    float *bias = test_floats(B * H * T * S, 0);
    const int len[B] = { S, S };
    result want;

    ASSERT(allow != NULL);
    memset(allow, 1, B * H * T * S);
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (int c = 0; c < 6; c++)
        for (int way = 1; way < 8; way++) {
            memset(&p.a.mask, 0, sizeof p.a.mask);
            p.a.mask.allow_stride = p.a.mask.bias_stride = strides[c];
            p.a.mask.allow = way & 1 ? allow : NULL;
            p.a.mask.bias = way & 2 ? bias : NULL;
            p.a.mask.key_len = way & 4 ? len : NULL;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(same_result(p.o, want.o, p.no));
            ASSERT(same_result(p.lse, want.lse, p.nlse));
            ASSERT(same_result(p.attn, want.attn, p.nattn));
            ASSERT(same_result(p.mean, want.mean, p.nmean));
        }
    result_free(&want);
    free(allow);
    free(bias);
    problem_free(&p);
    PASS();
}

/* ---- what must not matter ---------------------------------------------------------------- */

/* Element b alone is element b in the batch. */
TEST batch_independence(mha_isa isa)
{
    enum { B = 5, T = 29, S = 270, D = 26, H = 4, G = 2, DK = 9, DV = 14 };
    static const int len[B] = { S, 100, 256, 0, 1 };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 36);
    rng r = rng_make(37);
    float *x = rng_floats(&r, B * T * D), *source = rng_floats(&r, B * S * D);
    float *bias = rng_floats(&r, B * T * S);
    float *y = test_floats(B * T * D, 0), *y2 = test_floats(T * D, 0);
    float *attn = test_floats(B * H * T * S, 0), *attn2 = test_floats(H * T * S, 0);
    problem p = problem_make(isa, B, H, G, T, S, DK, DV, 38);
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.source_seq = S;
    a.x = x;
    a.source = source;
    a.y = y;
    a.attn = attn;
    a.mask.key_len = len;
    a.mask.bias = bias;
    a.mask.bias_stride = (mha_mask_stride){ T * S, 0, S, 1 };
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    p.a.mask = a.mask;
    ASSERT_STATUS(MHA_OK, problem_run(&p));

    for (int b = 0; b < B; b++) {
        problem q = problem_make(isa, 1, H, G, T, S, DK, DV, 1);
        a.batch = 1;
        a.x = x + b * T * D;
        a.source = source + b * S * D;
        a.y = y2;
        a.attn = attn2;
        a.mask.key_len = len + b;
        a.mask.bias = bias + b * T * S;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        ASSERT(same_result(y2, y + b * T * D, T * D));
        ASSERT(same_result(attn2, attn + b * H * T * S, H * T * S));
        q.a.q = p.q + b * H * T * DK;
        q.a.k = p.k + b * G * S * DK;
        q.a.v = p.v + b * G * S * DV;
        q.a.mask = a.mask;
        ASSERT_STATUS(MHA_OK, problem_run(&q));
        ASSERT(same_result(q.o, p.o + b * H * T * DV, q.no));
        ASSERT(same_result(q.lse, p.lse + b * H * T, q.nlse));
        ASSERT(same_result(q.attn, p.attn + b * H * T * S, q.nattn));
        ASSERT(same_result(q.mean, p.mean + b * T * S, q.nmean));
        problem_free(&q);
    }
    free(x);
    free(source);
    free(bias);
    free(y);
    free(y2);
    free(attn);
    free(attn2);
    net_free(&n);
    problem_free(&p);
    PASS();
}

/* A sequence alone is that sequence among so many that they fit no cache: what one tile uses where it
   lies, and the next head, are asked for together. */
TEST many_short_sequences(mha_isa isa)
{
    enum { D = 256, B = 350, T = 6 };
    net n = net_weights(isa, D, 1, 1, D, D, 0, 0, 96);
    rng r = rng_make(97);
    float *x = rng_floats(&r, B * T * D), *y = test_floats(T * D, 0),
          *all = test_floats(B * T * D, 0);
    mha_args a;
    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.y = all;
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    a.batch = 1;
    a.y = y;
    for (int b = 0; b < B; b += 58) {
        a.x = x + b * T * D;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        ASSERT(same_result(y, all + b * T * D, T * D));
    }
    free(x);
    free(y);
    free(all);
    net_free(&n);
    PASS();
}

/* A token alone is that token among others where weights are more than L2 is taken to hold, and few
   rows take the terms of several panels in turn, or a page at a time. D is no multiple of 16, nor of the
   terms; q, k and v have 35 panels each, the last group three. */
TEST large_weights(mha_isa isa)
{
    enum { D = 725, H = 5, DK = 100, M = 13 };
    for (int type = MHA_F32; type <= MHA_INT8; type++) {
        net n = net_weights(isa, D, H, H, DK, DK, 0, 0, 94);
        rng r = rng_make(95);
        float *x = rng_floats(&r, M * D), *y = test_floats(M * D, 0), *all = test_floats(M * D, 0);
        mha_args a;
        n.cfg.weight_type = (mha_type)type;
        ASSERT_STATUS(MHA_OK, net_create(&n));
        memset(&a, 0, sizeof a);
        a.seq = 1;
        for (int m = 0; m <= M; m += m < 8 ? 1 : M - 8) { /* 0: each alone */
            a.batch = m ? m : 1;
            for (int i = 0; i < (m ? 1 : M); i++) {
                a.x = x + i * D;
                a.y = (m ? y : all) + i * D;
                ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            }
            if (m) ASSERT(same_result(y, all, (size_t)m * D));
        }
        free(x);
        free(y);
        free(all);
        net_free(&n);
    }
    PASS();
}

typedef struct tasks {
    rng r;
    int most, bad;
} tasks;

static void shuffled_for(void *ctx, int n, mha_task task, void *arg)
{
    tasks *t = (tasks *)ctx;
    int order[8];
    if (n > t->most || n > 8) {
        t->bad = 1;
        for (int i = 0; i < n; i++) task(arg, i);
        return;
    }
    shuffle(&t->r, order, n);
    for (int i = 0; i < n; i++) task(arg, order[i]);
}

/* Element b alone is element b in a batch that is more than caches hold, where the next head is asked
   for ahead: values in place, k and v packed by each lane or for all of them, and those of a layer. */
TEST large_batch(mha_isa isa)
{
    enum { B = 101, H = 4, G = 2, T = 20, S = 24, DK = 64, D = 6 };
    net n = net_weights(isa, D, H, G, DK, DK, 0, 0, 90);
    rng r = rng_make(91);
    float *x = rng_floats(&r, B * S * D), *y = test_floats(B * S * D, 0);
    float *y2 = test_floats(S * D, 0);
    tasks t;
    mha_args a;

    for (int how = 0; how < 4; how++) {
        const int dv = how < 2 ? DK : DK - 4;
        problem p = problem_make(isa, B, H, G, T, S, DK, dv, 92 + (uint64_t)how);
        problem one = problem_make(isa, 1, H, G, T, S, DK, dv, 1);
        p.a.mask.causal = one.a.mask.causal = MHA_CAUSAL;
        if (how % 2 == 0) p.a.attn = p.a.attn_mean = one.a.attn = one.a.attn_mean = NULL;
        if (how == 2) {
            memset(&t, 0, sizeof t);
            t.r = rng_make(93);
            p.a.parallel.parallel_for = shuffled_for;
            p.a.parallel.ctx = &t;
            p.a.parallel.threads = t.most = 3;
        }
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        for (size_t b = 0; b < B; b++) {
            one.a.q = p.q + b * one.nq;
            one.a.k = p.k + b * one.nk;
            one.a.v = p.v + b * one.nv;
            ASSERT_STATUS(MHA_OK, problem_run(&one));
            ASSERT(same_result(one.o, p.o + b * one.no, one.no));
            ASSERT(same_result(one.lse, p.lse + b * one.nlse, one.nlse));
            if (how % 2) ASSERT(same_result(one.attn, p.attn + b * one.nattn, one.nattn));
        }
        problem_free(&p);
        problem_free(&one);
    }

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = S;
    a.x = x;
    a.y = y;
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    a.batch = 1;
    a.y = y2;
    for (int b = 0; b < B; b++) {
        a.x = x + b * S * D;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        ASSERT(same_result(y2, y + b * S * D, S * D));
    }
    net_free(&n);
    free(x);
    free(y);
    free(y2);
    PASS();
}

/* A batch of more sequences than are done at a time: each alone is itself in the batch, whatever comes
   with it, in self- and in cross-attention, on one thread and on three. */
TEST groups_of_sequences(mha_isa isa)
{
    enum { B = 67, T = 37, S = 45, D = 24, H = 4, G = 2, DK = 64, DV = 60, DS = 20, DSV = 12 };
    static int len[B], start[B], positions[B * T], source_positions[B * S];
    rng r = rng_make(94);
    float *x = rng_floats(&r, B * T * D), *source = rng_floats(&r, B * S * DS);
    float *source_v = rng_floats(&r, B * S * DSV);
    float *bias = rng_floats(&r, B * T * S), *gate = rng_floats(&r, B * T * H);
    unsigned char *allow = (unsigned char *)malloc(B * S),
                  *padding = (unsigned char *)malloc(B * S);
    float *y = test_floats(B * T * D, 0), *y1 = test_floats(T * D, 0);
    float *attn = test_floats(B * H * T * S, 0), *attn1 = test_floats(H * T * S, 0);
    float *mean = test_floats(B * T * S, 0), *mean1 = test_floats(T * S, 0);
    float *lse = test_floats(B * H * T, 0), *lse1 = test_floats(H * T, 0);
    tasks t;

    ASSERT(allow != NULL && padding != NULL);
    for (int b = 0; b < B; b++) len[b] = rng_int(&r, T / 2, T), start[b] = rng_int(&r, 0, T / 3);
    for (int i = 0; i < B * T; i++) positions[i] = rng_int(&r, 0, 500);
    for (int i = 0; i < B * S; i++) {
        source_positions[i] = rng_int(&r, 0, 500);
        allow[i] = rng_int(&r, 0, 9) > 0;
        padding[i] = rng_int(&r, 0, 9) == 0;
    }
    for (int how = 0; how < 4; how++) {
        const int cross = how % 2, keys = cross ? S : T;
        net n = net_weights(isa, D, H, G, DK, DV, cross ? DS : 0, cross ? DSV : 0, 95);
        size_t bytes = 0, one_more = 0, alone = 0;
        mha_args a = { 0 }, one;
        n.cfg.rope.layout = MHA_ROPE_HALF;
        ASSERT_STATUS(MHA_OK, net_create(&n));
        a.batch = B, a.seq = T, a.x = x, a.y = y;
        if (cross) {
            a.source = source, a.source_v = source_v, a.source_seq = S;
            a.source_positions = source_positions;
        }
        a.positions = positions;
        a.mask.allow = allow, a.mask.allow_stride = (mha_mask_stride){ S, 0, 0, 1 };
        a.mask.bias = bias, a.mask.bias_stride = (mha_mask_stride){ T * S, 0, S, 1 };
        a.mask.key_len = len, a.mask.key_start = start, a.mask.key_padding = padding;
        a.gate = gate, a.gate_stride = (mha_gate_stride){ T * H, H, 1 };
        a.attn = attn, a.attn_mean = mean, a.lse = lse;
        one = a;
        memset(&t, 0, sizeof t);
        t.r = rng_make(96);
        t.most = 3;
        if (how >= 2)
            a.parallel.parallel_for = shuffled_for, a.parallel.ctx = &t, a.parallel.threads = 3;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &a, &bytes));
        one.parallel = a.parallel;
        one.batch = 2;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &one, &one_more));
        one.batch = 1;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &one, &alone));
        ASSERTm("not more than one group", bytes < alone + 3 * B / 4 * (one_more - alone));
        memset(&one.parallel, 0, sizeof one.parallel);
        if (how % 2 == 0) { /* y over x */
            memcpy(y, x, B * T * D * sizeof(float));
            a.x = y;
        }
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        one.batch = 1, one.y = y1, one.attn = attn1, one.attn_mean = mean1, one.lse = lse1;
        for (int b = 0; b < B; b++) {
            one.x = x + b * T * D;
            if (cross) {
                one.source = source + b * S * DS, one.source_v = source_v + b * S * DSV;
                one.source_positions = source_positions + b * S;
            }
            one.positions = positions + b * T;
            one.mask.allow = allow + b * S;
            one.mask.bias = bias + b * T * S;
            one.mask.key_len = len + b, one.mask.key_start = start + b;
            one.mask.key_padding = padding + b * keys;
            one.gate = gate + b * T * H;
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &one));
            ASSERT(same_result(y1, y + b * T * D, T * D));
            ASSERT(same_result(attn1, attn + b * H * T * keys, (size_t)(H * T * keys)));
            ASSERT(same_result(mean1, mean + b * T * keys, (size_t)(T * keys)));
            ASSERT(same_result(lse1, lse + b * H * T, H * T));
        }
        net_free(&n);
    }
    free(x), free(source), free(source_v), free(bias), free(gate), free(allow), free(padding);
    free(y), free(y1), free(attn), free(attn1), free(mean), free(mean1), free(lse), free(lse1);
    PASS();
}

/* Each sequence alone is itself in a batch of any size, around that of a group (64 here): keys of a
   sequence begin a panel of 16, so that they take more room than they have rows. */
TEST batches_of_any_size(mha_isa isa)
{
    enum { B = 68, T = 3, D = 4, H = 4, DK = 176 };
    net n = net_weights(isa, D, H, H, DK, DK, 0, 0, 98);
    rng r = rng_make(99);
    float *x = rng_floats(&r, B * T * D), *y = test_floats(B * T * D, 0);
    float *alone = test_floats(B * T * D, 0);
    mha_args a = { 0 };
    ASSERT_STATUS(MHA_OK, net_create(&n));
    a.batch = 1, a.seq = T;
    for (int b = 0; b < B; b++) {
        a.x = x + b * T * D, a.y = alone + b * T * D;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    }
    a.x = x, a.y = y;
    for (a.batch = 1; a.batch <= B; a.batch++) {
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        ASSERT(same_result(y, alone, (size_t)(a.batch * T * D)));
    }
    net_free(&n);
    free(x), free(y), free(alone);
    PASS();
}

/* 1, 2, 3, 8 tasks, in any order. */
TEST tasks_in_any_order(mha_isa isa)
{
    static const int counts[] = { 1, 2, 3, 8 };
    enum { B = 2, T = 90, D = 50, H = 4, G = 2, DK = 9, DV = 14 };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 39);
    rng r = rng_make(40);
    float *x = rng_floats(&r, B * T * D);
    float *y[2] = { test_floats(B * T * D, 0), test_floats(B * T * D, 0) };
    float *attn[2] = { test_floats(B * H * T * T, 0), test_floats(B * H * T * T, 0) };
    float *mean[2] = { test_floats(B * T * T, 0), test_floats(B * T * T, 0) };
    float *lse[2] = { test_floats(B * H * T, 0), test_floats(B * H * T, 0) };
    problem p = problem_make(isa, B, H, G, T, 300, DK, DV, 41);
    result want;
    mha_args a;
    tasks t;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.mask.causal = p.a.mask.causal = MHA_CAUSAL;
    a.y = y[0];
    a.attn = attn[0];
    a.attn_mean = mean[0];
    a.lse = lse[0];
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);

    t.r = rng_make(42);
    t.bad = 0;
    a.y = y[1];
    a.attn = attn[1];
    a.attn_mean = mean[1];
    a.lse = lse[1];
    for (int c = 0; c < 4; c++)
        for (int again = 0; again < 3; again++) {
            t.most = counts[c];
            a.parallel.parallel_for = shuffled_for;
            a.parallel.ctx = &t;
            a.parallel.threads = counts[c];
            p.a.parallel = a.parallel;
            memset(y[1], 0xff, B * T * D * sizeof(float));
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            ASSERT(same_result(y[1], y[0], B * T * D));
            ASSERT(same_result(attn[1], attn[0], B * H * T * T));
            ASSERT(same_result(mean[1], mean[0], B * T * T));
            ASSERT(same_result(lse[1], lse[0], B * H * T));
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(same_result(p.o, want.o, p.no));
            ASSERT(same_result(p.attn, want.attn, p.nattn));
            ASSERT(same_result(p.mean, want.mean, p.nmean));
            ASSERT(same_result(p.lse, want.lse, p.nlse));
            ASSERT(!t.bad);
        }
    result_free(&want);
    for (int i = 0; i < 2; i++) {
        free(y[i]);
        free(attn[i]);
        free(mean[i]);
        free(lse[i]);
    }
    free(x);
    net_free(&n);
    problem_free(&p);
    PASS();
}

/* Asking for attn, attn_mean or lse changes nothing else. */
TEST requests(mha_isa isa)
{
    enum { B = 2, T = 37, D = 30, H = 4, G = 2, DK = 9, DV = 14, N = B * T * D };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 43);
    rng r = rng_make(44);
    float *x = rng_floats(&r, N), *y = test_floats(N, 0);
    float *attn = test_floats(B * H * T * T, 0), *mean = test_floats(B * T * T, 0);
    float *lse = test_floats(B * H * T, 0);
    problem p = problem_make(isa, B, H, G, T, 300, DK, DV, 45);
    float *y0 = test_floats(N, 0);
    result all;
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    a.y = y0;
    a.mask.causal = p.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
    a.y = y;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    all = result_of(&p);
    for (int ask = 0; ask < 8; ask++) {
        a.attn = ask & 1 ? attn : NULL;
        a.attn_mean = ask & 2 ? mean : NULL;
        a.lse = ask & 4 ? lse : NULL;
        memset(y, 0xff, N * sizeof *y);
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        ASSERT(same_result(y, y0, N));
        p.a.attn = ask & 1 ? p.attn : NULL;
        p.a.attn_mean = ask & 2 ? p.mean : NULL;
        p.a.lse = ask & 4 ? p.lse : NULL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(same_result(p.o, all.o, p.no));
        if (p.a.attn) ASSERT(same_result(p.attn, all.attn, p.nattn));
        if (p.a.attn_mean) ASSERT(same_result(p.mean, all.mean, p.nmean));
        if (p.a.lse) ASSERT(same_result(p.lse, all.lse, p.nlse));
    }
    result_free(&all);
    free(x);
    free(y);
    free(y0);
    free(attn);
    free(mean);
    free(lse);
    net_free(&n);
    problem_free(&p);
    PASS();
}

/* y may be x, o may be q. */
TEST in_place(mha_isa isa)
{
    enum { B = 2, T = 83, D = 40, H = 5, DK = 8, S = 90 };
    for (int cross = 0; cross < 2; cross++)
        for (int threads = 0; threads < 3; threads += 2) {
            net n = net_weights(isa, D, H, H, DK, DK, 0, 0, 46);
            rng r = rng_make(47);
            float *x = rng_floats(&r, B * T * D), *source = rng_floats(&r, B * S * D);
            float *y = test_floats(B * T * D, 0), *lse = test_floats(B * H * T, 0);
            problem p = lean(isa, B, H, H, T, S, DK, DK, 48);
            result want;
            tasks t;
            mha_args a;

            ASSERT_STATUS(MHA_OK, net_create(&n));
            memset(&a, 0, sizeof a);
            a.batch = B;
            a.seq = T;
            a.source_seq = cross ? S : T;
            a.x = x;
            a.source = cross ? source : NULL;
            a.y = y;
            a.lse = lse;
            a.mask.causal = MHA_CAUSAL;
            t.r = rng_make(49);
            t.bad = 0;
            t.most = threads;
            if (threads) {
                a.parallel.parallel_for = shuffled_for;
                a.parallel.ctx = &t;
                a.parallel.threads = threads;
            }
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            a.y = x;
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            ASSERT(same_result(x, y, B * T * D));

            p.a.parallel = a.parallel;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            want = result_of(&p);
            p.a.o = p.q;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(same_result(p.q, want.o, p.no));
            ASSERT(same_result(p.lse, want.lse, p.nlse));
            result_free(&want);
            free(x);
            free(source);
            free(y);
            free(lse);
            net_free(&n);
            problem_free(&p);
        }
    PASS();
}

/* ---- numbers ----------------------------------------------------------------------------- */

TEST weights_sum_to_one(mha_isa isa)
{
    enum { B = 2, H = 3, T = 60, S = 545, DK = 12 };
    problem p = problem_make(isa, B, H, 1, T, S, DK, DK, 50);
    static const float scales[] = { 0, 0.01f, 5 };
    for (int c = 0; c < 3; c++) {
        p.a.mask.causal = c == 1 ? MHA_NOT_CAUSAL : MHA_CAUSAL_UPPER_LEFT;
        p.a.scale = scales[c];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        for (int row = 0; row < B * H * T; row++) {
            double sum = 0;
            for (int j = 0; j < S; j++) {
                const float w = p.attn[row * S + j];
                ASSERT(is_finite(w) && w >= 0 && w <= 1.000001f);
                sum += (double)w;
            }
            /* the 2e-6 of mha_sdpa for v = 1 everywhere */
            if (!(fabs(sum - 1) <= 2e-6)) FAILm("a row of weights does not sum to one");
        }
        for (int row = 0; row < B * T; row++) {
            double sum = 0;
            for (int j = 0; j < S; j++) sum += (double)p.mean[row * S + j];
            if (!(fabs(sum - 1) <= 2e-6)) FAILm("a row of mean weights does not sum to one");
        }
    }
    problem_free(&p);
    PASS();
}

/* Values that are all the same come out as they went in, within the promise. */
TEST constant_values(mha_isa isa)
{
    enum { H = 2, T = 10, S = 600, DK = 8, DV = 5 };
    problem p = problem_make(isa, 1, H, H, T, S, DK, DV, 51);
    for (size_t i = 0; i < p.nv; i++) p.v[i] = 3.0f;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (size_t i = 0; i < p.no; i++)
        if (!(fabs((double)p.o[i] - 3) <= 2e-6 * 3)) FAILm("the mean of equal values is another");
    problem_free(&p);
    PASS();
}

/* scale s is the default scale with q times s sqrt(d_k). */
TEST scale_is_scaled_q(mha_isa isa)
{
    static const float factors[] = { 0.125f, 0.7f, 1.0f, 3.0f };
    enum { B = 2, H = 3, T = 17, S = 270, DK = 20, DV = 9 };
    for (int c = 0; c < 4; c++) {
        problem p = lean(isa, B, H, 1, T, S, DK, DV, 52);
        problem q = lean(isa, B, H, 1, T, S, DK, DV, 52);
        /* scores three times as large carry three times the rounding error */
        const double grow = factors[c] > 1 ? (double)factors[c] : 1;
        const double tol = grow * twice_the_promise(p.v, p.nv);
        p.a.scale = (float)((double)factors[c] / sqrt((double)DK));
        for (size_t i = 0; i < q.nq; i++) q.q[i] *= factors[c];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_STATUS(MHA_OK, problem_run(&q));
        ASSERT(close_to(p.o, q.o, p.no, tol));
        problem_free(&p);
        problem_free(&q);
    }
    PASS();
}

/* ---- all of them ------------------------------------------------------------------------- */

SUITE(props_suite)
{
    static const int chunk_shapes[][2] = { { 4, 7 }, { 2, 16 }, { 1, 33 } }; /* G, d */
    mha_isa isa[8];
    char suffix[64];
    const int n = test_isas(isa);

    RUN_ON_EACH_ISA(sum_of_heads);
    RUN_ON_EACH_ISA(grouped_is_repeated);
    RUN_ON_EACH_ISA(permuted_keys);
    RUN_ON_EACH_ISA(permuted_queries);
    RUN_ON_EACH_ISA(causal_prefix);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 3; c++) {
            const int *s = chunk_shapes[c];
            snprintf(suffix, sizeof suffix, "%d_kv_heads_of_%d_%s", s[0], s[1],
                     mha_isa_name(isa[i]));
            greatest_set_test_suffix(suffix);
            RUN_TESTp(chunks, isa[i], s[0], s[1]);
        }
    RUN_ON_EACH_ISA(key_len_is_truncation);
    RUN_ON_EACH_ISA(causal_as_a_mask);
    RUN_ON_EACH_ISA(empty_masks);
    RUN_ON_EACH_ISA(batch_independence);
    RUN_ON_EACH_ISA(large_batch);
    RUN_ON_EACH_ISA(groups_of_sequences);
    RUN_ON_EACH_ISA(batches_of_any_size);
    RUN_ON_EACH_ISA(large_weights);
    RUN_ON_EACH_ISA(many_short_sequences);
    RUN_ON_EACH_ISA(tasks_in_any_order);
    RUN_ON_EACH_ISA(requests);
    RUN_ON_EACH_ISA(in_place);
    RUN_ON_EACH_ISA(weights_sum_to_one);
    RUN_ON_EACH_ISA(constant_values);
    RUN_ON_EACH_ISA(scale_is_scaled_q);
}
