/* test_compact.c - numbers kept in 16 or 8 bits: conversions against a quantiser of the tests' own,
   and layers and caches against float32 ones that are given what it makes. */
#include "streams.h"

static const mha_type types[4] = { MHA_F32, MHA_F16, MHA_BF16, MHA_INT8 };
static const char *const type_name[4] = { "f32", "f16", "bf16", "int8" };

/* ---- the quantiser: by arithmetic, in double --------------------------------------------------- */

/* The value of a finite number with so many fraction bits and this least exponent. */
static double decode(uint32_t bits, int fraction, int least)
{
    const uint32_t one = 1u << fraction, field = bits >> fraction, low = bits & (one - 1u);
    if (field == 0) return ldexp((double)low, least - fraction);
    return ldexp((double)(low + one), least + (int)field - 1 - fraction);
}

/* The nearest number of that kind to a >= 0, of two the even one; its bits without a sign. */
static uint32_t encode(double a, int fraction, int least, int most)
{
    int e;
    double n, d;
    uint32_t bits;
    if (!(a > 0)) return 0;
    frexp(a, &e);
    e--; /* a = 1.something * 2^e */
    if (e < least) e = least;
    d = ldexp(a, fraction - e); /* exact: a power of two */
    n = floor(d);
    d -= n;
    bits = (uint32_t)n;
    if (d > 0.5 || (d >= 0.5 && bits % 2)) bits++;
    if (bits >> (fraction + 1)) bits >>= 1, e++;
    if (e > most) return (uint32_t)(most - least + 2) << fraction;
    if (bits < 1u << fraction) return bits; /* below the normal numbers: e is the least */
    return ((uint32_t)(e - least + 1) << fraction) + (bits - (1u << fraction));
}

enum { HALF, BRAIN, SINGLE };
static const int fraction_of[3] = { 10, 7, 23 }, least_of[3] = { -14, -126, -126 };
static const int most_of[3] = { 15, 127, 127 }, sign_at[3] = { 15, 15, 31 };
static const mha_type kind_type[3] = { MHA_F16, MHA_BF16, MHA_F32 };

static int is_special(int kind, uint32_t bits) /* 1: infinite, 2: NaN */
{
    const uint32_t inf = (uint32_t)(most_of[kind] - least_of[kind] + 2) << fraction_of[kind];
    const uint32_t a = bits & ((1u << sign_at[kind]) - 1u);
    return a < inf ? 0 : a == inf ? 1 : 2;
}

/* One kind to another. NaN: 0, only that it is one is promised. */
static uint32_t recode(int from, uint32_t bits, int to)
{
    const uint32_t sign = bits >> sign_at[from] << sign_at[to];
    const uint32_t a = bits & ((1u << sign_at[from]) - 1u);
    const int special = is_special(from, bits);
    if (special == 2) return 0;
    if (special) return sign | (uint32_t)(most_of[to] - least_of[to] + 2) << fraction_of[to];
    return sign | encode(decode(a, fraction_of[from], least_of[from]), fraction_of[to],
                         least_of[to], most_of[to]);
}

static int as_recoded(int from, uint32_t bits, int to, uint32_t got)
{
    if (is_special(from, bits) == 2) return is_special(to, got) == 2;
    return recode(from, bits, to) == got;
}

/* n numbers through a type and back to floats; INT8: one scale for all of them, stride apart. */
static void round_floats(mha_type type, float *x, int n, int stride)
{
    float top = 0, scale;
    if (type == MHA_F32) return;
    if (type == MHA_F16 || type == MHA_BF16) {
        const int kind = type == MHA_F16 ? HALF : BRAIN;
        for (int i = 0; i < n; i++)
            x[i * stride] =
                f_bits(recode(kind, recode(SINGLE, bits_f(x[i * stride]), kind), SINGLE));
        return;
    }
    for (int i = 0; i < n; i++)
        if (fabsf(x[i * stride]) > top) top = fabsf(x[i * stride]);
    scale = top / 127.0f;
    for (int i = 0; i < n && scale > 0; i++)
        x[i * stride] = (float)floor((double)(x[i * stride] / scale) + 0.5) * scale;
}

/* The distance of x / scale from the next tie between two integers, the nearest of n numbers. */
static double tie_distance(const float *x, int n, int stride)
{
    double top = 0, least = 1;
    for (int i = 0; i < n; i++)
        if (fabs((double)x[i * stride]) > top) top = fabs((double)x[i * stride]);
    for (int i = 0; i < n && top > 0; i++) {
        const double q = (double)x[i * stride] / top * 127.0, d = fabs(q - floor(q) - 0.5);
        if (d < least) least = d;
    }
    return least;
}

/* ---- mha_convert -------------------------------------------------------------------------------- */

/* n numbers of the kind, by mha_convert, each compared with the quantiser. */
TEST convert_all(int from, const uint32_t *bits, size_t n, int to)
{
    float *wide = test_floats(n, 0.0f), *wide_to = test_floats(n, 0.0f);
    uint16_t *narrow = (uint16_t *)stream_take(n * sizeof *narrow);
    uint16_t *narrow_to = (uint16_t *)stream_take(n * sizeof *narrow_to);
    for (size_t i = 0; i < n; i++) {
        wide[i] = f_bits(bits[i]);
        narrow[i] = (uint16_t)bits[i];
    }
    ASSERT_STATUS(MHA_OK, mha_convert(kind_type[from],
                                      from == SINGLE ? (const void *)wide : (const void *)narrow,
                                      kind_type[to],
                                      to == SINGLE ? (void *)wide_to : (void *)narrow_to, n));
    for (size_t i = 0; i < n; i++) {
        const uint32_t got = to == SINGLE ? bits_f(wide_to[i]) : narrow_to[i];
        if (!as_recoded(from, bits[i], to, got))
            printf("\n  %s %08x became %s %08x, not %08x\n", type_name[kind_type[from]],
                   (unsigned)bits[i], type_name[kind_type[to]], (unsigned)got,
                   (unsigned)recode(from, bits[i], to));
        ASSERT(as_recoded(from, bits[i], to, got));
    }
    free(wide), free(wide_to), free(narrow), free(narrow_to);
    PASS();
}

