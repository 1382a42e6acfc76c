/* bench.c - how fast mha.h is here, against what this machine can do. `make bench` builds it with
   the flags a user has, cc -O2, and runs it; `build/bench --help` lists its options.

   Two ceilings are measured first, and again all along the run: the speed of a loop of nothing but
   multiply-adds in registers, and the speed of reading memory. Then every row of the table below,
   whole layer (mha_forward) and attention core (mha_sdpa), on 1 thread and on all. A machine is
   shared and its clock moves, so the rows take turns over several rounds, and the best time seen
   is set against the best ceiling seen. Results are not verified here: `make test` does that. */

#if !defined(_WIN32) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* clock_gettime, isatty, sysconf under -std=c99 */
#endif

#define MHA_IMPLEMENTATION
#define MHA_THREADS
#include "../mha.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <io.h>
#include <windows.h>
#else
#include <unistd.h>
#endif
#if (defined(__GNUC__) && defined(__x86_64__)) || (defined(_MSC_VER) && defined(_M_X64))
#define X86
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define ARM64
#include <arm_neon.h>
#endif

#ifndef BENCH_FLAGS /* make bench says what it compiles with */
#ifdef __OPTIMIZE__
#define BENCH_FLAGS "optimised"
#else
#define BENCH_FLAGS "not optimised"
#endif
#endif

/* ---- what is measured ---------------------------------------------------------------------- */

typedef struct row {
    const char *name;
    int B, T, cached, D, H, G, causal, bias;
    mha_type type; /* of weights and cache; other than F32: the layer only */
} row;

static const row rows[] = {
    { "tiny", 1, 16, 0, 64, 4, 4, 0, 1, MHA_F32 },
    { "encoder-small", 1, 128, 0, 384, 12, 12, 0, 1, MHA_F32 }, /* MiniLM */
    { "bert-base", 8, 128, 0, 768, 12, 12, 0, 1, MHA_F32 },
    { "base-paper", 32, 64, 0, 512, 8, 8, 0, 1, MHA_F32 }, /* Attention Is All You Need */
    { "gpt2-prefill", 1, 1024, 0, 768, 12, 12, 1, 1, MHA_F32 },
    { "llama-gqa", 1, 512, 0, 2048, 32, 8, 1, 0, MHA_F32 },
    { "long-causal", 1, 4096, 0, 512, 8, 8, 1, 1, MHA_F32 },
    { "long-full", 1, 4096, 0, 512, 8, 8, 0, 1, MHA_F32 },
    { "decode-768", 1, 1, 1024, 768, 12, 12, 1, 1, MHA_F32 },
    { "decode-gqa2048", 1, 1, 1024, 2048, 32, 8, 1, 0, MHA_F32 },
    { "decode-gqa2048-f16", 1, 1, 1024, 2048, 32, 8, 1, 0, MHA_F16 },
    { "decode-gqa2048-bf16", 1, 1, 1024, 2048, 32, 8, 1, 0, MHA_BF16 },
    { "decode-gqa2048-int8", 1, 1, 1024, 2048, 32, 8, 1, 0, MHA_INT8 },
    /* Llama 3 8B: larger than the last cache in every type */
    { "decode-gqa4096", 1, 1, 1024, 4096, 32, 8, 1, 0, MHA_F32 },
    { "decode-gqa4096-f16", 1, 1, 1024, 4096, 32, 8, 1, 0, MHA_F16 },
    { "decode-gqa4096-bf16", 1, 1, 1024, 4096, 32, 8, 1, 0, MHA_BF16 },
    { "decode-gqa4096-int8", 1, 1, 1024, 4096, 32, 8, 1, 0, MHA_INT8 },
    /* Gemma 2B: one kv head, which threads share */
    { "decode-mqa2048", 1, 1, 8192, 2048, 8, 1, 1, 0, MHA_F32 },
    /* four sequences at once: more rows than one, too few for a whole tile */
    { "decode-4x2048", 4, 1, 256, 2048, 32, 8, 1, 0, MHA_F32 },
    { "decode-4x2048-bf16", 4, 1, 256, 2048, 32, 8, 1, 0, MHA_BF16 },
    { "overhead", 1, 1, 0, 16, 1, 1, 0, 1,
      MHA_F32 }, /* next to no arithmetic: what a call costs anyway */
};
enum { ROWS = sizeof rows / sizeof rows[0] };

enum { LAYER, CORE };
enum { PLAIN, HOT, COLD }; /* decode: same call again and again; or other memory read before */
enum { MAX_ISAS = 4, MAX_CELLS = ROWS * 8 * MAX_ISAS, MAX_THREADS = 1024 };
static const char *const parts[] = { "layer", "core" };

typedef struct cell {
    const row *r;
    char name[32];              /* of the row, with -hot or -cold */
    int part, state, isa, many; /* isa: index into isas; many: 0 = 1 thread, 1 = all */
    mha_layer *layer;
    mha_cache *cache;
    mha_args forward;
    mha_sdpa_args sdpa;
    double flop, read; /* of a call; read in bytes, decode only */
    size_t bytes;      /* of workspace */
    double ceiling;    /* HOT: bytes/s of a buffer of this size, best seen */
    double spent;
    int inner; /* calls per sample, so that the clock does not matter */
    double *sample;
    size_t samples, room;
    double best, median;
} cell;

static mha_isa isas[MAX_ISAS];
static int n_isas, threads_all, n_many = 2; /* n_many: 1 thread and all, or just 1 */
static mha_pool *pool;
static double peak[MAX_ISAS][2], dram[2]; /* FLOP/s, bytes/s: best seen */
static cell cells[MAX_CELLS];
static int n_cells;

static int thread_count(int many)
{
    return many ? threads_all : 1;
}

static const char *threads_text(int many)
{
    static char all[32];
    if (!many) return "1 thread";
    snprintf(all, sizeof all, "%d threads", threads_all);
    return all;
}

static void cell_name(char *name, size_t size, const row *r, int state)
{
    static const char *const suffix[] = { "", "-hot", "-cold" };
    snprintf(name, size, "%s%s", r->name, suffix[state]);
}

/* Rows asked for, by their names or with -hot or -cold; none: all. */
enum { MAX_ONLY = 64 };
static const char *only[MAX_ONLY];
static int n_only;

static int wanted(const row *r, int state)
{
    char name[32];
    int i;
    cell_name(name, sizeof name, r, state);
    for (i = 0; i < n_only; i++)
        if (strcmp(only[i], name) == 0 || strcmp(only[i], r->name) == 0) return 1;
    return n_only == 0;
}

