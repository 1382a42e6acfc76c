/* test_threads.c - any number of threads, anyone's threads: the same bits. Also run under
   ThreadSanitizer. */
#include "fixture.h"

/* ---- what is computed: layers and sdpa of few and many units of work ---------------------- */

typedef struct shape {
    int B, T, D, H, G, dk, dv;
    mha_causal causal;
    int attn;
} shape;

static const shape shapes[] = {
    { 1, 1, 8, 1, 1, 8, 8, MHA_NOT_CAUSAL, 0 },         /* less work than threads */
    { 1, 2, 6, 2, 1, 3, 5, MHA_CAUSAL, 1 },             /* the same, with weights */
    { 1, 5, 16, 2, 2, 8, 8, MHA_NOT_CAUSAL, 0 },        /* two heads, one tile */
    { 2, 130, 32, 4, 4, 8, 8, MHA_CAUSAL, 0 },          /* many tiles of unequal cost */
    { 3, 67, 36, 6, 2, 6, 9, MHA_NOT_CAUSAL, 1 },       /* grouped, odd, weights wanted */
    { 7, 9, 24, 3, 1, 8, 8, MHA_CAUSAL_UPPER_LEFT, 1 }, /* many small batch elements */
    { 9, 1, 32, 8, 8, 32, 32, MHA_NOT_CAUSAL, 0 },      /* few rows: threads share columns */
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct call {
    net n;
    mha_args a;
    float *x, *y, *attn, *mean, *lse;
    size_t nx, nattn, nmean, nlse;
} call;

static mha_status call_make(call *c, mha_isa isa, const shape *s)
{
    rng r = rng_make(test_seed + 11);
    memset(c, 0, sizeof *c);
    c->n = net_weights(isa, s->D, s->H, s->G, s->dk, s->dv, 0, 0, test_seed);
    c->nx = (size_t)(s->B * s->T * s->D);
    c->nlse = (size_t)(s->B * s->H * s->T);
    c->nattn = c->nlse * (size_t)s->T;
    c->nmean = (size_t)(s->B * s->T * s->T);
    c->x = rng_floats(&r, c->nx);
    c->y = test_floats(c->nx, 0.0f);
    c->attn = test_floats(c->nattn, 0.0f);
    c->mean = test_floats(c->nmean, 0.0f);
    c->lse = test_floats(c->nlse, 0.0f);
    c->a.batch = s->B;
    c->a.seq = s->T;
    c->a.x = c->x;
    c->a.y = c->y;
    c->a.lse = c->lse;
    c->a.mask.causal = s->causal;
    if (s->attn) {
        c->a.attn = c->attn;
        c->a.attn_mean = c->mean;
    }
    return net_create(&c->n);
}

static void call_free(call *c)
{
    net_free(&c->n);
    free(c->x);
    free(c->y);
    free(c->attn);
    free(c->mean);
    free(c->lse);
}

/* Serial first; then with par: every output must have the same bits. */
TEST layer_same(mha_isa isa, const shape *s, mha_parallel par)
{
    call c;
    float *y, *attn, *mean, *lse;
    ASSERT_STATUS(MHA_OK, call_make(&c, isa, s));
    ASSERT_STATUS(MHA_OK, mha_forward(c.n.layer, &c.a));
    y = copy_floats(c.y, c.nx);
    attn = copy_floats(c.attn, c.nattn);
    mean = copy_floats(c.mean, c.nmean);
    lse = copy_floats(c.lse, c.nlse);
    memset(c.y, 0xff, c.nx * sizeof(float));
    memset(c.lse, 0xff, c.nlse * sizeof(float));
    if (s->attn) {
        memset(c.attn, 0xff, c.nattn * sizeof(float));
        memset(c.mean, 0xff, c.nmean * sizeof(float));
    }
    c.a.parallel = par;
    ASSERT_STATUS(MHA_OK, mha_forward(c.n.layer, &c.a));
    ASSERTm("y", same_result(y, c.y, c.nx));
    ASSERTm("attn", same_result(attn, c.attn, c.nattn));
    ASSERTm("attn_mean", same_result(mean, c.mean, c.nmean));
    ASSERTm("lse", same_result(lse, c.lse, c.nlse));
    free(y);
    free(attn);
    free(mean);
    free(lse);
    call_free(&c);
    PASS();
}

TEST sdpa_same(mha_isa isa, const shape *s, mha_parallel par)
{
    problem p = problem_make(isa, s->B, s->H, s->G, s->T, s->T + 3, s->dk, s->dv, test_seed);
    result want;
    p.a.mask.causal = s->causal;
    if (!s->attn) p.a.attn = p.a.attn_mean = NULL;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    p.a.parallel = par;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    ASSERT(result_same(&p, &want));
    result_free(&want);
    problem_free(&p);
    PASS();
}

TEST all_shapes(mha_isa isa, mha_parallel par)
{
    for (int i = 0; i < SHAPES; i++) {
        CHECK_CALL(layer_same(isa, &shapes[i], par));
        CHECK_CALL(sdpa_same(isa, &shapes[i], par));
    }
    PASS();
}

/* ---- the built-in pool -------------------------------------------------------------------- */

TEST pool_is_serial(mha_isa isa)
{
    const int threads[] = { 1, 2, 3, 8, 0 };
    const long live = test_live;
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        mha_pool *pool = NULL;
        mha_parallel par;
        ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, threads[t]));
        ASSERT(pool != NULL);
        par = mha_pool_parallel(pool);
        ASSERT(par.parallel_for != NULL || par.threads <= 1);
        if (threads[t]) ASSERT(par.threads <= threads[t]);
        CHECK_CALL(all_shapes(isa, par));
        mha_pool_free(pool);
        ASSERT_EQ(live, test_live);
    }
    PASS();
}

