/* test_kernels.c - the inner loops, called as mha.h calls them: 2^x over its whole range; products,
   softmax and transpose against double; what their contract says of bits; nothing touched outside
   the operands. Then the precision of attention and of the layer, at sizes people have.
   This file holds an implementation of its own, to reach what is private. */
#if !defined(_WIN32) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* mmap, MAP_ANONYMOUS, sigsetjmp under -std=c99 */
#endif
#define MHA_STATIC
#define MHA_IMPLEMENTATION
#include "fixture.h"

#if defined(__unix__) || defined(__APPLE__)
#define HAVE_FENCES
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

/* Below this many cases the run is meant to be short: a sanitizer, an emulator. */
#define SHORT_RUN (test_cases < 500)

static char note[256]; /* what a test measured: the message it passes with */

/* Where row i, column j of a tile is. */
static size_t at(const mha__kernels *kern, int i, int j)
{
    return (size_t)((j / MHA__NR * kern->mr + i) * MHA__NR + j % MHA__NR);
}

/* ---- 2^x ------------------------------------------------------------------------------------ */

/* Measured over every float of [-140, 0]: with FMA 0.952 ulp, without it 1.228. */
#define EXP_ULP 1.0
#define EXP_ULP_SCALAR 1.29

/* How far got is from want >= 2^-126, in units of want's last place. */
static double ulps(float got, double want)
{
    uint64_t u;
    double unit;
    memcpy(&u, &want, sizeof u);
    u &= 0x7ff0000000000000u; /* the power of two in want */
    memcpy(&unit, &u, sizeof unit);
    return fabs((double)got - want) / (unit / 8388608);
}

/* s = 2^s for s <= 0, one tile of np blocks, by softmax or by weigh. */
static void exp_tile(const mha__kernels *kern, int np, float *s, int weigh)
{
    float top[MHA__MR_MAX], one[MHA__MR_MAX], sum[MHA__MR_MAX], alpha[MHA__MR_MAX];
    for (int i = 0; i < MHA__MR_MAX; i++) top[i] = sum[i] = alpha[i] = 0.0f, one[i] = 1.0f;
    if (weigh) {
        for (int i = 0; i < np * kern->mr * MHA__NR; i++) s[i] /= 16;
        kern->weigh(kern->mr, np, s, top, one);
    } else {
        kern->softmax(kern->mr, np, s, top, sum, alpha);
    }
}

TEST exp_sweep(mha_isa isa)
{
    enum { NP = 64, LAST = 0x430c0000 };            /* bits of 140 */
    const double tiny = 1.17549435082228750797e-38; /* 2^-126 */
    const mha__kernels *kern = mha__kernels_for(isa);
    const double limit = isa == MHA_ISA_SCALAR ? EXP_ULP_SCALAR : EXP_ULP;
    const uint32_t step = SHORT_RUN ? 4099 : 131, n = (uint32_t)(NP * kern->mr * MHA__NR);
    float *x = test_floats(n, 0.0f), *y[2];
    double worst[2] = { 0, 0 };
    float where[2] = { 0, 0 };
    uint32_t u = (uint32_t)(test_seed % step), used;
    int denormals = 1;
    y[0] = test_floats(n, 0.0f);
    y[1] = test_floats(n, 0.0f);
    while (u <= LAST) {
        for (used = 0; used < n && u <= LAST; used++, u += step) x[used] = f_bits(u | 0x80000000u);
        for (int way = 0; way < 2; way++) {
            memcpy(y[way], x, n * sizeof *x);
            exp_tile(kern, NP, y[way], way);
        }
        for (uint32_t i = 0; i < used; i++) {
            const double want = exp2((double)x[i]);
            for (int way = 0; way < 2; way++) {
                const double got = (double)y[way][i];
                double e;
                ASSERTm("not in [0, 1]", is_finite(y[way][i]) && got >= 0 && got <= 1);
                if (want < tiny) { /* 0, or the denormal next to it */
                    denormals &= got <= 0 || fabs(got - want) <= tiny / 8388608;
                    continue;
                }
                e = ulps(y[way][i], want);
                if (e > worst[way]) worst[way] = e, where[way] = x[i];
            }
        }
    }
    snprintf(note, sizeof note, "softmax %.4f ulp at %.9g, weigh %.4f ulp at %.9g", worst[0],
             (double)where[0], worst[1], (double)where[1]);
    if (!(worst[0] <= limit && worst[1] <= limit)) FAILm(note);
    ASSERTm("a result below 2^-126 is neither 0 nor next to 2^x", denormals);
    free(x);
    free(y[0]);
    free(y[1]);
    PASSm(note);
}

TEST exp_special(mha_isa isa)
{
    static const float gone[] = { -150.00002f, -151,   -152.5f, -200,    -1000,
                                  -65536.5f,   -1e10f, -1e30f,  -1.5e38f };
    static const uint32_t nan[] = { 0x7fc00000u, 0xffc00000u, 0x7f800001u,
                                    0xff800001u, 0x7fffffffu, 0xffffffffu };
    enum { GONE = sizeof gone / sizeof *gone, NANS = sizeof nan / sizeof *nan };
    const mha__kernels *kern = mha__kernels_for(isa);
    const int n = kern->mr * MHA__NR;
    for (int way = 0; way < 2; way++)
        for (int where = 0; where < n; where++) { /* every lane in turn */
            float s[MHA__MR_MAX * MHA__NR];
            for (int i = 0; i < n; i++) s[i] = i % 2 ? f_bits(0x80000000u) : 0.0f;
            exp_tile(kern, 1, s, way);
            for (int i = 0; i < n; i++) ASSERTm("2^0 is 1", bits_f(s[i]) == 0x3f800000u);

            for (int i = 0; i < n; i++) s[i] = gone[(i + where) % GONE];
            s[where] = F_NINF;
            exp_tile(kern, 1, s, way);
            for (int i = 0; i < n; i++) ASSERTm("0 far below", bits_f(s[i]) == 0);

            for (int i = 0; i < n; i++) s[i] = (float)-i;
            s[where] = f_bits(nan[where % NANS]);
            exp_tile(kern, 1, s, way);
            ASSERTm("NaN gives NaN", is_nan(s[where]));
        }
    PASS();
}

/* ---- gemm ----------------------------------------------------------------------------------- */

static const int depths[] = { 0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100 };
enum { DEPTHS = sizeof depths / sizeof *depths, NP_MAX = 9, K_MAX = 102 };
enum { A_MAX = (K_MAX / MHA__NR + 1) * MHA__MR_MAX * MHA__NR, EDGE = 32 };
enum { B_MAX = NP_MAX * MHA__NR * (K_MAX + 9), C_MAX = NP_MAX * MHA__MR_MAX * MHA__NR + 2 * EDGE };

/* c = start * c + a b. What is not an operand is NaN, with bits of its own. */
typedef struct product {
    const mha__kernels *kern;
    int m, np, k;
    ptrdiff_t b_row, b_panel;
    const float *start; /* null, or factor */
    mha__wanted *wanted;
    float factor[MHA__MR_MAX];
    float a[A_MAX], b[B_MAX], c[C_MAX]; /* c: from EDGE on */
} product;

#define CANARY 0x7fe5a5a5u

static void product_make(product *p, const mha__kernels *kern, int m, int np, int k, int strided,
                         int given, rng *r)
{
    size_t i;
    p->wanted = NULL;
    p->kern = kern;
    p->m = m, p->np = np, p->k = k;
    p->b_row = strided ? NP_MAX * MHA__NR + 5 : MHA__NR;
    p->b_panel = strided ? MHA__NR : (K_MAX + 1) * MHA__NR;
    for (i = 0; i < A_MAX; i++) p->a[i] = f_bits(CANARY);
    for (i = 0; i < B_MAX; i++) p->b[i] = f_bits(CANARY);
    for (i = 0; i < C_MAX; i++) p->c[i] = f_bits(CANARY);
    for (i = 0; i < MHA__MR_MAX; i++) p->factor[i] = f_bits(CANARY);
    p->start = given ? p->factor : NULL;
    for (int y = 0; y < m; y++) {
        p->factor[y] = rng_chance(r, 20) ? 0.0f : fabsf(rng_normal(r));
        for (int x = 0; x < k; x++) p->a[at(kern, y, x)] = rng_normal(r);
        if (given)
            for (int x = 0; x < np * MHA__NR; x++) /* not negative: adding 0 to -0 changes it */
                p->c[EDGE + at(kern, y, x)] =
                    p->factor[y] > 0 ? rng_normal(r) : fabsf(rng_normal(r));
    }
    for (int y = 0; y < k; y++)
        for (int x = 0; x < np * MHA__NR; x++)
            p->b[y * p->b_row + x / MHA__NR * p->b_panel + x % MHA__NR] = rng_normal(r);
}

