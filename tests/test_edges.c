/* test_edges.c - the corners: nothing visible, nothing there, NaN where nobody looks, numbers
   at the end of the range, sizes that fit no vector. */
#include "fixture.h"

static const float *row_of(const float *p, const mha_sdpa_args *a, int b, int h, int i, int width)
{
    return p + (size_t)((b * a->heads + h) * a->seq + i) * (size_t)width;
}

static int all_zero(const float *p, int n)
{
    for (int i = 0; i < n; i++)
        if (bits_f(p[i]) & 0x7fffffffu) return 0;
    return 1;
}

static int all_nan(const float *p, int n)
{
    for (int i = 0; i < n; i++)
        if (!is_nan(p[i])) return 0;
    return 1;
}

static double largest(const float *p, size_t n)
{
    double m = 0.0;
    for (size_t i = 0; i < n; i++)
        if (fabs((double)p[i]) > m) m = fabs((double)p[i]);
    return m;
}

#define EACH_ROW(a, b, h, i) \
    for (int b = 0; b < (a)->batch; b++) \
        for (int h = 0; h < (a)->heads; h++) \
            for (int i = 0; i < (a)->seq; i++)

/* Rows that see no key: o, weights and log-sum-exp are exactly 0, 0 and -inf. Gives back how
   many there are. */
TEST dead_rows(const problem *p, int *count)
{
    const mha_sdpa_args *a = &p->a;
    *count = 0;
    EACH_ROW(a, b, h, i)
    {
        if (!is_dead(a, b, h, i)) continue;
        ++*count;
        ASSERTm("o of a row that sees nothing", all_zero(row_of(p->o, a, b, h, i, a->d_v), a->d_v));
        ASSERT_EQ_FMTm("lse of a row that sees nothing", 0xff800000u,
                       (unsigned)bits_f(*row_of(p->lse, a, b, h, i, 1)), "%08x");
        if (a->attn)
            ASSERTm("attn of a row that sees nothing",
                    all_zero(row_of(p->attn, a, b, h, i, a->source_seq), a->source_seq));
    }
    PASS();
}

/* Runs p with and without the weights and compares everything with the formula. tol is for o,
   as a multiple of max|v|; the header promises 2e-6 on N(0,1) data. A weight is at most 1, so
   the same tol serves for attn; the log-sum-exp is a score: tol times its size or 1. */
TEST agrees(problem *p, double tol, int want_dead)
{
    mha_sdpa_args *a = &p->a;
    oracle_result r = oracle_sdpa(a);
    const double v_max = largest(p->v, p->nv);
    int dead;

    for (int taps = 1; taps >= 0; taps--) {
        a->attn = taps ? p->attn : NULL;
        a->attn_mean = taps ? p->mean : NULL;
        ASSERT_STATUS(MHA_OK, problem_run(p));
        ASSERT_CLOSE(p->o, r.o, p->no, tol * v_max);
        for (size_t i = 0; i < p->nlse; i++)
            if (!oracle_is_ninf(r.lse[i]))
                ASSERT_CLOSE(p->lse + i, r.lse + i, 1, 4 * tol * (1.0 + fabs(r.lse[i])));
        CHECK_CALL(dead_rows(p, &dead));
        if (want_dead >= 0) ASSERT_EQ_FMTm("rows that see nothing", want_dead, dead, "%d");
        if (taps) {
            ASSERT_CLOSE(p->attn, r.attn, p->nattn, tol);
            ASSERT_CLOSE(p->mean, r.attn_mean, p->nmean, tol);
            EACH_ROW(a, b, h, i)
            for (int j = 0; j < a->source_seq; j++)
                if (!sees(a, b, h, i, j))
                    ASSERTm("weight of an excluded key",
                            all_zero(row_of(p->attn, a, b, h, i, a->source_seq) + j, 1));
        }
    }
    a->attn = p->attn;
    a->attn_mean = p->mean;
    oracle_free(&r);
    PASS();
}

#define TOL 2e-6 /* the header's promise for mha_sdpa, in max|v| */

/* ---- rows that see nothing ---------------------------------------------------------------- */

TEST dead_by_allow(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 9, 21, 5, 7, test_seed);
    unsigned char allow[9 * 21];
    memset(allow, 1, sizeof allow);
    memset(allow, 0, 21);              /* first row */
    memset(allow + 4 * 21, 0, 2 * 21); /* two in the middle */
    memset(allow + 8 * 21, 0, 21);     /* last */
    p.a.mask.allow = allow;
    CHECK_CALL(agrees(&p, TOL, 4 * 8));
    memset(allow, 0, sizeof allow);
    CHECK_CALL(agrees(&p, TOL, 9 * 8));
    problem_free(&p);
    PASS();
}

TEST dead_by_key_len(mha_isa isa)
{
    problem p = problem_make(isa, 3, 2, 2, 9, 21, 5, 7, test_seed);
    const int len[3] = { 21, 0, 1 };
    p.a.mask.key_len = len;
    CHECK_CALL(agrees(&p, TOL, 9 * 2));
    problem_free(&p);
    PASS();
}

TEST dead_by_bias(mha_isa isa)
{
    problem p = problem_make(isa, 2, 2, 1, 9, 21, 5, 7, test_seed);
    float *bias = test_floats(9 * 21, F_NINF);
    p.a.mask.bias = bias;
    CHECK_CALL(agrees(&p, TOL, 9 * 4));
    for (int j = 0; j < 3 * 21; j++) bias[j] = 0.5f;
    CHECK_CALL(agrees(&p, TOL, 6 * 4));
    free(bias);
    problem_free(&p);
    PASS();
}

/* Queries beyond the keys: lower-right aligned, the first T - S rows come before every key. */
TEST dead_by_causal(mha_isa isa)
{
    const int T[] = { 9, 40, 150 }, S[] = { 4, 39, 1 };
    for (int n = 0; n < 3; n++) {
        problem p = problem_make(isa, 2, 2, 1, T[n], S[n], 5, 7, test_seed);
        p.a.mask.causal = MHA_CAUSAL;
        CHECK_CALL(agrees(&p, TOL, 4 * (T[n] - S[n])));
        p.a.mask.causal = MHA_CAUSAL_UPPER_LEFT;
        CHECK_CALL(agrees(&p, TOL, 0));
        problem_free(&p);
    }
    PASS();
}

/* Upper-left, a row loses its last key only together with another mask. */
TEST dead_by_causal_and_allow(mha_isa isa)
{
    problem p = problem_make(isa, 2, 2, 1, 9, 4, 5, 7, test_seed);
    unsigned char allow[9 * 4];
    memset(allow, 1, sizeof allow);
    for (int i = 0; i < 9; i++) allow[i * 4] = allow[i * 4 + 1] = 0;
    p.a.mask.allow = allow;
    p.a.mask.causal = MHA_CAUSAL_UPPER_LEFT;
    CHECK_CALL(agrees(&p, TOL, 4 * 2));
    p.a.mask.causal = MHA_CAUSAL;
    CHECK_CALL(agrees(&p, TOL, 4 * 7));
    problem_free(&p);
    PASS();
}

/* Decided by the mask, not by the score: the numbers of such a row do not matter. */
TEST dead_with_nan(mha_isa isa)
{
    problem p = problem_make(isa, 2, 2, 1, 9, 21, 5, 7, test_seed);
    unsigned char allow[9 * 21];
    memset(allow, 1, sizeof allow);
    memset(allow + 4 * 21, 0, 21);
    p.a.mask.allow = allow;
    for (size_t r = 4; r < 36; r += 9)
        for (size_t c = 0; c < 5; c++) p.q[r * 5 + c] = c % 2 ? F_NAN : F_INF;
    CHECK_CALL(agrees(&p, TOL, 4));
    problem_free(&p);
    PASS();
}

