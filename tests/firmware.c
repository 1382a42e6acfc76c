/* firmware.c - mha.h on bare metal: no operating system, no malloc, no stdio, no threads. A layer
   in a static buffer, whole and token by token through a cache, against attention written out in
   double. For a Cortex-M, with an FPU or without: arm-none-eabi-gcc, and qemu-system-arm with
   semihosting (see tests/portable.sh); elsewhere it is a program. Ends with status 0, or says what
   is wrong. */
#define MHA_IMPLEMENTATION
#define MHA_NO_MALLOC
#define MHA_STATIC
#include "../mha.h"

enum { B = 2, T = 5, D = 12, H = 4, G = 2, DK = 3, DV = 5 };
enum { NQ = H * DK, NK = G * DK, NV = G * DV, N = NQ + NK + NV };

static float x[B * T * D], w_qkv[D * N], b_qkv[N], w_out[H * DV * D], y[B * T * D], z[B * T * D];
static double p[B * T * N], want[B * T * D];
static float layer_room[4096], cache_room[4096], work_room[8192];

static void fill(float *to, int n, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        to[i] = (float)(int)(seed >> 16 & 0xffffu) / 32768.0f - 1.0f;
    }
}

/* W_O concat(softmax(q k^T / sqrt(d_k)) v), causal. */
static void reference(void)
{
    for (int r = 0; r < B * T; r++)
        for (int c = 0; c < N; c++) {
            p[r * N + c] = (double)b_qkv[c];
            for (int i = 0; i < D; i++)
                p[r * N + c] += (double)x[r * D + i] * (double)w_qkv[i * N + c];
        }
    for (int r = 0; r < B * T; r++) {
        double o[H * DV] = { 0 };
        for (int h = 0; h < H; h++) {
            const int first = r / T * T, g = h / (H / G);
            double e[T], sum = 0;
            for (int j = first; j <= r; j++) {
                double s = 0;
                for (int i = 0; i < DK; i++)
                    s += p[r * N + h * DK + i] * p[j * N + NQ + g * DK + i];
                sum += e[j - first] = exp(s / sqrt((double)DK));
            }
            for (int j = first; j <= r; j++)
                for (int i = 0; i < DV; i++)
                    o[h * DV + i] += e[j - first] / sum * p[j * N + NQ + NK + g * DV + i];
        }
        for (int c = 0; c < D; c++) {
            want[r * D + c] = 0;
            for (int i = 0; i < H * DV; i++) want[r * D + c] += o[i] * (double)w_out[i * D + c];
        }
    }
}

/* Null, or what is wrong. */
static const char *check(void)
{
    mha_config cfg = { .d_model = D, .n_heads = H, .n_kv_heads = G, .d_k = DK, .d_v = DV };
    mha_weights w = { .qkv = w_qkv, .b_qkv = b_qkv, .out = w_out };
    mha_cache_config room = { .batch = B, .capacity = T };
    mha_args a = { .batch = B, .seq = T, .x = x, .y = y };
    mha_layer *layer;
    mha_cache *cache;
    size_t bytes;

    fill(x, B * T * D, 1);
    fill(w_qkv, D * N, 2);
    fill(b_qkv, N, 3);
    fill(w_out, H * DV * D, 4);
    reference();

    if (mha_layer_size(&cfg, &bytes) != MHA_OK || bytes > sizeof layer_room)
        return "the layer does not fit its buffer";
    if (mha_layer_init(&layer, layer_room, bytes - 1, &cfg, &w) != MHA_ERR_BUFFER)
        return "a buffer that is too small is taken";
    if (mha_layer_init(&layer, layer_room, bytes, &cfg, &w) != MHA_OK) return "mha_layer_init";

    a.mask.causal = MHA_CAUSAL;
    if (mha_forward(layer, &a) != MHA_ERR_WORKSPACE) return "no workspace, and no complaint";
    if (mha_workspace_size(layer, &a, &bytes) != MHA_OK || bytes > sizeof work_room)
        return "the call does not fit the workspace";
    a.workspace = work_room;
    a.workspace_size = bytes;
    if (mha_forward(layer, &a) != MHA_OK) return "mha_forward";
    for (int i = 0; i < B * T * D; i++)
        if (!(fabs((double)y[i] - want[i]) <= 2e-5)) return "y is not what it should be";

    /* The same token by token, each of both sequences: the same bits. */
    if (mha_cache_size(layer, &room, &bytes) != MHA_OK || bytes > sizeof cache_room)
        return "the cache does not fit its buffer";
    if (mha_cache_init(&cache, cache_room, sizeof cache_room, layer, &room) != MHA_OK)
        return "mha_cache_init";
    a.cache = cache;
    a.seq = 1;
    a.workspace_size = sizeof work_room;
    for (int t = 0; t < T; t++) {
        float one[B * D], out[B * D];
        for (int b = 0; b < B; b++) memcpy(one + b * D, x + (b * T + t) * D, D * sizeof *x);
        a.x = one;
        a.y = out;
        if (mha_forward(layer, &a) != MHA_OK) return "mha_forward with a cache";
        for (int b = 0; b < B; b++) memcpy(z + (b * T + t) * D, out + b * D, D * sizeof *z);
    }
    if (memcmp(y, z, sizeof y) != 0) return "a cache changes bits";
    if (mha_forward(layer, &a) != MHA_ERR_FULL) return "a full cache takes more";
    mha_cache_free(cache);
    mha_layer_free(layer);
    return NULL;
}

#if defined(__arm__) && !defined(__linux__)

/* Semihosting: 4 writes a string, 0x20 ends the program with a reason and a status. */
static void host(int what, const void *arg)
{
    register int r0 __asm__("r0") = what;
    register const void *r1 __asm__("r1") = arg;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void end(unsigned status)
{
    unsigned reason[2] = { 0x20026u, 0 };
    reason[1] = status;
    host(0x20, reason);
    for (;;) continue;
}

static void fault(void)
{
    host(4, "FAIL firmware: a fault of the CPU\n");
    end(2);
}

static void run(void)
{
    const char *wrong = check();
    host(4, wrong ? "FAIL firmware: " : "Pass: firmware\n");
    if (wrong) host(4, wrong), host(4, "\n");
    end(wrong != NULL);
}

#ifdef __ARM_FP
/* The FPU is off after reset; the compiler may use it in any function but this one. */
static __attribute__((naked)) void reset(void)
{
    __asm__ volatile("ldr r0, =0xe000ed88\n ldr r1, [r0]\n orr r1, r1, #0xf00000\n"
                     "str r1, [r0]\n dsb\n isb\n b %0\n .ltorg"
                     :
                     : "i"(run));
}
#else
#define reset run
#endif

typedef void (*vector)(void);
#define STACK_TOP 0x20040000u
__attribute__((section(".vectors"), used)) static const vector vectors[16] = {
    (vector)STACK_TOP, reset, fault, fault, fault, fault, fault
};

#else

#include <stdio.h>
int main(void)
{
    const char *wrong = check();
    printf("%s%s\n", wrong ? "FAIL firmware: " : "Pass: firmware", wrong ? wrong : "");
    return wrong != NULL;
}

#endif