/* Columns k0 .. k0+k-1 of a, rows i0 .. i0+m-1, panels p0 .. p0+np-1. */
static void product_part(const product *p, int i0, int m, int p0, int np, int k0, int k, float *c,
                         const float *start)
{
    p->kern->gemm(m, np, k, p->a + at(p->kern, i0, k0), p->b + k0 * p->b_row + p0 * p->b_panel,
                  p->b_row, p->b_panel, c + EDGE + at(p->kern, i0, p0 * MHA__NR),
                  start ? start + i0 : NULL, p->wanted);
}

/* Bit for bit, all of c; with TEST_FAST_MATH the numbers to 1e-5, what is not in c by bits. */
static int same_c(const product *p, const float *x, const float *y)
{
#ifdef TEST_FAST_MATH
    for (size_t i = 0; i < C_MAX; i++)
        if (bits_f(x[i]) == CANARY ? bits_f(y[i]) != CANARY : !same_result(x + i, y + i, 1))
            return 0;
    (void)p;
    return 1;
#else
    (void)p;
    return same_bits(x, y, C_MAX);
#endif
}

static enum greatest_test_res product_check(product *p)
{
    const mha__kernels *kern = p->kern;
    const int m = p->m, np = p->np, k = p->k;
    static float whole[C_MAX], part[C_MAX];
    static mha__wanted wanted;
    float ones[MHA__MR_MAX];
    for (int i = 0; i < MHA__MR_MAX; i++) ones[i] = 1.0f;
    memcpy(whole, p->c, sizeof whole);
    product_part(p, 0, m, 0, np, 0, k, whole, p->start);

    for (int i = 0; i < C_MAX; i++) { /* rows from m on, and around */
        const int y = (i - EDGE) / MHA__NR % kern->mr, x = i - EDGE;
        if (x < 0 || x >= np * kern->mr * MHA__NR || y >= m)
            ASSERTm("written outside of c", bits_f(whole[i]) == CANARY);
    }
    for (int y = 0; y < m; y++)
        for (int x = 0; x < np * MHA__NR; x++) {
            const size_t here = EDGE + at(kern, y, x);
            double want = p->start ? (double)p->start[y] * (double)p->c[here] : 0;
            double size = fabs(want);
            for (int i = 0; i < k; i++) {
                const float *b = p->b + i * p->b_row + x / MHA__NR * p->b_panel + x % MHA__NR;
                const double term = (double)p->a[at(kern, y, i)] * (double)*b;
                want += term;
                size += fabs(term);
            }
            ASSERT_CLOSE(whole + here, &want, 1, size * (k + 2) * 6e-8);
        }

    /* all that is wanted is asked for (where anything is), and nothing comes of it */
    mha__wanted_none(&wanted);
    for (int i = (m * 97 + np * 41 + k * 7) % (MHA__WANTED + 2); i > 0; i--)
        mha__want(&wanted, p->b + i, 0, 1, i % 9);
    p->wanted = &wanted;
    memcpy(part, p->c, sizeof part);
    product_part(p, 0, m, 0, np, 0, k, part, p->start);
    p->wanted = NULL;
    ASSERTm("with lines wanted", same_c(p, whole, part));
    ASSERT(wanted.n <= MHA__WANTED);
    ASSERT_EQ_FMT(k == 0 || kern->isa == MHA_ISA_SCALAR ? 0 : wanted.n, wanted.at, "%d");

    for (int cut = MHA__NR; cut < k; cut += MHA__NR) {
        memcpy(part, p->c, sizeof part);
        product_part(p, 0, m, 0, np, 0, cut, part, p->start);
        product_part(p, 0, m, 0, np, cut, k - cut, part, ones);
        ASSERTm("k in two parts", same_c(p, whole, part));
    }
    if (k > 0) {
        memcpy(part, p->c, sizeof part);
        for (int i = 0; i < k; i++) product_part(p, 0, m, 0, np, i, 1, part, i ? ones : p->start);
        ASSERTm("k one by one", same_c(p, whole, part));
    }
    memcpy(part, p->c, sizeof part);
    for (int i = 0; i < m; i++) product_part(p, i, 1, 0, np, 0, k, part, p->start);
    ASSERTm("row by row", same_c(p, whole, part));
    memcpy(part, p->c, sizeof part);
    for (int i = 0; i < np; i++) product_part(p, 0, m, i, 1, 0, k, part, p->start);
    ASSERTm("panel by panel", same_c(p, whole, part));

    for (int i = k; i < k + 2; i++) { /* two terms more where a is 0 */
        for (int y = 0; y < m; y++) p->a[at(kern, y, i)] = 0.0f;
        for (int x = 0; x < np * MHA__NR; x++)
            p->b[i * p->b_row + x / MHA__NR * p->b_panel + x % MHA__NR] = (float)(x - 40);
    }
    memcpy(part, p->c, sizeof part);
    product_part(p, 0, m, 0, np, 0, k + 2, part, p->start);
    ASSERTm("terms where a is 0", same_c(p, whole, part));
    PASS();
}

TEST gemm_contract(mha_isa isa)
{
    static product p;
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 100);
    for (int m = 1; m <= kern->mr; m++)
        for (int np = 1; np <= NP_MAX; np++)
            for (int k = 0; k < DEPTHS; k++)
                for (int way = 0; way < 4; way++) {
                    enum greatest_test_res res;
                    product_make(&p, kern, m, np, depths[k], way % 2, way / 2, &r);
                    res = product_check(&p);
                    if (res != GREATEST_TEST_RES_PASS)
                        printf("  m %d, np %d, k %d, %s, start %s\n", m, np, depths[k],
                               way % 2 ? "strided" : "packed", way / 2 ? "given" : "null");
                    CHECK_CALL(res);
                }
    PASS();
}

/* Keys in place give the bits that packed ones give. */
TEST dots_contract(mha_isa isa)
{
    static product p;
    static float rows[NP_MAX * MHA__NR * (K_MAX + 9)], got[C_MAX], want[C_MAX];
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 150);
    if (!kern->dots) SKIPm("this table has none");
    for (int m = 1; m <= kern->mr; m++)
        for (int np = 1; np <= NP_MAX; np++)
            for (int k = MHA__NR; k < K_MAX; k += 2 * MHA__NR)
                for (int way = 0; way < 6; way++) { /* nothing next; apart; adjacent */
                    const int b_row = way % 3 == 1 ? K_MAX + 9 : k;
                    product_make(&p, kern, m, np, k, 0, 0, &r);
                    for (int y = 0; y < np * MHA__NR; y++)
                        for (int x = 0; x < k; x++)
                            rows[y * b_row + x] =
                                p.b[x * p.b_row + y / MHA__NR * p.b_panel + y % MHA__NR];
                    memcpy(want, p.c, sizeof want);
                    memcpy(got, p.c, sizeof got);
                    product_part(&p, 0, m, 0, np, 0, k, want, NULL);
                    kern->dots(m, np, k, p.a, rows, b_row, way % 3 ? rows : NULL,
                               way < 3 ? MHA__ASKS_NOT : MHA__ASKS_LINES, got + EDGE);
                    if (!same_c(&p, want, got)) printf("  m %d, np %d, k %d\n", m, np, k);
                    ASSERTm("keys in place", same_c(&p, want, got));
                }
    PASS();
}

TEST finite_contract(mha_isa isa)
{
    static const uint32_t odd[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u };
    static const uint32_t fine[] = { 0x7f7fffffu, 0xff7fffffu, 0x00000001u, 0x80000000u };
    const mha__kernels *kern = mha__kernels_for(isa);
    float x[5 * MHA__NR];
    for (int n = 0; n <= 4 * MHA__NR; n += MHA__NR) {
        for (int i = 0; i < 5 * MHA__NR; i++) x[i] = f_bits(i < n ? fine[i % 4] : odd[i % 4]);
        ASSERT(kern->finite(n, x));
        for (int i = 0; i < n; i++) { /* every place in turn */
            x[i] = f_bits(odd[(i + n) % 4]);
            ASSERT_FALSE(kern->finite(n, x));
            x[i] = 1.0f;
        }
    }
    PASS();
}

/* ---- softmax, weigh, transpose ----------------------------------------------------------------- */

#define DENORMAL 1.18e-38 /* results below 2^-126 may be 0 */

/* |got/2^x - 1| is at most this: x is the difference of two floats, rounded. */
static double exp_tol(double x)
{
    return (fabs(x) + 3) * (double)FLT_EPSILON;
}

