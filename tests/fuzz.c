/* fuzz.c - bytes become a call of mha.h, whose results are compared with the oracle.

   One input is one case: attention on q, k, v; a layer; a history of caches; arguments that must
   be refused, by every function that takes them; or the small functions. Every byte is a choice,
   bytes that are missing are 0, and numbers are drawn from a seed of two bytes, so that small
   changes of an input are small changes of a case. Buffers are on the heap and exactly as long as
   mha.h may use, for AddressSanitizer.

   Built with -fsanitize=fuzzer it is libFuzzer's. With -DFUZZ_MAIN it is a program that replays
   files, folders of files, and lists (*.txt, one input a line, in hexadecimal); or an AFL++ target.
   See fuzz.sh. */
#define _POSIX_C_SOURCE 200809L
static int fuzz_asks;
#define MHA_IMPLEMENTATION
#define MHA__SHARED_LEAST 1 /* threads share what is left over, however little it is */
#define MHA__CACHED 0       /* the next head is asked for, however small it is */
#define MHA__NEAR 0         /* few rows take the terms of panels in turn, however few there are */
#define MHA__ASKS fuzz_asks /* as any CPU asks for memory, by turns */
#define MHA__GROUP_ROWS 32  /* a batch is done one sequence at a time, or two short ones */
#include <limits.h>

#include "frame.h"

#ifdef FUZZ_MAIN
#include <dirent.h>
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- choices from bytes ------------------------------------------------------------------ */

static const uint8_t *input;
static size_t input_left;
static rng numbers;

static unsigned byte(void)
{
    if (!input_left) return 0;
    input_left--;
    return *input++;
}

/* lo .. hi; lo if there are no bytes left. */
static int pick(int lo, int hi)
{
    const unsigned n = (unsigned)(hi - lo + 1);
    unsigned v = byte();
    if (n > 256) v = v << 8 | byte();
    return lo + (int)(v % n);
}

/* In so many percent of bytes; no if there are none left. */
static int chance(int percent)
{
    return (int)byte() * 100 >= 256 * (100 - percent);
}

/* Mostly tiny; now and then over the edge of a tile. */
static int pick_length(int most)
{
    static const int edge[] = { 12, 13, 15, 16, 17, 31, 32, 33, 48, 64 };
    static const int far[] = { 255, 256, 257, 272 };
    const int kind = pick(0, 31);
    int n = kind < 26 ? 1 + kind % 7 : kind < 28 ? 0 : edge[pick(0, 9)];
    if (kind == 31 && chance(30)) n = far[pick(0, 3)];
    return n > most ? 1 + n % most : n;
}

static int pick_width(void)
{
    static const int edge[] = { 15, 16, 17, 31, 32, 33 };
    const int kind = pick(0, 15);
    return kind < 15 ? 1 + kind % 7 : edge[pick(0, 5)];
}

/* ---- memory of a case -------------------------------------------------------------------- */

static void *blocks[4096];
static int n_blocks;

static void *take(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p || n_blocks == (int)(sizeof blocks / sizeof blocks[0])) {
        fprintf(stderr, "fuzz: out of memory\n");
        abort();
    }
    memset(p, 0xff, bytes ? bytes : 1); /* as floats: NaN */
    blocks[n_blocks++] = p;
    return p;
}

/* Gives back all that was taken since there were n blocks. */
static void give_back(int n)
{
    while (n_blocks > n) free(blocks[--n_blocks]);
}

/* n floats that end where their block ends, at any alignment a float may have. */
static float *take_floats(size_t n)
{
    const size_t shift = (size_t)pick(0, 3);
    return (float *)take((n + shift) * sizeof(float)) + shift;
}

static int *take_ints(size_t n)
{
    return (int *)take(n * sizeof(int));
}

static float *normal(size_t n, float size)
{
    float *p = take_floats(n);
    for (size_t i = 0; i < n; i++) p[i] = size * rng_normal(&numbers);
    return p;
}

static float *copied(const float *from, size_t n)
{
    float *p = (float *)take(n * sizeof(float));
    if (n) memcpy(p, from, n * sizeof(float));
    return p;
}

/* ---- what can go wrong ------------------------------------------------------------------- */

static char story[2048]; /* what the case is, for the message */
static size_t story_end;

static void tell(const char *name, double value)
{
    if (story_end < sizeof story - 48)
        story_end += (size_t)snprintf(story + story_end, sizeof story - story_end, " %.20s=%.9g",
                                      name, value);
}

static void wrong(const char *what, double where, double got, double want)
{
    fprintf(stderr, "fuzz: %s at %.0f: got %.9g, want %.9g\n case:%s\n", what, where, got, want,
            story);
    abort();
}

static void require(int ok, const char *what)
{
    if (!ok) wrong(what, 0, 0, 1);
}

static void require_status(const char *what, mha_status got, mha_status want)
{
    if (got != want) wrong(what, 0, (double)got, (double)want);
}

static void require_close(const char *what, size_t at, float got, double want, double tol)
{
    if (!is_finite(got) || !(fabs((double)got - want) <= tol))
        wrong(what, (double)at, (double)got, want);
}

static void require_zero(const char *what, size_t at, float got)
{
    if (bits_f(got) << 1) wrong(what, (double)at, (double)got, 0);
}

/* Bit for bit; a NaN is a NaN. */
static void require_same(const char *what, const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bits_f(got[i]) != bits_f(want[i]) && !(is_nan(got[i]) && is_nan(want[i])))
            wrong(what, (double)i, (double)got[i], (double)want[i]);
}

static void require_untouched(const char *what, const void *p, size_t bytes)
{
    const unsigned char *c = (const unsigned char *)p;
    for (size_t i = 0; p && i < bytes; i++)
        if (c[i] != 0xff) wrong(what, (double)i, c[i], 0xff);
}

/* ---- threads ----------------------------------------------------------------------------- */

typedef struct lanes {
    rng r;
    int threads;
} lanes;

