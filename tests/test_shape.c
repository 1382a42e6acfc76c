/* test_shape.c - what shapes attention beside masks: windows and padding, softcap, ALiBi, sinks,
   extra keys, gates, sequences of different lengths, merging, rotary positions. Most of it says
   that one way to write a thing equals another. */
#include <limits.h>

#include "fixture.h"

/* ---- helpers ----------------------------------------------------------------------------- */

static double largest(const float *x, size_t n)
{
    double top = 0;
    for (size_t i = 0; i < n; i++)
        if (fabs((double)x[i]) > top) top = fabs((double)x[i]);
    return top;
}

/* max |a - b|, huge if either is not finite. */
static double apart(const float *a, const float *b, size_t n)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        if (!is_finite(a[i]) || !is_finite(b[i])) return 1e300;
        if (fabs((double)a[i] - (double)b[i]) > worst) worst = fabs((double)a[i] - (double)b[i]);
    }
    return worst;
}

static int are_zeros(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bits_f(x[i]) << 1) return 0;
    return 1;
}

static int are_nans(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!is_nan(x[i])) return 0;
    return 1;
}

static unsigned char *byte_mask(rng *r, size_t n, int percent)
{
    unsigned char *m = (unsigned char *)malloc(n ? n : 1);
    if (!m) abort();
    for (size_t i = 0; i < n; i++) m[i] = (unsigned char)rng_chance(r, percent);
    return m;
}

/* How far two right results of mha_sdpa may be apart, of max|v|: each is within 2e-6 of the exact
   one, and 6 * 2^-24 of the size of its scores where those are not N(0,1). See test_random.c. */
static double twice_promised(const problem *p)
{
    oracle_result r = oracle_sdpa(&p->a);
    const double tol = 2 * (2e-6 + 6.0 / 16777216.0 * max_abs(r.size, p->nlse)) * r.v_max;
    oracle_free(&r);
    return tol;
}

static void backward_for(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx;
    for (int i = n - 1; i >= 0; i--) task(arg, i);
}

static mha_parallel parallel_of(int threads)
{
    mha_parallel p;
    memset(&p, 0, sizeof p);
    if (threads) {
        p.parallel_for = backward_for;
        p.threads = threads;
    }
    return p;
}

/* ---- windows and padding ----------------------------------------------------------------- */

static const int shapes[][2] = { { 37, 301 }, { 301, 301 }, { 70, 21 }, { 1, 513 } };

/* The window as a boolean mask [T,S], from its definition. */
static unsigned char *window_mask(int T, int S, mha_causal causal, int left, int right)
{
    unsigned char *m = (unsigned char *)malloc((size_t)(T * S));
    if (!m) abort();
    for (int i = 0; i < T; i++)
        for (int j = 0; j < S; j++) {
            const long long p = causal == MHA_CAUSAL_UPPER_LEFT ? i : i + S - T;
            m[i * S + j] = (left < 0 || j >= p - left) && (right < 0 || j <= p + right);
        }
    return m;
}

TEST window_is_a_mask(mha_isa isa)
{
    static const int reach[][2] = { { 0, 0 },  { 1, 0 },     { 15, 16 }, { 64, -1 },
                                    { -1, 3 }, { 100, 250 }, { 255, 0 }, { -1, -1 } };
    for (int s = 0; s < 4; s++)
        for (int causal = 0; causal < 3; causal++) {
            const int T = shapes[s][0], S = shapes[s][1];
            problem p = problem_make(isa, 1, 2, 1, T, S, 13, 11, 200);
            p.a.mask.causal = (mha_causal)causal;
            for (int c = 0; c < 8; c++) {
                unsigned char *m = window_mask(T, S, p.a.mask.causal, reach[c][0], reach[c][1]);
                result want;
                p.a.mask.allow = m;
                ASSERT_STATUS(MHA_OK, problem_run(&p));
                want = result_of(&p);
                p.a.mask.allow = NULL;
                p.a.mask.windowed = 1;
                p.a.mask.left = reach[c][0];
                p.a.mask.right = reach[c][1];
                ASSERT_STATUS(MHA_OK, problem_run(&p));
                ASSERT(result_same(&p, &want));
                p.a.mask.windowed = p.a.mask.left = p.a.mask.right = 0;
                result_free(&want);
                free(m);
            }
            problem_free(&p);
        }
    PASS();
}

TEST wide_window_is_none(mha_isa isa)
{
    static const int reach[][2] = {
        { INT_MAX, INT_MAX }, { -1, INT_MAX }, { INT_MAX, -1 }, { 1000, 1000 }
    };
    for (int s = 0; s < 4; s++)
        for (int causal = 0; causal < 3; causal++) {
            problem p = problem_make(isa, 2, 2, 2, shapes[s][0], shapes[s][1], 16, 8, 201);
            result want;
            p.a.mask.causal = (mha_causal)causal;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            want = result_of(&p);
            p.a.mask.windowed = 1;
            for (int c = 0; c < 4; c++) {
                p.a.mask.left = reach[c][0];
                p.a.mask.right = reach[c][1];
                ASSERT_STATUS(MHA_OK, problem_run(&p));
                ASSERT(result_same(&p, &want));
            }
            result_free(&want);
            problem_free(&p);
        }
    PASS();
}

TEST key_start_is_a_mask(mha_isa isa)
{
    enum { B = 4, H = 2, T = 33, S = 300, DK = 9, DV = 16 };
    static const int start[B] = { 0, 77, 256, S }, len[B] = { S, 260, 299, 290 };
    for (int causal = 0; causal < 2; causal++) {
        problem p = problem_make(isa, B, H, H, T, S, DK, DV, 202);
        unsigned char m[B * S];
        result want;
        for (int b = 0; b < B; b++)
            for (int j = 0; j < S; j++) m[b * S + j] = j >= start[b] && j < len[b];
        p.a.mask.causal = causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
        p.a.mask.allow = m;
        p.a.mask.allow_stride = (mha_mask_stride){ S, 0, 0, 1 };
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        want = result_of(&p);
        p.a.mask.allow = NULL;
        p.a.mask.allow_stride = (mha_mask_stride){ 0, 0, 0, 0 };
        p.a.mask.key_start = start;
        p.a.mask.key_len = len;
        for (int b = 0; b < B; b++) /* nobody may look at these */
            for (int h = 0; h < H; h++)
                for (int j = 0; j < S; j++)
                    if (!m[b * S + j]) {
                        p.k[((b * H + h) * S + j) * DK] = F_NAN;
                        p.v[((b * H + h) * S + j) * DV] = F_NAN;
                    }
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(result_same(&p, &want));
        ASSERT(are_zeros(p.o + 3 * H * T * DV, H * T * DV)); /* the last sees nothing */
        result_free(&want);
        problem_free(&p);
    }
    PASS();
}

/* key_padding says which keys are out, allow which are in. */
TEST padding_is_inverted(mha_isa isa)
{
    enum { B = 3, H = 4, G = 2, T = 21, S = 290 };
    static const unsigned char yes[] = { 1, 2, 128, 255 };
    problem p = problem_make(isa, B, H, G, T, S, 24, 10, 203);
    rng r = rng_make(204);
    unsigned char *allow = byte_mask(&r, B * S, 60), padding[B * S];
    result want;

    memset(allow + S, 0, 270);   /* whole blocks without a key */
    memset(allow + 2 * S, 0, S); /* and nothing at all */
    for (int i = 0; i < B * S; i++) padding[i] = allow[i] ? 0 : yes[rng_int(&r, 0, 3)];
    p.a.mask.causal = MHA_CAUSAL;
    p.a.mask.allow = allow;
    p.a.mask.allow_stride = (mha_mask_stride){ S, 0, 0, 1 };
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.mask.allow = NULL;
    p.a.mask.allow_stride = (mha_mask_stride){ 0, 0, 0, 0 };
    p.a.mask.key_padding = padding;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(result_same(&p, &want));
    result_free(&want);
    free(allow);
    problem_free(&p);
    PASS();
}

/* ---- scores ------------------------------------------------------------------------------ */