/* The total as it is defined, of row i of np blocks. */
static float total_of(const mha__kernels *kern, const float *s, int i, int np)
{
    volatile float lane[MHA__NR]; /* volatile: in this order also with -ffast-math */
    for (int j = 0; j < MHA__NR; j++) lane[j] = 0.0f;
    for (int j = 0; j < np * MHA__NR; j++) lane[j % MHA__NR] += s[at(kern, i, j)];
    for (int half = MHA__NR / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

static int same_sum(float got, float was, float alpha, float total)
{
    volatile float scaled = was * alpha;
#ifdef TEST_FAST_MATH
    return fabs((double)got - (double)scaled - (double)total) <= 1e-5 * fabs((double)got);
#else
    volatile float sum = scaled + total; /* or with one rounding less, where there is FMA */
    return got == sum || got == fmaf(was, alpha, total);
#endif
}

/* Scores of m rows: some excluded, now and then a whole row of them. */
static void scores_make(const mha__kernels *kern, int m, int np, float size, float *s, rng *r)
{
    for (int i = 0; i < np * kern->mr * MHA__NR; i++) s[i] = f_bits(CANARY);
    for (int i = 0; i < m; i++) {
        const int excluded = rng_chance(r, 10) ? 100 : rng_chance(r, 50) ? 20 : 0;
        for (int j = 0; j < np * MHA__NR; j++)
            s[at(kern, i, j)] = rng_chance(r, excluded) ? F_NINF : size * rng_normal(r);
    }
}

static int canaries(const mha__kernels *kern, int m, int np, const float *s)
{
    for (int i = m; i < kern->mr; i++)
        for (int j = 0; j < np * MHA__NR; j++)
            if (bits_f(s[at(kern, i, j)]) != CANARY) return 0;
    return 1;
}

static int excluded(float score)
{
    return bits_f(score) == 0xff800000u;
}

enum { BLOCKS = 5, WIDE = 17 };

static enum greatest_test_res softmax_check(const mha__kernels *kern, int m, float size, rng *r)
{
    static float s[BLOCKS][WIDE * MHA__MR_MAX * MHA__NR], e[WIDE * MHA__MR_MAX * MHA__NR];
    float top[MHA__MR_MAX + 1], sum[MHA__MR_MAX + 1], alpha[MHA__MR_MAX + 1];
    int np[BLOCKS];
    for (int i = 0; i <= MHA__MR_MAX; i++) {
        top[i] = i < m ? -FLT_MAX : f_bits(CANARY);
        sum[i] = i < m ? 0.0f : f_bits(CANARY);
        alpha[i] = f_bits(CANARY);
    }
    for (int n = 0; n < BLOCKS; n++) {
        float top0[MHA__MR_MAX + 1], sum0[MHA__MR_MAX + 1];
        memcpy(top0, top, sizeof top);
        memcpy(sum0, sum, sizeof sum);
        np[n] = n == 0 ? 1 : rng_int(r, 1, WIDE);
        scores_make(kern, m, np[n], size, s[n], r);
        memcpy(e, s[n], sizeof e);
        kern->softmax(m, np[n], e, top, sum, alpha);
        ASSERTm("rows from m on", canaries(kern, m, np[n], e));
        for (int i = m; i <= MHA__MR_MAX; i++)
            ASSERTm("numbers from m on", bits_f(top[i]) == CANARY && bits_f(sum[i]) == CANARY &&
                                             bits_f(alpha[i]) == CANARY);
        for (int i = 0; i < m; i++) {
            float hi = top0[i];
            double want;
            for (int j = 0; j < np[n] * MHA__NR; j++) {
                const float x = s[n][at(kern, i, j)];
                if (!excluded(x) && x > hi) hi = x;
            }
            ASSERTm("top is the largest score", bits_f(top[i]) == bits_f(hi));
            want = exp2((double)top0[i] - (double)hi);
            ASSERT_CLOSE(alpha + i, &want, 1,
                         want * exp_tol((double)top0[i] - (double)hi) + DENORMAL);
            for (int j = 0; j < np[n] * MHA__NR; j++) {
                const float *got = e + at(kern, i, j);
                const double x = (double)s[n][at(kern, i, j)] - (double)hi;
                if (excluded(s[n][at(kern, i, j)])) {
                    ASSERTm("-inf gives 0", bits_f(*got) == 0);
                    continue;
                }
                want = exp2(x);
                ASSERT_CLOSE(got, &want, 1, want * exp_tol(x) + DENORMAL);
            }
            ASSERTm("sum", same_sum(sum[i], sum0[i], alpha[i], total_of(kern, e, i, np[n])));
        }
    }
    for (int i = 0; i < m; i++) { /* and all blocks together */
        double want = 0;
        for (int n = 0; n < BLOCKS; n++)
            for (int j = 0; j < np[n] * MHA__NR; j++)
                if (!excluded(s[n][at(kern, i, j)]))
                    want += exp2((double)s[n][at(kern, i, j)] - (double)top[i]);
        ASSERT_CLOSE(sum + i, &want, 1, 4e-6 * want);
    }
    PASS();
}

TEST softmax_contract(mha_isa isa)
{
    static const float sizes[] = { 0.1f, 1.5f, 20, 1000 };
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 200);
    for (int m = 1; m <= kern->mr; m++)
        for (int n = 0; n < 80; n++) CHECK_CALL(softmax_check(kern, m, sizes[n % 4], &r));
    PASS();
}

TEST softmax_nan(mha_isa isa)
{
    const mha__kernels *kern = mha__kernels_for(isa);
    enum { NP = 3 };
    for (int where = 0; where < NP * MHA__NR; where++) {
        float s[NP * MHA__MR_MAX * MHA__NR], top[MHA__MR_MAX], sum[MHA__MR_MAX], alpha[MHA__MR_MAX];
        const int bad = where % kern->mr;
        for (int i = 0; i < NP * kern->mr * MHA__NR; i++) s[i] = (float)(i % 37) / 8;
        for (int i = 0; i < kern->mr; i++) top[i] = 1.0f, sum[i] = 2.0f;
        s[at(kern, bad, where)] = F_NAN;
        kern->softmax(kern->mr, NP, s, top, sum, alpha);
        ASSERT(is_nan(s[at(kern, bad, where)]));
        for (int i = 0; i < kern->mr; i++) ASSERT_EQ_FMT(i == bad, is_nan(sum[i]), "%d");
    }
    PASS();
}

TEST weigh_contract(mha_isa isa)
{
    static const float sizes[] = { 0.1f, 1.5f, 20, 1000 };
    static float s[WIDE * MHA__MR_MAX * MHA__NR], e[WIDE * MHA__MR_MAX * MHA__NR];
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 300);
    for (int n = 0; n < 500; n++) {
        const int m = n % kern->mr + 1, np = rng_int(&r, 1, WIDE);
        const float size = sizes[rng_int(&r, 0, 3)];
        float top[MHA__MR_MAX], inv[MHA__MR_MAX];
        scores_make(kern, m, np, size / 16, s, &r);
        memcpy(e, s, sizeof e);
        for (int i = 0; i < MHA__MR_MAX; i++) top[i] = inv[i] = f_bits(CANARY);
        for (int i = 0; i < m; i++) {
            inv[i] = 1 / (1 + 100 * fabsf(rng_normal(&r)));
            top[i] = size / 2;
        }
        kern->weigh(m, np, e, top, inv);
        ASSERTm("rows from m on", canaries(kern, m, np, e));
        for (int i = 0; i < m; i++)
            for (int j = 0; j < np * MHA__NR; j++) {
                const float *got = e + at(kern, i, j);
                const double x = 16 * ((double)s[at(kern, i, j)] - (double)top[i]);
                double want;
                if (excluded(s[at(kern, i, j)])) {
                    ASSERTm("-inf gives 0", bits_f(*got) == 0);
                    continue;
                }
                want = exp2(x) * (double)inv[i];
                ASSERT_CLOSE(got, &want, 1, want * exp_tol(x) + DENORMAL);
            }
    }
    PASS();
}

/* No block to two of them, apart or side by side, with a bias and without. */
TEST transpose_contract(mha_isa isa)
{
    enum { NP = 2, ROW = 67, SIZE = NP * (MHA__NR * MHA__NR + 3) };
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 400);
    for (int n = 0; n < 200; n++) {
        float from[MHA__NR * ROW], bias[NP * MHA__NR], to[SIZE + 2], want[SIZE + 2];
        const int np = n % 3, step = n % 5 ? MHA__NR : MHA__NR + 5;
        const int to_block = MHA__NR * MHA__NR + n % 4;
        const float *row[MHA__NR];
        rng_fill(&r, from, sizeof from / sizeof *from);
        rng_fill(&r, bias, sizeof bias / sizeof *bias);
        from[n] = n % 3 ? F_INF : F_NINF; /* passes through, and spoils nothing else */
        for (int i = 0; i < MHA__NR; i++)
            row[i] = from + i * ROW + rng_int(&r, 0, ROW - step - MHA__NR);
        for (int i = 0; i < SIZE + 2; i++) to[i] = want[i] = f_bits(CANARY);
        for (int p = 0; p < np; p++)
            for (int i = 0; i < MHA__NR; i++)
                for (int c = 0; c < MHA__NR; c++) {
                    volatile float sum =
                        row[i][p * step + c] + (n % 2 ? bias[p * MHA__NR + c] : 0.0f);
                    want[1 + p * to_block + MHA__NR * c + i] = sum;
                }
        kern->transpose(np, row, step, n % 2 ? bias : NULL, to + 1, to_block);
        for (int i = 0; i < SIZE + 2; i++) ASSERT_EQ_FMT(bits_f(want[i]), bits_f(to[i]), "%08x");
    }
    PASS();
}

