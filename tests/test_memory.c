/* test_memory.c - who allocates what, what happens when that fails, and that nothing is read
   or written outside of what was given. */
#include <limits.h>

#include "options.h"

static int untouched(const void *p, size_t n)
{
    const unsigned char *c = (const unsigned char *)p;
    for (size_t i = 0; i < n; i++)
        if (c[i] != 0xa5) return 0;
    return 1;
}

static void serial_for(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx;
    for (int i = 0; i < n; i++) task(arg, i);
}

/* ---- one forward call with all that it can be given --------------------------------------- */

enum {
    SELF,
    CROSS,
    GROUPED, /* and with what came later: */
    RAGGED,
    RAGGED_CROSS,
    OPTIONS,
    HALVES,
    BYTES,
    CACHED,
    CACHED_RAGGED,
    CACHED_HALVES,
    CACHED_BYTES,
    RING,
    RING_BYTES,
    ASKED,
    KINDS
};

enum { HELD = 9 }; /* tokens that a cache holds before the call */

typedef struct call {
    rich l;
    mha_args a;
    float *x, *source, *source_v, *y, *attn, *mean, *lse;
    size_t nx, ns, nsv, nattn, nmean, nlse;
    mha_cache *cache;
    int cu[3], cu_source[3];
} call;

static int is_cross(int kind)
{
    return kind == CROSS || kind == RAGGED_CROSS;
}

/* A cache that holds HELD tokens of each of two sequences, of which x may take T more. */
static mha_status call_cache(call *c, int kind, int T)
{
    mha_cache_config cfg;
    mha_args a;
    mha_status st;
    memset(&cfg, 0, sizeof cfg);
    cfg.batch = 2;
    cfg.capacity = HELD + T;
    cfg.ring = kind == RING || kind == RING_BYTES;
    cfg.type = kind == CACHED_HALVES                        ? MHA_F16
               : kind == CACHED_BYTES || kind == RING_BYTES ? MHA_INT8
                                                            : MHA_F32;
    st = mha_cache_create(&c->cache, c->l.n.layer, &cfg);
    memset(&a, 0, sizeof a);
    a.batch = 2;
    a.seq = HELD;
    a.x = c->x;
    a.cache = c->cache;
    if (st == MHA_OK) st = mha_cache_append(c->l.n.layer, &a);
    return st;
}

/* B = 2, T = 19, D = 24, H = 4; CROSS: S = 37 from two sources of widths 10 and 7. Ragged: 27 and
   11 tokens, and 50 and 24. */
static mha_status call_make(call *c, mha_isa isa, int kind)
{
    const int ragged = kind == RAGGED || kind == RAGGED_CROSS || kind == CACHED_RAGGED;
    const int cached = kind >= CACHED, grouped = kind == GROUPED || kind >= OPTIONS;
    const int B = 2, D = 24, H = 4, T = ragged ? 27 : 19;
    const int S = is_cross(kind) ? (ragged ? 50 : 37) : kind == ASKED ? HELD : T + cached * HELD;
    const int rows = 38, source_rows = is_cross(kind) ? 74 : 0;
    rng r = rng_make(test_seed + 7);
    mha_status st;
    memset(c, 0, sizeof *c);
    c->l = rich_weights(isa, D, H, grouped ? 2 : H, 6, 5, is_cross(kind) ? 10 : 0,
                        is_cross(kind) ? 7 : 0, kind >= OPTIONS ? WITH_ALL : 0, test_seed);
    if (kind == HALVES) c->l.n.cfg.weight_type = MHA_F16;
    if (kind == BYTES) c->l.n.cfg.weight_type = MHA_INT8;
    c->nx = (size_t)(rows * D);
    c->ns = (size_t)(source_rows * c->l.n.cfg.d_source);
    c->nsv = (size_t)(source_rows * c->l.n.cfg.d_source_v);
    c->nattn = (size_t)(rows * H * S);
    c->nmean = (size_t)(rows * S);
    c->nlse = (size_t)(rows * H);
    c->x = rng_floats(&r, c->nx);
    c->source = rng_floats(&r, c->ns);
    c->source_v = rng_floats(&r, c->nsv);
    c->y = test_floats(c->nx, 0.0f);
    c->attn = test_floats(c->nattn, 0.0f);
    c->mean = test_floats(c->nmean, 0.0f);
    c->lse = test_floats(c->nlse, 0.0f);
    c->a.batch = B;
    c->a.seq = ragged ? rows : T;
    c->a.x = c->x;
    c->a.y = c->y;
    c->a.lse = c->lse;
    c->cu[1] = 27, c->cu[2] = rows;
    c->cu_source[1] = 50, c->cu_source[2] = source_rows;
    if (ragged) c->a.cu_seq = c->cu;
    if (kind == RAGGED_CROSS) c->a.cu_source = c->cu_source;
    if (is_cross(kind)) {
        c->a.source_seq = ragged ? source_rows : S;
        c->a.source = c->source;
        c->a.source_v = c->source_v;
    }
    st = rich_create(&c->l);
    if (st != MHA_OK || !cached) return st;
    c->a.cache_only = kind == ASKED;
    if (kind == RING || kind == RING_BYTES) c->a.mask.windowed = 1, c->a.mask.left = 7;
    st = call_cache(c, kind, T);
    c->a.cache = c->cache;
    return st;
}

/* The cache as it was before the call. */
static void call_blank(call *c)
{
    if (c->cache) mha_cache_truncate(c->cache, -1, HELD);
    memset(c->y, 0xa5, c->nx * sizeof(float));
    memset(c->attn, 0xa5, c->nattn * sizeof(float));
    memset(c->mean, 0xa5, c->nmean * sizeof(float));
    memset(c->lse, 0xa5, c->nlse * sizeof(float));
}

static int call_untouched(const call *c)
{
    for (int b = 0; b < 2 && c->cache; b++)
        if (mha_cache_length(c->cache, b) != HELD) return 0;
    return untouched(c->y, c->nx * sizeof(float)) && untouched(c->attn, c->nattn * sizeof(float)) &&
           untouched(c->mean, c->nmean * sizeof(float)) &&
           untouched(c->lse, c->nlse * sizeof(float));
}

