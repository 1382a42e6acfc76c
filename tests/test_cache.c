/* test_cache.c - tokens that come in pieces: same bits as all at once, and no way to overflow. */
#include "test.h"

#define ASSERT_STATUS(want, got) ASSERT_EQ_FMT((int)(want), (int)(got), "%d")

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

static int agree(const float *a, const float *b, size_t n)
{
#ifdef TEST_FAST_MATH
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)a[i] - (double)b[i]) <= 1e-4)) return 0;
    return 1;
#else
    return same_bits(a, b, n);
#endif
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
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, m.layer, B, CAP));
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
        ASSERT(agree(want, got, B * T * D));
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
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, m.layer, B, CAP));
    ASSERT_STATUS(MHA_OK, mha_cache_create(&alone, m.layer, 1, CAP));
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
        ASSERT(agree(want, y + b * T * D, T * D));
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
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, m.layer, 1, T));
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
    ASSERT(agree(y + T0 * D, yc, N * D));
    for (int h = 0; h < H; h++) {
        ASSERT(agree(attn + (h * T + T0) * T, attn_c + h * N * T, N * T));
        ASSERT(agree(lse + h * T + T0, lse_c + h * N, N));
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
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, m.layer, 1, T));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, want, 1, T, 0, T));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 0));
    ASSERT_STATUS(MHA_OK, step(m.layer, cache, bad, y, 1, T, 0, T));
    ASSERT(is_nan(y[0]));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 0));
    for (int t = 0; t < T; t++) ASSERT_STATUS(MHA_OK, step(m.layer, cache, x, y, 1, T, t, t + 1));
    ASSERT(agree(want, y, T * D));
    mha_cache_free(cache);
    model_free(&m);
    free(x), free(bad), free(want), free(y);
    PASS();
}

TEST errors(void)
{
    enum { T = 8 };
    model m, other;
    mha_cache *cache = NULL, *small;
    char why[200];
    mha_args a = { 0 };
    size_t bytes = 0;
    int len[2] = { 1, 1 };
    float x[2 * T * D] = { 0 }, y[2 * T * D];
    long live = test_live;
    ASSERT_STATUS(MHA_OK, model_make(&m, MHA_ISA_AUTO, 1));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_create(NULL, m.layer, 1, 1));
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_create(&cache, NULL, 1, 1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_create(&cache, m.layer, 0, 1));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_create(&cache, m.layer, 1, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_create(&cache, m.layer, 1, -5));
    ASSERT_STATUS(MHA_ERR_OVERFLOW, mha_cache_create(&cache, m.layer, 2147483647, 2147483647));
    ASSERT_EQ(NULL, cache);
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_size(m.layer, 1, 1, NULL));
    ASSERT_STATUS(MHA_OK, mha_cache_size(m.layer, 2, 2 * T, &bytes));
    test_fail_after = 0;
    ASSERT_STATUS(MHA_ERR_MEMORY, mha_cache_create(&cache, m.layer, 2, 2 * T));
    test_fail_after = -1;
    {
        unsigned char *buffer = (unsigned char *)malloc(bytes + 65);
        ASSERT(buffer != NULL);
        ASSERT_STATUS(MHA_ERR_NULL, mha_cache_init(&small, NULL, bytes, m.layer, 2, 2 * T));
        ASSERT_STATUS(MHA_ERR_BUFFER, mha_cache_init(&small, buffer, bytes - 1, m.layer, 2, 2 * T));
        ASSERT_EQ(NULL, small);
        for (int off = 0; off < 64; off += 7) {
            memset(buffer, 0xa5, bytes + 65);
            ASSERT_STATUS(MHA_OK, mha_cache_init(&small, buffer + off, bytes, m.layer, 2, 2 * T));
            a.batch = 2, a.seq = 2 * T, a.x = NULL, a.y = NULL, a.cache = small;
            ASSERT_STATUS(MHA_ERR_NULL, mha_forward(m.layer, &a));
            a.seq = T, a.x = x, a.y = y;
            ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
            ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
            ASSERT_EQ_FMT((unsigned)0xa5, (unsigned)buffer[(size_t)off + bytes], "%x");
            mha_cache_free(small);
        }
        free(buffer);
    }
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, m.layer, 2, T + 3));
    a.cache = cache;
    ASSERT_STATUS(MHA_OK, mha_forward_check(m.layer, &a, why, sizeof why));
    ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
    memset(y, 0xa5, sizeof y);
    ASSERT_STATUS(MHA_ERR_FULL, mha_forward(m.layer, &a));
    ASSERT_STATUS(MHA_ERR_FULL, mha_forward_check(m.layer, &a, why, sizeof why));
    ASSERT(strstr(why, "8") && strstr(why, "11"));
    for (size_t i = 0; i < sizeof y; i++) ASSERT(((unsigned char *)y)[i] == 0xa5);
    ASSERT_EQ_FMT((int)T, mha_cache_length(cache, 0), "%d");
    a.seq = 3;
    a.batch = 1;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(m.layer, &a));
    a.batch = 2;
    a.source = x;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(m.layer, &a));
    a.source = NULL;
    a.source_seq = 5;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(m.layer, &a));
    a.source_seq = 0;
    a.mask.key_len = len;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(m.layer, &a));
    a.mask.key_len = NULL;
    a.mask.causal = MHA_CAUSAL_UPPER_LEFT;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(m.layer, &a));
    a.mask.causal = MHA_CAUSAL;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(m.layer, &a, y, NULL, NULL));
    {
        mha_config cfg = { 0 };
        mha_weights w = { 0 };
        cfg.d_model = D, cfg.n_heads = 3;
        w.q = w.k = w.v = w.out = test_floats(D * D, 0.0f);
        ASSERT_STATUS(MHA_OK, mha_layer_create(&other.layer, &cfg, &w));
        free((void *)(uintptr_t)w.q);
    }
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_forward(other.layer, &a));
    mha_layer_free(other.layer);
    ASSERT_STATUS(MHA_OK, mha_forward(m.layer, &a));
    ASSERT_EQ_FMT(T + 3, mha_cache_length(cache, 1), "%d");
    ASSERT_EQ_FMT(-1, mha_cache_length(cache, 2), "%d");
    ASSERT_EQ_FMT(-1, mha_cache_length(cache, -1), "%d");
    ASSERT_EQ_FMT(-1, mha_cache_length(NULL, 0), "%d");
    ASSERT_STATUS(MHA_ERR_NULL, mha_cache_truncate(NULL, 0, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, 2, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, -2, 0));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, 0, -1));
    ASSERT_STATUS(MHA_OK, mha_cache_truncate(cache, 0, 2));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_cache_truncate(cache, -1, 4)); /* slot 0 holds 2 */
    ASSERT_EQ_FMT(T + 3, mha_cache_length(cache, 1), "%d");
    mha_cache_free(cache);
    mha_cache_free(NULL);
    model_free(&m);
    ASSERT_EQ_FMT(live, test_live, "%ld");
    PASS();
}

SUITE(cache_suite);
SUITE(cache_suite)
{
    mha_isa isa[8];
    int n = test_isas(isa);
    for (int i = 0; i < n; i++) {
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(pieces_equal_whole, isa[i]);
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(lengths_differ, isa[i]);
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(outputs_and_masks, isa[i]);
        greatest_set_test_suffix(mha_isa_name(isa[i]));
        RUN_TESTp(rollback_forgets, isa[i]);
    }
    RUN_TEST(errors);
}