/* Rows and blocks that touch, or with gaps between them, which stay as they are. */
TEST copy_contract(mha_isa isa)
{
    enum { M = 5, NP = 3, STEP = 41, SIZE = M * NP * STEP };
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 450);
    for (int m = 0; m <= M; m++)
        for (int way = 0; way < 8 * (NP + 1); way++) {
            const int np = way / 8, from_block = way & 1 ? STEP : MHA__NR;
            const int to_block = way & 2 ? STEP : MHA__NR;
            /* blocks of a row, or rows of a block, one after the other */
            const int from_row = way & 2 ? NP * from_block : from_block;
            const int to_row = way & 1 ? NP * to_block : to_block;
            const int from_next = way & 2 ? from_block : M * from_block;
            const int to_next = way & 1 ? to_block : M * to_block;
            const float *add;
            float from[SIZE], bias[NP * MHA__NR], to[SIZE + 2], mul[M];
            for (int i = 0; i < SIZE; i++) from[i] = f_bits(CANARY);
            for (int i = 0; i < SIZE + 2; i++) to[i] = f_bits(CANARY);
            for (int i = 0; i < m; i++)
                for (int p = 0; p < np; p++) {
                    float *x = from + i * from_row + p * from_next;
                    rng_fill(&r, x, MHA__NR);
#ifndef TEST_FAST_MATH
                    x[3] = i % 2 ? 0.0f : -0.0f;
#endif
                }
            rng_fill(&r, bias, NP * MHA__NR);
            add = way & 4 ? bias : NULL;
            /* with a bias, products that are exact: they may be rounded or not */
            for (int i = 0; i < M; i++) mul[i] = add ? (float)(1 << i) : rng_normal(&r);
            kern->copy(m, np, from, from_row, from_next, to + 1, to_row, to_next, mul, add);
            for (int i = 0; i < m; i++)
                for (int p = 0; p < np; p++)
                    for (int c = 0; c < MHA__NR; c++) {
                        volatile float x = mul[i] * from[i * from_row + p * from_next + c];
                        volatile float want = x + (add ? add[p * MHA__NR + c] : 0.0f);
                        float *got = to + 1 + i * to_row + p * to_next + c;
                        ASSERT_EQ_FMT(bits_f(want), bits_f(*got), "%08x");
                        *got = f_bits(CANARY);
                    }
            for (int i = 0; i < SIZE + 2; i++) ASSERT(bits_f(to[i]) == CANARY);
        }
    PASS();
}

/* ---- cap, biases, exclusions ---------------------------------------------------------------- */

/* 30 * tanh(x / 30) in units of log2, from 2^-100 on: below that there are denormals in it. */
TEST cap_sweep(mha_isa isa)
{
    const mha__kernels *kern = mha__kernels_for(isa);
    const double log2e = 1.4426950408889634, cap = 30;
    double worst = 0;
    for (uint32_t u = 0x0d800000u; u < 0x7f800000u; u += SHORT_RUN ? 1048583 : 16381) {
        float s[MHA__MR_MAX * MHA__NR];
        mha__shape how;
        memset(&how, 0, sizeof how);
        how.cap_in = (float)(2 / cap);
        how.cap_out = (float)(cap * log2e);
        for (int j = 0; j < MHA__NR; j++) s[j] = f_bits((u + (uint32_t)j) | (uint32_t)j << 31);
        ASSERT_EQ_FMT(1, kern->shape(1, s, &how), "%d");
        for (int j = 0; j < MHA__NR; j++) {
            const double x = (double)f_bits((u + (uint32_t)j) | (uint32_t)j << 31);
            const double want = cap * log2e * tanh(x / log2e / cap);
            const double err = fabs((double)s[j] - want) / fabs(want);
            ASSERT(is_finite(s[j]) || u + (uint32_t)j >= 0x7f800000u);
            if (u + (uint32_t)j < 0x7f800000u && err > worst) worst = err;
        }
    }
    snprintf(note, sizeof note, "relative error of the cap: %.3g", worst);
    /* eight roundings: cap_in, its product, 2^f - 1, the sum e, e + 2, the quotient, cap_out, its
       product */
    if (!(worst <= 8.0 / 16777216)) FAILm(note);
    PASSm(note);
}

/* Every combination of what a row of scores can be given, against double. */
TEST shape_contract(mha_isa isa)
{
    static float s[WIDE * MHA__MR_MAX * MHA__NR], was[WIDE * MHA__MR_MAX * MHA__NR];
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 460);
    for (int n = 0; n < 640; n++) {
        const int np = rng_int(&r, 1, WIDE), row = n % kern->mr;
        const int capped = n & 1, sloped = n & 2, biased = n & 4, allowed = n & 8;
        float bias[WIDE * MHA__NR];
        unsigned char allow[WIDE * MHA__NR];
        mha__shape how;
        int left = 0, none = rng_chance(&r, 10);
        memset(&how, 0, sizeof how);
        for (size_t i = 0; i < sizeof s / sizeof *s; i++) s[i] = f_bits(CANARY);
        for (int j = 0; j < np * MHA__NR; j++) {
            s[at(kern, row, j)] = 20 * rng_normal(&r);
            bias[j] = none || rng_chance(&r, 20) ? F_NINF : rng_normal(&r);
            allow[j] = none || rng_chance(&r, 20) ? 0 : (unsigned char)rng_int(&r, 1, 255);
            /* NaN where it must not be seen */
            if (allowed && !allow[j] && rng_chance(&r, 50)) s[at(kern, row, j)] = F_NAN;
            if (allowed && !allow[j] && rng_chance(&r, 50)) bias[j] = F_NAN;
            if (biased && bits_f(bias[j]) == 0xff800000u) s[at(kern, row, j)] = F_NAN;
        }
        memcpy(was, s, sizeof was);
        if (capped) how.cap_in = 0.25f, how.cap_out = 11.5f;
        if (sloped) how.slope = -0.37f, how.first = (float)rng_int(&r, -300, 20);
        if (biased) how.bias = bias, how.bias_mul = 1.5f;
        if (allowed) how.allow = allow;
        const int any = kern->shape(np, s + row * MHA__NR, &how);
        for (int j = 0; j < np * MHA__NR; j++) {
            float *got = s + at(kern, row, j);
            double want = (double)was[at(kern, row, j)], size;
            if ((allowed && !allow[j]) || (biased && bits_f(bias[j]) == 0xff800000u)) {
                ASSERTm("an excluded key", bits_f(*got) == 0xff800000u);
            } else {
                left = 1;
                if (capped) want = 11.5 * tanh(want * 0.25 / 2 * 0.6931471805599453);
                size = fabs(want);
                if (sloped) want += -(double)0.37f * fabs((double)how.first + j);
                if (sloped) size += (double)0.37f * fabs((double)how.first + j);
                if (biased) want += 1.5 * (double)bias[j];
                if (biased) size += 1.5 * fabs((double)bias[j]);
                ASSERT_CLOSE(got, &want, 1, 5e-7 * size + 1e-9);
            }
            *got = f_bits(CANARY);
        }
        ASSERT_EQ_FMT(left, any, "%d");
        for (size_t i = 0; i < sizeof s / sizeof *s; i++) ASSERT(bits_f(s[i]) == CANARY);
    }
    PASS();
}

/* An attended NaN stays one, with and without a cap. */
TEST shape_nan(mha_isa isa)
{
    const mha__kernels *kern = mha__kernels_for(isa);
    for (int n = 0; n < 2 * MHA__NR; n++) {
        float s[MHA__MR_MAX * MHA__NR] = { 0 };
        mha__shape how;
        memset(&how, 0, sizeof how);
        how.slope = 0.5f;
        if (n % 2) how.cap_in = 1.0f, how.cap_out = 3.0f;
        s[n / 2] = n % 4 < 2 ? F_NAN : f_bits(0xffc00001u);
        kern->shape(1, s, &how);
        for (int j = 0; j < MHA__NR; j++) ASSERT_EQ_FMT(j == n / 2, is_nan(s[j]), "%d");
    }
    PASS();
}