static int first_state(const row *r)
{
    return r->cached ? HOT : PLAIN;
}

static int last_state(const row *r)
{
    return r->cached ? COLD : PLAIN;
}

/* ---- small things --------------------------------------------------------------------------- */

static void die(int status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "bench: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    exit(status);
}

static double now(void)
{
#ifdef _WIN32
    LARGE_INTEGER ticks, second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&second);
    return (double)ticks.QuadPart / (double)second.QuadPart;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

/* Aligned to a cache line, as tensors are; given back when the program ends. */
static void *allocate(size_t bytes)
{
    char *p = (char *)malloc(bytes + 64);
    if (!p) die(1, "no memory: %.0f MB", (double)bytes * 1e-6);
    return p + (64 - (size_t)p % 64) % 64;
}

/* N(0, scale): the sum of four uniform numbers is near enough. */
static void fill(float *x, size_t n, double scale)
{
    static unsigned long long state = 88172645463325252ull;
    size_t i;
    for (i = 0; i < n; i++) {
        unsigned long long s;
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        s = (state & 65535) + (state >> 16 & 65535) + (state >> 32 & 65535) + (state >> 48);
        x[i] = (float)(((double)s - 131070.0) / 37837.0 * scale);
    }
}

static float *normal(size_t n, double scale)
{
    float *x = (float *)allocate(n * sizeof *x);
    fill(x, n, scale);
    return x;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- ceilings ---------------------------------------------------------------------------------

   For a vector type v of n floats: v_burn, n times as many multiply-adds as there are
   accumulators, all independent and all in registers (named variables: gcc -O2 may keep an array
   in memory); v_read, the sum of an array in one stream or in four, with or without asking for the
   first lines of the pages to come: which is fastest depends on the CPU. FMA units take 2 to 6
   vectors per cycle and need 4 or 5 cycles: 12 accumulators fill two of them, 24 fill six. */

typedef struct reading {
    int streams, pages;
} reading;
enum { READINGS = 4 };
static const reading readings[READINGS] = { { 1, 0 }, { 4, 0 }, { 1, 1 }, { 4, 1 } };

/* Of bytes bytes two pages after at, the lines that are among the first 8 of a page. */
static void ask_pages(const float *at, size_t bytes)
{
#ifdef __GNUC__
    size_t c;
    for (c = 8192; c < 8192 + bytes; c += 64)
        if (((size_t)at + c) % 4096 < 512) __builtin_prefetch((const char *)at + c, 0, 2);
#else
    (void)at, (void)bytes;
#endif
}

#define EACH8(F, v) F(v, 0) F(v, 1) F(v, 2) F(v, 3) F(v, 4) F(v, 5) F(v, 6) F(v, 7)
#define EACH12(F, v) EACH8(F, v) F(v, 8) F(v, 9) F(v, 10) F(v, 11)
#define EACH24(F, v) \
    EACH12(F, v) \
    F(v, 12) \
    F(v, 13) \
    F(v, 14) F(v, 15) F(v, 16) F(v, 17) F(v, 18) F(v, 19) F(v, 20) F(v, 21) F(v, 22) F(v, 23)

#define BEGIN(v, i) v a##i = v##_set((float)i * 0.01f);
#define STEP(v, i) a##i = v##_fma(a##i, x, y);
#define LOAD(v, i) a##i = v##_add(a##i, v##_load(p + at + i / 2 * apart + i % 2 * lanes));
#define SUM(v, i) x = v##_add(x, a##i);

#define CEILINGS(TARGET, v, LANES, EACH) \
    TARGET static void v##_burn(long n) \
    { \
        v x = v##_set(0.999f), y = v##_set(0.001f); \
        float sum[LANES]; \
        volatile float keep; \
        EACH(BEGIN, v) \
        for (; n > 0; n--) { EACH(STEP, v) } \
        EACH(SUM, v) \
        v##_store(sum, x); \
        keep = sum[0]; \
        (void)keep; \
    } \
    TARGET static void v##_read(const float *p, size_t n, reading how) \
    { \
        const size_t lanes = LANES, apart = how.streams == 1 ? 2 * lanes : n / 4; \
        const size_t step = how.streams == 1 ? 8 * lanes : 2 * lanes; \
        size_t at = 0, left, i; \
        v x = v##_set(0.0f); \
        float sum[LANES]; \
        volatile float keep; \
        EACH8(BEGIN, v) \
        for (left = n / (8 * lanes); left > 0; left--, at += step) { \
            for (i = 0; how.pages && i < (size_t)how.streams; i++) \
                ask_pages(p + at + i * apart, step * sizeof *p); \
            EACH8(LOAD, v) \
        } \
        EACH8(SUM, v) \
        v##_store(sum, x); \
        keep = sum[0]; \
        (void)keep; \
    }

#ifdef __GNUC__
#define TARGET_(isa) __attribute__((target(isa)))
#else
#define TARGET_(isa)
#endif

#ifdef X86
typedef __m128 f4; /* what portable C can be compiled to: no FMA in the x86-64 baseline */
#define f4_set(x) _mm_set1_ps(x)
#define f4_fma(a, x, y) _mm_add_ps(_mm_mul_ps(a, x), y)
#define f4_add(a, b) _mm_add_ps(a, b)
#define f4_load(p) _mm_loadu_ps(p)
#define f4_store(p, a) _mm_storeu_ps(p, a)
CEILINGS(, f4, 4, EACH12)
typedef __m256 f8;
#define f8_set(x) _mm256_set1_ps(x)
#define f8_fma(a, x, y) _mm256_fmadd_ps(a, x, y)
#define f8_add(a, b) _mm256_add_ps(a, b)
#define f8_load(p) _mm256_loadu_ps(p)
#define f8_store(p, a) _mm256_storeu_ps(p, a)
CEILINGS(TARGET_("avx2,fma"), f8, 8, EACH12)
typedef __m512 f16;
#define f16_set(x) _mm512_set1_ps(x)
#define f16_fma(a, x, y) _mm512_fmadd_ps(a, x, y)
#define f16_add(a, b) _mm512_add_ps(a, b)
#define f16_load(p) _mm512_loadu_ps(p)
#define f16_store(p, a) _mm512_storeu_ps(p, a)
CEILINGS(TARGET_("avx512f"), f16, 16, EACH12)
#define PORTABLE f4_burn, f4_read, 12 * 4 * 2
#elif defined(ARM64)
typedef float32x4_t n4;
#define n4_set(x) vdupq_n_f32(x)
#define n4_fma(a, x, y) vfmaq_f32(a, x, y)
#define n4_add(a, b) vaddq_f32(a, b)
#define n4_load(p) vld1q_f32(p)
#define n4_store(p, a) vst1q_f32(p, a)
CEILINGS(, n4, 4, EACH24)
#define PORTABLE n4_burn, n4_read, 24 * 4 * 2
#else
typedef float f1;
#define f1_set(x) (x)
#define f1_fma(a, x, y) ((a) * (x) + (y))
#define f1_add(a, b) ((a) + (b))
#define f1_load(p) (*(p))
#define f1_store(p, a) (*(p) = (a))
CEILINGS(, f1, 1, EACH12)
#define PORTABLE f1_burn, f1_read, 12 * 2
#endif

typedef struct machine {
    mha_isa isa;
    void (*burn)(long n);
    void (*read)(const float *p, size_t n, reading how);
    double flop; /* of burn(1) */
} machine;

/* Best first. */
static const machine machines[] = {
#ifdef X86
    { MHA_ISA_AVX512, f16_burn, f16_read, 12 * 16 * 2 },
    { MHA_ISA_AVX2, f8_burn, f8_read, 12 * 8 * 2 },
#endif
#ifdef ARM64
    { MHA_ISA_NEON, n4_burn, n4_read, 24 * 4 * 2 },
#endif
    { MHA_ISA_SCALAR, PORTABLE },
};

static const machine *machine_of(mha_isa isa)
{
    const machine *m = machines;
    while (m->isa != isa) m++;
    return m;
}

/* One loop on one or all threads, which start together: the time to wake them is not the
   machine's speed. (But they do not wait for ever: the pool may have fewer than asked for.) */
typedef struct probe {
    const machine *m;
    long n;            /* burn */
    const float *data; /* read, if set */
    size_t count;
    reading how;
    int threads;
    volatile int here[MAX_THREADS];
    double begin[MAX_THREADS], end[MAX_THREADS];
} probe;

static void probe_task(void *arg, int index)
{
    probe *p = (probe *)arg;
    double until = now() + 2e-3;
    size_t share = p->count / (size_t)p->threads;
    int i = 0;
    p->here[index] = 1;
    while (i < p->threads && now() < until)
        if (p->here[i]) i++;
    p->begin[index] = now();
    if (p->data) p->m->read(p->data + share * (size_t)index, share, p->how);
    else p->m->burn(p->n);
    p->end[index] = now();
}

/* CPU time that these loops got, and what they would have got from an idle machine. */
static double cpu_got[2], cpu_due[2];

/* Seconds from the first start to the last end. */
static double probe_run(probe *p, int many)
{
    mha_parallel par = mha_pool_parallel(pool);
    double begin = now(), end;
    clock_t cpu = clock();
    int i;
    p->threads = thread_count(many);
    for (i = 0; i < p->threads; i++) p->here[i] = 0;
    if (many) par.parallel_for(par.ctx, p->threads, probe_task, p);
    else probe_task(p, 0);
    cpu_got[many] += (double)(clock() - cpu) / CLOCKS_PER_SEC;
    cpu_due[many] += (now() - begin) * p->threads;
    begin = p->begin[0], end = p->end[0];
    for (i = 1; i < p->threads; i++) {
        if (p->begin[i] < begin) begin = p->begin[i];
        if (p->end[i] > end) end = p->end[i];
    }
    return end - begin;
}

static void raise_to(double *best, double x)
{
    if (x > *best) *best = x;
}

/* Raises peak[isa][many]. A burst is short, so that on a busy machine some are undisturbed. */
static void measure_peak(int isa, int many)
{
    static probe p;
    static long n[MAX_ISAS];
    p.m = machine_of(isas[isa]);
    for (p.n = 1000; !n[isa]; p.n *= 2) {
        int i = 0;
        while (i < 4 && probe_run(&p, 0) > 0.2e-3) i++;
        if (i == 4) n[isa] = p.n;
    }
    p.n = n[isa];
    raise_to(&peak[isa][many], p.m->flop * (double)p.n * thread_count(many) / probe_run(&p, many));
}

/* Bytes per second of one reading, with the widest loads there are. */
static double read_speed(const float *data, size_t count, int many, reading how)
{
    static probe p;
    for (p.m = machines; !mha_isa_available(p.m->isa); p.m++) {}
    p.data = data;
    p.count = count;
    p.how = how;
    return (double)(count * sizeof *data) / probe_run(&p, many);
}

/* Something to read that is in no cache: 256 MB, or four times the last cache if that is more,
   read round and round. 96 MB of it, or twice the last cache, are read before each call that is
   to find nothing in a cache. Apart from it, 192 MB to read again and again: more than any decode
   step reads. */
static float *big, *again;
static size_t big_count, sweep_count;

static void make_big(void)
{
    const size_t again_count = (size_t)192 << 18;
    size_t cache = 0, i;
#ifdef _SC_LEVEL3_CACHE_SIZE
    long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (size > 0) cache = (size_t)size / sizeof *big;
#endif
    big_count = (size_t)256 << 18;
    sweep_count = (size_t)96 << 18;
    if (4 * cache > big_count) big_count = 4 * cache;
    if (2 * cache > sweep_count) sweep_count = 2 * cache;
    big = (float *)allocate((big_count + again_count) * sizeof *big);
    again = big + big_count;
    for (i = 0; i < big_count + again_count; i++) big[i] = 1.0f;
}

/* The next count floats, none of which were read a short while ago. */
static double read_on(size_t count, int many, reading how)
{
    static size_t at;
    double speed;
    if (at + count > big_count) at = 0;
    speed = read_speed(big + at, count, many, how);
    at += count;
    return speed;
}

/* Raises dram[many]. A window takes about as long as a decode call, since the best of many short
   times is not to be set against a long one. */
static void measure_dram(int many, reading how)
{
    size_t window = ((size_t)8 << 18) * (size_t)thread_count(many);
    if (window > big_count / 4) window = big_count / 4;
    raise_to(&dram[many], read_on(window, many, how));
}

/* ---- cells ------------------------------------------------------------------------------------- */

static void fail(const cell *c, mha_status status)
{
    char why[256] = "";
    if (c->part == LAYER) mha_forward_check(c->layer, &c->forward, why, sizeof why);
    else mha_sdpa_check(&c->sdpa, why, sizeof why);
    die(1, "%s %s, %s, %s: %s", c->name, parts[c->part], mha_isa_name(isas[c->isa]),
        threads_text(c->many), why[0] ? why : mha_strerror(status));
}

static void call(const cell *c)
{
    mha_status status = c->part == LAYER ? mha_forward(c->layer, &c->forward) : mha_sdpa(&c->sdpa);
    if (status != MHA_OK) fail(c, status);
}

/* After a decode step: back to the tokens that were there before. */
static void undo(const cell *c)
{
    if (c->cache) {
        mha_status status = mha_cache_truncate(c->cache, -1, c->r->cached);
        if (status != MHA_OK) fail(c, status);
    }
}

/* Multiply-adds count 2; causal counts the keys that are visible. */
static double flop_of(const row *r, int part)
{
    double B = r->B, T = r->T, D = r->D, H = r->H, G = r->G, d = D / H, S = r->cached + T;
    double pairs = r->causal ? T * r->cached + T * (T + 1) / 2 : T * S;
    double core = 4 * B * H * d * pairs;
    return part == CORE ? core : core + 2 * B * T * D * (H + 2 * G) * d + 2 * B * T * H * d * D;
}

/* What a decode step cannot do without reading: keys, values and, of a layer, the weights. */
static double bytes_read(const row *r, int part)
{
    double D = r->D, H = r->H, G = r->G, d = D / H;
    double kv = 2.0 * r->B * (r->cached + r->T) * G * d;
    double size = r->type == MHA_F32 ? 4 : r->type == MHA_INT8 ? 1 : 2;
    return size * (part == CORE ? kv : kv + D * (H + 2 * G) * d + H * d * D);
}

static mha_layer *make_layer(const row *r, mha_isa isa, const mha_weights *w)
{
    mha_config cfg = { 0 };
    mha_layer *layer;
    mha_status status;
    char why[256] = "";
    cfg.d_model = r->D;
    cfg.n_heads = r->H;
    cfg.n_kv_heads = r->G;
    cfg.isa = isa;
    cfg.weight_type = r->type;
    status = mha_layer_create(&layer, &cfg, w);
    if (status != MHA_OK) {
        mha_layer_check(&cfg, w, why, sizeof why);
        die(1, "%s: %s", r->name, why[0] ? why : mha_strerror(status));
    }
    return layer;
}

static mha_cache *make_cache(const row *r, const mha_layer *layer)
{
    mha_cache *cache = NULL;
    mha_cache_config room = { 0 };
    mha_args a = { 0 };
    size_t n = (size_t)r->B * (size_t)r->cached * (size_t)r->D;
    float *x = (float *)malloc(n * sizeof *x);
    mha_status status;
    room.batch = r->B;
    room.capacity = r->cached + r->T;
    room.type = r->type;
    status = x ? mha_cache_create(&cache, layer, &room) : MHA_ERR_MEMORY;
    if (status == MHA_OK) {
        fill(x, n, 1.0);
        a.batch = r->B;
        a.seq = r->cached;
        a.x = x;
        a.y = x;
        a.mask.causal = MHA_CAUSAL;
        a.cache = cache;
        a.parallel = mha_pool_parallel(pool);
        status = mha_forward(layer, &a);
    }
    if (status != MHA_OK) die(1, "%s: %s", r->name, mha_strerror(status));
    free(x);
    return cache;
}

/* Inputs are shared by all cells of a row. Q, K and V are where the projection of a transformer
   leaves them, side by side in [B,T,(H+2*G)*d]; but the keys and values that a decode step
   reads lie apart, [B,G,S,d]. */
typedef struct inputs {
    float *x, *y, *q, *k, *v, *o;
} inputs;

static inputs make_inputs(const row *r)
{
    inputs in;
    size_t B = (size_t)r->B, T = (size_t)r->T, S = T + (size_t)r->cached, D = (size_t)r->D;
    size_t kv = D / (size_t)r->H * (size_t)r->G;
    in.x = normal(B * T * D, 1.0);
    in.y = normal(B * T * D, 1.0);
    in.o = normal(B * T * D, 1.0);
    in.q = normal(B * T * (D + 2 * kv), 1.0);
    in.k = r->cached ? normal(B * S * kv, 1.0) : in.q + D;
    in.v = r->cached ? normal(B * S * kv, 1.0) : in.k + kv;
    return in;
}

static void make_cell(cell *c, const row *r, const inputs *in, int part, int state, int isa,
                      int many)
{
    mha_parallel parallel = mha_pool_parallel(many ? pool : NULL);
    mha_causal causal = r->causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
    memset(c, 0, sizeof *c);
    cell_name(c->name, sizeof c->name, r, state);
    c->r = r;
    c->part = part;
    c->state = state;
    c->isa = isa;
    c->many = many;
    c->flop = flop_of(r, part);
    c->read = bytes_read(r, part);
    if (part == LAYER) {
        mha_args *a = &c->forward;
        a->batch = r->B;
        a->seq = r->T;
        a->x = in->x;
        a->y = in->y;
        a->mask.causal = causal;
        a->parallel = parallel;
    } else {
        mha_sdpa_args *a = &c->sdpa;
        ptrdiff_t d = r->D / r->H, side = r->D + 2 * r->G * d;
        mha_stride qkv = { 0, 0, 0 }, o = { 0, 0, 0 };
        qkv.batch = r->T * side, qkv.head = d, qkv.seq = side;
        o.batch = (ptrdiff_t)r->T * r->D, o.head = d, o.seq = r->D;
        a->batch = r->B;
        a->heads = r->H;
        a->kv_heads = r->G;
        a->seq = r->T;
        a->source_seq = r->cached + r->T;
        a->d_k = r->D / r->H;
        a->q = in->q, a->q_stride = qkv;
        a->k = in->k;
        a->v = in->v;
        a->o = in->o, a->o_stride = o;
        if (!r->cached) a->k_stride = a->v_stride = qkv;
        a->mask.causal = causal;
        a->parallel = parallel;
        a->isa = isas[isa];
    }
}

/* The cells of a row, for every instruction set, part, state and number of threads. */
static void make_row(const row *r)
{
    inputs in;
    size_t D = (size_t)r->D, wide = D + 2 * (D / (size_t)r->H) * (size_t)r->G;
    float *weights;
    mha_layer *layer[MAX_ISAS];
    mha_cache *cache[MAX_ISAS] = { 0 };
    mha_weights w = { 0 };
    int part, state, isa, many;
    if (!wanted(r, first_state(r)) && !wanted(r, last_state(r))) return;
    in = make_inputs(r);
    weights = (float *)malloc((D + 1) * (wide + D) * sizeof *weights);
    if (!weights) die(1, "no memory");
    fill(weights, (D + 1) * (wide + D), 1.0 / sqrt((double)D));
    w.qkv = weights;
    w.out = w.qkv + D * wide;
    if (r->bias) w.b_qkv = w.out + D * D, w.b_out = w.b_qkv + wide;
    for (isa = 0; isa < n_isas; isa++) {
        layer[isa] = make_layer(r, isas[isa], &w);
        if (r->cached) cache[isa] = make_cache(r, layer[isa]);
    }
    free(weights);
    for (state = first_state(r); state <= last_state(r); state++)
        for (part = LAYER; part <= (r->type == MHA_F32 ? CORE : LAYER) && wanted(r, state); part++)
            for (isa = 0; isa < n_isas; isa++)
                for (many = 0; many < n_many; many++) {
                    cell *c = &cells[n_cells++];
                    mha_status status;
                    make_cell(c, r, &in, part, state, isa, many);
                    if (part == LAYER) {
                        c->layer = layer[isa];
                        c->forward.cache = c->cache = cache[isa];
                        status = mha_workspace_size(c->layer, &c->forward, &c->bytes);
                    } else {
                        status = mha_sdpa_workspace_size(&c->sdpa, &c->bytes);
                    }
                    if (status != MHA_OK) fail(c, status);
                }
}

/* One workspace for all: they take turns. */
static void give_workspace(void)
{
    size_t bytes = 0;
    void *workspace;
    cell *c;
    for (c = cells; c < cells + n_cells; c++)
        if (c->bytes > bytes) bytes = c->bytes;
    workspace = allocate(bytes);
    memset(workspace, 0, bytes);
    for (c = cells; c < cells + n_cells; c++) {
        c->forward.workspace = c->sdpa.workspace = workspace;
        c->forward.workspace_size = c->sdpa.workspace_size = c->bytes;
    }
}

/* ---- measuring ----------------------------------------------------------------------------------- */

static void add_sample(cell *c, double seconds)
{
    if (c->samples == c->room) {
        c->room = c->room ? 2 * c->room : 256;
        c->sample = (double *)realloc(c->sample, c->room * sizeof *c->sample);
        if (!c->sample) die(1, "no memory");
    }
    c->sample[c->samples++] = seconds;
}

static double time_call(const cell *c)
{
    double begin, end;
    int i;
    if (c->state == COLD) read_on(sweep_count, c->many, readings[1]);
    begin = now();
    for (i = 0; i < c->inner; i++) call(c);
    end = now();
    undo(c);
    return (end - begin) / c->inner;
}

/* For about so many seconds. */
static void measure_ceiling(cell *c, double seconds)
{
    double begin = now();
    int i = 0;
    while (i < 8 || now() - begin < seconds) {
        reading how = readings[i++ % READINGS];
        if (c->state == PLAIN) measure_peak(c->isa, c->many);
        else if (c->state == COLD) measure_dram(c->many, how);
        else raise_to(&c->ceiling, read_speed(again, (size_t)c->read / 4, c->many, how));
    }
}

/* Samples for about so many seconds, at least one. The first calls only warm up, unless they are
   so long that it does not matter. A cell over its limit sits out: slow kernels, long rows. */
static void visit(cell *c, double seconds, double limit)
{
    double begin, t = 0.0;
    size_t before = c->samples;
    int i, first = !c->inner, warm = c->state == HOT ? 3 : c->state == COLD ? 0 : 1;
    if (c->spent > limit && c->samples > 1) return;
    measure_ceiling(c, seconds / 10);
    begin = now();
    if (first) c->inner = 1;
    for (i = 0; i < warm + first; i++) {
        t = time_call(c);
        if (t > 0.05) {
            add_sample(c, t);
            break;
        }
    }
    if (first && c->state == PLAIN && t < 20e-6) c->inner = (int)(30e-6 / (t + 1e-8)) + 1;
    while (c->samples == before || now() - begin < seconds) add_sample(c, time_call(c));
    c->spent += now() - begin;
    measure_ceiling(c, seconds / 10);
}

/* One line that changes on a terminal; elsewhere only the lines that matter. */
static void progress(int matters, const char *format, ...)
{
    static int terminal = -1, length;
    va_list list;
    int n;
#ifdef _WIN32
    if (terminal < 0) terminal = _isatty(_fileno(stderr));
#else
    if (terminal < 0) terminal = isatty(fileno(stderr));
#endif
    if (!terminal && !matters) return;
    va_start(list, format);
    n = vfprintf(stderr, format, list);
    va_end(list);
    if (terminal) fprintf(stderr, "%*s\r", length > n ? length - n : 0, "");
    else fprintf(stderr, "\n");
    fflush(stderr);
    length = n;
}

static void measure(int rounds, double seconds)
{
    double begin = now();
    int round, i, isa, many;
    cell *c;
    progress(0, "peak and bandwidth");
    for (many = 0; many < n_many; many++)
        for (i = 0; i < 256; i++) {
            for (isa = 0; isa < n_isas; isa++) measure_peak(isa, many);
            if (i % 4 == 0) measure_dram(many, readings[i / 4 % READINGS]);
        }
    for (round = 0; round < rounds; round++) {
        progress(1, "round %d of %d, %.0f s so far", round + 1, rounds, now() - begin);
        for (i = 0; i < n_cells; i++) {
            c = &cells[i];
            progress(0, "round %d of %d, %.0f s so far: %s %s, %s, %s", round + 1, rounds,
                     now() - begin, c->name, parts[c->part], mha_isa_name(isas[c->isa]),
                     threads_text(c->many));
            visit(c, seconds, 3 * rounds * seconds);
        }
    }
    progress(0, "");
    /* All threads can do at least what one can, also where a busy machine never let them. */
    for (isa = 0; isa < n_isas; isa++) raise_to(&peak[isa][1], peak[isa][0]);
    raise_to(&dram[1], dram[0]);
    for (c = cells; c < cells + n_cells; c++)
        if (c->many) raise_to(&c->ceiling, c[-1].ceiling);
    for (c = cells; c < cells + n_cells; c++) {
        qsort(c->sample, c->samples, sizeof *c->sample, ascending);
        c->best = c->sample[0];
        c->median = c->sample[c->samples / 2];
    }
}

/* ---- what it says ------------------------------------------------------------------------------ */

static double ceiling(const cell *c)
{
    return c->state == PLAIN  ? peak[c->isa][c->many]
           : c->state == COLD ? dram[c->many]
                              : c->ceiling;
}

static double fraction(const cell *c)
{
    return (c->state == PLAIN ? c->flop : c->read) / c->best / ceiling(c);
}

/* GFLOP/s, or GB/s of a decode step. */
static double speed_of(const cell *c)
{
    return (c->state == PLAIN ? c->flop : c->read) / c->best * 1e-9;
}

static int is_overhead(const cell *c)
{
    return strcmp(c->name, "overhead") == 0;
}

static const char *cpu_name(void)
{
    static char line[256];
    const char *name = getenv("PROCESSOR_IDENTIFIER"); /* Windows */
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        char *value = strstr(line, ": ");
        if (strncmp(line, "model name", 10) != 0 || !value) continue;
        value[strcspn(value, "\n")] = 0;
        name = value + 2;
        break;
    }
    if (f) fclose(f);
    if (name) return name;
#if defined(X86)
    return "x86-64";
#elif defined(ARM64)
    return "aarch64";
#else
    return "unknown CPU";
#endif
}