/* The pool runs each index once. */
typedef struct hits {
    int n[64];
} hits;

static void hit(void *arg, int index)
{
    ((hits *)arg)->n[index]++;
}

TEST pool_runs_each_index_once(void)
{
    const int threads[] = { 1, 2, 3, 8 };
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        mha_pool *pool = NULL;
        mha_parallel par;
        ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, threads[t]));
        par = mha_pool_parallel(pool);
        for (int n = 1; par.parallel_for && n <= par.threads; n++)
            for (int repeat = 0; repeat < 50; repeat++) {
                hits h;
                memset(&h, 0, sizeof h);
                par.parallel_for(par.ctx, n, hit, &h);
                for (int i = 0; i < 64; i++) ASSERT_EQ_FMT(i < n ? 1 : 0, h.n[i], "%d");
            }
        mha_pool_free(pool);
    }
    PASS();
}

TEST pool_come_and_go(void)
{
    const long live = test_live;
    for (int i = 0; i < 60; i++) {
        mha_pool *pool = NULL;
        ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, 1 + i % 4));
        if (i % 3 == 0) CHECK_CALL(layer_same(MHA_ISA_AUTO, &shapes[2], mha_pool_parallel(pool)));
        mha_pool_free(pool);
    }
    ASSERT_EQ(live, test_live);
    PASS();
}

TEST pool_is_reused(void)
{
    mha_pool *pool = NULL;
    ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, 3));
    for (int i = 0; i < 200; i++)
        CHECK_CALL(layer_same(MHA_ISA_AUTO, &shapes[1 + i % 2], mha_pool_parallel(pool)));
    mha_pool_free(pool);
    PASS();
}

/* The system gives 0, 1, 2 threads of the three that are asked for. */
TEST pool_of_fewer_threads(mha_isa isa)
{
#ifdef _WIN32
    (void)isa;
    SKIPm("needs pthreads");
#else
    const long live = test_live;
    for (int given = 0; given < 3; given++) {
        mha_pool *pool = NULL;
        mha_status st;
        test_threads_left = given;
        st = mha_pool_create(&pool, 4);
        test_threads_left = -1;
        ASSERT_STATUS(MHA_OK, st);
        ASSERT_EQ_FMT(given + 1, mha_pool_parallel(pool).threads, "%d");
        CHECK_CALL(all_shapes(isa, mha_pool_parallel(pool)));
        mha_pool_free(pool);
        ASSERT_EQ(live, test_live);
    }
    PASS();
#endif
}

TEST null_pool_is_serial(mha_isa isa)
{
    CHECK_CALL(all_shapes(isa, mha_pool_parallel(NULL)));
    PASS();
}