/* All numbers of 16 bits: to floats, which hold them all, and back; and to each other. */
TEST convert_every_half(void)
{
    uint32_t *all = (uint32_t *)stream_take(65536 * sizeof *all);
    uint16_t *half = (uint16_t *)stream_take(65536 * sizeof *half);
    float *wide = test_floats(65536, 0.0f);
    for (uint32_t i = 0; i < 65536; i++) all[i] = i;
    for (int kind = HALF; kind <= BRAIN; kind++) {
        CHECK_CALL(convert_all(kind, all, 65536, SINGLE));
        CHECK_CALL(convert_all(kind, all, 65536, kind));
        CHECK_CALL(convert_all(kind, all, 65536, kind == HALF ? BRAIN : HALF));
        for (uint32_t i = 0; i < 65536; i++) half[i] = (uint16_t)i;
        ASSERT_STATUS(MHA_OK, mha_convert(kind_type[kind], half, MHA_F32, wide, 65536));
        memset(half, 0xa5, 65536 * sizeof *half);
        ASSERT_STATUS(MHA_OK, mha_convert(MHA_F32, wide, kind_type[kind], half, 65536));
        for (uint32_t i = 0; i < 65536; i++)
            ASSERT(half[i] == i || (is_special(kind, i) == 2 && is_special(kind, half[i]) == 2));
    }
    free(all), free(half), free(wide);
    PASS();
}

/* Floats at and around every point where rounding changes, and the special ones. */
TEST convert_boundaries(void)
{
    enum { EACH = 7 };
    static const uint32_t special[] = {
        0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu,
        0x7f801fffu, 0x7f80ffffu, 0x7fbfffffu, 0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u,
        0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x477fe000u, 0x477fefffu, 0x477ff000u,
        0x477ff001u, 0x47800000u, 0x33000000u, 0x33000001u, 0x32ffffffu, 0x337fffffu, 0x33800000u,
        0x33c00000u, 0x387fffffu, 0x38800000u, 0x387fe000u, 0x387ff000u, 0x7f7f7fffu, 0x7f7f8000u,
    };
    uint32_t *b = (uint32_t *)stream_take(65536 * EACH * sizeof *b);
    CHECK_CALL(convert_all(SINGLE, special, sizeof special / sizeof *special, HALF));
    CHECK_CALL(convert_all(SINGLE, special, sizeof special / sizeof *special, BRAIN));
    CHECK_CALL(convert_all(SINGLE, special, sizeof special / sizeof *special, SINGLE));
    for (int kind = HALF; kind <= BRAIN; kind++) {
        size_t n = 0;
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t low, high, mid;
            if (is_special(kind, i) || is_special(kind, i + 1)) continue;
            low = recode(kind, i, SINGLE), high = recode(kind, i + 1, SINGLE);
            /* the middle of two neighbours, by bits: all numbers of a half are normal floats, those
               of bf16 lie 2^16 apart */
            mid = kind == HALF && (i & 0x7fff) < 0x400
                      ? bits_f(f_bits(low) + (f_bits(high) - f_bits(low)) * 0.5f)
                      : low + (high - low) / 2;
            b[n++] = low, b[n++] = mid - 1, b[n++] = mid, b[n++] = mid + 1, b[n++] = high;
            b[n++] = low + 1, b[n++] = high - 1;
        }
        CHECK_CALL(convert_all(SINGLE, b, n, kind));
    }
    free(b);
    PASS();
}

TEST convert_random(void)
{
    const size_t n = (size_t)test_cases * 50;
    uint32_t *b = (uint32_t *)stream_take(n * sizeof *b);
    rng r = rng_make(test_seed + 60);
    for (size_t i = 0; i < n; i++) {
        b[i] = rng_u32(&r);
        if (i % 2) /* in the range of a half, and a little beyond */
            b[i] = (b[i] & 0x807fffffu) | (uint32_t)rng_int(&r, 127 - 27, 127 + 17) << 23;
    }
    CHECK_CALL(convert_all(SINGLE, b, n, HALF));
    CHECK_CALL(convert_all(SINGLE, b, n, BRAIN));
    CHECK_CALL(convert_all(SINGLE, b, n, SINGLE));
    free(b);
    PASS();
}

/* Any count, at any address a number may have, and not one more. */
TEST convert_lengths(void)
{
    float wide[80], back[80];
    uint16_t half[80];
    rng r = rng_make(test_seed + 61);
    rng_fill(&r, wide, 80);
    for (int kind = HALF; kind <= BRAIN; kind++)
        for (int off = 0; off < 9; off++)
            for (int n = 0; n < 70; n++) {
                memset(half, 0xa5, sizeof half);
                ASSERT_STATUS(MHA_OK, mha_convert(MHA_F32, wide + off, kind_type[kind], half + off,
                                                  (size_t)n));
                for (int i = 0; i < 80; i++) {
                    const int in = i >= off && i < off + n;
                    ASSERT_EQ_FMT(in ? recode(SINGLE, bits_f(wide[i]), kind) : 0xa5a5u,
                                  (uint32_t)half[i], "%x");
                }
                memset(back, 0xa5, sizeof back);
                ASSERT_STATUS(MHA_OK, mha_convert(kind_type[kind], half + off, MHA_F32, back + off,
                                                  (size_t)n));
                for (int i = 0; i < 80; i++) {
                    const int in = i >= off && i < off + n;
                    ASSERT_EQ_FMT(in ? recode(kind, half[i], SINGLE) : 0xa5a5a5a5u, bits_f(back[i]),
                                  "%x");
                }
            }
    PASS();
}

TEST convert_refuses(void)
{
    float x[4] = { 1, 2, 3, 4 };
    uint16_t y[4] = { 0xa5a5, 0xa5a5, 0xa5a5, 0xa5a5 };
    ASSERT_STATUS(MHA_ERR_NULL, mha_convert(MHA_F32, NULL, MHA_F16, y, 4));
    ASSERT_STATUS(MHA_ERR_NULL, mha_convert(MHA_F32, x, MHA_F16, NULL, 4));
    ASSERT_STATUS(MHA_ERR_VALUE, mha_convert(MHA_F32, x, MHA_INT8, y, 4));
    ASSERT_STATUS(MHA_ERR_VALUE, mha_convert(MHA_INT8, x, MHA_F16, y, 4));
    ASSERT_STATUS(MHA_ERR_ENUM, mha_convert(MHA_F32, x, (mha_type)4, y, 4));
    ASSERT_STATUS(MHA_ERR_ENUM, mha_convert((mha_type)77, x, MHA_F16, y, 4));
    ASSERT_STATUS(MHA_ERR_ALIGN, mha_convert(MHA_F32, (char *)x + 2, MHA_F16, y, 3));
    ASSERT_STATUS(MHA_ERR_ALIGN, mha_convert(MHA_F32, x, MHA_F16, (char *)y + 1, 3));
    for (int i = 0; i < 4; i++) ASSERT_EQ_FMT(0xa5a5u, (unsigned)y[i], "%x");
    PASS();
}