TEST alibi_is_a_bias(mha_isa isa)
{
    enum { B = 2, H = 4, G = 2 };
    for (int s = 0; s < 3; s++)
        for (int causal = 0; causal < 3; causal++) {
            const int T = shapes[s][0], S = shapes[s][1];
            problem p = problem_make(isa, B, H, G, T, S, 17, 8, 205);
            float slopes[H], *bias = test_floats((size_t)(H * T * S), 0);
            result want;
            double tol;
            ASSERT_STATUS(MHA_OK, mha_alibi_slopes(H, slopes));
            for (int h = 0; h < H; h++)
                for (int i = 0; i < T; i++)
                    for (int j = 0; j < S; j++) {
                        const int at = causal == MHA_CAUSAL_UPPER_LEFT ? i : i + S - T;
                        bias[(h * T + i) * S + j] = -slopes[h] * (float)abs(at - j);
                    }
            p.a.mask.causal = (mha_causal)causal;
            p.a.mask.bias = bias;
            p.a.mask.bias_stride = (mha_mask_stride){ 0, T * S, S, 1 };
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            want = result_of(&p);
            p.a.mask.bias = NULL;
            p.a.alibi = slopes;
            tol = twice_promised(&p);
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(apart(p.o, want.o, p.no) <= tol);
            ASSERT(apart(p.attn, want.attn, p.nattn) <= tol);
            result_free(&want);
            free(bias);
            problem_free(&p);
        }
    PASS();
}

/* Where all keys are equally far, or the slope is 0, ALiBi changes nothing. */
TEST alibi_of_zero_slope(mha_isa isa)
{
    enum { H = 3 };
    static const float slopes[H] = { 0, 0.25f, 0 };
    problem p = problem_make(isa, 1, H, 1, 20, 275, 12, 7, 206);
    const size_t head = p.no / H;
    result want;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.alibi = slopes;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(p.o, want.o, head));
    ASSERT(!same_bits(p.o + head, want.o + head, head));
    ASSERT(same_result(p.o + 2 * head, want.o + 2 * head, head));
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* A sink may be any float. One that is lower than all scores by far weighs nothing, one that is
   higher takes all; NaN shows in rows that see a key, and in those alone. */
TEST sink_of_any_size(mha_isa isa)
{
    static const float sinks[] = { -FLT_MAX, -3e38f, 3e38f, FLT_MAX };
    problem p = problem_make(isa, 1, 1, 1, 9, 20, 8, 8, 299);
    float sink;
    result want;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.sink = &sink;
    for (int n = 0; n < 4; n++) {
        sink = sinks[n];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        if (sink < 0)
            ASSERT(apart(p.o, want.o, p.no) <= 1e-6 && apart(p.attn, want.attn, p.nattn) <= 1e-6);
        for (size_t i = 0; i < p.no && sink > 0; i++) ASSERT_EQ(0u, bits_f(p.o[i]) << 1);
        for (size_t i = 0; i < p.nattn && sink > 0; i++) ASSERT_EQ(0u, bits_f(p.attn[i]) << 1);
    }
    sink = F_NAN;
    p.a.mask.causal = MHA_CAUSAL_UPPER_LEFT;
    p.a.mask.key_start = (const int[]){ 4 };
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 20; j++) {
            const float w = p.attn[i * 20 + j];
            if (i < 4 || j < 4 || j > i) ASSERT_EQ(0u, bits_f(w) << 1);
            else ASSERT(is_nan(w));
        }
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* cap tanh(s / cap) = s - s^3 / (3 cap^2): far above the scores a cap does nothing. */
TEST large_softcap_is_none(mha_isa isa)
{
    static const float caps[] = { 2e4f, 1e8f, 1e30f };
    problem p = problem_make(isa, 2, 2, 1, 40, 270, 32, 16, 207);
    const double tol = twice_promised(&p);
    result want;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (int c = 0; c < 3; c++) {
        p.a.softcap = caps[c];
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(apart(p.o, want.o, p.no) <= tol);
        ASSERT(apart(p.attn, want.attn, p.nattn) <= tol);
        ASSERT(apart(p.lse, want.lse, p.nlse) <= 4e-6 * (1 + largest(want.lse, p.nlse)));
    }
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* Scores of +-1e30, and of +-1e38, become +-cap. */
TEST softcap_saturates(mha_isa isa)
{
    static const float sizes[] = { 1e15f, 1e19f }, caps[] = { 0.5f, 5.0f, 50.0f };
    enum { T = 9, S = 270, DK = 4, DV = 3 };
    for (int c = 0; c < 6; c++) {
        problem p = problem_make(isa, 1, 1, 1, T, S, DK, DV, 208);
        const double cap = (double)caps[c % 3];
        double want[T * DV], lse[T], top = 0;
        p.a.scale = 1;
        p.a.softcap = caps[c % 3];
        memset(p.q, 0, p.nq * sizeof(float));
        memset(p.k, 0, p.nk * sizeof(float));
        for (int i = 0; i < T; i++) p.q[i * DK] = sizes[c / 3];
        for (int j = 0; j < S; j++) p.k[j * DK] = j % 3 ? -sizes[c / 3] : sizes[c / 3];
        for (int i = 0; i < T; i++) {
            double sum = 0;
            for (int d = 0; d < DV; d++) want[i * DV + d] = 0;
            for (int j = 0; j < S; j++) {
                const double w = exp(j % 3 ? -2 * cap : 0);
                sum += w;
                for (int d = 0; d < DV; d++) want[i * DV + d] += w * (double)p.v[j * DV + d];
            }
            for (int d = 0; d < DV; d++) want[i * DV + d] /= sum;
            lse[i] = cap + log(sum);
        }
        top = largest(p.v, p.nv);
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_CLOSE(p.o, want, T * DV, (2e-6 + 12.0 / 16777216.0 * cap) * top);
        ASSERT_CLOSE(p.lse, lse, T, 1e-6 * (1 + cap + log((double)S)));
        problem_free(&p);
    }
    PASS();
}

/* ---- sinks ------------------------------------------------------------------------------- */

TEST no_sink_is_minus_infinity(mha_isa isa)
{
    enum { B = 2, H = 4, T = 20, S = 280, DV = 9 };
    problem p = problem_make(isa, B, H, 2, T, S, 15, DV, 209);
    float sink[H], *value = test_floats(H * DV, 1);
    const size_t head = T * DV;
    result want;
    p.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (int h = 0; h < H; h++) sink[h] = F_NINF;
    p.a.sink = sink;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(result_same(&p, &want));
    p.a.sink_value = value;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(result_same(&p, &want));
    sink[1] = 1.5f; /* one head alone */
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++) {
            const size_t at = (size_t)(b * H + h) * head;
            if (h == 1) ASSERT(!same_bits(p.o + at, want.o + at, head));
            else ASSERT(same_result(p.o + at, want.o + at, head));
        }
    result_free(&want);
    free(value);
    problem_free(&p);
    PASS();
}

/* The sink has weight exp(sink - lse), the keys have the rest, and o gets so much of its value. */
TEST sink_takes_its_weight(mha_isa isa)
{
    enum { B = 2, H = 3, T = 24, S = 300, DV = 10 };
    static const float sink[H] = { -2.0f, 5.0f, 60.0f };
    problem p = problem_make(isa, B, H, 1, T, S, 16, DV, 210);
    rng r = rng_make(211);
    float *value = rng_floats(&r, H * DV);
    unsigned char *allow = byte_mask(&r, B * T * S, 50);
    result plain, without;

    memset(allow + 5 * S, 0, 2 * S); /* two queries that see nothing */
    p.a.mask.allow = allow;
    p.a.mask.allow_stride = (mha_mask_stride){ T * S, 0, S, 1 };
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    plain = result_of(&p);
    p.a.sink = sink;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    without = result_of(&p);
    p.a.sink_value = value;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(p.lse, without.lse, p.nlse));
    ASSERT(same_result(p.attn, without.attn, p.nattn));
    for (int row = 0; row < B * H * T; row++) {
        const int h = row / T % H, dead = is_dead(&p.a, row / (H * T), h, row % T);
        double sum = 0, weight, old;
        if (dead) {
            ASSERT_EQ(0xff800000u, bits_f(p.lse[row]));
            ASSERT(are_zeros(p.o + row * DV, DV));
            ASSERT(are_zeros(p.attn + row * S, S));
            continue;
        }
        weight = exp((double)sink[h] - (double)p.lse[row]);
        old = exp((double)plain.lse[row]);
        for (int j = 0; j < S; j++) sum += (double)p.attn[row * S + j];
        ASSERT(fabs(weight - exp((double)sink[h]) / (exp((double)sink[h]) + old)) <= 1e-5);
        ASSERT(fabs(1 - sum - weight) <= 1e-5);
        for (int d = 0; d < DV; d++) {
            const double got = (double)p.o[row * DV + d], from = (double)without.o[row * DV + d];
            const double keys = (1 - weight) * (double)plain.o[row * DV + d];
            ASSERT(fabs(got - from - weight * (double)value[h * DV + d]) <= 1e-5);
            ASSERT(fabs(from - keys) <= 1e-5);
        }
    }
    result_free(&plain);
    result_free(&without);
    free(value);
    free(allow);
    problem_free(&p);
    PASS();
}