/* Through a layer: y = 0 W_O + b_out = b_out. */
TEST dead_in_layer(mha_isa isa)
{
    enum { B = 2, T = 9, S = 5, D = 12 };
    net n = net_weights(isa, D, 3, 1, 4, 5, 7, 0, test_seed);
    rng r = rng_make(test_seed);
    float *x = rng_floats(&r, B * T * D), *source = rng_floats(&r, B * S * 7);
    float *y = test_floats(B * T * D, 0.0f), *bias = test_floats(T * S, 0.0f);
    unsigned char allow[T * S];
    const int len[B] = { 0, 0 };

    ASSERT_STATUS(MHA_OK, net_create(&n));
    for (int kind = 0; kind < 4; kind++) {
        mha_args a;
        memset(&a, 0, sizeof a);
        memset(y, 0xff, B * T * D * sizeof(float));
        a.batch = B;
        a.seq = T;
        a.source_seq = S;
        a.x = x;
        a.source = source;
        a.y = y;
        memset(allow, 1, sizeof allow);
        for (int i = 0; i < T * S; i++) bias[i] = i < (T - S) * S ? F_NINF : 1.0f;
        memset(allow, 0, (T - S) * S);
        if (kind == 0) a.mask.allow = allow;
        if (kind == 1) a.mask.bias = bias;
        if (kind == 2) a.mask.causal = MHA_CAUSAL;
        if (kind == 3) a.mask.key_len = len;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        for (int i = 0; i < B * T; i++) {
            const int dead = kind == 3 || i % T < T - S;
            ASSERT_EQ_FMTm("y == b_out", dead, same_bits(y + i * D, n.w.b_out, D), "%d");
        }
    }
    free(x);
    free(source);
    free(y);
    free(bias);
    net_free(&n);
    PASS();
}

/* ---- additive masks ----------------------------------------------------------------------- */

TEST minus_inf_is_allow(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 37, 300, 8, 9, test_seed);
    unsigned char *allow = (unsigned char *)malloc(37 * 300);
    float *bias = test_floats(37 * 300, 0.0f);
    rng r = rng_make(test_seed);
    result want;

    ASSERT(allow != NULL);
    for (int i = 0; i < 37 * 300; i++) {
        allow[i] = (unsigned char)rng_chance(&r, i / 300 % 2 ? 70 : 5);
        bias[i] = allow[i] ? 0.0f : F_NINF;
    }
    p.a.mask.allow = allow;
    CHECK_CALL(agrees(&p, TOL, -1));
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.mask.allow = NULL;
    p.a.mask.bias = bias;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(result_same(&p, &want));
    p.a.attn = p.a.attn_mean = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(p.o, want.o, p.no));
    free(allow);
    free(bias);
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* However negative a finite bias is, it hides nothing: in a row where every visible key has it,
   it cancels. q is small, so that the weights are even whether or not the scores survive the
   addition in float. */
TEST finite_bias_hides_nothing(mha_isa isa)
{
    const float large[] = { -1e4f, -1e9f, -1e30f, -FLT_MAX, 1e9f, FLT_MAX };
    enum { T = 9, S = 40 };
    for (size_t n = 0; n < sizeof large / sizeof large[0]; n++) {
        problem p = problem_make(isa, 1, 2, 1, T, S, 8, 7, test_seed);
        float *bias = test_floats(T * S, large[n]);
        double o[7];
        for (size_t i = 0; i < p.nq; i++) p.q[i] *= 1e-4f;
        for (int i = T - 3; i < T; i++) /* and where the others are excluded */
            for (int j = 0; j < S; j++)
                if (j % 3) bias[i * S + j] = F_NINF;
        p.a.mask.bias = bias;
        for (int taps = 1; taps >= 0; taps--) {
            p.a.attn = taps ? p.attn : NULL;
            p.a.attn_mean = taps ? p.mean : NULL;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            EACH_ROW(&p.a, b, h, i)
            {
                int seen = 0;
                memset(o, 0, sizeof o);
                for (int j = 0; j < S; j++) {
                    if (!sees(&p.a, b, h, i, j)) continue;
                    seen++;
                    for (int c = 0; c < 7; c++) o[c] += (double)p.v[j * 7 + c];
                }
                for (int c = 0; c < 7; c++) o[c] /= seen;
                ASSERT_CLOSE(row_of(p.o, &p.a, b, h, i, 7), o, 7, 2e-3);
                ASSERT(is_finite(*row_of(p.lse, &p.a, b, h, i, 1)));
                for (int j = 0; taps && j < S; j++) {
                    const double even = sees(&p.a, b, h, i, j) ? 1.0 / seen : 0.0;
                    ASSERT_CLOSE(row_of(p.attn, &p.a, b, h, i, S) + j, &even, 1, 2e-3 / seen);
                }
            }
        }
        free(bias);
        problem_free(&p);
    }
    PASS();
}

/* Nor when score and bias together leave the range of a float: equal scores, even weights. */
TEST score_and_bias_beyond_float(mha_isa isa)
{
    enum { T = 3, S = 20, DV = 3 };
    for (int sign = -1; sign <= 1; sign += 2) {
        problem p = problem_make(isa, 1, 1, 1, T, S, 1, DV, test_seed);
        float *bias = test_floats(T * S, (float)sign * FLT_MAX);
        double mean[DV] = { 0.0 };
        for (size_t i = 0; i < p.nq; i++) p.q[i] = (float)sign * 1e19f;
        for (size_t i = 0; i < p.nk; i++) p.k[i] = 1e19f;
        for (size_t i = 0; i < p.nv; i++) mean[i % DV] += (double)p.v[i] / S;
        p.a.mask.bias = bias;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        for (int i = 0; i < T; i++) ASSERT_CLOSE(p.o + i * DV, mean, DV, 1e-5);
        free(bias);
        problem_free(&p);
    }
    PASS();
}

/* ---- what is excluded is not read into a result ------------------------------------------- */

enum { BY_ALLOW, BY_BIAS, BY_KEY_LEN, BY_CAUSAL, WAYS };

/* Sets p's mask so that no query sees the keys of hidden[], excluded in one of the ways. The
   last two can only hide the end: those keys are then first .. S-1. */
typedef struct hiding {
    unsigned char *allow;
    float *bias;
    int *len;
    int first;      /* BY_KEY_LEN, BY_CAUSAL */
    int *is_hidden; /* [S] */
} hiding;

static hiding hide(problem *p, int way)
{
    const int T = p->a.seq, S = p->a.source_seq;
    hiding g;
    memset(&g, 0, sizeof g);
    g.allow = (unsigned char *)malloc((size_t)(T * S));
    g.bias = test_floats((size_t)(T * S), 0.0f);
    g.len = (int *)malloc((size_t)p->a.batch * sizeof(int));
    g.is_hidden = (int *)malloc((size_t)S * sizeof(int));
    if (!g.allow || !g.len || !g.is_hidden) abort();
    g.first = way == BY_CAUSAL ? T : S - S / 3;
    for (int j = 0; j < S; j++)
        g.is_hidden[j] =
            way == BY_ALLOW || way == BY_BIAS ? j % 5 == 0 || (j > 20 && j < 30) : j >= g.first;
    for (int i = 0; i < T; i++)
        for (int j = 0; j < S; j++) {
            g.allow[i * S + j] = !g.is_hidden[j];
            if (g.is_hidden[j]) g.bias[i * S + j] = F_NINF;
        }
    for (int b = 0; b < p->a.batch; b++) g.len[b] = g.first;
    p->a.mask.allow = way == BY_ALLOW ? g.allow : NULL;
    p->a.mask.bias = way == BY_BIAS ? g.bias : NULL;
    p->a.mask.key_len = way == BY_KEY_LEN ? g.len : NULL;
    p->a.mask.causal = way == BY_CAUSAL ? MHA_CAUSAL_UPPER_LEFT : MHA_NOT_CAUSAL;
    return g;
}