/* ---- a caller's own parallel_for ---------------------------------------------------------- */

enum { FORWARDS, BACKWARDS, INSIDE_OUT };

typedef struct caller {
    int order, threads;
    int calls, wrong_n;
} caller;

static void caller_for(void *ctx, int n, mha_task task, void *arg)
{
    caller *c = (caller *)ctx;
    c->calls++;
    if (n < 1 || n > c->threads) c->wrong_n++;
    for (int i = 0; i < n; i++)
        task(arg, c->order == FORWARDS ? i : c->order == BACKWARDS ? n - 1 - i : (i + n / 2) % n);
}

TEST caller_orders(mha_isa isa)
{
    const int threads[] = { 1, 2, 5, 16 };
    for (int order = FORWARDS; order <= INSIDE_OUT; order++)
        for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++)
            for (int i = 0; i < SHAPES; i++) {
                caller c;
                mha_parallel par;
                memset(&c, 0, sizeof c);
                c.order = order;
                c.threads = threads[t];
                par.parallel_for = caller_for;
                par.ctx = &c;
                par.threads = threads[t];
                CHECK_CALL(layer_same(isa, &shapes[i], par));
                CHECK_CALL(sdpa_same(isa, &shapes[i], par));
                ASSERT_EQm("n outside 1 .. threads", 0, c.wrong_n);
#ifndef MHA__GROUP_ROWS /* else a few for each sequence */
                ASSERTm("more than a few calls", c.calls <= 16);
#endif
            }
    PASS();
}

/* ---- fewer kv heads than threads, and keys enough that threads share one -------------------- */

enum {
    CAUSAL = 1,
    WINDOW = 2,
    MASKS = 4,    /* allow, nothing for query 0 of two, and a bias with -inf in it */
    GATE = 8,     /* some of them 0 */
    SINK = 16,    /* with a value */
    WEIGHTS = 32, /* attn, attn_mean */
    RAGGED = 64,  /* three sequences, one without queries */
    BAD = 128,    /* a score beyond floats in the first head */
    HIDDEN = 256, /* NaN in values that nobody sees */
    LAST = 512,   /* NaN in the last value, which with CAUSAL only the last query sees */
    OVER = 1024   /* o over q, too: what is done again must find its query */
};

typedef struct few {
    int B, H, G, T, S, dk, dv, with;
} few;

static const few fews[] = {
    { 1, 1, 1, 1, 1100, 64, 64, 0 },                       /* one query */
    { 1, 1, 1, 1, 1100, 64, 64, BAD },                     /* the careful way, after all */
    { 1, 4, 1, 1, 1100, 64, 64, GATE | SINK },             /* a tile of heads */
    { 1, 4, 1, 1, 1100, 64, 64, HIDDEN | WINDOW },         /* the first keys are not seen */
    { 1, 4, 1, 2, 1100, 64, 64, CAUSAL | LAST },           /* rows that must stay finite */
    { 1, 23, 1, 1, 1100, 64, 64, BAD | OVER },             /* one tile of several */
    { 1, 1, 1, 21, 1100, 64, 64, BAD | OVER },             /* rows side by side */
    { 1, 13, 1, 2, 1100, 64, 64, CAUSAL | LAST | OVER },   /* every other row */
    { 1, 7, 1, 2, 1100, 64, 64, CAUSAL | MASKS },          /* more tiles than one */
    { 1, 3, 3, 1, 8200, 64, 64, WEIGHTS | BAD },           /* two and one left over */
    { 1, 5, 1, 1, 1500, 40, 50, 0 },                       /* packed: no multiples of 16 */
    { 1, 16, 1, 6, 1100, 64, 80, CAUSAL | WINDOW | GATE }, /* 96 rows: few blocks a round */
    { 1, 110, 1, 1, 1100, 64, 64, 0 },                     /* too many rows for some */
    { 3, 6, 1, 2, 2400, 48, 64, RAGGED | CAUSAL | MASKS },
    { 3, 2, 1, 1, 2400, 64, 64, RAGGED | SINK | BAD },
};
enum { FEWS = sizeof fews / sizeof fews[0] };