static void call_free(call *c)
{
    mha_cache_free(c->cache);
    rich_free(&c->l);
    free(c->x);
    free(c->source);
    free(c->source_v);
    free(c->y);
    free(c->attn);
    free(c->mean);
    free(c->lse);
}

/* ---- allocation fails --------------------------------------------------------------------- */

/* run() with its 1st, 2nd, ... allocation failing, until it takes fewer than that. */
typedef mha_status run_fn(void *ctx);
typedef int check_fn(const void *ctx); /* 1 if the outputs are as they were */

TEST each_allocation_fails(run_fn *run, check_fn *check, void *ctx)
{
    const long live = test_live;
    for (long n = 0; n < 100; n++) {
        mha_status st;
        test_allocs = 0;
        test_fail_after = n;
        st = run(ctx);
        test_fail_after = -1;
        ASSERT_EQm("leak", live, test_live);
        if (st == MHA_OK) {
            ASSERTm("it never allocated", n > 0);
            ASSERT_EQ_FMT(n, test_allocs, "%ld");
            PASS();
        }
        ASSERT_STATUS(MHA_ERR_MEMORY, st);
        ASSERTm("output written although memory was short", check(ctx));
    }
    FAILm("more than 100 allocations");
}

static mha_layer *made; /* of create_run */

static mha_status create_run(void *ctx)
{
    net *n = (net *)ctx;
    mha_status st;
    made = (mha_layer *)(void *)n; /* anything but null */
    st = mha_layer_create(&made, &n->cfg, &n->w);
    mha_layer_free(made);
    return st;
}

static int create_check(const void *ctx)
{
    (void)ctx;
    return made == NULL;
}

TEST layer_create_fails(mha_isa isa)
{
    net n = net_weights(isa, 24, 4, 2, 6, 5, 10, 7, test_seed);
    CHECK_CALL(each_allocation_fails(create_run, create_check, &n));
    net_free(&n);
    for (int type = MHA_F32; type <= MHA_INT8; type++) {
        rich l = rich_weights(isa, 24, 4, 2, 6, 5, 10, 7, WITH_ALL, test_seed);
        l.n.cfg.weight_type = (mha_type)type;
        CHECK_CALL(each_allocation_fails(create_run, create_check, &l.n));
        rich_free(&l);
    }
    PASS();
}

static mha_status forward_run(void *ctx)
{
    call *c = (call *)ctx;
    call_blank(c);
    return mha_forward(c->l.n.layer, &c->a);
}

static int forward_check(const void *ctx)
{
    return call_untouched((const call *)ctx);
}

TEST forward_fails(mha_isa isa)
{
    for (int kind = SELF; kind < KINDS; kind++) {
        call c;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        CHECK_CALL(each_allocation_fails(forward_run, forward_check, &c));
        c.a.attn = c.attn;
        CHECK_CALL(each_allocation_fails(forward_run, forward_check, &c));
        c.a.attn_mean = c.mean;
        CHECK_CALL(each_allocation_fails(forward_run, forward_check, &c));
        c.a.parallel.parallel_for = serial_for;
        c.a.parallel.threads = 3;
        CHECK_CALL(each_allocation_fails(forward_run, forward_check, &c));
        call_free(&c);
    }
    PASS();
}

static mha_status sdpa_run(void *ctx)
{
    problem *p = (problem *)ctx;
    memset(p->o, 0xa5, p->no * sizeof(float));
    memset(p->attn, 0xa5, p->nattn * sizeof(float));
    memset(p->mean, 0xa5, p->nmean * sizeof(float));
    memset(p->lse, 0xa5, p->nlse * sizeof(float));
    return mha_sdpa(&p->a);
}

static int sdpa_check(const void *ctx)
{
    const problem *p = (const problem *)ctx;
    return untouched(p->o, p->no * sizeof(float)) && untouched(p->attn, p->nattn * sizeof(float)) &&
           untouched(p->mean, p->nmean * sizeof(float)) &&
           untouched(p->lse, p->nlse * sizeof(float));
}

/* Two sequences of 27 and 11 queries and 50 and 24 keys, with all that scores can be given. */
static problem problem_ragged(mha_isa isa)
{
    static const int cu[3] = { 0, 27, 38 }, cu_source[3] = { 0, 50, 74 };
    static const float slope[4] = { 0.5f, 0.25f, 0.125f, 0.0625f };
    static const float sink[4] = { 0.0f, 1.0f, -1.0f, 2.0f }, gate[4] = { 1.0f, 0.5f, 0.0f, 2.0f };
    problem p = problem_make(isa, 1, 4, 2, 38, 74, 6, 5, test_seed);
    p.a.batch = 2;
    p.a.cu_seq = cu;
    p.a.cu_source = cu_source;
    p.a.softcap = 3.0f;
    p.a.alibi = slope;
    p.a.sink = sink;
    p.a.gate = gate;
    p.a.mask.causal = MHA_CAUSAL;
    p.a.mask.windowed = 1;
    p.a.mask.left = 20;
    return p;
}

TEST sdpa_fails(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 6, 5, test_seed);
    CHECK_CALL(each_allocation_fails(sdpa_run, sdpa_check, &p));
    p.a.attn = NULL;
    CHECK_CALL(each_allocation_fails(sdpa_run, sdpa_check, &p));
    p.a.attn_mean = NULL;
    CHECK_CALL(each_allocation_fails(sdpa_run, sdpa_check, &p));
    problem_free(&p);
    p = problem_ragged(isa);
    CHECK_CALL(each_allocation_fails(sdpa_run, sdpa_check, &p));
    p.a.attn = p.a.attn_mean = NULL;
    CHECK_CALL(each_allocation_fails(sdpa_run, sdpa_check, &p));
    problem_free(&p);
    PASS();
}