/* ---- extra keys in a layer --------------------------------------------------------------- */

/* Room for one call of a layer. */
typedef struct call {
    mha_args a;
    float *x, *y, *attn, *mean, *lse;
    size_t ny, nattn, nmean, nlse;
} call;

/* rows tokens of x; attn has columns columns. */
static call call_make(const net *n, int rows, int columns, uint64_t seed)
{
    call c;
    rng r = rng_make(seed);
    memset(&c, 0, sizeof c);
    c.ny = (size_t)(rows * n->cfg.d_model);
    c.nlse = (size_t)(rows * n->cfg.n_heads);
    c.nattn = c.nlse * (size_t)columns;
    c.nmean = (size_t)(rows * columns);
    c.x = rng_floats(&r, c.ny);
    c.a.x = c.x;
    c.a.y = c.y = test_floats(c.ny, 0);
    c.a.attn = c.attn = test_floats(c.nattn, 0);
    c.a.attn_mean = c.mean = test_floats(c.nmean, 0);
    c.a.lse = c.lse = test_floats(c.nlse, 0);
    return c;
}

static mha_status call_run(call *c, const mha_layer *layer)
{
    memset(c->y, 0xff, c->ny * sizeof(float));
    memset(c->attn, 0xff, c->nattn * sizeof(float));
    memset(c->mean, 0xff, c->nmean * sizeof(float));
    memset(c->lse, 0xff, c->nlse * sizeof(float));
    return mha_forward(layer, &c->a);
}

static void call_free(call *c)
{
    free(c->x);
    free(c->y);
    free(c->attn);
    free(c->mean);
    free(c->lse);
}

static int call_same(const call *a, const call *b)
{
    return same_result(a->y, b->y, a->ny) && same_result(a->attn, b->attn, a->nattn) &&
           same_result(a->mean, b->mean, a->nmean) && same_result(a->lse, b->lse, a->nlse);
}

/* A key of zeros has score 0 and adds nothing: a sink of 0, but for rows that see nothing else. */
TEST zero_attn_is_a_sink_of_zero(mha_isa isa)
{
    enum { B = 2, T = 40, D = 24, H = 4, DK = 6 };
    static const float zeros[H];
    net n[2] = { net_weights(isa, D, H, 2, DK, 9, 0, 0, 212),
                 net_weights(isa, D, H, 2, DK, 9, 0, 0, 212) };
    call c[2] = { call_make(&n[0], B * T, T, 213), call_make(&n[0], B * T, T, 213) };
    static const int blind[B] = { 0, T / 2 };

    n[0].cfg.zero_attn = 1;
    n[1].w.sink = zeros;
    for (int i = 0; i < 2; i++) {
        c[i].a.batch = B;
        c[i].a.seq = T;
        c[i].a.mask.causal = MHA_CAUSAL;
        c[i].a.mask.key_start = blind; /* the first half of the second sequence sees nothing */
        ASSERT_STATUS(MHA_OK, net_create(&n[i]));
        ASSERT_STATUS(MHA_OK, call_run(&c[i], n[i].layer));
    }
    ASSERT(apart(c[0].y, c[1].y, c[0].ny) <= 2e-5 * largest(c[0].y, c[0].ny));
    ASSERT(apart(c[0].attn, c[1].attn, c[0].nattn) <= 2e-5);
    for (int row = 0; row < B * H * T; row++) {
        if (row >= H * T && row % T < T / 2) {
            ASSERT_EQ(0u, bits_f(c[0].lse[row]) << 1); /* ln exp 0 */
            ASSERT_EQ(0xff800000u, bits_f(c[1].lse[row]));
        } else {
            ASSERT(apart(&c[0].lse[row], &c[1].lse[row], 1) <=
                   2e-5 * (1 + largest(&c[1].lse[row], 1)));
        }
    }
    for (int i = 0; i < 2; i++) {
        call_free(&c[i]);
        net_free(&n[i]);
    }
    PASS();
}

/* bias_k and bias_v are key number S, which every mask lets through. */
TEST bias_kv_is_a_key(mha_isa isa)
{
    enum { B = 2, T = 30, S = 33, D = 20, H = 4, G = 2, DK = 7, DV = 5 };
    net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 214);
    call c = call_make(&n, B * T, S, 215);
    rng r = rng_make(216);
    float *source = rng_floats(&r, B * S * D), *bias_k = rng_floats(&r, G * DK);
    float *bias_v = rng_floats(&r, G * DV), *y = test_floats(B * T * D, 0);
    float *q = test_floats(B * T * H * DK, 0), *k = test_floats(B * S * G * DK, 0);
    float *v = test_floats(B * S * G * DV, 0), *o = test_floats(B * T * H * DV, 0);
    unsigned char *allow = byte_mask(&r, T * S, 30), allow1[T * (S + 1)];
    problem p = problem_make(isa, B, H, G, T, S + 1, DK, DV, 217);

    n.w.bias_k = bias_k;
    n.w.bias_v = bias_v;
    memset(allow + 3 * S, 0, 4 * S); /* these see nothing else */
    for (int i = 0; i < T; i++) {
        memcpy(allow1 + i * (S + 1), allow + i * S, S);
        allow1[i * (S + 1) + S] = 1;
    }
    c.a.batch = B;
    c.a.seq = T;
    c.a.source_seq = S;
    c.a.source = source;
    c.a.mask.allow = allow;
    ASSERT_STATUS(MHA_OK, net_create(&n));
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));

    ASSERT_STATUS(MHA_OK, mha_project_qkv(n.layer, &c.a, q, k, v));
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++)
            for (int h = 0; h < H; h++)
                memcpy(p.q + ((b * H + h) * T + t) * DK, q + ((b * T + t) * H + h) * DK,
                       DK * sizeof(float));
        for (int g = 0; g < G; g++)
            for (int j = 0; j <= S; j++) {
                const int to = (b * G + g) * (S + 1) + j, from = (b * S + j) * G + g;
                memcpy(p.k + to * DK, j < S ? k + from * DK : bias_k + g * DK, DK * sizeof(float));
                memcpy(p.v + to * DV, j < S ? v + from * DV : bias_v + g * DV, DV * sizeof(float));
            }
    }
    p.a.mask.allow = allow1;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT_STATUS(MHA_OK, mha_merge_heads(B, T, H, DV, p.o, o));
    c.a.y = y;
    ASSERT_STATUS(MHA_OK, mha_project_out(n.layer, &c.a, o));
    ASSERT(apart(c.y, y, c.ny) <= 2e-5 * largest(y, c.ny));
    ASSERT(apart(c.lse, p.lse, c.nlse) <= 2e-5 * (1 + largest(p.lse, c.nlse)));
    for (int row = 0; row < B * H * T; row++)
        ASSERT(apart(c.attn + row * S, p.attn + row * (S + 1), S) <= 2e-5);
    free(source);
    free(bias_k);
    free(bias_v);
    free(y);
    free(q);
    free(k);
    free(v);
    free(o);
    free(allow);
    problem_free(&p);
    call_free(&c);
    net_free(&n);
    PASS();
}

/* ---- gates ------------------------------------------------------------------------------- */

TEST gate_of_one_changes_nothing(mha_isa isa)
{
    enum { B = 2, H = 3, T = 50, S = 270 };
    problem p = problem_make(isa, B, H, 1, T, S, 10, 12, 218);
    float *gate = test_floats(B * T * H, 1);
    result want;
    p.a.mask.causal = MHA_CAUSAL;
    for (int asked = 0; asked < 2; asked++) {
        if (!asked) p.a.attn = p.a.attn_mean = p.a.lse = NULL;
        p.a.gate = NULL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        want = result_of(&p);
        p.a.gate = gate;
        for (int full = 0; full < 2; full++) {
            p.a.gate_stride = (mha_gate_stride){ 0, 0, 0 };
            if (full) p.a.gate_stride = (mha_gate_stride){ T * H, H, 1 };
            ASSERT_STATUS(MHA_OK, problem_run(&p));
            ASSERT(same_result(p.o, want.o, p.no));
            if (asked) ASSERT(result_same(&p, &want));
        }
        result_free(&want);
        p.a.attn = p.attn;
        p.a.attn_mean = p.mean;
        p.a.lse = p.lse;
    }
    free(gate);
    problem_free(&p);
    PASS();
}

