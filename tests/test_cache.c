/* test_cache.c - tokens that come in pieces: same bits as all at once, and no way to overflow. */
#include "streams.h"

enum { D = 24, H = 6, G = 3, DK = 5, DV = 7, B = 3, CAP = 600 };

typedef struct model {
    mha_layer *layer;
    float *w[4], *b;
} model;

static mha_status model_make(model *m, mha_isa isa, uint64_t seed)
{
    rng r = rng_make(seed);
    mha_config cfg = { 0 };
    mha_weights w = { 0 };
    cfg.d_model = D, cfg.n_heads = H, cfg.n_kv_heads = G, cfg.d_k = DK, cfg.d_v = DV, cfg.isa = isa;
    m->w[0] = rng_floats(&r, D * H * DK);
    m->w[1] = rng_floats(&r, D * G * DK);
    m->w[2] = rng_floats(&r, D * G * DV);
    m->w[3] = rng_floats(&r, D * H * DV);
    m->b = rng_floats(&r, H * DK + G * DK + G * DV);
    w.q = m->w[0], w.k = m->w[1], w.v = m->w[2], w.out = m->w[3], w.b_qkv = m->b;
    return mha_layer_create(&m->layer, &cfg, &w);
}

static mha_cache_config cache_cfg(int batch, int capacity, int ring)
{
    mha_cache_config cfg = { 0 };
    cfg.batch = batch, cfg.capacity = capacity, cfg.ring = ring;
    return cfg;
}

static mha_status linear_create(mha_cache **cache, const mha_layer *layer, int batch, int capacity)
{
    mha_cache_config cfg = cache_cfg(batch, capacity, 0);
    return mha_cache_create(cache, layer, &cfg);
}

static void model_free(model *m)
{
    mha_layer_free(m->layer);
    for (int i = 0; i < 4; i++) free(m->w[i]);
    free(m->b);
}

/* tokens t0 .. t1-1 of x [batch,T,D] through a cache, into y of the same shape */
static mha_status step(const mha_layer *layer, mha_cache *cache, const float *x, float *y,
                       int batch, int T, int t0, int t1)
{
    int n = t1 - t0;
    size_t len = (size_t)(batch * n * D);
    float *xs = test_floats(len + 1, 0.0f), *ys = test_floats(len + 1, 0.0f);
    mha_args a = { 0 };
    mha_status st;
    for (int b = 0; b < batch; b++)
        memcpy(xs + b * n * D, x + (b * T + t0) * D, (size_t)(n * D) * sizeof(float));
    a.batch = batch, a.seq = n, a.x = xs, a.y = ys, a.cache = cache;
    a.mask.causal = MHA_CAUSAL;
    st = mha_forward(layer, &a);
    for (int b = 0; b < batch; b++)
        memcpy(y + (b * T + t0) * D, ys + b * n * D, (size_t)(n * D) * sizeof(float));
    free(xs);
    free(ys);
    return st;
}

/* Prefill, ragged chunks and single tokens all equal one causal call without a cache. */
TEST pieces_equal_whole(mha_isa isa)
{
    enum { T = 530 };
    const int ends[4][12] = {
        { T }, { 1, 2, 18, 19, 255, 256, 257, 400, 513, T }, { 300, T }, { 0 }
    };
    model m;
    mha_cache *cache;
    mha_args a = { 0 };
    rng r = rng_make(test_seed);
    float *x = rng_floats(&r, B * T * D), *want = test_floats(B * T * D, 0.0f);
    float *got = test_floats(B * T * D, 0.0f);
    ASSERT_STATUS(MHA_OK, model_make(&m, isa, test_seed));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, m.layer, B, CAP));
    a.batch = B, a.seq = T, a.x = x, a.y = want, a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
    for (int way = 0; way < 4; way++) {
        ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, -1, 0));
        memset(got, 0, B * T * D * sizeof(float));
        for (int t0 = 0, t1, i = 0; t0 < T; t0 = t1, i++) {
            t1 = way == 3 ? t0 + 1 : ends[way][i];
            ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, got, B, T, t0, t1));
            ASSERT_EQ_FMT(t1, mha_cache_length(cache, B - 1), "%d");
        }
        ASSERT(same_result(want, got, B * T * D));
    }
    mha_cache_free(cache);
    model_free(&m);
    free(x);
    free(want);
    free(got);
    PASS();
}

/* Sequences of different length in one batch: each as if it were alone. Slots are taken back and
   restarted one by one. */
TEST lengths_differ(mha_isa isa)
{
    enum { T = 40 };
    const int keep[B] = { 0, 17, 33 };
    model m;
    mha_cache *cache, *alone;
    rng r = rng_make(test_seed + 1);
    float *x = rng_floats(&r, B * T * D), *x2 = rng_floats(&r, B * T * D);
    float *y = test_floats(B * T * D, 0.0f), *want = test_floats(T * D, 0.0f);
    ASSERT_STATUS(MHA_OK, model_make(&m, isa, test_seed));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, m.layer, B, CAP));
    ASSERT_STATUS(MHA_OK, linear_create(&alone, m.layer, 1, CAP));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, y, B, T, 0, T));
    for (int b = 0; b < B; b++) ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, b, keep[b]));
    for (int b = 0; b < B; b++) ASSERT_EQ_FMT(keep[b], mha_cache_length(cache, b), "%d");
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, x2, y, B, T, 0, T));
    for (int b = 0; b < B; b++) {
        ASSERT_EQ_FMT(keep[b] + T, mha_cache_length(cache, b), "%d");
        ASSERT_STATUS(MHA_OK, mha_cache_truncate(alone, 0, 0));
        if (keep[b])
            ASSERT_STATUS(MHA_OK, step(m.layer, alone, x + b * T * D, want, 1, T, 0, keep[b]));
        ASSERT_STATUS(MHA_OK, step(m.layer, alone, x2 + b * T * D, want, 1, T, 0, T));
        ASSERT(same_result(want, y + b * T * D, T * D));
    }
    mha_cache_free(cache);
    mha_cache_free(alone);
    model_free(&m);
    free(x);
    free(x2);
    free(y);
    free(want);
    PASS();
}

/* Weights, log-sum-exp, masks and threads with a cache: as in the whole run's last rows. */
TEST outputs_and_masks(mha_isa isa)
{
    enum { T = 300, N = 9, T0 = T - N };
    model m;
    mha_cache *cache;
    mha_pool *pool;
    mha_args a = { 0 };
    rng r = rng_make(test_seed + 2);
    float *x = rng_floats(&r, T * D), *y = test_floats(T * D, 0.0f), *yc = test_floats(T * D, 0.0f);
    float *attn = test_floats(H * T * T, 0.0f), *attn_c = test_floats(H * N * T, 0.0f);
    float *lse = test_floats(H * T, 0.0f), *lse_c = test_floats(H * N, 0.0f);
    float *bias = rng_floats(&r, T * T);
    bias[T0 * T + 3] = F_NINF;
    ASSERT_STATUS(MHA_OK, model_make(&m, isa, test_seed));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, m.layer, 1, T));
    ASSERT_STATUS(MHA_OK, mha_pool_create(&pool, 3));
    a.batch = 1, a.seq = T, a.x = x, a.y = y, a.attn = attn, a.lse = lse;
    a.mask.causal = MHA_CAUSAL, a.mask.bias = bias;
    ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, yc, 1, T, 0, T0));
    a.seq = N, a.x = x + T0 * D, a.y = yc, a.attn = attn_c, a.lse = lse_c, a.cache = cache;
    a.mask.bias = bias + T0 * T; /* [N,T], the default strides */
    a.source_seq = T;
    a.parallel = mha_pool_parallel(pool);
    ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
    ASSERT(same_result(y + T0 * D, yc, N * D));
    for (int h = 0; h < H; h++) {
        ASSERT(same_result(attn + (h * T + T0) * T, attn_c + h * N * T, N * T));
        ASSERT(same_result(lse + h * T + T0, lse_c + h * N, N));
    }
    mha_pool_free(pool);
    mha_cache_free(cache);
    model_free(&m);
    free(x), free(y), free(yc), free(attn), free(attn_c), free(lse), free(lse_c), free(bias);
    PASS();
}

/* What a token wrote and was then taken back cannot be seen again: not even NaN. */
TEST rollback_forgets(mha_isa isa)
{
    enum { T = 20 };
    model m;
    mha_cache *cache;
    rng r = rng_make(test_seed + 3);
    float *x = rng_floats(&r, T * D), *bad = test_floats(T * D, F_NAN);
    float *want = test_floats(T * D, 0.0f), *y = test_floats(T * D, 0.0f);
    ASSERT_STATUS(MHA_OK, model_make(&m, isa, test_seed));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, m.layer, 1, T));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, want, 1, T, 0, T));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 0));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, bad, y, 1, T, 0, T));
    ASSERT(is_nan(y[0]));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 0));
    for (int t = 0; t < T; t++) ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, y, 1, T, t, t + 1));
    ASSERT(same_result(want, y, T * D));
    mha_cache_free(cache);
    model_free(&m);
    free(x), free(bad), free(want), free(y);
    PASS();
}

/* ---- every option ---------------------------------------------------------------------------- */

/* Rows t0 .. t1-1 of x [2,T,width] through a cache of two, with this mask. */
static mha_status piece(const mha_layer *layer, mha_cache *cache, const mha_mask *mask,
                        const float *x, float *y, int T, int t0, int t1)
{
    const int width = mha_layer_config(layer)->d_model, n = t1 - t0;
    const size_t row = (size_t)width * sizeof(float);
    float *xs = test_floats((size_t)(2 * n * width), 0.0f),
          *ys = nan_floats((size_t)(2 * n * width));
    mha_args a = { 0 };
    mha_status st;
    for (int b = 0; b < 2; b++)
        memcpy(xs + b * n * width, x + (b * T + t0) * width, (size_t)n * row);
    a.batch = 2, a.seq = n, a.x = xs, a.y = ys, a.cache = cache, a.mask = *mask;
    st = mha_forward(layer, &a);
    for (int b = 0; b < 2; b++)
        memcpy(y + (b * T + t0) * width, ys + b * n * width, (size_t)n * row);
    free(xs), free(ys);
    return st;
}

/* Layers with options in all combinations: a prefill, pieces of any size and token by token give
   the bits of one call without a cache, at default positions. */