/* ---- weights ------------------------------------------------------------------------------------ */

static int matrix_in(const mha_config *c, int which)
{
    return which == 1   ? c->d_source
           : which == 2 ? c->d_source_v
           : which == 3 ? c->n_heads * c->d_v
                        : c->d_model;
}

/* The four matrices, [in][out], moved a little where INT8 would have to decide a tie. */
static void avoid_ties(net *n)
{
    for (int i = 0; i < 4; i++) {
        const int in = matrix_in(&n->cfg, i), out = (int)net_len(&n->cfg, i) / in;
        for (int c = 0; c < out; c++) {
            double top = 0;
            for (int k = 0; k < in; k++)
                if (fabs((double)n->m[i][k * out + c]) > top)
                    top = fabs((double)n->m[i][k * out + c]);
            for (int k = 0; k < in; k++) {
                float *w = &n->m[i][k * out + c];
                const double q = (double)*w / top * 127.0, d = q - floor(q) - 0.5;
                if (fabs(d) < 0.01) *w = (float)((q - d + 0.1) * top / 127.0);
            }
        }
    }
}

static void round_weights(net *n, mha_type type)
{
    for (int i = 0; i < 4; i++) {
        const int in = matrix_in(&n->cfg, i), out = (int)net_len(&n->cfg, i) / in;
        for (int c = 0; c < out; c++) round_floats(type, n->m[i] + c, in, out);
    }
}

/* The matrices of n in another way: both in one, or transposed, or both. Freed by the caller. */
static float *fuse(const net *n, int fused, mha_layout layout, mha_weights *w)
{
    size_t total = 0, at = 0;
    float *to;
    int width = 0, col = 0;
    for (int i = 0; i < 4; i++) total += net_len(&n->cfg, i);
    for (int i = 0; i < 3; i++) width += (int)net_len(&n->cfg, i) / matrix_in(&n->cfg, i);
    to = test_floats(total, 0.0f);
    *w = n->w;
    w->layout = layout;
    if (fused) w->q = w->k = w->v = NULL, w->qkv = to;
    for (int i = 0; i < 4; i++) {
        const int in = matrix_in(&n->cfg, i), out = (int)net_len(&n->cfg, i) / in;
        const int wide = fused && i < 3 ? width : out, c0 = fused && i < 3 ? col : 0;
        float *m = fused && i < 3 ? to : to + at;
        for (int k = 0; k < in; k++)
            for (int c = 0; c < out; c++)
                m[layout == MHA_IN_OUT ? k * wide + c0 + c : (c0 + c) * in + k] =
                    n->m[i][k * out + c];
        if (!fused && i == 0) w->q = m;
        if (!fused && i == 1) w->k = m;
        if (!fused && i == 2) w->v = m;
        if (i == 3) w->out = m;
        at += net_len(&n->cfg, i);
        col += out;
    }
    return to;
}

/* A layer that rounds its weights is one of floats that is given the rounded ones: bit for bit, but
   for INT8, where the scale multiplies the sum instead of each weight. Both are then within what the
   manual promises of a layer, 1e-5 of max|y|. */
TEST weights_rounded(mha_isa isa)
{
    rng r = rng_make(test_seed + 62);
    for (int n = 0; n < 56; n++) {
        const mha_type type = types[n % 4];
        const int big = n >= 48, cross = n % 3 == 2;
        const int G = rng_int(&r, 1, 3), H = G * rng_int(&r, 1, 2),
                  D = big ? 700 : rng_int(&r, 3, 60);
        const int dk = big ? 32 : rng_int(&r, 1, 20), dv = rng_int(&r, 1, 20);
        const int with = n < 12 ? 0 : (int)rng_u32(&r) & WITH_ALL;
        const int ds = cross ? rng_int(&r, 1, 40) : 0,
                  dsv = cross && n % 2 ? rng_int(&r, 1, 40) : 0;
        const int one =
            n % 5 == 0 || n >= 52; /* a row alone: no others to share the weights with */
        const int B = one ? 1 : 2, T = one ? 1 : rng_int(&r, 1, 20),
                  S = cross ? rng_int(&r, 1, 30) : T;
        const uint64_t seed = test_seed + (uint64_t)n;
        rich a = rich_weights(isa, D, H, G, dk, dv, ds, dsv, with, seed);
        rich b = rich_weights(isa, D, H, G, dk, dv, ds, dsv, with, seed);
        float *x = rng_floats(&r, (size_t)(B * T * D));
        float *source = rng_floats(&r, (size_t)(B * S * a.n.cfg.d_source));
        float *source_v = rng_floats(&r, (size_t)(B * S * a.n.cfg.d_source_v));
        float *y = nan_floats((size_t)(B * T * D)), *want = nan_floats((size_t)(B * T * D));
        float *other = NULL;
        mha_weights given = a.n.w;
        mha_args f = { 0 };
        double top = 0, worst = 0;
        int same;
        avoid_ties(&a.n);
        avoid_ties(&b.n);
        round_weights(&b.n, type);
        a.n.cfg.weight_type = type;
        if (!cross && rng_chance(&r, 50))
            other = fuse(&a.n, 1, rng_chance(&r, 50) ? MHA_OUT_IN : MHA_IN_OUT, &given);
        else if (rng_chance(&r, 50)) other = fuse(&a.n, 0, MHA_OUT_IN, &given);
        ASSERT_STATUS(MHA_OK, mha_layer_create(&a.n.layer, &a.n.cfg, &given));
        ASSERT_EQ_FMT((int)type, (int)mha_layer_config(a.n.layer)->weight_type, "%d");
        ASSERT_STATUS(MHA_OK, rich_create(&b));
        f.batch = B, f.seq = T, f.x = x, f.y = y;
        if (cross) f.source = source, f.source_seq = S;
        if (cross && dsv) f.source_v = source_v;
        ASSERT_STATUS(MHA_OK, mha_forward(a.n.layer, &f));
        f.y = want;
        ASSERT_STATUS(MHA_OK, mha_forward(b.n.layer, &f));
        for (int i = 0; i < B * T * D; i++) {
            const double d = fabs((double)y[i] - (double)want[i]);
            ASSERT(is_finite(y[i]) && is_finite(want[i]));
            if (fabs((double)want[i]) > top) top = fabs((double)want[i]);
            if (d > worst) worst = d;
        }
        same = type == MHA_INT8 ? worst <= 1e-5 * top : same_result(want, y, (size_t)(B * T * D));
        if (!same) {
            printf("\n  %s: %g of %g\n", type_name[type], worst, top);
            rich_print(&a);
        }
        ASSERT(same);
        rich_free(&a);
        rich_free(&b);
        free(x), free(source), free(source_v), free(y), free(want), free(other);
    }
    PASS();
}

