/* test_random.c - random shapes, layouts, masks and options against the oracle.

   Case n is drawn from (MHA_TEST_SEED, n) alone: an even n is a call of mha_sdpa, an odd n a
   layer. MHA_TEST_CASE=n runs that one only. -v prints how much of the tolerance was used. */
#include <limits.h>

#include "frame.h"

#define CANARY 0x7fc0deadu /* a NaN that no arithmetic makes */
#define MARGIN 16

/* ---- what a case owns -------------------------------------------------------------------- */

typedef struct watched {
    const void *p;
    void *copy;
    size_t bytes;
} watched;

typedef struct shuffler {
    rng r;
    int threads, shuffle, bad;
} shuffler;

typedef struct test_case {
    void *mem[128];
    int mems;
    watched in[64]; /* must be as they were after the call */
    int ins;
    shuffler tasks;
    float *bias; /* the additive mask, with its gaps */
    size_t bias_n;
    unsigned char *ws; /* the workspace, MARGIN bytes longer than its size */
    size_t ws_size;
    char text[4096]; /* what was drawn */
    char error[256]; /* what went wrong; empty if nothing did */
    double used;     /* the largest part of a tolerance that was used */
} test_case;

static void *take(test_case *c, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p || c->mems == 128) abort();
    memset(p, 0xff, bytes ? bytes : 1);
    c->mem[c->mems++] = p;
    return p;
}

static void case_free(test_case *c)
{
    while (c->mems) free(c->mem[--c->mems]);
}

static void watch(test_case *c, const void *p, size_t bytes)
{
    watched *w = &c->in[c->ins++];
    if (c->ins > 64) abort();
    w->p = p;
    w->bytes = bytes;
    w->copy = take(c, bytes);
    memcpy(w->copy, p, bytes);
}

static void note(test_case *c, const char *name, long value)
{
    size_t n = strlen(c->text);
    snprintf(c->text + n, sizeof c->text - n, " %s=%ld", name, value);
}

static void note_text(test_case *c, const char *name, const char *value)
{
    size_t n = strlen(c->text);
    snprintf(c->text + n, sizeof c->text - n, " %s=%s", name, value);
}

static void note_float(test_case *c, const char *name, float value)
{
    size_t n = strlen(c->text);
    snprintf(c->text + n, sizeof c->text - n, " %s=%.9g", name, (double)value);
}

static void note_strides(test_case *c, const char *name, const ptrdiff_t *s, int count)
{
    size_t n = strlen(c->text);
    int i;
    snprintf(c->text + n, sizeof c->text - n, " %s={", name);
    for (i = 0; i < count; i++) {
        n = strlen(c->text);
        snprintf(c->text + n, sizeof c->text - n, "%s%ld", i ? "," : "", (long)s[i]);
    }
    n = strlen(c->text);
    snprintf(c->text + n, sizeof c->text - n, "}");
}

/* Remembers the first thing that went wrong. */
static void wrong(test_case *c, const char *what, double at, double got, double want)
{
    if (c->error[0]) return;
    snprintf(c->error, sizeof c->error, "%s at %.0f: got %.9g, want %.9g", what, at, got, want);
}

/* !(err <= tol), so that NaN fails; and by bits, so that it does under -ffast-math. */
static void compare(test_case *c, const char *what, size_t at, float got, double want, double tol)
{
    const double err = fabs((double)got - want);
    if (!is_finite(got) || !(err <= tol)) wrong(c, what, (double)at, (double)got, want);
    if (is_finite(got) && err > 0 && err / tol > c->used) c->used = err / tol;
}

static void compare_zero(test_case *c, const char *what, size_t at, float got)
{
    if (bits_f(got) << 1) wrong(c, what, (double)at, (double)got, 0);
}

/* ---- output buffers ---------------------------------------------------------------------- */

static float *output(test_case *c, size_t n)
{
    float *p = (float *)take(c, (n + 2 * MARGIN) * sizeof *p);
    size_t i;
    for (i = 0; i < n + 2 * MARGIN; i++) p[i] = f_bits(CANARY);
    return p + MARGIN;
}

static void check_margins(test_case *c, const char *what, const float *p, size_t n)
{
    size_t i;
    if (!p) return;
    for (i = 0; i < MARGIN; i++)
        if (bits_f(p[n + i]) != CANARY || bits_f(*(p - 1 - i)) != CANARY)
            wrong(c, what, (double)i, 0, 0);
}

/* ---- drawing ----------------------------------------------------------------------------- */

static int draw_length(rng *r)
{
    static const int edge[] = { 255, 256, 257, 300, 511, 512, 513, 600 };
    const int kind = rng_int(r, 0, 99);
    if (kind < 3) return 0;
    if (kind < 10) return 1;
    if (kind < 75) return rng_int(r, 1, 40);
    if (kind < 90) return edge[rng_int(r, 0, 7)];
    return rng_int(r, 40, 600);
}

static int draw_width(rng *r)
{
    static const int power[] = { 16, 32, 64, 128 };
    if (rng_chance(r, 20)) return power[rng_int(r, 0, 3)];
    return rng_chance(r, 75) ? 1 + 2 * rng_int(r, 0, 39) : rng_int(r, 1, 80);
}

/* Scales other than the default. The factor is what the scores grow by. */
static float draw_scale(rng *r, int d_k, double *factor)
{
    static const double grow[] = { 0.25, 0.5, 2, 8, 30 };
    *factor = 1;
    if (rng_chance(r, 70)) return 0;
    *factor = grow[rng_int(r, 0, 4)];
    return (float)(*factor / sqrt((double)d_k));
}