static mha_parallel caller_parallel(caller *c, int order, int threads)
{
    mha_parallel par;
    memset(c, 0, sizeof *c);
    c->order = order;
    c->threads = threads;
    par.parallel_for = caller_for;
    par.ctx = c;
    par.threads = threads;
    return par;
}

TEST few_same(mha_isa isa, const few *f)
{
    static const int cu_seq[4] = { 0, 1, 1, 2 }, cu_source[4] = { 0, 1100, 1200, 2400 };
    static const int threads[] = { 2, 3, 16 };
    const int ragged = f->with & RAGGED, S = f->S, T = ragged ? 2 : f->T;
    problem p =
        problem_make(isa, ragged ? 1 : f->B, f->H, f->G, T, f->S, f->dk, f->dv, test_seed + 5);
    rng r = rng_make(test_seed + 6);
    unsigned char *allow = (unsigned char *)calloc((size_t)T * (size_t)S + 1, 1);
    float *bias = test_floats((size_t)T * (size_t)S, 0.0f);
    float *gate = rng_floats(&r, (size_t)f->H), *sink = rng_floats(&r, (size_t)f->H);
    float *value = rng_floats(&r, (size_t)f->H * (size_t)f->dv);
    result want;
    caller c;
    ASSERT(allow != NULL);
    if (!(f->with & WEIGHTS)) p.a.attn = p.a.attn_mean = NULL;
    if (f->with & CAUSAL) p.a.mask.causal = MHA_CAUSAL;
    if (f->with & WINDOW) p.a.mask.windowed = 1, p.a.mask.left = 900, p.a.mask.right = -1;
    if (ragged) p.a.batch = 3, p.a.cu_seq = cu_seq, p.a.cu_source = cu_source;
    if (f->with & GATE) p.a.gate = gate, gate[f->H / 2] = 0.0f;
    if (f->with & SINK) p.a.sink = sink, p.a.sink_value = value;
    for (int i = 0; i < T * S; i++) {
        allow[i] = (unsigned char)rng_chance(&r, 70);
        bias[i] = rng_chance(&r, 20) ? F_NINF : (float)rng_int(&r, -3, 3);
    }
    if (f->with & MASKS) p.a.mask.allow = allow, p.a.mask.bias = bias;
    if (T > 1) memset(allow, 0, (size_t)S);
    if (f->with & BAD) { /* 3e38 * 7 / sqrt(64) is a float, but not in units of log2 */
        memset(p.q, 0, (size_t)f->dk * sizeof *p.q);
        p.q[0] = 3e38f, p.k[5 * f->dk] = 7.0f;
    }
    if (f->with & LAST) p.v[(size_t)(S - 1) * (size_t)f->dv + 1] = F_NAN;
    if (f->with & HIDDEN)
        for (int i = 0; i < f->dv; i++) p.v[i] = F_NAN;
    ASSERT_STATUS(MHA_OK, problem_run(&p));
    want = result_of(&p);
    for (int order = FORWARDS; order <= INSIDE_OUT; order++) {
        p.a.parallel = caller_parallel(&c, order, threads[order]);
        ASSERT_STATUS(MHA_OK, problem_run(&p));
        ASSERT(result_same(&p, &want));
        ASSERT_EQm("n outside 1 .. threads", 0, c.wrong_n);
        if (f->B * f->G == 1 && f->H < 96) ASSERTm("threads were not used", c.calls >= 2);
        if (f->with & OVER) {
            const size_t n = (size_t)f->B * (size_t)f->H * (size_t)T * (size_t)f->dk;
            mha_sdpa_args a = p.a;
            float *o = test_floats(n, 0.0f);
            memcpy(o, p.q, n * sizeof *o);
            a.q = a.o = o;
            ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
            ASSERTm("o over q", same_result(o, p.o, n));
            a.parallel.parallel_for = NULL, a.parallel.threads = 0;
            memcpy(o, p.q, n * sizeof *o);
            ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
            ASSERTm("o over q, one thread", same_result(o, p.o, n));
            free(o);
        }
    }
    result_free(&want);
    problem_free(&p);
    free(allow);
    free(bias);
    free(gate);
    free(sink);
    free(value);
    PASS();
}

TEST few_kv_heads(mha_isa isa)
{
    for (int i = 0; i < FEWS; i++) CHECK_CALL(few_same(isa, &fews[i]));
    PASS();
}