TEST options_in_pieces(mha_isa isa)
{
    rng r = rng_make(test_seed + 11);
    for (int n = 0; n < 14; n++) {
        const int with = n < 7 ? 1 << n : n == 7 ? WITH_ALL : (int)rng_u32(&r) & WITH_ALL;
        const int T = n == 7 ? 290 : rng_int(&r, 20, 60), width = rng_int(&r, 5, 25);
        const int kv = rng_int(&r, 1, 3), heads = kv * rng_int(&r, 1, 3);
        const int dk = 2 * rng_int(&r, 1, 6) + n % 2, dv = rng_int(&r, 1, 13);
        const size_t len = (size_t)(2 * T * width);
        rich l = rich_weights(isa, width, heads, kv, dk, dv, 0, 0, with, test_seed + (uint64_t)n);
        float *x = rng_floats(&r, len), *want = nan_floats(len), *y = nan_floats(len);
        mha_cache *cache;
        mha_args a = { 0 };
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, linear_create(&cache, l.n.layer, 2, T));
        a.batch = 2, a.seq = T, a.x = x, a.y = want, a.mask.causal = MHA_CAUSAL;
        if (n % 3) a.mask.windowed = 1, a.mask.left = rng_int(&r, 0, T), a.mask.right = -(n % 2);
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        for (int way = 0; way < 3; way++) {
            ASSERT_STATUS(MHA_OK, mha_cache_reset(cache, -1));
            memset(y, 0xff, len * sizeof(float));
            for (int t0 = 0, t1; t0 < T; t0 = t1) {
                t1 = way == 0 ? T : way == 1 ? t0 + rng_int(&r, 1, 19) : t0 + 1;
                if (t1 > T) t1 = T;
                ASSERT_STATUS(MHA_OK, piece(l.n.layer, cache, &a.mask, x, y, T, t0, t1));
            }
            if (!same_result(want, y, len)) rich_print(&l);
            ASSERT(same_result(want, y, len));
        }
        mha_cache_free(cache);
        rich_free(&l);
        free(x), free(want), free(y);
    }
    PASS();
}

/* The positions of rope that a cache takes by default, given: same bits; others: not the same. */
TEST positions_default(mha_isa isa)
{
    enum { T = 30, W = 12 };
    rich l = rich_weights(isa, W, 4, 2, 6, 5, 0, 0, WITH_ROPE, test_seed);
    rng r = rng_make(test_seed + 12);
    float *x = rng_floats(&r, T * W), *want = nan_floats(T * W), *y = nan_floats(T * W);
    int pos[T];
    mha_cache *cache;
    mha_args a = { 0 };
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, l.n.layer, 1, T));
    a.batch = 1, a.cache = cache, a.mask.causal = MHA_CAUSAL;
    for (int way = 0; way < 4; way++) {
        /* 0: by default; 1: the same, given; 2: all 100 later, only distances count; 3: shifted
           from the middle on */
        float *to = way == 0 ? want : y;
        double d = 0;
        ASSERT_STATUS(MHA_OK, mha_cache_reset(cache, 0));
        for (int t = 0; t < T; t++) pos[t] = t + (way == 2 ? 100 : way == 3 && t > T / 2 ? 3 : 0);
        for (int t = 0; t < T; t += a.seq) {
            a.seq = t == 0 ? 7 : T - t < 4 ? T - t : 4;
            a.x = x + t * W, a.y = to + t * W, a.positions = way ? pos + t : NULL;
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        }
        if (way == 1) ASSERT(same_result(want, y, T * W));
        for (int i = 0; i < T * W; i++) {
            const double e = fabs((double)y[i] - (double)want[i]);
            ASSERT(is_finite(to[i]));
            if (way && e > d) d = e;
        }
        if (way == 2) ASSERT(d < 1e-4);
        if (way == 3) ASSERT(d > 1e-3);
    }
    mha_cache_free(cache);
    rich_free(&l);
    free(x), free(want), free(y);
    PASS();
}

/* ---- sequences that come and go --------------------------------------------------------------- */

/* No token, one, or many of each sequence in one call: each as if it were alone. */
TEST continuous_batching(mha_isa isa)
{
    const int counts[9][SLOTS] = { { 5, 0, 1, 33 }, { 1, 17, 1, 1 },  { 0, 1, 0, 0 },
                                   { 0, 0, 0, 0 },  { 1, 1, 1, 1 },   { 20, 2, 0, 1 },
                                   { 1, 1, 64, 0 }, { 0, 240, 1, 1 }, { 1, 2, 3, 4 } };
    for (int with = 0; with <= WITH_ALL; with += WITH_ALL) {
        rich l = rich_weights(isa, 14, 6, 3, 5, 7, 0, 0, with, test_seed + 1);
        rng r = rng_make(test_seed + 13);
        world w;
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(SLOTS, 300, 0), 300));
        for (int i = 0; i < 9; i++) {
            plan p = plan_of(0);
            memcpy(p.count, counts[i], sizeof p.count);
            p.ragged = 1;
            p.outputs = i % 2;
            p.threads = i % 3 ? 3 : 0;
            p.workspace = i > 4;
            CHECK_CALL(feed_ok(&w, 0, &p, &r));
        }
        for (int i = 0; i < 9; i++) { /* and with the other masks */
            plan p = plan_draw(&w, 0, &r, 3);
            p.ragged = 1;
            p.causal = i % 2 ? MHA_CAUSAL : MHA_NOT_CAUSAL;
            CHECK_CALL(feed_ok(&w, 0, &p, &r));
        }
        world_free(&w);
        rich_free(&l);
    }
    PASS();
}

/* One slot starts anew, the others go on. */
TEST reset_one_slot(mha_isa isa)
{
    rich l = rich_weights(isa, 14, 6, 3, 6, 7, 0, 0, WITH_ROPE, test_seed + 2);
    rng r = rng_make(test_seed + 14);
    plan p = plan_of(9);
    world w;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(3, 40, 0), 40));
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    ASSERT_STATUS(MHA_OK, mha_cache_reset(w.cache[0], 1));
    line_truncate(&w.line[0][1], 0);
    for (int b = 0; b < 3; b++)
        ASSERT_EQ_FMT(b == 1 ? 0 : 18, mha_cache_length(w.cache[0], b), "%d");
    CHECK_CALL(feed_ok(&w, 0, &p, &r)); /* at positions 18.., 0.., 18.. */
    ASSERT_STATUS(MHA_OK, mha_cache_reset(w.cache[0], -1));
    for (int b = 0; b < 3; b++) {
        ASSERT_EQ_FMT(0, mha_cache_length(w.cache[0], b), "%d");
        line_truncate(&w.line[0][b], 0);
    }
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* Left padding: the first keys of each slot are not there for it, at absolute positions. */
TEST key_start_in_cache(mha_isa isa)
{
    enum { T = 12, N = 20, W = 14 };
    rich l = rich_weights(isa, W, 6, 3, 5, 7, 0, 0, WITH_ALIBI, test_seed + 3);
    rng r = rng_make(test_seed + 15);
    plan p = plan_of(T);
    world w;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(3, 60, 0), 60));
    p.starts = 1;
    p.start[0] = 0, p.start[1] = 5, p.start[2] = T; /* slot 2: no key at all */
    p.outputs = 1;
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    for (int i = 0; i < T; i++) /* what sees nothing is the bias of W_O */
        ASSERT(same_result(l.n.w.b_out, w.y + (2 * T + i) * W, W));
    p.start[2] = T + 3;
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    p = plan_of(1);
    p.starts = 1;
    for (int i = 0; i < N; i++) {
        for (int b = 0; b < 3; b++) p.start[b] = rng_int(&r, 0, w.line[0][b].len + 1);
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
    }
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* A prefix read once, then continued in several ways, from another cache and from another slot:
   the bits of having fed it each time. */
TEST fork_shares_prefix(mha_isa isa)
{
    enum { P = 21, N = 6, W = 14 };
    for (int with = 0; with <= WITH_ALL; with += WITH_ALL) {
        rich l = rich_weights(isa, W, 6, 3, 5, 7, 0, 0, with, test_seed + 4);
        rng r = rng_make(test_seed + 16), first;
        plan p = plan_of(P), q = plan_of(N);
        world w, twice;
        float *y;
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, world_make(&w, &l, 2, cache_cfg(3, 60, 0), 60));
        ASSERT_STATUS(MHA_OK, world_make(&twice, &l, 1, cache_cfg(3, 60, 0), 60));
        first = r;
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
        CHECK_CALL(feed_ok(&twice, 0, &p, &first));
        for (int b = 0; b < 3; b++) { /* all of cache 1 from slot 2 of cache 0, in pieces */
            const int len = b == 0 ? P : b == 1 ? 17 : 1;
            ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[1], b, w.cache[0], 2, b ? len : -1));
            ASSERT_EQ_FMT(len, mha_cache_length(w.cache[1], b), "%d");
            line_copy(&w, &w.line[1][b], &w.line[0][2], len);
        }
        CHECK_CALL(feed_ok(&w, 1, &q, &r)); /* each goes its own way */
        CHECK_CALL(feed_ok(&w, 1, &q, &r));
        CHECK_CALL(feed_ok(&w, 0, &q, &r)); /* and the origin is as it was */
        /* within one cache: slot 0 and 1 become slot 2 */
        for (int b = 0; b < 2; b++) {
            ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[0], b, w.cache[0], 2, P));
            line_copy(&w, &w.line[0][b], &w.line[0][2], P);
        }
        ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[0], 2, w.cache[0], 2, P)); /* truncates */
        line_truncate(&w.line[0][2], P);
        for (int b = 0; b < 3; b++) ASSERT_EQ_FMT((int)P, mha_cache_length(w.cache[0], b), "%d");
        /* the prefix fed three times over, then the same tokens */
        for (int b = 0; b < 2; b++) {
            mha_args a = { 0 };
            const int cu[4] = { 0, b ? 0 : P, P, P };
            ASSERT_STATUS(MHA_OK, mha_cache_reset(twice.cache[0], b));
            a.batch = 3, a.cu_seq = cu, a.x = w.line[0][2].x, a.cache = twice.cache[0];
            ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
            line_copy(&twice, &twice.line[0][b], &w.line[0][2], P);
        }
        q.ragged = 1, q.count[1] = 1;
        first = r;
        CHECK_CALL(feed_ok(&twice, 0, &q, &first));
        y = copy_floats(twice.y, twice.ny);
        CHECK_CALL(feed_ok(&w, 0, &q, &r));
        ASSERT_EQ(twice.ny, w.ny);
        ASSERT(same_result(y, w.y, w.ny));
        free(y);
        world_free(&w);
        world_free(&twice);
        rich_free(&l);
    }
    PASS();
}