static void run_tasks(void *ctx, int n, mha_task task, void *arg)
{
    shuffler *s = (shuffler *)ctx;
    int order[8], i;
    if (n < 0 || n > s->threads || n > 8) {
        s->bad = 1;
        for (i = 0; i < n; i++) task(arg, i);
        return;
    }
    for (i = 0; i < n; i++) order[i] = i;
    for (i = n - 1; i > 0 && s->shuffle; i--) {
        int j = rng_int(&s->r, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (i = 0; i < n; i++) task(arg, order[i]);
}

static mha_parallel draw_parallel(rng *r, test_case *c)
{
    mha_parallel p;
    memset(&p, 0, sizeof p);
    c->tasks.r = rng_make(rng_u32(r));
    c->tasks.threads = rng_int(r, 1, 4);
    c->tasks.shuffle = rng_chance(r, 70);
    if (rng_chance(r, 60)) {
        p.parallel_for = run_tasks;
        p.ctx = &c->tasks;
        p.threads = c->tasks.threads;
        note(c, "threads", p.threads);
        note(c, "shuffle", c->tasks.shuffle);
    }
    return p;
}

/* ---- sequences --------------------------------------------------------------------------- */

/* Lengths of B sequences, at most *longest, some of them 0; *longest becomes the longest. */
static const int *draw_cu(rng *r, test_case *c, const char *name, int B, int *longest)
{
    int *cu = (int *)take(c, (size_t)(B + 1) * sizeof *cu), b, most = 0;
    cu[0] = 0;
    for (b = 0; b < B; b++) {
        const int n = rng_chance(r, 12) ? 0 : rng_int(r, *longest / 3, *longest);
        cu[b + 1] = cu[b] + n;
        if (n > most) most = n;
        note(c, name, n);
    }
    if (!B) note_text(c, name, "none");
    *longest = most;
    watch(c, cu, (size_t)(B + 1) * sizeof *cu);
    return cu;
}

/* A random order of the axes 0..n-1. */
static void draw_order(rng *r, int *order, int n)
{
    int i;
    for (i = 0; i < n; i++) order[i] = i;
    for (i = n - 1; i > 0; i--) {
        int j = rng_int(r, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
}

/* Strides of a mask over [B,H,T,S]: the default, or any axes broadcast, the others in any order
   and with gaps. Returns how many elements the mask holds. */
static size_t draw_mask_stride(rng *r, mha_mask_stride *s, int B, int H, int T, int S)
{
    const int extent[4] = { B, H, T, S };
    ptrdiff_t by[4] = { 0, 0, 0, 0 }, step = 1;
    const int kind = rng_int(r, 0, 9);
    int keep[4], order[4], i;

    memset(s, 0, sizeof *s);
    if (kind < 2) return (size_t)T * (size_t)S;
    for (i = 0; i < 4; i++) keep[i] = rng_chance(r, 50);
    if (kind < 4) keep[0] = keep[3] = 1, keep[1] = keep[2] = 0; /* [B,S] */
    if (kind == 4) keep[0] = keep[1] = keep[2] = keep[3] = 1;   /* [B,H,T,S] */
    if (!keep[0] && !keep[1] && !keep[2] && !keep[3]) keep[rng_int(r, 0, 3)] = 1;
    draw_order(r, order, 4);
    if (kind < 7)
        for (i = 0; i < 4; i++) order[i] = 3 - i; /* row-major; else maybe transposed */
    if (rng_chance(r, 20)) step = rng_int(r, 1, 3);
    for (i = 0; i < 4; i++) {
        const int axis = order[i];
        if (!keep[axis]) continue;
        by[axis] = step;
        step = step * (extent[axis] ? extent[axis] : 1) + (rng_chance(r, 20) ? 1 : 0);
    }
    s->batch = by[0];
    s->head = by[1];
    s->query = by[2];
    s->key = by[3];
    return (size_t)step;
}

static ptrdiff_t mask_at(const mha_mask_stride *s, int S, int b, int h, int i, int j)
{
    if (!s->batch && !s->head && !s->query && !s->key) return (ptrdiff_t)i * S + j;
    return b * s->batch + h * s->head + i * s->query + j * s->key;
}

/* One side of a window. */
static int draw_reach(rng *r, int longest)
{
    const int kind = rng_int(r, 0, 9);
    if (kind == 0) return -1;
    if (kind == 1) return 0;
    if (kind == 2) return INT_MAX;
    if (kind < 7) return rng_int(r, 0, longest / 4 + 1);
    return rng_int(r, 0, longest + 1);
}

static void draw_mask(rng *r, test_case *c, mha_mask *m, int B, int H, int T, int S, int *sized)
{
    static const int density[] = { 5, 50, 90, 100 };
    static const unsigned char yes[] = { 1, 1, 2, 128, 255 };
    size_t i, n;

    memset(m, 0, sizeof *m);
    *sized = 0;
    if (rng_chance(r, 40)) m->causal = rng_chance(r, 65) ? MHA_CAUSAL : MHA_CAUSAL_UPPER_LEFT;
    note(c, "causal", m->causal);
    if (rng_chance(r, 30)) {
        int *len = (int *)take(c, (size_t)B * sizeof *len), b;
        for (b = 0; b < B; b++) len[b] = rng_chance(r, 15) ? 0 : rng_int(r, 0, S);
        for (b = 0; b < B; b++) note(c, "key_len", len[b]);
        m->key_len = len;
        watch(c, len, (size_t)B * sizeof *len);
    }
    if (rng_chance(r, 15)) {
        int *start = (int *)take(c, (size_t)B * sizeof *start), b;
        for (b = 0; b < B; b++) start[b] = rng_chance(r, 30) ? 0 : rng_int(r, 0, S);
        for (b = 0; b < B; b++) note(c, "key_start", start[b]);
        m->key_start = start;
        watch(c, start, (size_t)B * sizeof *start);
    }
    if (rng_chance(r, 15)) {
        const int percent = density[rng_int(r, 0, 3)];
        unsigned char *padding = (unsigned char *)take(c, (size_t)B * (size_t)S);
        for (i = 0; i < (size_t)B * (size_t)S; i++)
            padding[i] = rng_chance(r, percent) ? (unsigned char)0 : yes[rng_int(r, 0, 4)];
        m->key_padding = padding;
        watch(c, padding, (size_t)B * (size_t)S);
        note(c, "key_padding", percent);
    }
    if (rng_chance(r, 25)) {
        m->windowed = 1;
        m->left = draw_reach(r, T > S ? T : S);
        m->right = draw_reach(r, T > S ? T : S);
        note(c, "left", m->left);
        note(c, "right", m->right);
    }
    if (rng_chance(r, 35)) {
        const int percent = density[rng_int(r, 0, 3)];
        /* nothing visible before this key: leading blocks that are all masked */
        const int lead = rng_chance(r, 20) ? rng_int(r, 0, S) : 0;
        unsigned char *allow;
        int b, h, t, j;
        n = draw_mask_stride(r, &m->allow_stride, B, H, T, S);
        allow = (unsigned char *)take(c, n);
        for (i = 0; i < n; i++)
            allow[i] = rng_chance(r, percent) ? yes[rng_int(r, 0, 4)] : (unsigned char)0;
        if (lead)
            for (b = 0; b < B; b++)
                for (h = 0; h < H; h++)
                    for (t = 0; t < T; t++)
                        for (j = 0; j < lead; j++)
                            allow[mask_at(&m->allow_stride, S, b, h, t, j)] = 0;
        m->allow = allow;
        watch(c, allow, n);
        note(c, "allow", percent);
        note(c, "lead", lead);
        note_strides(c, "allow_stride", &m->allow_stride.batch, 4);
    }
    if (rng_chance(r, 35)) {
        const int percent = density[rng_int(r, 0, 3)], far = rng_chance(r, 20);
        const float size = rng_chance(r, 70) ? 1.0f : 10.0f;
        float *bias;
        n = draw_mask_stride(r, &m->bias_stride, B, H, T, S);
        bias = (float *)take(c, n * sizeof *bias);
        for (i = 0; i < n; i++) {
            bias[i] = size * rng_normal(r);
            if (!rng_chance(r, percent)) bias[i] = F_NINF;
            else if (far && rng_chance(r, 10)) bias[i] = -1e9f; /* visible, and worth nothing */
        }
        m->bias = c->bias = bias;
        c->bias_n = n;
        *sized = 1;
        note(c, "bias", percent);
        note(c, "far", far);
        note_float(c, "size", size);
        note_strides(c, "bias_stride", &m->bias_stride.batch, 4);
    }
}

/* Numbers that must not be seen: NaN mostly. */
static float poison(rng *r)
{
    static const uint32_t bits[] = { 0x7fc00000u, 0xffc00001u, 0x7f800000u, 0xff800000u };
    return f_bits(bits[rng_int(r, 0, 3)]);
}

/* Puts poison wherever the bias belongs to nothing that is visible; -inf stays. */
static void poison_bias(rng *r, test_case *c, const frame *f)
{
    unsigned char *seen;
    size_t i;
    int b, h, t, j;
    if (!c->bias) return;
    seen = (unsigned char *)take(c, c->bias_n);
    memset(seen, 0, c->bias_n);
    for (b = 0; b < f->B; b++)
        for (h = 0; h < f->H; h++)
            for (t = 0; t < q_len(f, b); t++)
                for (j = 0; j < k_len(f, b); j++)
                    if (looks(f, b, h, t, j))
                        seen[mask_at(&f->mask->bias_stride, f->S, b, h, t, j)] = 1;
    for (i = 0; i < c->bias_n; i++)
        if (!seen[i] && bits_f(c->bias[i]) != 0xff800000u) do
                c->bias[i] = poison(r);
            while (bits_f(c->bias[i]) == 0xff800000u); /* that would be an exclusion */
}

/* ---- what both levels have ----------------------------------------------------------------- */

static float *draw_vector(rng *r, test_case *c, size_t n)
{
    const size_t shift = (size_t)rng_int(r, 0, 3);
    float *x = (float *)take(c, (n + shift) * sizeof *x) + shift;
    rng_fill(r, x, n);
    return x;
}

/* mean + spread * N(0,1), and must not be changed. */
static float *draw_around(rng *r, test_case *c, size_t n, float mean, float spread)
{
    float *x = draw_vector(r, c, n);
    size_t i;
    for (i = 0; i < n; i++) x[i] = mean + spread * x[i];
    watch(c, x, n * sizeof *x);
    return x;
}

static float draw_softcap(rng *r, test_case *c)
{
    static const float caps[] = { 0.5f, 5.0f, 20.0f, 50.0f, 1000.0f };
    float cap;
    if (!rng_chance(r, 20)) return 0;
    cap = caps[rng_int(r, 0, 4)];
    note_float(c, "softcap", cap);
    return cap;
}

static const float *draw_slopes(rng *r, test_case *c, int H)
{
    float *slopes = draw_vector(r, c, (size_t)H);
    int h;
    for (h = 0; h < H; h++) {
        slopes[h] = rng_chance(r, 10) ? 0.0f : 0.3f * fabsf(slopes[h]);
        note_float(c, "slope", slopes[h]);
    }
    watch(c, slopes, (size_t)H * sizeof *slopes);
    return slopes;
}

static void draw_sink(rng *r, test_case *c, int H, int dv, const float **sink, const float **value)
{
    float *p;
    int h;
    *sink = *value = NULL;
    if (!rng_chance(r, 25)) return;
    p = draw_vector(r, c, (size_t)H);
    for (h = 0; h < H; h++) {
        p[h] = rng_chance(r, 15) ? F_NINF : 3.0f * p[h];
        note_float(c, "sink", p[h]);
    }
    watch(c, p, (size_t)H * sizeof *p);
    *sink = p;
    if (rng_chance(r, 50)) {
        *value = draw_around(r, c, (size_t)H * (size_t)dv, 0.0f, 1.0f);
        note(c, "sink_value", 1);
    }
}

/* A gate of any shape over the frame's sequences, heads and queries. Many are 0. */
static void draw_gate(rng *r, test_case *c, frame *f, const float **gate, mha_gate_stride *s)
{
    const int ragged = f->cu_q != NULL;
    const int extent[3] = { ragged ? 1 : f->B, ragged ? q_total(f) : f->T, f->H };
    ptrdiff_t by[3] = { 0, 0, 0 }, step = 1;
    const int kind = rng_int(r, 0, 3), zeros = rng_chance(r, 50) ? 30 : 80;
    size_t n = (size_t)f->H, i;
    float *p;
    int order[3], k;

    *gate = NULL;
    memset(s, 0, sizeof *s);
    if (!rng_chance(r, 25)) return;
    if (kind == 1) { /* [B,T,H] */
        by[2] = 1;
        by[1] = f->H;
        by[0] = (ptrdiff_t)extent[1] * f->H;
        n = (size_t)extent[0] * (size_t)extent[1] * (size_t)f->H;
    } else if (kind > 1) { /* some axes, in any order, maybe with gaps */
        const int one = rng_int(r, 0, 2);
        draw_order(r, order, 3);
        for (k = 0; k < 3; k++) {
            const int axis = order[k];
            if (axis != one && rng_chance(r, 40)) continue;
            if (rng_chance(r, 20)) step++;
            by[axis] = step;
            step *= extent[axis] ? extent[axis] : 1;
        }
        n = (size_t)(step > f->H ? step : f->H) + 1;
    }
    if (ragged && (by[1] || by[2]) && rng_chance(r, 50)) by[0] = 1000; /* not looked at */
    if (ragged && !by[1] && !by[2]) by[0] = 0;
    s->batch = by[0];
    s->seq = by[1];
    s->head = by[2];
    p = draw_vector(r, c, n);
    for (i = 0; i < n; i++) {
        if (rng_chance(r, zeros)) p[i] = rng_chance(r, 80) ? 0.0f : f_bits(0x80000000u);
        else if (rng_chance(r, 20)) p[i] = 1.0f;
    }
    watch(c, p, n * sizeof *p);
    note(c, "gate_zeros", zeros);
    note_strides(c, "gate_stride", by, 3);
    *gate = f->gate = p;
    f->gate_stride = *s;
}

/* ---- workspace --------------------------------------------------------------------------- */

static void *workspace(rng *r, test_case *c, size_t bytes)
{
    const size_t shift = (size_t)rng_int(r, 0, 63);
    size_t i;
    c->ws = (unsigned char *)take(c, bytes + shift + MARGIN) + shift;
    c->ws_size = bytes;
    for (i = 0; i < MARGIN; i++) c->ws[bytes + i] = 0xa5;
    return c->ws;
}

/* After any call: nothing touched that should not be, nothing allocated that should not be. */
static void check_around(test_case *c, long live)
{
    size_t i;
    int k;
    for (k = 0; k < c->ins; k++)
        if (memcmp(c->in[k].p, c->in[k].copy, c->in[k].bytes) != 0)
            wrong(c, "an input was changed", k, 0, 0);
    if (c->tasks.bad) wrong(c, "parallel_for was asked for more tasks than threads", 0, 0, 0);
    if (test_live != live)
        wrong(c, "memory was not given back", 0, (double)test_live, (double)live);
    if (!c->ws) return;
    for (i = 0; i < MARGIN; i++)
        if (c->ws[c->ws_size + i] != 0xa5) wrong(c, "wrote behind the workspace", (double)i, 0, 0);
    if (test_allocs) wrong(c, "allocated in spite of a workspace", 0, (double)test_allocs, 0);
}

/* ---- tolerances -------------------------------------------------------------------------- */

/* mha.h promises 2e-6 max|v| for N(0,1) data at the default scale. In other cases:
   - With scores `factor` times as large the rounding errors of q.k are too.
   - A score is rounded three more times before exp, in units of 2^-24 of itself: when it is
     scaled, when the bias is added, when the maximum is subtracted. An error e_j in the score of
     key j changes o by attn_j e_j (v_j - o), at most 2 max|v| attn_j |e_j|: in sum
     6 * 2^-24 * max|v| * size, with the oracle's size = sum_j attn_j (|scale q.k_j| + |bias_j|),
     to which ALiBi, softcap, sinks, norm and rope add theirs: see oracle.h.
   The result is relative to max|v|; for attention weights as it is, for lse half of it. sized: the
   case has any of these. */
static double tolerance(double base, double factor, int sized, double size)
{
    if (factor <= 1 && !sized) return base;
    return base * (factor > 1 ? factor : 1) + 6.0 / 16777216.0 * size;
}

static void check_row(test_case *c, const oracle_result *want, const float *attn, const float *lse,
                      int S, size_t row, double base, double lse_base, double factor, int sized)
{
    const double tol = tolerance(base, factor, sized, want->size[row]);
    const int none = oracle_is_ninf(want->lse[row]);
    size_t i;
    if (attn) {
        double sum = want->rest[row];
        for (i = 0; i < (size_t)S; i++) {
            const size_t at = row * (size_t)S + i;
            /* exp underflows in float before it does in double */
            compare(c, "attn", at, attn[at], want->attn[at], tol);
            if (want->attn[at] <= 0) compare_zero(c, "attn of an excluded key", at, attn[at]);
            sum += (double)attn[at];
        }
        if (none ? sum > 0 : !(fabs(sum - 1) <= (want->rest[row] > 0 ? tol : base)))
            wrong(c, "sum of attn", (double)row, sum, !none);
    }
    if (lse && none) {
        if (bits_f(lse[row]) != 0xff800000u)
            wrong(c, "lse is not -inf", (double)row, (double)lse[row], 0);
    } else if (lse) {
        compare(
            c, "lse", row, lse[row], want->lse[row],
            tolerance(lse_base * (1 + fabs(want->lse[row])), factor, sized, want->size[row] / 2));
    }
}

static void check_weights(test_case *c, const oracle_result *want, const float *attn,
                          const float *attn_mean, const float *lse, const frame *f, double base,
                          double lse_base, double factor, int sized)
{
    const int S = f->S;
    int b, h, t, j;
    for (b = 0; b < f->B; b++)
        for (t = 0; t < q_len(f, b); t++) {
            double mean_tol = 0;
            for (h = 0; h < f->H; h++) {
                const size_t row = q_row(f, b, h, t);
                const double tol = tolerance(base, factor, sized, want->size[row]);
                if (tol > mean_tol) mean_tol = tol;
                check_row(c, want, attn, lse, S, row, base, lse_base, factor, sized);
            }
            for (j = 0; attn_mean && j < S; j++) {
                const size_t at = (size_t)(q_token(f, b, t) * S + j);
                compare(c, "attn_mean", at, attn_mean[at], want->attn_mean[at], mean_tol);
                if (want->attn_mean[at] <= 0)
                    compare_zero(c, "attn_mean of an excluded key", at, attn_mean[at]);
            }
        }
}

/* ---- mha_sdpa ---------------------------------------------------------------------------- */

/* Strides of a tensor [B,H,T,d]; returns how many elements it spans. An output may not have
   two indices on one element. */
static size_t draw_view(rng *r, test_case *c, const char *name, mha_stride *s, int B, int H, int T,
                        int d, int is_output)
{
    static const char *const kinds[] = { "default", "BHTd", "BTHd", "gaps", "broadcast" };
    const int kind = rng_int(r, 0, is_output ? 3 : 4);
    const int extent[3] = { B, H, T };
    ptrdiff_t by[3] = { 0, 0, 0 }, step = d;
    int order[3], i;

    note_text(c, name, kinds[kind]);
    memset(s, 0, sizeof *s);
    if (kind == 0) return (size_t)B * (size_t)H * (size_t)T * (size_t)d;
    if (kind == 1) order[0] = 2, order[1] = 1, order[2] = 0;
    else if (kind == 2) order[0] = 1, order[1] = 2, order[2] = 0;
    else draw_order(r, order, 3);
    for (i = 0; i < 3; i++) {
        if (kind == 3) step += rng_int(r, 0, 5);
        by[order[i]] = step;
        step *= extent[order[i]] ? extent[order[i]] : 1;
    }
    if (kind == 4) {
        const int which = rng_int(r, 0, 9);
        if (which != 1) by[0] = 0;               /* one for all batch elements */
        if (which >= 1 && which <= 4) by[1] = 0; /* one for all heads */
        if (which == 0) by[2] = 0, by[0] = by[1] + d;
    }
    s->batch = by[0];
    s->head = by[1];
    s->seq = by[2];
    note_strides(c, "strides", by, 3);
    if (!B || !H || !T) return 0;
    return (size_t)((B - 1) * by[0] + (H - 1) * by[1] + (T - 1) * by[2] + d);
}

/* With cu the tensor is [H,total,d]; else [B,H,T,d]. */
static ptrdiff_t view_at(mha_stride s, const int *cu, int B, int H, int T, int d, int b, int h,
                         int t)
{
    const int plain = !s.batch && !s.head && !s.seq;
    if (cu && plain) return ((ptrdiff_t)h * cu[B] + cu[b] + t) * d;
    if (cu) return h * s.head + (cu[b] + t) * s.seq;
    if (plain) return (((ptrdiff_t)b * H + h) * T + t) * d;
    return b * s.batch + h * s.head + t * s.seq;
}

static void draw_sdpa(rng *r, test_case *c, mha_sdpa_args *a, frame *f, double *factor, int *sized,
                      float **o_base, size_t *o_n)
{
    int B = rng_chance(r, 4) ? 0 : rng_int(r, 1, 3), T = draw_length(r), S = draw_length(r);
    int G = rng_int(r, 1, 3), rep = rng_chance(r, 60) ? 1 : rng_int(r, 2, 4);
    int dk = draw_width(r), dv = rng_chance(r, 60) ? dk : draw_width(r), H, alias, packed;
    const int ragged = rng_chance(r, 25);
    const size_t cap = 2000000; /* multiplications, so that thousands of cases take seconds */
    size_t n[3], shift, i;
    float *base[3];

    packed = rng_chance(r, 15);
    if (packed || rng_chance(r, 30)) S = T;
    while ((size_t)B * (size_t)(G * rep) * (size_t)T * (size_t)S * (size_t)(dk + dv) > cap) {
        if (B > 1) B--;
        else if (rep > 2) rep--;
        else if (G > 1) G--;
        else if (rep > 1 && rng_chance(r, 50)) rep--;
        else if (dk > 31 || dv > 31) dk = (dk + 1) / 2, dv = (dv + 1) / 2;
        else if (packed || S == T) S = T = T / 2 + 1;
        else T = T / 2 + 1;
    }
    H = G * rep;

    memset(a, 0, sizeof *a);
    if (ragged) {
        const int which = packed ? 0 : rng_int(r, 0, 3);
        if (which != 3) a->cu_seq = draw_cu(r, c, "T_b", B, &T);
        if (which == 0) a->cu_source = a->cu_seq, S = T, note_text(c, "cu_source", "cu_seq");
        if (which == 1 || which == 3) a->cu_source = draw_cu(r, c, "S_b", B, &S);
    }
    a->batch = B;
    a->heads = H;
    a->kv_heads = G == H && rng_chance(r, 50) ? 0 : G;
    a->seq = !a->cu_seq ? T : rng_chance(r, 50) ? a->cu_seq[B] : 0;
    a->source_seq = !a->cu_source ? S : rng_chance(r, 50) ? a->cu_source[B] : 0;
    a->d_k = dk;
    a->d_v = dv == dk && rng_chance(r, 50) ? 0 : dv;
    a->scale = draw_scale(r, dk, factor);
    note(c, "B", B);
    note(c, "H", H);
    note(c, "G", G);
    note(c, "T", T);
    note(c, "S", S);
    note(c, "d_k", dk);
    note(c, "d_v", dv);
    note_float(c, "scale", a->scale);
    draw_mask(r, c, &a->mask, B, H, T, S, sized);
    memset(f, 0, sizeof *f);
    f->B = B;
    f->H = H;
    f->T = T;
    f->S = S;
    f->cu_q = a->cu_seq;
    f->cu_k = a->cu_source;
    f->mask = &a->mask;
    draw_gate(r, c, f, &a->gate, &a->gate_stride);
    a->softcap = draw_softcap(r, c);
    if (rng_chance(r, 25)) a->alibi = draw_slopes(r, c, H);
    draw_sink(r, c, H, dv, &a->sink, &a->sink_value);
    if (bits_f(a->softcap) || a->alibi || a->sink) *sized = 1;

    if (packed) { /* q, k, v side by side in [B,T,H*dk + G*dk + G*dv] */
        const ptrdiff_t width = H * dk + G * dk + G * dv;
        note_text(c, "qkv", "packed");
        a->q_stride.batch = a->k_stride.batch = a->v_stride.batch = T * width;
        a->q_stride.head = a->k_stride.head = dk;
        a->v_stride.head = dv;
        a->q_stride.seq = a->k_stride.seq = a->v_stride.seq = width;
        n[0] = (size_t)q_total(f) * (size_t)width;
        shift = (size_t)rng_int(r, 0, 3);
        base[0] = (float *)take(c, (n[0] + shift + 1) * sizeof(float)) + shift;
        rng_fill(r, base[0], n[0]);
        base[1] = base[0] + H * dk;
        base[2] = base[1] + G * dk;
    } else {
        const int qB = f->cu_q ? 1 : B, qT = f->cu_q ? q_total(f) : T;
        const int kB = f->cu_k ? 1 : B, kS = f->cu_k ? k_total(f) : S;
        n[0] = draw_view(r, c, "q", &a->q_stride, qB, H, qT, dk, 0);
        n[1] = draw_view(r, c, "k", &a->k_stride, kB, G, kS, dk, 0);
        n[2] = draw_view(r, c, "v", &a->v_stride, kB, G, kS, dv, 0);
        for (i = 0; i < 3; i++) {
            shift = (size_t)rng_int(r, 0, 3);
            base[i] = (float *)take(c, (n[i] + shift) * sizeof(float)) + shift;
            rng_fill(r, base[i], n[i]);
        }
    }
    a->q = base[0];
    a->k = base[1];
    a->v = base[2];

    if (rng_chance(r, 30))
        a->attn = output(c, (size_t)q_total(f) * (size_t)H * (size_t)S), note(c, "attn", 1);
    if (rng_chance(r, 25))
        a->attn_mean = output(c, (size_t)q_total(f) * (size_t)S), note(c, "attn_mean", 1);
    if (rng_chance(r, 40)) a->lse = output(c, (size_t)q_total(f) * (size_t)H), note(c, "lse", 1);
    f->asked = a->attn || a->attn_mean || a->lse;

    if (rng_chance(r, 40)) { /* all that no query sees becomes NaN and Inf: it must not show */
        unsigned char *seen[3];
        int b, h, t, j, d;
        note_text(c, "poison", "yes");
        poison_bias(r, c, f);
        for (i = 0; i < 3; i++) {
            seen[i] =
                packed && i ? seen[0] + (base[i] - base[0]) : (unsigned char *)take(c, n[i] + 1);
            if (!packed || !i) memset(seen[i], 0, n[i]);
        }
        for (b = 0; b < B; b++)
            for (h = 0; h < H; h++)
                for (t = 0; t < q_len(f, b); t++)
                    for (j = 0; j < k_len(f, b); j++)
                        if (looks(f, b, h, t, j)) {
                            const int g = h / rep;
                            const ptrdiff_t qi =
                                view_at(a->q_stride, f->cu_q, B, H, T, dk, b, h, t);
                            const ptrdiff_t ki =
                                view_at(a->k_stride, f->cu_k, B, G, S, dk, b, g, j);
                            const ptrdiff_t vi =
                                view_at(a->v_stride, f->cu_k, B, G, S, dv, b, g, j);
                            if (!seen[0][qi])
                                for (d = 0; d < dk; d++) seen[0][qi + d] = 1;
                            if (!seen[1][ki])
                                for (d = 0; d < dk; d++) seen[1][ki + d] = 1;
                            if (!seen[2][vi])
                                for (d = 0; d < dv; d++) seen[2][vi + d] = 1;
                        }
        for (i = 0; i < (packed ? 1u : 3u); i++) {
            size_t e;
            for (e = 0; e < n[i]; e++)
                if (!seen[i][e]) base[i][e] = poison(r);
        }
    }
    if (c->bias) watch(c, c->bias, c->bias_n * sizeof(float));

    alias = dv == dk && rng_chance(r, 25) && !a->attn && !a->attn_mean; /* they are made from q */
    if (alias && !packed) { /* q must be one element per index */
        const mha_stride s = a->q_stride;
        if ((s.batch || s.head || s.seq) && !(s.batch && s.head && s.seq)) alias = 0;
    }
    if (alias) {
        note_text(c, "o", "q");
        a->o_stride = a->q_stride;
        *o_base = a->o = base[0];
        *o_n = n[0];
    } else {
        *o_n =
            draw_view(r, c, "o", &a->o_stride, f->cu_q ? 1 : B, H, f->cu_q ? q_total(f) : T, dv, 1);
        *o_base = a->o = output(c, *o_n);
        watch(c, base[0], n[0] * sizeof(float));
    }
    if (!packed) {
        watch(c, base[1], n[1] * sizeof(float));
        watch(c, base[2], n[2] * sizeof(float));
    }
    a->parallel = draw_parallel(r, c);
}

static void check_sdpa(test_case *c, const mha_sdpa_args *a, const frame *f,
                       const oracle_result *want, double factor, int sized, float *o_base,
                       const float *before, size_t o_n)
{
    const int B = f->B, H = f->H, dv = a->d_v ? a->d_v : a->d_k;
    const size_t rows = (size_t)q_total(f);
    unsigned char *written = (unsigned char *)take(c, o_n);
    size_t e;
    int b, h, t, d;

    memset(written, 0, o_n);
    for (b = 0; b < B; b++)
        for (h = 0; h < H; h++)
            for (t = 0; t < q_len(f, b); t++) {
                const ptrdiff_t at = view_at(a->o_stride, f->cu_q, B, H, f->T, dv, b, h, t);
                const size_t row = q_row(f, b, h, t);
                const double gate = fabs(want->gate[row]);
                const double tol =
                    gate * want->v_max * tolerance(2e-6, factor, sized, want->size[row]);
                for (d = 0; d < dv; d++) {
                    e = row * (size_t)dv + (size_t)d;
                    written[at + d] = 1;
                    compare(c, "o", e, a->o[at + d], want->o[e], tol);
                    if (oracle_is_ninf(want->lse[row]))
                        compare_zero(c, "o of a masked row", e, a->o[at + d]);
                    if (!(gate > 0)) compare_zero(c, "o of a gate of 0", e, a->o[at + d]);
                }
            }
    for (e = 0; e < o_n; e++)
        if (!written[e] && bits_f(o_base[e]) != bits_f(before[e]))
            wrong(c, "wrote between the rows of o", (double)e, (double)o_base[e],
                  (double)before[e]);
    if (o_base != a->q) check_margins(c, "wrote around o", o_base, o_n);
    check_margins(c, "wrote around attn", a->attn, rows * (size_t)(H * f->S));
    check_margins(c, "wrote around attn_mean", a->attn_mean, rows * (size_t)f->S);
    check_margins(c, "wrote around lse", a->lse, rows * (size_t)H);
    check_weights(c, want, a->attn, a->attn_mean, a->lse, f, 2e-6, 1e-6, factor, sized);
}

static void run_sdpa(rng *r, test_case *c, mha_isa isa)
{
    mha_sdpa_args a;
    frame f;
    oracle_result want;
    double factor;
    float *o_base, *before;
    size_t o_n, bytes = 0;
    int sized;
    mha_status status;
    long live;

    draw_sdpa(r, c, &a, &f, &factor, &sized, &o_base, &o_n);
    a.isa = isa;
    if (rng_chance(r, 50)) {
        status = mha_sdpa_workspace_size(&a, &bytes);
        if (status != MHA_OK) wrong(c, mha_strerror(status), 0, status, MHA_OK);
        a.workspace = workspace(r, c, bytes);
        a.workspace_size = bytes;
        note(c, "workspace", (long)bytes);
    }
    want = oracle_sdpa(&a);
    before = (float *)take(c, o_n * sizeof *before);
    memcpy(before, o_base, o_n * sizeof *before);

    live = test_live;
    test_allocs = 0;
    status = mha_sdpa(&a);
    if (status != MHA_OK) {
        char why[200];
        mha_sdpa_check(&a, why, sizeof why);
        wrong(c, why, 0, status, MHA_OK);
    } else {
        check_around(c, live);
        check_sdpa(c, &a, &f, &want, factor, sized, o_base, before, o_n);
    }
    oracle_free(&want);
}

/* ---- a layer ----------------------------------------------------------------------------- */

static float *draw_matrix(rng *r, test_case *c, int in, int out)
{
    const size_t n = (size_t)in * (size_t)out;
    float *w = (float *)take(c, n * sizeof *w);
    size_t i;
    for (i = 0; i < n; i++) w[i] = (float)((double)rng_normal(r) / sqrt((double)in));
    watch(c, w, n * sizeof *w);
    return w;
}

static void draw_rope(rng *r, test_case *c, mha_rope *rope, int dk, double *factor)
{
    static const float bases[] = { 0, 10000.0f, 500000.0f, 1000.0f };
    static const float factors[] = { 2.0f, 1.0f, 1.5f, 4.0f, 32.0f };
    int width = dk;
    if (dk < 2 || !rng_chance(r, 35)) return;
    rope->layout = rng_chance(r, 50) ? MHA_ROPE_HALF : MHA_ROPE_INTERLEAVED;
    if (dk % 2 || rng_chance(r, 40)) rope->width = width = 2 * rng_int(r, 1, dk / 2);
    rope->base = bases[rng_int(r, 0, 3)];
    rope->scaling = (mha_rope_scaling)rng_int(r, 0, 4);
    if (rope->scaling == MHA_ROPE_NTK && width == 2) rope->scaling = MHA_ROPE_LINEAR;
    if (rope->scaling != MHA_ROPE_PLAIN) rope->factor = factors[rng_int(r, 0, 4)];
    if (rope->scaling == MHA_ROPE_YARN || rope->scaling == MHA_ROPE_LLAMA3)
        rope->original = 1 << rng_int(r, 6, 13);
    if (rope->scaling == MHA_ROPE_YARN) {
        const double grown = rope->factor > 1 ? 1 + 0.1 * log((double)rope->factor) : 1;
        if (rng_chance(r, 30)) rope->beta_fast = 16.0f;
        if (rng_chance(r, 30)) rope->beta_slow = 2.0f;
        if (rng_chance(r, 30)) rope->attention = 1.25f;
        *factor *= rope->attention > 0 ? 1.25 * 1.25 : grown * grown;
    }
    if (rope->scaling == MHA_ROPE_LLAMA3) {
        if (rng_chance(r, 30)) rope->low_freq = 2.0f;
        if (rng_chance(r, 30)) rope->high_freq = 8.0f;
    }
    note(c, "rope", rope->layout);
    note(c, "width", rope->width);
    note_float(c, "base", rope->base);
    note(c, "scaling", rope->scaling);
    note_float(c, "factor", rope->factor);
    note(c, "original", rope->original);
    note_float(c, "beta_fast", rope->beta_fast);
    note_float(c, "beta_slow", rope->beta_slow);
    note_float(c, "attention", rope->attention);
    note_float(c, "low_freq", rope->low_freq);
    note_float(c, "high_freq", rope->high_freq);
}

static const int *draw_positions(rng *r, test_case *c, const char *name, int n)
{
    const int most = rng_chance(r, 80) ? 5000 : 200000;
    int *at, i;
    if (!rng_chance(r, 30)) return NULL;
    at = (int *)take(c, (size_t)n * sizeof *at);
    for (i = 0; i < n; i++) at[i] = rng_int(r, -100, most);
    watch(c, at, (size_t)n * sizeof *at);
    note(c, name, most);
    return at;
}

/* What a layer can do to q, k and the scores. */
static void draw_options(rng *r, test_case *c, mha_config *cfg, mha_weights *w, int H, int G,
                         int dk, int dv, double *factor, int *sized)
{
    static const float eps[] = { 0, 0, 1e-5f, 1e-3f };
    draw_rope(r, c, &cfg->rope, dk, factor);
    cfg->softcap = draw_softcap(r, c);
    if (rng_chance(r, 25)) {
        cfg->alibi = 1;
        note(c, "alibi", 1);
        if (rng_chance(r, 50)) w->alibi = draw_slopes(r, c, H);
    }
    draw_sink(r, c, H, dv, &w->sink, &w->sink_value);
    if (rng_chance(r, 25)) {
        const size_t n = (size_t)dk;
        cfg->qk_norm = rng_chance(r, 50) ? MHA_NORM_RMS : MHA_NORM_LAYER;
        cfg->norm_eps = eps[rng_int(r, 0, 3)];
        note(c, "qk_norm", cfg->qk_norm);
        note_float(c, "norm_eps", cfg->norm_eps);
        if (rng_chance(r, 50)) w->q_norm = draw_around(r, c, n, 1, 0.3f), note(c, "q_norm", 1);
        if (rng_chance(r, 50)) w->k_norm = draw_around(r, c, n, 1, 0.3f), note(c, "k_norm", 1);
        if (cfg->qk_norm == MHA_NORM_LAYER) {
            if (rng_chance(r, 50))
                w->q_norm_bias = draw_around(r, c, n, 0, 0.5f), note(c, "q_norm_bias", 1);
            if (rng_chance(r, 50))
                w->k_norm_bias = draw_around(r, c, n, 0, 0.5f), note(c, "k_norm_bias", 1);
        }
    }
    if (rng_chance(r, 15)) cfg->zero_attn = 1, note(c, "zero_attn", 1);
    if (rng_chance(r, 15)) {
        w->bias_k = draw_around(r, c, (size_t)(G * dk), 0, 1);
        w->bias_v = draw_around(r, c, (size_t)(G * dv), 0, 1);
        note(c, "bias_kv", 1);
    }
    if (cfg->rope.layout || bits_f(cfg->softcap) || cfg->alibi || w->sink || cfg->qk_norm)
        *sized = 1;
}

/* 1 if row `token` of x matters: as a query, or, where keys come from x too, as a key. */
static int x_matters(const frame *f, int self, int b, int i)
{
    int h, t, j;
    for (h = 0; h < f->H; h++) {
        if (f->extra && works(f, b, h, i)) return 1;
        for (j = 0; j < k_len(f, b); j++)
            if (looks(f, b, h, i, j)) return 1;
        for (t = 0; self && t < q_len(f, b); t++)
            if (looks(f, b, h, t, i)) return 1;
    }
    return 0;
}

static int key_matters(const frame *f, int b, int j)
{
    int h, t;
    for (h = 0; h < f->H; h++)
        for (t = 0; t < q_len(f, b); t++)
            if (looks(f, b, h, t, j)) return 1;
    return 0;
}

static void poison_row(rng *r, float *x, int row, int width)
{
    int i;
    for (i = 0; x && i < width; i++) x[(size_t)row * (size_t)width + (size_t)i] = poison(r);
}

static void draw_layer(rng *r, test_case *c, mha_config *cfg, mha_weights *w, mha_args *a, frame *f,
                       double *factor, int *sized)
{
    int B = rng_chance(r, 4) ? 0 : rng_int(r, 1, 3), T = draw_length(r), S = draw_length(r);
    int G = rng_int(r, 1, 3), rep = rng_chance(r, 60) ? 1 : rng_int(r, 2, 3), H;
    int dk = draw_width(r), dv = rng_chance(r, 60) ? dk : draw_width(r), D, Ds, Dv, usual;
    const int cross = rng_chance(r, 45), other_v = cross && rng_chance(r, 30);
    const int ragged = rng_chance(r, 25), which = rng_int(r, 0, cross ? 2 : 0);
    const int wide = rng_chance(r, 6); /* more terms than fit a cache block of weights */
    const size_t cap = 2000000;
    size_t rows;
    float *x, *source = NULL, *source_v = NULL;

    if (wide) {
        T = rng_int(r, 1, 7);
        S = rng_int(r, 1, 7);
        dk = rng_int(r, 1, 17);
        dv = rng_chance(r, 50) ? 128 : rng_int(r, 1, 17);
        if (dv == 128) G = 3, rep = 3;
    }
    if (!cross) S = T;
    usual = !wide && rng_chance(r, 40); /* d_k = d_v = D / H, all by default */
    if (usual) dv = dk;
    for (;;) {
        size_t size;
        H = G * rep;
        D = usual ? H * dk : wide && dv != 128 ? rng_int(r, 700, 1600) : rng_int(r, 1, 96);
        Ds = cross && rng_chance(r, 40) ? rng_int(r, 1, wide && rep == 1 ? 1600 : 70) : D;
        Dv = other_v && rng_chance(r, 60) ? rng_int(r, 1, 70) : Ds;
        size = (size_t)(H * T) * (size_t)S * (size_t)(dk + dv) +
               (size_t)T * (size_t)(D * H) * (size_t)(dk + dv) +
               (size_t)S * (size_t)G * (size_t)(Ds * dk + Dv * dv);
        if ((size_t)B * size <= cap) break;
        if (B > 1) B--;
        else if (rep > 1) rep--;
        else if (G > 1 && rng_chance(r, 50)) G--;
        else if (dk > 31 || dv > 31) dk = (dk + 1) / 2, dv = (dv + 1) / 2;
        else if (S == T) S = T = T / 2 + 1;
        else if (T > 20) T = T / 2 + 1;
        else S = S / 2 + 1;
        if (!cross) S = T;
    }

    memset(cfg, 0, sizeof *cfg);
    memset(w, 0, sizeof *w);
    memset(a, 0, sizeof *a);
    cfg->d_model = D;
    cfg->n_heads = H;
    if (G != H || rng_chance(r, 30)) cfg->n_kv_heads = G;
    if (!usual) cfg->d_k = dk;
    if (dv != dk || rng_chance(r, 30)) cfg->d_v = dv;
    if (Ds != D || rng_chance(r, 20)) cfg->d_source = Ds;
    if (Dv != Ds || rng_chance(r, 20)) cfg->d_source_v = Dv;
    cfg->scale = draw_scale(r, dk, factor);
    note(c, "B", B);
    note(c, "T", T);
    note(c, "S", S);
    note(c, "D", D);
    note(c, "H", H);
    note(c, "G", G);
    note(c, "d_k", dk);
    note(c, "d_v", dv);
    note(c, "usual", usual);
    note(c, "cross", cross);
    note(c, "d_source", Ds);
    note(c, "d_source_v", Dv);
    note_float(c, "scale", cfg->scale);

    w->layout = rng_chance(r, 50) ? MHA_OUT_IN : MHA_IN_OUT;
    note(c, "layout", w->layout);
    if (Ds == D && Dv == D && rng_chance(r, 60)) {
        w->qkv = draw_matrix(r, c, D, H * dk + G * dk + G * dv);
        note(c, "fused", 1);
    } else {
        w->q = draw_matrix(r, c, D, H * dk);
        w->k = draw_matrix(r, c, Ds, G * dk);
        w->v = draw_matrix(r, c, Dv, G * dv);
    }
    w->out = draw_matrix(r, c, H * dv, D);
    if (rng_chance(r, 35)) {
        w->b_qkv = draw_vector(r, c, (size_t)(H * dk + G * dk + G * dv));
        note(c, "b_qkv", 1);
    } else {
        if (rng_chance(r, 40)) w->b_q = draw_vector(r, c, (size_t)(H * dk)), note(c, "b_q", 1);
        if (rng_chance(r, 40)) w->b_k = draw_vector(r, c, (size_t)(G * dk)), note(c, "b_k", 1);
        if (rng_chance(r, 40)) w->b_v = draw_vector(r, c, (size_t)(G * dv)), note(c, "b_v", 1);
    }
    if (rng_chance(r, 50)) w->b_out = draw_vector(r, c, (size_t)D), note(c, "b_out", 1);

    a->batch = B;
    a->seq = T;
    if (ragged && which != 1) {
        a->cu_seq = draw_cu(r, c, "T_b", B, &T);
        a->seq = rng_chance(r, 50) ? a->cu_seq[B] : 0;
        if (!cross) S = T;
    }
    a->source_seq = cross ? S : rng_chance(r, 50) ? a->seq : 0;
    if (ragged && cross && which != 0) {
        a->cu_source = draw_cu(r, c, "S_b", B, &S);
        a->source_seq = rng_chance(r, 50) ? a->cu_source[B] : 0;
    }
    draw_mask(r, c, &a->mask, B, H, T, S, sized);
    draw_options(r, c, cfg, w, H, G, dk, dv, factor, sized);
    memset(f, 0, sizeof *f);
    f->B = B;
    f->H = H;
    f->T = T;
    f->S = S;
    f->cu_q = a->cu_seq;
    f->cu_k = cross ? a->cu_source : a->cu_seq;
    f->mask = &a->mask;
    f->extra = w->bias_k || cfg->zero_attn;
    draw_gate(r, c, f, &a->gate, &a->gate_stride);
    if (cfg->rope.layout) a->positions = draw_positions(r, c, "positions", q_total(f));
    if (cfg->rope.layout && cross)
        a->source_positions = draw_positions(r, c, "source_positions", k_total(f));
    rows = (size_t)q_total(f);
    a->x = x = draw_vector(r, c, rows * (size_t)D);
    if (cross) a->source = source = draw_vector(r, c, (size_t)(k_total(f) * Ds));
    if (other_v) a->source_v = source_v = draw_vector(r, c, (size_t)(k_total(f) * Dv));
    note(c, "source_v", other_v);
    if (rng_chance(r, 25)) a->attn = output(c, rows * (size_t)(H * S)), note(c, "attn", 1);
    if (rng_chance(r, 25)) a->attn_mean = output(c, rows * (size_t)S), note(c, "attn_mean", 1);
    if (rng_chance(r, 30)) a->lse = output(c, rows * (size_t)H), note(c, "lse", 1);
    f->asked = a->attn || a->attn_mean || a->lse;

    if (rng_chance(r, 40)) { /* all that no query sees becomes NaN and Inf: it must not show */
        int b, i;
        note_text(c, "poison", "yes");
        poison_bias(r, c, f);
        for (b = 0; b < B; b++) {
            for (i = 0; cross && i < k_len(f, b); i++) {
                if (key_matters(f, b, i)) continue;
                poison_row(r, source, k_token(f, b, i), Ds);
                poison_row(r, source_v, k_token(f, b, i), Dv);
            }
            for (i = 0; i < q_len(f, b); i++)
                if (!x_matters(f, !cross, b, i)) poison_row(r, x, q_token(f, b, i), D);
        }
    }
    if (c->bias) watch(c, c->bias, c->bias_n * sizeof(float));
    if (source) watch(c, source, (size_t)(k_total(f) * Ds) * sizeof(float));
    if (source_v) watch(c, source_v, (size_t)(k_total(f) * Dv) * sizeof(float));
    if (rng_chance(r, 15)) {
        note_text(c, "y", "x");
        a->y = x;
    } else {
        watch(c, x, rows * (size_t)D * sizeof(float));
        a->y = output(c, rows * (size_t)D);
    }
    a->parallel = draw_parallel(r, c);
}

/* mha.h promises 1e-5 max|y|; where y happens to cancel, its terms count instead. The part that
   large scores and biases add (see tolerance) is relative to max|v| and the gate, and goes through
   W_O, one independent error per term. */
static void check_layer(test_case *c, const mha_args *a, const frame *f, const oracle_result *want,
                        int D, double factor, int sized)
{
    int b, h, t, d;
    for (b = 0; b < f->B; b++)
        for (t = 0; t < q_len(f, b); t++) {
            double size = 0, tol = 1e-5 * want->y_size;
            for (h = 0; h < f->H; h++) {
                const size_t row = q_row(f, b, h, t);
                const double more = tolerance(1e-5, factor, sized, want->size[row]) - 1e-5;
                if (more * fabs(want->gate[row]) > size) size = more * fabs(want->gate[row]);
            }
            tol += size * want->v_max * want->w_size;
            for (d = 0; d < D; d++) {
                const size_t at = (size_t)(q_token(f, b, t) * D + d);
                compare(c, "y", at, a->y[at], want->y[at], tol);
            }
        }
}

static void run_layer(rng *r, test_case *c, mha_isa isa)
{
    mha_config cfg;
    mha_weights w;
    mha_args a;
    frame f;
    mha_layer *layer = NULL;
    oracle_result want;
    double factor;
    size_t bytes = 0, rows;
    int sized, in_place;
    mha_status status;
    long live = test_live, inside;

    draw_layer(r, c, &cfg, &w, &a, &f, &factor, &sized);
    cfg.isa = isa;
    in_place = a.y == a.x;
    rows = (size_t)q_total(&f);
    want = oracle_forward(&cfg, &w, &a);

    if (rng_chance(r, 30)) {
        unsigned char *memory;
        const size_t shift = (size_t)rng_int(r, 0, 63);
        note(c, "layer_init", (long)shift);
        status = mha_layer_size(&cfg, &bytes);
        memory = (unsigned char *)take(c, bytes + shift) + shift;
        if (status == MHA_OK) status = mha_layer_init(&layer, memory, bytes, &cfg, &w);
    } else {
        status = mha_layer_create(&layer, &cfg, &w);
    }
    if (status != MHA_OK) {
        char why[200];
        mha_layer_check(&cfg, &w, why, sizeof why);
        wrong(c, why, 0, status, MHA_OK);
    }
    if (status == MHA_OK && rng_chance(r, 50)) {
        status = mha_workspace_size(layer, &a, &bytes);
        if (status != MHA_OK) wrong(c, mha_strerror(status), 0, status, MHA_OK);
        a.workspace = workspace(r, c, bytes);
        a.workspace_size = bytes;
        note(c, "workspace", (long)bytes);
    }
    inside = test_live;
    test_allocs = 0;
    if (status == MHA_OK) {
        status = mha_forward(layer, &a);
        if (status != MHA_OK) {
            char why[200];
            mha_forward_check(layer, &a, why, sizeof why);
            wrong(c, why, 0, status, MHA_OK);
        }
    }
    if (status == MHA_OK) {
        check_around(c, inside);
        check_layer(c, &a, &f, &want, cfg.d_model, factor, sized);
        if (!in_place) check_margins(c, "wrote around y", a.y, rows * (size_t)cfg.d_model);
        check_margins(c, "wrote around attn", a.attn, rows * (size_t)(f.H * f.S));
        check_margins(c, "wrote around attn_mean", a.attn_mean, rows * (size_t)f.S);
        check_margins(c, "wrote around lse", a.lse, rows * (size_t)f.H);
        check_weights(c, &want, a.attn, a.attn_mean, a.lse, &f, 1e-5, 1e-5, factor, sized);
    }
    mha_layer_free(layer);
    if (test_live != live)
        wrong(c, "mha_layer_free left memory", 0, (double)test_live, (double)live);
    oracle_free(&want);
}

/* ---- all of them ------------------------------------------------------------------------- */

/* first = 0: mha_sdpa, 1: layers. */
static enum greatest_test_res run_cases(long first, mha_isa isa)
{
    const char *only = getenv("MHA_TEST_CASE");
    double used = 0;
    rng r = rng_make(test_seed);
    const uint64_t base = (uint64_t)rng_u32(&r) << 32 | rng_u32(&r);
    long n, last = test_cases, worst = -1;

    n = first;
    if (only && *only) {
        n = strtol(only, NULL, 0);
        if (n % 2 != first) SKIPm("the case asked for is of the other kind");
        last = n + 1;
    }
    for (; n < last; n += 2) {
        test_case c;
        memset(&c, 0, sizeof c);
        r = rng_make(base + (uint64_t)n);
        if (first == 0) run_sdpa(&r, &c, isa);
        else run_layer(&r, &c, isa);
        if (c.used > used) used = c.used, worst = n;
        case_free(&c);
        if (c.error[0]) {
            printf("\n  %s\n  case %ld on %s:%s\n  again: MHA_TEST_SEED=%llu MHA_TEST_CASE=%ld\n",
                   c.error, n, mha_isa_name(isa), c.text, (unsigned long long)test_seed, n);
            FAILm("a randomised case differs from the oracle");
        }
    }
    if (GREATEST_IS_VERBOSE())
        printf("\n  at most %.0f%% of a tolerance was used, in case %ld\n", 100 * used, worst);
    PASS();
}

TEST random_sdpa(mha_isa isa)
{
    CHECK_CALL(run_cases(0, isa));
    PASS();
}

TEST random_layer(mha_isa isa)
{
    CHECK_CALL(run_cases(1, isa));
    PASS();
}

SUITE(random_suite)
{
    mha_isa isa[8];
    int i, n = test_isas(isa);
    for (i = 0; i < n; i++) {
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(random_sdpa, isa[i]);
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(random_layer, isa[i]);
    }
}