/* Rows that are gated off: exact zeros whatever q holds; rows that are not: their bits, times the
   gate. By head, by token and head, and broadcast over heads. */
TEST gate_of_zero_skips(mha_isa isa)
{
    enum { B = 2, H = 4, T = 45, S = 280, DK = 11, DV = 18 };
    static const mha_gate_stride strides[] = { { 0, 0, 0 }, { 0, 0, 1 },     { T * H, H, 1 },
                                               { T, 1, 0 }, { H * T, 1, T }, { 1, 0, 0 } };
    static const float values[] = { 0, 1, 0, 2, -0.5f, 0 };
    for (int c = 0; c < 6; c++) {
        problem p = problem_make(isa, B, H, 2, T, S, DK, DV, 219);
        rng r = rng_make(220 + (uint64_t)c);
        float *gate = test_floats(B * T * H, 0);
        result want;
        for (int i = 0; i < B * T * H; i++) gate[i] = values[rng_int(&r, 0, 5)];
        p.a.mask.causal = MHA_CAUSAL;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        want = result_of(&p);
        p.a.gate = gate;
        p.a.gate_stride = strides[c];
        ASSERT_STATUS(MHA_OK, problem_run(&p)); /* the weights are those without a gate */
        ASSERT(same_result(p.attn, want.attn, p.nattn));
        ASSERT(same_result(p.mean, want.mean, p.nmean));
        ASSERT(same_result(p.lse, want.lse, p.nlse));
        for (int again = 0; again < 2; again++) {
            for (int row = 0; row < B * H * T; row++) {
                const float g =
                    oracle_gate(gate, strides[c], NULL, row / (H * T), row / T % H, row % T);
                const int off = (bits_f(g) << 1) == 0;
                for (int d = 0; d < DV; d++) {
                    const float o = p.o[row * DV + d], full = want.o[row * DV + d] * g;
                    if (off) ASSERT(are_zeros(&o, 1));
                    else ASSERT(same_result(&o, &full, 1));
                }
                if (off) p.q[row * DK + DK / 2] = F_NAN;
            }
            p.a.attn = p.a.attn_mean = p.a.lse = NULL;
            ASSERT_STATUS(MHA_OK, problem_run(&p));
        }
        p.a.lse = p.lse; /* now their scores are wanted, and NaN; o is 0 all the same */
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        for (int row = 0; row < B * H * T; row++) {
            const float g =
                oracle_gate(gate, strides[c], NULL, row / (H * T), row / T % H, row % T);
            if (bits_f(g) << 1) continue;
            ASSERT(are_zeros(p.o + row * DV, DV));
            ASSERT(is_nan(p.lse[row]));
        }
        result_free(&want);
        free(gate);
        problem_free(&p);
    }
    PASS();
}

/* Keys and values that only gated-off heads would look at are not looked at. */
TEST gate_of_zero_reads_nothing(mha_isa isa)
{
    enum { H = 4, G = 2, T = 40, S = 270, DK = 8, DV = 8 };
    static const float gate[H] = { 0, 0, 1, 0 };
    problem p = problem_make(isa, 1, H, G, T, S, DK, DV, 221);
    float *bias;
    result want;
    p.a.attn = p.a.attn_mean = p.a.lse = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.gate = gate;
    for (int j = 0; j < S * DK; j++) p.k[j] = p.v[j] = F_NAN; /* of heads 0 and 1 */
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(are_zeros(p.o, 2 * T * DV));
    ASSERT(same_result(p.o + 2 * T * DV, want.o + 2 * T * DV, T * DV));
    ASSERT(are_zeros(p.o + 3 * T * DV, T * DV));
    bias = test_floats(H * T * S, F_NAN);
    memset(bias + 2 * T * S, 0, T * S * sizeof(float));
    p.a.mask.bias = bias;
    p.a.mask.bias_stride = (mha_mask_stride){ 0, T * S, S, 1 };
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(are_zeros(p.o, 2 * T * DV));
    ASSERT(same_result(p.o + 2 * T * DV, want.o + 2 * T * DV, T * DV));
    free(bias);
    result_free(&want);
    problem_free(&p);
    PASS();
}

TEST gate_of_nan_shows(mha_isa isa)
{
    enum { H = 2, T = 12, S = 30, DV = 5 };
    problem p = problem_make(isa, 1, H, H, T, S, 6, DV, 222);
    float *gate = test_floats(T * H, 1);
    result want;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    gate[7 * H + 1] = F_NAN;
    p.a.gate = gate;
    p.a.gate_stride = (mha_gate_stride){ 0, H, 1 };
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int row = 0; row < H * T; row++) {
        if (row == T + 7) ASSERT(are_nans(p.o + row * DV, DV));
        else ASSERT(same_result(p.o + row * DV, want.o + row * DV, DV));
    }
    result_free(&want);
    free(gate);
    problem_free(&p);
    PASS();
}

/* In a layer a gate is a factor on the head's rows of W_O. */
TEST gate_scales_w_o(mha_isa isa)
{
    enum { B = 2, T = 35, D = 28, H = 4, DV = 6 };
    static const float gate[H] = { 0.5f, 0, 2, 1 };
    net n = net_weights(isa, D, H, 2, 9, DV, 0, 0, 223), m;
    call c = call_make(&n, B * T, T, 224), d = call_make(&n, B * T, T, 224);

    m = net_weights(isa, D, H, 2, 9, DV, 0, 0, 223);
    for (int i = 0; i < H * DV * D; i++) m.m[3][i] *= gate[i / (DV * D)];
    ASSERT_STATUS(MHA_OK, net_create(&n));
    ASSERT_STATUS(MHA_OK, net_create(&m));
    c.a.batch = d.a.batch = B;
    c.a.seq = d.a.seq = T;
    ASSERT_STATUS(MHA_OK, call_run(&d, m.layer));
    c.a.gate = gate;
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    ASSERT(call_same(&c, &d));
    c.a.attn = c.a.attn_mean = c.a.lse = NULL;
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    ASSERT(same_result(c.y, d.y, c.ny));
    call_free(&c);
    call_free(&d);
    net_free(&n);
    net_free(&m);
    PASS();
}

/* ---- sequences of different lengths ------------------------------------------------------ */

enum { SEQS = 6, LONG_T = 70, LONG_S = 290 };
static const int lengths_q[SEQS] = { 5, 0, LONG_T, 1, 33, 17 };
static const int lengths_k[SEQS] = { 20, 9, 64, LONG_S, 0, 257 };

static void add_up(const int *lengths, int *cu)
{
    cu[0] = 0;
    for (int b = 0; b < SEQS; b++) cu[b + 1] = cu[b] + lengths[b];
}

/* Masks of all sequences, and those of one of them alone. */
typedef struct masks {
    unsigned char *allow, *padding;
    float *bias;
    int len[SEQS], start[SEQS];
} masks;

static masks masks_make(int H, int T, int S, const int *keys, uint64_t seed)
{
    masks m;
    rng r = rng_make(seed);
    m.allow = byte_mask(&r, (size_t)(SEQS * T * S), 80);
    m.padding = byte_mask(&r, (size_t)(SEQS * S), 10);
    m.bias = rng_floats(&r, (size_t)(SEQS * H * T * S));
    for (int b = 0; b < SEQS; b++) {
        m.len[b] = keys[b] - (b == 2) * 10;
        m.start[b] = b == 2 ? 5 : 0;
    }
    return m;
}

static void masks_free(masks *m)
{
    free(m->allow);
    free(m->padding);
    free(m->bias);
}

/* which: 0 none, 1 all that are given as arrays, 2 causal and a window. b: the sequence, alone. */
static mha_mask masks_of(const masks *m, int which, int H, int T, int S, int b)
{
    mha_mask k;
    memset(&k, 0, sizeof k);
    if (which == 1) {
        k.allow = m->allow + b * T * S;
        k.allow_stride = (mha_mask_stride){ T * S, 0, S, 1 };
        k.bias = m->bias + b * H * T * S;
        k.bias_stride = (mha_mask_stride){ H * T * S, T * S, S, 1 };
        k.key_len = m->len + b;
        k.key_start = m->start + b;
        k.key_padding = m->padding + b * S;
    } else if (which == 2) {
        k.causal = MHA_CAUSAL;
        k.windowed = 1;
        k.left = 20;
        k.right = -1;
    }
    return k;
}