/* Beams: permutations with cycles of every length, copies, all from one. */
TEST reorder_slots(mha_isa isa)
{
    const int orders[10][SLOTS] = { { 0, 1, 2, 3 }, { 1, 0, 2, 3 }, { 1, 2, 0, 3 }, { 3, 2, 1, 0 },
                                    { 1, 2, 3, 0 }, { 2, 2, 2, 2 }, { 0, 0, 3, 2 }, { 3, 3, 0, 0 },
                                    { 1, 2, 3, 3 }, { 3, 0, 1, 1 } };
    rich l = rich_weights(isa, 14, 6, 3, 6, 7, 0, 0, WITH_ROPE, test_seed + 5);
    rng r = rng_make(test_seed + 17);
    world w;
    plan p = plan_of(0);
    float *x[SLOTS];
    int *pos[SLOTS], len[SLOTS];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(SLOTS, 60, 0), 60));
    for (int i = 0; i < 10; i++) {
        ASSERT_STATUS(MHA_OK, mha_cache_reset(w.cache[0], -1));
        p.ragged = 1;
        for (int b = 0; b < SLOTS; b++) {
            line_truncate(&w.line[0][b], 0);
            p.count[b] = i % 2 ? 11 : b == 2 ? 0 : rng_int(&r, 1, 30); /* one of them empty */
        }
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
        ASSERT_STATUS(MHA_OK, mha_cache_reorder(w.cache[0], orders[i]));
        for (int b = 0; b < SLOTS; b++) x[b] = w.line[0][b].x, pos[b] = w.line[0][b].pos;
        for (int b = 0; b < SLOTS; b++) len[b] = w.line[0][b].len;
        for (int b = 0; b < SLOTS; b++) { /* the model, in new memory */
            line *to = &w.line[0][b], from;
            const int o = orders[i][b];
            from.x = x[o], from.pos = pos[o], from.floor = 0;
            to->x = test_floats(60 * 14, 0.0f);
            to->pos = (int *)stream_take(60 * sizeof(int));
            line_copy(&w, to, &from, len[o]);
            ASSERT_EQ_FMT(len[o], mha_cache_length(w.cache[0], b), "%d");
        }
        for (int b = 0; b < SLOTS; b++) free(x[b]), free(pos[b]);
        for (int step_ = 0; step_ < 2; step_++) {
            for (int b = 0; b < SLOTS; b++) p.count[b] = 3 * step_ + 1;
            p.ragged = step_;
            CHECK_CALL(feed_ok(&w, 0, &p, &r));
        }
    }
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* ---- rings ------------------------------------------------------------------------------------ */

/* A stream several times as long as the ring, windows of all widths: the bits of a linear cache
   with the same window, and of no cache. Looked at where a ring in blocks of 256 goes round. */
TEST ring_equals_linear(mha_isa isa)
{
    const int window[7][2] = { { 0, 1 },   { 0, 5 },  { 1, 1 },   { 7, 9 },
                               { 16, 16 }, { 30, 3 }, { 260, 40 } }; /* left, largest chunk */
    for (int n = 0; n < 13; n++) {
        const int left = window[n % 7][0], chunk = window[n % 7][1], cap = left + chunk;
        const int deep = cap > 100, room = 700;
        const int with = n < 7 ? 0 : WITH_ALL & ~(n % 2 ? WITH_BIAS_KV : 0);
        rich l = rich_weights(isa, 14, 4, 2, n % 2 ? 5 : 8, n % 2 ? 7 : 16, 0, 0, with,
                              test_seed + (uint64_t)n);
        rng r = rng_make(test_seed + 18 + (uint64_t)n), again;
        world ring, lin;
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, world_make(&ring, &l, 1, cache_cfg(3, cap, 1), room));
        ASSERT_STATUS(MHA_OK, world_make(&lin, &l, 1, cache_cfg(3, room, 0), room));
        for (int part = n < 7 ? 0 : 1; part < 2 + (n == 3); part++) {
            const int start = part ? (deep ? 512 : 256) * part - 9 : 0,
                      end = start + (deep ? 60 : 17);
            const int to[3] = { start, start - 4, start - left };
            again = r;
            CHECK_CALL(world_advance(&ring, 0, to, &r));
            for (int b = 0; b < 3; b++) { /* the same tokens, whatever the pieces */
                const line *from = &ring.line[0][b];
                const int have = lin.line[0][b].len, more = from->len - have;
                mha_args a = { 0 };
                int cu[4] = { 0 };
                for (int i = b; i < 3; i++) cu[i + 1] = more;
                a.batch = 3, a.cu_seq = cu, a.cache = lin.cache[0], a.x = from->x + have * 14;
                ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
                line_append(&lin, &lin.line[0][b], from->x + have * 14, from->pos + have, more);
            }
            while (ring.line[0][0].len < end) {
                plan p = plan_of(rng_int(&r, deep ? chunk - 2 : 1, chunk));
                p.windowed = 1;
                p.left = left;
                p.right = rng_int(&r, -1, 2);
                p.ragged = rng_chance(&r, 50);
                if (p.ragged) /* the slots drift apart */
                    for (int b = 0; b < 3; b++)
                        p.count[b] =
                            b == 0 ? p.count[0] : rng_int(&r, 0, deep || chunk < 2 ? chunk : 2);
                if (rng_chance(&r, 20)) p.causal = MHA_NOT_CAUSAL;
                p.outputs = rng_chance(&r, 20);
                p.allow = rng_chance(&r, 10);
                p.threads = rng_chance(&r, 30) ? 2 : 0;
                again = r;
                CHECK_CALL(feed_ok(&ring, 0, &p, &r));
                p.unchecked = 1;
                CHECK_CALL(feed_ok(&lin, 0, &p, &again));
                ASSERT_EQ(ring.ny, lin.ny);
                ASSERT(same_result(lin.y, ring.y, lin.ny));
            }
        }
        ASSERT(ring.line[0][0].len > (deep ? 1 : 4) * cap);
        world_free(&ring);
        world_free(&lin);
        rich_free(&l);
    }
    PASS();
}

/* Windows may change from call to call, up to what the ring holds. */
TEST ring_widest_window(mha_isa isa)
{
    const int to[2] = { 220, 187 };
    rich l = rich_weights(isa, 14, 4, 2, 5, 7, 0, 0, 0, test_seed + 6);
    rng r = rng_make(test_seed + 40);
    world w;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(2, 20, 1), 500));
    CHECK_CALL(world_advance(&w, 0, to, &r));
    for (int i = 0; i < 30; i++) {
        plan p = plan_of(rng_int(&r, 1, 7));
        p.windowed = 1;
        p.left = i % 3 ? 20 - p.count[0] : rng_int(&r, 0, 20 - p.count[0]);
        p.only = i % 5 == 4; /* the last tokens are asked again */
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
    }
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* What a ring refuses, and in which words. */
TEST ring_refuses(mha_isa isa)
{
    rich l = rich_weights(isa, 14, 4, 2, 5, 7, 0, 0, 0, test_seed + 7);
    rng r = rng_make(test_seed + 41);
    world w;
    plan p;
    mha_status st = MHA_OK;
    static char why[300];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(2, 20, 1), 200));
    for (int i = 0; i < 4; i++) {
        /* no window, at first and when the ring has gone round */
        p = plan_of(5);
        CHECK_CALL(feed(&w, 0, &p, &r, &st));
        ASSERT_STATUS(MHA_ERR_CONFLICT, st);
        /* one token too many for it: in T, in one sequence of several, in left */
        p.windowed = 1, p.left = 16;
        CHECK_CALL(feed(&w, 0, &p, &r, &st));
        ASSERT_STATUS(MHA_ERR_SIZE, st);
        p.ragged = 1, p.count[0] = 1;
        CHECK_CALL(feed(&w, 0, &p, &r, &st));
        ASSERT_STATUS(MHA_ERR_SIZE, st);
        p.left = 2147483647;
        CHECK_CALL(feed(&w, 0, &p, &r, &st));
        ASSERT_STATUS(MHA_ERR_SIZE, st);
        {
            float x[10 * 14] = { 0 }, y[10 * 14];
            mha_args a = { 0 };
            a.batch = 2, a.seq = 5, a.x = x, a.y = y, a.cache = w.cache[0];
            a.mask.causal = MHA_CAUSAL, a.mask.windowed = 1, a.mask.left = 16;
            ASSERT_STATUS(MHA_ERR_SIZE, mha_forward_check(l.n.layer, &a, why, sizeof why));
            ASSERT_STR_EQ(
                "a window of 16 and 5 new tokens need a ring of capacity 21, but that of the "
                "cache is 20",
                why);
            a.seq = 21;
            ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_append_check(l.n.layer, &a, why, sizeof why));
            ASSERT_STR_EQ(
                "21 new tokens are more than the ring's capacity 20: append them in pieces", why);
            a.seq = 5;
            a.mask.windowed = 0, a.mask.left = 0;
            ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward_check(l.n.layer, &a, why, sizeof why));
            ASSERTm(why, strstr(why, "window") != NULL);
            a.mask.windowed = 1, a.mask.left = -1, a.mask.right = 0; /* all that came before */
            st = mha_forward_check(l.n.layer, &a, why, sizeof why);
            ASSERT(st == MHA_ERR_CONFLICT || st == MHA_ERR_SIZE);
        }
        p = plan_of(5);
        p.windowed = 1, p.left = 15;
        for (int n = 0; n < 4; n++) CHECK_CALL(feed_ok(&w, 0, &p, &r));
    }
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* Back within what the ring still holds: same bits. Further back: refused by the call whose window
   reaches what is gone, and only by that. */