/* A stage may need no memory at all; if it takes some, it must survive not getting it. */
TEST stages_fail(mha_isa isa)
{
    for (int kind = SELF; kind <= GROUPED; kind++) {
        call c;
        const long live = test_live;
        long n;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        const long with_layer = test_live;
        /* room for q [B,T,H*d_k], k and v is in attn: B*H*T*S floats are more */
        float *q = c.attn, *k = test_floats(2 * 37 * 24, 0.0f), *v = test_floats(2 * 37 * 20, 0.0f);
        float *o = test_floats(2 * 19 * 20, 1.0f);
        for (n = 0; n < 100; n++) {
            mha_status st;
            call_blank(&c);
            test_fail_after = n;
            st = mha_project_qkv(c.l.n.layer, &c.a, q, k, v);
            test_fail_after = -1;
            ASSERT_EQ(with_layer, test_live);
            if (st == MHA_OK) break;
            ASSERT_STATUS(MHA_ERR_MEMORY, st);
            ASSERT(call_untouched(&c));
        }
        for (n = 0; n < 100; n++) {
            mha_status st;
            call_blank(&c);
            test_fail_after = n;
            st = mha_project_out(c.l.n.layer, &c.a, o);
            test_fail_after = -1;
            ASSERT_EQ(with_layer, test_live);
            if (st == MHA_OK) break;
            ASSERT_STATUS(MHA_ERR_MEMORY, st);
            ASSERT(call_untouched(&c));
        }
        free(k);
        free(v);
        free(o);
        call_free(&c);
        ASSERT_EQ(live, test_live);
    }
    PASS();
}

static mha_cache *made_cache; /* of cache_create_run */
static mha_cache_config made_cfg;

static mha_status cache_create_run(void *ctx)
{
    const net *n = (const net *)ctx;
    mha_status st;
    made_cache = (mha_cache *)ctx; /* anything but null */
    st = mha_cache_create(&made_cache, n->layer, &made_cfg);
    mha_cache_free(made_cache);
    return st;
}

static int cache_create_check(const void *ctx)
{
    (void)ctx;
    return made_cache == NULL;
}

TEST cache_create_fails(mha_isa isa)
{
    net n = net_weights(isa, 24, 4, 2, 6, 5, 0, 0, test_seed);
    ASSERT_STATUS(MHA_OK, net_create(&n));
    for (int type = MHA_F32; type <= MHA_INT8; type++)
        for (int ring = 0; ring < 2; ring++) {
            memset(&made_cfg, 0, sizeof made_cfg);
            made_cfg.batch = 3;
            made_cfg.capacity = 33;
            made_cfg.ring = ring;
            made_cfg.type = (mha_type)type;
            CHECK_CALL(each_allocation_fails(cache_create_run, cache_create_check, &n));
        }
    net_free(&n);
    PASS();
}

/* mha_cache_append may need no memory; if it takes some, it must survive not getting it. And what
   mha_workspace_size says is enough. */
TEST append_fails(mha_isa isa)
{
    for (int kind = CACHED; kind < ASKED; kind++) {
        call c;
        size_t size = 0;
        unsigned char *workspace;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        const long live = test_live;
        for (long n = 0; n < 100; n++) {
            mha_status st;
            call_blank(&c);
            test_fail_after = n;
            st = mha_cache_append(c.l.n.layer, &c.a);
            test_fail_after = -1;
            ASSERT_EQ(live, test_live);
            if (st == MHA_OK) break;
            ASSERT_STATUS(MHA_ERR_MEMORY, st);
            ASSERT(call_untouched(&c));
        }
        call_blank(&c);
        ASSERT_STATUS(MHA_OK, mha_workspace_size(c.l.n.layer, &c.a, &size));
        workspace = (unsigned char *)malloc(size + 16);
        ASSERT(workspace != NULL);
        memset(workspace, 0xa5, size + 16);
        c.a.workspace = workspace + 3;
        c.a.workspace_size = size;
        test_allocs = 0;
        ASSERT_STATUS(MHA_OK, mha_cache_append(c.l.n.layer, &c.a));
        ASSERT_EQ_FMT(0L, test_allocs, "%ld");
        ASSERT(untouched(workspace, 3) && untouched(workspace + 3 + size, 13));
        free(workspace);
        call_free(&c);
    }
    PASS();
}

static mha_status pool_run(void *ctx)
{
    mha_pool *pool = NULL;
    mha_status st = mha_pool_create(&pool, *(int *)ctx);
    if (st == MHA_OK) mha_pool_free(pool);
    return st;
}

static int pool_check(const void *ctx)
{
    (void)ctx;
    return 1;
}

TEST pool_create_fails(void)
{
    int threads = 3;
    CHECK_CALL(each_allocation_fails(pool_run, pool_check, &threads));
    threads = 1;
    CHECK_CALL(each_allocation_fails(pool_run, pool_check, &threads));
    PASS();
}

/* ---- no allocation when memory is given --------------------------------------------------- */

TEST nothing_allocated(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 6, 5, test_seed);
    mha_pool *pool = NULL;
    const int swapped[2] = { 1, 0 };
    char why[64];

    ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, 2));
    for (int kind = SELF; kind < KINDS; kind++)
        for (int threads = 0; threads < 2; threads++) {
            call c;
            mha_layer *layer = NULL;
            size_t size = 0;
            float *q = test_floats(2 * 19 * 24, 0.0f);
            float *o = test_floats(2 * 19 * 20, 1.0f);
            void *buffer;
            ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
            c.a.attn = c.attn;
            c.a.attn_mean = c.mean;
            if (threads) c.a.parallel = mha_pool_parallel(pool);

            test_allocs = 0;
            ASSERT_STATUS(MHA_OK, mha_workspace_size(c.l.n.layer, &c.a, &c.a.workspace_size));
            c.a.workspace = malloc(c.a.workspace_size + 1);
            ASSERT(c.a.workspace != NULL);
            ASSERT_STATUS(MHA_OK, mha_forward_check(c.l.n.layer, &c.a, why, sizeof why));
            ASSERT_STATUS(MHA_OK, mha_forward(c.l.n.layer, &c.a));
            if (c.cache) {
                call_blank(&c);
                if (kind != ASKED) ASSERT_STATUS(MHA_OK, mha_cache_append(c.l.n.layer, &c.a));
                ASSERT_STATUS(MHA_OK, mha_cache_fork(c.cache, 0, c.cache, 1, -1));
                ASSERT_STATUS(MHA_OK, mha_cache_reorder(c.cache, swapped));
                call_blank(&c);
            } else {
                ASSERT_STATUS(MHA_OK, mha_project_qkv(c.l.n.layer, &c.a, q, NULL, NULL));
            }
            ASSERT_STATUS(MHA_OK, mha_project_out(c.l.n.layer, &c.a, o));
            ASSERT_STATUS(MHA_OK, mha_layer_size(&c.l.n.cfg, &size));
            buffer = malloc(size);
            ASSERT(buffer != NULL);
            ASSERT_STATUS(MHA_OK, mha_layer_check(&c.l.n.cfg, &c.l.n.w, why, sizeof why));
            ASSERT_STATUS(MHA_OK, mha_layer_init(&layer, buffer, size, &c.l.n.cfg, &c.l.n.w));
            ASSERT_STATUS(MHA_OK, mha_forward(layer, &c.a));
            ASSERT_EQ_FMT(0L, test_allocs, "%ld");

            free(buffer);
            free(c.a.workspace);
            free(q);
            free(o);
            call_free(&c);
        }
    for (int threads = 0; threads < 2; threads++) {
        if (threads) p.a.parallel = mha_pool_parallel(pool);
        test_allocs = 0;
        ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&p.a, &p.a.workspace_size));
        p.a.workspace = malloc(p.a.workspace_size + 1);
        ASSERT(p.a.workspace != NULL);
        ASSERT_STATUS(MHA_OK, mha_sdpa_check(&p.a, why, sizeof why));
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT_EQ_FMT(0L, test_allocs, "%ld");
        free(p.a.workspace);
    }
    mha_pool_free(pool);
    problem_free(&p);
    PASS();
}

