/* mha_shared.c - mha.h as a shared object that peers.py can call: flat entry points, times taken
   here so that the call from Python does not count. Built with -O2, as a user would.

   Shapes: B batch, T queries, S keys, D model width, H heads, G key/value heads, d head width. */
#define _POSIX_C_SOURCE 200112L
#define MHA_THREADS
#define MHA_IMPLEMENTATION
#include "../../mha.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- cold caches ----------------------------------------------------------------------- */

static struct {
    unsigned char *memory;
    size_t bytes;
    int threads;
    volatile unsigned sink;
} cold;

static void *sweep_memory(void *unused)
{
    unsigned sum = 0;
    for (size_t i = 0; i < cold.bytes; i += 64) sum += cold.memory[i];
    cold.sink = sum;
    return unused;
}

/* Reads other memory until nothing of ours is left in the caches: on this thread and, for the
   caches of the other cores, on as many more as the calls to be timed use. */
void ours_sweep(void)
{
    pthread_t id[64];
    int n = 0;
    while (n < 64 && n + 1 < cold.threads && pthread_create(&id[n], NULL, sweep_memory, NULL) == 0)
        n++;
    sweep_memory(NULL);
    while (n > 0) pthread_join(id[--n], NULL);
}

int ours_sweep_init(size_t bytes, int threads)
{
    cold.threads = threads;
    if (bytes != cold.bytes) {
        free(cold.memory);
        cold.memory = malloc(bytes);
        cold.bytes = cold.memory ? bytes : 0;
        if (cold.memory) memset(cold.memory, 1, bytes);
    }
    return cold.memory != NULL;
}

/* ---- ours --------------------------------------------------------------------------------- */

typedef struct ours {
    mha_layer *layer;
    mha_pool *pool;
    mha_args layer_args;
    mha_sdpa_args core_args;
    mha_cache *cache; /* or null */
    int past;
    char why[256];
} ours;

const char *ours_version(void)
{
    return MHA_VERSION;
}

/* The isa of that name, or -1: unknown, or not on this CPU. */
int ours_isa(const char *name)
{
    for (int i = MHA_ISA_AUTO; i <= MHA_ISA_NEON; i++)
        if (strcmp(mha_isa_name((mha_isa)i), name) == 0)
            return mha_isa_available((mha_isa)i) ? i : -1;
    return -1;
}

/* The best isa of this CPU, by name. */
const char *ours_best_isa(void)
{
    static const mha_isa best_first[] = { MHA_ISA_AVX512, MHA_ISA_AVX2, MHA_ISA_NEON };
    for (size_t i = 0; i < sizeof best_first / sizeof best_first[0]; i++)
        if (mha_isa_available(best_first[i])) return mha_isa_name(best_first[i]);
    return mha_isa_name(MHA_ISA_SCALAR);
}

void ours_free(ours *o)
{
    if (!o) return;
    mha_cache_free(o->cache);
    mha_layer_free(o->layer);
    mha_pool_free(o->pool);
    free(o->layer_args.workspace);
    free(o->core_args.workspace);
    free(o);
}

const char *ours_why(const ours *o)
{
    return o->why;
}

static int failed(ours *o, mha_status status)
{
    if (status != MHA_OK && !o->why[0]) {
        strncat(o->why, mha_strerror(status), sizeof o->why - 1);
    }
    return status != MHA_OK;
}

ours *ours_create(int threads)
{
    ours *o = calloc(1, sizeof *o);
    if (o && threads > 1) failed(o, mha_pool_create(&o->pool, threads));
    return o;
}

/* A layer, w_qkv [D][(H+2G)d], w_out [H*d][D], biases or null, and the call to be timed:
   x [B,T,D] -> y [B,T,D]. past >= 0: B = 1, and `before` [past,D] is in the cache already.
   Returns 0, or 1 with the reason in ours_why. */
int ours_layer(ours *o, int isa, int D, int H, int G, int d, const float *w_qkv, const float *w_out,
               const float *b_qkv, const float *b_out, int B, int T, int causal, int past,
               const float *before, const float *x, float *y)
{
    mha_config cfg;
    mha_weights w;
    mha_args *a = &o->layer_args;
    memset(&cfg, 0, sizeof cfg);
    memset(&w, 0, sizeof w);
    cfg.d_model = D, cfg.n_heads = H, cfg.n_kv_heads = G, cfg.d_k = d, cfg.isa = (mha_isa)isa;
    w.qkv = w_qkv, w.out = w_out, w.b_qkv = b_qkv, w.b_out = b_out;
    if (failed(o, mha_layer_check(&cfg, &w, o->why, sizeof o->why))) return 1;
    if (failed(o, mha_layer_create(&o->layer, &cfg, &w))) return 1;
    a->batch = B, a->mask.causal = causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
    a->parallel = mha_pool_parallel(o->pool);
    o->past = past;
    if (past >= 0) {
        float *sink = malloc((size_t)past * (size_t)D * sizeof(float) + 1);
        mha_status status = sink ? MHA_OK : MHA_ERR_MEMORY;
        if (status == MHA_OK)
            status = mha_cache_create(&o->cache, o->layer,
                                      &(mha_cache_config){ .batch = B, .capacity = past + T });
        a->cache = o->cache, a->seq = past, a->x = before, a->y = sink;
        if (status == MHA_OK && past > 0) {
            mha_forward_check(o->layer, a, o->why, sizeof o->why);
            status = mha_forward(o->layer, a);
        }
        free(sink);
        if (failed(o, status)) return 1;
    }
    a->seq = T, a->x = x, a->y = y;
    if (failed(o, mha_workspace_size(o->layer, a, &a->workspace_size))) return 1;
    a->workspace = malloc(a->workspace_size);
    return failed(o, a->workspace ? MHA_OK : MHA_ERR_MEMORY);
}

/* Attention alone: q [B,H,T,d], k and v [B,G,S,d] -> y [B,H,T,d]. */
int ours_core(ours *o, int isa, int B, int H, int G, int T, int S, int d, int causal,
              const float *q, const float *k, const float *v, float *y)
{
    mha_sdpa_args *a = &o->core_args;
    a->batch = B, a->heads = H, a->kv_heads = G, a->seq = T, a->source_seq = S, a->d_k = d;
    a->q = q, a->k = k, a->v = v, a->o = y, a->isa = (mha_isa)isa;
    a->mask.causal = causal ? MHA_CAUSAL : MHA_NOT_CAUSAL;
    a->parallel = mha_pool_parallel(o->pool);
    if (failed(o, mha_sdpa_check(a, o->why, sizeof o->why))) return 1;
    if (failed(o, mha_sdpa_workspace_size(a, &a->workspace_size))) return 1;
    a->workspace = malloc(a->workspace_size);
    return failed(o, a->workspace ? MHA_OK : MHA_ERR_MEMORY);
}

/* n calls of what was set up; seconds[i] is what the i-th took. before() is called, untimed,
   before each, unless it is null. */
int ours_run(ours *o, int n, void (*before)(void), double *seconds)
{
    mha_status status = MHA_OK;
    for (int i = 0; i < n && status == MHA_OK; i++) {
        double t;
        if (o->cache) mha_cache_truncate(o->cache, -1, o->past);
        if (before) before();
        t = now();
        status = o->layer ? mha_forward(o->layer, &o->layer_args) : mha_sdpa(&o->core_args);
        seconds[i] = now() - t;
    }
    return failed(o, status);
}