TEST ring_rollback(mha_isa isa)
{
    enum { RING = 24 };
    const int to[2] = { 200, 200 };
    rich l = rich_weights(isa, 14, 4, 2, 6, 7, 0, 0, WITH_ROPE, test_seed + 8);
    rng r = rng_make(test_seed + 42);
    world w;
    mha_status st = MHA_OK;
    plan p = plan_of(8), q;
    static char why[300];
    float x[2 * 14] = { 0 }, y[2 * 14];
    mha_args a = { 0 };
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(2, RING, 1), 4000));
    CHECK_CALL(world_advance(&w, 0, to, &r));
    p.windowed = 1, p.left = 10;
    for (int i = 0; i < 9; i++) CHECK_CALL(feed_ok(&w, 0, &p, &r));
    /* 272 tokens, 248 .. 271 are there: from 258 on a window of 10 is there too */
    for (int back = 271; back >= 258; back -= 13) {
        ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[0], 1, back));
        line_truncate(&w.line[0][1], back);
        q = p, q.ragged = 1, q.count[0] = 0, q.count[1] = 1;
        CHECK_CALL(feed_ok(&w, 0, &q, &r)); /* does not go past 272: nothing more is lost */
    }
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[0], 0, 272));
    line_truncate(&w.line[0][0], 272);

    /* as far back as no ring of this capacity can hold */
    while (w.line[0][0].len < 3000) {
        q = plan_of(RING), q.append = 1;
        q.ragged = 1, q.count[1] = 0;
        CHECK_CALL(feed_ok(&w, 0, &q, &r));
    }
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[0], 0, 500));
    line_truncate(&w.line[0][0], 500);
    ASSERT_EQ_FMT(500, mha_cache_length(w.cache[0], 0), "%d");
    q = plan_of(1), q.windowed = 1, q.left = 1;
    CHECK_CALL(feed(&w, 0, &q, &r, &st)); /* changes nothing, of slot 1 neither */
    ASSERT_STATUS(MHA_ERR_CONFLICT, st);
    a.batch = 2, a.seq = 1, a.x = x, a.y = y, a.cache = w.cache[0];
    a.mask.windowed = 1, a.mask.left = 1;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward_check(l.n.layer, &a, why, sizeof why));
    ASSERT_STR_EQ("sequence 0 was cut back to 500, and the ring no longer holds its position 499, "
                  "which the window sees: reset it and start again",
                  why);
    q.ragged = 1, q.count[0] = 0;
    CHECK_CALL(feed_ok(&w, 0, &q, &r)); /* slot 1 alone is not concerned */
    q.count[0] = 2, q.left = 0;
    CHECK_CALL(feed_ok(&w, 0, &q, &r)); /* each token alone: nothing before it is needed */
    q.count[0] = 1, q.left = 2;
    CHECK_CALL(feed_ok(&w, 0, &q, &r)); /* and the two new ones are there */
    q.count[0] = 1, q.left = 5;
    CHECK_CALL(feed(&w, 0, &q, &r, &st)); /* but not those before */
    ASSERT_STATUS(MHA_ERR_CONFLICT, st);
    /* from the start again */
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[0], 0, 0));
    line_truncate(&w.line[0][0], 0);
    q = p, q.ragged = 1, q.count[1] = 0;
    for (int i = 0; i < 5; i++) CHECK_CALL(feed_ok(&w, 0, &q, &r));
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* Rings are copied whole. */
TEST ring_fork_and_reorder(mha_isa isa)
{
    const int order[3] = { 2, 2, 0 }, to[3] = { 230, 240, 210 }, far[3] = { 3000, 3000, 3000 };
    rich l = rich_weights(isa, 14, 4, 2, 6, 7, 0, 0, WITH_ROPE, test_seed + 9);
    rng r = rng_make(test_seed + 43);
    world w;
    plan p = plan_of(5);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 2, cache_cfg(3, 20, 1), 3000));
    CHECK_CALL(world_advance(&w, 0, to, &r));
    p.windowed = 1, p.left = 15;
    for (int i = 0; i < 11; i++) {
        p.ragged = i % 2, p.count[1] = i % 2 ? 2 : 5;
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
    }
    ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[1], 2, w.cache[0], 0, -1));
    line_copy(&w, &w.line[1][2], &w.line[0][0], w.line[0][0].len);
    ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[1], 0, w.cache[0], 1, w.line[0][1].len));
    line_copy(&w, &w.line[1][0], &w.line[0][1], w.line[0][1].len);
    for (int i = 0; i < 3; i++) CHECK_CALL(feed_ok(&w, 1, &p, &r));
    ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[0], 1, w.cache[0], 2, -1));
    line_copy(&w, &w.line[0][1], &w.line[0][2], w.line[0][2].len);
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    ASSERT_STATUS(MHA_OK, mha_cache_reorder(w.cache[0], order));
    line_copy(&w, &w.line[0][1], &w.line[0][2], w.line[0][2].len); /* 1 := 2, then 0 and 2 swap */
    {
        line old = w.line[0][0];
        w.line[0][0] = w.line[0][2];
        w.line[0][2] = old;
    }
    for (int i = 0; i < 3; i++) CHECK_CALL(feed_ok(&w, 0, &p, &r));
    /* what is lost of a sequence that was cut back is lost of its copy too */
    CHECK_CALL(world_advance(&w, 0, far, &r));
    for (int b = 0; b < 3; b++) {
        ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[0], b, 2500));
        line_truncate(&w.line[0][b], 2500);
    }
    ASSERT_STATUS(MHA_OK, mha_cache_fork(w.cache[1], 1, w.cache[0], 0, -1));
    line_copy(&w, &w.line[1][1], &w.line[0][0], 2500);
    ASSERT_STATUS(MHA_OK, mha_cache_reorder(w.cache[0], order));
    for (int c = 0; c < 2; c++)
        for (int b = 0; b < 3; b++) {
            mha_status st = MHA_OK;
            plan q = plan_of(0);
            if (c == 1 && b != 1) continue;
            ASSERT_STATUS(MHA_OK, mha_cache_truncate(w.cache[c], b, 2400));
            line_truncate(&w.line[c][b], 2400);
            q.ragged = 1, q.count[b] = 1, q.windowed = 1, q.left = 5;
            CHECK_CALL(feed(&w, c, &q, &r, &st));
            ASSERT_STATUS(MHA_ERR_CONFLICT, st);
        }
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* A ring whose window takes all of its places: the oldest key in it is seen until it is written
   over, and not before. */
TEST ring_full_window(mha_isa isa)
{
    enum { W = 24, PLACES = 256, N = PLACES + 40 };
    rich l = rich_weights(isa, W, 4, 2, 6, 7, 0, 0, 0, test_seed + 12);
    rng r = rng_make(test_seed + 45);
    float *x = rng_floats(&r, N * W), *y = nan_floats(N * W), *want = nan_floats(N * W);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int kind = 0; kind < 8; kind++) {
        const mha_type type = (mha_type)(kind / 2);
        mha_cache_config ring = cache_cfg(1, PLACES, 1), whole = cache_cfg(1, N, 0);
        mha_cache *cache[2];
        mha_args a = { 0 };
        ring.type = whole.type = type;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache[0], l.n.layer, &ring));
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache[1], l.n.layer, &whole));
        a.batch = 1, a.mask.causal = MHA_CAUSAL, a.mask.windowed = 1;
        for (int t = 0; t < N; t += a.seq) {
            a.seq = kind % 2 ? 1 : t % 3 + 1;
            if (a.seq > N - t) a.seq = N - t;
            a.mask.left = PLACES - a.seq;
            a.x = x + t * W, a.y = y + t * W, a.cache = cache[0];
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            a.y = want + t * W, a.cache = cache[1];
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        }
        ASSERT(same_result(want, y, N * W));
        mha_cache_free(cache[0]);
        mha_cache_free(cache[1]);
    }
    rich_free(&l);
    free(x), free(y), free(want);
    PASS();
}

/* A token of NaN shows as long as a window sees it, and then no more: not where it still lies next
   to those that are seen, nor when it was taken back. In every type. */
TEST ring_forgets(mha_isa isa)
{
    enum { LEFT = 6, N = 40, W = 14, BAD = 5 };
    rich l = rich_weights(isa, W, 4, 2, 6, 7, 0, 0, WITH_ROPE | WITH_SINK, test_seed + 10);
    rng r = rng_make(test_seed + 44);
    float *x = rng_floats(&r, (240 + N) * W), *bad = test_floats(W, F_NAN);
    float *y = nan_floats(W), *want = nan_floats(W);
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int kind = 0; kind < 8; kind++) {
        mha_cache_config cfg = cache_cfg(1, kind % 2 ? 10 : 240 + N, kind % 2);
        mha_cache *cache[2]; /* without and with it */
        mha_args a = { 0 };
        cfg.type = (mha_type)(kind / 2);
        for (int i = 0; i < 2; i++) {
            ASSERT_STATUS(MHA_OK, mha_cache_create(&cache[i], l.n.layer, &cfg));
            a.batch = 1, a.seq = 10, a.cache = cache[i];
            for (int t = 0; t < 240; t += 10) {
                a.x = x + t * W;
                ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
            }
        }
        a.seq = 1, a.mask.windowed = 1, a.mask.left = LEFT;
        for (int t = 0; t < N; t++) {
            if (t == 15) /* one that is taken back at once */
                for (int i = 0; i < 2; i++) {
                    a.x = bad, a.y = y, a.cache = cache[i];
                    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
                    ASSERT(is_nan(y[0]));
                    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache[i], 0, 240 + t));
                }
            a.x = x + (240 + t) * W, a.y = want, a.cache = cache[0];
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            if (t == BAD) a.x = bad;
            a.y = y, a.cache = cache[1];
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            for (int c = 0; c < W; c++) ASSERT(is_finite(want[c]));
            if (t >= BAD && t <= BAD + LEFT)
                for (int c = 0; c < W; c++) ASSERT(is_nan(y[c]));
            else ASSERT(same_result(want, y, W));
        }
        mha_cache_free(cache[0]);
        mha_cache_free(cache[1]);
    }
    rich_free(&l);
    free(x), free(bad), free(y), free(want);
    PASS();
}

/* ---- cross-attention --------------------------------------------------------------------------- */