/* An infinite score is capped as a large one is. */
TEST shape_inf(mha_isa isa)
{
    const mha__kernels *kern = mha__kernels_for(isa);
    float s[MHA__MR_MAX * MHA__NR] = { 0 };
    mha__shape how;
    memset(&how, 0, sizeof how);
    how.cap_in = 1.0f, how.cap_out = 3.0f;
    for (int j = 0; j < MHA__NR; j++) s[j] = j % 2 ? F_INF : F_NINF;
    kern->shape(1, s, &how);
    for (int j = 0; j < MHA__NR; j++)
        ASSERT(fabs((double)s[j] - (j % 2 ? 3.0 : -3.0)) <= 1e-6 && is_finite(s[j]));
    PASS();
}

/* ---- compact numbers ------------------------------------------------------------------------- */

/* All halves and bfloats, all bytes: as the scalar table has them, whose conversions test_compact.c
   compares with double. */
TEST widen_contract(mha_isa isa)
{
    enum { N = 4096 };
    static uint16_t half[N * MHA__NR];
    static float to[N * MHA__NR + 2];
    const mha__kernels *kern = mha__kernels_for(isa);
    const signed char *byte = (const signed char *)half;
    for (int i = 0; i < N * MHA__NR; i++) half[i] = (uint16_t)i;
    for (int type = MHA_F16; type <= MHA_INT8; type++) {
        const int n = type == MHA_INT8 ? 100 : N;
        to[0] = to[n * MHA__NR + 1] = f_bits(CANARY);
        kern->widen((mha_type)type, n, half, to + 1);
        for (int i = 0; i < n * MHA__NR; i++) {
            const float want = type == MHA_F16    ? mha__from_f16(half[i])
                               : type == MHA_BF16 ? mha__from_bf16(half[i])
                                                  : (float)byte[i];
            if (is_nan(want)) ASSERT(is_nan(to[1 + i]));
            else ASSERT_EQ_FMT(bits_f(want), bits_f(to[1 + i]), "%08x");
        }
        ASSERT(bits_f(to[0]) == CANARY && bits_f(to[n * MHA__NR + 1]) == CANARY);
    }
    PASS();
}

/* The product with compact panels has the bits of widening them first. */
TEST narrow_contract(mha_isa isa)
{
    enum { P = 6, K = 67, GAP = 3 * MHA__NR };
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 480);
    if (!kern->narrow) SKIPm("widen does it here");
    for (int t = MHA_F16; t <= MHA_INT8; t++)
        for (int m = 1; m <= kern->mr; m++)
            for (int np = 1; np <= P; np++)
                for (int k = 0; k <= K; k += k < 18 ? (k + m) % 5 + 1 : 7) {
                    static float a[(K / MHA__NR + 1) * MHA__MR_MAX * MHA__NR];
                    static float wide[P * K * MHA__NR];
                    static float got[P * MHA__MR_MAX * MHA__NR], want[P * MHA__MR_MAX * MHA__NR];
                    static uint16_t b[P * (K * MHA__NR + GAP)];
                    const mha_type type = (mha_type)t;
                    const size_t size = type == MHA_INT8 ? 1 : 2;
                    /* panels one after the other, or row by row in turn */
                    const int turns = k % 2, b_row = turns ? P * MHA__NR : MHA__NR;
                    const int panel = turns ? MHA__NR : k * MHA__NR + (m % 2 ? GAP : 0);
                    float factor[MHA__MR_MAX];
                    const float *start = (np + k / 2) % 2 ? factor : NULL;
                    rng_fill(&r, a, sizeof a / sizeof *a);
                    rng_fill(&r, factor, MHA__MR_MAX);
                    for (size_t i = 0; i < sizeof b / sizeof *b; i++)
                        b[i] = type == MHA_INT8  ? (uint16_t)rng_u32(&r)
                               : type == MHA_F16 ? mha__to_f16(rng_normal(&r))
                                                 : mha__to_bf16(rng_normal(&r));
                    rng_fill(&r, want, sizeof want / sizeof *want);
                    memcpy(got, want, sizeof got);
                    for (int p = 0; p < np; p++)
                        for (int kk = 0; kk < k; kk++)
                            kern->widen(type, 1,
                                        (const char *)b + (size_t)(p * panel + kk * b_row) * size,
                                        wide + (p * k + kk) * MHA__NR);
                    kern->gemm(m, np, k, a, wide, MHA__NR, k * MHA__NR, want, start, NULL);
                    kern->narrow(m, np, k, a, type, b, b_row, panel, k % 2 ? 16384 : 0, got, start);
                    if (!same_result(want, got, sizeof got / sizeof *got))
                        printf("  type %d, m %d, np %d, k %d\n", t, m, np, k);
                    ASSERT(same_result(want, got, sizeof got / sizeof *got));
                }
    PASS();
}

TEST times_contract(mha_isa isa)
{
    const mha__kernels *kern = mha__kernels_for(isa);
    rng r = rng_make(test_seed + 490);
    for (int m = 1; m <= kern->mr; m++)
        for (int np = 1; np <= 5; np++) {
            float c[5 * MHA__MR_MAX * MHA__NR], was[5 * MHA__MR_MAX * MHA__NR], col[5 * MHA__NR];
            rng_fill(&r, c, sizeof c / sizeof *c);
            rng_fill(&r, col, 5 * MHA__NR);
            memcpy(was, c, sizeof was);
            for (int i = 0; i < m; i++)
                for (int j = 0; j < np * MHA__NR; j++) was[at(kern, i, j)] *= col[j];
            kern->times(m, np, c, col);
            ASSERT(same_bits(was, c, sizeof c / sizeof *c));
        }
    PASS();
}

/* ---- nothing outside the operands ----------------------------------------------------------- */

#ifdef HAVE_FENCES

/* Memory between two pages that may not be touched. */
typedef struct fence {
    char *map;
    size_t page, bytes;
} fence;

static int fence_make(fence *f, size_t bytes)
{
    void *map;
    f->page = (size_t)sysconf(_SC_PAGESIZE);
    f->bytes = (bytes + f->page - 1) / f->page * f->page;
    map = mmap(NULL, f->bytes + 2 * f->page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
               -1, 0);
    if (map == MAP_FAILED) return 0;
    f->map = (char *)map;
    memset(f->map + f->page, 0, f->bytes);
    return mprotect(f->map, f->page, PROT_NONE) == 0 &&
           mprotect(f->map + f->page + f->bytes, f->page, PROT_NONE) == 0;
}

static void fence_free(fence *f)
{
    munmap(f->map, f->bytes + 2 * f->page);
}

/* n floats right before the second page, or right after the first. */
static float *fence_floats(const fence *f, size_t n, int last)
{
    char *p = f->map + f->page + (last ? f->bytes - n * sizeof(float) : 0);
    return (float *)(void *)p;
}

static sigjmp_buf fault;

static void on_fault(int sig)
{
    (void)sig;
    siglongjmp(fault, 1);
}

/* One call of a kernel: which of them, and its shape. */
typedef struct visit {
    const mha__kernels *kern;
    int what; /* 0 gemm, 1 softmax, 2 weigh, 3 transpose, 4 copy, 5 shape, 6 widen, 7 narrow, 8 dots, 9 finite,
                 10 times */
    int m, np, k, strided, given, last;
    fence *f; /* 6 of them */
} visit;