/* The stages of such a layer are those of mha_forward, bit for bit as to threads and batch. */
TEST weights_rounded_bits(mha_isa isa)
{
    enum { T = 37, W = 45 };
    for (int n = 1; n < 4; n++) {
        /* 6 panels of q and k, 6 or 3 of v: groups of panels that threads share are not all full */
        rich l = rich_weights(isa, W, 6, n % 2 ? 6 : 3, 9, 7, 0, 0, WITH_ALL, test_seed);
        rng r = rng_make(test_seed + 63);
        float *x = rng_floats(&r, 3 * T * W), *y = nan_floats(3 * T * W);
        float *want = nan_floats(3 * T * W);
        const int cu[3] = { 0, 11, T };
        mha_args a = { 0 };
        l.n.cfg.weight_type = types[n];
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        a.batch = 3, a.seq = T, a.x = x, a.y = want, a.mask.causal = MHA_CAUSAL;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        a.y = y, a.parallel.parallel_for = stream_for;
        for (a.parallel.threads = 1; a.parallel.threads < 5; a.parallel.threads++) {
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            ASSERT(same_result(want, y, 3 * T * W));
        }
        a.batch = 1, a.x = x + 2 * T * W;
        a.parallel.parallel_for = NULL, a.parallel.threads = 0;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        ASSERT(same_result(want + 2 * T * W, y, T * W));
        a.batch = 2, a.cu_seq = cu, a.x = x;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        ASSERT(same_result(want, y, 11 * W)); /* the first sequence begins as before */
        for (int t = 0; t < 5; t++) {         /* one token at a time */
            mha_cache_config cfg = { 0 };
            mha_cache *cache;
            mha_args s = { 0 };
            cfg.batch = 1, cfg.capacity = T;
            ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
            s.batch = 1, s.seq = 1, s.cache = cache;
            for (int i = 0; i <= t; i++) {
                s.x = x + i * W, s.y = y;
                ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &s));
                ASSERT(same_result(want + i * W, y, W));
            }
            mha_cache_free(cache);
        }
        rich_free(&l);
        free(x), free(y), free(want);
    }
    PASS();
}

/* A column of zeros has no scale to divide by; tiny ones have a tiny one. NaN is not lost. */
TEST weights_special(mha_isa isa)
{
    enum { T = 5, W = 20 };
    for (int n = 0; n < 4; n++) {
        rich l = rich_weights(isa, W, 2, 2, 10, 10, 0, 0, 0, test_seed);
        rng r = rng_make(test_seed + 64);
        float *x = rng_floats(&r, T * W), *y = nan_floats(T * W), *z = nan_floats(T * W);
        float big = 0;
        mha_args a = { 0 };
        mha_layer *layer;
        l.n.cfg.weight_type = types[n];
        for (int k = 0; k < W; k++) {
            l.n.m[3][k * W + 4] = 0.0f;
            l.n.m[3][k * W + 5] *= 1e-6f; /* in f16 below the normal numbers */
        }
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        a.batch = 1, a.seq = T, a.x = x, a.y = y;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        for (int t = 0; t < T; t++) {
            ASSERT(same_result(&l.n.m[7][4], &y[t * W + 4], 1)); /* the bias */
            ASSERT(fabs((double)y[t * W + 5] - (double)l.n.m[7][5]) < 1e-4);
            for (int c = 0; c < W; c++) ASSERT(is_finite(y[t * W + c]));
        }
        l.n.m[3][3 * W + 6] = F_NAN;
        ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &l.n.cfg, &l.n.w));
        a.y = z;
        ASSERT_STATUS(MHA_OK, mha_forward(layer, &a));
        for (int t = 0; t < T; t++)
            for (int c = 0; c < W; c++)
                ASSERT(c == 6 ? is_nan(z[t * W + c])
                              : same_result(&y[t * W + c], &z[t * W + c], 1));
        mha_layer_free(layer);
        l.n.m[3][3 * W + 6] = 70000.0f; /* beyond f16: infinite there, and only there */
        ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &l.n.cfg, &l.n.w));
        ASSERT_STATUS(MHA_OK, mha_forward(layer, &a));
        for (int t = 0; t < T; t++) {
            ASSERT_EQ(types[n] != MHA_F16, is_finite(z[t * W + 6]));
            if (fabsf(z[t * W + 6]) > big) big = fabsf(z[t * W + 6]);
        }
        ASSERT(types[n] == MHA_F16 || big > 100.0f);
        mha_layer_free(layer);
        rich_free(&l);
        free(x), free(y), free(z);
    }
    PASS();
}

/* ---- caches ------------------------------------------------------------------------------------- */

/* A layer whose W_O is the identity, so that y is what attention gives. */
static rich bare_layer(mha_isa isa, int D, int H, int G, uint64_t seed)
{
    rich l = rich_weights(isa, D, H, G, D / H, D / H, 0, 0, 0, seed);
    for (int i = 0; i < D; i++)
        for (int j = 0; j < D; j++) l.n.m[3][i * D + j] = i == j ? 1.0f : 0.0f;
    l.n.w.b_out = NULL;
    return l;
}

/* x [T,D] through a cache of the type, first half at once, then one by one. */
static mha_status through_cache(const rich *l, mha_type type, const float *x, float *y, int T)
{
    const int D = l->n.cfg.d_model;
    mha_cache_config cfg = { 0 };
    mha_cache *cache;
    mha_args a = { 0 };
    mha_status st;
    cfg.batch = 1, cfg.capacity = T, cfg.type = type;
    st = mha_cache_create(&cache, l->n.layer, &cfg);
    a.batch = 1, a.cache = cache, a.mask.causal = MHA_CAUSAL;
    for (int t = 0; t < T && st == MHA_OK; t += a.seq) {
        a.seq = t == 0 && T > 1 ? T / 2 : 1, a.x = x + t * D, a.y = y + t * D;
        st = mha_forward(l->n.layer, &a);
    }
    mha_cache_free(cache);
    return st;
}

/* Keys and values are those the quantiser makes; all else is float32. Against the formula in double
   with the rounded k and v: within what mha.h promises of attention, 2e-6 max|v|. Against a float32
   cache: within what rounding can do. A score changes by at most e = scale * sum |q||dk|, a
   weight therefore by a factor of at most exp(2e), and o by (exp(2e) - 1) max|v| + max|dv|; where
   |dk| <= |k| 2^-11 in f16 (11 bits), 2^-8 in bf16 (8 bits), and max|k| / 254 in int8 (half of
   a step of max|k| / 127). */