static void shuffled(void *ctx, int n, mha_task task, void *arg)
{
    lanes *l = (lanes *)ctx;
    int order[8];
    require(n >= 0 && n <= l->threads && n <= 8, "parallel_for with more tasks than threads");
    for (int i = 0; i < n; i++) order[i] = i;
    for (int i = n - 1; i > 0; i--) {
        const int j = rng_int(&l->r, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (int i = 0; i < n; i++) task(arg, order[i]);
}

/* Some tasks in any order on this thread; rarely the real pool, which is slow to wake up. */
static mha_parallel pick_parallel(lanes *l)
{
    static mha_pool *pool;
    mha_parallel p;
    memset(&p, 0, sizeof p);
    l->r = rng_make(byte());
    l->threads = pick(1, 4);
    tell("threads", l->threads);
    if (chance(1) && chance(20)) {
        if (!pool) {
            const long live = test_live;
            require_status("mha_pool_create", mha_pool_create(&pool, 3), MHA_OK);
            test_live = live; /* it stays */
        }
        return mha_pool_parallel(pool);
    }
    p.parallel_for = shuffled;
    p.ctx = l;
    p.threads = l->threads;
    return p;
}

/* One table of kernels, now and then all of them. */
static int pick_isas(mha_isa isa[8])
{
    const int n = test_isas(isa), which = pick(0, 4 * n);
    if (which == 0) return n;
    isa[0] = isa[which % n];
    return 1;
}

/* A workspace that ends where its block ends, at any alignment. */
static void *take_workspace(size_t bytes)
{
    const size_t shift = (size_t)pick(0, 63);
    return (char *)take(bytes + shift) + shift;
}

/* ---- strided tensors --------------------------------------------------------------------- */

/* n elements; index i0, i1, ... is element origin + sum of i * step. */
typedef struct view {
    size_t n;
    ptrdiff_t origin, step[4];
    int plain; /* the default: strides of 0 are given for it */
} view;

/* Axes in any order, with gaps, of either sign; shared: some axes broadcast. The last axis is of
   unit adjacent elements, not counted among the axes. */
static view pick_view(const int *extent, int axes, int unit, int shared)
{
    view v;
    ptrdiff_t step = unit, n = unit;
    int order[4], any = 0;
    memset(&v, 0, sizeof v);
    v.plain = !chance(40);
    for (int i = 0; i < axes; i++) order[i] = axes - 1 - i;
    for (int i = axes - 1; i > 0 && !v.plain; i--) {
        const int j = i - pick(0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (int i = 0; i < axes; i++) {
        const int axis = order[i];
        if (!v.plain && shared && chance(30) && (any || i + 1 < axes)) continue;
        if (!v.plain && chance(20)) step += pick(1, 3);
        v.step[axis] = step;
        step *= extent[axis] ? extent[axis] : 1;
        if (!v.plain && chance(20)) v.step[axis] = -v.step[axis];
        any = 1;
    }
    for (int i = 0; i < axes; i++) {
        const ptrdiff_t reach = (extent[i] - 1) * v.step[i];
        if (extent[i] == 0) n = 0;
        if (reach < 0) v.origin -= reach;
        if (n) n += reach < 0 ? -reach : reach;
    }
    if (n == 0) v.origin = 0;
    v.n = (size_t)n;
    return v;
}

static mha_stride stride_of(const view *v)
{
    mha_stride s;
    memset(&s, 0, sizeof s);
    if (v->plain) return s;
    s.batch = v->step[0];
    s.head = v->step[1];
    s.seq = v->step[2];
    return s;
}

/* Row t of sequence b: element [b,h,t,0], or [0,h,cu[b]+t,0]. */
static ptrdiff_t row_at(const view *v, const int *cu, int b, int h, int t)
{
    return v->origin + (cu ? 0 : b * v->step[0]) + h * v->step[1] +
           (cu ? cu[b] + t : t) * v->step[2];
}

/* ---- which queries and keys there are, and which of them meet: frame.h --------------------- */

/* The additive mask that was picked last, all of it; null: there is none. */
static float *bias;
static view bias_view;

/* Lengths of B sequences, none above *longest, which becomes the longest. */
static int *pick_cu(int B, int *longest)
{
    int *cu = take_ints((size_t)B + 1), most = 0;
    cu[0] = 0;
    for (int b = 0; b < B; b++) {
        const int n = chance(12) ? 0 : pick(*longest / 3, *longest);
        cu[b + 1] = cu[b] + n;
        if (n > most) most = n;
    }
    *longest = most;
    return cu;
}

static int pick_reach(int longest)
{
    const int kind = pick(0, 9);
    return kind == 0 ? -1 : kind == 1 ? INT_MAX : kind < 6 ? pick(0, 5) : pick(0, longest + 1);
}

/* cached: without what a cache refuses. */
static void pick_mask(frame *f, mha_mask *m, int cached, int *sized)
{
    static const int density[] = { 90, 100, 50, 5 };
    static const float sizes[] = { 1, 10, 1e9f, 1e30f, 3.4e38f };
    const int B = f->B, T = f->T, S = f->S, extent[4] = { B, f->H, T, S };
    memset(m, 0, sizeof *m);
    f->mask = m;
    bias = NULL;
    if (chance(40)) m->causal = !cached && chance(30) ? MHA_CAUSAL_UPPER_LEFT : MHA_CAUSAL;
    if (!cached && chance(25)) {
        int *len = take_ints((size_t)B);
        for (int b = 0; b < B; b++) len[b] = S - pick(0, S);
        m->key_len = len;
    }
    if (chance(15)) {
        int *start = take_ints((size_t)B);
        for (int b = 0; b < B; b++) start[b] = pick(0, S);
        m->key_start = start;
    }
    if (chance(15)) {
        unsigned char *padding = (unsigned char *)take((size_t)B * (size_t)S);
        const int percent = density[pick(0, 3)];
        for (int i = 0; i < B * S; i++)
            padding[i] = (unsigned char)(rng_chance(&numbers, percent) ? 0 : 1 + i % 255);
        m->key_padding = padding;
    }
    if (chance(25)) {
        m->windowed = 1;
        m->left = pick_reach(T > S ? T : S);
        m->right = pick_reach(T > S ? T : S);
    }
    if (chance(30)) {
        const int percent = density[pick(0, 3)];
        view v = pick_view(extent, 4, 1, 1);
        unsigned char *allow;
        if (v.plain) v.n = (size_t)T * (size_t)S, v.origin = 0;
        allow = (unsigned char *)take(v.n);
        for (size_t i = 0; i < v.n; i++)
            allow[i] = (unsigned char)(rng_chance(&numbers, percent) ? 1 + i % 255 : 0);
        m->allow = allow + v.origin;
        if (!v.plain) {
            m->allow_stride.batch = v.step[0];
            m->allow_stride.head = v.step[1];
            m->allow_stride.query = v.step[2];
            m->allow_stride.key = v.step[3];
        }
    }
    if (chance(30)) {
        const int percent = density[pick(0, 3)], even = chance(20);
        const float size = sizes[chance(70) ? 0 : pick(0, 4)];
        view v = pick_view(extent, 4, 1, 1);
        if (v.plain) {
            v.n = (size_t)T * (size_t)S, v.origin = 0;
            v.step[0] = v.step[1] = 0, v.step[2] = S, v.step[3] = 1;
        }
        bias = take_floats(v.n);
        bias_view = v;
        for (size_t i = 0; i < v.n; i++) {
            const float z = rng_normal(&numbers) / 6; /* -1 .. 1 */
            bias[i] = rng_chance(&numbers, percent) ? even ? -size : size * z : F_NINF;
        }
        m->bias = bias + v.origin;
        if (!v.plain) {
            m->bias_stride.batch = v.step[0];
            m->bias_stride.head = v.step[1];
            m->bias_stride.query = v.step[2];
            m->bias_stride.key = v.step[3];
        }
        f->far = size > 1e38f;
        *sized = 1;
        tell("bias", (double)size);
    }
    tell("causal", m->causal);
    tell("key_len", m->key_len != NULL);
    tell("key_start", m->key_start != NULL);
    tell("padding", m->key_padding != NULL);
    tell("windowed", m->windowed);
    tell("left", m->left);
    tell("right", m->right);
    tell("allow", m->allow != NULL);
}

/* Many are 0. */
static const float *pick_gate(frame *f, mha_gate_stride *s)
{
    const int ragged = f->cu_q != NULL;
    const int extent[3] = { ragged ? 1 : f->B, ragged ? q_total(f) : f->T, f->H };
    view v;
    float *p;
    memset(s, 0, sizeof *s);
    if (!chance(20)) return NULL;
    v = pick_view(extent, 3, 1, 1);
    if (v.plain) v.n = (size_t)f->H, v.origin = 0;
    else s->batch = v.step[0], s->seq = v.step[1], s->head = v.step[2];
    p = take_floats(v.n);
    for (size_t i = 0; i < v.n; i++)
        p[i] = rng_chance(&numbers, 30) ? rng_chance(&numbers, 80) ? 0.0f : -0.0f
                                        : rng_normal(&numbers);
    f->gate = p + v.origin;
    f->gate_stride = *s;
    tell("gate", 1);
    return f->gate;
}

/* NaN and Inf, never -inf in a bias, where it means something. */
static float poison(void)
{
    static const uint32_t bits[] = { 0x7fc00000u, 0x7f800000u, 0xffc00001u, 0xff800000u };
    return f_bits(bits[rng_int(&numbers, 0, 3)]);
}

/* What no query looks at. */
static void poison_bias(const frame *f)
{
    unsigned char *seen;
    if (!bias) return;
    seen = (unsigned char *)take(bias_view.n);
    memset(seen, 0, bias_view.n);
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < f->H; h++)
            for (int t = 0; t < q_len(f, b); t++)
                for (int j = 0; j < k_len(f, b); j++)
                    if (looks(f, b, h, t, j)) {
                        const view *v = &bias_view;
                        seen[v->origin + b * v->step[0] + h * v->step[1] + t * v->step[2] +
                             j * v->step[3]] = 1;
                    }
    for (size_t i = 0; i < bias_view.n; i++)
        if (!seen[i] && bits_f(bias[i]) != 0xff800000u)
            bias[i] = f_bits(i % 2 ? 0x7fc00000u : 0x7f800000u);
}

/* ---- one sequence of several ---------------------------------------------------------------- */

/* The mask of sequence b alone, from key lo on; S: of the whole call, S_b: its own. */
static mha_mask mask_alone(const mha_mask *m, int S, int b, int S_b, int lo)
{
    mha_mask one = *m;
    mha_mask_stride *s[2];
    s[0] = &one.allow_stride, s[1] = &one.bias_stride;
    for (int i = 0; i < 2; i++)
        if (!s[i]->batch && !s[i]->head && !s[i]->query && !s[i]->key)
            s[i]->query = S, s[i]->key = 1;
    if (one.allow) one.allow += b * s[0]->batch + lo * s[0]->key;
    if (one.bias) one.bias += b * s[1]->batch + lo * s[1]->key;
    if (one.key_padding) one.key_padding += b * S + lo;
    if (m->key_len) {
        int *len = take_ints(1);
        *len = m->key_len[b] > S_b ? S_b : m->key_len[b];
        one.key_len = len; /* with lo = 0 only */
    }
    if (m->key_start) {
        int *start = take_ints(1);
        *start = m->key_start[b] > S_b ? S_b : m->key_start[b];
        *start = *start > lo ? *start - lo : 0;
        one.key_start = start;
    }
    return one;
}

static const float *gate_alone(const frame *f, int b, mha_gate_stride *s)
{
    *s = f->gate_stride;
    if (!f->gate) return NULL;
    if (!s->batch && !s->seq && !s->head) s->head = 1;
    return f->gate + (f->cu_q ? f->cu_q[b] * s->seq : b * s->batch);
}

/* ---- comparing with the oracle -------------------------------------------------------------- */

/* A row that attends a poisoned value, or a poisoned score, or of which nothing is known. */
enum { FINE, SOME, LOST, OPEN };

/* As in test_random.c: mha.h promises 2e-6 max|v| for N(0,1) data at the default scale. With scores
   `factor` times as large the rounding errors of q.k are too. A score is rounded three more times
   before exp, in units of 2^-24 of itself, and an error e_j in the score of key j changes o by at
   most 2 max|v| attn_j |e_j|: in sum 6 * 2^-24 * max|v| * size, with the oracle's size. */
typedef struct tolerances {
    double base, lse, factor;
    int sized;
    double attn_more, lse_more; /* what a rounding cache adds */
} tolerances;

static double tolerance(const tolerances *t, double base, double size)
{
    if (t->factor <= 1 && !t->sized) return base;
    return base * (t->factor > 1 ? t->factor : 1) + 6.0 / 16777216.0 * size;
}

static void check_weights(const frame *f, const oracle_result *want, const unsigned char *state,
                          const tolerances *tol, const float *attn, const float *mean,
                          const float *lse)
{
    const int S = f->S;
    for (int b = 0; b < f->B; b++)
        for (int t = 0; t < q_len(f, b); t++) {
            const size_t token = (size_t)q_token(f, b, t);
            double mean_tol = 0;
            int lost = 0;
            for (int h = 0; h < f->H; h++) {
                const size_t row = q_row(f, b, h, t);
                const double most = tolerance(tol, tol->base, want->size[row]) + tol->attn_more;
                const int none = oracle_is_ninf(want->lse[row]), bad = state[row] >= LOST;
                double sum = want->rest[row];
                if (most > mean_tol) mean_tol = most;
                lost |= bad;
                for (int j = 0; attn && j < S; j++) {
                    const size_t at = row * (size_t)S + (size_t)j;
                    if (j >= k_len(f, b) || !sees(f, b, h, t, j))
                        require_zero("attn of an excluded key", at, attn[at]);
                    else if (!bad) require_close("attn", at, attn[at], want->attn[at], most);
                    sum += (double)attn[at];
                }
                /* a rounded score changes the part of what is no key, too */
                if (attn && !bad &&
                    (none ? sum > 0 : !(fabs(sum - 1) <= (want->rest[row] > 0 ? most : tol->base))))
                    wrong("sum of attn", (double)row, sum, !none);
                if (!lse || state[row] == OPEN) continue;
                if (none) require(bits_f(lse[row]) == 0xff800000u, "lse is not -inf");
                else if (bad) require(is_nan(lse[row]), "lse of a row that attends NaN");
                else if (fabs(want->lse[row]) < 3.4e38)
                    require_close("lse", row, lse[row], want->lse[row],
                                  tol->lse_more + tolerance(tol,
                                                            tol->lse * (1 + fabs(want->lse[row])),
                                                            want->size[row] / 2));
            }
            for (int j = 0; mean && !lost && j < S; j++) {
                const size_t at = token * (size_t)S + (size_t)j;
                require_close("attn_mean", at, mean[at], want->attn_mean[at], mean_tol);
            }
        }
}

/* ---- mha_sdpa ---------------------------------------------------------------------------- */

typedef struct sdpa_case {
    mha_sdpa_args a;
    frame f;
    view q, k, v, o;
    float *qd, *kd, *vd, *od; /* whole blocks */
    size_t n_attn, n_mean, n_lse;
    tolerances tol;
} sdpa_case;

/* Of N(0,1) data; the second of each pair for those who look for trouble. */
static float pick_size(const float *sizes, int n)
{
    return chance(85) ? 1.0f : sizes[pick(0, n - 1)];
}

static void draw_sdpa(sdpa_case *s)
{
    static const float q_sizes[] = { 1e4f, 1e16f, 30, 1e-20f, 1e-42f, 0 };
    static const float v_sizes[] = { 1e4f, 1e30f, 1e-30f, 1e-42f, 0 };
    static const float scales[] = { 0.25f, 0.5f, 2, 8, 30 };
    mha_sdpa_args *a = &s->a;
    frame *f = &s->f;
    int B = chance(4) ? 0 : pick(1, 3), T = pick_length(40), S = pick_length(272);
    int G = pick(1, 3), rep = pick(1, 3), dk = pick_width(), dv = chance(60) ? dk : pick_width(), H;
    const int most = chance(10) ? 40000 : 8000; /* multiplications: an input takes 0.1 ms or so */
    float q_size, k_size, v_size;
    memset(s, 0, sizeof *s);
    if (chance(25)) S = T;
    while (B * G * rep * T * S * (dk + dv) > most) {
        if (B > 1) B--;
        else if (rep > 1) rep--;
        else if (G > 1) G--;
        else if (dk > 9 || dv > 9) dk = (dk + 1) / 2, dv = (dv + 1) / 2;
        else T = (T + 1) / 2;
    }
    H = G * rep;
    if (chance(25)) {
        const int which = pick(0, 3);
        if (which != 3) a->cu_seq = pick_cu(B, &T);
        if (which == 0) a->cu_source = a->cu_seq, S = T;
        if (which == 1 || which == 3) a->cu_source = pick_cu(B, &S);
    }
    a->batch = B;
    a->heads = H;
    a->kv_heads = G == H && chance(50) ? 0 : G;
    a->seq = !a->cu_seq ? T : chance(50) ? a->cu_seq[B] : 0;
    a->source_seq = !a->cu_source ? S : chance(50) ? a->cu_source[B] : 0;
    a->d_k = dk;
    a->d_v = dv == dk && chance(50) ? 0 : dv;
    s->tol.base = 2e-6;
    s->tol.lse = 1e-6;
    s->tol.factor = 1;
    if (chance(25)) {
        const float scale = scales[pick(0, 4)];
        s->tol.factor = (double)scale;
        a->scale = (float)((double)scale / sqrt((double)dk)) * (chance(20) ? -1.0f : 1.0f);
    }
    tell("B", B), tell("H", H), tell("G", G), tell("T", T), tell("S", S), tell("d_k", dk);
    tell("d_v", dv), tell("scale", (double)a->scale), tell("cu_seq", a->cu_seq != NULL);
    tell("cu_source", a->cu_source != NULL);
    f->B = B, f->H = H, f->T = T, f->S = S;
    f->cu_q = a->cu_seq;
    f->cu_k = a->cu_source;
    pick_mask(f, &a->mask, 0, &s->tol.sized);
    a->gate = pick_gate(f, &a->gate_stride);
    if (chance(20)) a->softcap = 0.5f * (float)pick(1, 100), tell("softcap", (double)a->softcap);
    if (chance(20)) {
        float *slopes = normal((size_t)H, 0.3f);
        for (int h = 0; h < H; h++) slopes[h] = chance(20) ? 0.0f : fabsf(slopes[h]);
        a->alibi = slopes, tell("alibi", 1);
    }
    if (chance(20)) {
        float *sink = normal((size_t)H, 3);
        for (int h = 0; h < H; h++)
            if (chance(20)) sink[h] = F_NINF;
        a->sink = sink, tell("sink", 1);
        if (chance(50)) a->sink_value = normal((size_t)(H * dv), 1), tell("sink_value", 1);
    }
    if (bits_f(a->softcap) || a->alibi || a->sink) s->tol.sized = 1;
    {
        const int q[3] = { f->cu_q ? 1 : B, H, f->cu_q ? q_total(f) : T };
        const int k[3] = { f->cu_k ? 1 : B, G, f->cu_k ? k_total(f) : S };
        s->q = pick_view(q, 3, dk, 1);
        s->k = pick_view(k, 3, dk, 1);
        s->v = pick_view(k, 3, dv, 1);
        s->o = pick_view(q, 3, dv, 0);
    }
    if (!s->k.step[2] || !s->v.step[2]) { /* equal numbers have equal errors, which add up */
        s->tol.base += S / 16777216.0;
        s->tol.lse += S / 16777216.0;
        tell("shared", 1);
    }
    q_size = pick_size(q_sizes, 6), k_size = pick_size(q_sizes, 6), v_size = pick_size(v_sizes, 5);
    s->tol.factor *= (double)q_size * (double)k_size;
    s->qd = normal(s->q.n, q_size);
    s->kd = normal(s->k.n, k_size);
    s->vd = normal(s->v.n, v_size);
    s->od = take_floats(s->o.n);
    tell("q_size", (double)q_size), tell("k_size", (double)k_size), tell("v_size", (double)v_size);
    a->q = s->qd + s->q.origin, a->q_stride = stride_of(&s->q);
    a->k = s->kd + s->k.origin, a->k_stride = stride_of(&s->k);
    a->v = s->vd + s->v.origin, a->v_stride = stride_of(&s->v);
    a->o = s->od + s->o.origin, a->o_stride = stride_of(&s->o);
    s->n_lse = (size_t)q_total(f) * (size_t)H;
    s->n_attn = s->n_lse * (size_t)S;
    s->n_mean = (size_t)q_total(f) * (size_t)S;
    if (chance(30)) a->attn = take_floats(s->n_attn), tell("attn", 1);
    if (chance(25)) a->attn_mean = take_floats(s->n_mean), tell("attn_mean", 1);
    if (chance(40)) a->lse = take_floats(s->n_lse), tell("lse", 1);
    f->asked = a->attn || a->attn_mean || a->lse;
}

/* After the oracle has seen the data: what nobody looks at becomes NaN and Inf; maybe one number
   that is looked at becomes NaN. state: by rows; some_v [rows,d_v]: where o must be NaN. */
static void poison_sdpa(sdpa_case *s, unsigned char *state, unsigned char *some_v)
{
    frame *f = &s->f;
    const mha_sdpa_args *a = &s->a;
    const int H = f->H, G = a->kv_heads ? a->kv_heads : H, rep = H / G;
    const int dk = a->d_k, dv = a->d_v ? a->d_v : dk;
    float *data[3] = { s->qd, s->kd, s->vd };
    const size_t n[3] = { s->q.n, s->k.n, s->v.n };
    unsigned char *seen[3];
    if (!chance(35)) return;
    tell("poison", 1);
    for (int i = 0; i < 3; i++) {
        seen[i] = (unsigned char *)take(n[i]);
        memset(seen[i], 0, n[i]);
    }
    poison_bias(f);
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < q_len(f, b); t++)
                for (int j = 0; j < k_len(f, b); j++)
                    if (looks(f, b, h, t, j)) {
                        memset(seen[0] + row_at(&s->q, f->cu_q, b, h, t), 1, (size_t)dk);
                        memset(seen[1] + row_at(&s->k, f->cu_k, b, h / rep, j), 1, (size_t)dk);
                        memset(seen[2] + row_at(&s->v, f->cu_k, b, h / rep, j), 1, (size_t)dv);
                    }
    for (int i = 0; i < 3; i++)
        for (size_t e = 0; e < n[i]; e++)
            if (!seen[i][e]) data[i][e] = poison();
    if (!f->far && chance(40)) {
        const int which = pick(0, 2);
        const size_t e = n[which] ? (size_t)rng_int(&numbers, 0, (int)n[which] - 1) : 0;
        if (n[which] && seen[which][e]) data[which][e] = F_NAN, tell("attended NaN", which);
    }
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < q_len(f, b); t++) {
                const size_t row = q_row(f, b, h, t);
                const float *q = s->qd + row_at(&s->q, f->cu_q, b, h, t);
                for (int j = 0; j < k_len(f, b); j++) {
                    const float *k = s->kd + row_at(&s->k, f->cu_k, b, h / rep, j);
                    const float *v = s->vd + row_at(&s->v, f->cu_k, b, h / rep, j);
                    if (!looks(f, b, h, t, j)) continue;
                    for (int d = 0; d < dk; d++)
                        if (is_nan(k[d]) || is_nan(q[d])) state[row] = LOST;
                    for (int d = 0; d < dv; d++)
                        if (is_nan(v[d])) {
                            some_v[row * (size_t)dv + (size_t)d] = 1;
                            if (state[row] == FINE) state[row] = SOME;
                        }
                }
            }
}

static void check_sdpa(const sdpa_case *s, const oracle_result *want, const unsigned char *state,
                       const unsigned char *some_v)
{
    const frame *f = &s->f;
    const mha_sdpa_args *a = &s->a;
    const int dv = a->d_v ? a->d_v : a->d_k;
    unsigned char *written = (unsigned char *)take(s->o.n);
    memset(written, 0, s->o.n);
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < f->H; h++)
            for (int t = 0; t < q_len(f, b); t++) {
                const ptrdiff_t at = row_at(&s->o, f->cu_q, b, h, t);
                const size_t row = q_row(f, b, h, t);
                const double gate = fabs(want->gate[row]), top = gate * want->v_max;
                /* denormals have no relative precision */
                const double tol =
                    top * tolerance(&s->tol, s->tol.base, want->size[row]) + 1e-42 * (1 + gate);
                for (int d = 0; d < dv; d++) {
                    const size_t e = row * (size_t)dv + (size_t)d;
                    const float got = s->od[at + d];
                    written[at + d] = 1;
                    if (!(gate > 0) || oracle_is_ninf(want->lse[row])) {
                        require_zero("o of a row that is off", e, got);
                    } else if (state[row] == LOST || some_v[e]) {
                        require(is_nan(got), "o of a row that attends NaN");
                    } else {
                        require_close("o", e, got, want->o[e], tol);
                        if (fabs((double)got) > top * 1.00001 + 1e-42 * (1 + gate))
                            wrong("o beyond every v", (double)e, (double)got, top);
                    }
                }
            }
    for (size_t e = 0; e < s->o.n; e++)
        if (!written[e]) require_untouched("wrote between the rows of o", s->od + e, sizeof(float));
    check_weights(f, want, state, &s->tol, a->attn, a->attn_mean, a->lse);
}

static void run_sdpa(sdpa_case *s, int own_workspace)
{
    mha_sdpa_args a = s->a;
    size_t bytes = 0;
    const int kept = n_blocks;
    const long live = test_live;
    char why[8];
    memset(s->od, 0xff, s->o.n * sizeof(float));
    if (a.attn) memset(a.attn, 0xff, s->n_attn * sizeof(float));
    if (a.attn_mean) memset(a.attn_mean, 0xff, s->n_mean * sizeof(float));
    if (a.lse) memset(a.lse, 0xff, s->n_lse * sizeof(float));
    require_status("mha_sdpa_workspace_size", mha_sdpa_workspace_size(&a, &bytes), MHA_OK);
    if (own_workspace) {
        a.workspace = take_workspace(bytes);
        a.workspace_size = bytes;
    }
    require_status(why, mha_sdpa_check(&a, why, sizeof why), MHA_OK);
    require(why[0] == 0, "a reason although all is well");
    test_allocs = 0;
    require_status("mha_sdpa", mha_sdpa(&a), MHA_OK);
    require(test_live == live, "mha_sdpa left memory");
    require(!own_workspace || test_allocs == 0, "mha_sdpa allocated in spite of a workspace");
    give_back(kept);
}

/* Sequence b alone has the same bits. */
static void alone_sdpa(const sdpa_case *s, int b)
{
    const frame *f = &s->f;
    const int H = f->H, T = q_len(f, b), S = k_len(f, b), dv = s->a.d_v ? s->a.d_v : s->a.d_k;
    float *o = (float *)take((size_t)(H * T * dv) * sizeof(float));
    float *lse = (float *)take((size_t)(H * T) * sizeof(float));
    mha_sdpa_args a = s->a;
    a.batch = 1, a.seq = T, a.source_seq = S;
    a.cu_seq = a.cu_source = NULL;
    a.mask = mask_alone(&s->a.mask, f->S, b, S, 0);
    a.gate = gate_alone(f, b, &a.gate_stride);
    a.q = s->qd + row_at(&s->q, f->cu_q, b, 0, 0);
    a.k = s->kd + row_at(&s->k, f->cu_k, b, 0, 0);
    a.v = s->vd + row_at(&s->v, f->cu_k, b, 0, 0);
    a.q_stride.batch = s->q.step[0], a.q_stride.head = s->q.step[1], a.q_stride.seq = s->q.step[2];
    a.k_stride.batch = s->k.step[0], a.k_stride.head = s->k.step[1], a.k_stride.seq = s->k.step[2];
    a.v_stride.batch = s->v.step[0], a.v_stride.head = s->v.step[1], a.v_stride.seq = s->v.step[2];
    memset(&a.o_stride, 0, sizeof a.o_stride);
    a.o = o;
    a.attn = a.attn_mean = NULL;
    if (f->asked) a.lse = lse; /* else rows whose gate is 0 would be computed */
    require_status("mha_sdpa, one sequence", mha_sdpa(&a), MHA_OK);
    for (int h = 0; h < H; h++)
        for (int t = 0; t < T; t++) {
            require_same("o of one sequence", s->od + row_at(&s->o, f->cu_q, b, h, t),
                         o + (h * T + t) * dv, (size_t)dv);
            if (s->a.lse)
                require_same("lse of one sequence", s->a.lse + q_row(f, b, h, t), lse + h * T + t,
                             1);
        }
}

/* o over q. */
static void inside_sdpa(const sdpa_case *s)
{
    const frame *f = &s->f;
    const int dv = s->a.d_v ? s->a.d_v : s->a.d_k;
    float *q = copied(s->qd, s->q.n);
    mha_sdpa_args a = s->a;
    for (int i = 0; i < 3; i++)
        if (!s->q.step[i]) return;
    if (dv > a.d_k || a.attn || a.attn_mean) return;
    a.q = a.o = q + s->q.origin;
    a.q_stride.batch = s->q.step[0], a.q_stride.head = s->q.step[1], a.q_stride.seq = s->q.step[2];
    a.o_stride = a.q_stride;
    require_status("mha_sdpa, o = q", mha_sdpa(&a), MHA_OK);
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < f->H; h++)
            for (int t = 0; t < q_len(f, b); t++)
                require_same("o over q", q + row_at(&s->q, f->cu_q, b, h, t),
                             s->od + row_at(&s->o, f->cu_q, b, h, t), (size_t)dv);
}