/* Each sequence of a ragged call is a call of its own, bit for bit, whatever the threads. */
TEST ragged_is_each_alone(mha_isa isa)
{
    static const int threads[] = { 0, 1, 2, 3, 8 };
    enum { H = 4, G = 2, T = LONG_T, S = LONG_S, DK = 11, DV = 14 };
    static const float sink[H] = { 0, 1, -1, 2 };
    int cu_q[SEQS + 1], cu_k[SEQS + 1], Q, K;
    float slopes[H], *gate;
    masks m = masks_make(H, T, S, lengths_k, 225);
    rng r = rng_make(226);

    ASSERT_STATUS(MHA_OK, mha_alibi_slopes(H, slopes));
    add_up(lengths_q, cu_q);
    add_up(lengths_k, cu_k);
    Q = cu_q[SEQS];
    K = cu_k[SEQS];
    gate = rng_floats(&r, (size_t)(Q * H));
    for (int i = 0; i < Q * H; i += 3) gate[i] = 0;
    for (int c = 0; c < 9; c++) {
        const int which = c % 3, options = c / 3, TH = c % 2;
        /* one batch of all tokens: q [H,Q,d] or [Q,H,d], k and v [G,K,d] */
        problem p = problem_make(isa, 1, H, G, Q, K, DK, DV, 227);
        const mha_stride q_stride =
            TH ? (mha_stride){ 0, DK, H * DK } : (mha_stride){ 0, Q * DK, DK };
        const mha_stride o_stride =
            TH ? (mha_stride){ 0, DV, H * DV } : (mha_stride){ 0, Q * DV, DV };
        float *attn = test_floats((size_t)(H * Q * S), 0), *mean = test_floats((size_t)(Q * S), 0);
        p.a.batch = SEQS;
        p.a.cu_seq = cu_q;
        p.a.cu_source = cu_k;
        if (c % 2) p.a.seq = p.a.source_seq = 0;
        if (TH) p.a.q_stride = q_stride, p.a.o_stride = o_stride;
        p.a.mask = masks_of(&m, which, H, T, S, 0);
        p.a.attn = attn;
        p.a.attn_mean = mean;
        if (options) {
            p.a.alibi = slopes;
            p.a.gate = gate;
            p.a.gate_stride = (mha_gate_stride){ 0, H, 1 };
        }
        if (options == 2) {
            p.a.sink = sink;
            p.a.softcap = 8;
            p.a.attn = p.a.attn_mean = p.a.lse = NULL; /* now gates of 0 skip */
        }
        for (int t = 0; t < 5; t++) {
            p.a.parallel = parallel_of(threads[t]);
            memset(p.o, 0xff, p.no * sizeof(float));
            memset(p.lse, 0xff, p.nlse * sizeof(float));
            memset(attn, 0xff, (size_t)(H * Q * S) * sizeof(float));
            memset(mean, 0xff, (size_t)(Q * S) * sizeof(float));
            ASSERT_STATUS(MHA_OK, mha_sdpa(&p.a));
            for (int b = 0; b < SEQS; b++) {
                const int t_b = lengths_q[b], s_b = lengths_k[b];
                problem one = problem_make(isa, 1, H, G, t_b, s_b, DK, DV, 1);
                one.a.q = p.q + cu_q[b] * q_stride.seq;
                one.a.q_stride = q_stride;
                one.a.k = p.k + cu_k[b] * DK;
                one.a.k_stride = (mha_stride){ 0, K * DK, DK };
                one.a.v = p.v + cu_k[b] * DV;
                one.a.v_stride = (mha_stride){ 0, K * DV, DV };
                one.a.mask = masks_of(&m, which, H, T, S, b);
                if (!p.a.lse) one.a.attn = one.a.attn_mean = one.a.lse = NULL;
                one.a.alibi = p.a.alibi;
                one.a.sink = p.a.sink;
                one.a.softcap = p.a.softcap;
                if (p.a.gate) {
                    one.a.gate = gate + cu_q[b] * H;
                    one.a.gate_stride = p.a.gate_stride;
                }
                ASSERT_STATUS(MHA_OK, problem_run(&one));
                for (int h = 0; h < H; h++)
                    for (int i = 0; i < t_b; i++) {
                        const int row = h * Q + cu_q[b] + i, own = h * t_b + i;
                        const ptrdiff_t at = h * o_stride.head + (cu_q[b] + i) * o_stride.seq;
                        ASSERT(same_result(p.o + at, one.o + own * DV, DV));
                        if (!p.a.lse) continue;
                        ASSERT(same_result(p.lse + row, one.lse + own, 1));
                        ASSERT(same_result(attn + row * S, one.attn + own * s_b, (size_t)s_b));
                        ASSERT(are_zeros(attn + row * S + s_b, (size_t)(S - s_b)));
                    }
                for (int i = 0; i < t_b && p.a.lse; i++) {
                    const float *got = mean + (cu_q[b] + i) * S;
                    ASSERT(same_result(got, one.mean + i * s_b, (size_t)s_b));
                    ASSERT(are_zeros(got + s_b, (size_t)(S - s_b)));
                }
                problem_free(&one);
            }
        }
        free(attn);
        free(mean);
        problem_free(&p);
    }
    free(gate);
    masks_free(&m);
    PASS();
}