static void visit_run(const visit *v)
{
    const int mr = v->kern->mr;
    const ptrdiff_t b_row = v->strided ? NP_MAX * MHA__NR + 5 : MHA__NR;
    const ptrdiff_t b_panel = v->strided ? MHA__NR : v->k * MHA__NR;
    const size_t m = (size_t)v->m;
    const size_t n_c = (size_t)((v->np - 1) * mr * MHA__NR + v->m * MHA__NR);
    float *c = fence_floats(v->f, n_c, v->last);
    float *x = fence_floats(v->f + 1, m, v->last), *y = fence_floats(v->f + 2, m, v->last);
    float *z = fence_floats(v->f + 3, m, v->last);
    memset(c, 0, n_c * sizeof *c); /* what the last visit left is not what this one takes */
    memset(x, 0, m * sizeof *x);
    memset(y, 0, m * sizeof *y);
    if (v->what == 0) {
        const size_t n_a = v->k ? 1 + at(v->kern, v->m - 1, v->k - 1) : 0;
        const size_t n_b =
            v->k ? (size_t)((v->k - 1) * b_row + (v->np - 1) * b_panel + MHA__NR) : 0;
        v->kern->gemm(v->m, v->np, v->k, fence_floats(v->f + 4, n_a, v->last),
                      fence_floats(v->f + 5, n_b, v->last), b_row, b_panel, c, v->given ? x : NULL,
                      NULL);
    } else if (v->what == 1) {
        v->kern->softmax(v->m, v->np, c, x, y, z);
    } else if (v->what == 2) {
        v->kern->weigh(v->m, v->np, c, x, y);
    } else if (v->what == 4) { /* m rows of np blocks */
        const ptrdiff_t block = v->strided ? NP_MAX + MHA__NR : MHA__NR, row = v->np * block;
        const size_t n = (size_t)((v->m - 1) * row + (v->np - 1) * block + MHA__NR);
        const size_t n_bias = (size_t)(v->np * MHA__NR);
        v->kern->copy(v->m, v->np, fence_floats(v->f + 4, n, v->last), row, block,
                      fence_floats(v->f, n, v->last), row, block, x,
                      v->given ? fence_floats(v->f + 5, n_bias, v->last) : NULL);
    } else if (v->what == 5) { /* one row of np blocks */
        const size_t n_row = (size_t)((v->np - 1) * mr * MHA__NR + MHA__NR);
        const size_t n = (size_t)(v->np * MHA__NR);
        mha__shape how;
        memset(&how, 0, sizeof how);
        how.cap_in = how.cap_out = how.slope = 1.0f;
        if (v->given) how.bias = fence_floats(v->f + 4, n, v->last);
        if (v->strided) /* bytes: a quarter as long */
            how.allow = (unsigned char *)fence_floats(v->f + 5, n / 4, v->last);
        v->kern->shape(v->np, fence_floats(v->f, n_row, v->last), &how);
    } else if (v->what == 6 || v->what == 7) { /* np rows, np panels of k rows */
        const mha_type type = v->given ? MHA_INT8 : v->strided ? MHA_F16 : MHA_BF16;
        const int k = v->k, rows = v->what == 6 ? v->np : v->np * k;
        const float *from =
            fence_floats(v->f + 4, (size_t)(rows * MHA__NR) / (type == MHA_INT8 ? 4 : 2), v->last);
        if (v->what == 6)
            v->kern->widen(type, rows, from, fence_floats(v->f, (size_t)(rows * MHA__NR), v->last));
        else if (v->kern->narrow)
            v->kern->narrow(
                v->m, v->np, k,
                fence_floats(v->f + 3, k ? 1 + at(v->kern, v->m - 1, k - 1) : 0, v->last), type,
                from, v->np % 3 ? MHA__NR : v->np * MHA__NR, v->np % 3 ? k * MHA__NR : MHA__NR,
                v->m % 2 ? 1 << 14 : 0, c, v->np % 2 ? x : NULL);
    } else if (v->what == 8) {
        const int k = v->k / MHA__NR * MHA__NR, step = v->strided ? k + 5 : k;
        const size_t n_a = k ? 1 + at(v->kern, v->m - 1, k - 1) : 0;
        const size_t n_b = (size_t)((v->np * MHA__NR - 1) * step + k);
        const float *b = fence_floats(v->f + 5, n_b, v->last);
        for (int asks = MHA__ASKS_NOT; v->kern->dots && asks <= MHA__ASKS_LINES; asks++)
            v->kern->dots(v->m, v->np, k, fence_floats(v->f + 4, n_a, v->last), b, step,
                          v->given ? b : NULL, asks, c);
    } else if (v->what == 10) {
        v->kern->times(v->m, v->np, c, fence_floats(v->f + 5, (size_t)(v->np * MHA__NR), v->last));
    } else if (v->what == 9) {
        v->kern->finite(v->np * MHA__NR,
                        fence_floats(v->f + 4, (size_t)(v->np * MHA__NR), v->last));
    } else {
        const float *row[MHA__NR];
        const size_t n = (size_t)(v->np * MHA__NR);
        for (int i = 0; i < MHA__NR; i++) row[i] = fence_floats(v->f + 4, n, (v->k + i) % 2);
        v->kern->transpose(v->np, row, MHA__NR,
                           v->given ? fence_floats(v->f + 5, n, v->last) : NULL,
                           fence_floats(v->f, n * MHA__NR, v->last), MHA__NR * MHA__NR);
    }
}

static int visit_faults(const visit *v)
{
    if (sigsetjmp(fault, 1)) return 1;
    visit_run(v);
    return 0;
}

static int visit_all(visit *v)
{
    for (v->what = 0; v->what < 11; v->what++)
        for (v->m = 1; v->m <= v->kern->mr; v->m++)
            for (v->np = 1; v->np <= NP_MAX; v->np++)
                for (int k = 0; k < (v->what == 0 || v->what == 7 || v->what == 8 ? DEPTHS : 2);
                     k++)
                    for (int way = 0; way < 8; way++) {
                        v->k = depths[k], v->strided = way % 2, v->given = way / 2 % 2;
                        v->last = way / 4;
                        if (visit_faults(v)) return 1;
                    }
    return 0;
}

TEST stays_inside(mha_isa isa)
{
    static const char *const names[] = { "gemm",  "softmax", "weigh", "transpose", "copy", "shape",
                                         "widen", "narrow",  "dots",  "finite",    "times" };
    static const int sigs[2] = { SIGSEGV, SIGBUS };
    struct sigaction act, was[2];
    fence f[6];
    visit v;
    int faulted;
    memset(&v, 0, sizeof v);
    memset(&act, 0, sizeof act);
    v.kern = mha__kernels_for(isa);
    v.f = f;
    for (int i = 0; i < 6; i++)
        if (!fence_make(f + i, B_MAX * sizeof(float))) SKIPm("mmap or mprotect does not work here");
    act.sa_handler = on_fault;
    sigemptyset(&act.sa_mask);
    for (int i = 0; i < 2; i++) sigaction(sigs[i], &act, was + i);
    faulted = visit_all(&v);
    for (int i = 0; i < 2; i++) sigaction(sigs[i], was + i, NULL);
    for (int i = 0; i < 6; i++) fence_free(f + i);
    if (faulted) {
        snprintf(note, sizeof note,
                 "%s touches what is outside of its operands: m %d, np %d, k %d, %s, start %s",
                 names[v.what], v.m, v.np, v.k, v.strided ? "strided" : "packed",
                 v.given ? "given" : "null");
        FAILm(note);
    }
    PASS();
}

/* One query over keys and values that end where memory does: they are read ahead, but not beyond. Its
   bits are those that it has among 20 queries, for which keys are packed. */
static int one_query(const mha_sdpa_args *one, const mha_sdpa_args *many)
{
    if (sigsetjmp(fault, 1)) return 0;
    return mha_sdpa(one) == MHA_OK && mha_sdpa(many) == MHA_OK;
}

TEST keys_to_the_end(mha_isa isa)
{
    enum { N = 20, GROUP = 8, S = 290, D = 192, ROOM = 1 << 19 };
    static const int sigs[2] = { SIGSEGV, SIGBUS };
    static const int groups[] = { 1, 4, GROUP }, keys[] = { 17, 48, S }, widths[] = { 64, 128, D };
    struct sigaction act, was[2];
    rng r = rng_make(test_seed + 151);
    float *q = rng_floats(&r, GROUP * N * D), *o = test_floats(GROUP * N * D, 0.0f);
    float *first = test_floats(GROUP * D, 0.0f), *last = test_floats(GROUP * D, 0.0f);
    float *room =
        test_floats(ROOM, 0.0f); /* what is wrong there shall not be NaN, which is mended */
    fence k, v;
    int bad = 0;
    if (!fence_make(&k, S * D * sizeof(float)) || !fence_make(&v, S * D * sizeof(float)))
        SKIPm("mmap or mprotect does not work here");
    memset(&act, 0, sizeof act);
    act.sa_handler = on_fault;
    sigemptyset(&act.sa_mask);
    for (int i = 0; i < 2; i++) sigaction(sigs[i], &act, was + i);
    for (int c = 0; c < 27 && !bad; c++) {
        const int H = groups[c % 3], n = keys[c / 3 % 3], d = widths[c / 9];
        mha_sdpa_args one = { 0 }, many;
        rng_fill(&r, fence_floats(&k, (size_t)(n * d), 1), (size_t)(n * d));
        rng_fill(&r, fence_floats(&v, (size_t)(n * d), 1), (size_t)(n * d));
        one.batch = one.seq = one.kv_heads = 1;
        one.heads = H;
        one.source_seq = n;
        one.d_k = d;
        one.k = fence_floats(&k, (size_t)(n * d), 1);
        one.v = fence_floats(&v, (size_t)(n * d), 1);
        one.q = q + (N - 1) * d; /* the last query of each head */
        one.q_stride.head = N * d;
        one.o = first;
        one.o_stride.head = d;
        one.isa = isa;
        one.workspace = room;
        one.workspace_size = ROOM * sizeof *room;
        many = one;
        many.seq = N;
        many.q = q;
        many.q_stride.seq = d;
        many.o = o;
        many.o_stride.head = N * d;
        many.o_stride.seq = d;
        bad = 1 + c;
        if (!one_query(&one, &many)) continue;
        for (int h = 0; h < H; h++)
            memcpy(last + h * d, o + (h * N + N - 1) * d, (size_t)d * sizeof *o);
        if (same_result(first, last, (size_t)(H * d))) bad = 0;
    }
    for (int i = 0; i < 2; i++) sigaction(sigs[i], was + i, NULL);
    fence_free(&k);
    fence_free(&v);
    free(q);
    free(o);
    free(first);
    free(last);
    free(room);
    if (bad) printf("\n  case %d: reads too much, or other bits\n", bad - 1);
    ASSERT_EQ(0, bad);
    PASS();
}

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