static const char *compiler_name(void)
{
#if defined(__clang__)
    return __VERSION__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown compiler";
#endif
}

static const char *today(void)
{
    static char text[32];
    time_t t = time(NULL);
    strftime(text, sizeof text, "%Y-%m-%d", localtime(&t));
    return text;
}

/* "1 thread: FMA peak 104.2 GFLOP/s (avx2), DRAM read 19.7 GB/s" */
static const char *ceilings(int many)
{
    static char text[256];
    size_t n = (size_t)snprintf(text, sizeof text, "%s: FMA peak", threads_text(many));
    int isa;
    for (isa = 0; isa < n_isas; isa++)
        n += (size_t)snprintf(text + n, sizeof text - n, " %.1f GFLOP/s (%s),",
                              peak[isa][many] * 1e-9, mha_isa_name(isas[isa]));
    snprintf(text + n, sizeof text - n, " DRAM read %.1f GB/s", dram[many] * 1e-9);
    return text;
}

static void print_csv(void)
{
    const cell *c;
    printf("row,part,threads,isa,ms_median,ms_best,gflops,fraction,bytes\n");
    for (c = cells; c < cells + n_cells; c++)
        if (!is_overhead(c))
            printf("%s,%s,%d,%s,%.6f,%.6f,%.3f,%.4f,%.0f\n", c->name, parts[c->part],
                   thread_count(c->many), mha_isa_name(isas[c->isa]), c->median * 1e3,
                   c->best * 1e3, c->flop / c->best * 1e-9, fraction(c), (double)c->bytes);
}