static void unhide(hiding *g)
{
    free(g->allow);
    free(g->bias);
    free(g->len);
    free(g->is_hidden);
}

/* value into the hidden rows of k (where & 1) and of v (where & 2), or only into key one. */
static void plant(problem *p, const hiding *g, int one, int where, float value)
{
    const int S = p->a.source_seq, dk = p->a.d_k, dv = p->a.d_v;
    for (int bg = 0; bg < p->a.batch * p->a.kv_heads; bg++)
        for (int j = 0; j < S; j++) {
            if (one >= 0 ? j != one : !g->is_hidden[j]) continue;
            for (int c = 0; c < dk && (where & 1); c++) p->k[(bg * S + j) * dk + c] = value;
            for (int c = 0; c < dv && (where & 2); c++) p->v[(bg * S + j) * dv + c] = value;
        }
}

static const int hiding_shapes[][2] = { { 9, 33 }, { 37, 300 }, { 1, 40 } };

TEST hidden_cannot_leak(mha_isa isa)
{
    const float poison[] = { F_NAN, F_INF, F_NINF, 1e38f, -1e38f, f_bits(0xffffffffu) };
    for (int n = 0; n < 3; n++)
        for (int way = 0; way < WAYS; way++) {
            problem p = problem_make(isa, 2, 4, 2, hiding_shapes[n][0], hiding_shapes[n][1], 11, 9,
                                     test_seed);
            hiding g = hide(&p, way);
            plant(&p, &g, -1, 3, 0.0f);
            for (int taps = 1; taps >= 0; taps--) {
                result want;
                p.a.attn = taps ? p.attn : NULL;
                p.a.attn_mean = taps ? p.mean : NULL;
                plant(&p, &g, -1, 3, 0.0f);
                ASSERT_STATUS(MHA_OK, problem_run(&p));
                want = result_of(&p);
                for (size_t i = 0; i < p.no; i++) ASSERT(is_finite(p.o[i]));
                for (size_t v = 0; v < sizeof poison / sizeof poison[0]; v++)
                    for (int where = 1; where <= 3; where++) {
                        plant(&p, &g, -1, 3, 0.0f);
                        plant(&p, &g, -1, where, poison[v]);
                        ASSERT_STATUS(MHA_OK, problem_run(&p));
                        ASSERTm("something excluded changed the result", result_same(&p, &want));
                    }
                result_free(&want);
            }
            unhide(&g);
            problem_free(&p);
        }
    PASS();
}

/* Rows that see key j must be NaN, the others must have the bits they had. NaN in k makes the
   scores NaN, and with them everything of the row but the weights of keys it does not see. */
TEST only_those_who_look(const problem *p, const result *clean, int in_k, int j)
{
    const mha_sdpa_args *a = &p->a;
    const int S = a->source_seq, dv = a->d_v;
    EACH_ROW(a, b, h, i)
    {
        const float *o = row_of(p->o, a, b, h, i, dv), *lse = row_of(p->lse, a, b, h, i, 1);
        const int looks = sees(a, b, h, i, j);
        if (looks) {
            ASSERTm("an attended NaN did not propagate", all_nan(o, dv));
            if (in_k) ASSERTm("an attended NaN did not reach lse", is_nan(*lse));
        } else {
            ASSERTm("NaN reached a row that does not see it",
                    same_result(o, row_of(clean->o, a, b, h, i, dv), (size_t)dv));
        }
        if (!looks || !in_k) {
            ASSERT(same_result(lse, row_of(clean->lse, a, b, h, i, 1), 1));
            if (a->attn)
                ASSERT(same_result(row_of(p->attn, a, b, h, i, S),
                                   row_of(clean->attn, a, b, h, i, S), (size_t)S));
        } else if (a->attn) {
            ASSERT(is_nan(row_of(p->attn, a, b, h, i, S)[j]));
        }
    }
    PASS();
}

/* Row 0 does not see the key whose value is NaN, and row 1 does: row 0 keeps its bits, also where
   q * scale is so small that it is nearly denormal and only large keys make scores of it. */
TEST tiny_queries_keep_their_bits(mha_isa isa)
{
    enum { T = 2, S = 9, D = 24 };
    float q[T * D], k[S * D], v[S * D], clean[T * D], spoilt[T * D];
    rng r = rng_make(test_seed + 77);
    for (int n = 0; n < 100; n++) {
        mha_sdpa_args a;
        memset(&a, 0, sizeof a);
        for (int i = 0; i < T * D; i++) q[i] = rng_normal(&r) * 1.2e-38f;
        for (int i = 0; i < S * D; i++) k[i] = rng_normal(&r) * 3e37f;
        for (int i = 0; i < S * D; i++) v[i] = rng_normal(&r);
        a.batch = a.heads = 1;
        a.seq = T;
        a.source_seq = S;
        a.d_k = D;
        a.scale = 1.0f;
        a.isa = isa;
        a.q = q;
        a.k = k;
        a.v = v;
        a.o = clean;
        a.mask.causal = MHA_CAUSAL;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
        v[(S - 1) * D] = F_NAN;
        a.o = spoilt;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
        ASSERT(is_nan(spoilt[D]));
        ASSERT(same_result(clean, spoilt, D));
        a.o = q; /* the same in place: the row that is done again must find its query */
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
        ASSERT(is_nan(q[D]));
        ASSERT(same_result(clean, q, D));
    }
    PASS();
}

/* A weight so small that it makes a negative value -0. Beside a row that sees one more key, which
   adds 0 to it, it would be +0: it is so in any case. */
TEST zeros_have_one_sign(mha_isa isa)
{
    enum { S = 3, D = 17 };
    float q[2 * D], k[S * D], v[S * D], alone[D], beside[2 * D];
    const float score[S] = { 0, -72, 0 }, value[S] = { 0, -1e-30f, 1e-3f };
    mha_sdpa_args a;
    memset(&a, 0, sizeof a);
    memset(q, 0, sizeof q);
    memset(k, 0, sizeof k);
    q[0] = q[D] = 1;
    for (int j = 0; j < S; j++) {
        k[j * D] = score[j];
        for (int c = 0; c < D; c++) v[j * D + c] = value[j];
    }
    a.batch = a.heads = a.seq = 1;
    a.source_seq = 2;
    a.d_k = D;
    a.scale = 1;
    a.isa = isa;
    a.q = q;
    a.k = k;
    a.v = v;
    a.o = alone;
    a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    a.seq = 2;
    a.source_seq = S;
    a.o = beside;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    for (int c = 0; c < D; c++) {
#ifdef TEST_FAST_MATH
        ASSERT(same_result(alone + c, beside + c, 1));
#else
        ASSERT_EQ_FMT(0u, bits_f(alone[c]), "%08x");
        ASSERT_EQ_FMT(0u, bits_f(beside[c]), "%08x");
#endif
    }
    PASS();
}

/* Without keys, k and v may be null, also where queries fill several tiles. */
TEST null_keys(mha_isa isa)
{
    enum { B = 2, T = 200 };
    float q[B * T], o[B * T];
    mha_sdpa_args a;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < B * T; i++) q[i] = o[i] = 1;
    a.batch = B;
    a.heads = a.d_k = 1;
    a.seq = T;
    a.isa = isa;
    a.q = q;
    a.o = o;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    for (int i = 0; i < B * T; i++) ASSERT_EQ_FMT(0u, bits_f(o[i]), "%08x");
    PASS();
}

/* Three rows of a tile: one whose scores overflow in units of log2, one that attends a NaN, and
   one that is as it is alone. In place, so that a row done once must not be done again. */