/* Neighbours more than 2^31 floats apart, along each axis in turn: the same bits as side by side.
   The memory between them is reserved, not used. */
TEST far_apart(mha_isa isa)
{
    enum { D = 20, ROW = 32, N = 8 }; /* B = H = T = S = 2; a row of each tensor has 32 floats */
    const size_t far = ((size_t)1 << 31) + 64, bytes = (far + 8 * N * ROW) * sizeof(float);
    rng r = rng_make(test_seed);
    float *near = test_floats(4 * N * ROW, 0.0f), *map;
    void *room;
    if (sizeof(size_t) < 8) SKIPm("a small address space");
    room = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                -1, 0);
    if (room == MAP_FAILED) SKIPm("no 8 GiB of addresses here");
    map = (float *)room;
    rng_fill(&r, near, 3 * N * ROW);
    for (int axis = 0; axis < 4; axis++) {
        mha_sdpa_args a;
        mha_stride s;
        float *at[4], *base = axis ? map : near; /* q, k, v, o lie one after the other, without */
        s.batch = 4 * ROW, s.head = 2 * ROW, s.seq = ROW;
        if (axis == 1) s.batch = (ptrdiff_t)far;
        if (axis == 2) s.head = (ptrdiff_t)far;
        if (axis == 3) s.seq = (ptrdiff_t)far;
        memset(&a, 0, sizeof a);
        for (int i = 0; i < 4; i++) {
            at[i] = base + i * N * ROW;
            for (int n = 0; axis && n < N; n++)
                memcpy(at[i] + n / 4 * s.batch + n / 2 % 2 * s.head + n % 2 * s.seq,
                       near + (i * N + n) * ROW, i < 3 ? ROW * sizeof(float) : 0);
        }
        a.batch = a.heads = a.seq = a.source_seq = 2;
        a.d_k = a.d_v = D;
        a.q = at[0], a.k = at[1], a.v = at[2], a.o = at[3];
        a.q_stride = a.k_stride = a.v_stride = a.o_stride = s;
        a.isa = isa;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
        for (int n = 0; n < N; n++)
            ASSERT(same_bits(at[3] + n / 4 * s.batch + n / 2 % 2 * s.head + n % 2 * s.seq,
                             near + (3 * N + n) * ROW, D));
    }
    munmap(room, bytes);
    free(near);
    PASS();
}

#else

TEST stays_inside(mha_isa isa)
{
    (void)isa;
    SKIPm("no mmap and mprotect here");
}

TEST keys_to_the_end(mha_isa isa)
{
    (void)isa;
    SKIPm("no mmap and mprotect here");
}

TEST far_apart(mha_isa isa)
{
    (void)isa;
    SKIPm("no mmap here");
}

#endif

/* ---- precision ------------------------------------------------------------------------------ */

/* What mha.h promises for normally distributed numbers: errors of attention relative to the
   largest value, of the layer relative to its largest output. */
#define SDPA_TOL 2e-6
#define LAYER_TOL 1e-5

typedef struct size {
    const char *name;
    int B, T, D, H, G, causal;
    int past; /* > 0: T new tokens after so many in a cache */
    int big;  /* not on SCALAR, nor in a short run */
    int rows; /* of y that are compared */
} size;

static const size sizes[] = {
    { "tiny", 1, 16, 64, 4, 4, 0, 0, 0, 16 },
    { "small", 1, 128, 384, 12, 12, 0, 0, 0, 24 },
    { "base", 8, 128, 768, 12, 12, 0, 0, 1, 24 },
    { "batch", 32, 64, 512, 8, 8, 0, 0, 1, 24 },
    { "causal", 1, 1024, 768, 12, 12, 1, 0, 1, 24 },
    { "grouped", 1, 512, 2048, 32, 8, 1, 0, 1, 8 },
    { "long_causal", 1, 4096, 512, 8, 8, 1, 0, 1, 24 },
    { "long", 1, 4096, 512, 8, 8, 0, 0, 1, 24 },
    { "decode", 1, 1, 768, 12, 12, 1, 1024, 1, 4 },
    { "decode_grouped", 1, 1, 2048, 32, 8, 1, 1024, 1, 4 },
};

static double *doubles(size_t n)
{
    double *p = (double *)calloc(n ? n : 1, sizeof *p);
    if (!p) abort();
    return p;
}

/* The instruction sets that size s is run with. */
static int size_isas(const size *s, mha_isa out[8])
{
    mha_isa all[8];
    int n = 0;
    for (int i = 0, have = test_isas(all); i < have; i++)
        if (!s->big || all[i] != MHA_ISA_SCALAR) out[n++] = all[i];
    return n;
}

/* p[j] = softmax over j < n of p[j] */
static void soft(double *p, int n)
{
    double top = p[0], sum = 0;
    for (int j = 1; j < n; j++)
        if (p[j] > top) top = p[j];
    for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - top);
    for (int j = 0; j < n; j++) p[j] /= sum;
}

static double dot(const double *a, const double *b, int n)
{
    double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    int i;
    for (i = 0; i + 4 <= n; i += 4) {
        s0 += a[i] * b[i];
        s1 += a[i + 1] * b[i + 1];
        s2 += a[i + 2] * b[i + 2];
        s3 += a[i + 3] * b[i + 3];
    }
    for (; i < n; i++) s0 += a[i] * b[i];
    return s0 + s1 + s2 + s3;
}

/* One row of o: query q, the first n keys. */
static void sdpa_row(const float *q, const float *k, const float *v, int n, int d, double *o)
{
    double *p = doubles((size_t)n);
    for (int j = 0; j < n; j++) {
        for (int c = 0; c < d; c++)
            p[j] += (double)q[c] * (double)k[(size_t)j * (size_t)d + (size_t)c];
        p[j] /= sqrt((double)d);
    }
    soft(p, n);
    for (int c = 0; c < d; c++) o[c] = 0;
    for (int j = 0; j < n; j++)
        for (int c = 0; c < d; c++) o[c] += p[j] * (double)v[(size_t)j * (size_t)d + (size_t)c];
    free(p);
}

TEST sdpa_precision(const size *s)
{
    const int d = s->D / s->H, S = s->past + s->T, rows = 256;
    const size_t zd = (size_t)d, zS = (size_t)S, zT = (size_t)s->T;
    const size_t n_q = (size_t)(s->B * s->H) * zT * zd, n_k = (size_t)(s->B * s->G) * zS * zd;
    rng r = rng_make(test_seed + 500);
    float *q, *k, *v, *o[8];
    double *want, v_max = 0, worst[8] = { 0 };
    mha_isa isa[8];
    const int n = size_isas(s, isa);
    char *p = note;
    int ok = 1;
    if (s->big && SHORT_RUN) SKIPm("a short run: MHA_TEST_CASES is below 500");
    if (n == 0) SKIPm("no SIMD here: too slow");
    want = doubles(zd);
    q = rng_floats(&r, n_q);
    k = rng_floats(&r, n_k);
    v = rng_floats(&r, n_k);
    for (size_t i = 0; i < n_k; i++) v_max = fmax(v_max, fabs((double)v[i]));
    for (int i = 0; i < n; i++) {
        mha_sdpa_args a = { 0 };
        a.batch = s->B, a.heads = s->H, a.kv_heads = s->G, a.seq = s->T, a.source_seq = S;
        a.d_k = d, a.q = q, a.k = k, a.v = v, a.isa = isa[i];
        a.o = o[i] = test_floats(n_q, F_NAN);
        a.mask.causal = s->causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
        ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    }
    for (int row = 0; row < rows; row++) {
        const int b = rng_int(&r, 0, s->B - 1), h = rng_int(&r, 0, s->H - 1);
        const int t = row == 0 ? 0 : row == 1 ? s->T - 1 : rng_int(&r, 0, s->T - 1);
        const size_t qat = ((size_t)(b * s->H + h) * zT + (size_t)t) * zd;
        const size_t kat = (size_t)(b * s->G + h / (s->H / s->G)) * zS * zd;
        sdpa_row(q + qat, k + kat, v + kat, s->causal ? s->past + t + 1 : S, d, want);
        for (int i = 0; i < n; i++)
            worst[i] = fmax(worst[i], max_err(o[i] + qat, want, zd) / v_max);
    }
    p += snprintf(p, sizeof note, "error / max|v|:");
    for (int i = 0; i < n; i++) {
        p += snprintf(p, sizeof note - (size_t)(p - note), " %s %.2g", mha_isa_name(isa[i]),
                      worst[i]);
        ok &= worst[i] <= SDPA_TOL;
        free(o[i]);
    }
    free(q);
    free(k);
    free(v);
    free(want);
    if (!ok) FAILm(note);
    PASSm(note);
}