/* The same through a cache of every type: tokens one by one, and three at once. */
TEST few_kv_heads_cached(mha_isa isa)
{
    enum { D = 16, S = 1100, N = 3 };
    const int heads[3][2] = { { 1, 1 }, { 8, 1 }, { 6, 3 } };
    for (int n = 0; n < 3 * 4; n++) { /* every second one a ring */
        const int H = heads[n % 3][0], G = heads[n % 3][1], ring = n % 2;
        net l = net_weights(isa, D, H, G, 64, 64, 0, 0, test_seed + (uint64_t)n);
        rng r = rng_make(test_seed + 7);
        float *x = rng_floats(&r, (S + N) * D), *y = test_floats((S + N) * D, 0.0f);
        float want[N * D];
        mha_cache_config room = { 0 };
        mha_cache *cache[2] = { NULL, NULL };
        mha_args a = { 0 };
        caller c;
        ASSERT_STATUS(MHA_OK, net_create(&l));
        room.batch = 1, room.capacity = S + N, room.ring = ring, room.type = (mha_type)(n / 3);
        a.batch = 1;
        a.mask.causal = MHA_CAUSAL;
        a.mask.windowed = 1;
        for (int i = 0; i < 2; i++) {
            ASSERT_STATUS(MHA_OK, mha_cache_create(&cache[i], l.layer, &room));
            a.cache = cache[i];
            a.parallel = caller_parallel(&c, BACKWARDS, i ? 4 : 1);
            a.x = x, a.seq = S - 1, a.mask.left = 0;
            ASSERT_STATUS(MHA_OK, mha_cache_append(l.layer, &a));
            a.x = x + (S - 1) * D, a.y = y + (S - 1) * D, a.seq = 1, a.mask.left = S - 7;
            c.calls = 0;
            ASSERT_STATUS(MHA_OK, mha_forward(l.layer, &a));
            if (i) ASSERTm("threads were not used", c.calls >= 2);
            a.x = x + S * D, a.y = y + S * D, a.seq = N - 1;
            ASSERT_STATUS(MHA_OK, mha_forward(l.layer, &a));
            if (i) ASSERTm("y", same_result(want, y + (S - 1) * D, N * D));
            else memcpy(want, y + (S - 1) * D, sizeof want);
        }
        mha_cache_free(cache[0]);
        mha_cache_free(cache[1]);
        net_free(&l);
        free(x);
        free(y);
    }
    PASS();
}

/* ---- threads of the operating system ------------------------------------------------------ */

#ifdef _WIN32
TEST thread_per_task(mha_isa isa)
{
    (void)isa;
    SKIPm("needs pthreads");
}
TEST shared_layer(mha_isa isa)
{
    (void)isa;
    SKIPm("needs pthreads");
}
TEST shared_pool(mha_isa isa)
{
    (void)isa;
    SKIPm("needs pthreads");
}
TEST shared_callback(mha_isa isa)
{
    (void)isa;
    SKIPm("needs pthreads");
}
#else

typedef struct one_task {
    mha_task task;
    void *arg;
    int index;
} one_task;

static void *run_one_task(void *p)
{
    one_task *t = (one_task *)p;
    t->task(t->arg, t->index);
    return NULL;
}

/* A new thread for each task; a task whose thread does not start runs here. */
static void pthread_for(void *ctx, int n, mha_task task, void *arg)
{
    pthread_t id[16];
    one_task t[16];
    int started[16];
    (void)ctx;
    for (int i = 0; i < n; i++) {
        t[i].task = task;
        t[i].arg = arg;
        t[i].index = i;
        started[i] = pthread_create(&id[i], NULL, run_one_task, &t[i]) == 0;
        if (!started[i]) run_one_task(&t[i]);
    }
    for (int i = 0; i < n; i++)
        if (started[i]) pthread_join(id[i], NULL);
}

TEST thread_per_task(mha_isa isa)
{
    const int threads[] = { 1, 2, 3, 8 };
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        mha_parallel par;
        par.parallel_for = pthread_for;
        par.ctx = NULL;
        par.threads = threads[t];
        CHECK_CALL(all_shapes(isa, par));
    }
    PASS();
}