/* ---- a workspace of exactly the right size, anywhere -------------------------------------- */

enum { GUARD = 64 };

/* GUARD bytes, then off bytes, then size bytes, then GUARD bytes, all 0xa5 but the size bytes,
   which hold fill; block starts at a multiple of 64 so that off decides the alignment. */
typedef struct guarded {
    unsigned char *memory, *p;
    size_t size, off;
} guarded;

static guarded guarded_make(size_t size, size_t off, int fill)
{
    guarded g;
    const size_t total = size + off + 2 * GUARD;
    unsigned char *start;
    g.memory = (unsigned char *)malloc(total + 64);
    if (!g.memory) abort();
    start = g.memory + (64 - (size_t)((uintptr_t)g.memory % 64)) % 64;
    memset(start, 0xa5, total);
    g.p = start + GUARD + off;
    g.size = size;
    g.off = off;
    memset(g.p, fill, size);
    return g;
}

static int guarded_intact(const guarded *g)
{
    return untouched(g->p - GUARD - g->off, GUARD + g->off) && untouched(g->p + g->size, GUARD);
}

/* What runs in a workspace: one mha_forward or one mha_sdpa. */
typedef struct job {
    call *c;
    problem *p;
    size_t step; /* between the offsets that are tried; 0 = 1 */
} job;

static mha_status job_size(const job *j, size_t *size)
{
    return j->c ? mha_workspace_size(j->c->l.n.layer, &j->c->a, size)
                : mha_sdpa_workspace_size(&j->p->a, size);
}

static mha_status job_run(job *j, void *workspace, size_t size)
{
    if (j->c) {
        j->c->a.workspace = workspace;
        j->c->a.workspace_size = size;
        return forward_run(j->c);
    }
    j->p->a.workspace = workspace;
    j->p->a.workspace_size = size;
    return sdpa_run(j->p);
}

static int job_untouched(const job *j)
{
    return j->c ? call_untouched(j->c) : sdpa_check(j->p);
}

/* All outputs one after the other. */
static size_t job_outputs(const job *j, float *to)
{
    const float *from[4];
    size_t n[4], total = 0;
    if (j->c) {
        const call *c = j->c;
        from[0] = c->y, from[1] = c->attn, from[2] = c->mean, from[3] = c->lse;
        n[0] = c->nx, n[1] = c->nattn, n[2] = c->nmean, n[3] = c->nlse;
    } else {
        const problem *p = j->p;
        from[0] = p->o, from[1] = p->attn, from[2] = p->mean, from[3] = p->lse;
        n[0] = p->no, n[1] = p->nattn, n[2] = p->nmean, n[3] = p->nlse;
    }
    for (int i = 0; i < 4; i++) {
        if (to) memcpy(to + total, from[i], n[i] * sizeof(float));
        total += n[i];
    }
    return total;
}

TEST exact_job(job *j)
{
    const size_t n = job_outputs(j, NULL);
    float *want = test_floats(n, 0.0f), *got = test_floats(n, 0.0f);
    size_t size = 0;
    rng r = rng_make(test_seed);

    ASSERT_STATUS(MHA_OK, job_size(j, &size));
    ASSERT_STATUS(MHA_OK, job_run(j, NULL, 0)); /* from MHA_MALLOC */
    job_outputs(j, want);
    ASSERT(size > 0);
    for (size_t off = 0; off < 64; off += j->step ? j->step : 1) {
        /* NaNs, zeros, anything: what is in the workspace before does not matter */
        guarded g = guarded_make(size, off, off % 3 == 0 ? 0xff : 0);
        if (off % 3 == 2)
            for (size_t i = 0; i < size; i++) g.p[i] = (unsigned char)rng_u32(&r);
        ASSERT_STATUS(MHA_OK, job_run(j, g.p, size));
        ASSERTm("written outside of the workspace", guarded_intact(&g));
        job_outputs(j, got);
        ASSERTm("bits depend on the workspace", same_result(want, got, n));

        memset(g.p, 0xa5, size);
        ASSERT_STATUS(MHA_ERR_WORKSPACE, job_run(j, g.p, size - 1));
        ASSERT(job_untouched(j));
        ASSERT(untouched(g.p, size) && guarded_intact(&g));
        free(g.memory);
    }
    for (size_t off = 0; off < 2; off++) { /* ends where the block ends, for tools that watch */
        unsigned char *block = (unsigned char *)malloc(size + 13 * off);
        ASSERT(block != NULL);
        ASSERT_STATUS(MHA_OK, job_run(j, block + 13 * off, size));
        job_outputs(j, got);
        ASSERT(same_result(want, got, n));
        free(block);
    }
    free(want);
    free(got);
    PASS();
}