/* Sequences of one length each, as cu_seq and as a batch; and only one side ragged. */
TEST ragged_of_one_length(mha_isa isa)
{
    enum { B = 3, H = 2, T = 19, S = 41, DK = 8, DV = 6 };
    static const int cu_q[B + 1] = { 0, T, 2 * T, 3 * T }, cu_k[B + 1] = { 0, S, 2 * S, 3 * S };
    problem p = problem_make(isa, B, H, H, T, S, DK, DV, 228);
    result want;

    p.a.q_stride = (mha_stride){ T * H * DK, DK, H * DK }; /* [B,T,H,d] is [B*T,H,d] */
    p.a.k_stride = (mha_stride){ S * H * DK, DK, H * DK };
    p.a.v_stride = (mha_stride){ S * H * DV, DV, H * DV };
    p.a.o_stride = (mha_stride){ T * H * DV, DV, H * DV };
    p.a.mask.causal = MHA_CAUSAL;
    p.a.attn = NULL; /* the order of its axes is another with cu_seq */
    p.a.lse = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (int which = 1; which < 4; which++) {
        p.a.cu_seq = which & 1 ? cu_q : NULL;
        p.a.cu_source = which & 2 ? cu_k : NULL;
        p.a.seq = which & 1 ? B * T : T;
        p.a.source_seq = which & 2 ? B * S : S;
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(same_result(p.o, want.o, p.no));
        ASSERT(same_result(p.mean, want.mean, p.nmean));
    }
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* The same of a layer: self-attention, and cross-attention with either side ragged. */
TEST ragged_layer_is_each_alone(mha_isa isa)
{
    static const int threads[] = { 0, 1, 2, 3, 8 };
    enum { D = 24, H = 4, G = 2, DK = 8, DV = 5 };
    int cu_q[SEQS + 1], cu_k[SEQS + 1];
    float *gate, *source;
    rng r = rng_make(229);

    add_up(lengths_q, cu_q);
    add_up(lengths_k, cu_k);
    gate = rng_floats(&r, (size_t)(cu_q[SEQS] * H));
    source = rng_floats(&r, (size_t)(cu_k[SEQS] * D));
    for (int i = 0; i < cu_q[SEQS] * H; i += 3) gate[i] = 0;
    for (int c = 0; c < 12; c++) {
        const int which = c % 3, options = c / 3 % 2, cross = c / 6;
        const int S = cross ? LONG_S : LONG_T, *cu_s = cross ? cu_k : cu_q;
        net n = net_weights(isa, D, H, G, DK, DV, 0, 0, 230);
        call all = call_make(&n, cu_q[SEQS], S, 231);
        masks m = masks_make(H, LONG_T, S, cross ? lengths_k : lengths_q, 232);
        if (options) {
            n.cfg.alibi = 1;
            n.cfg.rope.layout = MHA_ROPE_HALF;
            n.cfg.qk_norm = MHA_NORM_RMS;
            n.cfg.zero_attn = 1;
        }
        ASSERT_STATUS(MHA_OK, net_create(&n));
        all.a.batch = SEQS;
        all.a.seq = c % 2 ? cu_q[SEQS] : 0;
        all.a.cu_seq = cu_q;
        if (cross) {
            all.a.source = source;
            all.a.source_seq = c % 2 ? cu_k[SEQS] : 0;
            all.a.cu_source = cu_k;
        }
        all.a.mask = masks_of(&m, which, H, LONG_T, S, 0);
        if (options) {
            all.a.gate = gate;
            all.a.gate_stride = (mha_gate_stride){ 0, H, 1 };
        }
        for (int t = 0; t < 5; t++) {
            all.a.parallel = parallel_of(threads[t]);
            ASSERT_STATUS(MHA_OK, call_run(&all, n.layer));
            for (int b = 0; b < SEQS; b++) {
                const int t_b = lengths_q[b], s_b = cu_s[b + 1] - cu_s[b];
                call one = call_make(&n, t_b, s_b, 1);
                one.a.batch = 1;
                one.a.seq = t_b;
                one.a.x = all.x + cu_q[b] * D;
                if (cross) {
                    one.a.source = source + cu_k[b] * D;
                    one.a.source_seq = s_b;
                }
                one.a.mask = masks_of(&m, which, H, LONG_T, S, b);
                if (options) {
                    one.a.gate = gate + cu_q[b] * H;
                    one.a.gate_stride = all.a.gate_stride;
                }
                ASSERT_STATUS(MHA_OK, call_run(&one, n.layer));
                ASSERT(same_result(all.y + cu_q[b] * D, one.y, one.ny));
                for (int i = 0; i < t_b; i++) {
                    const float *got = all.mean + (cu_q[b] + i) * S;
                    ASSERT(same_result(got, one.mean + i * s_b, (size_t)s_b));
                    ASSERT(are_zeros(got + s_b, (size_t)(S - s_b)));
                    for (int h = 0; h < H; h++) {
                        const int row = h * cu_q[SEQS] + cu_q[b] + i, own = h * t_b + i;
                        got = all.attn + row * S;
                        ASSERT(same_result(all.lse + row, one.lse + own, 1));
                        ASSERT(same_result(got, one.attn + own * s_b, (size_t)s_b));
                        ASSERT(are_zeros(got + s_b, (size_t)(S - s_b)));
                    }
                }
                call_free(&one);
            }
        }
        masks_free(&m);
        call_free(&all);
        net_free(&n);
    }
    free(gate);
    free(source);
    PASS();
}

/* ---- pieces ------------------------------------------------------------------------------ */

/* Keys in two parts, merged, are all of the keys. */
TEST merge_of_parts(mha_isa isa)
{
    static const int cuts[] = { 1, 50, 256, 299 };
    enum { B = 2, H = 3, T = 31, S = 300, DK = 12, DV = 9 };
    for (int c = 0; c < 4; c++) {
        const int first[2] = { 0, cuts[c] }, count[2] = { cuts[c], S - cuts[c] };
        problem p = problem_make(isa, B, H, H, T, S, DK, DV, 233);
        rng r = rng_make(234);
        unsigned char *allow = byte_mask(&r, T * S, 40);
        const double tol = 3e-6 * largest(p.v, p.nv); /* a promise of 2e-6, and some roundings */
        float *o[2], *lse[2], *got = test_floats(p.no, F_NAN),
                              *got_lse = test_floats(p.nlse, F_NAN);
        mha_stride stride = { 0, 0, 0 };
        memset(allow, 0, S);                   /* query 0 sees nothing */
        memset(allow + S, 0, (size_t)cuts[c]); /* query 1 nothing in the first part */
        memset(allow + 2 * S + cuts[c], 0, (size_t)(S - cuts[c]));
        p.a.mask.allow = allow;
        if (c == 1) stride = p.a.o_stride = (mha_stride){ T * H * DV, DV, H * DV };
        for (int i = 0; i < 2; i++) {
            mha_sdpa_args a = p.a;
            a.source_seq = count[i];
            a.k = p.k + first[i] * DK;
            a.k_stride = (mha_stride){ H * S * DK, S * DK, DK };
            a.v = p.v + first[i] * DV;
            a.v_stride = (mha_stride){ H * S * DV, S * DV, DV };
            a.mask.allow = allow + first[i];
            a.mask.allow_stride = (mha_mask_stride){ 0, 0, S, 1 };
            a.attn = a.attn_mean = NULL;
            a.o = o[i] = test_floats(p.no, F_NAN);
            a.lse = lse[i] = test_floats(p.nlse, F_NAN);
            ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
        }
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_STATUS(MHA_OK,
                      mha_merge(B, H, T, DV, o[0], lse[0], o[1], lse[1], stride, got, got_lse));
        ASSERT(apart(got, p.o, p.no) <= tol);
        for (int row = 0; row < B * H * T; row++) {
            const int i = row % T, b = row / (H * T), h = row / T % H;
            const ptrdiff_t at = c == 1 ? ((b * T + i) * H + h) * DV : row * DV;
            if (i == 0) {
                ASSERT_EQ(0xff800000u, bits_f(got_lse[row]));
                ASSERT(are_zeros(got + at, DV));
            } else if (i < 3) {
                ASSERT(same_bits(got + at, o[i == 1] + at, DV));
                ASSERT(same_bits(got_lse + row, lse[i == 1] + row, 1));
            } else {
                ASSERT(apart(got_lse + row, p.lse + row, 1) <=
                       3e-6 * (1 + largest(p.lse + row, 1)));
            }
        }
        /* in place, either way; and without lse */
        for (int i = 0; i < 2; i++) {
            float *o_in = copy_floats(o[i], p.no), *lse_in = copy_floats(lse[i], p.nlse);
            const float *oa = i ? o[0] : o_in, *la = i ? lse[0] : lse_in;
            const float *ob = i ? o_in : o[1], *lb = i ? lse_in : lse[1];
            ASSERT_STATUS(MHA_OK, mha_merge(B, H, T, DV, oa, la, ob, lb, stride, o_in, lse_in));
            ASSERT(same_result(o_in, got, p.no));
            ASSERT(same_result(lse_in, got_lse, p.nlse));
            free(o_in);
            free(lse_in);
        }
        p.a.o = p.o;
        memset(p.o, 0xff, p.no * sizeof(float));
        ASSERT_STATUS(MHA_OK,
                      mha_merge(B, H, T, DV, o[0], lse[0], o[1], lse[1], stride, p.o, NULL));
        ASSERT(same_result(p.o, got, p.no));
        for (int i = 0; i < 2; i++) {
            free(o[i]);
            free(lse[i]);
        }
        free(got);
        free(got_lse);
        free(allow);
        problem_free(&p);
    }
    PASS();
}

/* What was blind is not looked at: NaN in its o cannot show. */
TEST merge_ignores_the_blind(void)
{
    const float nan2[2] = { F_NAN, F_NAN }, b[2] = { 3, -4 }, lse_b[1] = { 100 };
    const float none[1] = { F_NINF }, huge[1] = { 3e38f }, low[1] = { -3e38f };
    const mha_stride s = { 0, 0, 0 };
    float o[2] = { 9, 9 }, lse[1] = { 9 };
    ASSERT_STATUS(MHA_OK, mha_merge(1, 1, 1, 2, nan2, none, b, lse_b, s, o, lse));
    ASSERT(same_bits(o, b, 2));
    ASSERT(same_bits(lse, lse_b, 1));
    ASSERT_STATUS(MHA_OK, mha_merge(1, 1, 1, 2, b, lse_b, nan2, none, s, o, lse));
    ASSERT(same_bits(o, b, 2));
    ASSERT(same_bits(lse, lse_b, 1));
    ASSERT_STATUS(MHA_OK, mha_merge(1, 1, 1, 2, nan2, none, nan2, none, s, o, lse));
    ASSERT(are_zeros(o, 2));
    ASSERT_EQ(0xff800000u, bits_f(lse[0]));
    ASSERT_STATUS(MHA_OK, mha_merge(1, 1, 1, 2, b, huge, b, low, s, o, lse));
    ASSERT(same_bits(o, b, 2)); /* far apart, and both are finite */
    ASSERT(same_bits(lse, huge, 1));
    PASS();
}

/* Queries in pieces: each piece ends at its own last key, so positions stay what they were. */
TEST chunks_of_queries(mha_isa isa)
{
    static const int pieces[][4] = { { 0, 1, 2, 90 }, { 0, 17, 33, 90 }, { 0, 64, 80, 90 } };
    enum { B = 2, H = 4, G = 2, T = 90, S = 310, DK = 10, DV = 13 };
    static const float sink[H] = { 0.5f, -1, 2, 0 };
    problem p = problem_make(isa, B, H, G, T, S, DK, DV, 235);
    float slopes[H], *value;
    rng r = rng_make(236);

    value = rng_floats(&r, H * DV);
    ASSERT_STATUS(MHA_OK, mha_alibi_slopes(H, slopes));
    p.a.mask.causal = MHA_CAUSAL;
    p.a.mask.windowed = 1;
    p.a.mask.left = 70;
    p.a.mask.right = 5;
    p.a.alibi = slopes;
    p.a.softcap = 3;
    p.a.sink = sink;
    p.a.sink_value = value;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    for (int c = 0; c < 3; c++)
        for (int n = 0; n < 3; n++) {
            const int from = pieces[c][n], t = pieces[c][n + 1] - from, s = S - T + from + t;
            problem q = problem_make(isa, B, H, G, t, s, DK, DV, 1);
            float *o = q.o, *attn = q.attn, *mean = q.mean, *lse = q.lse;
            q.a = p.a;
            q.a.seq = t;
            q.a.source_seq = s;
            q.a.q = p.q + from * DK;
            q.a.q_stride = (mha_stride){ H * T * DK, T * DK, DK };
            q.a.k_stride = (mha_stride){ G * S * DK, S * DK, DK };
            q.a.v_stride = (mha_stride){ G * S * DV, S * DV, DV };
            q.a.o = o;
            q.a.attn = attn;
            q.a.attn_mean = mean;
            q.a.lse = lse;
            ASSERT_STATUS(MHA_OK, problem_run(&q));
            for (int row = 0; row < B * H * t; row++) {
                const int full = row / t * T + from + row % t;
                ASSERT(same_result(q.o + row * DV, p.o + full * DV, DV));
                ASSERT(same_result(q.lse + row, p.lse + full, 1));
                ASSERT(same_result(q.attn + row * s, p.attn + full * S, (size_t)s));
            }
            problem_free(&q);
        }
    free(value);
    problem_free(&p);
    PASS();
}

/* ---- rotary positions -------------------------------------------------------------------- */

static mha_rope rope_of(mha_rope_layout layout)
{
    mha_rope r;
    memset(&r, 0, sizeof r);
    r.layout = layout;
    return r;
}

static const mha_stride contiguous = { 0, 0, 0 };

TEST rotate_known_numbers(void)
{
    const double want[] = { -0.416147, 0.909297, 0.999996, 0.002828 };
    const int at[] = { 2 };
    float x[] = { 1, 0, 1, 0 };
    mha_rope rope = rope_of(MHA_ROPE_INTERLEAVED);
    rope.base = 500000;
    ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 1, 1, 1, 4, x, contiguous, at));
    ASSERT_CLOSE(x, want, 4, 1e-6);
    PASS();
}