TEST three_kinds_of_rows(mha_isa isa)
{
    enum { T = 3, S = 20, D = 16 };
    float q[T * D], k[S * D], v[S * D], alone[T * D], o[T * D];
    unsigned char allow[T * S];
    rng r = rng_make(test_seed + 78);
    mha_sdpa_args a;
    memset(&a, 0, sizeof a);
    rng_fill(&r, q, T * D);
    rng_fill(&r, k, S * D);
    rng_fill(&r, v, S * D);
    for (int c = 0; c < D; c++) q[c] = c ? 0.0f : 3e38f;
    for (int j = 0; j < S; j++) k[j * D] = 0.9f - 0.01f * (float)j;
    v[(S - 1) * D + 3] = F_NAN;
    for (int i = 0; i < T * S; i++) allow[i] = i % S < S - 1 || i / S == 1;
    a.batch = a.heads = 1;
    a.source_seq = S;
    a.d_k = D;
    a.scale = 1.0f;
    a.isa = isa;
    a.k = k;
    a.v = v;
    a.mask.allow = allow;
    for (int i = 0; i < T; i++) {
        a.seq = 1;
        a.q = q + i * D;
        a.o = alone + i * D;
        a.mask.allow = allow + i * S;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    }
    ASSERT(same_result(v, alone, D)); /* the largest score by far is key 0's */
    ASSERT(is_nan(alone[D + 3]));
    a.seq = T;
    a.q = q;
    a.mask.allow = allow;
    a.o = o;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(same_result(alone, o, D) && same_result(alone + 2 * D, o + 2 * D, D));
    a.o = q;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(same_result(alone, q, D) && same_result(alone + 2 * D, q + 2 * D, D));
    ASSERT(is_nan(q[D + 3]));
    PASS();
}

/* A key whose score is -inf weighs nothing, and what it holds is not read: whatever rows stand
   beside this one. */
TEST score_of_minus_inf_is_not_read(mha_isa isa)
{
    enum { S = 17 };
    float q[2] = { 2, 2 }, k[S], v[S], o[2][2];
    for (int i = 0; i < S; i++) k[i] = 0.1f * (float)i, v[i] = (float)i;
    k[5] = -3e38f; /* times 2 it is no float */
    v[5] = F_INF;
    for (int T = 1; T <= 2; T++) {
        mha_sdpa_args a;
        memset(&a, 0, sizeof a);
        a.batch = a.heads = a.d_k = 1;
        a.seq = T;
        a.source_seq = S - 2 + T;
        a.isa = isa;
        a.q = q;
        a.k = k;
        a.v = v;
        a.o = o[T - 1];
        a.mask.causal = MHA_CAUSAL;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    }
    ASSERT(is_finite(o[0][0]));
    ASSERT(same_result(o[0], o[1], 1));
    PASS();
}

/* A row that attends a NaN has NaN weights, but still none where it does not look. */
TEST nan_row_has_no_weight_where_it_is_blind(mha_isa isa)
{
    problem p = problem_make(isa, 1, 1, 1, 4, 300, 16, 16, 79);
    p.a.mask.causal = MHA_CAUSAL;
    p.k[0] = F_NAN;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 300; j++) {
            if (j <= i + 296) ASSERT(is_nan(p.attn[i * 300 + j]));
            else ASSERT_EQ(0u, bits_f(p.attn[i * 300 + j]));
        }
    problem_free(&p);
    PASS();
}

/* Neighbours in one tile: one row attends the NaN that the others exclude. */
TEST hidden_from_neighbours(mha_isa isa)
{
    for (int n = 0; n < 2; n++)
        for (int way = 0; way < WAYS; way++) {
            const int T = hiding_shapes[n][0], S = hiding_shapes[n][1];
            problem p = problem_make(isa, 2, 4, 2, T, S, 11, 9, test_seed);
            hiding g = hide(&p, way);
            const int j = way == BY_CAUSAL ? T / 2 : way == BY_KEY_LEN ? g.first : 25;
            if (way == BY_ALLOW) g.allow[(T / 2) * S + j] = 1;
            if (way == BY_BIAS) g.bias[(T / 2) * S + j] = 0.25f;
            if (way == BY_KEY_LEN) g.len[1] = g.first + 1; /* the other batch element sees it */
            for (int taps = 1; taps >= 0; taps--)
                for (int where = 1; where <= 3; where++) {
                    result clean;
                    p.a.attn = taps ? p.attn : NULL;
                    p.a.attn_mean = taps ? p.mean : NULL;
                    plant(&p, &g, -1, 3, 0.0f);
                    plant(&p, &g, j, 3, 0.0f);
                    ASSERT_STATUS(MHA_OK, problem_run(&p));
                    clean = result_of(&p);
                    plant(&p, &g, -1, where, F_NAN);
                    plant(&p, &g, j, where, F_NAN);
                    ASSERT_STATUS(MHA_OK, problem_run(&p));
                    CHECK_CALL(only_those_who_look(&p, &clean, where & 1, j));
                    result_free(&clean);
                }
            unhide(&g);
            problem_free(&p);
        }
    PASS();
}

/* A bias of an excluded key is excluded with it. */
TEST hidden_bias_cannot_leak(mha_isa isa)
{
    const float poison[] = { F_NAN, F_INF, FLT_MAX, -FLT_MAX };
    for (int way = 0; way < WAYS; way++) {
        enum { T = 37, S = 300 };
        problem p = problem_make(isa, 2, 4, 2, T, S, 11, 9, test_seed);
        hiding g;
        result want;
        if (way == BY_BIAS) {
            problem_free(&p);
            continue;
        }
        g = hide(&p, way);
        p.a.mask.bias = g.bias;
        for (int i = 0; i < T * S; i++) g.bias[i] = (float)(i % 7) * 0.1f;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        want = result_of(&p);
        for (size_t v = 0; v < sizeof poison / sizeof poison[0]; v++) {
            for (int i = 0; i < T; i++)
                for (int j = 0; j < S; j++)
                    if (way == BY_CAUSAL ? j > i : g.is_hidden[j]) g.bias[i * S + j] = poison[v];
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(result_same(&p, &want));
        }
        result_free(&want);
        unhide(&g);
        problem_free(&p);
    }
    PASS();
}

/* Through a layer: rows of the source that nobody attends may hold anything. */
TEST hidden_in_layer(mha_isa isa)
{
    enum { B = 2, T = 21, S = 45, D = 20, DS = 14 };
    net n = net_weights(isa, D, 4, 2, 5, 6, DS, 0, test_seed);
    rng r = rng_make(test_seed);
    float *x = rng_floats(&r, B * T * D), *source = test_floats(B * S * DS, 0.0f);
    float *y = test_floats(B * T * D, 0.0f), *want = NULL;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    for (int way = 0; way < WAYS; way++) {
        const float poison[] = { 0.0f, F_NAN, F_INF, 1e38f };
        problem p; /* only for its mask */
        hiding g;
        memset(&p, 0, sizeof p);
        p.a.batch = B;
        p.a.seq = T;
        p.a.source_seq = S;
        g = hide(&p, way);
        rng_fill(&r, source, B * S * DS);
        for (int v = 0; v < 4; v++) {
            mha_args a;
            memset(&a, 0, sizeof a);
            a.batch = B;
            a.seq = T;
            a.source_seq = S;
            a.x = x;
            a.source = source;
            a.y = y;
            a.mask = p.a.mask;
            for (int i = 0; i < B * S; i++)
                for (int c = 0; c < DS; c++)
                    if (g.is_hidden[i % S]) source[i * DS + c] = poison[v];
            memset(y, 0xff, B * T * D * sizeof(float));
            ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
            if (v == 0) want = copy_floats(y, B * T * D);
            else ASSERT(same_result(want, y, B * T * D));
            for (int i = 0; i < B * T * D; i++) ASSERT(is_finite(y[i]));
        }
        free(want);
        unhide(&g);
    }
    free(x);
    free(source);
    free(y);
    net_free(&n);
    PASS();
}