/* No neighbours along an axis: its stride may be anything that can be added to a pointer, as loops
   do after the last row. */
static void wild(ptrdiff_t *stride, int extent)
{
    static const ptrdiff_t n[] = { 1 << 28, -(1 << 28), 1 << 20, -1, 1 };
    if (extent < 2) *stride = n[pick(0, 4)];
}

static void wild_stride(mha_stride *s, int batch, int heads, int seq)
{
    if (!s->batch && !s->head && !s->seq) return; /* the default */
    wild(&s->batch, batch), wild(&s->head, heads), wild(&s->seq, seq);
}

static void wild_mask(mha_mask_stride *s, const frame *f)
{
    if (!s->batch && !s->head && !s->query && !s->key) return;
    wild(&s->batch, f->B), wild(&s->head, f->H), wild(&s->query, f->T), wild(&s->key, f->S);
}

static void wild_sdpa(sdpa_case *s)
{
    mha_sdpa_args *a = &s->a;
    const frame *f = &s->f;
    const int G = a->kv_heads ? a->kv_heads : a->heads;
    const int qb = f->cu_q ? 1 : f->B, qt = f->cu_q ? q_total(f) : f->T;
    const int kb = f->cu_k ? 1 : f->B, kt = f->cu_k ? k_total(f) : f->S;
    if (!chance(20)) return;
    tell("wild", 1);
    wild_stride(&a->q_stride, qb, f->H, qt), wild_stride(&a->o_stride, qb, f->H, qt);
    wild_stride(&a->k_stride, kb, G, kt), wild_stride(&a->v_stride, kb, G, kt);
    wild_mask(&a->mask.allow_stride, f), wild_mask(&a->mask.bias_stride, f);
    if (!a->gate_stride.batch && !a->gate_stride.seq && !a->gate_stride.head) return;
    wild(&a->gate_stride.batch, qb), wild(&a->gate_stride.seq, qt);
    wild(&a->gate_stride.head, f->H);
}

static void fuzz_sdpa(void)
{
    sdpa_case s;
    oracle_result want;
    mha_isa isa[8];
    lanes l;
    unsigned char *state, *some_v;
    mha_parallel serial, parallel;
    int isas, workspace, extra, dv, b;

    draw_sdpa(&s);
    isas = pick_isas(isa);
    workspace = pick(0, 3), extra = pick(0, 3);
    serial = s.a.parallel, parallel = pick_parallel(&l);
    dv = s.a.d_v ? s.a.d_v : s.a.d_k, b = s.f.B ? pick(0, s.f.B - 1) : 0;
    want = oracle_sdpa(&s.a);
    state = (unsigned char *)take(s.n_lse);
    some_v = (unsigned char *)take(s.n_lse * (size_t)dv);
    memset(state, FINE, s.n_lse);
    memset(some_v, 0, s.n_lse * (size_t)dv);
    poison_sdpa(&s, state, some_v);
    wild_sdpa(&s);
    for (int i = 0; i < isas; i++) {
        const int kept = n_blocks;
        float *o, *attn, *mean, *lse;
        s.a.isa = isa[i];
        s.a.parallel = serial;
        run_sdpa(&s, workspace & 1);
        check_sdpa(&s, &want, state, some_v);
        o = copied(s.od, s.o.n);
        attn = copied(s.a.attn, s.a.attn ? s.n_attn : 0);
        mean = copied(s.a.attn_mean, s.a.attn_mean ? s.n_mean : 0);
        lse = copied(s.a.lse, s.a.lse ? s.n_lse : 0);
        s.a.parallel = parallel;
        run_sdpa(&s, workspace & 2);
        require_same("o with threads", s.od, o, s.o.n);
        if (s.a.attn) require_same("attn with threads", s.a.attn, attn, s.n_attn);
        if (s.a.attn_mean) require_same("attn_mean with threads", s.a.attn_mean, mean, s.n_mean);
        if (s.a.lse) require_same("lse with threads", s.a.lse, lse, s.n_lse);
        if (extra == 1 && s.f.B) alone_sdpa(&s, b);
        if (extra == 2) inside_sdpa(&s);
        give_back(kept);
    }
    oracle_free(&want);
}

/* ---- a layer ----------------------------------------------------------------------------- */

typedef struct net {
    mha_config cfg;
    mha_weights w;
    int D, H, G, dk, dv, Ds, Dv, other_v, turned;
    tolerances tol;
    double terms; /* of v: see value_terms */
    mha_layer *layer;
    int open; /* positions so far out that angles have no precision: only bits are compared */
} net;

/* N(0,1) / sqrt(in); for the other formats numbers that they hold exactly. An INT8 column with 127
   times a power of two in it gets that power as its scale. */
static float *pick_matrix(int in, int out, mha_type type, mha_layout layout)
{
    const size_t n = (size_t)in * (size_t)out;
    float *w = take_floats(n), unit = 1;
    const int most = type == MHA_F16 ? 2047 : type == MHA_BF16 ? 255 : 127;
    if (type == MHA_F32) {
        for (size_t i = 0; i < n; i++)
            w[i] = (float)((double)rng_normal(&numbers) / sqrt((double)in));
        return w;
    }
    while (unit * unit * (float)in > 1) unit /= 2;
    unit /= type == MHA_F16 ? 1024 : type == MHA_BF16 ? 128 : 64;
    for (size_t i = 0; i < n; i++) w[i] = unit * (float)rng_int(&numbers, -most, most);
    for (int o = 0; o < out && type == MHA_INT8; o++) {
        const int i = rng_int(&numbers, 0, in - 1);
        w[layout == MHA_IN_OUT ? i * out + o : o * in + i] = unit * (o % 2 ? 127.0f : -127.0f);
    }
    return w;
}

static double norm_of(const float *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* How large the terms are that v is the sum of: its rounding errors are relative to those. x: where
   values come from. */
static double value_terms(const net *l, const float *x, int rows)
{
    const int all = l->H * l->dk + l->G * (l->dk + l->dv), n = l->G * l->dv;
    const double w = l->w.qkv ? norm_of(l->w.qkv, l->D * all) : norm_of(l->w.v, l->Dv * n);
    const double b = l->w.b_qkv ? norm_of(l->w.b_qkv, all) : l->w.b_v ? norm_of(l->w.b_v, n) : 0;
    double most = 0;
    for (int i = 0; i < rows; i++) most = fmax(most, norm_of(x + i * l->Dv, l->Dv));
    return most * w + b;
}

static void pick_rope(net *l)
{
    static const float bases[] = { 0, 10000, 500000, 50 };
    static const float factors[] = { 2, 1, 1.5f, 4, 32 };
    mha_rope *r = &l->cfg.rope;
    int width = l->dk;
    if (l->dk < 2 || !chance(30)) return;
    r->layout = chance(50) ? MHA_ROPE_HALF : MHA_ROPE_INTERLEAVED;
    if (l->dk % 2 || chance(40)) r->width = width = 2 * pick(1, l->dk / 2);
    r->base = bases[pick(0, 3)];
    r->scaling = (mha_rope_scaling)pick(0, 4);
    if (r->scaling == MHA_ROPE_NTK && width == 2) r->scaling = MHA_ROPE_LINEAR;
    if (r->scaling != MHA_ROPE_PLAIN) r->factor = factors[pick(0, 4)];
    if (r->scaling == MHA_ROPE_YARN || r->scaling == MHA_ROPE_LLAMA3)
        r->original = 1 << pick(6, 13);
    if (r->scaling == MHA_ROPE_YARN) {
        const double grown = r->factor > 1 ? 1 + 0.1 * log((double)r->factor) : 1;
        if (chance(30)) r->beta_fast = 16;
        if (chance(30)) r->beta_slow = 2;
        if (chance(30)) r->attention = 1.25f;
        l->tol.factor *= r->attention > 0 ? 1.25 * 1.25 : grown * grown;
    }
    if (r->scaling == MHA_ROPE_LLAMA3 && chance(30)) r->low_freq = 2;
    if (r->scaling == MHA_ROPE_LLAMA3 && chance(30)) r->high_freq = 8;
    tell("rope", r->layout), tell("width", r->width), tell("scaling", r->scaling);
    tell("base", (double)r->base), tell("factor", (double)r->factor), tell("original", r->original);
}

static void draw_net(net *l, int cross)
{
    static const float scales[] = { 0.25f, 0.5f, 2, 8 };
    mha_config *c = &l->cfg;
    mha_weights *w = &l->w;
    int rep;
    memset(l, 0, sizeof *l);
    l->tol.base = l->tol.lse = 1e-5;
    l->tol.factor = 1;
    l->G = pick(1, 3), rep = pick(1, 3), l->H = l->G * rep;
    l->dk = pick_width(), l->dv = chance(50) ? l->dk : pick_width();
    while (l->H > 2 && l->H * (l->dk + l->dv) > 80) l->H = l->G = l->H / 2;
    if (chance(30)) l->dv = l->dk, l->D = l->H * l->dk; /* d_k by default */
    else l->D = pick(1, 12), c->d_k = l->dk;
    if (chance(1)) l->D = pick(250, 530), c->d_k = l->dk; /* more terms than a block of weights */
    l->Ds = cross && chance(40) ? pick(1, 12) : l->D;
    l->other_v = cross && chance(30);
    l->Dv = l->other_v && chance(60) ? pick(1, 12) : l->Ds;
    c->d_model = l->D;
    c->n_heads = l->H;
    if (l->G != l->H || chance(30)) c->n_kv_heads = l->G;
    if (l->dv != l->dk || chance(30)) c->d_v = l->dv;
    if (l->Ds != l->D || chance(20)) c->d_source = l->Ds;
    if (l->Dv != l->Ds || chance(20)) c->d_source_v = l->Dv;
    if (chance(20)) {
        const float scale = scales[pick(0, 3)];
        l->tol.factor = (double)scale;
        c->scale = (float)((double)scale / sqrt((double)l->dk));
    }
    c->weight_type = chance(30) ? (mha_type)pick(0, 3) : MHA_F32;
    w->layout = chance(50) ? MHA_OUT_IN : MHA_IN_OUT;
    tell("D", l->D), tell("H", l->H), tell("G", l->G), tell("d_k", l->dk), tell("d_v", l->dv);
    tell("d_source", l->Ds), tell("d_source_v", l->Dv), tell("scale", (double)c->scale);
    tell("weight_type", c->weight_type), tell("layout", w->layout);
    if (l->Ds == l->D && l->Dv == l->D && chance(50)) {
        w->qkv =
            pick_matrix(l->D, l->H * l->dk + l->G * (l->dk + l->dv), c->weight_type, w->layout);
        tell("fused", 1);
    } else {
        w->q = pick_matrix(l->D, l->H * l->dk, c->weight_type, w->layout);
        w->k = pick_matrix(l->Ds, l->G * l->dk, c->weight_type, w->layout);
        w->v = pick_matrix(l->Dv, l->G * l->dv, c->weight_type, w->layout);
    }
    w->out = pick_matrix(l->H * l->dv, l->D, c->weight_type, w->layout);
    if (chance(30)) {
        w->b_qkv = normal((size_t)(l->H * l->dk + l->G * (l->dk + l->dv)), 1);
    } else {
        if (chance(30)) w->b_q = normal((size_t)(l->H * l->dk), 1);
        if (chance(30)) w->b_k = normal((size_t)(l->G * l->dk), 1);
        if (chance(30)) w->b_v = normal((size_t)(l->G * l->dv), 1);
    }
    if (chance(40)) w->b_out = normal((size_t)l->D, 1);
    pick_rope(l);
    if (chance(20)) c->softcap = 0.5f * (float)pick(1, 100), tell("softcap", (double)c->softcap);
    if (chance(20)) {
        c->alibi = 1, tell("alibi", 1);
        if (chance(50)) {
            float *slopes = normal((size_t)l->H, 0.3f);
            for (int h = 0; h < l->H; h++) slopes[h] = fabsf(slopes[h]);
            w->alibi = slopes;
        }
    }
    if (chance(20)) {
        float *sink = normal((size_t)l->H, 3);
        for (int h = 0; h < l->H; h++)
            if (chance(20)) sink[h] = F_NINF;
        w->sink = sink, tell("sink", 1);
        if (chance(50)) w->sink_value = normal((size_t)(l->H * l->dv), 1);
    }
    if (chance(20)) {
        const size_t n = (size_t)l->dk;
        c->qk_norm = chance(50) ? MHA_NORM_RMS : MHA_NORM_LAYER, tell("qk_norm", c->qk_norm);
        c->norm_eps = chance(50) ? 1e-3f : 0;
        if (chance(50)) w->q_norm = normal(n, 1);
        if (chance(50)) w->k_norm = normal(n, 1);
        if (c->qk_norm == MHA_NORM_LAYER && chance(50)) w->q_norm_bias = normal(n, 0.5f);
        if (c->qk_norm == MHA_NORM_LAYER && chance(50)) w->k_norm_bias = normal(n, 0.5f);
    }
    if (chance(15)) c->zero_attn = 1, tell("zero_attn", 1);
    if (chance(15)) {
        w->bias_k = normal((size_t)(l->G * l->dk), 1);
        w->bias_v = normal((size_t)(l->G * l->dv), 1);
        tell("bias_kv", 1);
    }
    l->turned = c->rope.layout || c->qk_norm;
    if (l->turned || bits_f(c->softcap) || c->alibi || w->sink) l->tol.sized = 1;
}

/* In memory of its own, or in ours: exactly as much as it asks for. */
static void make_layer(net *l, mha_isa isa, int ours)
{
    size_t bytes = 0;
    l->cfg.isa = isa;
    require_status("mha_layer_size", mha_layer_size(&l->cfg, &bytes), MHA_OK);
    if (ours) {
        require_status("mha_layer_init",
                       mha_layer_init(&l->layer, take_workspace(bytes), bytes, &l->cfg, &l->w),
                       MHA_OK);
    } else {
        require_status("mha_layer_create", mha_layer_create(&l->layer, &l->cfg, &l->w), MHA_OK);
    }
    require(mha_layer_config(l->layer)->isa == isa, "the layer has another isa");
}

static int *pick_positions(net *l, int n)
{
    int *at;
    const int far = pick(0, 15);
    if (!chance(30)) return NULL;
    at = take_ints((size_t)n);
    for (int i = 0; i < n; i++)
        at[i] =
            far == 15 ? i % 2 ? INT_MAX : INT_MIN : rng_int(&numbers, -100, far ? 5000 : 200000);
    if (far == 15 && l->cfg.rope.layout) l->open = 1;
    tell("positions", far);
    return at;
}

typedef struct layer_case {
    net l;
    mha_args a;
    frame f;
    float *x, *source, *source_v;
    size_t n_y, n_attn, n_mean, n_lse;
} layer_case;

static void draw_layer(layer_case *s)
{
    static const float sizes[] = { 1e-3f, 8, 1e8f, 0, 1e-30f };
    const int cross = chance(40), most = chance(10) ? 60000 : 12000;
    mha_args *a = &s->a;
    frame *f = &s->f;
    net *l = &s->l;
    int B = chance(4) ? 0 : pick(1, 3), T = pick_length(40), S = cross ? pick_length(272) : T;
    float size;
    memset(s, 0, sizeof *s);
    draw_net(l, cross);
    while (B * T * l->H * (l->dk + l->dv) * (S + l->D) > most ||
           B * S * l->H * (l->dk + l->dv) * l->Ds > most) {
        if (B > 1) B--;
        else if (T >= S) T = (T + 1) / 2;
        else S = (S + 1) / 2;
        if (!cross) S = T;
        if (T <= 1 && S <= 1) break;
    }
    a->batch = B;
    a->seq = T;
    if (chance(25)) {
        a->cu_seq = pick_cu(B, &T);
        a->seq = chance(50) ? a->cu_seq[B] : 0;
        if (!cross) S = T;
    }
    a->source_seq = cross ? S : chance(50) ? a->seq : 0;
    if (cross && chance(25)) {
        a->cu_source = pick_cu(B, &S);
        a->source_seq = chance(50) ? a->cu_source[B] : 0;
    }
    tell("B", B), tell("T", T), tell("S", S), tell("cross", cross);
    tell("cu_seq", a->cu_seq != NULL), tell("cu_source", a->cu_source != NULL);
    f->B = B, f->H = l->H, f->T = T, f->S = S;
    f->cu_q = a->cu_seq;
    f->cu_k = cross ? a->cu_source : a->cu_seq;
    pick_mask(f, &a->mask, 0, &l->tol.sized);
    a->gate = pick_gate(f, &a->gate_stride);
    if (l->cfg.rope.layout) a->positions = pick_positions(l, q_total(f));
    if (l->cfg.rope.layout && cross) a->source_positions = pick_positions(l, k_total(f));
    size = pick_size(sizes, 5);
    l->tol.factor *= size > 1 ? (double)size * (double)size : 1;
    tell("x_size", (double)size);
    s->n_y = (size_t)q_total(f) * (size_t)l->D;
    a->x = s->x = normal(s->n_y, size);
    if (cross) a->source = s->source = normal((size_t)(k_total(f) * l->Ds), size);
    if (l->other_v) a->source_v = s->source_v = normal((size_t)(k_total(f) * l->Dv), size);
    a->y = take_floats(s->n_y);
    s->n_lse = (size_t)q_total(f) * (size_t)l->H;
    s->n_attn = s->n_lse * (size_t)S;
    s->n_mean = (size_t)q_total(f) * (size_t)S;
    if (chance(25)) a->attn = take_floats(s->n_attn), tell("attn", 1);
    if (chance(25)) a->attn_mean = take_floats(s->n_mean), tell("attn_mean", 1);
    if (chance(30)) a->lse = take_floats(s->n_lse), tell("lse", 1);
    f->asked = a->attn || a->attn_mean || a->lse;
}

/* Row by row: what a NaN in a query, or in a key that it sees, makes of it. */
static int row_state(const frame *f, const net *l, int b, int h, int t, int bad_q,
                     const char *bad_k)
{
    int seen = 0, bad = 0;
    for (int j = 0; j < k_len(f, b); j++)
        if (sees(f, b, h, t, j)) seen = 1, bad |= bad_k[k_token(f, b, j)];
    if (f->far && (bad || bad_q)) return OPEN;
    if (bad || (seen && bad_q)) return LOST;
    if (bad_q && l->w.bias_k) return LOST;
    return bad_q && l->cfg.zero_attn ? OPEN : FINE; /* NaN times a key of zeros */
}

/* As poison_sdpa, by tokens. */
static void poison_layer(layer_case *s, unsigned char *state)
{
    frame *f = &s->f;
    const net *l = &s->l;
    const int Q = q_total(f), K = k_total(f), cross = s->a.source != NULL;
    char *need_q = (char *)take((size_t)Q), *need_k = (char *)take((size_t)K);
    char *bad_q = (char *)take((size_t)Q), *bad_k = (char *)take((size_t)K);
    int one = -1;
    if (!chance(35)) return;
    tell("poison", 1);
    memset(need_q, 0, (size_t)Q), memset(need_k, 0, (size_t)K);
    memset(bad_q, 0, (size_t)Q), memset(bad_k, 0, (size_t)K);
    poison_bias(f);
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < f->H; h++)
            for (int t = 0; t < q_len(f, b); t++) {
                const int open = works(f, b, h, t);
                if (open && (l->w.bias_k || l->cfg.zero_attn)) need_q[q_token(f, b, t)] = 1;
                for (int j = 0; j < k_len(f, b); j++)
                    if (looks(f, b, h, t, j))
                        need_q[q_token(f, b, t)] = need_k[k_token(f, b, j)] = 1;
            }
    if (!f->far && chance(40)) one = pick(0, 255), tell("attended NaN", one);
    for (int i = 0; i < Q; i++) {
        const int unseen = !need_q[i] && (cross || !need_k[i]);
        if (!unseen && !(one >= 0 && Q && i == one % Q && (!cross || one % 2))) continue;
        for (int d = 0; d < l->D; d++)
            if (unseen || d == one % l->D) s->x[i * l->D + d] = unseen ? poison() : F_NAN;
        bad_q[i] = 1;
        if (!cross) bad_k[i] = 1;
    }
    for (int i = 0; cross && i < K; i++) {
        const int unseen = !need_k[i];
        if (!unseen && !(one >= 0 && i == one % K && one % 2 == 0)) continue;
        for (int d = 0; d < l->Ds; d++)
            if (unseen || d == one % l->Ds) s->source[i * l->Ds + d] = unseen ? poison() : F_NAN;
        for (int d = 0; l->other_v && d < l->Dv; d++)
            if (unseen) s->source_v[i * l->Dv + d] = poison();
        bad_k[i] = 1;
    }
    for (int b = 0; b < f->B; b++)
        for (int h = 0; h < f->H; h++)
            for (int t = 0; t < q_len(f, b); t++)
                if (works(f, b, h, t))
                    state[q_row(f, b, h, t)] =
                        (unsigned char)row_state(f, l, b, h, t, bad_q[q_token(f, b, t)], bad_k);
}