/* One row of y = concat(softmax(q k^T) v) W_O, q from row t of x and k, v from its first n rows.
   Keys and values of all positions would cost more than the layer itself, so the brackets stand
   elsewhere: q (x W_K)^T = (q W_K^T) x^T and p (x W_V) = (p x) W_V. */
static void layer_row(const size *s, const net *of, const float *x, int t, int n, double *y)
{
    const int D = s->D, H = s->H, d = D / H, kv = s->G * d;
    const float *wq = of->w.q, *wk = of->w.k, *wv = of->w.v, *wo = of->w.out;
    double *q = doubles((size_t)D), *xj = doubles((size_t)D), *o = doubles((size_t)D);
    double *u = doubles((size_t)(H * D)), *z = doubles((size_t)(H * D));
    double *p = doubles((size_t)H * (size_t)n);
    for (int i = 0; i < D; i++)
        for (int c = 0; c < D; c++) q[c] += (double)x[t * D + i] * (double)wq[i * D + c];
    for (int h = 0; h < H; h++)
        for (int i = 0; i < D; i++)
            for (int c = 0; c < d; c++)
                u[h * D + i] += q[h * d + c] * (double)wk[i * kv + h / (H / s->G) * d + c];
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < D; i++) xj[i] = (double)x[j * D + i];
        for (int h = 0; h < H; h++) p[h * n + j] = dot(u + h * D, xj, D) / sqrt((double)d);
    }
    for (int h = 0; h < H; h++) soft(p + h * n, n);
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < D; i++) xj[i] = (double)x[j * D + i];
        for (int h = 0; h < H; h++)
            for (int i = 0; i < D; i++) z[h * D + i] += p[h * n + j] * xj[i];
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < D; i++)
            for (int c = 0; c < d; c++)
                o[h * d + c] += z[h * D + i] * (double)wv[i * kv + h / (H / s->G) * d + c];
    for (int c = 0; c < D; c++) y[c] = 0;
    for (int i = 0; i < D; i++)
        for (int c = 0; c < D; c++) y[c] += o[i] * (double)wo[i * D + c];
    free(q);
    free(xj);
    free(o);
    free(u);
    free(z);
    free(p);
}

/* y of a size: [B,T,D], or with a past, [rows,1,D]: each row another token after the same past. */
static mha_status layer_run(const size *s, const mha_layer *layer, const float *x, float *y)
{
    mha_args a = { 0 };
    mha_status st;
    a.batch = s->B, a.seq = s->T, a.x = x, a.y = y;
    a.mask.causal = s->causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
    if (s->past == 0) return mha_forward(layer, &a);
    st = mha_cache_create(&a.cache, layer,
                          &(mha_cache_config){ .batch = 1, .capacity = s->past + 1 });
    if (st == MHA_OK) {
        float *other = test_floats((size_t)(s->past * s->D), 0.0f);
        a.seq = s->past, a.y = other;
        st = mha_forward(layer, &a);
        free(other);
    }
    a.seq = 1;
    for (int i = 0; st == MHA_OK && i < s->rows; i++) {
        a.x = x + (s->past + i) * s->D, a.y = y + i * s->D;
        st = mha_forward(layer, &a);
        if (st == MHA_OK) st = mha_cache_truncate(a.cache, -1, s->past);
    }
    mha_cache_free(a.cache);
    return st;
}

TEST layer_precision(const size *s)
{
    const int D = s->D, d = D / s->H;
    const int tokens = s->past ? s->past + s->rows : s->T, outs = s->past ? s->rows : s->T;
    const size_t n_x = (size_t)s->B * (size_t)(tokens * D), n_y = (size_t)s->B * (size_t)(outs * D);
    rng r = rng_make(test_seed + 600);
    net nn;
    float *x, *y[8], *one;
    double *want, worst[8] = { 0 }, y_max[8] = { 0 };
    mha_isa isa[8];
    const int n = size_isas(s, isa);
    char *p = note;
    int ok = 1;
    if (s->big && SHORT_RUN) SKIPm("a short run: MHA_TEST_CASES is below 500");
    if (n == 0) SKIPm("no SIMD here: too slow");
    want = doubles((size_t)D);
    one = test_floats((size_t)((s->past + 1) * D), 0.0f);
    x = rng_floats(&r, n_x);
    nn = net_weights(MHA_ISA_AUTO, D, s->H, s->G, d, d, 0, 0, test_seed + 700);
    nn.w.b_q = nn.w.b_k = nn.w.b_v = nn.w.b_out = NULL;
    for (int i = 0; i < n; i++) {
        nn.cfg.isa = isa[i];
        y[i] = test_floats(n_y, F_NAN);
        ASSERT_STATUS(MHA_OK, net_create(&nn));
        ASSERT_STATUS(MHA_OK, layer_run(s, nn.layer, x, y[i]));
        mha_layer_free(nn.layer);
        for (size_t j = 0; j < n_y; j++) y_max[i] = fmax(y_max[i], fabs((double)y[i][j]));
    }
    nn.layer = NULL;
    for (int row = 0; row < s->rows; row++) {
        const int b = rng_int(&r, 0, s->B - 1);
        const int t = s->past || s->T <= s->rows ? row
                      : row == 0                 ? 0
                      : row == 1                 ? s->T - 1
                                                 : rng_int(&r, 0, s->T - 1);
        const float *from = x + b * tokens * D;
        if (s->past) { /* the past, then this token */
            memcpy(one, x, (size_t)(s->past * D) * sizeof *one);
            memcpy(one + s->past * D, x + (s->past + row) * D, (size_t)D * sizeof *one);
            layer_row(s, &nn, one, s->past, s->past + 1, want);
        } else {
            layer_row(s, &nn, from, t, s->causal ? t + 1 : s->T, want);
        }
        for (int i = 0; i < n; i++) {
            const double e = max_err(y[i] + (b * outs + t) * D, want, (size_t)D);
            worst[i] = fmax(worst[i], e / y_max[i]);
        }
    }
    p += snprintf(p, sizeof note, "error / max|y|:");
    for (int i = 0; i < n; i++) {
        p += snprintf(p, sizeof note - (size_t)(p - note), " %s %.2g", mha_isa_name(isa[i]),
                      worst[i]);
        ok &= worst[i] <= LAYER_TOL;
        free(y[i]);
    }
    net_free(&nn);
    free(x);
    free(one);
    free(want);
    if (!ok) FAILm(note);
    PASSm(note);
}

SUITE(kernels_suite)
{
    RUN_ON_EACH_ISA(exp_sweep);
    RUN_ON_EACH_ISA(exp_special);
    RUN_ON_EACH_ISA(gemm_contract);
    RUN_ON_EACH_ISA(dots_contract);
    RUN_ON_EACH_ISA(finite_contract);
    RUN_ON_EACH_ISA(softmax_contract);
    RUN_ON_EACH_ISA(softmax_nan);
    RUN_ON_EACH_ISA(weigh_contract);
    RUN_ON_EACH_ISA(transpose_contract);
    RUN_ON_EACH_ISA(copy_contract);
    RUN_ON_EACH_ISA(cap_sweep);
    RUN_ON_EACH_ISA(shape_contract);
    RUN_ON_EACH_ISA(shape_nan);
    RUN_ON_EACH_ISA(shape_inf);
    RUN_ON_EACH_ISA(widen_contract);
    RUN_ON_EACH_ISA(narrow_contract);
    RUN_ON_EACH_ISA(times_contract);
    RUN_ON_EACH_ISA(stays_inside);
    RUN_ON_EACH_ISA(keys_to_the_end);
    RUN_ON_EACH_ISA(far_apart);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        greatest_set_test_suffix(sizes[i].name);
        RUN_TESTp(sdpa_precision, sizes + i);
        greatest_set_test_suffix(sizes[i].name);
        RUN_TESTp(layer_precision, sizes + i);
    }
}