/* Every layout, scaling and width against the oracle; what lies beyond the width keeps its bits. */
TEST rotate_as_the_oracle(void)
{
    enum { B = 2, H = 3, T = 20, DMAX = 64 };
    for (int c = 0; c < 2 * 5 * 4; c++) {
        static const int widths[] = { 0, 2, 6, 40 };
        mha_rope rope = rope_of(c % 2 ? MHA_ROPE_HALF : MHA_ROPE_INTERLEAVED);
        const int width = widths[c / 10], d = c % 3 ? DMAX : 42, own = c % 4 < 2;
        const double grow = c / 2 % 5 == MHA_ROPE_YARN ? 1.2 : 1;
        rng r = rng_make(240 + (uint64_t)c);
        float *x = rng_floats(&r, (size_t)(B * T * H * d)),
              *y = copy_floats(x, (size_t)(B * T * H * d));
        const mha_stride stride = { T * H * d, d, H * d };
        int at[B * T];

        rope.width = width;
        rope.scaling = (mha_rope_scaling)(c / 2 % 5);
        if (rope.scaling == MHA_ROPE_NTK && width == 2) rope.scaling = MHA_ROPE_LINEAR;
        if (rope.scaling != MHA_ROPE_PLAIN) rope.factor = 4;
        if (rope.scaling == MHA_ROPE_YARN || rope.scaling == MHA_ROPE_LLAMA3) rope.original = 512;
        if (c > 20) rope.base = 500000;
        for (int i = 0; i < B * T; i++) at[i] = own ? i % T : rng_int(&r, -300, 130000);
        ASSERT_STATUS(MHA_OK, mha_rotate(&rope, B, H, T, d, y, stride, own ? NULL : at));
        for (int i = 0; i < B * T * H; i++) {
            const int w = width ? width : d;
            double want[DMAX], size = 0;
            for (int k = 0; k < d; k++) want[k] = (double)x[i * d + k];
            for (int k = 0; k < d; k++)
                if (fabs(want[k]) > size) size = fabs(want[k]);
            oracle_rotate(&rope, d, at[i / H], want);
            /* cos and sin are rounded, the products and their sum: three times 2^-24 of each */
            ASSERT_CLOSE(y + i * d, want, (size_t)d, 6.0 / 16777216.0 * size * grow);
            ASSERT(same_bits(y + i * d + w, x + i * d + w, (size_t)(d - w)));
        }
        free(x);
        free(y);
    }
    PASS();
}

/* Rotation keeps lengths, and q.k knows only how far apart the two are. */
TEST rotation_is_relative(void)
{
    enum { D = 32, N = 5 };
    static const int shifts[N] = { 0, 1, -40, 1000, 20000 };
    rng r = rng_make(237);
    for (int layout = MHA_ROPE_HALF; layout <= MHA_ROPE_INTERLEAVED; layout++)
        for (int gap = 0; gap < 50; gap += 7) {
            const mha_rope rope = rope_of((mha_rope_layout)layout);
            float q[D], k[D];
            double dots[N], norm = 0;
            rng_fill(&r, q, D);
            rng_fill(&r, k, D);
            for (int d = 0; d < D; d++) norm += (double)q[d] * (double)q[d];
            for (int n = 0; n < N; n++) {
                const int at_q = shifts[n] + gap, at_k = shifts[n];
                float a[D], b[D];
                double size = 0;
                memcpy(a, q, sizeof a);
                memcpy(b, k, sizeof b);
                ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 1, 1, 1, D, a, contiguous, &at_q));
                ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 1, 1, 1, D, b, contiguous, &at_k));
                dots[n] = 0;
                for (int d = 0; d < D; d++) {
                    dots[n] += (double)a[d] * (double)b[d];
                    size += (double)a[d] * (double)a[d];
                }
                ASSERT(fabs(size - norm) <= 1e-6 * norm);
                ASSERT(fabs(dots[n] - dots[0]) <= 1e-6 * D);
            }
        }
    PASS();
}

/* The two layouts are one rotation of numbers that lie in another order. */
TEST layouts_agree(void)
{
    enum { T = 40, D = 22, W = 18 };
    mha_rope rope = rope_of(MHA_ROPE_HALF);
    rng r = rng_make(238);
    float *x = rng_floats(&r, T * D), *y = copy_floats(x, T * D);
    rope.width = W;
    for (int t = 0; t < T; t++)
        for (int i = 0; i < W / 2; i++) {
            y[t * D + 2 * i] = x[t * D + i];
            y[t * D + 2 * i + 1] = x[t * D + W / 2 + i];
        }
    ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 1, 1, T, D, x, contiguous, NULL));
    rope.layout = MHA_ROPE_INTERLEAVED;
    ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 1, 1, T, D, y, contiguous, NULL));
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < W / 2; i++) {
            ASSERT(apart(&y[t * D + 2 * i], &x[t * D + i], 1) <= 1e-6);
            ASSERT(apart(&y[t * D + 2 * i + 1], &x[t * D + W / 2 + i], 1) <= 1e-6);
        }
        ASSERT(same_bits(y + t * D + W, x + t * D + W, D - W));
    }
    free(x);
    free(y);
    PASS();
}