/* A source that is projected once and asked often: the bits of mha_forward with that source. */
TEST cross_attention(mha_isa isa)
{
    enum { W = 14, WS = 9, WV = 11, S0 = 37, S1 = 1, S2 = 23, N = 3 };
    const int lens[3] = { S0, S1, S2 }, cu[4] = { 0, S0, S0 + S1, S0 + S1 + S2 };
    for (int n = 0; n < 6;
         n++) { /* source wider or not, values from a third or not; in two parts */
        const int ds = n % 3 ? WS : 0, dv = n % 3 == 2 ? WV : 0, parts = n >= 3;
        const int with = WITH_ALL & ~(n % 2 ? WITH_ROPE : 0);
        rich l = rich_weights(isa, W, 6, 3, 6, 7, ds, dv, with, test_seed + 10);
        rng r = rng_make(test_seed + 50);
        const int wk = ds ? ds : W, wv = dv ? dv : wk;
        float *source = rng_floats(&r, (size_t)(cu[3] * wk));
        float *values = rng_floats(&r, (size_t)(cu[3] * wv));
        float *x = rng_floats(&r, 3 * 5 * W), *y = nan_floats(3 * 5 * W);
        float *want = nan_floats(3 * 5 * W), *lse = nan_floats(3 * 6 * 5);
        float *attn = nan_floats(3 * 6 * 5 * S0), *want_attn = nan_floats(6 * 5 * S0);
        float *want_lse = nan_floats(6 * 5);
        int pos[3 * 5], source_pos[S0 + S1 + S2];
        mha_cache *cache;
        mha_args a = { 0 }, f = { 0 };
        for (int i = 0; i < 15; i++) pos[i] = rng_int(&r, -5, 90);
        for (int i = 0; i < cu[3]; i++) source_pos[i] = rng_int(&r, -5, 90);
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, linear_create(&cache, l.n.layer, 3, S0));
        a.batch = 3, a.cache = cache;
        for (int part = 0; part <= parts; part++) {
            /* the first half of each source, then the rest */
            int from[4] = { 0 }, at[S0 + S1 + S2];
            float *some = test_floats((size_t)(cu[3] * wk), 0.0f);
            float *some_v = test_floats((size_t)(cu[3] * wv), 0.0f);
            for (int b = 0, i = 0; b < 3; b++) {
                const int half = parts ? lens[b] / 2 : 0;
                for (int j = part ? half : 0; j < (parts && !part ? half : lens[b]); j++, i++) {
                    memcpy(some + i * wk, source + (cu[b] + j) * wk, (size_t)wk * sizeof(float));
                    memcpy(some_v + i * wv, values + (cu[b] + j) * wv, (size_t)wv * sizeof(float));
                    at[i] = source_pos[cu[b] + j];
                }
                from[b + 1] = i;
            }
            a.source = some;
            if (dv) a.source_v = some_v;
            a.cu_source = from;
            a.source_seq = part ? 0 : from[3];
            a.source_positions = at;
            ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
            free(some), free(some_v);
        }
        for (int b = 0; b < 3; b++) ASSERT_EQ_FMT(lens[b], mha_cache_length(cache, b), "%d");
        memset(&a, 0, sizeof a);
        a.batch = 3, a.cache = cache, a.cache_only = 1;
        for (int step_ = 0; step_ < N; step_++) {
            const int T = step_ == 0 ? 5 : step_;
            a.seq = T, a.x = x, a.y = y, a.attn = attn, a.lse = lse, a.positions = pos;
            a.source_seq = step_ ? 0 : S0;
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
            for (int b = 0; b < 3; b++) {
                const int S = lens[b];
                ASSERT_EQ_FMT(S, mha_cache_length(cache, b), "%d");
                f.batch = 1, f.seq = T, f.source_seq = S;
                f.x = x + b * T * W, f.y = want, f.source = source + cu[b] * wk;
                if (dv) f.source_v = values + cu[b] * wv;
                f.positions = pos + b * T, f.source_positions = source_pos + cu[b];
                f.attn = want_attn, f.lse = want_lse;
                ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &f));
                ASSERT(same_result(want, y + b * T * W, (size_t)(T * W)));
                ASSERT(same_result(want_lse, lse + b * 6 * T, (size_t)(6 * T)));
                for (int i = 0; i < 6 * T; i++) {
                    const float *row = attn + (b * 6 * T + i) * S0;
                    ASSERT(same_result(want_attn + i * S, row, (size_t)S));
                    for (int j = S; j < S0; j++) ASSERT_EQ_FMT(0u, bits_f(row[j]), "%x");
                }
            }
        }
        mha_cache_free(cache);
        rich_free(&l);
        free(source), free(values), free(x), free(y), free(want), free(lse), free(attn);
        free(want_attn), free(want_lse);
    }
    PASS();
}

/* The same with a source of one length for all and default positions, and what is asked ragged. */
TEST cross_attention_rectangular(mha_isa isa)
{
    enum { W = 14, WS = 9, S = 19, T = 4 };
    const int cu[4] = { 0, 3, 3, 7 };
    rich l = rich_weights(isa, W, 6, 3, 6, 7, WS, 0, WITH_ROPE, test_seed + 10);
    rng r = rng_make(test_seed + 51);
    float *source = rng_floats(&r, 3 * S * WS), *x = rng_floats(&r, 3 * T * W);
    float *y = nan_floats(3 * T * W), *want = nan_floats(3 * T * W);
    mha_cache *cache;
    mha_args a = { 0 }, f = { 0 };
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, linear_create(&cache, l.n.layer, 3, S));
    f.batch = 3, f.seq = T, f.source_seq = S, f.x = x, f.y = want, f.source = source;
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &f));
    a.batch = 3, a.source_seq = S, a.source = source, a.cache = cache;
    ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
    a.source = NULL, a.source_seq = 0, a.cache_only = 1, a.seq = T, a.x = x, a.y = y;
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
    ASSERT(same_result(want, y, 3 * T * W));
    /* sequence 1 asks nothing this time */
    memset(y, 0xff, 3 * T * W * sizeof(float));
    a.seq = 7, a.cu_seq = cu;
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
    f.seq = 7, f.cu_seq = cu;
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &f));
    ASSERT(same_result(want, y, 7 * W));
    /* causal and windows: lower-right aligned at the end of the source */
    a.seq = f.seq = T, a.cu_seq = f.cu_seq = NULL;
    a.mask.causal = f.mask.causal = MHA_CAUSAL;
    a.mask.windowed = f.mask.windowed = 1;
    a.mask.left = f.mask.left = 5;
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
    ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &f));
    ASSERT(same_result(want, y, 3 * T * W));
    mha_cache_free(cache);
    rich_free(&l);
    free(source), free(x), free(y), free(want);
    PASS();
}

/* Appending x and asking nothing is a forward call without its y. */
TEST append_equals_forward(mha_isa isa)
{
    for (int with = 0; with <= WITH_ALL; with += WITH_ALL) {
        rich l = rich_weights(isa, 14, 6, 3, 5, 7, 0, 0, with, test_seed + 11);
        rng r = rng_make(test_seed + 52), again;
        world w;
        plan p = plan_of(9);
        ASSERT_STATUS(MHA_OK, rich_create(&l));
        ASSERT_STATUS(MHA_OK, world_make(&w, &l, 2, cache_cfg(3, 60, 0), 60));
        for (int i = 0; i < 4; i++) {
            again = r;
            p.append = 0, p.ragged = i % 2, p.count[1] = i % 2 ? 0 : 9, p.positions = i == 2;
            p.threads = i;
            CHECK_CALL(feed_ok(&w, 0, &p, &r));
            r = again;
            p.append = 1, p.workspace = 1;
            CHECK_CALL(feed_ok(&w, 1, &p, &r));
        }
        again = r;
        p = plan_of(3);
        CHECK_CALL(feed_ok(&w, 0, &p, &r));
        CHECK_CALL(feed_ok(&w, 1, &p, &again));
        world_free(&w);
        rich_free(&l);
    }
    PASS();
}

/* ---- random histories -------------------------------------------------------------------------- */

TEST random_linear(mha_isa isa)
{
    CHECK_CALL(histories(isa, 0, MHA_F32, 16));
    PASS();
}

TEST random_ring(mha_isa isa)
{
    CHECK_CALL(histories(isa, 1, MHA_F32, 32));
    PASS();
}

/* ---- facts and errors --------------------------------------------------------------------------- */

TEST info(void)
{
    const mha_type types[4] = { MHA_F32, MHA_F16, MHA_BF16, MHA_INT8 };
    rich l = rich_weights(MHA_ISA_AUTO, 14, 6, 3, 5, 7, 0, 0, 0, test_seed);
    float x[3 * 4 * 14] = { 0 }, y[3 * 4 * 14];
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int n = 0; n < 8; n++) {
        mha_cache_config cfg = cache_cfg(3, 30, n / 4);
        mha_cache_facts facts;
        mha_cache *cache;
        mha_args a = { 0 };
        const int cu[4] = { 0, 1, 8, 12 };
        size_t bytes = 0;
        memset(&facts, 0xff, sizeof facts);
        cfg.type = types[n % 4];
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
        ASSERT_STATUS(MHA_OK, mha_cache_size(l.n.layer, &cfg, &bytes));
        for (int step_ = 0; step_ < 3; step_++) {
            ASSERT_STATUS(MHA_OK, mha_cache_info(cache, &facts));
            ASSERT_EQ_FMT(3, facts.batch, "%d");
            ASSERT_EQ_FMT(30, facts.capacity, "%d");
            ASSERT_EQ_FMT(n / 4, facts.ring, "%d");
            ASSERT_EQ_FMT(3, facts.n_kv_heads, "%d");
            ASSERT_EQ_FMT(5, facts.d_k, "%d");
            ASSERT_EQ_FMT(7, facts.d_v, "%d");
            ASSERT_EQ_FMT((int)cfg.type, (int)facts.type, "%d");
            ASSERT_EQ_FMT(7 * step_, facts.longest, "%d");
            ASSERT(facts.bytes > 0 && facts.bytes <= bytes);
            a.batch = 3, a.cu_seq = cu, a.x = x, a.y = y, a.cache = cache;
            a.mask.windowed = 1, a.mask.left = 9;
            ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        }
        mha_cache_free(cache);
    }
    rich_free(&l);
    PASS();
}

/* No room is a status before anything is written: not to the slots that have room, not to y. */
TEST full_changes_nothing(mha_isa isa)
{
    rich l = rich_weights(isa, 14, 6, 3, 6, 7, 0, 0, WITH_ROPE | WITH_NORM, test_seed + 12);
    rng r = rng_make(test_seed + 53);
    world w;
    mha_status st = MHA_OK;
    plan p = plan_of(11);
    static char why[300];
    float x[3 * 14] = { 0 }, y[3 * 14];
    mha_args a = { 0 };
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, 1, cache_cfg(3, 20, 0), 60));
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    for (int n = 0; n < 12; n++) {
        p = plan_of(10);
        p.append = n / 2 % 2, p.ragged = n % 2, p.outputs = n / 4 % 2;
        if (p.ragged) p.count[0] = 1, p.count[1] = 0; /* slot 2 alone is full */
        p.workspace = n > 8, p.threads = n % 3;
        CHECK_CALL(feed(&w, 0, &p, &r, &st));
        ASSERT_STATUS(MHA_ERR_FULL, st);
    }
    p = plan_of(9); /* the last place is a place */
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    p = plan_of(0);
    CHECK_CALL(feed_ok(&w, 0, &p, &r)); /* and nothing is room enough for nothing */
    p.ragged = 1;
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    p = plan_of(4), p.only = 1; /* asking needs no room */
    CHECK_CALL(feed_ok(&w, 0, &p, &r));
    a.batch = 3, a.seq = 1, a.x = x, a.y = y, a.cache = w.cache[0];
    ASSERT_STATUS(MHA_ERR_FULL, mha_forward_check(l.n.layer, &a, why, sizeof why));
    ASSERT_STR_EQ("no room for 1 more: sequence 0 of the cache holds 20 tokens of 20: truncate or "
                  "reset it, or make a larger one",
                  why);
    ASSERT_STATUS(MHA_ERR_FULL, mha_cache_append(l.n.layer, &a));
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* ---- what is refused ---- */