/* Self-attention: a NaN token reaches itself and those who see it, in its own batch element. */
TEST nan_token_in_layer(mha_isa isa)
{
    enum { B = 3, T = 21, D = 20, BAD = 13 };
    net n = net_weights(isa, D, 4, 2, 5, 6, 0, 0, test_seed);
    rng r = rng_make(test_seed);
    float *x = rng_floats(&r, B * T * D), *y = test_floats(B * T * D, 0.0f);
    float *want = test_floats(B * T * D, 0.0f);
    const int len[B] = { T, BAD, T };
    mha_args a;

    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = B;
    a.seq = T;
    a.x = x;
    for (int padded = 0; padded < 2; padded++) {
        float save[D];
        float *bad = x + (T + BAD) * D; /* token BAD of batch element 1 */
        if (padded) a.mask.key_len = len;
        else a.mask.causal = MHA_CAUSAL;
        a.y = want;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        memcpy(save, bad, sizeof save);
        bad[3] = F_NAN;
        a.y = y;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        memcpy(bad, save, sizeof save);
        for (int i = 0; i < B * T; i++) {
            const int t = i % T, hit = i / T == 1 && (padded ? t == BAD : t >= BAD);
            if (hit) ASSERTm("an attended NaN did not propagate", all_nan(y + i * D, D));
            else
                ASSERTm("NaN reached a row that does not see it",
                        same_result(want + i * D, y + i * D, D));
        }
        memset(&a.mask, 0, sizeof a.mask);
    }
    free(x);
    free(y);
    free(want);
    net_free(&n);
    PASS();
}

/* ---- what is attended does propagate ------------------------------------------------------ */

/* One NaN in q, k, v or bias: NaN in exactly the rows it belongs to. */
TEST attended_nan(mha_isa isa)
{
    enum { B = 2, H = 4, G = 2, T = 37, S = 300, DK = 11, DV = 9 };
    problem p = problem_make(isa, B, H, G, T, S, DK, DV, test_seed);
    float *bias = test_floats(T * S, 0.0f);
    result clean;
    p.a.mask.bias = bias;
    p.a.mask.causal = MHA_CAUSAL;
    for (int taps = 1; taps >= 0; taps--) {
        p.a.attn = taps ? p.attn : NULL;
        p.a.attn_mean = taps ? p.mean : NULL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        clean = result_of(&p);
        for (int where = 0; where < 4; where++) {
            const int bb = 1, bh = 2, bg = 1, bi = 20, bj = 280, bc = 4;
            float *cell = where == 0   ? p.q + ((bb * H + bh) * T + bi) * DK + bc
                          : where == 1 ? p.k + ((bb * G + bg) * S + bj) * DK + bc
                          : where == 2 ? p.v + ((bb * G + bg) * S + bj) * DV + bc
                                       : bias + bi * S + bj;
            const float save = *cell;
            *cell = F_NAN;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            *cell = save;
            EACH_ROW(&p.a, b, h, i)
            {
                const float *o = row_of(p.o, &p.a, b, h, i, DV);
                const float *co = row_of(clean.o, &p.a, b, h, i, DV);
                const int group = b == bb && h / (H / G) == bg && sees(&p.a, b, h, i, bj);
                const int hit = where == 0   ? b == bb && h == bh && i == bi
                                : where == 3 ? i == bi && sees(&p.a, b, h, i, bj)
                                             : group;
                if (hit && where == 2) {
                    ASSERTm("a NaN in v did not propagate", is_nan(o[bc]));
                } else if (hit) {
                    ASSERTm("an attended NaN did not propagate", all_nan(o, DV));
                    ASSERT(is_nan(*row_of(p.lse, &p.a, b, h, i, 1)));
                } else {
                    ASSERTm("NaN reached a row that does not see it", same_result(o, co, DV));
                    ASSERT(same_result(row_of(p.lse, &p.a, b, h, i, 1),
                                       row_of(clean.lse, &p.a, b, h, i, 1), 1));
                }
            }
        }
        result_free(&clean);
    }
    free(bias);
    problem_free(&p);
    PASS();
}

/* ---- long stretches of masked keys -------------------------------------------------------- */

/* The first keys excluded, more than any block of them: the same as not having them. */
TEST leading_masked_keys(mha_isa isa)
{
    enum { T = 5, S = 700, DK = 8, DV = 6 };
    const int skips[] = { 1, 64, 128, 300, 512, 600, 699 };
    for (size_t n = 0; n < sizeof skips / sizeof skips[0]; n++)
        for (int way = 0; way < 2; way++) {
            const int skip = skips[n], rest = S - skip;
            problem p = problem_make(isa, 1, 1, 1, T, S, DK, DV, test_seed);
            problem few = problem_make(isa, 1, 1, 1, T, rest, DK, DV, test_seed);
            unsigned char *allow = (unsigned char *)malloc(T * S);
            float *bias = test_floats(T * S, 0.0f);
            double *want = (double *)malloc(T * DV * sizeof *want);
            ASSERT(allow != NULL && want != NULL);
            for (int i = 0; i < T * S; i++) {
                allow[i] = i % S >= skip;
                bias[i] = allow[i] ? 0.0f : F_NINF;
            }
            /* those keys would have had the largest scores by far */
            for (int i = 0; i < skip * DK; i++) p.k[i] *= 1e6f;
            if (way == 0) p.a.mask.allow = allow;
            else p.a.mask.bias = bias;
            CHECK_CALL(agrees(&p, TOL, 0));

            few.a.q = p.q;
            few.a.k = p.k + skip * DK;
            few.a.v = p.v + skip * DV;
            ASSERT_STATUS(MHA_OK, problem_run(&few));
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            for (int i = 0; i < T * DV; i++) want[i] = (double)few.o[i];
            ASSERT_CLOSE(p.o, want, T * DV, 2 * TOL * largest(p.v, p.nv));
            free(allow);
            free(bias);
            free(want);
            problem_free(&p);
            problem_free(&few);
        }
    PASS();
}

/* The same in the middle and at the end, with one key left here and there. */
TEST islands_of_keys(mha_isa isa)
{
    enum { T = 7, S = 700 };
    problem p = problem_make(isa, 1, 2, 2, T, S, 8, 6, test_seed);
    unsigned char *allow = (unsigned char *)calloc(T * S, 1);
    ASSERT(allow != NULL);
    allow[0] = 1;
    allow[S + S - 1] = 1;
    allow[2 * S] = allow[2 * S + S - 1] = 1;
    allow[3 * S + 350] = 1;
    for (int j = 300; j < 310; j++) allow[4 * S + j] = 1;
    for (int j = 0; j < S; j += 97) allow[5 * S + j] = 1;
    p.a.mask.allow = allow;
    CHECK_CALL(agrees(&p, TOL, 2)); /* row 6 of both heads */
    free(allow);
    problem_free(&p);
    PASS();
}

/* ---- large scores ------------------------------------------------------------------------- */

/* One query, scores given directly: d_k = 1, q = 1e15 or so, scale 1. */
TEST picks(mha_isa isa, float q, const float *k, int S, int best)
{
    problem p = problem_make(isa, 1, 1, 1, 1, S, 1, 5, test_seed);
    double want[5], one = 1.0, top = (double)q * (double)k[best];
    p.q[0] = q;
    memcpy(p.k, k, (size_t)S * sizeof(float));
    p.a.scale = 1.0f;
    for (int c = 0; c < 5; c++) want[c] = (double)p.v[best * 5 + c];
    for (int taps = 1; taps >= 0; taps--) {
        p.a.attn = taps ? p.attn : NULL;
        p.a.attn_mean = taps ? p.mean : NULL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_CLOSE(p.o, want, 5, 1e-5);
        ASSERT_CLOSE(p.lse, &top, 1, 1e-6 * fabs(top) + 1e-5);
        for (int j = 0; taps && j < S; j++)
            if (j != best) ASSERT(bits_f(p.attn[j]) < bits_f(1e-6f));
        if (taps) ASSERT_CLOSE(p.attn + best, &one, 1, 1e-5);
    }
    problem_free(&p);
    PASS();
}

