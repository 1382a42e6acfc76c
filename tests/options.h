/* options.h - layers with any of the options on: rotary positions, norms, ALiBi, sinks, ... */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "fixture.h"

enum {
    WITH_ROPE = 1,
    WITH_NORM = 2,
    WITH_SOFTCAP = 4,
    WITH_ALIBI = 8,
    WITH_SINK = 16,
    WITH_BIAS_KV = 32,
    WITH_ZERO_ATTN = 64,
    WITH_ALL = 127
};

typedef struct rich {
    net n;
    float *more[12];
    int n_more, with;
} rich;

static inline float *rich_vector(rich *l, rng *r, int n)
{
    float *v = rng_floats(r, (size_t)n);
    if (l->n_more == (int)(sizeof l->more / sizeof l->more[0])) abort();
    l->more[l->n_more++] = v;
    return v;
}

/* Turns the options in with on; all that is left open is drawn. d_k of 1 cannot be rotated. */
static inline void rich_options(rich *l, rng *r, int with)
{
    mha_config *c = &l->n.cfg;
    mha_weights *w = &l->n.w;
    l->with |= with;
    if ((with & WITH_ROPE) && c->d_k > 1) {
        c->rope.layout = rng_chance(r, 50) ? MHA_ROPE_HALF : MHA_ROPE_INTERLEAVED;
        if (c->d_k % 2 || rng_chance(r, 40)) c->rope.width = 2 * rng_int(r, 1, c->d_k / 2);
        if (rng_chance(r, 50)) c->rope.base = (float)rng_int(r, 50, 500000);
        c->rope.scaling = (mha_rope_scaling)rng_int(r, MHA_ROPE_PLAIN, MHA_ROPE_LLAMA3);
        if (c->rope.scaling == MHA_ROPE_NTK && (c->rope.width ? c->rope.width : c->d_k) == 2)
            c->rope.scaling = MHA_ROPE_LINEAR;
        if (c->rope.scaling != MHA_ROPE_PLAIN) c->rope.factor = (float)rng_int(r, 1, 8);
        if (c->rope.scaling == MHA_ROPE_YARN || c->rope.scaling == MHA_ROPE_LLAMA3)
            c->rope.original = rng_int(r, 16, 4096);
    }
    if (with & WITH_NORM) {
        c->qk_norm = rng_chance(r, 50) ? MHA_NORM_RMS : MHA_NORM_LAYER;
        if (rng_chance(r, 50)) c->norm_eps = 1e-3f;
        if (rng_chance(r, 70)) w->q_norm = rich_vector(l, r, c->d_k);
        if (rng_chance(r, 70)) w->k_norm = rich_vector(l, r, c->d_k);
        if (c->qk_norm == MHA_NORM_LAYER && rng_chance(r, 50))
            w->q_norm_bias = rich_vector(l, r, c->d_k);
        if (c->qk_norm == MHA_NORM_LAYER && rng_chance(r, 50))
            w->k_norm_bias = rich_vector(l, r, c->d_k);
    }
    if (with & WITH_SOFTCAP) c->softcap = 0.5f * (float)rng_int(r, 1, 20);
    if (with & WITH_ALIBI) {
        c->alibi = 1;
        if (rng_chance(r, 50)) {
            float *slope = rich_vector(l, r, c->n_heads);
            for (int h = 0; h < c->n_heads; h++) slope[h] = 0.5f * fabsf(slope[h]);
            w->alibi = slope;
        }
    }
    if (with & WITH_SINK) {
        float *sink = rich_vector(l, r, c->n_heads);
        if (rng_chance(r, 30)) sink[rng_int(r, 0, c->n_heads - 1)] = F_NINF;
        w->sink = sink;
        if (rng_chance(r, 50)) w->sink_value = rich_vector(l, r, c->n_heads * c->d_v);
    }
    if (with & WITH_BIAS_KV) {
        w->bias_k = rich_vector(l, r, c->n_kv_heads * c->d_k);
        w->bias_v = rich_vector(l, r, c->n_kv_heads * c->d_v);
    }
    if (with & WITH_ZERO_ATTN) c->zero_attn = 1;
}

/* Zero in ds and dsv stands for D; as net_weights and net_create. */
static inline rich rich_weights(mha_isa isa, int D, int H, int G, int dk, int dv, int ds, int dsv,
                                int with, uint64_t seed)
{
    rich l;
    rng r = rng_make(seed ^ 0x72696368u);
    memset(&l, 0, sizeof l);
    l.n = net_weights(isa, D, H, G, dk, dv, ds, dsv, seed);
    rich_options(&l, &r, with);
    return l;
}

static inline mha_status rich_create(rich *l)
{
    return net_create(&l->n);
}

static inline void rich_free(rich *l)
{
    net_free(&l->n);
    while (l->n_more > 0) free(l->more[--l->n_more]);
    memset(l, 0, sizeof *l);
}

/* The options in one line, for a message. */
static inline void rich_print(const rich *l)
{
    const mha_config *c = &l->n.cfg;
    const mha_weights *w = &l->n.w;
    printf("  D %d H %d G %d d_k %d d_v %d d_source %d; rope %d width %d scaling %d, norm %d, "
           "softcap %g, alibi %d, sink %d, sink_value %d, bias_kv %d, zero_attn %d, type %d\n",
           c->d_model, c->n_heads, c->n_kv_heads, c->d_k, c->d_v, c->d_source, (int)c->rope.layout,
           c->rope.width, (int)c->rope.scaling, (int)c->qk_norm, (double)c->softcap, c->alibi,
           w->sink != NULL, w->sink_value != NULL, w->bias_k != NULL, c->zero_attn,
           (int)c->weight_type);
}

#endif