static void print_ms(double seconds)
{
    double ms = seconds * 1e3;
    printf(" %9.*f", ms < 1 ? 4 : ms < 100 ? 3 : 1, ms);
}

static void print_bytes(size_t bytes)
{
    double b = (double)bytes;
    if (b < 1e6) printf(" %7.1f kB", b * 1e-3);
    else printf(" %7.1f MB", b * 1e-6);
}

/* Waking the threads takes some of their time on an idle machine, too. */
static void print_busy(FILE *f)
{
    int many;
    for (many = 0; many < n_many; many++) {
        double share = cpu_got[many] / cpu_due[many];
        if (share < (many ? 0.75 : 0.9))
            fprintf(
                f,
                "The machine is busy: %s got %.0f %% of the CPU time asked for. The figures say "
                "little.\n",
                threads_text(many), share * 100);
    }
}

static void print_machine(void)
{
    int many;
    printf("mha.h %s, %s\n", MHA_VERSION, today());
    printf("%s; %s, %s\n", cpu_name(), compiler_name(), BENCH_FLAGS);
    for (many = 0; many < n_many; many++) printf("%s\n", ceilings(many));
    print_busy(stdout);
}

/* One instruction set: a line per row and part, the threads beside each other. Decode has a table
   of its own, since it is memory that limits it. */