TEST exact_workspace(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 6, 5, test_seed);
    for (int kind = SELF; kind < KINDS; kind++)
        for (int what = 0; what < 4; what++) {
            call c;
            job j = { &c, NULL, kind <= GROUPED ? 1 : 20 };
            ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
            if (what == 1 || what == 3) c.a.attn = c.attn;
            if (what >= 2) c.a.attn_mean = c.mean;
            if (what == 3) {
                c.a.parallel.parallel_for = serial_for;
                c.a.parallel.threads = 3;
            }
            CHECK_CALL(exact_job(&j));
            call_free(&c);
        }
    for (int what = 0; what < 8; what++) {
        job j = { NULL, NULL, what < 4 ? 1 : 20 };
        if (what == 4) {
            problem_free(&p);
            p = problem_ragged(isa);
        }
        j.p = &p;
        p.a.attn = what % 2 ? p.attn : NULL;
        p.a.attn_mean = what % 4 >= 2 ? p.mean : NULL;
        if (what % 4 == 3) {
            p.a.parallel.parallel_for = serial_for;
            p.a.parallel.threads = 3;
        }
        CHECK_CALL(exact_job(&j));
    }
    problem_free(&p);
    PASS();
}

/* More than is needed is fine too. */
TEST large_workspace(mha_isa isa)
{
    call c;
    size_t size = 0;
    float *want;
    ASSERT_STATUS(MHA_OK, call_make(&c, isa, SELF));
    ASSERT_STATUS(MHA_OK, forward_run(&c));
    want = copy_floats(c.y, c.nx);
    ASSERT_STATUS(MHA_OK, mha_workspace_size(c.l.n.layer, &c.a, &size));
    {
        guarded g = guarded_make(size + 1000, 5, 0xff);
        c.a.workspace = g.p;
        c.a.workspace_size = size + 1000;
        ASSERT_STATUS(MHA_OK, forward_run(&c));
        ASSERT(guarded_intact(&g));
        ASSERT(same_result(want, c.y, c.nx));
        free(g.memory);
    }
    free(want);
    call_free(&c);
    PASS();
}

/* One workspace serves every step: how much a cache holds does not count. */
TEST workspace_of_every_step(mha_isa isa)
{
    for (int kind = CACHED; kind < KINDS; kind++) {
        call c;
        size_t first = 0, size = 0;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        for (int n = 0; n <= HELD; n++) {
            ASSERT_STATUS(MHA_OK, mha_cache_truncate(c.cache, -1, HELD - n));
            ASSERT_STATUS(MHA_OK, mha_workspace_size(c.l.n.layer, &c.a, &size));
            if (n == 0) first = size;
            ASSERT_EQ_FMT((unsigned long)first, (unsigned long)size, "%lu");
        }
        call_free(&c);
    }
    PASS();
}

/* 256 compact keys, a whole block, wide ones with narrow values: the room for a block in the
   workspace has no place for one panel of keys more. */
TEST full_block(mha_isa isa)
{
    enum { D = 4, CAPACITY = 256, MANY = 17 }; /* more than a tile: else nothing is widened */
    rich l = rich_weights(isa, D, 1, 1, 640, 1, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 9);
    float *x = rng_floats(&r, CAPACITY * D), y[MANY * D];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int type = MHA_F16; type <= MHA_INT8; type++) {
        mha_cache *cache = NULL;
        mha_cache_config cfg;
        mha_args a;
        size_t size = 0;
        guarded g;
        memset(&cfg, 0, sizeof cfg);
        memset(&a, 0, sizeof a);
        cfg.batch = 1;
        cfg.capacity = CAPACITY;
        cfg.type = (mha_type)type;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
        a.batch = 1;
        a.seq = CAPACITY - MANY;
        a.x = x;
        a.y = y;
        a.cache = cache;
        ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
        a.seq = MANY;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(l.n.layer, &a, &size));
        g = guarded_make(size, 0, 0);
        a.workspace = g.p;
        a.workspace_size = size;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        ASSERTm("written outside of the workspace", guarded_intact(&g));
        free(g.memory);
        mha_cache_free(cache);
    }
    rich_free(&l);
    free(x);
    PASS();
}

/* ---- a layer in the caller's buffer ------------------------------------------------------- */

TEST layer_in_buffer(mha_isa isa)
{
    for (int kind = SELF; kind <= BYTES; kind++) {
        call c;
        float *want;
        size_t size = 0;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        ASSERT_STATUS(MHA_OK, forward_run(&c));
        want = copy_floats(c.y, c.nx);
        ASSERT_STATUS(MHA_OK, mha_layer_size(&c.l.n.cfg, &size));
        for (size_t off = 0; off < 64; off += kind <= GROUPED ? 1 : 13) {
            guarded g = guarded_make(size, off, off % 2 ? 0xff : 0);
            mha_layer *layer = NULL;
            long live;
            ASSERT_STATUS(MHA_OK, mha_layer_init(&layer, g.p, size, &c.l.n.cfg, &c.l.n.w));
            ASSERT((unsigned char *)layer >= g.p && (unsigned char *)layer < g.p + size);
            call_blank(&c);
            ASSERT_STATUS(MHA_OK, mha_forward(layer, &c.a));
            ASSERTm("written outside of the buffer", guarded_intact(&g));
            ASSERTm("not the bits of mha_layer_create", same_result(want, c.y, c.nx));

            live = test_live; /* freeing it does nothing */
            mha_layer_free(layer);
            ASSERT_EQ(live, test_live);
            call_blank(&c);
            ASSERT_STATUS(MHA_OK, mha_forward(layer, &c.a));
            ASSERT(same_result(want, c.y, c.nx));

            memset(g.p, 0xa5, size);
            ASSERT_STATUS(MHA_ERR_BUFFER,
                          mha_layer_init(&layer, g.p, size - 1, &c.l.n.cfg, &c.l.n.w));
            ASSERT_EQ(NULL, layer);
            ASSERT(untouched(g.p, size) && guarded_intact(&g));
            free(g.memory);
        }
        free(want);
        call_free(&c);
    }
    PASS();
}