/* A layer's q and k are those of a plain layer, normed and then rotated; v is untouched. */
TEST layer_norms_and_rotates(mha_isa isa)
{
    enum { B = 2, T = 27, D = 20, H = 4, G = 2, DK = 10, DV = 6 };
    for (int c = 0; c < 6; c++) {
        const mha_norm norm = (mha_norm)(c % 3);
        net n[2] = { net_weights(isa, D, H, G, DK, DV, 0, 0, 239),
                     net_weights(isa, D, H, G, DK, DV, 0, 0, 239) };
        rng r = rng_make(240);
        float *x = rng_floats(&r, B * T * D), *w = rng_floats(&r, 4 * DK);
        float *q[2], *k[2], *v[2];
        int at[B * T];
        mha_args a;

        for (int i = 0; i < B * T; i++) at[i] = rng_int(&r, 0, 4000);
        n[1].cfg.qk_norm = norm;
        if (c / 3) {
            n[1].cfg.rope.layout = MHA_ROPE_HALF;
            n[1].cfg.rope.width = 8;
        }
        if (norm != MHA_NORM_NONE) n[1].w.q_norm = w, n[1].w.k_norm = w + DK;
        if (norm == MHA_NORM_LAYER)
            n[1].w.q_norm_bias = w + 2 * DK, n[1].w.k_norm_bias = w + 3 * DK;
        memset(&a, 0, sizeof a);
        a.batch = B;
        a.seq = T;
        a.x = x;
        a.positions = at;
        for (int i = 0; i < 2; i++) {
            q[i] = test_floats(B * T * H * DK, F_NAN);
            k[i] = test_floats(B * T * G * DK, F_NAN);
            v[i] = test_floats(B * T * G * DV, F_NAN);
            ASSERT_STATUS(MHA_OK, net_create(&n[i]));
            ASSERT_STATUS(MHA_OK, mha_project_qkv(n[i].layer, &a, q[i], k[i], v[i]));
        }
        ASSERT(same_result(v[0], v[1], B * T * G * DV));
        for (int i = 0; i < B * T * (H + G); i++) {
            const int is_k = i >= B * T * H, row = is_k ? i - B * T * H : i;
            const int token = is_k ? row / G : row / H;
            const float *from = (is_k ? k[0] : q[0]) + row * DK;
            const float *to = (is_k ? k[1] : q[1]) + row * DK;
            double want[DK], mean = 0, square = 0, size = 1, weights = 1;
            for (int d = 0; d < DK; d++) {
                want[d] = (double)from[d];
                mean += norm == MHA_NORM_LAYER ? want[d] / DK : 0;
                if (fabs((double)w[is_k * DK + d]) > weights)
                    weights = fabs((double)w[is_k * DK + d]);
            }
            for (int d = 0; d < DK; d++) square += (want[d] - mean) * (want[d] - mean) / DK;
            for (int d = 0; d < DK && norm; d++) {
                want[d] =
                    (want[d] - mean) / sqrt(square + (double)1e-6f) * (double)w[is_k * DK + d];
                if (norm == MHA_NORM_LAYER) want[d] += (double)w[(2 + is_k) * DK + d];
            }
            /* a norm divides the errors of q and k, 2^-24 of numbers up to 3, by its root */
            if (norm) size = (1 + largest(from, DK) / sqrt(square)) * weights;
            if (c / 3) oracle_rotate(&n[1].cfg.rope, DK, at[token], want);
            if (c == 0) ASSERT(same_bits(from, to, DK));
            ASSERT_CLOSE(to, want, DK, 1e-6 * (size + max_abs(want, DK)));
        }
        for (int i = 0; i < 2; i++) {
            free(q[i]);
            free(k[i]);
            free(v[i]);
            net_free(&n[i]);
        }
        free(x);
        free(w);
    }
    PASS();
}

/* Moving all positions of self-attention together changes nothing but roundings. */
TEST positions_may_be_shifted(mha_isa isa)
{
    enum { B = 2, T = 30, D = 32, H = 2, SHIFT = 1000 };
    net n = net_weights(isa, D, H, H, D / H, D / H, 0, 0, 241);
    call c = call_make(&n, B * T, T, 242);
    float *first;
    int at[B * T];

    n.cfg.rope.layout = MHA_ROPE_INTERLEAVED;
    ASSERT_STATUS(MHA_OK, net_create(&n));
    c.a.batch = B;
    c.a.seq = T;
    c.a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    first = copy_floats(c.y, c.ny);
    for (int i = 0; i < B * T; i++) at[i] = i % T; /* the default, in full */
    c.a.positions = at;
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    ASSERT(same_result(c.y, first, c.ny));
    for (int i = 0; i < B * T; i++) at[i] += SHIFT;
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    ASSERT(apart(c.y, first, c.ny) <= 2e-5 * largest(first, c.ny));
    for (int i = 0; i < B * T; i++) at[i] = 2 * (i % T); /* another thing altogether */
    ASSERT_STATUS(MHA_OK, call_run(&c, n.layer));
    ASSERT(apart(c.y, first, c.ny) > 1e-3 * largest(first, c.ny));
    free(first);
    call_free(&c);
    net_free(&n);
    PASS();
}

/* ---- slopes ------------------------------------------------------------------------------ */

TEST usual_slopes(void)
{
    static const int heads[] = { 1, 2, 3, 8, 12, 16, 17, 40 };
    double want[40];
    float got[41];
    ASSERT_STATUS(MHA_OK, mha_alibi_slopes(8, got));
    for (int i = 0; i < 8; i++) ASSERT_EQ(bits_f(ldexpf(1.0f, -1 - i)), bits_f(got[i]));
    ASSERT_STATUS(MHA_OK, mha_alibi_slopes(12, got));
    for (int i = 0; i < 8; i++) ASSERT_EQ(bits_f(ldexpf(1.0f, -1 - i)), bits_f(got[i]));
    for (int i = 0; i < 4; i++) want[i] = pow(2, -0.5 - i);
    ASSERT_CLOSE(got + 8, want, 4, 1e-7);
    for (int c = 0; c < 8; c++) {
        got[heads[c]] = 77;
        ASSERT_STATUS(MHA_OK, mha_alibi_slopes(heads[c], got));
        oracle_slopes(heads[c], want);
        ASSERT_CLOSE(got, want, (size_t)heads[c], 1e-7);
        ASSERT_EQ(bits_f(77), bits_f(got[heads[c]]));
    }
    PASS();
}

SUITE(shape_suite)
{
    RUN_ON_EACH_ISA(window_is_a_mask);
    RUN_ON_EACH_ISA(wide_window_is_none);
    RUN_ON_EACH_ISA(key_start_is_a_mask);
    RUN_ON_EACH_ISA(padding_is_inverted);
    RUN_ON_EACH_ISA(alibi_is_a_bias);
    RUN_ON_EACH_ISA(alibi_of_zero_slope);
    RUN_ON_EACH_ISA(sink_of_any_size);
    RUN_ON_EACH_ISA(large_softcap_is_none);
    RUN_ON_EACH_ISA(softcap_saturates);
    RUN_ON_EACH_ISA(no_sink_is_minus_infinity);
    RUN_ON_EACH_ISA(sink_takes_its_weight);
    RUN_ON_EACH_ISA(zero_attn_is_a_sink_of_zero);
    RUN_ON_EACH_ISA(bias_kv_is_a_key);
    RUN_ON_EACH_ISA(gate_of_one_changes_nothing);
    RUN_ON_EACH_ISA(gate_of_zero_skips);
    RUN_ON_EACH_ISA(gate_of_zero_reads_nothing);
    RUN_ON_EACH_ISA(gate_of_nan_shows);
    RUN_ON_EACH_ISA(gate_scales_w_o);
    RUN_ON_EACH_ISA(ragged_is_each_alone);
    RUN_ON_EACH_ISA(ragged_of_one_length);
    RUN_ON_EACH_ISA(ragged_layer_is_each_alone);
    RUN_ON_EACH_ISA(merge_of_parts);
    RUN_TEST(merge_ignores_the_blind);
    RUN_ON_EACH_ISA(chunks_of_queries);
    RUN_TEST(rotate_known_numbers);
    RUN_TEST(rotate_as_the_oracle);
    RUN_TEST(rotation_is_relative);
    RUN_TEST(layouts_agree);
    RUN_ON_EACH_ISA(layer_norms_and_rotates);
    RUN_ON_EACH_ISA(positions_may_be_shifted);
    RUN_TEST(usual_slopes);
}