/* 1e-5 of y, or of its terms where it cancels, as in test_random.c. Where o cancels, what mha_sdpa
   promises of it; where v does, 2^-24 (1 + sqrt(d) / 4) of its terms; both through W_O, one
   independent error per term. more: what a rounding cache adds to o. */
static void check_y(const frame *f, const net *l, const oracle_result *want,
                    const unsigned char *state, const float *y, double more)
{
    for (int b = 0; b < f->B; b++)
        for (int t = 0; t < q_len(f, b); t++) {
            double size = 0, gate = 0, tol = l->tol.base * want->y_size + 1e-36;
            int lost = 0, open = 0;
            for (int h = 0; h < f->H; h++) {
                const size_t row = q_row(f, b, h, t);
                const double g = fabs(want->gate[row]);
                size = fmax(size, g * tolerance(&l->tol, l->tol.base, want->size[row]));
                gate = fmax(gate, g);
                if (g > 0 && state[row] == LOST) lost = 1;
                if (g > 0 && state[row] == OPEN) open = 1;
            }
            tol += size * want->v_max * want->w_size;
            tol += gate * want->w_size * l->terms * (1 + sqrt((double)l->Dv) / 4) / 16777216.0;
            tol += gate * want->w_size * more * sqrt((double)(l->H * l->dv));
            for (int d = 0; d < l->D && !open; d++) {
                const size_t at = (size_t)(q_token(f, b, t) * l->D + d);
                if (lost) require(is_nan(y[at]), "y of a token that attends NaN");
                else require_close("y", at, y[at], want->y[at], tol);
            }
        }
}

static void run_layer(layer_case *s, int own_workspace)
{
    mha_args a = s->a;
    size_t bytes = 0;
    const int kept = n_blocks;
    const long live = test_live;
    char why[8];
    memset(a.y, 0xff, s->n_y * sizeof(float));
    if (a.attn) memset(a.attn, 0xff, s->n_attn * sizeof(float));
    if (a.attn_mean) memset(a.attn_mean, 0xff, s->n_mean * sizeof(float));
    if (a.lse) memset(a.lse, 0xff, s->n_lse * sizeof(float));
    require_status("mha_workspace_size", mha_workspace_size(s->l.layer, &a, &bytes), MHA_OK);
    if (own_workspace) {
        a.workspace = take_workspace(bytes);
        a.workspace_size = bytes;
    }
    require_status("mha_forward_check", mha_forward_check(s->l.layer, &a, why, sizeof why), MHA_OK);
    require(why[0] == 0, "a reason although all is well");
    test_allocs = 0;
    require_status("mha_forward", mha_forward(s->l.layer, &a), MHA_OK);
    require(test_live == live, "mha_forward left memory");
    require(!own_workspace || test_allocs == 0, "mha_forward allocated in spite of a workspace");
    give_back(kept);
}

/* The textbook's stages one by one have the same bits. */
static void stages(const layer_case *s)
{
    const net *l = &s->l;
    const frame *f = &s->f;
    const int Q = q_total(f), K = k_total(f), H = l->H, G = l->G, dk = l->dk, dv = l->dv;
    float *q = take_floats((size_t)(Q * H * dk)), *k = take_floats((size_t)(K * G * dk));
    float *v = take_floats((size_t)(K * G * dv)), *o = take_floats((size_t)(Q * H * dv));
    float *y = take_floats(s->n_y);
    mha_args a = s->a;
    mha_sdpa_args c;
    size_t bytes = 0;
    if (l->w.bias_k || l->cfg.zero_attn) return; /* mha_sdpa has none */
    require_status("mha_workspace_size", mha_workspace_size(l->layer, &a, &bytes), MHA_OK);
    a.workspace = take_workspace(bytes);
    a.y = y;
    require_status("mha_project_qkv without room", mha_project_qkv(l->layer, &a, q, k, v),
                   MHA_ERR_WORKSPACE);
    require_status("mha_project_out without room", mha_project_out(l->layer, &a, o),
                   MHA_ERR_WORKSPACE);
    require_untouched("q without room", q, (size_t)(Q * H * dk) * sizeof(float));
    require_untouched("k without room", k, (size_t)(K * G * dk) * sizeof(float));
    require_untouched("v without room", v, (size_t)(K * G * dv) * sizeof(float));
    require_untouched("y without room", y, s->n_y * sizeof(float));
    a.workspace_size = bytes;
    require_status("mha_project_qkv", mha_project_qkv(l->layer, &a, q, k, v), MHA_OK);
    memset(&c, 0, sizeof c);
    c.batch = f->B, c.heads = H, c.kv_heads = G, c.d_k = dk, c.d_v = dv;
    c.seq = f->cu_q ? 0 : f->T, c.source_seq = f->cu_k ? 0 : f->S;
    c.scale = mha_layer_config(l->layer)->scale;
    c.isa = l->cfg.isa;
    c.q = q, c.k = k, c.v = v, c.o = o;
    c.q_stride.batch = f->T * H * dk, c.q_stride.head = dk, c.q_stride.seq = H * dk;
    c.k_stride.batch = f->S * G * dk, c.k_stride.head = dk, c.k_stride.seq = G * dk;
    c.v_stride.batch = f->S * G * dv, c.v_stride.head = dv, c.v_stride.seq = G * dv;
    c.o_stride.batch = f->T * H * dv, c.o_stride.head = dv, c.o_stride.seq = H * dv;
    c.mask = a.mask;
    c.gate = a.gate, c.gate_stride = a.gate_stride;
    c.attn = a.attn, c.attn_mean = a.attn_mean, c.lse = a.lse;
    c.cu_seq = f->cu_q, c.cu_source = f->cu_k;
    c.softcap = l->cfg.softcap;
    if (l->cfg.alibi) {
        float *slopes = take_floats((size_t)H);
        require_status("mha_alibi_slopes", mha_alibi_slopes(H, slopes), MHA_OK);
        c.alibi = l->w.alibi ? l->w.alibi : slopes;
    }
    c.sink = l->w.sink, c.sink_value = l->w.sink_value;
    require_status("mha_sdpa as a stage", mha_sdpa(&c), MHA_OK);
    require_status("mha_project_out", mha_project_out(l->layer, &a, o), MHA_OK);
    require_same("y by stages", y, s->a.y, s->n_y);
    for (int i = 0; i < 3; i++) { /* each alone */
        float *some[3] = { NULL, NULL, NULL };
        const float *all[3] = { q, k, v };
        const size_t n[3] = { (size_t)(Q * H * dk), (size_t)(K * G * dk), (size_t)(K * G * dv) };
        some[i] = take_floats(n[i]);
        require_status("one projection", mha_project_qkv(l->layer, &a, some[0], some[1], some[2]),
                       MHA_OK);
        require_same("one projection", some[i], all[i], n[i]);
    }
}

/* Sequence b alone; and y over x. */
static void alone_layer(const layer_case *s, int b)
{
    const net *l = &s->l;
    const frame *f = &s->f;
    const int T = q_len(f, b), S = k_len(f, b), D = l->D;
    const int q = q_token(f, b, 0), k = k_token(f, b, 0);
    float *x = copied(s->x + q * D, (size_t)(T * D));
    float *lse = (float *)take((size_t)(T * l->H) * sizeof(float));
    mha_args a = s->a;
    a.batch = 1, a.seq = T, a.source_seq = a.source ? S : 0;
    a.cu_seq = a.cu_source = NULL;
    a.mask = mask_alone(&s->a.mask, f->S, b, S, 0);
    a.gate = gate_alone(f, b, &a.gate_stride);
    a.x = a.y = x;
    if (a.source) a.source += k * l->Ds;
    if (a.source_v) a.source_v += k * l->Dv;
    if (a.positions) a.positions += q;
    if (a.source_positions) a.source_positions += k;
    a.attn = a.attn_mean = NULL;
    a.lse = f->asked ? lse : NULL;
    require_status("mha_forward, one sequence", mha_forward(l->layer, &a), MHA_OK);
    require_same("y of one sequence", x, s->a.y + q * D, (size_t)(T * D));
}

static void fuzz_layer(void)
{
    layer_case s;
    oracle_result want;
    mha_isa isa[8];
    lanes l;
    unsigned char *state;
    mha_parallel serial, parallel;
    int isas, memory, extra, b;

    draw_layer(&s);
    isas = pick_isas(isa);
    memory = pick(0, 7), extra = pick(0, 3);
    serial = s.a.parallel, parallel = pick_parallel(&l);
    b = s.f.B ? pick(0, s.f.B - 1) : 0;
    want = oracle_forward(&s.l.cfg, &s.l.w, &s.a);
    s.l.terms = value_terms(&s.l,
                            s.source_v ? s.source_v
                            : s.source ? s.source
                                       : s.x,
                            k_total(&s.f));
    state = (unsigned char *)take(s.n_lse);
    memset(state, FINE, s.n_lse);
    poison_layer(&s, state);
    for (int i = 0; i < isas; i++) {
        const int kept = n_blocks;
        float *y, *attn, *mean, *lse;
        make_layer(&s.l, isa[i], memory & 1);
        s.a.parallel = serial;
        run_layer(&s, memory & 2);
        if (!s.l.open) {
            check_y(&s.f, &s.l, &want, state, s.a.y, 0);
            check_weights(&s.f, &want, state, &s.l.tol, s.a.attn, s.a.attn_mean, s.a.lse);
        }
        y = copied(s.a.y, s.n_y);
        attn = copied(s.a.attn, s.a.attn ? s.n_attn : 0);
        mean = copied(s.a.attn_mean, s.a.attn_mean ? s.n_mean : 0);
        lse = copied(s.a.lse, s.a.lse ? s.n_lse : 0);
        s.a.parallel = parallel;
        run_layer(&s, memory & 4);
        require_same("y with threads", s.a.y, y, s.n_y);
        if (s.a.attn) require_same("attn with threads", s.a.attn, attn, s.n_attn);
        if (s.a.attn_mean) require_same("attn_mean with threads", s.a.attn_mean, mean, s.n_mean);
        if (s.a.lse) require_same("lse with threads", s.a.lse, lse, s.n_lse);
        if (extra == 1) stages(&s);
        if (extra == 2 && s.f.B) alone_layer(&s, b);
        mha_layer_free(s.l.layer);
        give_back(kept);
    }
    oracle_free(&want);
}

/* ---- caches ------------------------------------------------------------------------------ */

enum { SLOTS = 3, CACHES = 2, TOKENS = 1500 };

/* Every token that was ever appended: what mha.h was given, and the same without poison. */
static struct {
    const float *x, *clean;     /* [d_source] */
    const float *v_x, *v_clean; /* [d_source_v], if values have a source of their own */
    int at;                     /* position for rope */
    char bad;
} token[TOKENS];
static int tokens;

/* What a slot must hold. Of a ring, the tokens from floor on. */
typedef struct line {
    int id[TOKENS], len, floor;
} line;

typedef struct world {
    net l;
    int cross; /* tokens come from source, and queries ask with cache_only */
    mha_cache_config cfg[CACHES];
    mha_cache *cache[CACHES];
    void *memory[CACHES];
    size_t bytes[CACHES];
} world;

static line lines[CACHES][SLOTS];

/* One call of mha_forward or mha_cache_append. */
typedef struct call {
    mha_args a;
    frame f;
    int only, append, cu[SLOTS + 1], n_y;
    float *x, *clean, *v_x, *v_clean; /* [rows, ...] */
    int *at;
    char *bad;
} call;

/* n tokens of width d, N(0,1); a few have a NaN. */
static void pick_tokens(call *k, int n, int d)
{
    k->clean = normal((size_t)(n * d), 1);
    k->x = take_floats((size_t)(n * d));
    if (n) memcpy(k->x, k->clean, (size_t)(n * d) * sizeof(float));
    k->bad = (char *)take((size_t)n);
    memset(k->bad, 0, (size_t)n);
    if (n && chance(6)) {
        const int i = rng_int(&numbers, 0, n - 1);
        k->x[i * d + rng_int(&numbers, 0, d - 1)] = F_NAN;
        k->bad[i] = 1;
        tell("NaN in token", i);
    }
}

/* The keys of a slot from token lo on, as a source. */
static void gather(const world *w, const line *l, int lo, int clean, mha_args *a)
{
    const int n = l->len - lo, Ds = w->l.Ds, Dv = w->l.Dv;
    float *x = (float *)take((size_t)(n * Ds) * sizeof(float));
    float *v = (float *)take((size_t)(w->l.other_v ? n * Dv : 0) * sizeof(float));
    int *at = take_ints((size_t)n);
    for (int j = 0; j < n; j++) {
        const int id = l->id[lo + j];
        memcpy(x + j * Ds, clean ? token[id].clean : token[id].x, (size_t)Ds * sizeof(float));
        if (w->l.other_v)
            memcpy(v + j * Dv, clean ? token[id].v_clean : token[id].v_x,
                   (size_t)Dv * sizeof(float));
        at[j] = token[id].at;
    }
    a->source = x;
    a->source_v = w->l.other_v ? v : NULL;
    a->source_seq = n;
    a->source_positions = at;
}

/* What rounding in a cache can do. A score changes by at most e = scale |q| |dk|, where |dk| is
   2^-11 |k| in f16, 2^-8 |k| in bf16, and sqrt(d) max|k| / 254 in int8; so a weight changes by a
   factor of at most exp(2e), and o by 2 (exp(2e) - 1) v_max + max|dv|, v_max being that of all that
   a row sees. Returns the latter. */