TEST cache_rounds(mha_isa isa)
{
    enum { T = 40, W = 32, HEADS = 4, KV = 2, DH = 8 };
    for (int n = 0; n < 4; n++) {
        const mha_type type = types[n];
        const double unit = type == MHA_F16    ? 1.0 / 2048
                            : type == MHA_BF16 ? 1.0 / 256
                                               : 0; /* relative */
        rich l;
        float *x = NULL, *y = nan_floats(T * W), *whole = nan_floats(T * W);
        float *q = nan_floats(T * W), *k = nan_floats(T * KV * DH), *v = nan_floats(T * KV * DH);
        float *k0, *v0;
        oracle_result want;
        mha_sdpa_args s = { 0 };
        mha_args a = { 0 };
        double v_max = 0, differs = 0;
        for (uint64_t seed = test_seed;; seed++) { /* data without ties for int8 */
            rng r = rng_make(seed + 65);
            double tie = 1;
            l = bare_layer(isa, W, HEADS, KV, seed);
            x = rng_floats(&r, T * W);
            ASSERT_STATUS(MHA_OK, rich_create(&l));
            a.batch = 1, a.seq = T, a.x = x;
            ASSERT_STATUS(MHA_OK, mha_project_qkv(l.n.layer, &a, q, k, v));
            for (int i = 0; i < T * KV; i++) {
                const double tk = tie_distance(k + i * DH, DH, 1);
                const double tv = tie_distance(v + i * DH, DH, 1);
                if (tk < tie) tie = tk;
                if (tv < tie) tie = tv;
            }
            if (type != MHA_INT8 || tie > 1e-4) break;
            rich_free(&l);
            free(x);
        }
        k0 = copy_floats(k, T * KV * DH), v0 = copy_floats(v, T * KV * DH);
        for (int i = 0; i < T * KV; i++) {
            round_floats(type, k + i * DH, DH, 1);
            round_floats(type, v + i * DH, DH, 1);
        }
        ASSERT_STATUS(MHA_OK, through_cache(&l, type, x, y, T));
        ASSERT_STATUS(MHA_OK, through_cache(&l, MHA_F32, x, whole, T));
        s.batch = 1, s.heads = HEADS, s.kv_heads = KV, s.seq = T, s.source_seq = T, s.d_k = DH;
        s.q = q, s.k = k, s.v = v, s.mask.causal = MHA_CAUSAL;
        s.q_stride.batch = T * W, s.q_stride.head = DH, s.q_stride.seq = W;
        s.k_stride.batch = T * KV * DH, s.k_stride.head = DH, s.k_stride.seq = KV * DH;
        s.v_stride = s.k_stride;
        want = oracle_sdpa(&s);
        for (int i = 0; i < T * KV * DH; i++)
            if (fabs((double)v0[i]) > v_max) v_max = fabs((double)v0[i]);
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < T; i++) {
                double e = 0, dv = 0, bound;
                for (int j = 0; j <= i; j++) {
                    const float *kj = k0 + (j * KV + h / 2) * DH, *vj = v0 + (j * KV + h / 2) * DH;
                    double sum = 0, k_top = 0, v_top = 0;
                    for (int c = 0; c < DH; c++) {
                        if (fabs((double)kj[c]) > k_top) k_top = fabs((double)kj[c]);
                        if (fabs((double)vj[c]) > v_top) v_top = fabs((double)vj[c]);
                    }
                    for (int c = 0; c < DH; c++)
                        sum += fabs((double)q[i * W + h * DH + c]) *
                               (type == MHA_INT8 ? k_top / 254 : fabs((double)kj[c]) * unit);
                    if (type == MHA_INT8) v_top /= 254;
                    else v_top *= unit;
                    sum /= sqrt((double)DH);
                    if (sum > e) e = sum;
                    if (v_top > dv) dv = v_top;
                }
                bound = (exp(2 * e) - 1) * v_max + dv + 4e-6 * v_max;
                for (int c = 0; c < DH; c++) {
                    const double got = (double)y[i * W + h * DH + c];
                    const double f32 = (double)whole[i * W + h * DH + c];
                    ASSERT(fabs(want.o[(h * T + i) * DH + c] - got) <= 2e-6 * want.v_max);
                    ASSERT(fabs(f32 - got) <= bound);
                    if (fabs(f32 - got) > differs) differs = fabs(f32 - got);
                }
            }
        /* and it does round: the first row is v itself */
        ASSERT(type == MHA_F32 ? differs <= 0
                               : differs > v_max * (unit > 0 ? unit : 1 / 254.0) / 16);
        oracle_free(&want);
        rich_free(&l);
        free(x), free(y), free(whole), free(q), free(k), free(v), free(k0), free(v0);
    }
    PASS();
}