/* A cache of every kind in exactly the bytes it asks for; one less is refused. */
TEST cache_in_buffer(mha_isa isa)
{
    enum { T = 6, D = 24 };
    rich l = rich_weights(isa, D, 4, 2, 6, 5, 0, 0, WITH_ROPE | WITH_NORM, test_seed);
    rng r = rng_make(test_seed + 8);
    float *x = rng_floats(&r, 2 * T * D), *y = test_floats(2 * T * D, 0.0f);
    float *want = test_floats(2 * T * D, 0.0f);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int kind = 0; kind < 8; kind++) {
        mha_cache_config cfg;
        mha_args a;
        size_t size = 0;
        memset(&cfg, 0, sizeof cfg);
        memset(&a, 0, sizeof a);
        cfg.batch = 2;
        cfg.capacity = 2 * T + 1;
        cfg.ring = kind % 2;
        cfg.type = (mha_type)(kind / 2);
        a.batch = 2;
        a.seq = T;
        a.x = x;
        a.mask.windowed = 1;
        a.mask.left = T;
        ASSERT_STATUS(MHA_OK, mha_cache_size(l.n.layer, &cfg, &size));
        for (size_t off = 0; off < 64; off += 3) {
            guarded g = guarded_make(size, off, off % 2 ? 0xff : 0);
            mha_cache *cache = NULL;
            long live;
            ASSERT_STATUS(MHA_OK, mha_cache_init(&cache, g.p, size, l.n.layer, &cfg));
            ASSERT((unsigned char *)cache >= g.p && (unsigned char *)cache < g.p + size);
            a.cache = cache;
            a.y = off ? y : want;
            for (int n = 0; n < 2 + 2 * cfg.ring; n++) /* a ring goes round */
                ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            ASSERTm("written outside of the buffer", guarded_intact(&g));
            ASSERTm("bits depend on the address", off == 0 || same_result(want, y, 2 * T * D));
            live = test_live; /* freeing it does nothing */
            mha_cache_free(cache);
            ASSERT_EQ(live, test_live);
            ASSERT_EQ_FMT(cfg.ring ? 4 * T : 2 * T, mha_cache_length(cache, 1), "%d");
            memset(g.p, 0xa5, size);
            ASSERT_STATUS(MHA_ERR_BUFFER, mha_cache_init(&cache, g.p, size - 1, l.n.layer, &cfg));
            ASSERT_EQ(NULL, cache);
            ASSERT(untouched(g.p, size) && guarded_intact(&g));
            free(g.memory);
        }
    }
    rich_free(&l);
    free(x);
    free(y);
    free(want);
    PASS();
}

/* ---- inputs ------------------------------------------------------------------------------- */

/* The same numbers one float further on: never 8-byte aligned if the first were. */
static float *shifted(const float *from, size_t n, float **block)
{
    *block = test_floats(n + 1, 0.0f);
    memcpy(*block + 1, from, n * sizeof(float));
    return *block + 1;
}

TEST float_alignment(mha_isa isa)
{
    for (int kind = SELF; kind <= GROUPED; kind++) {
        enum { BLOCKS = 16 };
        call c;
        float *blocks[BLOCKS], *want, *bias;
        int n = 0, T = 19, S, len[3] = { 0, 11, 0 };
        unsigned char *allow;
        mha_weights w;
        mha_layer *layer = NULL;
        rng r = rng_make(test_seed + 3);

        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        S = kind == CROSS ? 37 : T;
        bias = rng_floats(&r, (size_t)(T * S));
        allow = (unsigned char *)malloc((size_t)(T * S) + 3);
        ASSERT(allow != NULL);
        for (int i = 0; i < T * S + 3; i++) allow[i] = (unsigned char)rng_chance(&r, 80);
        c.a.attn = c.attn;
        c.a.attn_mean = c.mean;
        c.a.mask.bias = bias;
        c.a.mask.allow = allow;
        len[0] = S;
        c.a.mask.key_len = len;
        ASSERT_STATUS(MHA_OK, forward_run(&c));
        want = copy_floats(c.y, c.nx);

        w = c.l.n.w;
        w.q = shifted(w.q, net_len(&c.l.n.cfg, 0), &blocks[n++]);
        w.k = shifted(w.k, net_len(&c.l.n.cfg, 1), &blocks[n++]);
        w.v = shifted(w.v, net_len(&c.l.n.cfg, 2), &blocks[n++]);
        w.out = shifted(w.out, net_len(&c.l.n.cfg, 3), &blocks[n++]);
        w.b_q = shifted(w.b_q, net_len(&c.l.n.cfg, 4), &blocks[n++]);
        w.b_k = shifted(w.b_k, net_len(&c.l.n.cfg, 5), &blocks[n++]);
        w.b_v = shifted(w.b_v, net_len(&c.l.n.cfg, 6), &blocks[n++]);
        w.b_out = shifted(w.b_out, net_len(&c.l.n.cfg, 7), &blocks[n++]);
        ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &c.l.n.cfg, &w));
        c.a.x = shifted(c.x, c.nx, &blocks[n++]);
        if (kind == CROSS) {
            c.a.source = shifted(c.source, c.ns, &blocks[n++]);
            c.a.source_v = shifted(c.source_v, c.nsv, &blocks[n++]);
        }
        c.a.mask.bias = shifted(bias, (size_t)(T * S), &blocks[n++]);
        memmove(allow + 3, allow, (size_t)(T * S));
        c.a.mask.allow = allow + 3;
        c.a.y = shifted(c.y, c.nx, &blocks[n++]);
        c.a.attn = shifted(c.attn, c.nattn, &blocks[n++]);
        c.a.attn_mean = shifted(c.mean, c.nmean, &blocks[n++]);
        c.a.lse = shifted(c.lse, c.nlse, &blocks[n++]);
        memset(c.a.y, 0xff, c.nx * sizeof(float));
        ASSERT(n <= BLOCKS);
        ASSERT_STATUS(MHA_OK, mha_forward(layer, &c.a));
        ASSERT(same_result(want, c.a.y, c.nx));
        ASSERT(same_result(c.attn, c.a.attn, c.nattn));
        ASSERT(same_result(c.mean, c.a.attn_mean, c.nmean));
        ASSERT(same_result(c.lse, c.a.lse, c.nlse));

        mha_layer_free(layer);
        while (n > 0) free(blocks[--n]);
        free(want);
        free(bias);
        free(allow);
        call_free(&c);
    }
    PASS();
}