static void print_table(int decode)
{
    const cell *c;
    int many, lines = 0;
    for (c = cells; c < cells + n_cells; c += n_many) {
        if ((c->state != PLAIN) != decode || is_overhead(c)) continue;
        if (!lines++) {
            printf("\n%-30s", "");
            for (many = 0; many < n_many; many++) printf("   %-34s", threads_text(many));
            printf("\n%-24s %-5s", "row", "part");
            for (many = 0; many < n_many; many++)
                printf("   ms median   ms best %7s  %7s", decode ? "GB/s" : "GFLOP/s",
                       decode ? "of read" : "of peak");
            printf("%s\n", n_many > 1 ? "    gain  workspace" : "  workspace");
        }
        printf("%-24s %-5s", c->name, parts[c->part]);
        for (many = 0; many < n_many; many++) {
            printf("  ");
            print_ms(c[many].median);
            print_ms(c[many].best);
            printf(" %7.1f   %5.1f%%", speed_of(c + many), fraction(c + many) * 100);
        }
        if (n_many > 1) printf("  %5.2fx", c[0].best / c[1].best);
        print_bytes(c[n_many - 1].bytes);
        printf("\n");
    }
    if (lines && decode)
        printf(
            "\nof read: of the speed at which the weights, keys and values could at best be read.\n"
            "-cold: from DRAM, %.0f MB of other memory having been read before each call.\n"
            "-hot: the same call repeated; against a plain buffer of that size, read repeatedly.\n",
            (double)sweep_count * 4 / 1048576.0);
}