/* One user of a shared layer: own outputs, own workspace, the same work again and again. */
typedef struct user {
    const mha_layer *layer;
    mha_args a; /* with its own y and workspace */
    const float *want;
    size_t n;
    int repeats, bad;
} user;

static void *run_user(void *p)
{
    user *u = (user *)p;
    for (int i = 0; i < u->repeats; i++) {
        memset(u->a.y, 0xff, u->n * sizeof(float));
        if (mha_forward(u->layer, &u->a) != MHA_OK || !same_result(u->a.y, u->want, u->n)) u->bad++;
    }
    return NULL;
}

enum { USERS = 6 };

TEST many_users(mha_isa isa, const shape *s, mha_parallel par, int repeats)
{
    call c;
    user u[USERS];
    pthread_t id[USERS];
    int started[USERS];
    float *want;

    ASSERT_STATUS(MHA_OK, call_make(&c, isa, s));
    ASSERT_STATUS(MHA_OK, mha_forward(c.n.layer, &c.a));
    want = copy_floats(c.y, c.nx);
    for (int i = 0; i < USERS; i++) {
        memset(&u[i], 0, sizeof u[i]);
        u[i].layer = c.n.layer;
        u[i].want = want;
        u[i].n = c.nx;
        u[i].repeats = repeats;
        u[i].a = c.a;
        u[i].a.y = test_floats(c.nx, 0.0f);
        u[i].a.attn = u[i].a.attn_mean = u[i].a.lse = NULL;
        u[i].a.parallel = par;
        ASSERT_STATUS(MHA_OK, mha_workspace_size(c.n.layer, &u[i].a, &u[i].a.workspace_size));
        u[i].a.workspace = malloc(u[i].a.workspace_size + 1);
        ASSERT(u[i].a.workspace != NULL);
    }
    for (int i = 0; i < USERS; i++) started[i] = pthread_create(&id[i], NULL, run_user, &u[i]) == 0;
    for (int i = 0; i < USERS; i++)
        if (started[i]) pthread_join(id[i], NULL);
    for (int i = 0; i < USERS; i++) {
        ASSERT(started[i]);
        ASSERT_EQ_FMT(0, u[i].bad, "%d");
        free(u[i].a.y);
        free(u[i].a.workspace);
    }
    free(want);
    call_free(&c);
    PASS();
}

TEST shared_layer(mha_isa isa)
{
    mha_parallel serial;
    memset(&serial, 0, sizeof serial);
    for (int i = 0; i < SHAPES; i++) {
        shape s = shapes[i];
        s.attn = 0;
        CHECK_CALL(many_users(isa, &s, serial, 10));
    }
    PASS();
}

TEST shared_pool(mha_isa isa)
{
    mha_pool *pool = NULL;
    ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, 3));
    for (int i = 0; i < SHAPES; i++) {
        shape s = shapes[i];
        s.attn = 0;
        CHECK_CALL(many_users(isa, &s, mha_pool_parallel(pool), 10));
    }
    mha_pool_free(pool);
    PASS();
}

/* Several calls at once, each with tasks on threads of its own. */
TEST shared_callback(mha_isa isa)
{
    mha_parallel par;
    par.parallel_for = pthread_for;
    par.ctx = NULL;
    par.threads = 3;
    for (int i = 0; i < SHAPES; i++) {
        shape s = shapes[i];
        s.attn = 0;
        CHECK_CALL(many_users(isa, &s, par, 3));
    }
    PASS();
}
#endif

SUITE(threads_suite)
{
    RUN_ON_EACH_ISA(pool_is_serial);
    RUN_TEST(pool_runs_each_index_once);
    RUN_TEST(pool_come_and_go);
    RUN_TEST(pool_is_reused);
    RUN_ON_EACH_ISA(pool_of_fewer_threads);
    RUN_ON_EACH_ISA(null_pool_is_serial);
    RUN_ON_EACH_ISA(caller_orders);
    RUN_ON_EACH_ISA(few_kv_heads);
    RUN_ON_EACH_ISA(few_kv_heads_cached);
    RUN_ON_EACH_ISA(thread_per_task);
    RUN_ON_EACH_ISA(shared_layer);
    RUN_ON_EACH_ISA(shared_pool);
    RUN_ON_EACH_ISA(shared_callback);
}