TEST sdpa_float_alignment(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 16, 8, test_seed);
    result want;
    float *b[4];
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.q = shifted(p.q, p.nq, &b[0]);
    p.a.k = shifted(p.k, p.nk, &b[1]);
    p.a.v = shifted(p.v, p.nv, &b[2]);
    p.a.o = shifted(p.o, p.no, &b[3]);
    memset(p.a.o, 0xff, p.no * sizeof(float));
    ASSERT_STATUS(MHA_OK, mha_sdpa(&p.a));
    ASSERT(same_result(want.o, p.a.o, p.no));
    for (int i = 0; i < 4; i++) free(b[i]);
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* A layer keeps nothing of config and weights but its own copy. */
TEST weights_are_copied(mha_isa isa)
{
    for (int kind = SELF; kind <= BYTES; kind++) {
        call c;
        float *want;
        ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
        ASSERT_STATUS(MHA_OK, forward_run(&c));
        want = copy_floats(c.y, c.nx);
        for (int i = 0; i < 8; i++) {
            memset(c.l.n.m[i], 0xff, net_len(&c.l.n.cfg, i) * sizeof(float));
            free(c.l.n.m[i]);
            c.l.n.m[i] = NULL;
        }
        while (c.l.n_more > 0) { /* of one number at least */
            c.l.n_more--;
            memset(c.l.more[c.l.n_more], 0xff, sizeof(float));
            free(c.l.more[c.l.n_more]);
        }
        memset(&c.l.n.cfg, 0xff, sizeof c.l.n.cfg);
        memset(&c.l.n.w, 0xff, sizeof c.l.n.w);
        ASSERT_STATUS(MHA_OK, forward_run(&c));
        ASSERT(same_result(want, c.y, c.nx));
        free(want);
        call_free(&c);
    }
    PASS();
}

/* What is only read stays as it is. */
TEST inputs_unchanged(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 6, 5, test_seed);
    float *q = copy_floats(p.q, p.nq), *k = copy_floats(p.k, p.nk), *v = copy_floats(p.v, p.nv);
    call c;
    float *x, *source, *source_v;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(same_result(q, p.q, p.nq) && same_result(k, p.k, p.nk) && same_result(v, p.v, p.nv));
    ASSERT_STATUS(MHA_OK, call_make(&c, isa, CROSS));
    x = copy_floats(c.x, c.nx);
    source = copy_floats(c.source, c.ns);
    source_v = copy_floats(c.source_v, c.nsv);
    ASSERT_STATUS(MHA_OK, forward_run(&c));
    ASSERT(same_result(x, c.x, c.nx));
    ASSERT(same_result(source, c.source, c.ns) && same_result(source_v, c.source_v, c.nsv));
    free(q);
    free(k);
    free(v);
    free(x);
    free(source);
    free(source_v);
    call_free(&c);
    problem_free(&p);
    PASS();
}

/* y may be x. */
TEST layer_in_place(mha_isa isa)
{
    for (int kind = SELF; kind < KINDS; kind++)
        for (int taps = 0; taps < 2; taps++) {
            call c;
            ASSERT_STATUS(MHA_OK, call_make(&c, isa, kind));
            c.a.attn = taps ? c.attn : NULL;
            c.a.attn_mean = taps ? c.mean : NULL;
            ASSERT_STATUS(MHA_OK, forward_run(&c));
            c.a.y = c.x;
            if (c.cache) ASSERT_STATUS(MHA_OK, mha_cache_truncate(c.cache, -1, HELD));
            ASSERT_STATUS(MHA_OK, mha_forward(c.l.n.layer, &c.a));
            ASSERT(same_result(c.y, c.x, c.nx));
            call_free(&c);
        }
    PASS();
}

/* o may be q, but not when the weights are asked for: they need q once more. */
TEST sdpa_in_place(mha_isa isa)
{
    problem p = problem_make(isa, 2, 4, 2, 19, 37, 6, 6, test_seed);
    result want;
    p.a.attn = p.a.attn_mean = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.o = p.q;
    p.a.attn = p.attn;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_sdpa(&p.a));
    p.a.attn = NULL;
    p.a.attn_mean = p.mean;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_sdpa(&p.a));
    p.a.attn_mean = NULL;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&p.a));
    ASSERT(same_result(want.o, p.q, p.no));
    result_free(&want);
    problem_free(&p);
    PASS();
}

/* ---- how much ----------------------------------------------------------------------------- */

TEST layer_memory_is_linear(mha_isa isa)
{
    net n = net_weights(isa, 512, 8, 8, 64, 64, 0, 0, test_seed);
    mha_args a;
    size_t one = 0, two = 0;
    const size_t scores = (size_t)8 * 4096 * 4096 * sizeof(float);
    ASSERT_STATUS(MHA_OK, net_create(&n));
    memset(&a, 0, sizeof a);
    a.batch = 1;
    a.seq = 4096;
    ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &a, &one));
    ASSERTm("more than a tenth of the scores", one < scores / 10);
    for (; a.seq < 100000; a.seq *= 2) {
        ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &a, &one));
        a.seq *= 2;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(n.layer, &a, &two));
        a.seq /= 2;
        ASSERTm("more than twice as much for twice the tokens", two <= 2 * one + 4096);
    }
    net_free(&n);
    PASS();
}

TEST sdpa_memory_is_linear(mha_isa isa)
{
    mha_sdpa_args a;
    size_t one = 0, two = 0;
    memset(&a, 0, sizeof a);
    a.isa = isa;
    a.batch = 1;
    a.heads = 8;
    a.d_k = 64;
    a.seq = a.source_seq = 4096;
    ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&a, &one));
    ASSERTm("more than a tenth of the scores", one < (size_t)8 * 4096 * 4096 * 4 / 10);
    for (; a.seq < 100000; a.seq *= 2, a.source_seq *= 2) {
        mha_sdpa_args b = a;
        ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&a, &one));
        b.seq *= 2;
        b.source_seq *= 2;
        ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&b, &two));
        ASSERTm("more than twice as much for twice the tokens", two <= 2 * one + 4096);
    }
    PASS();
}

static void no_parallel(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx, (void)n, (void)task, (void)arg;
}