TEST huge_scores(mha_isa isa)
{
    const float sizes[] = { 1e2f, 1e5f, 1e10f, 1e15f, 1e18f };
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++)
        for (int sign = -1; sign <= 1; sign += 2)
            for (int best = 0; best < 300; best += 149) {
                float k[300];
                /* all large, one larger; all of the sign of the product */
                for (int j = 0; j < 300; j++) k[j] = (float)sign * sizes[n];
                k[best] *= sign > 0 ? 1.5f : 0.5f;
                CHECK_CALL(picks(isa, sizes[n], k, 300, best));
                CHECK_CALL(picks(isa, sizes[n], k, 2 + best, best));
            }
    PASS();
}

TEST huge_spread(mha_isa isa)
{
    float k[300];
    for (int j = 0; j < 300; j++) k[j] = (float)(j % 3 - 1) * 1e15f;
    k[200] = 2e15f; /* the others: -1e30, 0, 1e30 */
    CHECK_CALL(picks(isa, 1e15f, k, 300, 200));
    for (int j = 0; j < 300; j++) k[j] = -1e15f * (float)(1 + j);
    CHECK_CALL(picks(isa, 1e15f, k, 300, 0)); /* falling: the first maximum stands */
    for (int j = 0; j < 300; j++) k[j] = 1e15f * (float)(1 + j);
    CHECK_CALL(picks(isa, 1e15f, k, 300, 299)); /* rising: a new maximum at every step */
    for (int j = 0; j < 300; j++) k[j] = j == 77 ? 100.0f : -100.0f;
    CHECK_CALL(picks(isa, 1.0f, k, 300, 77)); /* exp(-200) is below the smallest float */
    PASS();
}

/* Scores next to FLT_MAX: times log2(e) they would be infinite. */
TEST scores_next_to_flt_max(mha_isa isa)
{
    float k[40];
    for (int j = 0; j < 40; j++) k[j] = j == 31 ? 1.7e19f : 1.5e19f;
    CHECK_CALL(picks(isa, 1.9e19f, k, 40, 31)); /* 3.23e38 against 2.85e38 */
    for (int j = 0; j < 40; j++) k[j] = j == 31 ? -1.5e19f : -1.7e19f;
    CHECK_CALL(picks(isa, 1.9e19f, k, 40, 31));
    for (int j = 0; j < 40; j++) k[j] = j == 31 ? 1.7e19f : -1.7e19f;
    CHECK_CALL(picks(isa, 1.9e19f, k, 40, 31)); /* their difference is not a float */
    PASS();
}

/* Equal scores of any size: the mean of v. */
TEST equal_huge_scores(mha_isa isa)
{
    const float sizes[] = { 0.0f, 1e15f, -1e15f, 1.7e19f, -1.7e19f };
    enum { S = 300, DV = 4 };
    for (size_t n = 0; n < sizeof sizes / sizeof sizes[0]; n++) {
        problem p = problem_make(isa, 1, 1, 1, 2, S, 1, DV, test_seed);
        double mean[DV] = { 0.0 };
        for (size_t i = 0; i < p.nq; i++) p.q[i] = 1.9e19f;
        for (size_t i = 0; i < p.nk; i++) p.k[i] = sizes[n];
        for (size_t i = 0; i < p.nv; i++) mean[i % DV] += (double)p.v[i] / S;
        p.a.scale = 1.0f;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_CLOSE(p.o, mean, DV, TOL * largest(p.v, p.nv));
        ASSERT_CLOSE(p.o + DV, mean, DV, TOL * largest(p.v, p.nv));
        problem_free(&p);
    }
    PASS();
}

/* ---- sizes -------------------------------------------------------------------------------- */

TEST zero_lengths(mha_isa isa)
{
    for (int zero = 1; zero < 8; zero++) {
        const int B = zero & 1 ? 0 : 2, T = zero & 2 ? 0 : 5, S = zero & 4 ? 0 : 7;
        problem p = problem_make(isa, B, 2, 1, T, S, 4, 3, test_seed);
        int dead;
        CHECK_CALL(agrees(&p, TOL, S ? 0 : B * 2 * T));
        p.a.mask.causal = MHA_CAUSAL;
        CHECK_CALL(agrees(&p, TOL, S ? 0 : B * 2 * T));
        /* null for what has no elements */
        if (!p.nq) p.a.q = NULL;
        if (!p.nk) p.a.k = p.a.v = NULL;
        if (!p.no) p.a.o = NULL;
        if (!p.nlse) p.a.lse = NULL;
        p.a.attn = p.a.attn_mean = NULL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        if (p.a.lse) CHECK_CALL(dead_rows(&p, &dead));
        problem_free(&p);
    }
    PASS();
}

TEST zero_lengths_in_layer(mha_isa isa)
{
    net n = net_weights(isa, 12, 3, 1, 4, 5, 0, 0, test_seed);
    rng r = rng_make(test_seed);
    float *x = rng_floats(&r, 2 * 5 * 12), *source = rng_floats(&r, 2 * 7 * 12);
    ASSERT_STATUS(MHA_OK, net_create(&n));
    for (int zero = 1; zero < 8; zero++) {
        const int B = zero & 1 ? 0 : 2, T = zero & 2 ? 0 : 5, S = zero & 4 ? 0 : 7;
        float *y = test_floats(2 * 5 * 12, F_NAN), lse[2 * 3 * 5];
        mha_args a;
        memset(lse, 0, sizeof lse);
        memset(&a, 0, sizeof a);
        a.batch = B;
        a.seq = T;
        a.source_seq = S;
        a.x = x;
        a.source = source;
        a.y = y;
        a.lse = lse;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        for (int i = 0; i < 2 * 5; i++) {
            if (i < B * T && S == 0)
                ASSERTm("without keys y is b_out", same_bits(y + i * 12, n.w.b_out, 12));
            else if (i >= B * T) ASSERTm("written past the end of y", all_nan(y + i * 12, 12));
        }
        for (int i = 0; i < B * 3 * T && S == 0; i++) ASSERT_EQ(0xff800000u, bits_f(lse[i]));
        /* self-attention */
        a.source = NULL;
        a.source_seq = 0;
        ASSERT_STATUS(MHA_OK, mha_forward(n.layer, &a));
        free(y);
    }
    free(x);
    free(source);
    net_free(&n);
    PASS();
}

TEST shape_is_right(mha_isa isa, int B, int H, int G, int T, int S, int dk, int dv)
{
    problem p = problem_make(isa, B, H, G, T, S, dk, dv, test_seed);
    for (int causal = MHA_NOT_CAUSAL; causal <= MHA_CAUSAL_UPPER_LEFT; causal++) {
        p.a.mask.causal = (mha_causal)causal;
        CHECK_CALL(agrees(&p, TOL, -1));
    }
    problem_free(&p);
    PASS();
}

TEST head_width_one(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 2, 3, 1, 9, 21, 1, 1));
    CHECK_CALL(shape_is_right(isa, 2, 3, 3, 9, 21, 1, 17));
    CHECK_CALL(shape_is_right(isa, 2, 3, 3, 9, 21, 17, 1));
    PASS();
}

TEST one_head(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 2, 1, 1, 19, 19, 8, 8));
    PASS();
}

TEST odd_everything(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 3, 5, 1, 7, 13, 3, 9));
    CHECK_CALL(shape_is_right(isa, 3, 5, 5, 7, 13, 3, 9));
    PASS();
}