static double rounding(const world *w, const mha_args *a, mha_type type, double v_max,
                       tolerances *tol)
{
    const net *l = &w->l;
    const int T = a->seq, S = a->source_seq;
    float *q = (float *)take((size_t)(T * l->H * l->dk) * sizeof(float));
    float *k = (float *)take((size_t)(S * l->G * l->dk) * sizeof(float));
    float *v = (float *)take((size_t)(S * l->G * l->dv) * sizeof(float));
    const double unit = type == MHA_F16 ? 1.0 / 2048 : type == MHA_BF16 ? 1.0 / 256 : 1.0 / 254;
    double q_most = 0, k_most = 0, v_most = 0, e;
    if (type == MHA_F32) return 0;
    require_status("mha_project_qkv", mha_project_qkv(l->layer, a, q, k, v), MHA_OK);
    for (int i = 0; i < T * l->H; i++) q_most = fmax(q_most, norm_of(q + i * l->dk, l->dk));
    for (int i = 0; i < S * l->G; i++) k_most = fmax(k_most, norm_of(k + i * l->dk, l->dk));
    for (int i = 0; i < S * l->G * l->dv; i++) v_most = fmax(v_most, fabs((double)v[i]));
    e = fabs((double)mha_layer_config(l->layer)->scale) * q_most * k_most * unit;
    if (type == MHA_INT8) e *= sqrt((double)l->dk);
    tol->attn_more = exp(2 * e) - 1;
    tol->lse_more = e;
    return 2 * tol->attn_more * v_max + unit * v_most;
}

/* Slot b of a call that was done, again: all its tokens in one call, without a cache or in a new
   one, has the same bits; and the oracle agrees. */
static void check_slot(world *w, int c, call *k, int b)
{
    const net *l = &w->l;
    const frame *f = &k->f;
    const line *s = &lines[c][b];
    const mha_type type = w->cfg[c].type;
    const int n = q_len(f, b), S = s->len, H = l->H, D = l->D, first = k->cu[b];
    float *y = (float *)take((size_t)(n * D) * sizeof(float));
    float *attn = (float *)take((size_t)(H * n) * (size_t)S * sizeof(float));
    float *mean = (float *)take((size_t)n * (size_t)S * sizeof(float));
    float *lse = (float *)take((size_t)(H * n) * sizeof(float)), *part;
    unsigned char *state = (unsigned char *)take((size_t)(H * n));
    char *bad = (char *)take((size_t)S);
    mha_cache *fresh = NULL;
    mha_args a, o;
    frame one;
    oracle_result want;
    net checked = *l;
    double more;
    int lo = 0;

    memset(&a, 0, sizeof a);
    a.batch = 1;
    gather(w, s, 0, 0, &a);
    if (type != MHA_F32 || chance(50)) {
        mha_cache_config cfg = w->cfg[c];
        mha_args before = a;
        cfg.batch = 1, cfg.ring = 0, cfg.capacity = S ? S : 1;
        require_status("mha_cache_create", mha_cache_create(&fresh, l->layer, &cfg), MHA_OK);
        before.cache = fresh;
        before.source_seq = k->only ? S : S - n;
        require_status("mha_cache_append", mha_cache_append(l->layer, &before), MHA_OK);
        a.source = a.source_v = NULL;
        a.source_positions = NULL;
        a.source_seq = 0;
        a.cache = fresh;
        a.cache_only = k->only;
    }
    a.seq = n;
    a.x = k->x + first * D;
    a.positions = k->at + first;
    a.y = y;
    a.mask = mask_alone(&k->a.mask, f->S, b, S, 0);
    a.gate = gate_alone(f, b, &a.gate_stride);
    if (k->a.attn) a.attn = attn;
    if (k->a.attn_mean) a.attn_mean = mean;
    if (k->a.lse) a.lse = lse;
    require_status("mha_forward, one slot", mha_forward(l->layer, &a), MHA_OK);
    mha_cache_free(fresh);
    require_same("y of a cache and of one call", k->a.y + first * D, y, (size_t)(n * D));
    for (int i = 0; i < n; i++) {
        for (int h = 0; h < H; h++) {
            const size_t row = q_row(f, b, h, i);
            if (a.lse) require_same("lse of a cache", k->a.lse + row, lse + h * n + i, 1);
            if (!a.attn) continue;
            require_same("attn of a cache", k->a.attn + row * (size_t)f->S, attn + (h * n + i) * S,
                         (size_t)S);
            for (int j = S; j < f->S; j++)
                require_zero("attn past the end", row, k->a.attn[row * (size_t)f->S + (size_t)j]);
        }
        if (a.attn_mean)
            require_same("attn_mean of a cache", k->a.attn_mean + q_token(f, b, i) * f->S,
                         mean + i * S, (size_t)S);
    }
    if (l->open) return;

    /* of a ring, only what the window can see goes to the oracle */
    if (w->cfg[c].ring && S - n - a.mask.left > 0) lo = S - n - a.mask.left;
    memset(&o, 0, sizeof o);
    o = a;
    o.cache = NULL, o.cache_only = 0;
    gather(w, s, lo, 1, &o);
    o.x = k->clean + first * D;
    o.mask = mask_alone(&k->a.mask, f->S, b, S, lo);
    want = oracle_forward(&l->cfg, &l->w, &o);
    memset(&one, 0, sizeof one);
    one.B = 1, one.H = H, one.T = n, one.S = S - lo;
    one.mask = &o.mask;
    one.gate = o.gate, one.gate_stride = o.gate_stride;
    one.asked = f->asked;
    one.far = f->far;
    for (int j = lo; j < S; j++) bad[j - lo] = token[s->id[j]].bad;
    for (int h = 0; h < H; h++)
        for (int i = 0; i < n; i++)
            state[h * n + i] = (unsigned char)row_state(&one, l, 0, h, i, k->bad[first + i], bad);
    part = (float *)take((size_t)(H * n) * (size_t)(S - lo) * sizeof(float));
    for (int i = 0; i < H * n && a.attn; i++)
        memcpy(part + i * (S - lo), attn + i * S + lo, (size_t)(S - lo) * sizeof(float));
    checked.terms = value_terms(l, o.source_v ? o.source_v : o.source, S - lo);
    more = rounding(w, &o, type, want.v_max, &checked.tol);
    check_y(&one, &checked, &want, state, y, more);
    check_weights(&one, &want, state, &checked.tol, a.attn ? part : NULL, NULL, a.lse ? lse : NULL);
    oracle_free(&want);
}

/* What mha.h must say of the call: 1 yes, 0 no, -1 either (a ring may hold more than it must). */
static int allowed(const world *w, int c, const call *k, const int *count)
{
    const mha_cache_config *cfg = &w->cfg[c];
    const mha_mask *m = &k->a.mask;
    int yes = 1;
    if (cfg->ring && !k->append && (!m->windowed || m->left < 0)) return 0;
    for (int b = 0; b < cfg->batch; b++) {
        const line *s = &lines[c][b];
        if (!cfg->ring && !k->only && s->len + count[b] > cfg->capacity) return 0;
        if (!cfg->ring || count[b] == 0) continue;
        if (count[b] > cfg->capacity) return 0;
        if (k->append) continue;
        if (m->left > cfg->capacity - count[b]) return 0;
        /* after a cut back: what the window sees may be gone */
        if (s->len - (k->only ? count[b] : 0) - m->left < s->floor && s->floor > 0) yes = -1;
    }
    return yes;
}

static void cache_call(world *w, int c, int most)
{
    net *l = &w->l;
    const mha_cache_config *cfg = &w->cfg[c];
    const int B = cfg->batch, ragged = chance(50), kept = n_blocks;
    const int width = w->cross ? l->Ds : l->D;
    int count[SLOTS], rows, longest = 0, top = 0, want, keep = 0;
    int *cu_k = take_ints((size_t)B + 1);
    char *before;
    lanes threads;
    mha_status st, checked;
    call k;
    frame *f = &k.f;
    memset(&k, 0, sizeof k);
    k.append = w->cross ? chance(50) : chance(25);
    k.only = !k.append && (w->cross || chance(20));
    count[0] = pick(0, k.append && chance(50) ? cfg->capacity : most);
    for (int b = 1; b < B; b++) count[b] = ragged ? pick(0, most) : count[0];
    cu_k[0] = 0;
    for (int b = 0; b < B; b++) {
        const int len = lines[c][b].len + (k.only ? 0 : count[b]);
        k.cu[b + 1] = k.cu[b] + count[b];
        cu_k[b + 1] = cu_k[b] + len;
        if (len > longest) longest = len;
        if (count[b] > top) top = count[b];
    }
    rows = k.cu[B];
    if (tokens + rows > TOKENS || longest > TOKENS / 2) return;
    tell("\n  call", c), tell("only", k.only), tell("append", k.append), tell("rows", rows);
    f->B = B, f->H = l->H, f->T = top, f->S = longest;
    if (ragged) f->cu_q = k.cu;
    f->cu_k = cu_k;
    pick_tokens(&k, rows, k.append ? width : l->D);
    if (k.append && l->other_v) {
        k.v_x = k.v_clean = normal((size_t)(rows * l->Dv), 1);
        k.a.source_v = k.v_x;
    }
    k.at = pick_positions(l, rows);
    k.a.batch = B;
    k.a.cache = w->cache[c];
    if (k.append && (w->cross || chance(30))) { /* as a source, or as x */
        k.a.source = k.x;
        k.a.source_seq = ragged ? 0 : top;
        k.a.cu_source = f->cu_q;
        k.a.source_positions = k.at;
    } else {
        k.a.x = k.x;
        k.a.seq = ragged ? 0 : top;
        k.a.cu_seq = f->cu_q;
        k.a.positions = k.at;
    }
    if (!k.at) {
        k.at = take_ints((size_t)rows);
        for (int b = 0; b < B; b++)
            for (int i = 0; i < count[b]; i++) k.at[k.cu[b] + i] = k.only ? i : lines[c][b].len + i;
    }
    if (chance(40)) k.a.parallel = pick_parallel(&threads);
    if (!k.append) {
        k.n_y = rows * l->D;
        k.a.y = take_floats((size_t)k.n_y);
        k.a.cache_only = k.only;
        pick_mask(f, &k.a.mask, 1, &l->tol.sized);
        if (cfg->ring && !chance(5)) {
            k.a.mask.windowed = 1;
            k.a.mask.left = chance(10) ? pick(0, 300)
                                       : pick(0, cfg->capacity - top < 0 ? 0 : cfg->capacity - top);
            tell("ring left", k.a.mask.left);
        }
        k.a.gate = pick_gate(f, &k.a.gate_stride);
        if (chance(20)) k.a.attn = take_floats((size_t)(rows * l->H) * (size_t)longest);
        if (chance(15)) k.a.attn_mean = take_floats((size_t)rows * (size_t)longest);
        if (chance(20)) k.a.lse = take_floats((size_t)(rows * l->H));
        f->asked = k.a.attn || k.a.attn_mean || k.a.lse;
        if (chance(30)) poison_bias(f);
    }
    want = allowed(w, c, &k, count);
    before = (char *)take(w->bytes[c]);
    memcpy(before, w->memory[c], w->bytes[c]);
    if (chance(10)) { /* no memory: nothing changes */
        test_fail_after = 0;
        st = k.append ? mha_cache_append(l->layer, &k.a) : mha_forward(l->layer, &k.a);
        test_fail_after = -1;
        require(st != MHA_OK || rows == 0, "a call without memory");
        require(memcmp(before, w->memory[c], w->bytes[c]) == 0, "a cache changed without memory");
        require_untouched("y without memory", k.a.y, (size_t)k.n_y * sizeof(float));
    }
    if (chance(50)) {
        size_t bytes = 0;
        if (mha_workspace_size(l->layer, &k.a, &bytes) == MHA_OK) {
            k.a.workspace = take_workspace(bytes);
            st = k.append ? mha_cache_append(l->layer, &k.a) : mha_forward(l->layer, &k.a);
            require(st != MHA_OK, "a call without a byte of workspace");
            require(memcmp(before, w->memory[c], w->bytes[c]) == 0, "a cache changed without room");
            k.a.workspace_size = bytes;
        }
    }
    if (k.append) checked = mha_cache_append_check(l->layer, &k.a, NULL, 0);
    else checked = mha_forward_check(l->layer, &k.a, NULL, 0);
    st = k.append ? mha_cache_append(l->layer, &k.a) : mha_forward(l->layer, &k.a);
    require_status("a call and its check", st, checked);
    if (want == 1) require_status("a call of a cache", st, MHA_OK);
    if (want == 0) require(st != MHA_OK, "a call of a cache that must be refused");
    if (st != MHA_OK || k.only)
        require(memcmp(before, w->memory[c], w->bytes[c]) == 0, "a cache changed that must not");
    if (st != MHA_OK) {
        require_untouched("y although refused", k.a.y, (size_t)k.n_y * sizeof(float));
    } else {
        for (int b = 0; b < B && !k.only; b++) {
            line *s = &lines[c][b];
            if (count[b] && s->floor > s->len) s->floor = s->len;
            for (int i = k.cu[b]; i < k.cu[b + 1]; i++) {
                token[tokens].x = k.x + i * width;
                token[tokens].clean = k.clean + i * width;
                token[tokens].v_x = token[tokens].v_clean = k.v_x ? k.v_x + i * l->Dv : NULL;
                token[tokens].at = k.at[i];
                token[tokens].bad = k.bad[i];
                s->id[s->len++] = tokens++;
                keep = 1;
            }
            if (cfg->ring && s->floor < s->len - cfg->capacity) s->floor = s->len - cfg->capacity;
        }
        for (int b = 0; b < B && !k.append; b++)
            if (count[b] && !chance(40)) check_slot(w, c, &k, b);
    }
    if (!keep) give_back(kept);
}

/* A slot of a ring that is about to go round, or just did: its places are blocks of 256. */
static void advance(world *w, int c, int b)
{
    const net *l = &w->l;
    const int B = w->cfg[c].batch, to = 256 + pick(-8, 8);
    const int step = w->cfg[c].capacity < 32 ? w->cfg[c].capacity : 32;
    int *cu = take_ints((size_t)B + 1);
    mha_args a;
    call k; /* the same few tokens again and again */
    memset(&k, 0, sizeof k);
    memset(&a, 0, sizeof a);
    pick_tokens(&k, step, l->Ds);
    if (l->other_v) a.source_v = normal((size_t)(step * l->Dv), 1);
    a.batch = B;
    a.source = k.x;
    a.cu_source = cu;
    a.cache = w->cache[c];
    for (line *s = &lines[c][b]; s->len < to;) {
        const int n = to - s->len < step ? to - s->len : step;
        for (int i = 0; i <= B; i++) cu[i] = i > b ? n : 0;
        require_status("mha_cache_append", mha_cache_append(l->layer, &a), MHA_OK);
        for (int i = 0; i < n; i++) {
            token[tokens].x = k.x + i * l->Ds;
            token[tokens].clean = k.clean + i * l->Ds;
            token[tokens].v_x = token[tokens].v_clean = a.source_v ? a.source_v + i * l->Dv : NULL;
            token[tokens].at = s->len;
            token[tokens].bad = k.bad[i];
            s->id[s->len++] = tokens++;
        }
        if (s->floor < s->len - w->cfg[c].capacity) s->floor = s->len - w->cfg[c].capacity;
    }
    tell("\n  advanced", b);
}

/* Things done to slots, with arguments that may be wrong. */
static void cache_change(world *w, int c)
{
    const mha_cache_config *cfg = &w->cfg[c];
    const int B = cfg->batch, what = pick(0, 4), b = pick(-2, B);
    const int in = b >= 0 && b < B;
    line *l = lines[c];
    mha_status st;
    if (what < 3) { /* cut back */
        const int len = what == 0 ? (in ? l[b].len : 0) - pick(-1, 6) : what == 1 ? pick(0, 30) : 0;
        int ok = b >= -1 && b < B && len >= 0;
        for (int s = 0; s < B; s++)
            if ((b == -1 || b == s) && len > l[s].len) ok = 0;
        st = len == 0 && chance(50) ? mha_cache_reset(w->cache[c], b)
                                    : mha_cache_truncate(w->cache[c], b, len);
        tell("\n  cut", b), tell("to", len);
        require((st == MHA_OK) == ok, "mha_cache_truncate");
        for (int s = 0; s < B && ok; s++)
            if (b == -1 || b == s) {
                l[s].len = len;
                if (len == 0) l[s].floor = 0;
            }
    } else if (what == 3) {
        const int from = pick(0, CACHES - 1), s = pick(-1, w->cfg[from].batch);
        const int in_from = s >= 0 && s < w->cfg[from].batch;
        const line *other = in_from ? &lines[from][s] : l;
        const int len = chance(40) ? pick(-2, 30) : -1, all = len == -1 ? other->len : len;
        const int ok = in && in_from && all >= 0 && all <= other->len &&
                       (cfg->ring ? all == other->len : all <= cfg->capacity);
        tell("\n  fork to", b), tell("from", s), tell("of", from), tell("length", len);
        st = mha_cache_fork(w->cache[c], b, w->cache[from], s, len);
        require((st == MHA_OK) == ok, "mha_cache_fork");
        if (ok) {
            memmove(l[b].id, other->id, (size_t)all * sizeof(int));
            l[b].floor = all ? other->floor : 0;
            l[b].len = all;
        }
    } else {
        static line old[SLOTS];
        int *order = take_ints((size_t)B), ok = 1;
        for (int s = 0; s < B; s++) {
            order[s] = chance(3) ? pick(-1, B) : pick(0, B - 1);
            if (order[s] < 0 || order[s] >= B) ok = 0;
            old[s].len = l[s].len, old[s].floor = l[s].floor;
            memcpy(old[s].id, l[s].id, (size_t)l[s].len * sizeof(int));
            tell(s ? "" : "\n  order", order[s]);
        }
        st = mha_cache_reorder(w->cache[c], order);
        require((st == MHA_OK) == ok, "mha_cache_reorder");
        for (int s = 0; s < B && ok; s++) {
            const line *from = &old[order[s]];
            l[s].len = from->len, l[s].floor = from->floor;
            memcpy(l[s].id, from->id, (size_t)from->len * sizeof(int));
        }
    }
}

