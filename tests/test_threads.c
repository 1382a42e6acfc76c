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
    ASSERTm("y", unchanged(y, c.y, c.nx));
    ASSERTm("attn", unchanged(attn, c.attn, c.nattn));
    ASSERTm("attn_mean", unchanged(mean, c.mean, c.nmean));
    ASSERTm("lse", unchanged(lse, c.lse, c.nlse));
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
                ASSERTm("more than a few calls", c.calls <= 16);
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
        if (mha_forward(u->layer, &u->a) != MHA_OK || !unchanged(u->a.y, u->want, u->n)) u->bad++;
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
    RUN_ON_EACH_ISA(thread_per_task);
    RUN_ON_EACH_ISA(shared_layer);
    RUN_ON_EACH_ISA(shared_pool);
    RUN_ON_EACH_ISA(shared_callback);
}