/* Decode steps from DRAM with compact weights and cache beside those with floats. */
static void print_compact(void)
{
    const cell *c, *f32;
    int lines = 0;
    for (c = cells; c < cells + n_cells; c++)
        for (f32 = cells; f32 < c; f32++) {
            if (c->r->type == MHA_F32 || f32->r->type != MHA_F32 || c->r->B != f32->r->B ||
                c->r->D != f32->r->D || c->r->H != f32->r->H || f32->part != LAYER ||
                c->state != COLD || f32->state != COLD || c->many != f32->many ||
                c->isa != f32->isa)
                continue;
            if (!lines++)
                printf("\ncompact types, times as fast as floats\n%48s   best\n", "median");
            printf("  %-26s %-10s %8.2f %6.2f\n", c->name, threads_text(c->many),
                   f32->median / c->median, f32->best / c->best);
        }
}

/* Several instruction sets beside each other. */
static void print_comparison(void)
{
    const cell *c;
    int many, isa, lines = 0;
    size_t pair = (size_t)(n_isas * n_many);
    for (c = cells; c < cells + n_cells; c += pair)
        for (many = 0; many < n_many && !is_overhead(c); many++) {
            const cell *first = c + many;
            if (!lines++) {
                printf("\n%-24s %-5s %7s", "row", "part", "threads");
                for (isa = 0; isa < n_isas; isa++) printf("   %-25s", mha_isa_name(isas[isa]));
                printf("\n%-38s", "");
                for (isa = 0; isa < n_isas; isa++) printf("     ms best ratio  fraction");
                printf("\n");
            }
            printf("%-24s %-5s %7d", first->name, parts[first->part], thread_count(many));
            for (isa = 0; isa < n_isas; isa++) {
                const cell *it = first + isa * n_many;
                printf("   ");
                print_ms(it->best);
                printf(" %5.2f   %6.1f%%", it->best / first->best, fraction(it) * 100);
            }
            printf("\n");
        }
    if (lines)
        printf("\nratio: of the time to that of %s. fraction: of the FMA peak of that instruction\n"
               "set; of decode rows, of the read bandwidth.\n",
               mha_isa_name(isas[0]));
}