/* Sizes whose sums and products are beyond int, or beyond size_t: a status, and no wrap (UBSan). */
TEST hostile_with_threads(mha_isa isa)
{
    static const int sizes[4] = { 1, 96, 1 << 28, INT_MAX };
    for (int n = 0; n < 4 * 4 * 4 * 4; n++) {
        mha_sdpa_args a = { 0 };
        size_t bytes = 0;
        mha_status st;
        a.batch = a.seq = 1, a.isa = isa;
        a.heads = sizes[n % 4], a.kv_heads = 1, a.source_seq = sizes[n / 4 % 4];
        a.d_k = sizes[n / 16 % 4], a.d_v = sizes[n / 64];
        a.parallel.parallel_for = no_parallel;
        for (a.parallel.threads = 2; a.parallel.threads > 0;
             a.parallel.threads = a.parallel.threads == 2 ? INT_MAX : 0) {
            st = mha_sdpa_workspace_size(&a, &bytes);
            ASSERT(st == MHA_OK || st == MHA_ERR_OVERFLOW);
            /* what one lane cannot do without: q of every head */
            if (!st) ASSERT(bytes / sizeof(float) >= (size_t)a.heads);
        }
    }
    PASS();
}

/* A workspace for a long call serves a shorter one: no size falls as the call grows. */
TEST workspace_grows(mha_isa isa)
{
    static const int heads[4][2] = { { 8, 8 }, { 8, 2 }, { 8, 1 }, { 7, 1 } };
    static const int threads[2] = { 1, 8 };
    for (int n = 0; n < 4 * 2 * 2; n++) {
        const int h = heads[n % 4][0], g = heads[n % 4][1], many = threads[n / 4 % 2];
        mha_config cfg = { 0 };
        mha_weights w = { 0 };
        float *weights = test_floats(4 * 32 * 64, 0.0f);
        mha_layer *layer = NULL;
        mha_cache_config room = { 0 };
        mha_cache *cache = NULL;
        size_t last[3] = { 0, 0, 0 };
        cfg.d_model = 32, cfg.n_heads = h, cfg.n_kv_heads = g, cfg.d_k = 8, cfg.isa = isa;
        w.q = w.k = w.v = w.out = weights;
        ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &w));
        room.batch = 1, room.capacity = 400, room.type = n / 8 ? MHA_INT8 : MHA_F32;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, layer, &room));
        for (int t = 0; t <= 300; t++)
            for (int what = 0; what < 3; what++) {
                mha_args a = { 0 };
                mha_sdpa_args s = { 0 };
                size_t bytes = 0;
                a.batch = s.batch = 1, a.seq = s.seq = s.source_seq = t;
                a.parallel.threads = s.parallel.threads = many;
                a.parallel.parallel_for = s.parallel.parallel_for = many > 1 ? no_parallel : NULL;
                a.cache = what == 1 ? cache : NULL;
                s.heads = h, s.kv_heads = g, s.d_k = 8, s.isa = isa;
                if (what < 2) ASSERT_STATUS(MHA_OK, mha_workspace_size(layer, &a, &bytes));
                else ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&s, &bytes));
                ASSERT(bytes >= last[what]);
                last[what] = bytes;
            }
        mha_cache_free(cache);
        mha_layer_free(layer);
        free(weights);
    }
    PASS();
}

/* Nor as the batch grows, past what is done at a time; and a batch of any size takes about the same,
   of which ever more are only read and written. But short sequences fill a panel of 16 keys each, and
   long ones take no less: 16 keys and values of 2 heads of 64 for each more. */
TEST workspace_of_a_batch(mha_isa isa)
{
    mha_config cfg = { 0 };
    mha_weights w = { 0 };
    float *weights = test_floats(256 * 256, 0.0f);
    mha_layer *layer = NULL;
    cfg.d_model = cfg.d_source = 256, cfg.n_heads = 4, cfg.n_kv_heads = 2, cfg.isa = isa;
    w.q = w.k = w.v = w.out = weights;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &w));
    for (int threads = 1; threads <= 4; threads += 3)
        for (int cross = 0; cross < 2; cross++) {
            size_t last[70];
            memset(last, 0, sizeof last);
            for (int seq = 0; seq < 600; seq += seq < 70 ? 1 : 53)
                for (int batch = 0; batch < 70; batch++) {
                    mha_args a = { 0 };
                    size_t bytes = 0;
                    a.batch = batch, a.seq = cross ? 40 : seq, a.attn_mean = weights;
                    if (cross) a.source = weights, a.source_seq = seq;
                    a.parallel.threads = threads;
                    a.parallel.parallel_for = threads > 1 ? no_parallel : NULL;
                    ASSERT_STATUS(MHA_OK, mha_workspace_size(layer, &a, &bytes));
                    ASSERT(bytes >= last[batch] && (batch == 0 || bytes >= last[batch - 1]));
                    last[batch] = bytes;
                }
            ASSERTm("memory for a whole batch", cross || last[69] < 2 * last[2]);
            ASSERTm("memory for each sequence",
                    last[69] <= last[35] + (69 - 35) * 16 * 2 * 2 * 64 * sizeof(float));
        }
    mha_layer_free(layer);
    free(weights);
    PASS();
}

SUITE(memory_suite)
{
    RUN_ON_EACH_ISA(layer_create_fails);
    RUN_ON_EACH_ISA(forward_fails);
    RUN_ON_EACH_ISA(sdpa_fails);
    RUN_ON_EACH_ISA(stages_fail);
    RUN_ON_EACH_ISA(cache_create_fails);
    RUN_ON_EACH_ISA(append_fails);
    RUN_TEST(pool_create_fails);
    RUN_ON_EACH_ISA(nothing_allocated);
    RUN_ON_EACH_ISA(exact_workspace);
    RUN_ON_EACH_ISA(large_workspace);
    RUN_ON_EACH_ISA(workspace_of_every_step);
    RUN_ON_EACH_ISA(full_block);
    RUN_ON_EACH_ISA(layer_in_buffer);
    RUN_ON_EACH_ISA(cache_in_buffer);
    RUN_ON_EACH_ISA(float_alignment);
    RUN_ON_EACH_ISA(sdpa_float_alignment);
    RUN_ON_EACH_ISA(weights_are_copied);
    RUN_ON_EACH_ISA(inputs_unchanged);
    RUN_ON_EACH_ISA(layer_in_place);
    RUN_ON_EACH_ISA(sdpa_in_place);
    RUN_ON_EACH_ISA(layer_memory_is_linear);
    RUN_ON_EACH_ISA(sdpa_memory_is_linear);
    RUN_ON_EACH_ISA(workspace_grows);
    RUN_ON_EACH_ISA(workspace_of_a_batch);
    RUN_ON_EACH_ISA(hostile_with_threads);
}