enum { EB = 2, ET = 6, EW = 14, ECAP = 16 };

typedef struct bench {
    rich l;
    world w;
    mha_args a; /* a call that is right */
    float x[EB * ET * EW], y[EB * ET * EW];
} bench;

static mha_status bench_make(bench *e, int ring)
{
    mha_status st;
    memset(e, 0, sizeof *e);
    e->l = rich_weights(MHA_ISA_AUTO, EW, 6, 3, 6, 7, 0, 0, WITH_ROPE, test_seed);
    st = rich_create(&e->l);
    if (st == MHA_OK) st = world_make(&e->w, &e->l, 1, cache_cfg(EB, ECAP, ring), ECAP);
    e->a.batch = EB, e->a.seq = ET, e->a.x = e->x, e->a.y = e->y, e->a.cache = e->w.cache[0];
    if (ring) e->a.mask.windowed = 1, e->a.mask.left = 3;
    memset(e->y, 0xa5, sizeof e->y);
    return st;
}

static void bench_free(bench *e)
{
    world_free(&e->w);
    rich_free(&e->l);
}

/* This call is refused with that status, by the check too, and changes nothing. */
TEST refused(bench *e, const mha_args *a, mha_status want, int line_no)
{
    char why[300] = "";
    const int append = a->y == NULL;
    mha_status st;
    memcpy(e->w.before, e->w.memory[0], e->w.bytes);
    st = append ? mha_cache_append(e->l.n.layer, a) : mha_forward(e->l.n.layer, a);
    if (st != want) printf("\n  line %d\n", line_no);
    ASSERT_STATUS(want, st);
    if (append) st = mha_cache_append_check(e->l.n.layer, a, why, sizeof why);
    else st = mha_forward_check(e->l.n.layer, a, why, sizeof why);
    ASSERT_STATUS(want, st);
    ASSERT(strlen(why) > 5);
    ASSERT(memcmp(e->w.before, e->w.memory[0], e->w.bytes) == 0);
    ASSERT(bytes_are(e->y, 0xa5, sizeof e->y / sizeof e->y[0]));
    PASS();
}

#define REFUSED(status, change) \
    do { \
        mha_args a = e.a; \
        change; \
        CHECK_CALL(refused(&e, &a, (status), __LINE__)); \
    } while (0)

TEST forward_refuses(void)
{
    const int down[EB + 1] = { 0, 5, 3 }, late[EB + 1] = { 1, 3, 6 }, right[EB + 1] = { 0, 2, 6 };
    const int none[EB] = { 0, 0 }, below[EB] = { 0, -1 }, beyond[EB] = { ET + 1, 0 };
    const int whole[EB] = { ET, ET };
    bench e;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    REFUSED(MHA_ERR_NULL, a.x = NULL);
    REFUSED(MHA_ERR_CONFLICT, a.batch = 1);
    REFUSED(MHA_ERR_CONFLICT, a.batch = 3);
    REFUSED(MHA_ERR_CONFLICT, a.source = e.x; a.source_seq = ET);
    REFUSED(MHA_ERR_CONFLICT, a.source_seq = ET - 1);
    REFUSED(MHA_ERR_CONFLICT, a.source_seq = ECAP);
    REFUSED(MHA_ERR_CONFLICT, a.mask.key_len = none);
    REFUSED(MHA_ERR_CONFLICT, a.mask.causal = MHA_CAUSAL_UPPER_LEFT);
    REFUSED(MHA_ERR_FULL, a.seq = ECAP + 1);
    REFUSED(MHA_ERR_VALUE, a.cu_seq = down; a.seq = 0);
    REFUSED(MHA_ERR_VALUE, a.cu_seq = late; a.seq = 0);
    REFUSED(MHA_ERR_CONFLICT, a.cu_seq = right; a.seq = 5);
    REFUSED(MHA_ERR_VALUE, a.mask.key_start = below);
    REFUSED(MHA_ERR_VALUE, a.mask.key_start = beyond);
    REFUSED(MHA_ERR_CONFLICT, a.mask.left = 1);
    REFUSED(MHA_ERR_CONFLICT, a.mask.right = 1);
    REFUSED(MHA_ERR_CONFLICT, a.mask.right = -1);
    REFUSED(MHA_ERR_VALUE, a.mask.windowed = 2);
    REFUSED(MHA_ERR_VALUE, a.mask.windowed = -1);
    REFUSED(MHA_ERR_VALUE, a.mask.windowed = 1; a.mask.left = -2);
    REFUSED(MHA_ERR_VALUE, a.mask.windowed = 1; a.mask.right = -2);
    REFUSED(MHA_ERR_VALUE, a.cache_only = 2);
    REFUSED(MHA_ERR_VALUE, a.cache_only = -1);
    REFUSED(MHA_ERR_CONFLICT, a.cache_only = 1; a.cache = NULL);
    REFUSED(MHA_ERR_CONFLICT, a.cache_only = 1; a.source = e.x);
    REFUSED(MHA_ERR_CONFLICT, a.cache_only = 1; a.source_seq = 1); /* it holds nothing yet */
    {
        mha_args a = e.a;
        ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(e.l.n.layer, &a, e.y, NULL, NULL));
        a.mask.key_start = whole; /* S: all are excluded, and that is allowed */
        ASSERT_STATUS(MHA_OK, mha_forward(e.l.n.layer, &a));
        ASSERT_STATUS(MHA_OK, mha_cache_reset(e.w.cache[0], -1));
        memset(e.y, 0xa5, sizeof e.y);
    }
    { /* a layer of another shape */
        const int shape[3][4] = { { 2, 2, 6, 7 }, { 6, 3, 4, 7 }, { 6, 3, 6, 5 } };
        static const char *const sentence[3] = {
            "the cache is for another layer: its n_kv_heads is 3, that of this one 2",
            "the cache is for another layer: its d_k is 6, that of this one 4",
            "the cache is for another layer: its d_v is 7, that of this one 5"
        };
        char why[160];
        for (int i = 0; i < 3; i++) {
            rich other = rich_weights(MHA_ISA_AUTO, EW, shape[i][0], shape[i][1], shape[i][2],
                                      shape[i][3], 0, 0, 0, 1);
            ASSERT_STATUS(MHA_OK, rich_create(&other));
            ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(other.n.layer, &e.a));
            ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_append(other.n.layer, &e.a));
            mha_cache_append_check(other.n.layer, &e.a, why, sizeof why);
            ASSERT_STR_EQ(sentence[i], why);
            rich_free(&other);
        }
    }
    bench_free(&e);
    PASS();
}

/* A ring of left + n tokens can take n back, and not one more. */
TEST ring_takes_back(mha_isa isa)
{
    enum { ROOM = 256, LEFT = 249, BACK = ROOM - LEFT, TOKENS = 602, W = 12 };
    rng r = rng_make(test_seed + 3);
    float *x = rng_floats(&r, TOKENS * W), y[BACK * W], want[W];
    net l = net_weights(isa, W, 2, 1, 6, 6, 0, 0, test_seed);
    mha_cache_config room = { 0 };
    mha_args a = { 0 };
    ASSERT_STATUS(MHA_OK, net_create(&l));
    room.batch = 1, room.capacity = ROOM, room.ring = 1;
    ASSERT_STATUS(MHA_OK, mha_cache_create(&a.cache, l.layer, &room));
    a.batch = 1, a.y = y;
    a.mask.causal = MHA_CAUSAL, a.mask.windowed = 1, a.mask.left = LEFT;
    for (int t = 0; t < TOKENS; t += BACK) {
        a.x = x + t * W, a.seq = BACK;
        ASSERT_STATUS(MHA_OK, mha_forward(l.layer, &a));
        memcpy(want, y, sizeof want);
    }
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(a.cache, 0, TOKENS - BACK));
    a.x = x + (TOKENS - BACK) * W, a.seq = 1;
    ASSERT_STATUS(MHA_OK, mha_forward(l.layer, &a));
    ASSERT(same_result(want, y, W));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(a.cache, 0, TOKENS - BACK - 1));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(l.layer, &a));
    mha_cache_free(a.cache);
    net_free(&l);
    free(x);
    PASS();
}

TEST append_refuses(void)
{
    const int down[EB + 1] = { 0, 5, 3 }, right[EB + 1] = { 0, 2, 6 };
    char why[160] = "x";
    bench e;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    e.a.y = NULL;
    REFUSED(MHA_ERR_NULL, a.x = NULL);
    REFUSED(MHA_ERR_NULL, a.cache = NULL);
    REFUSED(MHA_ERR_CONFLICT, a.batch = 1);
    REFUSED(MHA_ERR_FULL, a.seq = ECAP + 1);
    REFUSED(MHA_ERR_FULL, a.x = NULL; a.source = e.x; a.source_seq = ECAP + 1; a.seq = 0);
    REFUSED(MHA_ERR_SIZE, a.seq = -1);
    REFUSED(MHA_ERR_SIZE, a.source_seq = -1);
    REFUSED(MHA_ERR_CONFLICT, a.source_seq = ET - 1); /* whose source was forgotten, */
    REFUSED(MHA_ERR_CONFLICT, a.source_seq = ET; a.seq = 0; a.x = NULL);
    REFUSED(MHA_ERR_CONFLICT, a.source = e.x); /* or whose length */
    REFUSED(MHA_ERR_CONFLICT, a.parallel.threads = 2);
    REFUSED(MHA_ERR_SIZE, a.x = NULL; a.source = e.x; a.source_seq = ET; a.seq = -1);
    REFUSED(MHA_ERR_VALUE, a.cu_seq = down; a.seq = 0);
    REFUSED(MHA_ERR_CONFLICT, a.cu_seq = right; a.seq = 5);
    REFUSED(MHA_ERR_VALUE, a.x = NULL; a.source = e.x; a.seq = 0; a.cu_source = down);
    REFUSED(MHA_ERR_CONFLICT, a.x = NULL; a.source = e.x; a.seq = 0; a.cu_source = right;
            a.source_seq = 5);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_append(NULL, &e.a));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_append(e.l.n.layer, NULL));
    { /* x is not as wide as the source must be */
        rich other = rich_weights(MHA_ISA_AUTO, EW, 6, 3, 6, 7, 9, 0, 0, 1);
        ASSERT_STATUS(MHA_OK, rich_create(&other));
        ASSERT_STATUS(MHA_ERR_NULL, mha_cache_append(other.n.layer, &e.a));
        rich_free(&other);
    }
    ASSERT_STATUS(MHA_OK, mha_cache_append_check(e.l.n.layer, &e.a, why, sizeof why));
    ASSERT_STR_EQ("", why);
    ASSERT_EQ_FMT(0, mha_cache_length(e.w.cache[0], 1), "%d");
    ASSERT_STATUS(MHA_OK, mha_cache_append(e.l.n.layer, &e.a));
    ASSERT_EQ_FMT((int)ET, mha_cache_length(e.w.cache[0], 1), "%d");
    bench_free(&e);
    PASS();
}