static void print_overhead(void)
{
    const cell *c;
    int lines = 0;
    for (c = cells; c < cells + n_cells; c++) {
        if (!is_overhead(c)) continue;
        if (!lines++)
            printf("\noverhead of a call (B = 1, T = 1, D = 16, H = 1: next to no arithmetic)\n");
        printf("  %-6s %-5s %-10s %6.3f us\n", mha_isa_name(isas[c->isa]), parts[c->part],
               threads_text(c->many), c->best * 1e6);
    }
}

/* ---- and draws --------------------------------------------------------------------------------- */

enum { SVG_LEFT = 190, SVG_SCALE = 490, SVG_WIDTH = 830, SVG_BAR = 12, SVG_GAP = 10 };

static void svg_text(FILE *f, int x, int y, const char *class_name, const char *format, ...)
{
    char text[512], *s;
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(f, "<text x=\"%d\" y=\"%d\" class=\"%s\">", x, y, class_name);
    for (s = text; *s; s++)
        if (*s == '&' || *s == '<') fprintf(f, "&#%d;", *s);
        else fputc(*s, f);
    fprintf(f, "</text>\n");
}

/* The bars of one kind of row on one instruction set, from y down; gives the y below. With f null
   only that. */
static int svg_panel(FILE *f, int y, int isa, int decode)
{
    const cell *c, *end = cells + n_cells;
    const char *name = "";
    int bottom = y + 46, bars = 0, i;
    for (c = cells; c < end; c++) {
        if (c->isa != isa || (c->state != PLAIN) != decode || is_overhead(c)) continue;
        bottom += SVG_BAR + (strcmp(name, c->name) != 0 ? SVG_GAP : 0);
        name = c->name;
        bars++;
    }
    if (!bars) return y;
    if (!f) return bottom + 24;

    if (decode)
        svg_text(f, 16, y + 16, "b", "%s, decode of one token: share of read bandwidth",
                 mha_isa_name(isas[isa]));
    else svg_text(f, 16, y + 16, "b", "%s: share of FMA peak", mha_isa_name(isas[isa]));
    for (i = 0; i <= 5; i++) {
        int x = SVG_LEFT + i * SVG_SCALE / 5;
        fprintf(f, "<path d=\"M%d.5 %dV%d\" class=\"grid\"/>\n", x, y + 44, bottom + 6);
        svg_text(f, x, y + 38, "dim mid", "%d %%", i * 20);
    }
    y += 46;
    name = "";
    for (c = cells; c < end; c++) {
        double share = fraction(c);
        if (c->isa != isa || (c->state != PLAIN) != decode || is_overhead(c)) continue;
        if (strcmp(name, c->name) != 0) {
            y += SVG_GAP;
            name = c->name;
            svg_text(f, SVG_LEFT - 10, y + SVG_BAR + 9, "end", "%s", name);
        }
        i = (int)((share < 1.03 ? share : 1.03) * SVG_SCALE + 0.5);
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"s%d\"/>\n", SVG_LEFT,
                y, i, SVG_BAR - 2, 2 * c->part + c->many);
        svg_text(f, SVG_LEFT + i + 6, y + 9, "dim small", "%.0f %%, %.*f %s", share * 100,
                 c->best < 1e-4 || (c->best >= 1e-3 && c->best < 0.1) ? 1 : 0,
                 c->best * (c->best < 1e-3 ? 1e6 : 1e3), c->best < 1e-3 ? "\302\265s" : "ms");
        y += SVG_BAR;
    }
    return y + 24;
}

static void draw(FILE *f)
{
    int isa, many, part, x = SVG_LEFT, y = 126, height = y;
    for (isa = 0; isa < n_isas; isa++)
        height = svg_panel(NULL, svg_panel(NULL, height, isa, 0), isa, 1);
    fprintf(
        f,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
        "viewBox=\"0 0 %d %d\">\n<title>mha.h: speed as a share of what the machine can "
        "do</title>\n<style>\n"
        "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
        "fill:#1f2328}\n"
        ".t{font-size:16px;font-weight:600}.b{font-weight:600}\n"
        ".small{font-size:10px;paint-order:stroke;stroke:#fff;stroke-width:3px}\n"
        ".mid{text-anchor:middle}.end{text-anchor:end}.dim{fill:#59636e}\n"
        ".bg{fill:#fff;stroke:#d1d9e0}.grid{stroke:#d1d9e0}\n"
        ".s0{fill:#7fb2e5}.s1{fill:#2a6db5}.s2{fill:#f2b36b}.s3{fill:#c8691c}\n"
        "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}\n"
        ".bg{fill:#0d1117;stroke:#3d444d}.grid{stroke:#3d444d}.small{stroke:#0d1117}}\n</style>\n"
        "<rect x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"6\" class=\"bg\"/>\n",
        SVG_WIDTH, height, SVG_WIDTH, height, SVG_WIDTH - 1, height - 1);
    svg_text(f, 16, 28, "t", "mha.h %s against what the machine can do (longer is better)",
             MHA_VERSION);
    svg_text(f, 16, 48, "dim", "%s; %s, %s; %s", cpu_name(), compiler_name(), BENCH_FLAGS, today());
    for (many = 0; many < n_many; many++)
        svg_text(f, 16, 66 + 18 * many, "dim", "%s", ceilings(many));
    for (part = LAYER; part <= CORE; part++)
        for (many = 0; many < n_many; many++, x += 130) {
            fprintf(f, "<rect x=\"%d\" y=\"100\" width=\"10\" height=\"10\" class=\"s%d\"/>\n", x,
                    2 * part + many);
            svg_text(f, x + 16, 109, "", "%s, %s", parts[part], threads_text(many));
        }
    for (isa = 0; isa < n_isas; isa++) y = svg_panel(f, svg_panel(f, y, isa, 0), isa, 1);
    fprintf(f, "</svg>\n");
}