/* Pieces, batch, threads, rings, forks: as with float32, bit for bit. */
TEST cache_bits(mha_isa isa, mha_type type)
{
    const int counts[6][SLOTS] = { { 17, 0, 3, 1 }, { 1, 1, 1, 1 }, { 0, 40, 1, 2 },
                                   { 1, 0, 0, 33 }, { 5, 5, 5, 5 }, { 1, 2, 3, 4 } };
    rich l = rich_weights(isa, 14, 6, 3, 6, 17, 0, 0, WITH_ROPE | WITH_NORM | WITH_SINK, test_seed);
    rng r = rng_make(test_seed + 66), again;
    mha_cache_config cfg = { 0 };
    world lin, ring;
    cfg.batch = SLOTS, cfg.capacity = 340, cfg.type = type;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&lin, &l, 1, cfg, 340));
    cfg.capacity = 50, cfg.ring = 1;
    ASSERT_STATUS(MHA_OK, world_make(&ring, &l, 1, cfg, 340));
    for (int b = 0; b < SLOTS; b++) { /* the same tokens before; the ring soon goes round */
        int to[SLOTS] = { 0 };
        to[b] = b == 2 ? 0 : 244 + b;
        again = r;
        CHECK_CALL(world_advance(&ring, 0, to, &r));
        for (int n = 0; n < to[b]; n += 50) {
            int some[SLOTS] = { 0 };
            some[b] = n + 50 < to[b] ? n + 50 : to[b];
            CHECK_CALL(world_advance(&lin, 0, some, &again));
        }
    }
    for (int i = 0; i < 6; i++) {
        plan p = plan_of(0);
        memcpy(p.count, counts[i], sizeof p.count);
        p.ragged = i != 1 && i != 4;
        p.windowed = 1, p.left = 9;
        p.threads = i % 3;
        p.outputs = i > 2;
        again = r;
        CHECK_CALL(feed_ok(&lin, 0, &p, &r));
        CHECK_CALL(feed_ok(&ring, 0, &p, &again));
        ASSERT(same_result(lin.y, ring.y, lin.ny));
    }
    for (int i = 0; i < 3; i++) { /* in a circle, doubled; then a fork, whole and of a part */
        static const int orders[3][SLOTS] = { { 1, 2, 3, 0 }, { 0, 0, 3, 2 }, { 0, 1, 2, 3 } };
        plan p = plan_of(2);
        p.windowed = 1, p.left = 30;
        for (int n = 0; n < 2; n++) {
            world *w = n ? &ring : &lin;
            line old[SLOTS];
            ASSERT_STATUS(MHA_OK, mha_cache_reorder(w->cache[0], orders[i]));
            for (int b = 0; b < SLOTS; b++) {
                old[b] = w->line[0][b];
                old[b].x = copy_floats(old[b].x, (size_t)(old[b].len * 14));
                old[b].pos = (int *)stream_take((size_t)old[b].len * sizeof(int));
                memcpy(old[b].pos, w->line[0][b].pos, (size_t)old[b].len * sizeof(int));
            }
            for (int b = 0; b < SLOTS; b++)
                line_copy(w, &w->line[0][b], &old[orders[i][b]], old[orders[i][b]].len);
            for (int b = 0; b < SLOTS; b++) free(old[b].x), free(old[b].pos);
            if (i == 2) {
                const int len = n ? w->line[0][3].len : w->line[0][3].len - 9;
                ASSERT_STATUS(MHA_OK, mha_cache_fork(w->cache[0], 1, w->cache[0], 3, len));
                line_copy(w, &w->line[0][1], &w->line[0][3], len);
            }
            CHECK_CALL(feed_ok(w, 0, &p, &r));
        }
    }
    world_free(&lin);
    world_free(&ring);
    rich_free(&l);
    PASS();
}

TEST cache_bits_f16(mha_isa isa)
{
    CHECK_CALL(cache_bits(isa, MHA_F16));
    PASS();
}

TEST cache_bits_bf16(mha_isa isa)
{
    CHECK_CALL(cache_bits(isa, MHA_BF16));
    PASS();
}

TEST cache_bits_int8(mha_isa isa)
{
    CHECK_CALL(cache_bits(isa, MHA_INT8));
    PASS();
}

/* Six heads that share one of keys, more than 64 keys, values of five panels: what a step
   multiplies as it is kept has the bits of the call that widened it. */
TEST cache_bits_grouped(mha_isa isa)
{
    enum { D = 14, T = 90, LAST = 5 };
    rich l = rich_weights(isa, D, 6, 1, 20, 80, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 67);
    float *x = rng_floats(&r, T * D), *y = test_floats(T * D, 0.0f), step[D];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int type = MHA_F16; type <= MHA_INT8; type++) {
        mha_cache_config cfg = { 0 };
        mha_cache *cache;
        mha_args a = { 0 };
        cfg.batch = 1, cfg.capacity = T, cfg.type = (mha_type)type;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
        a.batch = 1, a.seq = T, a.x = x, a.y = y, a.cache = cache, a.mask.causal = MHA_CAUSAL;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, T - LAST));
        a.seq = 1, a.y = step;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(l.n.layer, &a, &a.workspace_size));
        a.workspace = stream_take(a.workspace_size);
        for (int t = T - LAST; t < T; t++) {
            a.x = x + t * D;
            memset(a.workspace, 0, a.workspace_size); /* NaN there would be noticed and mended */
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            ASSERT(same_result(y + t * D, step, D));
        }
        free(a.workspace);
        mha_cache_free(cache);
    }
    rich_free(&l);
    free(x);
    free(y);
    PASS();
}

TEST random_compact(mha_isa isa)
{
    for (int n = 1; n < 4; n++)
        for (int ring = 0; ring < 2; ring++) CHECK_CALL(histories(isa, ring, types[n], 160));
    PASS();
}

/* Weights and a cache of any two types go together. */
TEST types_mixed(mha_isa isa)
{
    for (int n = 0; n < 16; n++) {
        rich l = rich_weights(isa, 14, 6, 3, 6, 7, 0, 0, WITH_ROPE, test_seed + (uint64_t)n);
        rng r = rng_make(test_seed + 67);
        mha_cache_config cfg = { 0 };
        world w;
        l.n.cfg.weight_type = types[n % 4];
        cfg.batch = 2, cfg.capacity = 40, cfg.type = types[n / 4];
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cfg, 40));
        for (int i = 0; i < 4; i++) {
            plan p = plan_of(1 + 3 * i);
            CHECK_CALL(feed_ok(&w, 0, &p, &r));
        }
        world_free(&w);
        rich_free(&l);
    }
    PASS();
}

/* ---- how far off ---------------------------------------------------------------------------------- */

/* Of the largest number of y, a layer of D = 256 and 4 heads over 64 tokens, all N(0,1): the weights
   in each type, then the cache. The limits are stated, not promised. */
TEST measured(mha_isa isa)
{
    enum { T = 64, W = 256 };
    static const double limit[2][4] = { { 0, 5e-4, 4e-3, 1.5e-2 }, { 0, 5e-4, 4e-3, 1.5e-2 } };
    rich l = rich_weights(isa, W, 4, 4, 64, 64, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 68);
    float *x = rng_floats(&r, T * W), *want = nan_floats(T * W), *y = nan_floats(T * W);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, through_cache(&l, MHA_F32, x, want, T));
    for (int what = 0; what < 2; what++)
        for (int n = 1; n < 4; n++) {
            double worst = 0, top = 0;
            if (what == 0) {
                rich other = rich_weights(isa, W, 4, 4, 64, 64, 0, 0, 0, test_seed);
                other.n.cfg.weight_type = types[n];
                ASSERT_STATUS(MHA_OK, rich_create(&other));
                ASSERT_STATUS(MHA_OK, through_cache(&other, MHA_F32, x, y, T));
                rich_free(&other);
            } else {
                ASSERT_STATUS(MHA_OK, through_cache(&l, types[n], x, y, T));
            }
            for (int i = 0; i < T * W; i++) {
                const double d = fabs((double)want[i] - (double)y[i]);
                ASSERT(is_finite(y[i]));
                if (d > worst) worst = d;
                if (fabs((double)want[i]) > top) top = fabs((double)want[i]);
            }
            if (GREATEST_IS_VERBOSE())
                printf("  %s in %s: error %.2e of max|y|\n", what ? "cache" : "weights",
                       type_name[n], worst / top);
            ASSERT(worst <= limit[what][n] * top);
            ASSERT(worst > limit[what][n] * top / 100); /* it did round */
        }
    rich_free(&l);
    free(x), free(want), free(y);
    PASS();
}