TEST one_query(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 2, 4, 2, 1, 77, 16, 16));
    CHECK_CALL(shape_is_right(isa, 1, 1, 1, 1, 1, 1, 1));
    PASS();
}

TEST one_key(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 2, 4, 2, 9, 1, 16, 16));
    PASS();
}

TEST every_tail(mha_isa isa)
{
    for (int n = 1; n <= 34; n++) {
        CHECK_CALL(shape_is_right(isa, 1, 1, 1, n, 20, 4, 4));
        CHECK_CALL(shape_is_right(isa, 1, 1, 1, 3, n, 4, 4));
        CHECK_CALL(shape_is_right(isa, 1, 1, 1, 3, 20, n, 4));
        CHECK_CALL(shape_is_right(isa, 1, 1, 1, 3, 20, 4, n));
    }
    PASS();
}

TEST many_keys(mha_isa isa)
{
    CHECK_CALL(shape_is_right(isa, 1, 2, 2, 11, 1000, 64, 64));
    CHECK_CALL(shape_is_right(isa, 1, 1, 1, 7, 2049, 32, 33));
    PASS();
}

/* ---- masks together ----------------------------------------------------------------------- */

TEST key_len_for_each(mha_isa isa)
{
    problem p = problem_make(isa, 6, 2, 1, 9, 300, 8, 7, test_seed);
    const int len[6] = { 300, 0, 1, 17, 299, 128 };
    p.a.mask.key_len = len;
    CHECK_CALL(agrees(&p, TOL, 9 * 2));
    p.a.mask.causal = MHA_CAUSAL;
    CHECK_CALL(agrees(&p, TOL, 9 * 2));
    problem_free(&p);
    PASS();
}

TEST any_nonzero_attends(mha_isa isa)
{
    const unsigned char values[] = { 2, 127, 128, 254, 255 };
    enum { T = 9, S = 50 };
    problem p = problem_make(isa, 2, 2, 1, T, S, 8, 7, test_seed);
    unsigned char allow[T * S];
    result want;
    p.a.mask.allow = allow;
    for (int i = 0; i < T * S; i++) allow[i] = i % 3 != 0;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (size_t v = 0; v <= sizeof values; v++) {
        for (int i = 0; i < T * S; i++)
            if (allow[i]) allow[i] = values[v < sizeof values ? v : (size_t)i % sizeof values];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(result_same(&p, &want));
    }
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* allow [B,H,T,S] and key_len and causal and a bias [B,T,S] with -inf here and there. */
TEST masks_compose(mha_isa isa)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        rng r = rng_make(test_seed + seed);
        const int B = 2, H = 4, T = rng_int(&r, 1, 40), S = rng_int(&r, 1, 300);
        problem p = problem_make(isa, B, H, 2, T, S, 8, 7, test_seed + seed);
        const size_t n = (size_t)(B * H * T * S), nb = (size_t)(B * T * S);
        unsigned char *allow = (unsigned char *)malloc(n);
        float *bias = rng_floats(&r, nb);
        int len[2];
        ASSERT(allow != NULL);
        for (size_t i = 0; i < n; i++) allow[i] = (unsigned char)rng_chance(&r, 80);
        for (size_t i = 0; i < nb; i++)
            if (rng_chance(&r, 20)) bias[i] = F_NINF;
        for (int b = 0; b < B; b++) len[b] = rng_int(&r, 0, S);
        p.a.mask.allow = allow;
        p.a.mask.allow_stride.batch = (ptrdiff_t)H * T * S;
        p.a.mask.allow_stride.head = (ptrdiff_t)T * S;
        p.a.mask.allow_stride.query = S;
        p.a.mask.allow_stride.key = 1;
        p.a.mask.bias = bias;
        p.a.mask.bias_stride.batch = (ptrdiff_t)T * S;
        p.a.mask.bias_stride.query = S;
        p.a.mask.bias_stride.key = 1;
        p.a.mask.key_len = len;
        p.a.mask.causal = (mha_causal)(seed % 3);
        CHECK_CALL(agrees(&p, TOL, -1));
        free(allow);
        free(bias);
        problem_free(&p);
    }
    PASS();
}

/* ---- what can be asked for ---------------------------------------------------------------- */

TEST attn_mean_is_the_mean(mha_isa isa)
{
    enum { B = 2, H = 6, T = 19, S = 70 };
    problem p = problem_make(isa, B, H, 3, T, S, 8, 7, test_seed);
    double *want = (double *)calloc(B * T * S, sizeof *want);
    result both;
    ASSERT(want != NULL);
    p.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < T * S; i++)
                want[b * T * S + i] += (double)p.attn[(b * H + h) * T * S + i] / H;
    ASSERT_CLOSE(p.mean, want, B * T * S, 1e-6);
    both = result_of(&p);
    p.a.attn = NULL; /* the mean alone */
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(both.mean, p.mean, p.nmean));
    p.a.attn = p.attn; /* the weights alone */
    p.a.attn_mean = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(both.attn, p.attn, p.nattn));
    free(want);
    result_free(&both);
    problem_free(&p);
    PASS();
}

/* The bits of o depend on queries, keys and values: not on what else is asked for. */
TEST asking_changes_nothing(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 37, 300, 11, 9, test_seed);
    float *o, *lse;
    p.a.mask.causal = MHA_CAUSAL;
    p.a.attn = p.a.attn_mean = p.a.lse = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    o = copy_floats(p.o, p.no);
    p.a.lse = p.lse;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERTm("lse", same_result(o, p.o, p.no));
    lse = copy_floats(p.lse, p.nlse);
    p.a.attn_mean = p.mean;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERTm("attn_mean", same_result(o, p.o, p.no) && same_result(lse, p.lse, p.nlse));
    p.a.attn_mean = NULL;
    p.a.attn = p.attn;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERTm("attn", same_result(o, p.o, p.no) && same_result(lse, p.lse, p.nlse));
    free(o);
    free(lse);
    problem_free(&p);
    PASS();
}

TEST negative_scale(mha_isa isa)
{
    problem p = problem_make(isa, 2, 2, 1, 9, 40, 8, 7, test_seed);
    p.a.scale = -0.3f;
    CHECK_CALL(agrees(&p, TOL, 0));
    p.a.scale = 3.0f;
    CHECK_CALL(agrees(&p, 10 * TOL, 0)); /* scores, and with them their errors, 8 times larger */
    problem_free(&p);
    PASS();
}

/* A copy of from [B,H,T,d] in which the axes of flip (1 batch, 2 head, 4 position) run backwards;
   free() what is returned. s becomes its strides, *at where its first row is. */
static float *turned(const float *from, int B, int H, int T, int d, int flip, mha_stride *s,
                     float **at)
{
    float *room = test_floats((size_t)(B * H * T * d), 0.0f);
    s->batch = flip & 1 ? -H * T * d : H * T * d;
    s->head = flip & 2 ? -T * d : T * d;
    s->seq = flip & 4 ? -d : d;
    *at = room + (flip & 1 ? (B - 1) * H * T * d : 0) + (flip & 2 ? (H - 1) * T * d : 0) +
          (flip & 4 ? (T - 1) * d : 0);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++)
                memcpy(*at + b * s->batch + h * s->head + t * s->seq,
                       from + ((b * H + h) * T + t) * d, (size_t)d * sizeof(float));
    return room;
}