/* ---- arguments --------------------------------------------------------------------------------- */

static void help(void)
{
    int i;
    printf(
        "Measures mha.h against this machine's own FMA peak and read bandwidth.\n\n"
        "  make bench BENCH_ARGS=\"...\"    or    build/bench ...\n\n"
        "  --quick         about 30 s instead of 120, less exact\n"
        "  --row NAME      only this row; may be given several times\n"
        "  --threads N     1 thread and N, instead of 1 and one per CPU\n"
        "  --isa NAME      scalar, avx2, avx512 or neon instead of the best there is\n"
        "  --compare-isas  all that this machine has, taking turns, side by side\n"
        "  --csv           for scripts, on standard output:\n"
        "                  row,part,threads,isa,ms_median,ms_best,gflops,fraction,bytes\n"
        "  --svg FILE      draw the fractions as bars, too\n"
        "  --help          this\n\n"
        "part      layer: mha_forward; core: mha_sdpa\n"
        "gflops    from the best time; a multiply-add counts 2, masked scores 0\n"
        "fraction  best speed / best FMA peak seen; of decode rows, speed at which the weights,\n"
        "          keys and values are read / best read bandwidth seen\n"
        "bytes     workspace of the call\n\n"
        "rows     ");
    for (i = 0; i < ROWS; i++) printf(" %s%s", rows[i].name, i == ROWS / 2 ? "\n         " : "");
    printf("\n          (a decode row is measured -hot and -cold: either can be named)\n");
}

static int row_exists(const char *name)
{
    char full[32];
    int i, state;
    for (i = 0; i < ROWS; i++)
        for (state = PLAIN; state <= last_state(&rows[i]); state++) {
            cell_name(full, sizeof full, &rows[i], state);
            if (strcmp(name, full) == 0) return 1;
        }
    return 0;
}

static mha_isa isa_named(const char *name)
{
    static const mha_isa all[] = { MHA_ISA_SCALAR, MHA_ISA_AVX2, MHA_ISA_AVX512, MHA_ISA_NEON };
    size_t i;
    for (i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(name, mha_isa_name(all[i])) == 0) return all[i];
    die(2, "there is no instruction set '%s': scalar, avx2, avx512, neon", name);
    return MHA_ISA_AUTO;
}

int main(int argc, char **argv)
{
    int quick = 0, as_csv = 0, compare = 0, threads = 0, i;
    mha_isa isa = MHA_ISA_AUTO;
    FILE *svg = NULL;
    size_t m;
    mha_status status;

    for (i = 1; i < argc; i++) {
        const char *arg = argv[i];
        int takes_value = strcmp(arg, "--row") == 0 || strcmp(arg, "--threads") == 0 ||
                          strcmp(arg, "--isa") == 0 || strcmp(arg, "--svg") == 0;
        const char *value = takes_value ? argv[++i] : NULL;
        if (takes_value && !value) die(2, "%s needs a value; --help says which", arg);
        if (strcmp(arg, "--help") == 0) {
            help();
            return 0;
        }
        if (strcmp(arg, "--quick") == 0) {
            quick = 1;
        } else if (strcmp(arg, "--csv") == 0) {
            as_csv = 1;
        } else if (strcmp(arg, "--compare-isas") == 0) {
            compare = 1;
        } else if (strcmp(arg, "--isa") == 0) {
            isa = isa_named(value);
        } else if (strcmp(arg, "--threads") == 0) {
            threads = atoi(value);
            if (threads < 1 || threads > MAX_THREADS)
                die(2, "--threads %s: it must be 1 to %d", value, MAX_THREADS);
        } else if (strcmp(arg, "--row") == 0) {
            if (!row_exists(value)) die(2, "there is no row '%s'; --help lists them", value);
            if (n_only == MAX_ONLY) die(2, "--row more than %d times", MAX_ONLY);
            only[n_only++] = value;
        } else if (strcmp(arg, "--svg") == 0) {
            svg = fopen(value, "w");
            if (!svg) die(1, "cannot write %s", value);
        } else {
            die(2, "unknown argument '%s'; --help lists them", arg);
        }
    }
    if (compare && isa != MHA_ISA_AUTO) die(2, "--isa and --compare-isas contradict each other");

    for (m = 0; m < sizeof machines / sizeof machines[0]; m++)
        if (mha_isa_available(machines[m].isa) && (compare || !n_isas))
            isas[n_isas++] = machines[m].isa;
    if (isa != MHA_ISA_AUTO) isas[0] = isa;

    status = mha_pool_create(&pool, threads);
    if (status != MHA_OK) die(1, "thread pool: %s", mha_strerror(status));
    threads_all = mha_pool_parallel(pool).threads;
    if (threads_all > MAX_THREADS) die(1, "%d CPUs: choose with --threads", threads_all);
    n_many = threads_all > 1 ? 2 : 1;

    progress(0, "making the inputs");
    make_big();
    for (i = 0; i < ROWS; i++) make_row(&rows[i]);
    give_workspace();
    measure(quick ? 2 : 5, (quick ? 0.06 : 0.2) / (n_isas > 1 ? 2 : 1));

    if (as_csv) {
        print_csv();
        print_busy(stderr);
    } else {
        print_machine();
        if (n_isas > 1) {
            print_comparison();
        } else {
            print_table(0);
            print_table(1);
            print_compact();
        }
        print_overhead();
    }
    if (svg) {
        draw(svg);
        if (fclose(svg) != 0) die(1, "the picture could not be written");
    }
    mha_pool_free(pool);
    return 0;
}
