/* fixture.h - random layers and random attention problems, for the tests that bend them. */
#ifndef FIXTURE_H
#define FIXTURE_H

#include "oracle.h"
#include "test.h"

/* ---- a layer with random weights and every bias ---------------------------------- */

typedef struct net {
    mha_config cfg; /* every default filled in */
    mha_weights w;
    float *m[8]; /* q k v out b_q b_k b_v b_out */
    mha_layer *layer;
} net;

static inline size_t net_len(const mha_config *c, int which)
{
    const size_t D = (size_t)c->d_model, H = (size_t)c->n_heads, G = (size_t)c->n_kv_heads;
    const size_t dk = (size_t)c->d_k, dv = (size_t)c->d_v;
    switch (which) {
    case 0: return D * H * dk;
    case 1: return (size_t)c->d_source * G * dk;
    case 2: return (size_t)c->d_source_v * G * dv;
    case 3: return H * dv * D;
    case 4: return H * dk;
    case 5: return G * dk;
    case 6: return G * dv;
    default: return D;
    }
}

/* Zero in d_source and d_source_v stands for d_model, as in mha_config. */
static inline net net_weights(mha_isa isa, int D, int H, int G, int dk, int dv, int ds, int dsv,
                              uint64_t seed)
{
    net n;
    rng r = rng_make(seed);
    memset(&n, 0, sizeof n);
    n.cfg.d_model = D;
    n.cfg.n_heads = H;
    n.cfg.n_kv_heads = G;
    n.cfg.d_k = dk;
    n.cfg.d_v = dv;
    n.cfg.d_source = ds ? ds : D;
    n.cfg.d_source_v = dsv ? dsv : n.cfg.d_source;
    n.cfg.isa = isa;
    for (int i = 0; i < 8; i++) {
        const size_t len = net_len(&n.cfg, i);
        const int in = i == 1 ? n.cfg.d_source : i == 2 ? n.cfg.d_source_v : i == 3 ? H * dv : D;
        n.m[i] = rng_floats(&r, len);
        if (i < 4)
            for (size_t j = 0; j < len; j++) n.m[i][j] /= sqrtf((float)in);
    }
    n.w.q = n.m[0];
    n.w.k = n.m[1];
    n.w.v = n.m[2];
    n.w.out = n.m[3];
    n.w.b_q = n.m[4];
    n.w.b_k = n.m[5];
    n.w.b_v = n.m[6];
    n.w.b_out = n.m[7];
    return n;
}

static inline mha_status net_create(net *n)
{
    return mha_layer_create(&n->layer, &n->cfg, &n->w);
}

static inline void net_free(net *n)
{
    mha_layer_free(n->layer);
    for (int i = 0; i < 8; i++) free(n->m[i]);
    memset(n, 0, sizeof *n);
}

/* ---- an attention problem: q, k, v, and room for all that can come out ------------- */

typedef struct problem {
    mha_sdpa_args a;
    float *q, *k, *v, *o, *attn, *mean, *lse;
    size_t nq, nk, nv, no, nattn, nmean, nlse;
} problem;

static inline problem problem_make(mha_isa isa, int B, int H, int G, int T, int S, int dk, int dv,
                                   uint64_t seed)
{
    problem p;
    rng r = rng_make(seed);
    memset(&p, 0, sizeof p);
    p.a.batch = B;
    p.a.heads = H;
    p.a.kv_heads = G;
    p.a.seq = T;
    p.a.source_seq = S;
    p.a.d_k = dk;
    p.a.d_v = dv;
    p.a.isa = isa;
    p.nq = (size_t)B * (size_t)H * (size_t)T * (size_t)dk;
    p.nk = (size_t)B * (size_t)G * (size_t)S * (size_t)dk;
    p.nv = (size_t)B * (size_t)G * (size_t)S * (size_t)dv;
    p.no = (size_t)B * (size_t)H * (size_t)T * (size_t)dv;
    p.nlse = (size_t)B * (size_t)H * (size_t)T;
    p.nattn = p.nlse * (size_t)S;
    p.nmean = (size_t)B * (size_t)T * (size_t)S;
    p.q = rng_floats(&r, p.nq);
    p.k = rng_floats(&r, p.nk);
    p.v = rng_floats(&r, p.nv);
    p.o = test_floats(p.no, 0.0f);
    p.attn = test_floats(p.nattn, 0.0f);
    p.mean = test_floats(p.nmean, 0.0f);
    p.lse = test_floats(p.nlse, 0.0f);
    p.a.q = p.q;
    p.a.k = p.k;
    p.a.v = p.v;
    p.a.o = p.o;
    p.a.attn = p.attn;
    p.a.attn_mean = p.mean;
    p.a.lse = p.lse;
    return p;
}

static inline void problem_free(problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->o);
    free(p->attn);
    free(p->mean);
    free(p->lse);
    memset(p, 0, sizeof *p);
}

/* Outputs are filled with NaN first: what is not written shows. */
static inline mha_status problem_run(problem *p)
{
    memset(p->o, 0xff, p->no * sizeof(float));
    memset(p->attn, 0xff, p->nattn * sizeof(float));
    memset(p->mean, 0xff, p->nmean * sizeof(float));
    memset(p->lse, 0xff, p->nlse * sizeof(float));
    return mha_sdpa(&p->a);
}

/* A copy of what came out, to compare the next run with. */
typedef struct result {
    float *o, *attn, *mean, *lse;
} result;

static inline float *copy_floats(const float *from, size_t n)
{
    float *to = test_floats(n, 0.0f);
    if (n) memcpy(to, from, n * sizeof(float));
    return to;
}

static inline result result_of(const problem *p)
{
    result r;
    r.o = copy_floats(p->o, p->no);
    r.attn = copy_floats(p->attn, p->nattn);
    r.mean = copy_floats(p->mean, p->nmean);
    r.lse = copy_floats(p->lse, p->nlse);
    return r;
}

static inline void result_free(result *r)
{
    free(r->o);
    free(r->attn);
    free(r->mean);
    free(r->lse);
}

static inline int result_same(const problem *p, const result *r)
{
    return same_result(p->o, r->o, p->no) && same_result(p->attn, r->attn, p->nattn) &&
           same_result(p->mean, r->mean, p->nmean) && same_result(p->lse, r->lse, p->nlse);
}

/* ---- which keys a query sees ------------------------------------------------------------ */

static inline int sees(const mha_sdpa_args *a, int b, int h, int i, int j)
{
    return oracle_visible(&a->mask, a->seq, a->source_seq, a->source_seq, b, h, i, j);
}

/* 1 if query i of head h sees no key at all. */
static inline int is_dead(const mha_sdpa_args *a, int b, int h, int i)
{
    for (int j = 0; j < a->source_seq; j++)
        if (sees(a, b, h, i, j)) return 0;
    return 1;
}

/* ---- running a test on every instruction set ------------------------------------------ */

#define RUN_ON_EACH_ISA(test) \
    do { \
        mha_isa isas_[8]; \
        const int n_isas_ = test_isas(isas_); \
        for (int i_ = 0; i_ < n_isas_; i_++) { \
            greatest_set_test_suffix(mha_isa_name(isas_[i_])); \
            RUN_TESTp(test, isas_[i_]); \
        } \
    } while (0)

#define ASSERT_STATUS(want, call) \
    do { \
        const int status_ = (int)(call); \
        ASSERT_EQ_FMT((int)(want), status_, "%d"); \
    } while (0)

#endif