/* The weights of attention to a compact cache: each row adds up to 1, their mean is that of the heads,
   and they are those of a cache of floats but for what rounding k by up to e does: it changes scores
   by d = sum |q| |e| / sqrt(d_k) and weights by a factor of exp(2d) at most. |e| <= |k| 2^-11 in f16,
   |k| 2^-8 in bf16, max|k| / 254 in int8. Over one block of keys and over two. */
TEST weights_of_cache(mha_isa isa)
{
    enum { S = 300, T = 7, W = 16, H = 4, G = 2, DK = 8, DV = 8 };
    const double part[4] = { 0, 1 / 2048.0, 1 / 256.0, 0 };
    rich l = rich_weights(isa, W, H, G, DK, DV, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 75);
    float *q = nan_floats(T * H * DK), *keys = nan_floats(S * G * DK);
    mha_args both = { 0 };
    float *k = rng_floats(&r, S * W), *x = rng_floats(&r, T * W), *y = nan_floats(T * W);
    float *want = nan_floats(H * T * S), *attn = nan_floats(H * T * S), *mean = nan_floats(T * S);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    both.batch = 1, both.seq = T, both.source_seq = S, both.x = x, both.source = k;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(l.n.layer, &both, q, keys, NULL));
    for (int len = 20; len <= S; len += S - 20)
        for (int n = 0; n < 4; n++) {
            mha_cache_config cfg = { 0 };
            mha_cache *cache;
            mha_args a = { 0 };
            double worst = 0, changed = 0;
            for (int i = 0; i < T * H; i++) /* query i / H of head i % H */
                for (int j = 0; j < len; j++) {
                    const float *key = keys + (j * G + i % H / (H / G)) * DK;
                    double d = 0, most = 0;
                    for (int c = 0; c < DK; c++)
                        if (fabs((double)key[c]) > most) most = fabs((double)key[c]);
                    for (int c = 0; c < DK; c++)
                        d += fabs((double)q[i * DK + c]) *
                             (types[n] == MHA_INT8 ? most / 254 : fabs((double)key[c]) * part[n]);
                    if (d / sqrt((double)DK) > changed) changed = d / sqrt((double)DK);
                }
            cfg.batch = 1, cfg.capacity = S, cfg.type = types[n];
            ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
            a.batch = 1, a.source_seq = len, a.cache = cache, a.source = k;
            ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
            memset(&a, 0, sizeof a);
            a.batch = 1, a.seq = T, a.x = x, a.y = y, a.cache = cache, a.cache_only = 1;
            a.attn = n ? attn : want, a.attn_mean = mean;
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            for (int i = 0; i < H * T; i++) {
                double sum = 0;
                for (int j = 0; j < len; j++) {
                    const double d = fabs((double)a.attn[i * len + j] - (double)want[i * len + j]);
                    sum += (double)a.attn[i * len + j];
                    if (d > worst) worst = d;
                }
                ASSERT(fabs(sum - 1.0) <= 1e-5);
            }
            for (int i = 0; i < T * len; i++) {
                double sum = 0;
                for (int h = 0; h < H; h++) sum += (double)a.attn[h * T * len + i];
                ASSERT(fabs(sum / H - (double)mean[i]) <= 1e-6);
            }
            ASSERT(worst <= exp(2 * changed) - 1 + 1e-5);
            ASSERT(n == 0 || worst > (exp(2 * changed) - 1) / 1000); /* it did round */
            mha_cache_free(cache);
        }
    rich_free(&l);
    free(k), free(x), free(y), free(want), free(attn), free(mean), free(q), free(keys);
    PASS();
}

/* ---- NaN and Inf ---------------------------------------------------------------------------------- */

enum { BAD_NAN, BAD_INF, BAD_LARGE, BADS };

/* One token of which k, or v, or both are bad: excluded in any way it shows nowhere; attended it
   does. */
TEST bad_token(mha_isa isa)
{
    enum { S = 24, AT = 13, T = 3, W = 14, WK = 9, WV = 11, HEADS = 6 };
    rich l = rich_weights(isa, W, HEADS, 3, 6, 7, WK, WV, 0, test_seed);
    rng r = rng_make(test_seed + 69);
    float *k = rng_floats(&r, S * WK), *v = rng_floats(&r, S * WV), *x = rng_floats(&r, T * W);
    float *bad_k = test_floats(S * WK, 0), *bad_v = test_floats(S * WV, 0);
    float *bias = test_floats(T * S, 0.0f), *y = nan_floats(T * W), *want = nan_floats(T * W);
    float *attn = nan_floats(HEADS * T * S);
    unsigned char allow[T * S], padding[S] = { 0 };
    const int start[1] = { AT + 1 };
    memset(allow, 1, sizeof allow);
    for (int t = 0; t < T; t++) bias[t * S + AT] = F_NINF, allow[t * S + AT] = 0;
    padding[AT] = 1;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int n = 0; n < 4; n++)
        for (int bad = 0; bad < BADS; bad++)
            for (int what = 1; what < 4; what++) { /* k, v, both */
                mha_cache_config cfg = { 0 };
                mha_cache *cache[2];
                mha_args a = { 0 };
                cfg.batch = 1, cfg.capacity = S, cfg.type = types[n];
                memcpy(bad_k, k, S * WK * sizeof(float));
                memcpy(bad_v, v, S * WV * sizeof(float));
                for (int c = 0; c < WK && (what & 1); c++)
                    bad_k[AT * WK + c] = bad == BAD_NAN   ? F_NAN
                                         : bad == BAD_INF ? F_INF
                                                          : 1e6f * k[AT * WK + c];
                for (int c = 0; c < WV && (what & 2); c++)
                    bad_v[AT * WV + c] = bad == BAD_NAN   ? F_NAN
                                         : bad == BAD_INF ? F_INF
                                                          : 1e6f * v[AT * WV + c];
                for (int i = 0; i < 2; i++) {
                    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache[i], l.n.layer, &cfg));
                    memset(&a, 0, sizeof a);
                    a.batch = 1, a.source_seq = S, a.cache = cache[i];
                    a.source = i ? bad_k : k, a.source_v = i ? bad_v : v;
                    ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
                }
                memset(&a, 0, sizeof a);
                a.batch = 1, a.seq = T, a.x = x, a.cache_only = 1;
                for (int way = 0; way < 6; way++) {
                    memset(&a.mask, 0, sizeof a.mask);
                    if (way == 0) a.mask.allow = allow;
                    if (way == 1) a.mask.bias = bias;
                    if (way == 2) a.mask.key_padding = padding;
                    if (way == 3) a.mask.key_start = start;
                    if (way == 4) a.mask.windowed = 1, a.mask.left = 5; /* from 16 on */
                    a.attn = way % 2 ? attn : NULL;
                    a.cache = cache[0], a.y = want;
                    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
                    memset(y, 0xff, T * W * sizeof(float));
                    a.cache = cache[1], a.y = y;
                    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
                    if (way < 5) {
                        ASSERTm("something of an excluded token shows",
                                same_result(want, y, T * W));
                        for (int i = 0; i < HEADS * T && a.attn; i++) {
                            ASSERT_EQ_FMT(0u, bits_f(attn[i * S + AT]), "%x");
                            for (int j = 0; j < S; j++) ASSERT(is_finite(attn[i * S + j]));
                        }
                        continue;
                    }
                    for (int i = 0; i < T * W; i++) /* attended by all */
                        if (bad == BAD_NAN) ASSERTm("a NaN was lost", is_nan(y[i]));
                        else if (bad == BAD_INF) ASSERT(!is_finite(y[i]));
                        else if (what == 2) ASSERT_EQ(types[n] == MHA_F16, !is_finite(y[i]));
                }
                mha_cache_free(cache[0]);
                mha_cache_free(cache[1]);
            }
    rich_free(&l);
    free(k), free(v), free(x), free(bad_k), free(bad_v), free(bias), free(y), free(want);
    free(attn);
    PASS();
}