static void fuzz_cache(void)
{
    static world w;
    mha_isa isa[8];
    mha_cache_facts facts;
    mha_cache_config cfg;
    const int isas = test_isas(isa), ops = pick(1, 6);
    int most = pick(1, 5);
    memset(&w, 0, sizeof w);
    memset(&cfg, 0, sizeof cfg);
    tokens = 0;
    w.cross = chance(20);
    draw_net(&w.l, w.cross);
    make_layer(&w.l, isa[pick(0, isas - 1)], chance(30));
    tell("isa", w.l.cfg.isa);
    cfg.batch = pick(1, SLOTS);
    cfg.ring = chance(40);
    cfg.type = (mha_type)pick(0, 3);
    cfg.capacity = chance(12) && w.l.D <= 20 ? pick(240, 300) : pick(1, 24);
    if (chance(6) && w.l.D <= 20) most = 40;
    for (int c = 0; c < CACHES; c++) {
        if (c && !cfg.ring) cfg.capacity += pick(0, 3);
        w.cfg[c] = cfg;
        tell("capacity", cfg.capacity);
        require_status("mha_cache_size", mha_cache_size(w.l.layer, &cfg, &w.bytes[c]), MHA_OK);
        w.memory[c] = take_workspace(w.bytes[c]);
        require_status("mha_cache_init",
                       mha_cache_init(&w.cache[c], w.memory[c], w.bytes[c], w.l.layer, &cfg),
                       MHA_OK);
        for (int b = 0; b < SLOTS; b++) lines[c][b].len = lines[c][b].floor = 0;
    }
    tell("batch", cfg.batch), tell("ring", cfg.ring), tell("type", cfg.type);
    if (cfg.ring && cfg.capacity > 1 && chance(40)) advance(&w, 0, pick(0, cfg.batch - 1));
    for (int i = 0; i < ops && (input_left || i < 2); i++) {
        const int c = pick(0, 3) == 3;
        if (pick(0, 9) < 7) cache_call(&w, c, most);
        else cache_change(&w, c);
        for (int b = 0; b < cfg.batch; b++)
            require(mha_cache_length(w.cache[c], b) == lines[c][b].len, "mha_cache_length");
        require_status("mha_cache_info", mha_cache_info(w.cache[c], &facts), MHA_OK);
        require(facts.capacity == w.cfg[c].capacity && facts.type == cfg.type &&
                    facts.d_v == w.l.dv && facts.bytes <= w.bytes[c],
                "mha_cache_info");
    }
    for (int c = 0; c < CACHES; c++) mha_cache_free(w.cache[c]);
    mha_layer_free(w.l.layer);
}

/* ---- arguments that must be refused -------------------------------------------------------- */

static int bad_int(void)
{
    static const int n[] = { -1,    INT_MIN, INT_MAX,         0, 1,      2,
                             65536, 46341,   INT_MAX / 2 + 1, 3, 1 << 24 };
    return n[pick(0, 10)];
}

static float bad_float(void)
{
    static const uint32_t bits[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u,
                                     0xbf800000u, 0x7f7fffffu, 1u,
                                     0x80000000u, 0x3f000000u, 0x7149f2cau };
    return f_bits(bits[pick(0, 8)]);
}

/* Null, or one byte off. */
static void *bad_pointer(const void *p)
{
    return chance(50) ? NULL : (void *)((uintptr_t)p + (uintptr_t)pick(1, 3));
}

static void no_tasks(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx, (void)n, (void)task, (void)arg;
    wrong("parallel_for in a call that was refused", 0, 0, 0);
}

/* What the two kinds of arguments share; 1 if it was changed. */
static int spoil_common(int what, mha_mask *m, mha_parallel *p, int B, const int **cu)
{
    int *v = take_ints((size_t)B + 1);
    for (int b = 0; b <= B; b++) v[b] = chance(50) ? bad_int() : 0;
    switch (what) {
    case 0: m->causal = (mha_causal)bad_int(); return 1;
    case 1: m->windowed = bad_int(); return 1;
    case 2: m->left = bad_int(); return 1;
    case 3: m->right = bad_int(); return 1;
    case 4: m->key_len = v; return 1;
    case 5: m->key_start = v; return 1;
    case 6: m->key_len = (int *)bad_pointer(v); return 1;
    case 7: m->bias = (float *)bad_pointer(v); return 1;
    case 8: *cu = v; return 1;
    case 9: v[0] = 0, *cu = v; return 1;
    case 10: *cu = (int *)bad_pointer(v); return 1;
    case 11: p->threads = bad_int(); return 1;
    case 12: p->parallel_for = no_tasks, p->threads = bad_int(); return 1;
    case 13: m->key_start = (int *)bad_pointer(v); return 1;
    default: return 0;
    }
}

/* What the manual forbids, said once more: 1 if these are surely wrong. */
static int off(const void *p)
{
    return (uintptr_t)p % sizeof(float) != 0;
}

static int outside(int n, int lo, int hi)
{
    return n < lo || n > hi;
}

static int forbidden_cu(const int *cu, int B)
{
    if (!cu || B < 0) return 0;
    if (off(cu) || cu[0] != 0) return 1;
    for (int b = 0; b < B; b++)
        if (cu[b + 1] < cu[b]) return 1;
    return 0;
}

/* S: how many keys there are, or INT_MAX. */
static int forbidden_common(const mha_mask *m, const mha_parallel *p, const float *gate, int B,
                            int S)
{
    if (outside((int)m->causal, 0, 2) || outside(m->windowed, 0, 1)) return 1;
    if (m->left < -1 || m->right < -1 || (!m->windowed && (m->left || m->right))) return 1;
    if (off(m->bias) || off(m->key_len) || off(m->key_start) || off(gate)) return 1;
    for (int b = 0; m->key_len && b < B; b++)
        if (outside(m->key_len[b], 0, S)) return 1;
    for (int b = 0; m->key_start && b < B; b++)
        if (outside(m->key_start[b], 0, S)) return 1;
    return p->parallel_for ? p->threads < 1 : outside(p->threads, 0, 1);
}

static int forbidden_sdpa(const mha_sdpa_args *a)
{
    const int some = a->batch > 0 && !a->cu_seq && a->seq > 0;
    if (a->batch < 0 || a->seq < 0 || a->source_seq < 0 || a->heads < 1 || a->kv_heads < 0)
        return 1;
    if ((a->kv_heads && a->heads % a->kv_heads) || a->d_k < 1 || a->d_v < 0) return 1;
    if (!is_finite(a->scale) || !is_finite(a->softcap) || a->softcap < 0) return 1;
    if (outside((int)a->isa, 0, 4) || !mha_isa_available(a->isa)) return 1;
    if (off(a->alibi) || off(a->sink) || off(a->sink_value) || (a->sink_value && !a->sink))
        return 1;
    if (forbidden_cu(a->cu_seq, a->batch) || forbidden_cu(a->cu_source, a->batch)) return 1;
    if (some && (!a->q || off(a->q) || !a->o || off(a->o))) return 1;
    if (a->batch > 0 && !a->cu_source && a->source_seq > 0 && (!a->k || off(a->k) || !a->v))
        return 1;
    if (some && (off(a->lse) || (a->o == a->q && (a->attn || a->attn_mean)))) return 1;
    if (!a->workspace && a->workspace_size) return 1;
    return forbidden_common(&a->mask, &a->parallel, a->gate, a->batch,
                            a->cu_source ? INT_MAX : a->source_seq);
}

static int forbidden_forward(const mha_args *a)
{
    const int some = a->batch > 0 && !a->cu_seq && a->seq > 0;
    if (a->batch < 0 || a->seq < 0 || a->source_seq < 0 || outside(a->cache_only, 0, 1)) return 1;
    if (forbidden_cu(a->cu_seq, a->batch) || forbidden_cu(a->cu_source, a->batch)) return 1;
    if (off(a->positions) || off(a->source_positions) || (a->cache_only && !a->cache)) return 1;
    if ((a->cache && a->source) || (!a->source && (a->source_v || a->cu_source))) return 1;
    if (a->cache && (a->mask.key_len || a->mask.causal == MHA_CAUSAL_UPPER_LEFT)) return 1;
    if (some && (!a->x || off(a->x) || !a->y || off(a->y) || off(a->lse))) return 1;
    if (some && !a->source && !a->cache && a->source_seq && a->source_seq != a->seq) return 1;
    if (a->batch > 0 && a->source && !a->cu_source && a->source_seq > 0 && off(a->source)) return 1;
    if (!a->workspace && a->workspace_size) return 1;
    return forbidden_common(&a->mask, &a->parallel, a->gate, a->batch,
                            a->cu_source || a->cu_seq || a->cache ? INT_MAX
                            : a->source                           ? a->source_seq
                                                                  : a->seq);
}

/* A cache of another shape, or without room for n more tokens of each sequence, or as cu says. */
static int forbidden_cache(const net *l, const mha_args *a, const int *cu, int n)
{
    mha_cache_facts f;
    require_status("mha_cache_info", mha_cache_info(a->cache, &f), MHA_OK);
    if (a->batch != f.batch || l->G != f.n_kv_heads || l->dk != f.d_k || l->dv != f.d_v) return 1;
    for (int b = 0; b < f.batch; b++) {
        const int room = f.ring ? f.capacity : f.capacity - mha_cache_length(a->cache, b);
        if ((cu ? cu[b + 1] - cu[b] : n) > room) return 1;
    }
    return 0;
}

/* The stages are mha_forward without what they do not use. */
static int forbidden_project(const mha_args *a, const float *q, const float *k, const float *v)
{
    const int *cu = a->source ? a->cu_source : a->cu_seq;
    mha_args b = *a;
    memset(&b.mask, 0, sizeof b.mask);
    b.gate = b.lse = NULL;
    b.cache_only = 0;
    b.y = (float *)(uintptr_t)a->x;
    if (a->cache || forbidden_forward(&b)) return 1;
    if (a->batch && !a->cu_seq && a->seq && off(q)) return 1;
    return a->batch && !cu && (a->source ? a->source_seq : a->seq) && (off(k) || off(v));
}

static int forbidden_out(const mha_args *a, const float *o)
{
    mha_args b;
    memset(&b, 0, sizeof b);
    b.batch = a->batch, b.seq = a->seq, b.cu_seq = a->cu_seq;
    b.x = b.y = a->y;
    b.workspace = a->workspace, b.workspace_size = a->workspace_size;
    b.parallel = a->parallel;
    return forbidden_forward(&b) || (a->batch && !a->cu_seq && a->seq && (!o || off(o)));
}

static int forbidden_append(const net *l, const mha_args *a)
{
    mha_args b;
    memset(&b, 0, sizeof b);
    b.batch = a->batch;
    b.seq = a->source ? a->source_seq : a->seq;
    b.cu_seq = a->source ? a->cu_source : a->cu_seq;
    b.x = a->source ? a->source : a->x;
    b.y = (float *)(uintptr_t)b.x;
    b.positions = a->source ? a->source_positions : a->positions;
    b.workspace = a->workspace, b.workspace_size = a->workspace_size;
    b.parallel = a->parallel;
    if (!a->cache || (!a->source && (a->source_v || a->cu_source))) return 1;
    if (a->source && !a->cu_source && !a->source_seq && a->seq) return 1;
    return forbidden_forward(&b) || forbidden_cache(l, a, b.cu_seq, b.seq);
}

static int forbidden_number(float x, float lo)
{
    return !is_finite(x) || ((bits_f(x) << 1) && x < lo);
}

static int forbidden_layer(const mha_config *c, const mha_weights *w)
{
    const mha_rope *r = &c->rope;
    if (c->d_model < 1 || c->n_heads < 1 || c->n_kv_heads < 0 || c->d_k < 0 || c->d_v < 0) return 1;
    if (c->d_source < 0 || c->d_source_v < 0 || (!c->d_k && c->d_model % c->n_heads)) return 1;
    if (c->n_kv_heads && c->n_heads % c->n_kv_heads) return 1;
    if (!is_finite(c->scale) || forbidden_number(c->softcap, 0) || forbidden_number(c->norm_eps, 0))
        return 1;
    if (outside((int)c->isa, 0, 4) || !mha_isa_available(c->isa)) return 1;
    if (outside(c->alibi, 0, 1) || outside(c->zero_attn, 0, 1) || outside((int)c->qk_norm, 0, 2))
        return 1;
    if (outside((int)c->weight_type, 0, 3) || outside((int)w->layout, 0, 1)) return 1;
    if (outside((int)r->layout, 0, 2) || outside((int)r->scaling, 0, 4)) return 1;
    if (!r->layout && (r->width || r->scaling || r->original)) return 1;
    if (r->layout && (r->width < 0 || r->width % 2 || r->original < 0)) return 1;
    if (r->layout && (forbidden_number(r->base, 1) || forbidden_number(r->factor, 1))) return 1;
    if (r->layout && r->scaling && r->factor == 0) return 1;
    if (r->layout && (forbidden_number(r->beta_fast, 0) || forbidden_number(r->attention, 0) ||
                      forbidden_number(r->low_freq, 0)))
        return 1;
    if (!w->out || off(w->out) || (w->qkv ? w->q || w->k || w->v : !w->q || !w->k || !w->v))
        return 1;
    if (w->b_qkv && (w->b_q || w->b_k || w->b_v)) return 1;
    if (off(w->qkv) || off(w->q) || off(w->k) || off(w->v) || off(w->b_qkv) || off(w->b_q))
        return 1;
    if (off(w->alibi) || off(w->sink) || off(w->sink_value) || off(w->q_norm) || off(w->bias_k))
        return 1;
    if ((w->alibi && !c->alibi) || (w->sink_value && !w->sink)) return 1;
    if ((w->q_norm || w->k_norm) && !c->qk_norm) return 1;
    if ((w->q_norm_bias || w->k_norm_bias) && c->qk_norm != MHA_NORM_LAYER) return 1;
    return !w->bias_k != !w->bias_v;
}

/* A reason for every error and for nothing else, in a buffer of any size. */
static void check_why(mha_status st, const char *why, size_t size)
{
    if (size == 0) return;
    require(memchr(why, 0, size) != NULL, "a reason that does not end");
    require((st == MHA_OK || size < 2) == (why[0] == 0), "a reason, or none");
    require(mha_strerror(st)[0] != 0, "mha_strerror");
}

static void refuse_sdpa(void)
{
    sdpa_case s;
    mha_sdpa_args a;
    mha_status st, sized;
    size_t bytes = 0, why_size = (size_t)pick(0, 90);
    char *why = (char *)take(why_size);
    int changes = pick(1, 3), B;
    draw_sdpa(&s);
    a = s.a;
    B = a.batch;
    for (; changes > 0; changes--) {
        const int what = pick(0, 37);
        if (spoil_common(what - 24, &a.mask, &a.parallel, B, chance(50) ? &a.cu_seq : &a.cu_source))
            continue;
        switch (what) {
        case 0: a.batch = bad_int(); break;
        case 1: a.heads = bad_int(); break;
        case 2: a.kv_heads = bad_int(); break;
        case 3: a.seq = bad_int(); break;
        case 4: a.source_seq = bad_int(); break;
        case 5: a.d_k = bad_int(); break;
        case 6: a.d_v = bad_int(); break;
        case 7: a.scale = bad_float(); break;
        case 8: a.softcap = bad_float(); break;
        case 9: a.isa = (mha_isa)bad_int(); break;
        case 10: a.q = (float *)bad_pointer(a.q); break;
        case 11: a.k = (float *)bad_pointer(a.k); break;
        case 12: a.v = (float *)bad_pointer(a.v); break;
        case 13: a.o = (float *)bad_pointer(a.o); break;
        case 14: a.attn = (float *)bad_pointer(a.attn); break;
        case 15: a.attn_mean = (float *)bad_pointer(a.attn_mean); break;
        case 16: a.lse = (float *)bad_pointer(a.lse); break;
        case 17: a.alibi = (float *)bad_pointer(a.alibi); break;
        case 18: a.sink = (float *)bad_pointer(a.sink); break;
        case 19: a.sink_value = (float *)bad_pointer(a.sink_value); break;
        case 20: a.gate = (float *)bad_pointer(a.gate); break;
        case 21: a.workspace = s.qd, a.workspace_size = (size_t)pick(0, 1); break;
        case 22: a.workspace = NULL, a.workspace_size = (size_t)bad_int(); break;
        default: a.o = s.qd + s.q.origin; break;
        }
    }
    if (a.batch > B) a.cu_seq = a.cu_source = a.mask.key_len = a.mask.key_start = NULL;
    st = mha_sdpa_check(&a, why_size ? why : NULL, why_size);
    check_why(st, why, why_size);
    require(st != MHA_OK || !forbidden_sdpa(&a), "mha_sdpa_check lets it pass");
    sized = mha_sdpa_workspace_size(&a, &bytes);
    require(sized == MHA_OK || st != MHA_OK, "a call that is fine, but has no size");
    require(sized == MHA_OK || bytes == 0, "a size in spite of an error");
    tell("status", st);
    /* what is fine after all might need more memory than there is */
    if (st == MHA_OK && a.batch && (a.cu_seq ? a.cu_seq[a.batch] : a.seq)) return;
    require_status("mha_sdpa and its check", mha_sdpa(&a), st);
    require_untouched("o although refused", s.od, s.o.n * sizeof(float));
    require_untouched("attn although refused", s.a.attn, s.n_attn * sizeof(float));
    require_untouched("attn_mean although refused", s.a.attn_mean, s.n_mean * sizeof(float));
    require_untouched("lse although refused", s.a.lse, s.n_lse * sizeof(float));
}