TEST fork_refuses(void)
{
    const int shape[3][4] = { { 2, 2, 6, 7 }, { 6, 3, 4, 7 }, { 6, 3, 6, 5 } };
    bench e, ring;
    mha_cache *small, *cache, *from;
    mha_cache_config cfg;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    ASSERT_STATUS(MHA_OK, bench_make(&ring, 1));
    cache = e.w.cache[0];
    ASSERT_STATUS(MHA_OK, mha_forward(e.l.n.layer, &e.a));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 1, 4));
    memcpy(e.w.before, e.w.memory[0], e.w.bytes);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_fork(NULL, 0, cache, 0, -1));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_fork(cache, 0, NULL, 0, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 2, cache, 0, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, -1, cache, 0, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 0, cache, 2, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 0, cache, -1, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 0, cache, 1, 5));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 1, cache, 1, 5));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(cache, 0, cache, 1, -2));
    ASSERT_STATUS(MHA_OK, linear_create(&small, e.l.n.layer, 1, ET - 1));
    ASSERT_STATUS(MHA_ERR_FULL, mha_cache_fork(small, 0, cache, 0, -1));
    ASSERT_STATUS(MHA_ERR_FULL, mha_cache_fork(small, 0, cache, 0, ET));
    ASSERT_EQ_FMT(0, mha_cache_length(small, 0), "%d");
    ASSERT_STATUS(MHA_OK, mha_cache_fork(small, 0, cache, 0, ET - 1)); /* capacities may differ */
    ASSERT_EQ_FMT(ET - 1, mha_cache_length(small, 0), "%d");
    ASSERT_STATUS(MHA_OK, mha_cache_fork(small, 0, cache, 1, -1));
    ASSERT_EQ_FMT(4, mha_cache_length(small, 0), "%d");
    mha_cache_free(small);
    for (int i = 0; i < 3; i++) {
        rich other = rich_weights(MHA_ISA_AUTO, EW, shape[i][0], shape[i][1], shape[i][2],
                                  shape[i][3], 0, 0, 0, 1);
        ASSERT_STATUS(MHA_OK, rich_create(&other));
        ASSERT_STATUS(MHA_OK, linear_create(&from, other.n.layer, EB, ECAP));
        ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(cache, 0, from, 0, -1));
        mha_cache_free(from);
        rich_free(&other);
    }
    for (int type = MHA_F16; type <= MHA_INT8; type++) {
        cfg = cache_cfg(EB, ECAP, 0);
        cfg.type = (mha_type)type;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&from, e.l.n.layer, &cfg));
        ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(cache, 0, from, 0, -1));
        ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(from, 0, cache, 0, -1));
        mha_cache_free(from);
    }
    /* rings: with rings of the same capacity, whole */
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(cache, 0, ring.w.cache[0], 0, -1));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(ring.w.cache[0], 0, cache, 0, -1));
    cfg = cache_cfg(1, ECAP + 1, 1);
    ASSERT_STATUS(MHA_OK, mha_cache_create(&from, e.l.n.layer, &cfg));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(ring.w.cache[0], 0, from, 0, -1));
    mha_cache_free(from);
    cfg.capacity = ECAP;
    ASSERT_STATUS(MHA_OK, mha_cache_create(&from, e.l.n.layer, &cfg));
    ring.a.cache = from, ring.a.batch = 1;
    ASSERT_STATUS(MHA_OK, mha_forward(e.l.n.layer, &ring.a));
    memcpy(ring.w.before, ring.w.memory[0], ring.w.bytes);
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_cache_fork(ring.w.cache[0], 0, from, 0, ET - 1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_fork(ring.w.cache[0], 0, from, 0, ET + 1));
    ASSERT(memcmp(ring.w.before, ring.w.memory[0], ring.w.bytes) == 0);
    ASSERT_STATUS(MHA_OK, mha_cache_fork(ring.w.cache[0], 0, from, 0, ET));
    mha_cache_free(from);
    ASSERT(memcmp(e.w.before, e.w.memory[0], e.w.bytes) == 0);
    bench_free(&e);
    bench_free(&ring);
    PASS();
}

/* What mha_cache_append may do, its workspace can be asked for: no window, no room. */
TEST size_of_append(void)
{
    bench e;
    size_t bytes = 0;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 1));
    e.a.mask.windowed = e.a.mask.left = 0;
    ASSERT_STATUS(MHA_OK, mha_workspace_size(e.l.n.layer, &e.a, &bytes));
    ASSERT(bytes > 0);
    e.a.workspace = malloc(bytes);
    e.a.workspace_size = bytes;
    ASSERT_STATUS(MHA_OK, mha_cache_append(e.l.n.layer, &e.a));
    e.a.source = e.a.x, e.a.x = NULL; /* source is appended instead; x may be gone */
    e.a.source_seq = e.a.seq, e.a.seq = 0;
    ASSERT_STATUS(MHA_OK, mha_workspace_size(e.l.n.layer, &e.a, &bytes));
    ASSERT(bytes <= e.a.workspace_size);
    e.a.workspace_size = bytes;
    ASSERT_STATUS(MHA_OK, mha_cache_append(e.l.n.layer, &e.a));
    free(e.a.workspace);
    bench_free(&e);
    PASS();
}

TEST slots_refuse(void)
{
    const int good[EB] = { 1, 1 }, high[EB] = { 0, EB }, low[EB] = { 1, -1 };
    char bytes[(EB + 1) * sizeof(int)] = { 0 };
    bench e;
    mha_cache *cache;
    mha_cache_facts facts;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    cache = e.w.cache[0];
    ASSERT_STATUS(MHA_OK, mha_forward(e.l.n.layer, &e.a));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 2));
    memcpy(e.w.before, e.w.memory[0], e.w.bytes);
    ASSERT_EQ_FMT(-1, mha_cache_length(cache, EB), "%d");
    ASSERT_EQ_FMT(-1, mha_cache_length(cache, -1), "%d");
    ASSERT_STATUS(
        MHA_ERR_ALIGN,
        mha_cache_reorder(cache, (const int *)(const void *)(bytes + 1 - (uintptr_t)bytes % 2)));
    ASSERT_EQ_FMT(-1, mha_cache_length(NULL, 0), "%d");
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_truncate(NULL, 0, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, EB, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, -2, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, 0, -1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, 1, ET + 1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, -1, 4)); /* slot 0 holds 2 */
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_reset(NULL, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_reset(cache, EB));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_reset(cache, -2));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_reorder(NULL, good));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_reorder(cache, NULL));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_reorder(cache, high));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_reorder(cache, low));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_info(NULL, &facts));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_info(cache, NULL));
    ASSERT(memcmp(e.w.before, e.w.memory[0], e.w.bytes) == 0);
    ASSERT_STATUS(MHA_OK, mha_cache_reorder(cache, good));
    ASSERT_EQ_FMT((int)ET, mha_cache_length(cache, 0), "%d");
    bench_free(&e);
    PASS();
}

#define CREATE_REFUSED(status, change, sentence) \
    do { \
        size_t n_ = 1; \
        char why_[160]; \
        cfg = cache_cfg(EB, ECAP, 0); \
        c = cache; \
        change; \
        ASSERT_STATUS((status), mha_cache_create(&c, e.l.n.layer, &cfg)); \
        ASSERT_EQ(NULL, c); \
        c = cache; \
        ASSERT_STATUS((status), mha_cache_init(&c, buffer, bytes, e.l.n.layer, &cfg)); \
        ASSERT_EQ(NULL, c); \
        ASSERT_STATUS((status), mha_cache_size(e.l.n.layer, &cfg, &n_)); \
        ASSERT_STATUS((status), mha_cache_check(e.l.n.layer, &cfg, NULL, 0)); \
        ASSERT_STATUS((status), mha_cache_check(e.l.n.layer, &cfg, why_, sizeof why_)); \
        ASSERT_STR_EQ((sentence), why_); \
    } while (0)

/* A ring takes the memory of the next multiple of 256. */
TEST size_of_ring(void)
{
    const int capacity[5][2] = {
        { 1, 256 }, { 255, 256 }, { 256, 256 }, { 257, 512 }, { 512, 512 }
    };
    bench e;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    for (int i = 0; i < 5; i++) {
        mha_cache_config ring = cache_cfg(EB, capacity[i][0], 1);
        mha_cache_config linear = cache_cfg(EB, capacity[i][1], 0);
        size_t bytes[2] = { 0, 1 };
        ASSERT_STATUS(MHA_OK, mha_cache_size(e.l.n.layer, &ring, &bytes[0]));
        ASSERT_STATUS(MHA_OK, mha_cache_size(e.l.n.layer, &linear, &bytes[1]));
        ASSERT_EQ(bytes[0], bytes[1]);
    }
    bench_free(&e);
    PASS();
}