/* Tokens of zeros: int8 has no scale for them; and tiny ones. */
TEST tokens_of_zeros(mha_isa isa)
{
    enum { T = 9, W = 32 };
    for (int n = 0; n < 4; n++)
        for (int tiny = 0; tiny < 3; tiny++) {
            rich l = bare_layer(isa, W, 4, 2, test_seed);
            rng r = rng_make(test_seed + 70);
            float *x = rng_floats(&r, T * W), *y = nan_floats(T * W);
            const float size = tiny == 0 ? 0.0f : tiny == 1 ? 1e-30f : f_bits(0x00000100u);
            for (int i = 0; i < T * W; i++)
                if (i / W != T - 1) x[i] = size * (i % 3 ? 1.0f : -1.0f);
            for (int i = 0; i < W; i++) x[(T - 1) * W + i] *= 1e-3f;
            l.n.w.b_q = l.n.w.b_k = l.n.w.b_v = NULL;
            ASSERT_STATUS(MHA_OK, rich_create(&l));
            ASSERT_STATUS(MHA_OK, through_cache(&l, types[n], x, y, T));
            for (int i = 0; i < T * W; i++) {
                ASSERT(is_finite(y[i]));
                if (i / W != T - 1) ASSERT(fabs((double)y[i]) <= (tiny ? 1e-28 : 0.0));
                else ASSERT(fabs((double)y[i]) < 1e-2);
            }
            rich_free(&l);
            free(x), free(y);
        }
    PASS();
}

/* ---- how much memory -------------------------------------------------------------------------------- */

TEST sizes(mha_isa isa)
{
    /* of float32: a half, a half, a quarter and a float for each 64 numbers */
    static const double low[4] = { 1, 0.5, 0.5, 0.25 }, high[4] = { 1, 0.51, 0.51, 0.28 };
    rich l = rich_weights(isa, 256, 4, 4, 64, 64, 0, 0, 0, test_seed);
    size_t layer[4], cache[4], bytes[4];
    char why[200];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int n = 0; n < 4; n++) {
        mha_config cfg = l.n.cfg;
        mha_cache_config c = { 0 };
        mha_cache_facts facts;
        mha_cache *made;
        cfg.weight_type = types[n];
        c.batch = 3, c.capacity = 512, c.type = types[n];
        ASSERT_STATUS(MHA_OK, mha_layer_size(&cfg, &layer[n]));
        ASSERT_STATUS(MHA_OK, mha_cache_size(l.n.layer, &c, &cache[n]));
        ASSERT_STATUS(MHA_OK, mha_cache_create(&made, l.n.layer, &c));
        ASSERT_STATUS(MHA_OK, mha_cache_info(made, &facts));
        bytes[n] = facts.bytes;
        mha_cache_free(made);
        ASSERT(bytes[n] <= cache[n]);
        ASSERT((double)layer[n] >= low[n] * (double)layer[0] * 0.99);
        ASSERT((double)layer[n] <= high[n] * (double)layer[0]);
        ASSERT((double)cache[n] >= low[n] * (double)cache[0] * 0.99);
        ASSERT((double)cache[n] <= high[n] * (double)cache[0]);
        ASSERT((double)bytes[n] >= low[n] * (double)bytes[0]);
        ASSERT((double)bytes[n] <= high[n] * (double)bytes[0]);
    }
    l.n.cfg.weight_type = (mha_type)4;
    ASSERT_STATUS(MHA_ERR_ENUM, mha_layer_check(&l.n.cfg, &l.n.w, why, sizeof why));
    ASSERT_STATUS(MHA_ERR_ENUM, mha_layer_size(&l.n.cfg, &layer[0]));
    rich_free(&l);
    PASS();
}

SUITE(compact_suite)
{
    RUN_TEST(convert_every_half);
    RUN_TEST(convert_boundaries);
    RUN_TEST(convert_random);
    RUN_TEST(convert_lengths);
    RUN_TEST(convert_refuses);
    RUN_ON_EACH_ISA(weights_rounded);
    RUN_ON_EACH_ISA(weights_rounded_bits);
    RUN_ON_EACH_ISA(weights_special);
    RUN_ON_EACH_ISA(cache_rounds);
    RUN_ON_EACH_ISA(cache_bits_f16);
    RUN_ON_EACH_ISA(cache_bits_bf16);
    RUN_ON_EACH_ISA(cache_bits_int8);
    RUN_ON_EACH_ISA(cache_bits_grouped);
    RUN_ON_EACH_ISA(random_compact);
    RUN_ON_EACH_ISA(types_mixed);
    RUN_ON_EACH_ISA(measured);
    RUN_ON_EACH_ISA(weights_of_cache);
    RUN_ON_EACH_ISA(bad_token);
    RUN_ON_EACH_ISA(tokens_of_zeros);
    RUN_ON_EACH_ISA(sizes);
}