/* A cache for a layer with one more head, or one wider: it fits no other. */
static mha_cache *foreign_cache(const net *l, int batch)
{
    const int which = pick(0, 2);
    const int G = l->G + (which == 0), dk = l->dk + (which == 1), dv = l->dv + (which == 2);
    mha_layer *layer = NULL;
    mha_cache *cache = NULL;
    mha_cache_config cfg;
    mha_config c;
    mha_weights w;
    memset(&c, 0, sizeof c), memset(&w, 0, sizeof w), memset(&cfg, 0, sizeof cfg);
    c.d_model = 1, c.n_heads = G, c.d_k = dk, c.d_v = dv;
    w.qkv = normal((size_t)(G * (2 * dk + dv)), 1);
    w.out = normal((size_t)(G * dv), 1);
    cfg.batch = batch, cfg.capacity = 40;
    require_status("mha_layer_create", mha_layer_create(&layer, &c, &w), MHA_OK);
    require_status("mha_cache_create", mha_cache_create(&cache, layer, &cfg), MHA_OK);
    mha_layer_free(layer);
    return cache;
}

/* n tokens for each sequence. */
static void fill_cache(const net *l, mha_cache *cache, int batch, int n)
{
    mha_args a;
    memset(&a, 0, sizeof a);
    a.batch = batch, a.source_seq = n, a.cache = cache;
    a.source = normal((size_t)(batch * n * l->Ds), 1);
    if (l->other_v) a.source_v = normal((size_t)(batch * n * l->Dv), 1);
    require_status("mha_cache_append", mha_cache_append(l->layer, &a), MHA_OK);
}

/* Fine, or it would be if there were memory. */
static int lets_pass(mha_status st)
{
    require((unsigned)st <= MHA_ERR_FULL && mha_strerror(st)[0] != 0, "mha_strerror");
    return st == MHA_OK || st == MHA_ERR_MEMORY;
}

/* The other functions that take mha_args, while there is no memory: none may write anything. fine:
   mha_forward has nothing against it. */
static void refuse_stages(const net *l, const mha_args *a, int fine)
{
    float *room = (float *)take(64);
    float *q = chance(15) ? (float *)bad_pointer(room) : room;
    float *k = chance(15) ? (float *)bad_pointer(room) : room + 4;
    float *v = chance(15) ? (float *)bad_pointer(room) : room + 8;
    const float *o = chance(15) ? (float *)bad_pointer(room) : room + 12;
    const mha_layer *layer = chance(3) ? NULL : l->layer;
    mha_args used;
    mha_status st;
    size_t bytes = 0;

    st = mha_project_qkv(layer, a, q, k, v);
    tell("project_qkv", st);
    require(!lets_pass(st) || (layer && !forbidden_project(a, q, k, v)),
            "mha_project_qkv lets it pass");
    if (fine && layer && !a->cache && !off(q) && !off(k) && !off(v))
        require(lets_pass(st), "mha_project_qkv refuses what mha_forward does not");

    st = mha_project_out(layer, a, o);
    tell("project_out", st);
    require(!lets_pass(st) || (layer && !forbidden_out(a, o)), "mha_project_out lets it pass");
    if (fine && layer && o && !off(o))
        require(lets_pass(st), "mha_project_out refuses what mha_forward does not");
    memset(&used, 0, sizeof used);
    used.batch = a->batch, used.seq = a->seq, used.cu_seq = a->cu_seq, used.y = a->y;
    used.workspace = a->workspace, used.workspace_size = a->workspace_size;
    used.parallel = a->parallel;
    require_status("mha_project_out, but for what it uses", mha_project_out(layer, &used, o), st);

    st = mha_cache_append(layer, a);
    tell("append", st);
    require(mha_cache_append_check(layer, a, NULL, 0) == (lets_pass(st) ? MHA_OK : st),
            "mha_cache_append and its check");
    require(!lets_pass(st) || (layer && !forbidden_append(l, a)), "mha_cache_append lets it pass");
    if (fine && layer && a->cache && !a->cache_only)
        require(lets_pass(st), "mha_cache_append refuses what mha_forward does not");
    used = *a;
    memset(&used.mask, 0, sizeof used.mask);
    used.y = used.attn = used.attn_mean = used.lse = NULL;
    used.gate = NULL;
    used.cache_only = 0;
    if (used.source) used.x = NULL, used.cu_seq = NULL;
    if (used.source && used.seq > 0 && (used.cu_source || used.source_seq)) used.seq = 0;
    require_status("mha_cache_append, but for what it uses", mha_cache_append(layer, &used), st);
    if (lets_pass(st))
        require_status("mha_workspace_size", mha_workspace_size(layer, &used, &bytes), MHA_OK);

    require(!lets_pass(mha_project_qkv(layer, NULL, q, k, v)) &&
                !lets_pass(mha_project_out(layer, NULL, o)) &&
                !lets_pass(mha_cache_append(layer, NULL)),
            "no args");
    require_untouched("q, k or v although refused", room, 64);
}

static void refuse_forward(void)
{
    layer_case s;
    mha_args a;
    mha_cache *cache = NULL, *foreign = NULL;
    char *memory = NULL, *before;
    mha_cache_config cfg;
    mha_status st, sized;
    size_t bytes = 0, cache_bytes = 0, why_size = (size_t)pick(0, 90);
    char *why = (char *)take(why_size);
    int changes = pick(1, 3), B, tall;
    memset(&cfg, 0, sizeof cfg);
    draw_layer(&s);
    make_layer(&s.l, MHA_ISA_SCALAR, 0);
    a = s.a;
    B = a.batch;
    for (; changes > 0; changes--) {
        const int what = pick(0, 35);
        if (spoil_common(what - 22, &a.mask, &a.parallel, B, chance(50) ? &a.cu_seq : &a.cu_source))
            continue;
        switch (what) {
        case 0: a.batch = bad_int(); break;
        case 1: a.seq = bad_int(); break;
        case 2: a.source_seq = bad_int(); break;
        case 3: a.x = (float *)bad_pointer(a.x); break;
        case 4: a.y = (float *)bad_pointer(a.y); break;
        case 5: a.source = a.source ? (float *)bad_pointer(a.source) : s.x; break;
        case 6: a.source_v = a.source_v ? (float *)bad_pointer(a.source_v) : s.x; break;
        case 7: a.attn = (float *)bad_pointer(a.attn); break;
        case 8: a.attn_mean = (float *)bad_pointer(a.attn_mean); break;
        case 9: a.lse = (float *)bad_pointer(a.lse); break;
        case 10: a.gate = (float *)bad_pointer(a.gate); break;
        case 11: a.positions = (int *)bad_pointer(a.x); break;
        case 12: a.source_positions = (int *)bad_pointer(a.x); break;
        case 13: a.workspace = s.x, a.workspace_size = (size_t)pick(0, 1); break;
        case 14: a.workspace = NULL, a.workspace_size = (size_t)bad_int(); break;
        case 15: a.cache_only = bad_int(); break;
        default:
            if (!cache) {
                cfg.batch = B && chance(80) ? B : pick(1, 3);
                cfg.capacity = pick(1, 40);
                cfg.ring = chance(30);
                cfg.type = (mha_type)pick(0, 3);
                require_status("mha_cache_size", mha_cache_size(s.l.layer, &cfg, &cache_bytes),
                               MHA_OK);
                memory = (char *)take(cache_bytes);
                require_status("mha_cache_init",
                               mha_cache_init(&cache, memory, cache_bytes, s.l.layer, &cfg),
                               MHA_OK);
            }
            a.cache = cache;
            if (chance(50)) a.source = a.source_v = NULL, a.cu_source = NULL;
            if (chance(50)) a.mask.key_len = NULL, a.mask.causal = MHA_CAUSAL;
        }
    }
    if (a.batch > B) a.cu_seq = a.cu_source = a.mask.key_len = a.mask.key_start = NULL;
    if (cache && chance(40)) fill_cache(&s.l, cache, cfg.batch, pick(0, cfg.capacity));
    if (cache && chance(10)) a.cache = foreign = foreign_cache(&s.l, cfg.batch);
    before = (char *)take(cache_bytes);
    if (cache) memcpy(before, memory, cache_bytes);
    st = mha_forward_check(s.l.layer, &a, why_size ? why : NULL, why_size);
    check_why(st, why, why_size);
    require(st != MHA_OK || !forbidden_forward(&a), "mha_forward_check lets it pass");
    if (st == MHA_OK && a.cache)
        require(
            !forbidden_cache(&s.l, &a, a.cache_only ? NULL : a.cu_seq, a.cache_only ? 0 : a.seq),
            "mha_forward_check lets a cache pass");
    sized = mha_workspace_size(s.l.layer, &a, &bytes);
    /* that of a cache and a source is of mha_cache_append */
    require(sized == MHA_OK || st != MHA_OK, "a call that is fine, but has no size");
    require(sized == MHA_OK || bytes == 0, "a size in spite of an error");
    tell("status", st);
    tall = st == MHA_OK && a.batch && (a.cu_seq ? a.cu_seq[a.batch] : a.seq);
    test_fail_after = 0;
    require_status("mha_forward and its check", mha_forward(s.l.layer, &a),
                   tall ? MHA_ERR_MEMORY : st);
    refuse_stages(&s.l, &a, st == MHA_OK);
    test_fail_after = -1;
    require_untouched("y although refused", s.a.y, s.n_y * sizeof(float));
    require_untouched("attn although refused", s.a.attn, s.n_attn * sizeof(float));
    require_untouched("attn_mean although refused", s.a.attn_mean, s.n_mean * sizeof(float));
    require_untouched("lse although refused", s.a.lse, s.n_lse * sizeof(float));
    require(!cache || memcmp(before, memory, cache_bytes) == 0, "a cache changed although refused");
    mha_cache_free(foreign);
    mha_layer_free(s.l.layer);
}

static void refuse_layer(void)
{
    net l;
    mha_layer *layer;
    mha_status st, sized;
    size_t bytes = 0, why_size = (size_t)pick(0, 90);
    char *why = (char *)take(why_size);
    const float **matrix[13];
    mha_config *c = &l.cfg;
    mha_weights *w = &l.w;
    int changes = pick(1, 3);
    draw_net(&l, chance(40));
    matrix[0] = &w->qkv, matrix[1] = &w->q, matrix[2] = &w->k, matrix[3] = &w->v;
    matrix[4] = &w->out, matrix[5] = &w->b_qkv, matrix[6] = &w->b_q, matrix[7] = &w->alibi;
    matrix[8] = &w->sink, matrix[9] = &w->sink_value, matrix[10] = &w->q_norm;
    matrix[11] = &w->k_norm_bias, matrix[12] = &w->bias_k;
    for (; changes > 0; changes--) {
        const float **m = matrix[pick(0, 12)];
        switch (pick(0, 28)) {
        case 0: c->d_model = bad_int(); break;
        case 1: c->n_heads = bad_int(); break;
        case 2: c->n_kv_heads = bad_int(); break;
        case 3: c->d_k = bad_int(); break;
        case 4: c->d_v = bad_int(); break;
        case 5: c->d_source = bad_int(); break;
        case 6: c->d_source_v = bad_int(); break;
        case 7: c->scale = bad_float(); break;
        case 8: c->softcap = bad_float(); break;
        case 9: c->norm_eps = bad_float(); break;
        case 10: c->isa = (mha_isa)bad_int(); break;
        case 11: c->alibi = bad_int(); break;
        case 12: c->zero_attn = bad_int(); break;
        case 13: c->qk_norm = (mha_norm)bad_int(); break;
        case 14: c->weight_type = (mha_type)bad_int(); break;
        case 15: c->rope.layout = (mha_rope_layout)bad_int(); break;
        case 16: c->rope.width = bad_int(); break;
        case 17: c->rope.base = bad_float(); break;
        case 18: c->rope.scaling = (mha_rope_scaling)bad_int(); break;
        case 19: c->rope.factor = bad_float(); break;
        case 20: c->rope.original = bad_int(); break;
        case 21: c->rope.beta_fast = bad_float(); break;
        case 22: c->rope.attention = bad_float(); break;
        case 23: c->rope.low_freq = bad_float(); break;
        case 24: w->layout = (mha_layout)bad_int(); break;
        default: *m = *m && chance(50) ? NULL : (float *)bad_pointer(w->out); break;
        }
    }
    st = mha_layer_check(c, w, why_size ? why : NULL, why_size);
    check_why(st, why, why_size);
    require(st != MHA_OK || !forbidden_layer(c, w), "mha_layer_check lets it pass");
    sized = mha_layer_size(c, &bytes);
    require(sized == MHA_OK || st != MHA_OK, "a layer that is fine, but has no size");
    tell("status", st);
    if (st == MHA_OK) return;
    layer = (mha_layer *)take(1);
    require_status("mha_layer_create and its check", mha_layer_create(&layer, c, w), st);
    require(layer == NULL, "a layer in spite of an error");
    require_status("mha_layer_init and its check", mha_layer_init(&layer, take(64), 64, c, w), st);
    require(layer == NULL, "a layer in spite of an error");
    require(test_live == 0, "a refused layer left memory");
}

/* Changes of slots: slots and lengths of any kind, and a cache that does not match. */
static void refuse_change(const net *l, const mha_cache_config *cfg, char *memory, size_t bytes)
{
    const int B = cfg->batch, alien = chance(15), few = cfg->capacity < 4 ? cfg->capacity : 4;
    mha_cache_config other = *cfg;
    mha_cache *to = NULL, *from = NULL;
    char *before = (char *)take(bytes);
    int *order = take_ints((size_t)B);
    if (chance(20)) other.ring = !other.ring;
    if (chance(20)) other.type = (mha_type)pick(0, 3);
    other.capacity += pick(0, 2) / 2;
    require_status("mha_cache_init", mha_cache_init(&to, memory, bytes, l->layer, cfg), MHA_OK);
    if (alien) from = foreign_cache(l, B);
    else require_status("mha_cache_create", mha_cache_create(&from, l->layer, &other), MHA_OK);
    fill_cache(l, to, B, pick(0, few));
    if (!alien) fill_cache(l, from, B, pick(0, few));
    for (int i = 0; i < 3; i++) {
        const int slot = chance(40) ? bad_int() : pick(0, B - 1), what = pick(0, 2);
        const int n = chance(40) ? bad_int() : pick(-1, few);
        int ok = 0;
        mha_status st;
        memcpy(before, memory, bytes);
        if (what == 0) {
            const int s = chance(40) ? bad_int() : pick(0, B - 1), had = mha_cache_length(from, s);
            const int all = n == -1 ? had : n;
            const int null = chance(15) ? pick(1, 2) : 0;
            st = mha_cache_fork(null == 1 ? NULL : to, slot, null == 2 ? NULL : from, s, n);
            ok = !null && !alien && other.type == cfg->type && other.ring == cfg->ring &&
                 slot >= 0 && slot < B && had >= 0 && all >= 0 && all <= had &&
                 (cfg->ring ? all == had && other.capacity == cfg->capacity : all <= cfg->capacity);
            if (ok) require(mha_cache_length(to, slot) == all, "the length of a fork");
        } else if (what == 1) {
            ok = slot >= -1 && slot < B && n >= 0;
            for (int b = 0; b < B; b++)
                if ((slot == -1 || slot == b) && n > mha_cache_length(to, b)) ok = 0;
            st = mha_cache_truncate(to, slot, n);
        } else {
            const int bad = chance(20);
            ok = !bad;
            for (int b = 0; b < B; b++) {
                order[b] = chance(20) ? bad_int() : pick(0, B - 1);
                if (order[b] < 0 || order[b] >= B) ok = 0;
            }
            st = mha_cache_reorder(to, bad ? (int *)bad_pointer(order) : order);
        }
        tell("change", what), tell("slot", slot), tell("n", n), tell("status", st);
        require((st == MHA_OK) == ok, "a change of a cache");
        require(ok || memcmp(before, memory, bytes) == 0, "a cache changed although refused");
    }
    mha_cache_free(from);
}

static void refuse_cache(void)
{
    char why[160];
    net l;
    mha_cache *cache = NULL;
    mha_cache_config cfg;
    mha_status st;
    size_t bytes = 0;
    draw_net(&l, 0);
    make_layer(&l, MHA_ISA_SCALAR, 0);
    cfg.batch = chance(50) ? bad_int() : pick(1, 3);
    cfg.capacity = chance(50) ? bad_int() : pick(1, 30);
    cfg.ring = chance(30) ? bad_int() : pick(0, 1);
    cfg.type = chance(30) ? (mha_type)bad_int() : (mha_type)pick(0, 3);
    st = mha_cache_size(l.layer, &cfg, &bytes);
    tell("status", st);
    require_status("mha_cache_check", mha_cache_check(l.layer, &cfg, why, sizeof why), st);
    require((why[0] == 0) == (st == MHA_OK), "mha_cache_check's sentence");
    if (st == MHA_OK) {
        char *memory = (char *)take(bytes < 1 << 20 ? bytes : 1);
        require(cfg.batch > 0 && cfg.capacity > 0 && !outside(cfg.ring, 0, 1) &&
                    !outside((int)cfg.type, 0, 3),
                "mha_cache_size lets it pass");
        require_status("mha_cache_init", mha_cache_init(&cache, memory, bytes - 1, l.layer, &cfg),
                       MHA_ERR_BUFFER);
        require_status("mha_cache_init", mha_cache_init(&cache, NULL, bytes, l.layer, &cfg),
                       MHA_ERR_NULL);
        if (bytes >= 1 << 20) test_fail_after = 0;
        st = mha_cache_create(&cache, l.layer, &cfg);
        test_fail_after = -1;
        require_status("mha_cache_create", st, bytes < 1 << 20 ? MHA_OK : MHA_ERR_MEMORY);
        require((cache == NULL) == (st != MHA_OK), "a cache in spite of an error");
        if (bytes < 1 << 15) refuse_change(&l, &cfg, memory, bytes);
    } else {
        require_status("mha_cache_create", mha_cache_create(&cache, l.layer, &cfg), st);
        require_status("mha_cache_init", mha_cache_init(&cache, take(64), 64, l.layer, &cfg), st);
        require(cache == NULL, "a cache in spite of an error");
    }
    mha_cache_free(cache);
    mha_layer_free(l.layer);
}

