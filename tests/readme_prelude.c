/* What the README's snippets take for granted: tests/readme.sh puts this above each of them. */
#define MHA_THREADS
#define MHA_IMPLEMENTATION
#include "mha.h"
#include <stdio.h>
#include <stdlib.h>

enum { B = 2, T = 5, S = 5, D = 16, H = 4 };

static float x[B * T * D], y[B * T * D], weights[B * H * T * S];
static float w_qkv[D * 3 * D], w_out[D * D];
static unsigned char padding[B * S] = { 1, 1, 1, 1, 1, 1, 1, 1, 0, 0 };
static unsigned char arena[1 << 20];

static const mha_config cfg = { .d_model = D, .n_heads = H };
static const mha_weights w = { .qkv = w_qkv, .out = w_out };
static mha_layer *layer;

/* nn.MultiheadAttention(512, 8) */
static float in_proj_weight[3 * 512 * 512], in_proj_bias[3 * 512];
static float out_proj_weight[512 * 512], out_proj_bias[512];

/* Before main(), so that a snippet can use the layer at once. */
__attribute__((constructor)) static void readme_layer(void)
{
    for (int i = 0; i < B * T * D; i++) x[i] = (float)(i % 7) - 3.0f;
    for (int i = 0; i < D * 3 * D; i++) w_qkv[i] = (float)(i % 5) * 0.1f - 0.2f;
    for (int i = 0; i < D * D; i++) w_out[i] = (float)(i % 3) * 0.5f - 0.5f;
    if (mha_layer_create(&layer, &cfg, &w) != MHA_OK) abort();
}