/* Strides of either sign in q, k, v, o and in the masks: the same bits. */
TEST strides_below_zero(mha_isa isa)
{
    enum { B = 2, H = 4, G = 2, T = 19, S = 37, DK = 6, DV = 5 };
    rng r = rng_make(test_seed + 5);
    problem p = problem_make(isa, B, H, G, T, S, DK, DV, test_seed);
    unsigned char allow[T * S], allow_back[T * S];
    float bias[T * S], bias_back[T * S];
    result want;
    for (int i = 0; i < T * S; i++) {
        allow[i] = allow_back[T * S - 1 - i] = (unsigned char)rng_chance(&r, 70);
        bias[i] = bias_back[T * S - 1 - i] = rng_normal(&r);
    }
    p.a.mask.allow = allow;
    p.a.mask.bias = bias;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.mask.allow = allow_back + T * S - 1;
    p.a.mask.bias = bias_back + T * S - 1;
    p.a.mask.allow_stride.query = p.a.mask.bias_stride.query = -S;
    p.a.mask.allow_stride.key = p.a.mask.bias_stride.key = -1;
    for (int flip = 0; flip < 8; flip++) {
        float *q, *k, *v, *o, *room[4];
        room[0] = turned(p.q, B, H, T, DK, flip, &p.a.q_stride, &q);
        room[1] = turned(p.k, B, G, S, DK, flip ^ 4, &p.a.k_stride, &k);
        room[2] = turned(p.v, B, G, S, DV, flip, &p.a.v_stride, &v);
        room[3] = turned(p.o, B, H, T, DV, 7 - flip, &p.a.o_stride, &o);
        p.a.q = q, p.a.k = k, p.a.v = v, p.a.o = o;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&p.a));
        for (int b = 0; b < B; b++)
            for (int h = 0; h < H; h++)
                for (int t = 0; t < T; t++)
                    ASSERT(same_result(o + b * p.a.o_stride.batch + h * p.a.o_stride.head +
                                           t * p.a.o_stride.seq,
                                       want.o + ((b * H + h) * T + t) * DV, DV));
        ASSERT(same_result(p.lse, want.lse, p.nlse));
        ASSERT(same_result(p.attn, want.attn, p.nattn));
        for (int i = 0; i < 4; i++) free(room[i]);
    }
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* A stride along an axis of one element may be anything: nothing is added to a pointer for it, which
   the sanitizers would see. */
TEST strides_of_one(mha_isa isa)
{
    enum { H = 3, S = 21 };
    static const ptrdiff_t far_away[] = { PTRDIFF_MAX / 5, -PTRDIFF_MAX / 5 };
    for (int n = 0; n < 4; n++) {
        const int d = n < 2 ? 40 : 16;
        problem p = problem_make(isa, 1, H, 1, 1, S, d, d, test_seed);
        result want;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        want = result_of(&p);
        p.a.q_stride.head = p.a.o_stride.head = d;
        p.a.q_stride.seq = p.a.q_stride.batch = far_away[n % 2];
        p.a.o_stride.seq = p.a.o_stride.batch = far_away[1 - n % 2];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(result_same(&p, &want));
        result_free(&want);
        problem_free(&p);
    }
    PASS();
}

/* A row of NaN has weights of NaN where it sees a key and 0 where it does not, also where what it
   sees begins past the first 16 keys of a block. */
TEST nan_weights_late(mha_isa isa)
{
    enum { S = 40, START = 20 };
    const int start = START;
    float q = 1.0f, k[S], v[S], o, attn[S];
    mha_sdpa_args a;
    memset(&a, 0, sizeof a);
    for (int j = 0; j < S; j++) k[j] = v[j] = 1.0f;
    k[25] = F_NAN;
    a.batch = a.heads = a.seq = a.d_k = 1;
    a.source_seq = S;
    a.q = &q, a.k = k, a.v = v, a.o = &o, a.attn = attn;
    a.mask.key_start = &start;
    a.isa = isa;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(is_nan(o));
    for (int j = 0; j < START; j++) ASSERT(bits_f(attn[j]) == 0);
    for (int j = START; j < S; j++) ASSERT(is_nan(attn[j]));
    PASS();
}

/* A score that is no float in units of log2 weighs 0 beside others, and its value is not read; it is
   not excluded: alone it counts as any other. */
TEST bias_beyond_float(mha_isa isa)
{
    float q = 1.0f, k[2] = { 1.0f, 1.0f }, v[2], o, lse, bias[2];
    mha_sdpa_args a;
    memset(&a, 0, sizeof a);
    a.batch = a.heads = a.seq = a.d_k = 1;
    a.source_seq = 2;
    a.q = &q, a.k = k, a.v = v, a.o = &o, a.lse = &lse, a.mask.bias = bias;
    a.isa = isa;
    bias[0] = 0.0f, bias[1] = -3.4e38f;
    v[0] = 1.0f, v[1] = F_NAN;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(bits_f(o) == bits_f(1.0f));
    bias[0] = -3.4e38f;
    v[1] = 3.0f;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(bits_f(o) == bits_f(2.0f) && is_finite(lse));
    PASS();
}

SUITE(edges_suite)
{
    RUN_ON_EACH_ISA(strides_below_zero);
    RUN_ON_EACH_ISA(strides_of_one);
    RUN_ON_EACH_ISA(bias_beyond_float);
    RUN_ON_EACH_ISA(dead_by_allow);
    RUN_ON_EACH_ISA(dead_by_key_len);
    RUN_ON_EACH_ISA(dead_by_bias);
    RUN_ON_EACH_ISA(dead_by_causal);
    RUN_ON_EACH_ISA(dead_by_causal_and_allow);
    RUN_ON_EACH_ISA(dead_with_nan);
    RUN_ON_EACH_ISA(dead_in_layer);
    RUN_ON_EACH_ISA(minus_inf_is_allow);
    RUN_ON_EACH_ISA(finite_bias_hides_nothing);
    RUN_ON_EACH_ISA(score_and_bias_beyond_float);
    RUN_ON_EACH_ISA(hidden_cannot_leak);
    RUN_ON_EACH_ISA(hidden_from_neighbours);
    RUN_ON_EACH_ISA(tiny_queries_keep_their_bits);
    RUN_ON_EACH_ISA(zeros_have_one_sign);
    RUN_ON_EACH_ISA(null_keys);
    RUN_ON_EACH_ISA(three_kinds_of_rows);
    RUN_ON_EACH_ISA(score_of_minus_inf_is_not_read);
    RUN_ON_EACH_ISA(nan_row_has_no_weight_where_it_is_blind);
    RUN_ON_EACH_ISA(hidden_bias_cannot_leak);
    RUN_ON_EACH_ISA(hidden_in_layer);
    RUN_ON_EACH_ISA(nan_token_in_layer);
    RUN_ON_EACH_ISA(attended_nan);
    RUN_ON_EACH_ISA(leading_masked_keys);
    RUN_ON_EACH_ISA(islands_of_keys);
    RUN_ON_EACH_ISA(huge_scores);
    RUN_ON_EACH_ISA(huge_spread);
    RUN_ON_EACH_ISA(scores_next_to_flt_max);
    RUN_ON_EACH_ISA(equal_huge_scores);
    RUN_ON_EACH_ISA(zero_lengths);
    RUN_ON_EACH_ISA(zero_lengths_in_layer);
    RUN_ON_EACH_ISA(head_width_one);
    RUN_ON_EACH_ISA(one_head);
    RUN_ON_EACH_ISA(odd_everything);
    RUN_ON_EACH_ISA(one_query);
    RUN_ON_EACH_ISA(one_key);
    RUN_ON_EACH_ISA(every_tail);
    RUN_ON_EACH_ISA(many_keys);
    RUN_ON_EACH_ISA(key_len_for_each);
    RUN_ON_EACH_ISA(any_nonzero_attends);
    RUN_ON_EACH_ISA(masks_compose);
    RUN_ON_EACH_ISA(attn_mean_is_the_mean);
    RUN_ON_EACH_ISA(asking_changes_nothing);
    RUN_ON_EACH_ISA(negative_scale);
    RUN_ON_EACH_ISA(nan_weights_late);
}