/* Sources of different lengths: padded, then cut to their lengths, or side by side. */
TEST sources_of_lengths(void)
{
    enum { S = 21, T = 2, W = 14 };
    const int length[B] = { S, 1, 17 }, cu[B + 1] = { 0, S, S + 1, S + 18 };
    rich l = rich_weights(MHA_ISA_AUTO, W, 6, 3, 6, 7, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 91);
    float *x = rng_floats(&r, B * T * W), *padded = rng_floats(&r, B * S * W);
    float *packed = nan_floats(B * S * W), *y[2] = { nan_floats(B * T * W), nan_floats(B * T * W) };
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int b = 0; b < B; b++)
        memcpy(packed + cu[b] * W, padded + b * S * W, (size_t)(length[b] * W) * sizeof(float));
    for (int way = 0; way < 2; way++) {
        mha_cache_config cfg = cache_cfg(B, S, 0);
        mha_cache *cache;
        mha_args a = { 0 };
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
        a.batch = B, a.cache = cache;
        a.source = way ? packed : padded, a.source_seq = way ? 0 : S, a.cu_source = way ? cu : NULL;
        ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
        for (int b = 0; b < B && !way; b++)
            ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, b, length[b]));
        memset(&a, 0, sizeof a);
        a.batch = B, a.seq = T, a.x = x, a.y = y[way], a.cache = cache, a.cache_only = 1;
        ASSERT_STATUS(MHA_OK, mha_forward(l.n.layer, &a));
        mha_cache_free(cache);
    }
    ASSERT(same_result(y[0], y[1], B * T * W));
    rich_free(&l);
    free(x), free(padded), free(packed), free(y[0]), free(y[1]);
    PASS();
}

/* To reorder sequences takes time and memory of what they hold: of large caches with a few tokens
   only those are touched, and 30,000 sequences that all move by one are done at once. */
TEST reorder_is_cheap(void)
{
    enum { MANY = 30000, LARGE = 5000, W = 14, T = 3 };
    const int swap[3] = { 1, 0, 2 }, circle[3] = { 1, 2, 0 };
    int *order = (int *)stream_take(MANY * sizeof(int));
    rich l = rich_weights(MHA_ISA_AUTO, W, 2, 1, 4, 5, 0, 0, 0, test_seed);
    rng r = rng_make(test_seed + 92);
    float *x = rng_floats(&r, 3 * T * W);
    mha_cache *cache;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    for (int type = 0; type < 4; type++)
        for (int ring = 0; ring < 2; ring++) {
            mha_cache_config cfg = cache_cfg(3, LARGE, ring);
            mha_args a = { 0 };
            unsigned char *buffer, *before;
            size_t bytes, changed = 0;
            cfg.type = (mha_type)type;
            ASSERT_STATUS(MHA_OK, mha_cache_size(l.n.layer, &cfg, &bytes));
            buffer = (unsigned char *)stream_take(bytes);
            before = (unsigned char *)stream_take(bytes);
            memset(buffer, 0xa5, bytes);
            ASSERT_STATUS(MHA_OK, mha_cache_init(&cache, buffer, bytes, l.n.layer, &cfg));
            a.batch = 3, a.seq = T, a.x = x, a.cache = cache;
            ASSERT_STATUS(MHA_OK, mha_cache_append(l.n.layer, &a));
            for (int b = 1; b < 3; b++) /* what nobody holds is different in each */
                memset(buffer + bytes / 3 * (size_t)b + bytes / 6, b, 1000);
            memcpy(before, buffer, bytes);
            ASSERT_STATUS(MHA_OK, mha_cache_reorder(cache, swap));
            ASSERT_STATUS(MHA_OK, mha_cache_reorder(cache, circle));
            ASSERT_STATUS(MHA_OK, mha_cache_fork(cache, 0, cache, 1, -1));
            for (size_t i = 0; i < bytes; i++) changed += buffer[i] != before[i];
            ASSERT(changed > 0 && changed < 3 * 16 * (4 + 16 + 2) * sizeof(float));
            free(buffer), free(before);
        }
    for (int way = -1; way <= 1; way += 2) {
        mha_cache_config cfg = cache_cfg(MANY, 1, 0);
        ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, l.n.layer, &cfg));
        for (int b = 0; b < MANY; b++) order[b] = b + way;
        order[0] += way<0, order[MANY - 1] -= way> 0;
        ASSERT_STATUS(MHA_OK, mha_cache_reorder(cache, order));
        order[way < 0 ? 0 : MANY - 1] = way < 0 ? MANY - 1 : 0; /* all of them one circle */
        ASSERT_STATUS(MHA_OK, mha_cache_reorder(cache, order));
        mha_cache_free(cache);
    }
    rich_free(&l);
    free(x), free(order);
    PASS();
}

#define BIG_CACHE \
    "batch 2147483647 with capacity 2147483647 would be more bytes than can be addressed"

TEST create_refuses(void)
{
    const long live = test_live;
    char why[160];
    bench e;
    mha_cache *cache, *c;
    mha_cache_config cfg = cache_cfg(EB, ECAP, 0);
    unsigned char *buffer;
    size_t bytes = 0;
    ASSERT_STATUS(MHA_OK, bench_make(&e, 0));
    cache = e.w.cache[0];
    ASSERT_STATUS(MHA_OK, mha_cache_size(e.l.n.layer, &cfg, &bytes));
    buffer = (unsigned char *)stream_take(bytes);
    CREATE_REFUSED(MHA_ERR_SIZE, cfg.batch = 0, "batch is 0; it must be at least 1");
    CREATE_REFUSED(MHA_ERR_SIZE, cfg.batch = -1, "batch is -1; it must be at least 1");
    CREATE_REFUSED(MHA_ERR_SIZE, cfg.capacity = 0, "capacity is 0; it must be at least 1");
    CREATE_REFUSED(MHA_ERR_SIZE, cfg.capacity = -5, "capacity is -5; it must be at least 1");
    CREATE_REFUSED(MHA_ERR_OVERFLOW, cfg.batch = cfg.capacity = 2147483647, BIG_CACHE);
    CREATE_REFUSED(MHA_ERR_OVERFLOW, cfg.ring = 1;
                   cfg.capacity = 2147483647,
                   "capacity is 2147483647; a ring's can be 2147483391 at most");
    CREATE_REFUSED(MHA_ERR_OVERFLOW, cfg.batch = cfg.capacity = 2147483647;
                   cfg.type = MHA_INT8, BIG_CACHE);
    CREATE_REFUSED(MHA_ERR_VALUE, cfg.ring = 2, "ring is 2; it must be 0 or 1");
    CREATE_REFUSED(MHA_ERR_VALUE, cfg.ring = -1, "ring is -1; it must be 0 or 1");
    CREATE_REFUSED(MHA_ERR_ENUM, cfg.type = (mha_type)4, "type is 4, which is no mha_type");
    CREATE_REFUSED(MHA_ERR_ENUM, cfg.type = (mha_type)99, "type is 99, which is no mha_type");
    cfg = cache_cfg(EB, ECAP, 0);
    c = cache;
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_create(NULL, e.l.n.layer, &cfg));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_create(&c, NULL, &cfg));
    ASSERT_EQ(NULL, c);
    c = cache;
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_create(&c, e.l.n.layer, NULL));
    ASSERT_EQ(NULL, c);
    ASSERT_STATUS(MHA_OK, mha_cache_check(e.l.n.layer, &cfg, why, sizeof why));
    ASSERT_STR_EQ("", why);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_check(NULL, &cfg, why, sizeof why));
    ASSERT_STR_EQ("layer is null", why);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_check(e.l.n.layer, NULL, why, sizeof why));
    ASSERT_STR_EQ("cfg is null", why);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_size(NULL, &cfg, &bytes));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_size(e.l.n.layer, NULL, &bytes));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_size(e.l.n.layer, &cfg, NULL));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_init(NULL, buffer, bytes, e.l.n.layer, &cfg));
    c = cache;
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_init(&c, NULL, bytes, e.l.n.layer, &cfg));
    ASSERT_EQ(NULL, c);
    c = cache;
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_init(&c, buffer, bytes, NULL, &cfg));
    ASSERT_EQ(NULL, c);
    c = cache;
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_init(&c, buffer, bytes, e.l.n.layer, NULL));
    ASSERT_EQ(NULL, c);
    c = cache;
    ASSERT_STATUS(MHA_ERR_BUFFER, mha_cache_init(&c, buffer, bytes - 1, e.l.n.layer, &cfg));
    ASSERT_EQ(NULL, c);
    free(buffer);
    c = cache;
    test_fail_after = 0;
    ASSERT_STATUS(MHA_ERR_MEMORY, mha_cache_create(&c, e.l.n.layer, &cfg));
    test_fail_after = -1;
    ASSERT_EQ(NULL, c);
    mha_cache_free(NULL);
    bench_free(&e);
    ASSERT_EQ_FMT(live, test_live, "%ld");
    PASS();
}

SUITE(cache_suite)
{
    RUN_ON_EACH_ISA(pieces_equal_whole);
    RUN_ON_EACH_ISA(lengths_differ);
    RUN_ON_EACH_ISA(outputs_and_masks);
    RUN_ON_EACH_ISA(rollback_forgets);
    RUN_ON_EACH_ISA(options_in_pieces);
    RUN_ON_EACH_ISA(positions_default);
    RUN_ON_EACH_ISA(continuous_batching);
    RUN_ON_EACH_ISA(reset_one_slot);
    RUN_ON_EACH_ISA(key_start_in_cache);
    RUN_ON_EACH_ISA(fork_shares_prefix);
    RUN_ON_EACH_ISA(reorder_slots);
    RUN_ON_EACH_ISA(ring_equals_linear);
    RUN_ON_EACH_ISA(ring_widest_window);
    RUN_ON_EACH_ISA(ring_refuses);
    RUN_ON_EACH_ISA(ring_rollback);
    RUN_ON_EACH_ISA(ring_takes_back);
    RUN_ON_EACH_ISA(ring_fork_and_reorder);
    RUN_ON_EACH_ISA(ring_full_window);
    RUN_ON_EACH_ISA(ring_forgets);
    RUN_ON_EACH_ISA(cross_attention);
    RUN_ON_EACH_ISA(cross_attention_rectangular);
    RUN_ON_EACH_ISA(append_equals_forward);
    RUN_ON_EACH_ISA(full_changes_nothing);
    RUN_ON_EACH_ISA(random_linear);
    RUN_ON_EACH_ISA(random_ring);
    RUN_TEST(info);
    RUN_TEST(forward_refuses);
    RUN_TEST(append_refuses);
    RUN_TEST(fork_refuses);
    RUN_TEST(size_of_append);
    RUN_TEST(slots_refuse);
    RUN_TEST(create_refuses);
    RUN_TEST(size_of_ring);
    RUN_TEST(sources_of_lengths);
    RUN_TEST(reorder_is_cheap);
}