/* ---- the small functions ----------------------------------------------------------------- */

/* To nearest even: no neighbour is nearer, and of two equally near ones the even one is taken. */
static void check_half(float x, unsigned h, mha_type type)
{
    const unsigned inf = type == MHA_F16 ? 0x7c00u : 0x7f80u;
    uint16_t in[3] = { (uint16_t)h, (uint16_t)(h + 1), (uint16_t)(h - 1) };
    float out[3];
    double error;
    require_status("mha_convert", mha_convert(type, in, MHA_F32, out, 3), MHA_OK);
    if (is_nan(x)) {
        require(is_nan(out[0]), "a NaN in half");
        return;
    }
    require(((bits_f(x) >> 31) != 0) == ((h >> 15) != 0), "the sign of a half");
    if ((h & 0x7fffu) == inf) { /* at least half a step above the largest number */
        require(!is_finite(x) || fabs((double)x) >= (type == MHA_F16 ? 65520.0 : 3.39e38),
                "an infinite half");
        return;
    }
    error = fabs((double)out[0] - (double)x);
    for (int i = 1; i < 3; i++) {
        const unsigned n = in[i] & 0x7fffu;
        const double other = fabs((double)out[i] - (double)x);
        if ((n == 0x7fffu && (h & 0x7fffu) == 0) || n >= inf) continue; /* no neighbour */
        if (!(error <= other))
            wrong("a half that is not the nearest", h, (double)out[0], (double)x);
        if (!(error < other) && h % 2) wrong("a tie to odd", h, (double)out[0], (double)x);
    }
}

static void fuzz_convert(void)
{
    const mha_type type = chance(50) ? MHA_F16 : MHA_BF16;
    const int n = pick(1, 20);
    float *x = take_floats((size_t)n), *back = take_floats((size_t)n);
    uint16_t *h = (uint16_t *)take((size_t)n * sizeof *h);
    for (int i = 0; i < n; i++) { /* any bits; sometimes exactly between two */
        uint32_t bits = (uint32_t)byte() << 24 | (uint32_t)byte() << 16;
        bits |= chance(50) ? (type == MHA_F16 ? 0x1000u : 0x8000u) : (uint32_t)byte() << 8 | byte();
        x[i] = f_bits(bits);
    }
    require_status("mha_convert", mha_convert(MHA_F32, x, type, h, (size_t)n), MHA_OK);
    require_status("mha_convert", mha_convert(type, h, MHA_F32, back, (size_t)n), MHA_OK);
    for (int i = 0; i < n; i++) {
        uint16_t again = 0;
        check_half(x[i], h[i], type);
        require_status("mha_convert", mha_convert(MHA_F32, &back[i], type, &again, 1), MHA_OK);
        require(again == h[i] || is_nan(x[i]), "a half, there and back");
    }
}

static void fuzz_rotate(void)
{
    net l;
    const int B = pick(0, 3), H = pick(1, 3), T = pick_length(20), d = pick_width();
    const int extent[3] = { B, H, T };
    const view v = pick_view(extent, 3, d, 0);
    const float *clean;
    float *x;
    int *at;
    memset(&l, 0, sizeof l);
    l.dk = d;
    pick_rope(&l);
    at = pick_positions(&l, B * T);
    x = normal(v.n, 1);
    clean = copied(x, v.n);
    require_status("mha_rotate",
                   mha_rotate(&l.cfg.rope, B, H, T, d, x + v.origin, stride_of(&v), at), MHA_OK);
    for (int b = 0; b < B && !l.open; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++) {
                const ptrdiff_t row = row_at(&v, NULL, b, h, t);
                double want[40], size = 0;
                for (int i = 0; i < d; i++) want[i] = (double)clean[row + i], size += fabs(want[i]);
                oracle_rotate(&l.cfg.rope, d, at ? at[b * T + t] : t, want);
                /* three roundings of 2^-24, of numbers up to 1.5 times as large by YaRN */
                for (int i = 0; i < d; i++)
                    require_close("mha_rotate", (size_t)(row + i), x[row + i], want[i],
                                  size * 4 / 16777216.0);
            }
}

/* o[0] and o[1] are o[2]: at any stride, over one of them, and not with a bad pointer. */
static void merge_otherwise(int H, int T, int d, float *const *o, float *const *lse)
{
    const int extent[3] = { 1, H, T }, over = pick(0, 2), which = pick(0, 5);
    const size_t n = (size_t)(H * T * d), rows = (size_t)(H * T);
    const view v = pick_view(extent, 3, d, 0);
    mha_stride stride = stride_of(&v);
    float *x[3], *l[3], *p[6];
    mha_status st;
    wild_stride(&stride, 1, H, T);
    for (int i = 0; i < 3; i++) {
        x[i] = take_floats(v.n), l[i] = i < 2 ? copied(lse[i], rows) : take_floats(rows);
        for (int h = 0; h < H && i < 2; h++)
            for (int t = 0; t < T; t++)
                memcpy(x[i] + row_at(&v, NULL, 0, h, t), o[i] + (h * T + t) * d,
                       (size_t)d * sizeof(float));
    }
    st = mha_merge(1, H, T, d, x[0] + v.origin, l[0], x[1] + v.origin, l[1], stride,
                   x[over] + v.origin, l[over]);
    require_status("mha_merge", st, MHA_OK);
    for (int h = 0; h < H; h++)
        for (int t = 0; t < T; t++)
            require_same("mha_merge at a stride", x[over] + row_at(&v, NULL, 0, h, t),
                         o[2] + (h * T + t) * d, (size_t)d);
    require_same("lse of mha_merge at a stride", l[over], lse[2], rows);

    memset(&stride, 0, sizeof stride);
    p[0] = o[0], p[1] = lse[0], p[2] = o[1], p[3] = lse[1];
    p[4] = (float *)take(n * sizeof(float)), p[5] = (float *)take(rows * sizeof(float));
    x[0] = p[4], l[0] = p[5];
    p[which] = (float *)bad_pointer(p[which]);
    if (!n || (which == 5 && !p[5])) return;
    st = mha_merge(1, H, T, d, p[0], p[1], p[2], p[3], stride, p[4], p[5]);
    require(st != MHA_OK, "mha_merge lets it pass");
    require_untouched("o of mha_merge although refused", x[0], n * sizeof(float));
    require_untouched("lse of mha_merge although refused", l[0], rows * sizeof(float));
}

/* Keys in two halves, merged, are all of them. */
static void fuzz_merge(void)
{
    const int H = pick(1, 3), T = pick_length(12), S = pick_length(40), d = pick_width();
    const int cut = S ? pick(0, S) : 0;
    const size_t n = (size_t)(H * T * d), rows = (size_t)(H * T);
    float *o[3], *lse[3];
    mha_sdpa_args a;
    oracle_result want;
    mha_stride plain;
    memset(&plain, 0, sizeof plain);
    memset(&a, 0, sizeof a);
    a.batch = 1, a.heads = H, a.seq = T, a.d_k = d;
    a.q = normal(n, 1), a.k = normal((size_t)(H * S * d), 1), a.v = normal((size_t)(H * S * d), 1);
    a.k_stride.batch = a.k_stride.head = S * d + d, a.k_stride.seq = d;
    a.k_stride.head = S * d, a.k_stride.batch = 1;
    a.v_stride = a.k_stride;
    a.source_seq = S;
    want = oracle_sdpa(&a);
    for (int i = 0; i < 3; i++) {
        o[i] = take_floats(n), lse[i] = take_floats(rows);
        if (i == 2) break;
        a.o = o[i], a.lse = lse[i];
        a.source_seq = i ? S - cut : cut;
        if (i) a.k += cut * d, a.v += cut * d;
        require_status("mha_sdpa", mha_sdpa(&a), MHA_OK);
    }
    require_status("mha_merge",
                   mha_merge(1, H, T, d, o[0], lse[0], o[1], lse[1], plain, o[2], lse[2]), MHA_OK);
    for (size_t i = 0; i < n; i++)
        require_close("mha_merge", i, o[2][i], want.o[i], 4e-6 * want.v_max);
    for (size_t i = 0; i < rows; i++)
        if (S) require_close("lse of mha_merge", i, lse[2][i], want.lse[i], 1e-5);
        else require(bits_f(lse[2][i]) == 0xff800000u, "lse of mha_merge of nothing");
    oracle_free(&want);
    merge_otherwise(H, T, d, o, lse);
}

/* Heads there and back; slopes; the fused matrix. */
static void fuzz_heads(void)
{
    const int B = pick(0, 3), T = pick(0, 5), H = pick(1, 9), d = pick(1, 5), D = pick(1, 5);
    const int G = chance(50) ? H : 1, out = (H + 2 * G) * d;
    const mha_layout layout = chance(50) ? MHA_OUT_IN : MHA_IN_OUT;
    const size_t n = (size_t)(B * T * H * d);
    const float *x = normal(n, 1), *part[3][9];
    float *split = take_floats(n), *back = take_floats(n), *slopes = take_floats((size_t)H);
    float *fused = take_floats((size_t)(D * out));
    double want[16];
    mha_config cfg;
    require_status("mha_split_heads", mha_split_heads(B, T, H, d, x, split), MHA_OK);
    require_status("mha_merge_heads", mha_merge_heads(B, T, H, d, split, back), MHA_OK);
    require_same("heads there and back", back, x, n);
    for (size_t i = 0; i < n; i++) {
        const size_t c = i % (size_t)d, h = i / (size_t)d % (size_t)H;
        const size_t t = i / (size_t)(d * H) % (size_t)T, b = i / (size_t)(d * H * T);
        require_same("mha_split_heads",
                     split + ((b * (size_t)H + h) * (size_t)T + t) * (size_t)d + c, x + i, 1);
    }
    require_status("mha_alibi_slopes", mha_alibi_slopes(H, slopes), MHA_OK);
    oracle_slopes(H, want);
    for (int h = 0; h < H; h++)
        require_close("mha_alibi_slopes", (size_t)h, slopes[h], want[h], 1e-7);
    memset(&cfg, 0, sizeof cfg);
    cfg.d_model = D, cfg.n_heads = H, cfg.n_kv_heads = G, cfg.d_k = d;
    for (int p = 0; p < 3; p++)
        for (int h = 0; h < (p ? G : H); h++) part[p][h] = normal((size_t)(D * d), 1);
    require_status("mha_fuse_heads", mha_fuse_heads(&cfg, layout, part[0], part[1], part[2], fused),
                   MHA_OK);
    for (int o = 0; o < out; o++) {
        const int head = o / d, c = o % d, p = head < H ? 0 : head < H + G ? 1 : 2;
        const float *from = part[p][head - (p == 0 ? 0 : p == 1 ? H : H + G)];
        for (int i = 0; i < D; i++)
            require_same("mha_fuse_heads", fused + (layout == MHA_OUT_IN ? o * D + i : i * out + o),
                         from + (layout == MHA_OUT_IN ? c * D + i : i * d + c), 1);
    }
    { /* with one thing wrong */
        const int p = pick(0, 2), what = pick(0, 4), bad = bad_int();
        float *to = (float *)take((size_t)(D * out) * sizeof(float)), *fresh = to;
        int ok = 0;
        if (what == 0) cfg.d_source = bad, ok = bad == 0 || bad == D;
        else if (what == 1) cfg.d_source_v = bad, ok = bad == 0 || bad == D;
        else if (what == 2) part[p][pick(0, p ? G - 1 : H - 1)] = (float *)bad_pointer(fused);
        else if (what == 3) to = (float *)bad_pointer(fused);
        else ok = bad == 0 || bad == 1;
        if (ok) return;
        require(mha_fuse_heads(&cfg, what == 4 ? (mha_layout)bad : layout, part[0], part[1],
                               part[2], to) != MHA_OK,
                "mha_fuse_heads lets it pass");
        require_untouched("fused although refused", fresh, (size_t)(D * out) * sizeof(float));
    }
}

/* Sizes of any kind and no data: an error, or nothing to do. */
static void refuse_small(void)
{
    const int B = bad_int(), H = bad_int(), T = bad_int(), d = bad_int();
    const int legal = B >= 0 && H >= 1 && T >= 0 && d >= 1, empty = legal && (B == 0 || T == 0);
    mha_stride s;
    mha_rope rope;
    memset(&s, 0, sizeof s);
    memset(&rope, 0, sizeof rope);
    require((mha_split_heads(B, T, H, d, NULL, NULL) == MHA_OK) == empty, "mha_split_heads");
    require((mha_merge_heads(B, T, H, d, NULL, NULL) == MHA_OK) == empty, "mha_merge_heads");
    require((mha_merge(B, H, T, d, NULL, NULL, NULL, NULL, s, NULL, NULL) == MHA_OK) == empty,
            "mha_merge");
    require((mha_rotate(&rope, B, H, T, d, NULL, s, NULL) == MHA_OK) == empty, "mha_rotate");
    rope.layout = (mha_rope_layout)bad_int();
    rope.width = bad_int();
    rope.base = bad_float();
    mha_rotate(&rope, B, H, T, d, NULL, s, NULL);
    require(mha_alibi_slopes(B, NULL) != MHA_OK, "mha_alibi_slopes");
    require(mha_isa_name((mha_isa)B) && mha_strerror((mha_status)H), "names");
    require(mha_convert((mha_type)B, NULL, (mha_type)H, NULL, 1) != MHA_OK, "mha_convert");
}

/* ---- one input --------------------------------------------------------------------------- */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned kind;
    if (size > 1000) return 0;
    input = data;
    input_left = size;
    story[0] = 0;
    story_end = 0;
    fuzz_asks = (int)(size % 3);
    kind = byte() % 32;
    numbers = rng_make((uint64_t)byte() << 8 | byte());
    tell("kind", kind);
    if (kind < 9) fuzz_sdpa();
    else if (kind < 16) fuzz_layer();
    else if (kind < 23) fuzz_cache();
    else if (kind == 23) fuzz_convert();
    else if (kind == 24) fuzz_rotate();
    else if (kind == 25) fuzz_merge();
    else if (kind == 26) fuzz_heads();
    else if (kind == 27) refuse_small();
    else if (kind == 28) refuse_sdpa();
    else if (kind == 29) refuse_forward();
    else if (kind == 30) refuse_layer();
    else refuse_cache();
    require(test_live == 0, "memory that was not given back");
    give_back(0);
    return 0;
}

/* ---- a program --------------------------------------------------------------------------- */

#ifdef FUZZ_MAIN
static long inputs;

static void run_stream(FILE *in)
{
    static uint8_t data[1 << 16];
    const size_t n = fread(data, 1, sizeof data, in);
    uint8_t *exact = (uint8_t *)malloc(n ? n : 1);
    if (!exact) abort();
    memcpy(exact, data, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    inputs++;
}

/* One input a line, in hexadecimal. To folder/1, folder/2, ... if there is a folder, else run. */
static void run_list(FILE *in, const char *folder)
{
    static char text[1 << 17];
    while (fgets(text, sizeof text, in)) {
        uint8_t data[1 << 12];
        size_t n = 0;
        unsigned value;
        while (n < sizeof data && sscanf(text + 2 * n, "%2x", &value) == 1)
            data[n++] = (uint8_t)value;
        inputs++;
        if (folder) {
            char path[4096];
            FILE *out;
            snprintf(path, sizeof path, "%s/%ld", folder, inputs);
            out = fopen(path, "wb");
            if (!out || fwrite(data, 1, n, out) != n || fclose(out)) abort();
        } else {
            LLVMFuzzerTestOneInput(data, n);
        }
    }
}

static int run_path(const char *path, const char *folder)
{
    const size_t n = strlen(path);
    DIR *dir = opendir(path);
    struct dirent *entry;
    FILE *in;
    int ok = 1;
    while (dir && (entry = readdir(dir)) != NULL) {
        char inner[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        ok &= run_path(inner, folder);
    }
    if (dir) {
        closedir(dir);
        return ok;
    }
    in = fopen(path, "rb");
    if (!in) {
        fprintf(stderr, "fuzz: cannot read %s\n", path);
        return 0;
    }
    if (n > 4 && strcmp(path + n - 4, ".txt") == 0) run_list(in, folder);
    else run_stream(in);
    fclose(in);
    return ok;
}

#ifdef __AFL_HAVE_MANUAL_CONTROL
__AFL_FUZZ_INIT();
#endif

int main(int argc, char **argv)
{
    const char *folder = NULL;
    int first = 1, ok = 1;
    if (argc > 2 && strcmp(argv[1], "--unpack") == 0) folder = argv[2], first = 3;
    for (int i = first; i < argc; i++) ok &= run_path(argv[i], folder);
    if (argc > 1) {
        printf("fuzz: %ld inputs\n", inputs);
        return !ok;
    }
#ifdef __AFL_HAVE_MANUAL_CONTROL
    __AFL_INIT();
    {
        const unsigned char *data = __AFL_FUZZ_TESTCASE_BUF;
        while (__AFL_LOOP(10000)) LLVMFuzzerTestOneInput(data, (size_t)__AFL_FUZZ_TESTCASE_LEN);
    }
#else
    run_stream(stdin);
#endif
    return 0;
}
#endif
