/* mha.h - multi-head attention in one C99 header - v0.1.0
   https://en.wikipedia.org/wiki/Attention_(machine_learning)#Multi-head_attention
   MIT or public domain, at your choice: see the end of this file.

   Needs libc and libm, nothing else. In ONE source file of your program write

       #define MHA_IMPLEMENTATION
       #include "mha.h"

   and everywhere else just #include "mha.h". Build with: cc -O2 main.c -lm


   A WORKING PROGRAM

       #define MHA_IMPLEMENTATION
       #include "mha.h"
       #include <stdio.h>

       int main(void)
       {
           static float x[2 * 3 * 8], w_qkv[8 * 24], w_out[8 * 8], y[2 * 3 * 8];
           for (int i = 0; i < 48; i++) x[i] = (float)(i % 7) - 3.0f;
           for (int i = 0; i < 192; i++) w_qkv[i] = (float)(i % 11) * 0.1f - 0.5f;
           for (int i = 0; i < 64; i++) w_out[i] = (float)(i % 13) * 0.1f - 0.6f;

           mha_config  cfg = { .d_model = 8, .n_heads = 2 };       // zero = default
           mha_weights w   = { .qkv = w_qkv, .out = w_out };       // biases are optional
           mha_layer  *layer;
           mha_status  st  = mha_layer_create(&layer, &cfg, &w);   // packs the weights once
           if (st == MHA_OK) {
               mha_args a = { .batch = 2, .seq = 3, .x = x, .y = y };
               a.mask.causal = MHA_CAUSAL;
               st = mha_forward(layer, &a);
               mha_layer_free(layer);
           }
           if (st != MHA_OK) { fprintf(stderr, "%s\n", mha_strerror(st)); return 1; }
           printf("y[0] = %.4f %.4f %.4f ...\n", y[0], y[1], y[2]);
           return 0;
       }


   WHAT IT COMPUTES

       x [B,T,D] -> one fused projection  -> q [B,H,T,d_k]  k [B,G,S,d_k]  v [B,G,S,d_v]
                 -> softmax(q k^T * scale + bias, masked) v, per head    [B,H,T,d_v]
                 -> concat [B,T,H*d_v] -> W_O -> y [B,T,D]

   One alphabet everywhere: B batch, T queries, S keys, D model width, H query heads,
   G key/value heads (G = H: multi-head; 1 < G < H: grouped-query; G = 1: multi-query),
   d head width. Tensors are float32, row-major, last index fastest.

   Two levels, one vocabulary:
     layer   mha_config + mha_weights -> mha_layer -> mha_forward
     core    mha_sdpa: attention on q, k, v you already have, as strided views
   a cache (mha_cache_create) that mha_forward appends to, for generation token by token;
   and the textbook's stages one by one: mha_project_qkv, mha_split_heads, mha_sdpa,
   mha_merge_heads, mha_project_out.

   Everything else is off until you ask for it, and composes in this order:
     q, k    norm of each head (qk_norm), rotary positions (rope)
     scores  scale; softcap; biases: mask.bias, ALiBi (alibi); exclusions: causal, window, lengths,
             mask.allow, key_padding, -inf in mask.bias; sinks (sink, bias_k, zero_attn); softmax
     output  gates of each head or token (gate), W_O
     work    sequences of different lengths without padding (cu_seq); caches that are linear or a
             ring, in f32, f16, bf16 or int8; weights in the same (weight_type)


   WHAT IT PROMISES

   - A query that may see no key gets 0 (weights 0, log-sum-exp -inf), not NaN.
   - -inf in an additive mask excludes a key exactly; no finite value does. (A score below -2.3e38
     weighs 0 beside any other, and its value is then not read; one that was below it on the way,
     before its last term or its bias, may.)
   - What is excluded is never read into a result: NaN or Inf there cannot leak.
     NaN in something attended does propagate.
   - Scores of any size that fits a float do not overflow, if q * scale and the sum of S values fit
     one too. Zero lengths (B, T or S = 0) are valid.
   - All of that under -ffast-math too.
   - float32 accumulation or better: error of mha_sdpa <= 2e-6 * max|v| on N(0,1) data.
   - The bits of an output row depend on that row's query, on the keys and values it
     sees and on the weights - not on the number of threads, nor on the batch around it, nor
     on whether the tokens came in one call or one by one through a cache.
     (One program on one instruction set; not under -ffast-math, nor with the x87 of old i386.)
   - Memory beyond inputs and outputs is O(B*(T+S)*D), of mha_forward without cu_seq, cu_source
     and cache O((T+S)*D) or a few MB a thread; never O(T*S), unless you ask for the weights.
     With a workspace given, no call allocates, locks or calls the OS (the built-in pool does lock).
   - Errors are values. Every call validates sizes, enums, lengths, alignment and how fields go
     together before it writes anything; how large your buffers are, and whether they overlap, it
     cannot see. It never aborts and never prints. mha_strerror() gives a sentence, and the
     *_check() functions give the exact reason with the numbers in it.


   SPEED

   Weights are packed once, when a layer is made, for kernels chosen then: AVX2+FMA or AVX-512 on
   x86-64 (found at run time: plain cc -O2 is enough), NEON on aarch64, portable C elsewhere. q, k
   and v are written where attention reads them, scores exist a tile or a few blocks at a time, and
   what causal, windows and lengths exclude is not computed. Bring a workspace and threads to go
   faster: they share sequences, heads and queries, and where that is too few, the keys and values of
   a head. One query at a time is limited by the speed of memory, whether keys are in a cache or in
   arrays of yours.
   2^x is a polynomial in the kernels: within 1 ulp, or 1.23 ulp without fused multiply-add.


   OPTIONS (define before including, the same in every file where it says "all files")

     MHA_IMPLEMENTATION  compile the implementation here (in one file; or in any, with MHA_STATIC)
     MHA_STATIC          make every function static (in a file that has the implementation too:
                         alone it does not link)
     MHA_THREADS         add the built-in thread pool, mha_pool_* (all files); link -pthread.
                         The pool allocates: it is not there under MHA_NO_MALLOC
     MHA_NO_SIMD         portable C kernels only
     MHA_NO_MALLOC       remove the calls that allocate; you give the memory (all files)
     MHA_MALLOC(bytes)   your allocator, together with MHA_FREE(pointer)


   CONTENTS (search for the tag)

     >>api        types, declarations, their documentation
     >>platform   compilers and operating systems
     >>common     small helpers: bits of a float, checked sizes, error sentences, 2^x
     >>kernels    what an inner loop must do
     >>scalar     the inner loops in plain C: the specification
     >>avx2 >>avx512 >>neon   the same in intrinsics
     >>dispatch   from a CPU to a table of kernels
     >>pack       how operands lie in memory
     >>project    x * W + b, written where attention wants it
     >>rotate     norm and rotary positions of q and k
     >>attend     softmax(q k^T) v, streamed over blocks of keys
     >>threads    the built-in pool
     >>cache      keys and values kept between calls
     >>layer      validation and the public functions
     licence

   REVISIONS
     0.1.0  first version
*/

/* ==== >>api ===================================================================== */

#ifndef MHA_H
#define MHA_H

#include <stddef.h>

#define MHA_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

#ifdef MHA_STATIC
#if defined(__GNUC__) || defined(__clang__)
#define MHA_API static __attribute__((unused))
#else
#define MHA_API static
#endif
#else
#define MHA_API extern
#endif

/* ---- status ------------------------------------------------------------------- */

typedef enum mha_status {
    MHA_OK = 0,
    MHA_ERR_NULL,      /* a required pointer is null */
    MHA_ERR_SIZE,      /* a size, length or index is negative, zero or too large */
    MHA_ERR_OVERFLOW,  /* a product of sizes is more than this machine can address */
    MHA_ERR_ENUM,      /* an enum holds a value it does not have */
    MHA_ERR_VALUE,     /* a number is NaN or infinite, or outside its range */
    MHA_ERR_CONFLICT,  /* two fields contradict each other */
    MHA_ERR_ALIGN,     /* a pointer is not aligned for what it points to */
    MHA_ERR_BUFFER,    /* the buffer given for a layer or a cache is too small */
    MHA_ERR_WORKSPACE, /* the workspace is too small, or missing under MHA_NO_MALLOC */
    MHA_ERR_MEMORY,    /* MHA_MALLOC returned null */
    MHA_ERR_ISA,       /* that instruction set is not on this CPU or not in this build */
    MHA_ERR_FULL       /* the cache has no room for these tokens */
} mha_status;

/* One sentence for a status; never null, also for a value that is not a status. */
MHA_API const char *mha_strerror(mha_status status);

/* ---- instruction sets ------------------------------------------------------------ */

typedef enum mha_isa {
    MHA_ISA_AUTO = 0, /* the best this CPU has */
    MHA_ISA_SCALAR,   /* portable C */
    MHA_ISA_AVX2,     /* x86-64 with AVX2 and FMA */
    MHA_ISA_AVX512,   /* x86-64 with AVX-512 F, BW, DQ and VL */
    MHA_ISA_NEON      /* aarch64 */
} mha_isa;

/* 1 if a layer or a call can be given this isa here, else 0. AUTO and SCALAR: always 1. */
MHA_API int mha_isa_available(mha_isa isa);

/* "auto", "scalar", "avx2", ...; "unknown" for a value that is not an isa. */
MHA_API const char *mha_isa_name(mha_isa isa);

/* ---- masks, shared by both levels ------------------------------------------------ */

/* Distance in elements, of either sign, between neighbours along each axis of a mask; 0: shared.
   All four zero is the default: one mask [T,S] shared by batch and heads.
       [T,S] {0,0,S,1}   [B,S] {S,0,0,1}   [B,T,S] {T*S,0,S,1}   [H,T,S] {0,T*S,S,1}
       [B,H,T,S] {H*T*S,T*S,S,1}
   (products of int may overflow: make them ptrdiff_t). With a cache S grows from call to call; rows
   that stay R apart are [T,R] {0,0,R,1}, [B,R] {R,0,0,1}. */
typedef struct mha_mask_stride {
    ptrdiff_t batch, head, query, key;
} mha_mask_stride;

/* Key j is at position j. Query i is at position i + (S - T), so that the last query is where the
   last key is; with MHA_CAUSAL_UPPER_LEFT at i. With a cache, S is its length after the call: query
   i is at the length before it + i, or, with cache_only, at the length - T + i. */
typedef enum mha_causal {
    MHA_NOT_CAUSAL = 0,
    MHA_CAUSAL,           /* key j visible to query i iff j <= i + (S - T): lower-right aligned */
    MHA_CAUSAL_UPPER_LEFT /* key j visible to query i iff j <= i, also when S != T */
} mha_causal;

/* All zero = no mask. What is given composes: a key is seen only if all of it lets the key through,
   and biases add. */
typedef struct mha_mask {
    const unsigned char *allow; /* boolean mask: non-zero = attend, 0 = excluded; or null */
    mha_mask_stride allow_stride;
    const float *bias; /* additive mask, in units of scaled scores; -inf excludes; or null */
    mha_mask_stride bias_stride;
    const int *key_len;   /* [B] keys j >= key_len[b] are excluded, 0 <= key_len[b] <= S; or null */
    mha_causal causal;    /* default MHA_NOT_CAUSAL */
    const int *key_start; /* [B] keys j < key_start[b] are excluded (left padding); or null */
    const unsigned char *key_padding; /* [B,S] PyTorch's key_padding_mask: non-zero = EXCLUDED. For
                                         other strides, and rows longer than S, use allow */
    int windowed;    /* 1: a query at position p sees keys p - left .. p + right only */
    int left, right; /* of the window, 0 = none on that side, -1 = all; with windowed = 1 only. The
                        last W tokens, the query's own included, are left = W - 1 */
} mha_mask;

/* ---- threads ---------------------------------------------------------------------- */

typedef void (*mha_task)(void *arg, int index);

/* How a call may use threads; all zero = serial. parallel_for must call task(arg, i) exactly
   once for each i in 0..n-1, in any order, on any threads, and return when all are done.
   It is called a few times per mha call, more often the larger the batch is and the more keys a
   single query sees, with n <= threads. With OpenMP:

       static void omp_for(void *ctx, int n, mha_task task, void *arg)
       {
           (void)ctx;
           #pragma omp parallel for schedule(static, 1)
           for (int i = 0; i < n; i++) task(arg, i);
       }
       args.parallel.parallel_for = omp_for;  args.parallel.threads = omp_get_max_threads(); */
typedef struct mha_parallel {
    void (*parallel_for)(void *ctx, int n, mha_task task, void *arg);
    void *ctx;   /* handed to parallel_for */
    int threads; /* how many tasks to make, >= 1 when parallel_for is set */
} mha_parallel;

#if defined(MHA_THREADS) && !defined(MHA_NO_MALLOC)
/* The built-in pool: threads stay alive between calls. Calls from several threads that share
   one pool take turns; a task must not call into its own pool. */
typedef struct mha_pool mha_pool;

/* threads counts the caller too; 0 = one per CPU. If the OS gives fewer threads than asked
   for, the pool works with those: same results. On error *pool is set to null. */
MHA_API mha_status mha_pool_create(mha_pool **pool, int threads);

/* Waits for the threads to end. Null is fine. */
MHA_API void mha_pool_free(mha_pool *pool);

/* What to put into args.parallel. A null pool gives the serial default. */
MHA_API mha_parallel mha_pool_parallel(mha_pool *pool);
#endif

/* ---- strided tensors ------------------------------------------------------------------ */

/* Distance in elements between batch elements, heads and positions, of either sign; the d numbers
   of one head at one position are adjacent. All three zero is the default: contiguous [B,H,T,d].
   Else all three count, and one that is 0 means shared: what is written may not be.
       [B,H,T,d] {H*T*d, T*d, d}     [B,T,H,d] {T*H*d, d, H*d}
       q, k, v side by side in [B,T,(H+G+G)*d]: {T*(H+2*G)*d, d, (H+2*G)*d}, three pointers */
typedef struct mha_stride {
    ptrdiff_t batch, head, seq;
} mha_stride;

/* Distance in floats between batch elements, positions and heads of a gate; 0 = broadcast. All
   three zero is the default: one gate a head, [H]. A gate of each token and head, [B,T,H], is
   {T*H, H, 1}; with cu_seq, [seq,H], {0, H, 1}. */
typedef struct mha_gate_stride {
    ptrdiff_t batch, seq, head;
} mha_gate_stride;

/* ---- positions ----------------------------------------------------------------------- */

typedef enum mha_rope_layout {
    MHA_ROPE_NONE = 0,
    MHA_ROPE_HALF,       /* pairs (i, i + width/2): GPT-NeoX, and Llama as Hugging Face stores it */
    MHA_ROPE_INTERLEAVED /* pairs (2i, 2i + 1): GPT-J, and Llama as Meta stores it */
} mha_rope_layout;

/* How the angles of a longer context follow from those of training. f(i) = base^(-2i/width). */
typedef enum mha_rope_scaling {
    MHA_ROPE_PLAIN = 0, /* angle = position * f(i) */
    MHA_ROPE_LINEAR,    /* position / factor */
    MHA_ROPE_NTK,       /* base * factor^(width/(width - 2)) */
    MHA_ROPE_YARN,      /* between f and f / factor, by beta_fast and beta_slow, as transformers
                           rounds it; cos and sin times attention */
    MHA_ROPE_LLAMA3     /* between f and f / factor, by low_freq and high_freq */
} mha_rope_scaling;

/* Rotary position embedding of q and k. All zero = none. */
typedef struct mha_rope {
    mha_rope_layout layout;
    int width;  /* how many numbers of each head are rotated, from the first; even. Default: d_k */
    float base; /* default 10000 */
    mha_rope_scaling scaling;
    float factor;    /* how many times longer than in training the context is, >= 1. Required with a
                        scaling, else not used */
    int original;    /* YARN, LLAMA3: context of training, in tokens. Required there */
    float beta_fast; /* YARN: a pair that turns more often than this in original tokens keeps its f,
                        default 32; */
    float beta_slow; /* one that turns less often than this has f / factor, default 1 */
    float attention; /* YARN: multiplies cos and sin. Default: 0.1 ln(factor) + 1 */
    float low_freq;  /* LLAMA3: a pair that turns less often than this in original tokens has
                        f / factor, default 1; */
    float high_freq; /* one that turns more often than this keeps its f, default 4 */
} mha_rope;

/* x [B,H,T,d] rotated in place, at stride (zero = contiguous), for those who bring their own q and
   k to mha_sdpa. positions [B,T], or null: 0 .. T-1. */
MHA_API mha_status mha_rotate(const mha_rope *rope, int batch, int heads, int seq, int d, float *x,
                              mha_stride stride, const int *positions);

/* The usual slopes of ALiBi for so many heads: 2^(-8i/n), i = 1 .. n, for n a power of two; else
   those of the power below, then every other one of the power above. */
MHA_API mha_status mha_alibi_slopes(int heads, float *slopes);

/* ---- number formats ------------------------------------------------------------------ */

/* How weights and cached keys and values are kept. All arithmetic is float32. INT8 has a scale for
   each output of a weight matrix, for each key and each value of a head in a cache. The largest error
   they bring on N(0,1) data, divided by max|y|, D = 256: weights in F16 1.7e-4, BF16 1.4e-3, INT8
   5.2e-3; a cache 1.5e-4, 9.6e-4, 3.0e-3. */
typedef enum mha_type {
    MHA_F32 = 0,
    MHA_F16,  /* IEEE half: 11 bits, up to 65504; larger numbers become infinite */
    MHA_BF16, /* the upper half of a float: 8 bits */
    MHA_INT8  /* -127 .. 127 times a scale */
} mha_type;

/* n numbers between F32, F16 and BF16, to nearest even; from and to must not overlap. INT8, which
   would need scales, is MHA_ERR_VALUE. */
MHA_API mha_status mha_convert(mha_type from_type, const void *from, mha_type to_type, void *to,
                               size_t n);

/* ---- layer ------------------------------------------------------------------------- */

typedef enum mha_norm {
    MHA_NORM_NONE = 0,
    MHA_NORM_RMS,  /* x / sqrt(mean(x^2) + eps) * weight */
    MHA_NORM_LAYER /* (x - mean) / sqrt(var + eps) * weight + bias */
} mha_norm;

typedef struct mha_config {
    int d_model;      /* D: width of x and y. Required */
    int n_heads;      /* H. Required */
    int n_kv_heads;   /* G: must divide n_heads. Default: n_heads */
    int d_k;          /* width of a query/key head. Default: d_model / n_heads, which must divide */
    int d_v;          /* width of a value head. Default: d_k */
    int d_source;     /* width of the key/value source in cross-attention. Default: d_model */
    int d_source_v;   /* width of the value source, if it is another. Default: d_source */
    float scale;      /* multiplies the scores. Default: 1/sqrt(d_k) */
    mha_isa isa;      /* default: the best this CPU has */
    mha_rope rope;    /* rotary positions. Default: none */
    float softcap;    /* scores become softcap * tanh(score / softcap), <= 1e30. Default: do not */
    int alibi;        /* 1: scores get -slope * |distance|, slopes from weights.alibi or the usual;
                       distances up to 2^24 are exact */
    mha_norm qk_norm; /* of each head of q and of k, before rope. Default: none */
    float norm_eps;   /* default 1e-6 */
    int zero_attn;    /* 1: one more key and value, all zeros (PyTorch's add_zero_attn) */
    mha_type weight_type; /* how the four matrices are kept. Default: MHA_F32 */
} mha_config;

typedef enum mha_layout {
    MHA_IN_OUT = 0, /* W [in][out], y = x W: the textbook's */
    MHA_OUT_IN      /* W [out][in], y = x W^T: PyTorch's Linear and MultiheadAttention, and most
                       checkpoints; but GPT-2's (Conv1D) are MHA_IN_OUT */
} mha_layout;

/* Either qkv, or q and k and v. The fused matrix holds all query heads, then all key heads,
   then all value heads, along its out axis: H*d_k + G*d_k + G*d_v. It needs
   d_source = d_source_v = d_model. Biases: b_qkv, or any of b_q b_k b_v; null = none.
   Only read by the call that is given it. */
typedef struct mha_weights {
    const float *qkv;             /* in D, out H*d_k + G*d_k + G*d_v */
    const float *q;               /* in D, out H*d_k */
    const float *k;               /* in d_source, out G*d_k */
    const float *v;               /* in d_source_v, out G*d_v */
    const float *out;             /* W_O: in H*d_v, out D. Required */
    const float *b_qkv;           /* [H*d_k + G*d_k + G*d_v] */
    const float *b_q, *b_k, *b_v; /* [H*d_k] [G*d_k] [G*d_v] */
    const float *b_out;           /* [D] */
    mha_layout layout;            /* of every matrix above. Default MHA_IN_OUT */
    const float *alibi;           /* [H] slopes, with cfg.alibi. Default: mha_alibi_slopes */
    const float *sink;            /* [H] one more score, without a key, in the softmax of every row
                                     that sees at least one; -inf: none. Default: none */
    const float *sink_value;      /* [H,d_v] what it adds. Default: nothing */
    const float *q_norm, *k_norm; /* [d_k] weights of cfg.qk_norm. Default: ones */
    const float *q_norm_bias, *k_norm_bias; /* [d_k] with MHA_NORM_LAYER. Default: zeros */
    const float *bias_k, *bias_v; /* [G*d_k] [G*d_v] one more key and value that every query sees
                                     whatever the masks, without a position (PyTorch's
                                     add_bias_kv). Both or neither */
} mha_weights;

/* Weights packed for the kernels. Never changes once made: any number of threads may use
   one layer at the same time. */
typedef struct mha_layer mha_layer;

/* Validates, allocates with MHA_MALLOC, packs. On error *layer is set to null. */
#ifndef MHA_NO_MALLOC
MHA_API mha_status mha_layer_create(mha_layer **layer, const mha_config *cfg, const mha_weights *w);
#endif

/* Gives back what mha_layer_create took; does nothing to a layer made by mha_layer_init.
   Null is fine. Freeing twice, or using a layer after, is undefined as with free(). */
MHA_API void mha_layer_free(mha_layer *layer);

/* The same in your memory: *bytes from mha_layer_size, any alignment; the layer lives inside
   buffer, which must not move and is yours to free. */
MHA_API mha_status mha_layer_size(const mha_config *cfg, size_t *bytes);
MHA_API mha_status mha_layer_init(mha_layer **layer, void *buffer, size_t bytes,
                                  const mha_config *cfg, const mha_weights *w);

/* The status mha_layer_create would give (but for MHA_ERR_MEMORY). If why is not null, up to
   why_size bytes of a sentence with the reason go there, always terminated; "" when MHA_OK. */
MHA_API mha_status mha_layer_check(const mha_config *cfg, const mha_weights *w, char *why,
                                   size_t why_size);

/* The layer's configuration with every default that it uses filled in. Null for a null layer. */
MHA_API const mha_config *mha_layer_config(const mha_layer *layer);

/* Keys and values of the tokens seen so far, for generating text token by token: see
   mha_cache_create below. */
typedef struct mha_cache mha_cache;

/* One call. Pointers need the alignment of their type, no more.

   Sequences of different lengths lie side by side, without padding, when cu_seq says where each
   starts: x and y are then [seq,D], sequence b is rows cu_seq[b] .. cu_seq[b+1]-1, cu_seq[0] is 0,
   and seq is the number of rows, cu_seq[B], or 0. T and S are then those of the longest sequence,
   also for masks; lse is [H,seq], attn [H,seq,S], attn_mean [seq,S]. cu_source is the same for
   source. */
typedef struct mha_args {
    int batch;             /* B. There is no default: 0 is an empty batch, nothing is done */
    int seq;               /* T. Nor is there here: 0 without cu_seq are no queries */
    int source_seq;        /* S, with source: 0 without cu_source are no keys. Else 0 or T */
    const float *x;        /* [B,T,D] queries come from here */
    const float *source;   /* [B,S,d_source] keys and values come from here. Null: from x */
    const float *source_v; /* [B,S,d_source_v] values, if not from source too. Null: from source */
    float *y;              /* [B,T,D]. May be x; must overlap nothing else */
    mha_mask mask;
    float *attn;      /* [B,H,T,S] attention weights, on request; sinks and extra keys left out */
    float *attn_mean; /* [B,T,S] attention weights averaged over the heads, on request */
    float *lse;       /* [B,H,T] log-sum-exp of each row of scores, sinks included, on request */
    void *workspace;  /* mha_workspace_size bytes, any alignment. Null: from MHA_MALLOC */
    size_t workspace_size;
    mha_parallel parallel; /* default: serial */
    mha_cache *cache; /* self-attention: x is appended to it, and attends to all it holds. S is then
                         the longest length after that, and source_seq 0 or S: so many columns have
                         attn and attn_mean, of a ring too, where most are 0. Default: none */
    int cache_only;   /* 1: x is not appended, it attends to what the cache holds: cross-attention
                         to a source that mha_cache_append put there (beams that share it can be
                         the queries of one call; leave mask.causal 0). If the cache holds this
                         layer's own tokens, and with rope, give positions too: else 0, 1, ... */
    const int *cu_seq;    /* [B+1] sequences of different lengths, see above. Default: none */
    const int *cu_source; /* [B+1] the same for source; source_seq = cu_source[B] or 0 */
    const int *positions; /* [B,T] or [seq]: for rope, else not read. Default: 0, 1, ... in each
                                  sequence; of what is appended to a cache, from its length on */
    const int *source_positions; /* [B,S] or [source_seq]: the same for source */
    const float *gate;           /* multiplies each head's output before W_O; 0 skips its work */
    mha_gate_stride gate_stride;
} mha_args;

/* x [B,T,D] -> y [B,T,D]. */
MHA_API mha_status mha_forward(const mha_layer *layer, const mha_args *args);

/* Bytes of workspace this call needs. Depends on batch, seq, source_seq, parallel.threads, on what
   cu_seq and cu_source hold, on which of source, attn, attn_mean, cache and cache_only are set, on
   the cache's type and capacity and on the layer's isa; not on how much a cache holds, so that one
   workspace serves every step of the same batch and seq. It never falls as batch, seq or source_seq
   grow (with cu_seq or cu_source: as sequences do), so that of the longest call serves all, with the
   same threads. */
MHA_API mha_status mha_workspace_size(const mha_layer *layer, const mha_args *args, size_t *bytes);

/* The status mha_forward would give, and the reason: as mha_layer_check. */
MHA_API mha_status mha_forward_check(const mha_layer *layer, const mha_args *args, char *why,
                                     size_t why_size);

/* ---- cache -------------------------------------------------------------------------------- */

typedef struct mha_cache_config {
    int batch;     /* sequences. Required */
    int capacity;  /* tokens of each. Required. A ring takes memory for the next multiple of 256 */
    int ring;      /* 1: sequences of any length (up to INT_MAX), of which the last capacity tokens
                      are kept, for windowed attention: every mha_forward needs mask.windowed, with
                      left + its own tokens <= capacity */
    mha_type type; /* how keys and values are kept. Default: MHA_F32 */
} mha_cache_config;

/* Room for keys and values, all sequences empty at first. With it, mha_forward takes the next
   args.seq tokens of every sequence (with cu_seq: as many of each as it says): it appends their
   keys and values, and each query attends to everything before it in its own sequence (mask.causal
   = MHA_CAUSAL; position = length of the cache + i). One long call, several short ones or token by
   token: same bits. Without MHA_CAUSAL the tokens of one call see each other both ways. Masks allow
   and bias are [T,S], column j being position j; source, key_len and MHA_CAUSAL_UPPER_LEFT are
   refused, all other masks are not. No room: MHA_ERR_FULL, and nothing is changed. A cache fits any
   layer with the same n_kv_heads, d_k and d_v; one call at a time may use it. On error *cache is
   set to null. */
#ifndef MHA_NO_MALLOC
MHA_API mha_status mha_cache_create(mha_cache **cache, const mha_layer *layer,
                                    const mha_cache_config *cfg);
#endif

/* Gives back what mha_cache_create took; does nothing to one made by mha_cache_init. Null is
   fine. */
MHA_API void mha_cache_free(mha_cache *cache);

/* The same in your memory, any alignment; the cache lives inside buffer, which must not move. */
MHA_API mha_status mha_cache_size(const mha_layer *layer, const mha_cache_config *cfg,
                                  size_t *bytes);
MHA_API mha_status mha_cache_init(mha_cache **cache, void *buffer, size_t bytes,
                                  const mha_layer *layer, const mha_cache_config *cfg);

/* The status mha_cache_create would give, and the reason: as mha_layer_check. */
MHA_API mha_status mha_cache_check(const mha_layer *layer, const mha_cache_config *cfg, char *why,
                                   size_t why_size);

/* Projects args.source (or, if that is null, args.x) and appends keys and values to args.cache: no
   queries, no y; mask and cache_only do not matter. For cross-attention: once per source, then
   mha_forward with cache_only = 1 as often as needed. Sources of different lengths: cu_source, or
   padded ones and then mha_cache_truncate each. The workspace of mha_workspace_size for the same
   args without a mask, cache_only = 0, is enough. */
MHA_API mha_status mha_cache_append(const mha_layer *layer, const mha_args *args);

/* The status mha_cache_append would give, and the reason: as mha_layer_check. */
MHA_API mha_status mha_cache_append_check(const mha_layer *layer, const mha_args *args, char *why,
                                          size_t why_size);

/* Tokens that sequence slot holds (of a ring: has had); -1 if there is no such slot. */
MHA_API int mha_cache_length(const mha_cache *cache, int slot);

/* Forgets all but the first length tokens of sequence slot, or of every one if slot is -1: to
   take back rejected tokens. Refused where a sequence is shorter. A ring forgets what its capacity
   cannot hold: if the window of the next mha_forward reaches back to that, it is refused; to take
   back n tokens, make its capacity at least left + n. */
MHA_API mha_status mha_cache_truncate(mha_cache *cache, int slot, int length);

/* Forgets sequence slot, or every one if slot is -1. */
MHA_API mha_status mha_cache_reset(mha_cache *cache, int slot);

/* Sequence to_slot of to becomes a copy of the first length tokens of from_slot of from (length -1:
   all of them): to share a prefix. Between two slots of one cache, or two caches with the same
   n_kv_heads, d_k, d_v and type; batch and capacity may differ if the tokens fit (else it is
   MHA_ERR_FULL). A ring can only be copied whole, to a ring of the same capacity. */
MHA_API mha_status mha_cache_fork(mha_cache *to, int to_slot, const mha_cache *from, int from_slot,
                                  int length);

/* Every sequence b becomes what order[b] was, for the beams of a beam search. order [batch] may
   name a sequence several times, or not at all. */
MHA_API mha_status mha_cache_reorder(mha_cache *cache, const int *order);

typedef struct mha_cache_facts {
    int batch, capacity, ring, n_kv_heads, d_k, d_v;
    mha_type type;
    int longest;  /* length of the longest sequence */
    size_t bytes; /* of keys and values, all sequences, full or not */
} mha_cache_facts;

MHA_API mha_status mha_cache_info(const mha_cache *cache, mha_cache_facts *facts);

/* ---- core: attention on q, k, v ------------------------------------------------------- */

typedef struct mha_sdpa_args {
    int batch;      /* B. There is no default: 0 is an empty batch, nothing is done */
    int heads;      /* H. Required */
    int kv_heads;   /* G: must divide heads. Default: heads */
    int seq;        /* T. Nor is there here: 0 without cu_seq are no queries */
    int source_seq; /* S. Nor is there here: 0 without cu_source are no keys, and o is 0 */
    int d_k;        /* width of q and k. Required */
    int d_v;        /* width of v and o. Default: d_k */
    float scale;    /* default: 1/sqrt(d_k) */
    const float *q; /* [B,H,T,d_k] */
    const float *k; /* [B,G,S,d_k] */
    const float *v; /* [B,G,S,d_v] */
    float *o;       /* [B,H,T,d_v]. May be q, with q's strides and without attn and attn_mean;
                       must overlap nothing else */
    mha_stride q_stride, k_stride, v_stride, o_stride;
    mha_mask mask;
    float *attn;      /* [B,H,T,S] contiguous, on request */
    float *attn_mean; /* [B,T,S] contiguous, on request */
    float *lse;       /* [B,H,T] contiguous, on request */
    void *workspace;  /* mha_sdpa_workspace_size bytes, any alignment. Null: from MHA_MALLOC */
    size_t workspace_size;
    mha_parallel parallel; /* default: serial */
    mha_isa isa;           /* default: the best this CPU has */
    float softcap;         /* scores become softcap * tanh(score / softcap). Default: they do not */
    const float *alibi;    /* [H] slopes: scores get -slope * |distance|. Default: none */
    const float *sink;     /* [H] as in mha_weights */
    const float *sink_value; /* [H,d_v] */
    const float *gate;       /* as in mha_args */
    mha_gate_stride gate_stride;
    const int *cu_seq;    /* [B+1] as in mha_args: q and o are then [H,seq,d], a batch of one */
    const int *cu_source; /* [B+1] the same for k and v, [G,source_seq,d] */
} mha_sdpa_args;

/* o = softmax(q k^T * scale + bias, masked) v. Query head h uses key/value head h / (H/G). */
MHA_API mha_status mha_sdpa(const mha_sdpa_args *args);

/* As mha_workspace_size; but with threads it may fall where batch grows. */
MHA_API mha_status mha_sdpa_workspace_size(const mha_sdpa_args *args, size_t *bytes);

/* As mha_forward_check. */
MHA_API mha_status mha_sdpa_check(const mha_sdpa_args *args, char *why, size_t why_size);

/* Two results over different keys become the one over all of them: o_a, o_b [B,H,T,d], all three at
   stride (zero = contiguous), with their log-sum-exps [B,H,T]. o may be o_a or o_b, lse may be null
   or lse_a or lse_b. For keys that are split among machines, or a prefix that many share. A sink
   would count twice: leave it out of both, and merge it last, as o = sink_value or 0, lse = sink,
   where lse is not -inf. */
MHA_API mha_status mha_merge(int batch, int heads, int seq, int d, const float *o_a,
                             const float *lse_a, const float *o_b, const float *lse_b,
                             mha_stride stride, float *o, float *lse);

/* ---- the stages one by one -------------------------------------------------------------- */

/* 1. x [B,T,D] -> q [B,T,H*d_k];  source [B,S,d_source] -> k [B,S,G*d_k], v [B,S,G*d_v], q and k
   normed and rotated as the layer says. Uses batch, seq, source_seq, x, source, source_v, cu_seq,
   cu_source, positions, source_positions, workspace and parallel of args, and checks the rest; q, k
   or v may be null if not wanted, but x and source are what mha_forward needs. What is written must
   overlap nothing that is read. The workspace of mha_forward is enough. No cache. */
MHA_API mha_status mha_project_qkv(const mha_layer *layer, const mha_args *args, float *q, float *k,
                                   float *v);

/* 2. x [B,T,H*d] -> y [B,H,T,d]. x and y must not overlap. (Sizes in the order of x: seq, then
   heads; so in 4.) */
MHA_API mha_status mha_split_heads(int batch, int seq, int heads, int d, const float *x, float *y);

/* 3. mha_sdpa.   4. x [B,H,T,d] -> y [B,T,H*d]. x and y must not overlap. */
MHA_API mha_status mha_merge_heads(int batch, int seq, int heads, int d, const float *x, float *y);

/* 5. o [B,T,H*d_v] -> args->y [B,T,D]. Uses batch, seq, cu_seq, y, workspace and parallel. o and y
   must not overlap. The workspace of mha_forward is enough. */
MHA_API mha_status mha_project_out(const mha_layer *layer, const mha_args *args, const float *o);

/* The textbook's matrices of each head, W_i^Q (in D, out d_k, i < H), W_i^K (in D, out d_k,
   i < G) and W_i^V (in D, out d_v, i < G), gathered into the fused matrix that
   mha_weights.qkv wants, all in the given layout. fused holds D * (H*d_k + G*d_k + G*d_v). */
MHA_API mha_status mha_fuse_heads(const mha_config *cfg, mha_layout layout, const float *const *w_q,
                                  const float *const *w_k, const float *const *w_v, float *fused);

#ifdef __cplusplus
}
#endif
#endif /* MHA_H */

/* ================================================================================== */
#if defined(MHA_IMPLEMENTATION) && !defined(MHA__IMPLEMENTED)
#define MHA__IMPLEMENTED

/* ==== >>platform ================================================================= */

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if (defined(MHA_MALLOC) && !defined(MHA_FREE)) || (!defined(MHA_MALLOC) && defined(MHA_FREE))
#error "mha.h: define MHA_MALLOC and MHA_FREE together, or neither"
#endif
#if !defined(MHA_MALLOC) && !defined(MHA_NO_MALLOC)
#include <stdlib.h>
#define MHA_MALLOC(bytes) malloc(bytes)
#define MHA_FREE(pointer) free(pointer)
#endif

/* Which kernels can be compiled here. On x86-64 they carry their target in an attribute, so that
   plain cc -O2 has them; the CPU is asked at run time. */
#if !defined(MHA_NO_SIMD) && !defined(__TINYC__)
#if (defined(__GNUC__) && defined(__x86_64__)) || (defined(_MSC_VER) && defined(_M_X64))
#define MHA__X86
#include <immintrin.h>
#if defined(__clang__) && defined(_MSC_VER)
#include <intrin.h>
#endif
#if defined(__clang__) && defined(_MSC_VER) && __clang_major__ < 19
/* Before 19, clang for MSVC leaves out there what the flags do not allow. The order matters. */
/* clang-format off */
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlbwintrin.h>
#include <avx512vldqintrin.h>
/* clang-format on */
#endif
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define MHA__ARM64
#include <arm_neon.h>
#endif
#endif

/* Sanitizers check every access: code that is inlined and unrolled takes minutes to compile then. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MHA__SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define MHA__SANITIZED
#endif
#endif

/* MHA__APART: what runs once a call, or once a unit of work, stays a function. Inlined wherever it is
   called, it would be 7 % of the time that gcc takes to compile this header, 8 % of clang's. */
#if defined(__GNUC__) || defined(__clang__)
#define MHA__TARGET(isa) __attribute__((target(isa)))
#define MHA__APART static __attribute__((noinline))
#ifdef MHA__SANITIZED
#define MHA__INLINE static inline
#else
#define MHA__INLINE static inline __attribute__((always_inline))
#endif
#elif defined(_MSC_VER)
#define MHA__TARGET(isa)
#define MHA__APART static __declspec(noinline)
#define MHA__INLINE static __forceinline
#else
#define MHA__TARGET(isa)
#define MHA__APART static
#define MHA__INLINE static
#endif

/* Loops over accumulators must be unrolled whole, or gcc -O2 keeps them in memory: a third of the
   speed. The loop over terms is unrolled by 4. */
#if defined(MHA__SANITIZED)
#define MHA__UNROLL
#define MHA__UNROLL4
#elif defined(__clang__)
#define MHA__UNROLL _Pragma("clang loop unroll(full)")
#define MHA__UNROLL4 _Pragma("clang loop unroll_count(4)")
#elif defined(__GNUC__)
#define MHA__UNROLL _Pragma("GCC unroll 16")
#define MHA__UNROLL4 _Pragma("GCC unroll 4")
#else
#define MHA__UNROLL
#define MHA__UNROLL4
#endif

/* Opaque: p is unknown from here on, so that addresses made of it are made anew, not kept on the
   stack. */
#ifdef __GNUC__
#define MHA__PREFETCH_L1(p) __builtin_prefetch((p), 0, 3)
#define MHA__PREFETCH_L2(p) __builtin_prefetch((p), 0, 2)
#define MHA__OPAQUE(p) __asm__("" : "+r"(p))
#else
#define MHA__PREFETCH_L1(p) ((void)(p))
#define MHA__PREFETCH_L2(p) ((void)(p))
#define MHA__OPAQUE(p) ((void)(p))
#endif

/* Reads a float that is not needed yet, and must be there. What is only asked for, the CPU may drop,
   and its own prefetching does not learn from. */
#define MHA__TOUCH(p) ((void)*(const volatile float *)(p))

/* gcc -O3 vectorises the portable product along k, at a quarter of the speed it has along the
   16 columns. */
#if defined(__GNUC__) && !defined(__clang__)
#define MHA__SCALAR __attribute__((optimize("no-tree-loop-vectorize")))
#define MHA__UNROLL_SCALAR MHA__UNROLL
#else
#define MHA__SCALAR
#define MHA__UNROLL_SCALAR
#endif

/* Units of work are handed out by an atomic counter. Where there is none, each lane takes
   every n-th unit: same results, less even. */
#if (defined(__GNUC__) || defined(__clang__)) && \
    (!defined(__GCC_ATOMIC_POINTER_LOCK_FREE) || __GCC_ATOMIC_POINTER_LOCK_FREE == 2)
#define MHA__FETCH_ADD(p) __atomic_fetch_add((p), (size_t)1, __ATOMIC_RELAXED)
#define MHA__LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define MHA__STORE(p, x) __atomic_store_n((p), (x), __ATOMIC_RELEASE)
#elif defined(_MSC_VER) && defined(_WIN64)
#include <intrin.h>
#define MHA__FETCH_ADD(p) ((size_t)_InterlockedExchangeAdd64((volatile __int64 *)(p), 1))
#endif

#ifndef MHA__STORE
#define MHA__STORE(p, x) (*(p) = (x))
#endif
#if defined(MHA__X86)
#define MHA__PAUSE() _mm_pause()
#elif defined(__GNUC__) && (defined(__aarch64__) || (defined(__ARM_ARCH) && __ARM_ARCH >= 7))
#define MHA__PAUSE() __asm__ volatile("yield")
#else
#define MHA__PAUSE() ((void)0)
#endif

#if defined(MHA_THREADS) && !defined(MHA_NO_MALLOC)
#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>
typedef HANDLE mha__thread;
typedef CRITICAL_SECTION mha__mutex;
typedef CONDITION_VARIABLE mha__cond;
#define MHA__THREAD_RESULT DWORD WINAPI
#define MHA__THREAD_START(t, f, arg) ((*(t) = CreateThread(NULL, 0, (f), (arg), 0, NULL)) != NULL)
#define MHA__THREAD_JOIN(t) (WaitForSingleObject((t), INFINITE), CloseHandle(t))
#define MHA__MUTEX_INIT(m) InitializeCriticalSection(m)
#define MHA__MUTEX_FREE(m) DeleteCriticalSection(m)
#define MHA__LOCK(m) EnterCriticalSection(m)
#define MHA__UNLOCK(m) LeaveCriticalSection(m)
#define MHA__COND_INIT(c) InitializeConditionVariable(c)
#define MHA__COND_FREE(c) ((void)(c))
#define MHA__WAIT(c, m) SleepConditionVariableCS((c), (m), INFINITE)
#define MHA__WAKE_ALL(c) WakeAllConditionVariable(c)
#else
#include <pthread.h>
#include <unistd.h>
typedef pthread_t mha__thread;
typedef pthread_mutex_t mha__mutex;
typedef pthread_cond_t mha__cond;
#define MHA__THREAD_RESULT void *
#define MHA__THREAD_START(t, f, arg) (pthread_create((t), NULL, (f), (arg)) == 0)
#define MHA__THREAD_JOIN(t) pthread_join((t), NULL)
#define MHA__MUTEX_INIT(m) pthread_mutex_init((m), NULL)
#define MHA__MUTEX_FREE(m) pthread_mutex_destroy(m)
#define MHA__LOCK(m) pthread_mutex_lock(m)
#define MHA__UNLOCK(m) pthread_mutex_unlock(m)
#define MHA__COND_INIT(c) pthread_cond_init((c), NULL)
#define MHA__COND_FREE(c) pthread_cond_destroy(c)
#define MHA__WAIT(c, m) pthread_cond_wait((c), (m))
#define MHA__WAKE_ALL(c) pthread_cond_broadcast(c)
#endif
#endif

/* ==== >>common =================================================================== */

/* Infinities and NaN are told by their bits: comparisons with them are folded away under
   -ffast-math, integers are not. */
static uint32_t mha__bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float mha__float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#define MHA__NINF 0xff800000u /* bits of -inf */
#define MHA__LOG2E 1.44269504088896340736
#define MHA__LN2 0.69314718055994530942

static int mha__is_finite(float x)
{
    return (mha__bits(x) & 0x7f800000u) != 0x7f800000u;
}

static int mha__is_zero(float x) /* NaN == 0 may be true under -ffast-math */
{
    return (mha__bits(x) & 0x7fffffffu) == 0;
}

static ptrdiff_t mha__min(ptrdiff_t a, ptrdiff_t b)
{
    return a < b ? a : b;
}

static ptrdiff_t mha__max(ptrdiff_t a, ptrdiff_t b)
{
    return a > b ? a : b;
}

static ptrdiff_t mha__div_up(ptrdiff_t a, ptrdiff_t b)
{
    return a / b + (a % b != 0);
}

/* Sizes are multiplied and added with saturation: what does not fit becomes MHA__TOO_BIG and
   stays it, so one test at the end is enough. */
#define MHA__TOO_BIG SIZE_MAX
#define MHA__BIGGEST (SIZE_MAX / 2) /* PTRDIFF_MAX: the largest object there can be */

MHA__APART size_t mha__mul(size_t a, size_t b)
{
    /* two sizes below 2^31, of 64 bits: no division needed */
    if ((a | b) < (size_t)1 << (4 * sizeof(size_t) - 1)) return a * b;
    return a != 0 && b > MHA__BIGGEST / a ? MHA__TOO_BIG : a * b;
}

static size_t mha__add(size_t a, size_t b)
{
    return a > MHA__BIGGEST || b > MHA__BIGGEST - a ? MHA__TOO_BIG : a + b;
}

/* bytes of a float tensor [a,b,c,d]; sizes are not negative */
MHA__APART size_t mha__floats(ptrdiff_t a, ptrdiff_t b, ptrdiff_t c, ptrdiff_t d)
{
    /* four sizes below 2^15, of 64 bits, are no more than 2^62 bytes: no division needed */
    const ptrdiff_t limit = (ptrdiff_t)1 << (2 * sizeof(size_t) - 1);
    if ((a | b | c | d) < limit) return (size_t)(a * b * c * d) * sizeof(float);
    return mha__mul(mha__mul(mha__mul((size_t)a, (size_t)b), mha__mul((size_t)c, (size_t)d)),
                    sizeof(float));
}

/* Takes bytes from the end of a plan of *total bytes, in whole cache lines; gives the offset. */
MHA__APART size_t mha__take(size_t *total, size_t bytes)
{
    size_t at = *total;
    *total = mha__add(at, mha__add(bytes, 63) / 64 * 64); /* too big stays too big */
    return at;
}

/* First multiple of 64 in a buffer. Plans start with 63 bytes for it. */
static char *mha__align(void *buffer)
{
    char *p = (char *)buffer;
    return p + (64 - (uintptr_t)p % 64) % 64;
}

/* Where an error sentence goes; at = null: nowhere. */
typedef struct mha__why {
    char *at;
    size_t left;
} mha__why;

static void mha__say(mha__why *why, const char *text)
{
    for (; why->at && why->left > 1 && *text; text++, why->left--) *why->at++ = *text;
    if (why->at && why->left) *why->at = 0;
}

/* Writes the sentence and returns the status. In text, @ stands for name and # for the next
   of the two numbers. */
static mha_status mha__fail(mha__why *why, mha_status status, const char *text, const char *name,
                            long long a, long long b)
{
    for (; why->at && *text; text++) {
        char piece[24];
        char *p = piece + sizeof piece - 1;
        unsigned long long u = a < 0 ? 0ull - (unsigned long long)a : (unsigned long long)a;
        *p = 0;
        if (*text == '@') {
            mha__say(why, name);
            continue;
        }
        if (*text == '#') {
            do *--p = (char)('0' + (int)(u % 10));
            while ((u /= 10) != 0);
            if (a < 0) *--p = '-';
            a = b;
        } else {
            *--p = *text;
        }
        mha__say(why, p);
    }
    return status;
}

MHA__APART mha__why mha__why_make(char *at, size_t size)
{
    mha__why why;
    why.at = size ? at : NULL;
    why.left = size;
    if (why.at) *why.at = 0;
    return why;
}

/* 2^f on [-1/2, 1/2] = 1 + f*(C1 + f*(C2 + ...)): minimax, relative error 2e-9 before rounding.
   Exactly 1 at 0, so that the largest score of a row has weight exactly 1. */
#define MHA__EXP2_C1 0.693147182f
#define MHA__EXP2_C2 0.240226477f
#define MHA__EXP2_C3 0.0555033237f
#define MHA__EXP2_C4 0.00961843692f
#define MHA__EXP2_C5 0.0013398875f
#define MHA__EXP2_C6 0.00015353362f

/* (2^f - 1) / f */
static float mha__poly(float f)
{
    float p = MHA__EXP2_C6;
    p = p * f + MHA__EXP2_C5;
    p = p * f + MHA__EXP2_C4;
    p = p * f + MHA__EXP2_C3;
    p = p * f + MHA__EXP2_C2;
    return p * f + MHA__EXP2_C1;
}

/* 2^x for x <= 0. Exactly 0 below -126.5 and for -inf; NaN gives NaN. */
static float mha__exp2(float x)
{
    uint32_t u = mha__bits(x);
    if (u > 0xc2fd0000u && u <= MHA__NINF) return 0.0f; /* negative floats order by their bits */
    if ((u & 0x7fffffffu) > 0x7f800000u) return x;
    {
        int n = (int)(x - 0.5f); /* to nearest, as x <= 0 */
        float f = x - (float)n;
        float p = mha__poly(f) * f + 1.0f;
        return p * mha__float((uint32_t)(n + 127) << 23);
    }
}

/* cap_out * tanh(...) as mha__shape says: with e = 2^t - 1 for t >= 0, tanh is e / (e + 2), and
   2^t - 1 = 2^n (2^f - 1) + (2^n - 1) loses nothing near 0. From t = 30 on tanh is 1. */
static float mha__cap(float s, float in, float out)
{
    if ((mha__bits(s) & 0x7fffffffu) > 0x7f800000u) return s; /* NaN */
    {
        float t = mha__float(mha__bits(s) & 0x7fffffffu) * in, f, p, q, e;
        int n;
        if (!(t < 30.0f)) t = 30.0f;
        n = (int)(t + 0.5f);
        f = t - (float)n;
        q = mha__float((uint32_t)(n + 127) << 23);
        p = mha__poly(f);
        e = n ? q * (p * f) + (q - 1.0f)
              : p * f; /* so that -ffast-math cannot add 1 and take it off */
        p = out * (e / (e + 2.0f));
        return mha__bits(s) >> 31 ? -p : p;
    }
}

/* IEEE half and bfloat16, by their bits. Masks instead of conditions, and inlined: else gcc does not
   vectorise it, and a layer with weights in F16 takes 2.6 times as long in portable C. */
MHA__INLINE float mha__from_f16(uint16_t h)
{
    uint32_t a = (uint32_t)(h & 0x7fffu) << 13, e = a & 0x0f800000u;
    /* denormal: (2^-14 + m * 2^-24) - 2^-14, a normal float */
    uint32_t low = mha__bits(mha__float(a + (113u << 23)) - 1.0f / 16384.0f);
    uint32_t is_low = 0u - (uint32_t)(e == 0), is_inf = 0u - (uint32_t)(e == 0x0f800000u);
    a += (112u << 23) + (is_inf & (112u << 23)); /* infinite and NaN stay so */
    return mha__float((uint32_t)(h & 0x8000u) << 16 | (a & ~is_low) | (low & is_low));
}

static uint16_t mha__to_f16(float x)
{
    uint32_t u = mha__bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu, shift, m, half;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65520 on: infinite */
    if (a >= 0x38800000u) {                                  /* from 2^-14 on: normal */
        a -= 112u << 23;
        return (uint16_t)(sign | ((a + 0xfffu + (a >> 13 & 1u)) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign; /* below 2^-25 */
    shift = 126 - (a >> 23);                    /* 14 .. 24 */
    m = (a & 0x7fffffu) | 0x800000u;
    half = 1u << (shift - 1);
    return (uint16_t)(sign | ((m + half - 1 + (m >> shift & 1u)) >> shift));
}

static float mha__from_bf16(uint16_t h)
{
    return mha__float((uint32_t)h << 16);
}

static uint16_t mha__to_bf16(float x)
{
    uint32_t u = mha__bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static size_t mha__type_size(mha_type type)
{
    return type == MHA_F32 ? 4 : type == MHA_INT8 ? 1 : 2;
}

/* The scale of n numbers, step apart, in INT8: the largest becomes 127. NaN if one is not finite,
   so that it shows. */
static float mha__int8_scale(const float *x, ptrdiff_t n, ptrdiff_t step)
{
    uint32_t most = 0;
    for (; n > 0; n--, x += step)
        if ((mha__bits(*x) & 0x7fffffffu) > most) most = mha__bits(*x) & 0x7fffffffu;
    if (most >= 0x7f800000u) return mha__float(0x7fc00000u);
    return mha__float(most) / 127.0f;
}

static signed char mha__to_int8(float x, float scale)
{
    float q = scale > 0.0f && mha__is_finite(scale) ? x / scale : 0.0f;
    if (q > 127.0f) q = 127.0f; /* where the scale is denormal */
    if (q < -127.0f) q = -127.0f;
    return (signed char)(q < 0.0f ? (int)(q - 0.5f) : (int)(q + 0.5f));
}

/* ==== >>kernels ==================================================================

   All the arithmetic is in a few inner loops. They know two shapes of matrix:

   panel  K x 16: K rows of 16 floats, one cache line each. The right operand: weights, keys
          (row = one of the d_k dims, column = key) and values (row = key, column = dim).
   tile   mr x N: ceil(N/16) blocks of mr rows of 16 floats. The left operand and the result.
          Block p, row i, column c is at [(p*mr + i)*16 + c]. A tile of results is laid out as
          a tile of operands: scores go from one product into the next as they lie.

   The contract that keeps results the same however the work is cut (threads, batch, chunks):
   every element of a product starts at zero or at what is there, and adds a[k]*b[k] for k = 0,
   1, 2, ... in that order, each step rounded the same way. Cutting k in two, doing one row or
   six, or adding terms where a is 0, then changes no bit but the sign of a zero, which does not
   reach what attention gives: see copy.

   mr is the tile height of an instruction set, from its register file. 16 columns a panel
   everywhere, so that packed weights and keys look the same on all of them. */

#define MHA__NR 16
#define MHA__MR_MAX 16

static const float mha__zeros[MHA__NR] = { 0 };
static const float mha__ones[MHA__MR_MAX] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };

/* What happens to a row of scores s[j], j = 0, 1, ... */
typedef struct mha__shape {
    float cap_in, cap_out; /* cap_out != 0: s = cap_out * tanh(cap_in / 2 * ln 2 * s) */
    float slope, first;    /* slope != 0: s = s + slope * |first + j| */
    const float *bias;     /* s = s + bias[j] * bias_mul, and -inf where bias[j] is; or null */
    float bias_mul;
    const unsigned char *allow; /* -inf where allow[j] is 0; or null */
} mha__shape;

/* Memory that is wanted soon, for a product to ask for between its multiply-adds: all of it before
   them would hold it up, as a CPU waits for no more than 10 to 16 lines at a time. A kernel may leave it
   alone, as the portable one does. */
#define MHA__WANTED 64

typedef struct mha__wanted {
    int n;          /* runs of lines */
    int at;         /* how many of them were asked for */
    int each;       /* how many are every 16 terms */
    ptrdiff_t step; /* floats from a line to the next */
    struct {
        const float *line;
        ptrdiff_t lines;
    } run[MHA__WANTED];
} mha__wanted;

/* How a CPU is asked for what comes of a stream of weights, keys or values. */
enum {
    MHA__ASKS_NOT,   /* it sees for itself what comes: Zen 4, and CPUs of which nothing is known */
    MHA__ASKS_PAGES, /* for the first lines of pages, as Intel's need it: see mha__want_pages and
                        MHA__TILES_AHEAD */
    MHA__ASKS_LINES  /* for every line, into L1, where there is more to do than to read: Zen 5. See
                        mha__fetch_near */
};

typedef struct mha__kernels {
    mha_isa isa;
    int mr;

    /* c [m, 16*np] = start * c + a [m,k] * b, for m <= mr rows.
       b: np panels, each b_panel floats after the one before; its rows b_row floats apart (16, or
       a stride of the caller's: then panels need not be packed). start: a factor per row; null
       means c starts at zero and is not read. Rows from m on are neither read nor written.
       wanted: lines to ask for meanwhile; or null. */
    void (*gemm)(int m, int np, int k, const float *a, const float *b, ptrdiff_t b_row,
                 ptrdiff_t b_panel, float *c, const float *start, mha__wanted *wanted);

    /* c [m, 16*np] = a [m,k] * b^T, as transpose and gemm would, for 16*np keys that are rows of k
       floats, b_row apart: q k^T where each key is used once. k is a multiple of 16. next: as many
       rows that are needed next, must be there and are fetched meanwhile, as asks says (MHA__ASKS_NOT,
       ...); or null. The function is null if there is none. */
    void (*dots)(int m, int np, int k, const float *a, const float *b, ptrdiff_t b_row,
                 const float *next, int asks, float *c);

    /* 1 if n floats, a multiple of 16, are all finite. */
    int (*finite)(ptrdiff_t n, const float *x);

    /* One step of the running softmax over m rows of np blocks of scores in units of log2:
           hi = max(top, max s);  alpha = 2^(top - hi);  s = 2^(s - hi);
           sum = alpha * sum + total of s;  top = hi
       -inf gives exactly 0 and NaN gives NaN. The total adds up 16 lanes over the blocks in
       order, then lanes c and c+8, c+4, c+2, c+1. */
    void (*softmax)(int m, int np, float *s, float *top, float *sum, float *alpha);

    /* One row of np blocks of scores, before softmax: cap, biases, exclusions, in this order, each
       if it is there. Returns 1 if a key is left. */
    int (*shape)(int np, float *s, const mha__shape *how);

    /* s = 2^(16 * (s - top)) * inv: final weights, once top and inv = 1/sum of a row are known,
       from scores in units of 16. */
    void (*weigh)(int m, int np, float *s, const float *top, const float *inv);

    /* m rows of np blocks of 16 floats, rows and blocks that far apart: to = mul * from + bias, with
       a factor per row, and a bias [16*np], or null: 0, which makes zeros positive. (Not what is
       rounded to zero only here.) */
    void (*copy)(int m, int np, const float *from, ptrdiff_t from_row, ptrdiff_t from_block,
                 float *to, ptrdiff_t to_row, ptrdiff_t to_block, const float *mul,
                 const float *bias);

    /* np blocks of 16 rows of 16 floats, step floats from one to the next in every row, plus a bias
       [16*np], or null: 0, as columns: to[n*to_block + 16*c + i] = row[i][n*step + c] + bias[16*n + c]. */
    void (*transpose)(int np, const float *const *row, ptrdiff_t step, const float *bias, float *to,
                      ptrdiff_t to_block);

    /* c [m, 16*np] times col [16*np], column by column. */
    void (*times)(int m, int np, float *c, const float *col);

    /* n rows of 16 numbers of a type other than F32, as floats. */
    void (*widen)(mha_type type, ptrdiff_t n, const void *from, float *to);

    /* gemm, as if b had been widened before, for panels of a type other than F32, b_row and b_panel
       numbers apart. Null if there is none (narrow_tiles is 0): then widen is used, which for a few
       rows writes and reads the floats once more than it has to. ahead: if not 0, what lies so many
       bytes after each line of b is asked for, meanwhile. */
    void (*narrow)(int m, int np, int k, const float *a, mha_type type, const void *b,
                   ptrdiff_t b_row, ptrdiff_t b_panel, ptrdiff_t ahead, float *c,
                   const float *start);

    /* Up to so many tiles of x, it is faster for weights than to widen them for all tiles at once.
       With int8 [2048,8192] on Zen 4, 2, 4, 6 and 12 rows are 2.3, 2.0, 1.5 and 1.3 times as fast
       with AVX-512, 24 1.1; with AVX2 2 and 4 are 1.4 and 1.5, 12 1.0, 24 only 0.9. For keys and
       values half as many: eight queries a key are 1.1 times as fast with AVX-512, slower with
       AVX2. */
    int narrow_tiles;

    /* 1: any number of rows is as fast as it should be, so tiles are cut evenly: 8 rows as 4 and 4,
       not 6 and 2. With AVX-512, 7 to 9 rows of x, or queries a key, are 4 to 12 % faster. Not with
       AVX2, whose additions wait for each other where rows are few: 13 rows would be 10 % slower. */
    int even;

    /* Not 0: gemm and narrow take one panel or two at a time. Where weights come from memory, they
       are given so many terms of each of four in turn, a multiple of 16. Panels of floats are then
       four streams, of which the CPU fetches what follows while it works on another; those of halves,
       of which two share a line, come from memory once for all rows. With AVX2 on Zen 4, 2, 4 and 6
       rows of x are 1.1, 1.3 and 1.2 times as fast at D = 768, 1.1, 1.6 and 1.5 times at 1024, at
       2048 1.4, 1.8 and 1.6 times, 16 rows 1.2 times; BF16 at 2048 1.2, 1.8, 1.5 times. With 32
       terms it is 0 to 15 % less. Weights that are in L3 pay 5 to 9 %. (One row takes four panels at
       a time anyway.) */
    int terms;

    int asks; /* MHA__ASKS_NOT, ... */
} mha__kernels;

static void mha__wanted_none(mha__wanted *w)
{
    w->n = w->at = w->each = 0;
    w->step = MHA__NR;
}

/* n rows of so many lines, row floats apart. What there is no room for is left out. */
MHA__INLINE void mha__want(mha__wanted *w, const float *from, ptrdiff_t row, ptrdiff_t n,
                           ptrdiff_t lines)
{
    ptrdiff_t i;
    if (w->at == w->n) w->at = w->n = 0;
    for (i = 0; i < n && w->n < MHA__WANTED; i++, w->n++) {
        w->run[w->n].line = from + i * row;
        w->run[w->n].lines = lines;
    }
}

/* A CPU fetches by itself what follows in a stream of memory, but many CPUs only up to the end of a
   page of 4 KiB: in the next they wait for some lines before they begin again. So while n floats of
   each of np streams, apart floats from each other, are multiplied, the first lines of each page that
   is two pages further on are wanted. From DRAM on Sapphire Rapids a loop that only reads is 1.35 times
   as fast for it, one query over 1024 keys of 12 heads 1.3 times, one row of x through weights of
   D = 2048 1.1 times, compact ones 1.3 times. (16 lines a page bring half as much.) On Zen 5 it is in
   the way: without it a token through a layer takes 0.83 times as long from L3, 0.82 to 0.95 from
   DRAM. So only some tables have it: MHA__ASKS_PAGES. */
#define MHA__PAGE 1024 /* floats */
#define MHA__PAGE_LINES 8
#define MHA__PAGES_AHEAD (2 * MHA__PAGE)

static void mha__want_pages(mha__wanted *w, const float *from, ptrdiff_t apart, int np, ptrdiff_t n)
{
    ptrdiff_t at, i;
    int p;
    for (at = 0; at < n; at += MHA__PAGE)
        for (p = 0; p < np; p++) {
            i = p * apart + at;
            i += (ptrdiff_t)((0 - (uintptr_t)(from + i)) / sizeof(float) % MHA__PAGE);
            if (i < p * apart + n) mha__want(w, from + i + MHA__PAGES_AHEAD, 0, 1, MHA__PAGE_LINES);
        }
}

/* Before a product of k terms with np panels, at most so many of them at a time: how many runs are
   asked for every 16 terms, so that the last ones are before its end. */
MHA__INLINE void mha__wanted_spread(mha__wanted *w, int k, int np, int most)
{
    ptrdiff_t times;
    if (!w || k < 1 || np < 1) return;
    times = ((ptrdiff_t)(k - 1) / MHA__NR + 1) * ((np - 1) / most + 1);
    w->each = (int)((w->n - w->at + times - 1) / times);
}

/* Before each 16 of them. */
MHA__INLINE void mha__wanted_ask(mha__wanted *w)
{
    int i;
    if (!w) return;
    for (i = w->each; i > 0 && w->at < w->n; i--, w->at++) {
        const float *line = w->run[w->at].line;
        ptrdiff_t left;
        for (left = w->run[w->at].lines; left > 0; left--, line += w->step) MHA__PREFETCH_L2(line);
    }
}

/* All at once. */
MHA__INLINE void mha__wanted_now(mha__wanted *w)
{
    w->each = w->n;
    mha__wanted_ask(w);
}

/* Before so many bytes of a stream are multiplied, with MHA__ASKS_LINES: asks for as many that are
   MHA__NEAR_AHEAD further on. Zen 5 reads a stream as fast as it can if there is little else to do, but
   waits where compact weights are to be widened: one row of x through those of D = 4096 is 1.07 (BF16)
   to 1.17 times (F16) as fast from DRAM for it, one query over cached keys 1.1 times from L3. Two
   threads, which DRAM limits, are between 0.95 (BF16) and 1.04. */
#define MHA__NEAR_AHEAD 8192

MHA__INLINE void mha__fetch_near(const void *from, ptrdiff_t bytes)
{
    const char *line = (const char *)from + MHA__NEAR_AHEAD;
    for (; bytes > 0; bytes -= 64, line += 64) MHA__PREFETCH_L1(line);
}

/* ==== >>scalar =================================================================== */

#define MHA__SCALAR_MR 4

static MHA__SCALAR void mha__gemm_scalar(int m, int np, int k, const float *a, const float *b,
                                         ptrdiff_t b_row, ptrdiff_t b_panel, float *c,
                                         const float *start, mha__wanted *wanted)
{
    int p, i, kk, j;
    (void)wanted;
    for (p = 0; p < np; p++, b += b_panel, c += MHA__SCALAR_MR * MHA__NR) {
        for (i = 0; i < m; i++) {
            float acc[MHA__NR];
            float *row = c + i * MHA__NR;
            for (j = 0; j < MHA__NR; j++) acc[j] = start ? row[j] * start[i] : 0.0f;
            for (kk = 0; kk < k; kk++) {
                float x =
                    a[((ptrdiff_t)(kk / MHA__NR) * MHA__SCALAR_MR + i) * MHA__NR + kk % MHA__NR];
                const float *y = b + kk * b_row;
                MHA__UNROLL_SCALAR
                for (j = 0; j < MHA__NR; j++) acc[j] += x * y[j];
            }
            for (j = 0; j < MHA__NR; j++) row[j] = acc[j];
        }
    }
}

/* Four keys at a time, or every addition waits for the one before it. */
static MHA__SCALAR void mha__dots_scalar(int m, int np, int k, const float *a, const float *b,
                                         ptrdiff_t b_row, const float *next, int asks, float *c)
{
    int i, j, kk, n;
    for (i = 0; i < m; i++)
        for (j = 0; j < np * MHA__NR; j += 4) {
            const float *row = b + j * b_row;
            float acc[4] = { 0 };
            for (kk = 0; kk < k; kk++) {
                float x =
                    a[((ptrdiff_t)(kk / MHA__NR) * MHA__SCALAR_MR + i) * MHA__NR + kk % MHA__NR];
                MHA__UNROLL_SCALAR
                for (n = 0; n < 4; n++) acc[n] += x * row[n * b_row + kk];
            }
            memcpy(c + (j / MHA__NR * MHA__SCALAR_MR + i) * MHA__NR + j % MHA__NR, acc, sizeof acc);
        }
    (void)next, (void)asks;
}

static int mha__finite_scalar(ptrdiff_t n, const float *x)
{
    uint32_t all = 0;
    for (; n > 0; n--, x++) all |= (mha__bits(*x) & 0x7f800000u) + 0x00800000u;
    return all >> 31 == 0; /* an exponent of all ones carries into bit 31 */
}

static void mha__softmax_scalar(int m, int np, float *s, float *top, float *sum, float *alpha)
{
    int p, i, j;
    for (i = 0; i < m; i++) {
        float total[MHA__NR] = { 0 };
        float hi = top[i];
        for (p = 0; p < np; p++) {
            const float *row = s + (p * MHA__SCALAR_MR + i) * MHA__NR;
            for (j = 0; j < MHA__NR; j++) hi = row[j] > hi ? row[j] : hi;
        }
        alpha[i] = mha__exp2(top[i] - hi);
        top[i] = hi;
        for (p = 0; p < np; p++) {
            float *row = s + (p * MHA__SCALAR_MR + i) * MHA__NR;
            for (j = 0; j < MHA__NR; j++) {
                row[j] = mha__exp2(row[j] - hi);
                total[j] += row[j];
            }
        }
        for (p = MHA__NR / 2; p > 0; p /= 2)
            for (j = 0; j < p; j++) total[j] += total[j + p];
        sum[i] = sum[i] * alpha[i] + total[0];
    }
}

static int mha__shape_scalar(int np, float *s, const mha__shape *how)
{
    int j, any = 0;
    for (j = 0; j < np * MHA__NR; j++) {
        float *x = s + j / MHA__NR * MHA__SCALAR_MR * MHA__NR + j % MHA__NR;
        if (how->cap_out != 0.0f) *x = mha__cap(*x, how->cap_in, how->cap_out);
        if (how->slope != 0.0f) {
            float dist = how->first + (float)j;
            *x += how->slope * (dist < 0.0f ? -dist : dist);
        }
        if (how->bias) *x += how->bias[j] * how->bias_mul;
        if ((how->allow && !how->allow[j]) || (how->bias && mha__bits(how->bias[j]) == MHA__NINF))
            *x = mha__float(MHA__NINF);
        else any = 1;
    }
    return any;
}

static void mha__weigh_scalar(int m, int np, float *s, const float *top, const float *inv)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR; j++) {
                float *x = s + (p * MHA__SCALAR_MR + i) * MHA__NR + j;
                *x = mha__exp2((*x - top[i]) * 16.0f) * inv[i];
            }
}

static void mha__copy_scalar(int m, int np, const float *from, ptrdiff_t from_row,
                             ptrdiff_t from_block, float *to, ptrdiff_t to_row, ptrdiff_t to_block,
                             const float *mul, const float *bias)
{
    int i, p, j;
    for (i = 0; i < m; i++)
        for (p = 0; p < np; p++) {
            const float *x = from + i * from_row + p * from_block;
            float *y = to + i * to_row + p * to_block;
            for (j = 0; j < MHA__NR; j++)
                y[j] = x[j] * mul[i] + (bias ? bias[p * MHA__NR + j] : 0.0f);
        }
}

static void mha__transpose_scalar(int np, const float *const *row, ptrdiff_t step,
                                  const float *bias, float *to, ptrdiff_t to_block)
{
    int n, i, c;
    for (n = 0; n < np; n++, to += to_block)
        for (i = 0; i < MHA__NR; i++)
            for (c = 0; c < MHA__NR; c++)
                to[c * MHA__NR + i] = row[i][n * step + c] + (bias ? bias[n * MHA__NR + c] : 0.0f);
}

static void mha__times_scalar(int m, int np, float *c, const float *col)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR; j++)
                c[(p * MHA__SCALAR_MR + i) * MHA__NR + j] *= col[p * MHA__NR + j];
}

/* Of copies that overlap nothing, 16 at a time, as compilers vectorise it then. */
static void mha__widen_scalar(mha_type type, ptrdiff_t n, const void *from, float *to)
{
    const char *at = (const char *)from;
    uint16_t half[MHA__NR];
    signed char byte[MHA__NR];
    int i;
    for (; n > 0; n--, to += MHA__NR) {
        if (type == MHA_INT8) {
            memcpy(byte, at, sizeof byte);
            at += sizeof byte;
            for (i = 0; i < MHA__NR; i++) to[i] = (float)byte[i];
            continue;
        }
        memcpy(half, at, sizeof half);
        at += sizeof half;
        if (type == MHA_F16)
            for (i = 0; i < MHA__NR; i++) to[i] = mha__from_f16(half[i]);
        else
            for (i = 0; i < MHA__NR; i++) to[i] = mha__from_bf16(half[i]);
    }
}

static const mha__kernels mha__scalar = { MHA_ISA_SCALAR,
                                          MHA__SCALAR_MR,
                                          mha__gemm_scalar,
                                          mha__dots_scalar,
                                          mha__finite_scalar,
                                          mha__softmax_scalar,
                                          mha__shape_scalar,
                                          mha__weigh_scalar,
                                          mha__copy_scalar,
                                          mha__transpose_scalar,
                                          mha__times_scalar,
                                          mha__widen_scalar,
                                          NULL,
                                          0,
                                          0,
                                          0,
                                          0 };

/* ==== >>avx2 ===================================================================== */

#ifdef MHA__X86

#define MHA__AVX2 MHA__TARGET("avx2,fma,f16c")
#define MHA__AVX2_MR 6

/* R rows times P panels, both constants where this is inlined: 2*R*P accumulators, which with
   2*P panel registers and a broadcast must fit in 16 registers. 6x1 is 99 % of peak in L1. */
MHA__INLINE MHA__AVX2 void mha__rows_avx2(const int R, const int P, int k, const float *a,
                                          const float *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                          float *c, const float *start, mha__wanted *wanted)
{
    __m256 acc[MHA__AVX2_MR][8], x, y[8];
    int i, p, kk, n;
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        x = start ? _mm256_broadcast_ss(start + i) : _mm256_setzero_ps();
        MHA__UNROLL
        for (p = 0; p < 2 * P; p++) {
            const float *at = c + (p / 2 * MHA__AVX2_MR + i) * MHA__NR + p % 2 * 8;
            acc[i][p] = start ? _mm256_mul_ps(_mm256_loadu_ps(at), x) : x;
        }
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX2_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        mha__wanted_ask(wanted);
        MHA__UNROLL4
        for (kk = 0; kk < n; kk++, a++, b += b_row) {
            MHA__UNROLL
            for (p = 0; p < 2 * P; p++) y[p] = _mm256_loadu_ps(b + p / 2 * b_panel + p % 2 * 8);
            MHA__UNROLL
            for (i = 0; i < R; i++) {
                x = _mm256_broadcast_ss(a + i * MHA__NR);
                MHA__UNROLL
                for (p = 0; p < 2 * P; p++) acc[i][p] = _mm256_fmadd_ps(x, y[p], acc[i][p]);
            }
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        MHA__UNROLL
        for (p = 0; p < 2 * P; p++)
            _mm256_storeu_ps(c + (p / 2 * MHA__AVX2_MR + i) * MHA__NR + p % 2 * 8, acc[i][p]);
    }
}

/* Two rows and two panels at a time. A function of its own, or clang keeps addresses on the stack. */
MHA__APART MHA__AVX2 void mha__pairs_avx2(int m, int k, const float *a, const float *b,
                                          ptrdiff_t b_row, ptrdiff_t b_panel, float *c,
                                          const float *start, mha__wanted *wanted)
{
    for (; m > 0; m -= 2, a += 2 * MHA__NR, c += 2 * MHA__NR, start = start ? start + 2 : NULL)
        mha__rows_avx2(2, 2, k, a, b, b_row, b_panel, c, start, wanted);
}

static MHA__AVX2 void mha__gemm_avx2(int m, int np, int k, const float *a, const float *b,
                                     ptrdiff_t b_row, ptrdiff_t b_panel, float *c,
                                     const float *start, mha__wanted *wanted)
{
    int did;
    mha__wanted_spread(wanted, k, np, m == 1 ? 4 : m == 2 ? 2 : 1);
    for (; np > 0; np -= did, b += did * b_panel, c += did * MHA__AVX2_MR * MHA__NR) {
        /* also four rows, if b is in place: the less often its rows are come back to, the faster they
           come from memory, 1.15 times at d = 128 */
        did = np >= 2 && (m == 2 || (m == 4 && b_row != MHA__NR)) ? 2 : 1;
        if (did == 2) {
            mha__pairs_avx2(m, k, a, b, b_row, b_panel, c, start, wanted);
            continue;
        }
        switch (m) {
        case 6: /* a stride known only at run time is one addition more: 6 % where 4 operations are
                   issued a cycle, nothing where 6 are */
            if (b_row == MHA__NR) mha__rows_avx2(6, 1, k, a, b, MHA__NR, b_panel, c, start, wanted);
            else mha__rows_avx2(6, 1, k, a, b, b_row, b_panel, c, start, wanted);
            break;
        case 5: mha__rows_avx2(5, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 4: mha__rows_avx2(4, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 3: mha__rows_avx2(3, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 2: mha__rows_avx2(2, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        default: /* one row: 4 panels at a time, or the additions wait for each other */
            if (np >= 4) mha__rows_avx2(1, did = 4, k, a, b, b_row, b_panel, c, start, wanted);
            else mha__rows_avx2(1, 1, k, a, b, b_row, b_panel, c, start, wanted);
        }
    }
}

/* Four dims of 8 keys that lie row by row, as columns: z[j] is dim j of all of them. Rows i and i+4
   share a register, as in mha__transpose_avx2. The row is opaque, or the addresses of 32 rows are
   kept, on the stack: with clang that takes up to three times as long. */
MHA__INLINE MHA__AVX2 void mha__columns_avx2(const float *row, ptrdiff_t b_row, __m256 *z)
{
    __m256 x[4], y[4];
    int i;
    MHA__OPAQUE(row);
    MHA__UNROLL
    for (i = 0; i < 4; i++)
        x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row + i * b_row)),
                                    _mm_loadu_ps(row + (i + 4) * b_row), 1);
    y[0] = _mm256_unpacklo_ps(x[0], x[1]);
    y[1] = _mm256_unpacklo_ps(x[2], x[3]);
    y[2] = _mm256_unpackhi_ps(x[0], x[1]);
    y[3] = _mm256_unpackhi_ps(x[2], x[3]);
    z[0] = _mm256_shuffle_ps(y[0], y[1], 0x44);
    z[1] = _mm256_shuffle_ps(y[0], y[1], 0xee);
    z[2] = _mm256_shuffle_ps(y[2], y[3], 0x44);
    z[3] = _mm256_shuffle_ps(y[2], y[3], 0xee);
}

/* Two lines of the keys to come, while two are used. Those of adjacent rows (a constant) are read,
   one after the other, as a stream, whose pages are asked for before that. (Not read but only asked
   for, they take 1.15 times as long from DRAM and from L3 on Sapphire Rapids.) Of others, a line of each
   row is asked for; row is their distance, or 0 if there are none. */
MHA__INLINE const float *mha__come(const int adjacent, const float *next, ptrdiff_t row)
{
    if (adjacent) {
        MHA__TOUCH(next);
        MHA__TOUCH(next + MHA__NR);
        if ((uintptr_t)(next + MHA__PAGES_AHEAD) / sizeof(float) % MHA__PAGE <
            MHA__PAGE_LINES * MHA__NR) {
            MHA__PREFETCH_L2(next + MHA__PAGES_AHEAD);
            MHA__PREFETCH_L2(next + MHA__PAGES_AHEAD + MHA__NR);
        }
        next += 2 * MHA__NR;
    } else {
        MHA__PREFETCH_L2(next);
        MHA__PREFETCH_L2(next + row);
        next += 2 * row;
    }
    MHA__OPAQUE(next);
    return next;
}

/* R rows times 16 keys, k in place. A whole line of each of 8 keys, then those of the other 8: where
   rows are a multiple of 4 KiB apart, 16 would not stay in L1 (1.5 times as fast from L3, 4 queries of
   d = 128); where they are not, it is 3 % faster, too. One row, four dims of all keys: else additions
   wait for each other. */
MHA__INLINE MHA__AVX2 void mha__dots_rows_avx2(const int R, const int adjacent, int k,
                                               const float *a, const float *b, ptrdiff_t b_row,
                                               const float *next, ptrdiff_t next_row, float *c)
{
    const int dims = R > 1 ? MHA__NR : 4;
    __m256 acc[4][2], z[4];
    int i, j, p, cc, at;
    MHA__UNROLL
    for (i = 0; i < R; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX2_MR - 1) * MHA__NR) {
        for (at = 0; at < MHA__NR; at += dims, a += dims, b += dims) {
            const float *row = b;
            MHA__UNROLL
            for (p = 0; p < 2; p++) {
                if (p) row += 8 * b_row;
                for (cc = 0; cc < dims; cc += 4) {
                    next = mha__come(adjacent, next, next_row);
                    mha__columns_avx2(row + cc, b_row, z);
                    MHA__UNROLL
                    for (j = 0; j < 4; j++) {
                        MHA__UNROLL
                        for (i = 0; i < R; i++)
                            acc[i][p] = _mm256_fmadd_ps(
                                _mm256_broadcast_ss(a + i * MHA__NR + cc + j), z[j], acc[i][p]);
                    }
                }
            }
        }
        if (!adjacent) next += MHA__NR - 16 * next_row;
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        _mm256_storeu_ps(c + i * MHA__NR, acc[i][0]);
        _mm256_storeu_ps(c + i * MHA__NR + 8, acc[i][1]);
    }
}

/* One row takes 32 keys at a time, or the additions wait for each other. (How many is no parameter
   of the one above: then clang 14 keeps acc in memory.) */
MHA__INLINE MHA__AVX2 void mha__dots_row_avx2(const int adjacent, int k, const float *a,
                                              const float *b, ptrdiff_t b_row, const float *next,
                                              ptrdiff_t next_row, float *c)
{
    __m256 acc[4], z[4];
    int j, p, cc;
    MHA__UNROLL
    for (p = 0; p < 4; p++) acc[p] = _mm256_setzero_ps();
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX2_MR - 1) * MHA__NR) {
        for (cc = 0; cc < MHA__NR; cc += 4, a += 4, b += 4) {
            const float *row = b;
            MHA__UNROLL
            for (p = 0; p < 4; p++) {
                if (p) row += 8 * b_row;
                next = mha__come(adjacent, next, next_row);
                mha__columns_avx2(row, b_row, z);
                MHA__UNROLL
                for (j = 0; j < 4; j++)
                    acc[p] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + j), z[j], acc[p]);
            }
        }
        if (!adjacent) next += MHA__NR - 32 * next_row;
    }
    MHA__UNROLL
    for (p = 0; p < 4; p++)
        _mm256_storeu_ps(c + p / 2 * MHA__AVX2_MR * MHA__NR + p % 2 * 8, acc[p]);
}

MHA__INLINE MHA__AVX2 void mha__dots_keys_avx2(const int adjacent, int m, int np, int k,
                                               const float *a, const float *b, ptrdiff_t b_row,
                                               const float *next, ptrdiff_t next_row, float *c)
{
    int did, rows, i;
    for (; np > 0; np -= did, b += did * MHA__NR * b_row, c += did * MHA__AVX2_MR * MHA__NR,
                   next += did * MHA__NR * next_row) {
        did = m == 1 && np >= 2 ? 2 : 1;
        for (i = 0; i < m; i += rows) {
            const float *x = a + i * MHA__NR;
            float *z = c + i * MHA__NR;
            rows = m == 6 ? 3 : m - i < 4 ? m - i : 4; /* 3 and 3 are 4 % faster than 4 and 2 */
            if (rows == 4) mha__dots_rows_avx2(4, adjacent, k, x, b, b_row, next, next_row, z);
            else if (rows == 3) mha__dots_rows_avx2(3, adjacent, k, x, b, b_row, next, next_row, z);
            else if (rows == 2) mha__dots_rows_avx2(2, adjacent, k, x, b, b_row, next, next_row, z);
            else if (did == 2) mha__dots_row_avx2(adjacent, k, x, b, b_row, next, next_row, z);
            else mha__dots_rows_avx2(1, adjacent, k, x, b, b_row, next, next_row, z);
        }
    }
}

/* Functions of their own, or addresses are kept on the stack. */
MHA__APART MHA__AVX2 void mha__dots_adjacent_avx2(int m, int np, int k, const float *a,
                                                  const float *b, const float *next, float *c)
{
    mha__dots_keys_avx2(1, m, np, k, a, b, k, next, k, c);
}

static MHA__AVX2 void mha__dots_avx2(int m, int np, int k, const float *a, const float *b,
                                     ptrdiff_t b_row, const float *next, int asks, float *c)
{
    (void)asks; /* what is best with AVX2 is so for all: see mha__come */
    if (next && b_row == k) mha__dots_adjacent_avx2(m, np, k, a, b, next, c);
    else mha__dots_keys_avx2(0, m, np, k, a, b, b_row, next ? next : a, next ? b_row : 0, c);
}

/* As mha__poly. */
MHA__INLINE MHA__AVX2 __m256 mha__poly_avx2(__m256 f)
{
    __m256 p = _mm256_set1_ps(MHA__EXP2_C6);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(MHA__EXP2_C5));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(MHA__EXP2_C4));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(MHA__EXP2_C3));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(MHA__EXP2_C2));
    return _mm256_fmadd_ps(p, f, _mm256_set1_ps(MHA__EXP2_C1));
}

/* 2^x for x <= 0 as mha__exp2. The factor 2^n is made of an integer held at -127, whose bits are
   those of 0.0: it underflows to exactly 0 without a comparison. For x = -inf, x - n is NaN. */
MHA__INLINE MHA__AVX2 __m256 mha__exp2_avx2(__m256 x)
{
    __m256i gone = _mm256_cmpeq_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(-0x00800000));
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i e = _mm256_max_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(-127));
    __m256 f = _mm256_sub_ps(x, n), p;
    p = _mm256_fmadd_ps(mha__poly_avx2(f), f, _mm256_set1_ps(1.0f));
    e = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(e));
    return _mm256_castsi256_ps(_mm256_andnot_si256(gone, _mm256_castps_si256(p)));
}

static MHA__AVX2 int mha__finite_avx2(ptrdiff_t n, const float *x)
{
    const __m256i ones = _mm256_set1_epi32(0x7f800000), one = _mm256_set1_epi32(0x00800000);
    __m256i all = _mm256_setzero_si256();
    for (; n > 0; n -= 8, x += 8) {
        __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x));
        all = _mm256_or_si256(all, _mm256_add_epi32(_mm256_and_si256(bits, ones), one));
    }
    return _mm256_movemask_ps(_mm256_castsi256_ps(all)) == 0;
}

/* The largest score of every row first: a row at a time, its exponentials would wait for it, 2 to 3 %
   of attention at 128 keys. */
static MHA__AVX2 void mha__softmax_avx2(int m, int np, float *s, float *top, float *sum,
                                        float *alpha)
{
    float was[8] = { 0 }, total[8];
    int p, i;
    for (i = 0; i < m; i++) {
        __m256 h0 = _mm256_broadcast_ss(top + i), h1 = h0;
        __m128 h;
        for (p = 0; p < np; p++) {
            const float *at = s + (p * MHA__AVX2_MR + i) * MHA__NR;
            h0 = _mm256_max_ps(_mm256_loadu_ps(at), h0);
            h1 = _mm256_max_ps(_mm256_loadu_ps(at + 8), h1);
        }
        h0 = _mm256_max_ps(h0, h1);
        h = _mm_max_ps(_mm256_castps256_ps128(h0), _mm256_extractf128_ps(h0, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        h = _mm_max_ss(h, _mm_movehdup_ps(h));
        was[i] = top[i] - _mm_cvtss_f32(h);
        _mm_store_ss(top + i, h);
    }
    for (i = 0; i < m; i++) {
        __m256 h = _mm256_broadcast_ss(top + i), t0 = _mm256_setzero_ps(), t1 = t0;
        __m128 t;
        for (p = 0; p < np; p++) {
            float *at = s + (p * MHA__AVX2_MR + i) * MHA__NR;
            __m256 e0 = mha__exp2_avx2(_mm256_sub_ps(_mm256_loadu_ps(at), h));
            __m256 e1 = mha__exp2_avx2(_mm256_sub_ps(_mm256_loadu_ps(at + 8), h));
            _mm256_storeu_ps(at, e0);
            _mm256_storeu_ps(at + 8, e1);
            t0 = _mm256_add_ps(t0, e0);
            t1 = _mm256_add_ps(t1, e1);
        }
        t0 = _mm256_add_ps(t0, t1);
        t = _mm_add_ps(_mm256_castps256_ps128(t0), _mm256_extractf128_ps(t0, 1));
        t = _mm_add_ps(t, _mm_movehl_ps(t, t));
        t = _mm_add_ss(t, _mm_movehdup_ps(t));
        total[i] = _mm_cvtss_f32(t);
    }
    _mm256_storeu_ps(was, mha__exp2_avx2(_mm256_loadu_ps(was)));
    for (i = 0; i < m; i++) {
        alpha[i] = was[i];
        sum[i] = sum[i] * was[i] + total[i];
    }
}

/* As mha__cap. NaN is put back by its bits: under -ffast-math min may give its other operand. */
MHA__INLINE MHA__AVX2 __m256 mha__cap_avx2(__m256 s, float in, float out)
{
    __m256 minus = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
    __m256 a = _mm256_andnot_ps(minus, s);
    __m256i nan = _mm256_cmpgt_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(0x7f800000));
    __m256 t = _mm256_min_ps(_mm256_mul_ps(a, _mm256_set1_ps(in)), _mm256_set1_ps(30.0f));
    __m256 n = _mm256_round_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(t, n), q, e;
    q = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    e = _mm256_fmadd_ps(q, _mm256_mul_ps(mha__poly_avx2(f), f),
                        _mm256_sub_ps(q, _mm256_set1_ps(1.0f)));
    e = _mm256_div_ps(e, _mm256_add_ps(e, _mm256_set1_ps(2.0f)));
    e = _mm256_or_ps(_mm256_mul_ps(e, _mm256_set1_ps(out)), _mm256_and_ps(s, minus));
    return _mm256_blendv_ps(e, s, _mm256_castsi256_ps(nan));
}

static MHA__AVX2 int mha__shape_avx2(int np, float *s, const mha__shape *how)
{
    const __m256i ninf = _mm256_set1_epi32(-0x00800000), zero = _mm256_setzero_si256();
    const __m256 minus = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
    __m256 dist = _mm256_add_ps(_mm256_set1_ps(how->first),
                                _mm256_cvtepi32_ps(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
    int j, any = 0;
    for (j = 0; j < np * MHA__NR; j += 8) {
        float *at = s + j / MHA__NR * MHA__AVX2_MR * MHA__NR + j % MHA__NR;
        __m256 x = _mm256_loadu_ps(at);
        __m256i gone = zero;
        if (how->cap_out != 0.0f) x = mha__cap_avx2(x, how->cap_in, how->cap_out);
        if (how->slope != 0.0f) {
            x = _mm256_fmadd_ps(_mm256_set1_ps(how->slope), _mm256_andnot_ps(minus, dist), x);
            dist = _mm256_add_ps(dist, _mm256_set1_ps(8.0f));
        }
        if (how->bias) {
            __m256 b = _mm256_loadu_ps(how->bias + j);
            x = _mm256_fmadd_ps(b, _mm256_set1_ps(how->bias_mul), x);
            gone = _mm256_cmpeq_epi32(_mm256_castps_si256(b), ninf);
        }
        if (how->allow) {
            __m256i a = _mm256_cvtepu8_epi32(
                _mm_loadl_epi64((const __m128i *)(const void *)(how->allow + j)));
            gone = _mm256_or_si256(gone, _mm256_cmpeq_epi32(a, zero));
        }
        any |= _mm256_movemask_epi8(gone) != -1;
        x = _mm256_blendv_ps(x, _mm256_castsi256_ps(ninf), _mm256_castsi256_ps(gone));
        _mm256_storeu_ps(at, x);
    }
    return any;
}

static MHA__AVX2 void mha__weigh_avx2(int m, int np, float *s, const float *top, const float *inv)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR; j += 8) {
                float *at = s + (p * MHA__AVX2_MR + i) * MHA__NR + j;
                __m256 x = _mm256_sub_ps(_mm256_loadu_ps(at), _mm256_broadcast_ss(top + i));
                x = mha__exp2_avx2(_mm256_mul_ps(x, _mm256_set1_ps(16.0f)));
                x = _mm256_mul_ps(x, _mm256_broadcast_ss(inv + i));
                _mm256_storeu_ps(at, x);
            }
}

static MHA__AVX2 void mha__copy_avx2(int m, int np, const float *from, ptrdiff_t from_row,
                                     ptrdiff_t from_block, float *to, ptrdiff_t to_row,
                                     ptrdiff_t to_block, const float *mul, const float *bias)
{
    const float *add = bias ? bias : mha__zeros;
    const ptrdiff_t add_block = bias ? MHA__NR : 0;
    int i, p;
    for (i = 0; i < m; i++) {
        __m256 f = _mm256_broadcast_ss(mul + i);
        if (i) from += from_row, to += to_row; /* of one row, that could be anything */
        for (p = 0; p < np; p++) {
            const float *x = from + p * from_block, *b = add + p * add_block;
            float *y = to + p * to_block;
            _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_loadu_ps(x), f, _mm256_loadu_ps(b)));
            _mm256_storeu_ps(y + 8,
                             _mm256_fmadd_ps(_mm256_loadu_ps(x + 8), f, _mm256_loadu_ps(b + 8)));
        }
    }
}

/* in blocks of 8x8. Rows i and i+4 share a register, put there by the loads, so that the rest
   stays within 128-bit halves: two shuffles a register instead of three. */
static MHA__AVX2 void mha__transpose_avx2(int np, const float *const *row, ptrdiff_t step,
                                          const float *bias, float *to, ptrdiff_t to_block)
{
    int n, r, c, i;
    for (n = 0; n < 4 * np; n++) { /* four columns */
        ptrdiff_t at = n / 4 * step + n % 4 * 4;
        float *col = to + n / 4 * to_block + n % 4 * 4 * MHA__NR;
        __m256 x[4], y[4], b = _mm256_setzero_ps();
        if (bias) b = _mm256_broadcast_ps((const __m128 *)(const void *)(bias + 4 * n));
        for (r = 0; r < MHA__NR; r += 8) {
            MHA__UNROLL
            for (i = 0; i < 4; i++) {
                x[i] = _mm256_castps128_ps256(_mm_loadu_ps(row[r + i] + at));
                x[i] = _mm256_insertf128_ps(x[i], _mm_loadu_ps(row[r + i + 4] + at), 1);
                x[i] = _mm256_add_ps(x[i], b);
            }
            y[0] = _mm256_unpacklo_ps(x[0], x[1]);
            y[1] = _mm256_unpackhi_ps(x[0], x[1]);
            y[2] = _mm256_unpacklo_ps(x[2], x[3]);
            y[3] = _mm256_unpackhi_ps(x[2], x[3]);
            for (c = 0; c < 2; c++) {
                _mm256_storeu_ps(col + 2 * c * MHA__NR + r,
                                 _mm256_shuffle_ps(y[c], y[c + 2], 0x44));
                _mm256_storeu_ps(col + (2 * c + 1) * MHA__NR + r,
                                 _mm256_shuffle_ps(y[c], y[c + 2], 0xee));
            }
        }
    }
}

/* 8 numbers of that type, a constant where this is inlined, as floats. */
MHA__INLINE MHA__AVX2 __m256 mha__load_avx2(const mha_type type, const char *at)
{
    if (type == MHA_F16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)at));
    if (type == MHA_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)at)), 16));
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at)));
}

MHA__INLINE MHA__AVX2 void mha__widen_rows_avx2(const mha_type type, ptrdiff_t n, const char *at,
                                                float *to)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2;
    for (n *= 2; n > 0; n--, at += 8 * size, to += 8)
        _mm256_storeu_ps(to, mha__load_avx2(type, at));
}

static MHA__AVX2 void mha__widen_avx2(mha_type type, ptrdiff_t n, const void *from, float *to)
{
    const char *at = (const char *)from;
    if (type == MHA_F16) mha__widen_rows_avx2(MHA_F16, n, at, to);
    else if (type == MHA_BF16) mha__widen_rows_avx2(MHA_BF16, n, at, to);
    else mha__widen_rows_avx2(MHA_INT8, n, at, to);
}

static MHA__AVX2 void mha__times_avx2(int m, int np, float *c, const float *col)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (j = 0; j < MHA__NR; j += 8) {
            __m256 by = _mm256_loadu_ps(col + p * MHA__NR + j);
            for (i = 0; i < m; i++) {
                float *at = c + (p * MHA__AVX2_MR + i) * MHA__NR + j;
                _mm256_storeu_ps(at, _mm256_mul_ps(_mm256_loadu_ps(at), by));
            }
        }
}

/* Asks for rows of so many bytes, of panels that far apart. */
MHA__INLINE void mha__ask(const char *at, ptrdiff_t panel, int panels, ptrdiff_t bytes)
{
    ptrdiff_t c;
    int p;
    for (p = 0; p < panels; p++)
        for (c = 0; c < bytes; c += 64) MHA__PREFETCH_L2(at + p * panel + c);
}

/* One row and four panels, the type a constant. */
MHA__INLINE MHA__AVX2 void mha__narrow_row_avx2(const mha_type type, int k, const float *a,
                                                const char *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                                ptrdiff_t ahead, float *c, const float *start)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2, panel = b_panel * size;
    __m256 acc[8], x = start ? _mm256_broadcast_ss(start) : _mm256_setzero_ps();
    int p, kk, n;
    MHA__UNROLL
    for (p = 0; p < 8; p++) {
        const float *at = c + p / 2 * MHA__AVX2_MR * MHA__NR + p % 2 * 8;
        acc[p] = start ? _mm256_mul_ps(_mm256_loadu_ps(at), x) : x;
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX2_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        if (ahead) mha__ask(b + ahead, panel, 4, n * b_row * size);
        for (kk = 0; kk < n; kk++, a++, b += b_row * size) {
            x = _mm256_broadcast_ss(a);
            MHA__UNROLL
            for (p = 0; p < 8; p++)
                acc[p] = _mm256_fmadd_ps(
                    x, mha__load_avx2(type, b + p / 2 * panel + p % 2 * 8 * size), acc[p]);
        }
    }
    MHA__UNROLL
    for (p = 0; p < 8; p++)
        _mm256_storeu_ps(c + p / 2 * MHA__AVX2_MR * MHA__NR + p % 2 * 8, acc[p]);
}

/* A function of its own, or addresses are kept on the stack. */
MHA__APART MHA__AVX2 void mha__narrow_1x4_avx2(int k, const float *a, mha_type type, const char *b,
                                               ptrdiff_t b_row, ptrdiff_t b_panel, ptrdiff_t ahead,
                                               float *c, const float *start)
{
    if (type == MHA_F16) mha__narrow_row_avx2(MHA_F16, k, a, b, b_row, b_panel, ahead, c, start);
    else if (type == MHA_BF16)
        mha__narrow_row_avx2(MHA_BF16, k, a, b, b_row, b_panel, ahead, c, start);
    else mha__narrow_row_avx2(MHA_INT8, k, a, b, b_row, b_panel, ahead, c, start);
}

/* R rows and one panel, in halves. */
MHA__INLINE MHA__AVX2 void mha__narrow_rows_avx2(const int R, int k, const float *a, mha_type type,
                                                 const char *b, ptrdiff_t b_row, ptrdiff_t ahead,
                                                 float *c, const float *start)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2;
    __m256 acc[4][2], x, y;
    int i, p, kk, n;
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        x = start ? _mm256_broadcast_ss(start + i) : _mm256_setzero_ps();
        MHA__UNROLL
        for (p = 0; p < 2; p++)
            acc[i][p] = start ? _mm256_mul_ps(_mm256_loadu_ps(c + i * MHA__NR + p * 8), x) : x;
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX2_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        if (ahead) mha__ask(b + ahead, 0, 1, n * b_row * size);
        for (kk = 0; kk < n; kk++, a++, b += b_row * size) {
            MHA__UNROLL
            for (p = 0; p < 2; p++) {
                y = mha__load_avx2(type, b + p * 8 * size);
                MHA__UNROLL
                for (i = 0; i < R; i++)
                    acc[i][p] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + i * MHA__NR), y, acc[i][p]);
            }
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        MHA__UNROLL
        for (p = 0; p < 2; p++) _mm256_storeu_ps(c + i * MHA__NR + p * 8, acc[i][p]);
    }
}

/* The type a constant, or gcc asks for it in the inner loop: 1.2 to 1.4 times as long. */
MHA__APART MHA__AVX2 void mha__narrow_4x1_avx2(int k, const float *a, mha_type type, const char *b,
                                               ptrdiff_t b_row, ptrdiff_t ahead, float *c,
                                               const float *start)
{
    if (type == MHA_F16) mha__narrow_rows_avx2(4, k, a, MHA_F16, b, b_row, ahead, c, start);
    else if (type == MHA_BF16) mha__narrow_rows_avx2(4, k, a, MHA_BF16, b, b_row, ahead, c, start);
    else mha__narrow_rows_avx2(4, k, a, MHA_INT8, b, b_row, ahead, c, start);
}

static MHA__AVX2 void mha__narrow_avx2(int m, int np, int k, const float *a, mha_type type,
                                       const void *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                       ptrdiff_t ahead, float *c, const float *start)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2;
    /* panels that follow each other are one stream here, which the CPU fetches ahead by itself */
    const ptrdiff_t rows_ahead = b_panel == (ptrdiff_t)k * MHA__NR ? 0 : ahead;
    const char *at = (const char *)b;
    int did, i, rows, p;
    for (; np > 0; np -= did, at += did * b_panel * size, c += did * MHA__AVX2_MR * MHA__NR) {
        did = np >= 4 ? 4 : 1;
        for (i = 0; i < m; i += rows) {
            const float *x = a + i * MHA__NR, *first = start ? start + i : NULL;
            float *z = c + i * MHA__NR;
            rows = m - i >= 4 ? 4 : 1;
            for (p = 0; p < did && rows == 4; p++)
                mha__narrow_4x1_avx2(k, x, type, at + p * b_panel * size, b_row, rows_ahead,
                                     z + p * MHA__AVX2_MR * MHA__NR, first);
            if (rows == 4) continue;
            if (did == 1) mha__narrow_rows_avx2(1, k, x, type, at, b_row, ahead, z, first);
            else mha__narrow_1x4_avx2(k, x, type, at, b_row, b_panel, ahead, z, first);
        }
    }
}

/* By asks. */
#define MHA__AVX2_TABLE(asks) \
    { \
        MHA_ISA_AVX2, MHA__AVX2_MR, mha__gemm_avx2, mha__dots_avx2, mha__finite_avx2, \
            mha__softmax_avx2, mha__shape_avx2, mha__weigh_avx2, mha__copy_avx2, \
            mha__transpose_avx2, mha__times_avx2, mha__widen_avx2, mha__narrow_avx2, 2, 0, \
            MHA__NR, asks \
    }
static const mha__kernels mha__avx2[] = { MHA__AVX2_TABLE(MHA__ASKS_NOT),
                                          MHA__AVX2_TABLE(MHA__ASKS_PAGES),
                                          MHA__AVX2_TABLE(MHA__ASKS_LINES) };

/* ==== >>avx512 =================================================================== */

/* g++ 12 warns of its own headers: _mm512_undefined_ps is "used uninitialized" when inlined. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MHA__AVX512 MHA__TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define MHA__AVX512_MR 6 /* that of AVX2, some of whose kernels serve here too */

/* As mha__rows_avx2 with one register a panel. 6x4 takes 29 of 32 registers. */
MHA__INLINE MHA__AVX512 void mha__rows_avx512(const int R, const int P, int k, const float *a,
                                              const float *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                              float *c, const float *start, mha__wanted *wanted)
{
    __m512 acc[MHA__AVX512_MR][8], x, y[8];
    int i, p, kk, n;
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        x = _mm512_set1_ps(start ? start[i] : 0.0f);
        MHA__UNROLL
        for (p = 0; p < P; p++) {
            const float *at = c + (p * MHA__AVX512_MR + i) * MHA__NR;
            acc[i][p] = start ? _mm512_mul_ps(_mm512_loadu_ps(at), x) : x;
        }
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX512_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        mha__wanted_ask(wanted);
        for (kk = 0; kk < n; kk++, a++, b += b_row) {
            MHA__UNROLL
            for (p = 0; p < P; p++) y[p] = _mm512_loadu_ps(b + p * b_panel);
            MHA__UNROLL
            for (i = 0; i < R; i++) {
                x = _mm512_set1_ps(a[i * MHA__NR]);
                MHA__UNROLL
                for (p = 0; p < P; p++) acc[i][p] = _mm512_fmadd_ps(x, y[p], acc[i][p]);
            }
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        MHA__UNROLL
        for (p = 0; p < P; p++) _mm512_storeu_ps(c + (p * MHA__AVX512_MR + i) * MHA__NR, acc[i][p]);
    }
}

static MHA__AVX512 void mha__gemm_avx512(int m, int np, int k, const float *a, const float *b,
                                         ptrdiff_t b_row, ptrdiff_t b_panel, float *c,
                                         const float *start, mha__wanted *wanted)
{
    int did;
    mha__wanted_spread(wanted, k, np, 4);
    for (; np > 0; np -= did, b += did * b_panel, c += did * MHA__AVX512_MR * MHA__NR) {
        /* d = 32 has two: six rows of one would be half as fast where two are multiplied a cycle */
        did = np >= 4 ? 4 : np >= 2 && m == 6 ? 2 : 1;
        switch (did * 8 + m) {
        case 38: mha__rows_avx512(6, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 37: mha__rows_avx512(5, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 36: mha__rows_avx512(4, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 35: mha__rows_avx512(3, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 34: mha__rows_avx512(2, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 33: mha__rows_avx512(1, 4, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 22: mha__rows_avx512(6, 2, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 14: mha__rows_avx512(6, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        case 12: mha__rows_avx512(4, 1, k, a, b, b_row, b_panel, c, start, wanted); break;
        default: /* few panels of few rows: AVX2's products are as fast on Zen 4 */
            mha__gemm_avx2(m, did = np, k, a, b, b_row, b_panel, c, start, wanted);
        }
    }
}

/* As mha__poly, of n registers, step by step: each step of one waits for the one before. */
MHA__INLINE MHA__AVX512 void mha__poly_avx512(const int n, const __m512 *f, __m512 *p)
{
    const float c[5] = { MHA__EXP2_C5, MHA__EXP2_C4, MHA__EXP2_C3, MHA__EXP2_C2, MHA__EXP2_C1 };
    int i, j;
    MHA__UNROLL
    for (i = 0; i < n; i++) p[i] = _mm512_set1_ps(MHA__EXP2_C6);
    MHA__UNROLL
    for (j = 0; j < 5; j++) {
        MHA__UNROLL
        for (i = 0; i < n; i++) p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(c[j]));
    }
}

/* As mha__exp2, of n registers. reduce gives x - round(x), 0 for -inf; scalef by -inf gives 0. Results
   below 2^-126 are not flushed here: they are denormal, and exact to one bit of those. */
MHA__INLINE MHA__AVX512 void mha__exp2_avx512(const int n, __m512 *x)
{
    __m512 f[4], p[4];
    int i;
    MHA__UNROLL
    for (i = 0; i < n; i++)
        f[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    mha__poly_avx512(n, f, p);
    MHA__UNROLL
    for (i = 0; i < n; i++) p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(1.0f));
    MHA__UNROLL
    for (i = 0; i < n; i++) x[i] = _mm512_scalef_ps(p[i], _mm512_sub_ps(x[i], f[i]));
}

/* n blocks of a row of scores, less h, become weights, which are added to t. */
MHA__INLINE MHA__AVX512 __m512 mha__softmax_blocks_avx512(const int n, float *s, __m512 h, __m512 t)
{
    __m512 x[4];
    int i;
    MHA__UNROLL
    for (i = 0; i < n; i++)
        x[i] = _mm512_sub_ps(_mm512_loadu_ps(s + i * MHA__AVX512_MR * MHA__NR), h);
    mha__exp2_avx512(n, x);
    MHA__UNROLL
    for (i = 0; i < n; i++) {
        _mm512_storeu_ps(s + i * MHA__AVX512_MR * MHA__NR, x[i]);
        t = _mm512_add_ps(t, x[i]);
    }
    return t;
}

static MHA__AVX512 void mha__softmax_avx512(int m, int np, float *s, float *top, float *sum,
                                            float *alpha)
{
    const __mmask8 rows = (__mmask8)((1 << m) - 1);
    const __m256 was = _mm256_maskz_loadu_ps(rows, top);
    __m256 hi, total = _mm256_setzero_ps(), a; /* a lane a row */
    int p, i;
    for (i = 0; i < m; i++) {
        __m512 h = _mm512_set1_ps(top[i]);
        for (p = 0; p < np; p++)
            h = _mm512_max_ps(_mm512_loadu_ps(s + (p * MHA__AVX512_MR + i) * MHA__NR), h);
        top[i] = _mm512_reduce_max_ps(h);
    }
    i = 0;
    do {
        __m512 h = _mm512_set1_ps(top[i]), t = _mm512_setzero_ps();
        __m256 t8;
        __m128 t4;
        float *at = s + i * MHA__NR;
        for (p = np; p >= 4; p -= 4, at += 4 * MHA__AVX512_MR * MHA__NR)
            t = mha__softmax_blocks_avx512(4, at, h, t);
        for (; p > 0; p--, at += MHA__AVX512_MR * MHA__NR)
            t = mha__softmax_blocks_avx512(1, at, h, t);
        t8 = _mm256_add_ps(_mm512_castps512_ps256(t), _mm512_extractf32x8_ps(t, 1));
        t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
        t4 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
        t4 = _mm_add_ss(t4, _mm_movehdup_ps(t4));
        total = _mm256_mask_broadcastss_ps(total, (__mmask8)(1 << i), t4);
    } while (++i < m);
    hi = _mm256_maskz_loadu_ps(rows, top);
    a = mha__exp2_avx2(_mm256_sub_ps(was, hi));
    total = _mm256_add_ps(_mm256_mul_ps(_mm256_maskz_loadu_ps(rows, sum), a), total);
    _mm256_mask_storeu_ps(alpha, rows, a);
    _mm256_mask_storeu_ps(sum, rows, total);
}

/* As mha__cap. */
MHA__INLINE MHA__AVX512 __m512 mha__cap_avx512(__m512 s, float in, float out)
{
    __m512i minus = _mm512_set1_epi32(INT32_MIN), bits = _mm512_castps_si512(s);
    __m512i a = _mm512_andnot_si512(minus, bits);
    __mmask16 nan = _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(0x7f800000));
    __m512 t = _mm512_min_ps(_mm512_mul_ps(_mm512_castsi512_ps(a), _mm512_set1_ps(in)),
                             _mm512_set1_ps(30.0f));
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 q, e;
    q = _mm512_scalef_ps(_mm512_set1_ps(1.0f), _mm512_sub_ps(t, f));
    mha__poly_avx512(1, &f, &e);
    e = _mm512_fmadd_ps(q, _mm512_mul_ps(e, f), _mm512_sub_ps(q, _mm512_set1_ps(1.0f)));
    e = _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2.0f)));
    e = _mm512_mul_ps(e, _mm512_set1_ps(out));
    e = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(e), _mm512_and_si512(minus, bits)));
    return _mm512_mask_blend_ps(nan, e, s);
}

static MHA__AVX512 int mha__shape_avx512(int np, float *s, const mha__shape *how)
{
    const __m512i ninf = _mm512_set1_epi32(-0x00800000);
    __m512 dist = _mm512_add_ps(_mm512_set1_ps(how->first),
                                _mm512_cvtepi32_ps(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                                     10, 11, 12, 13, 14, 15)));
    int p, any = 0;
    for (p = 0; p < np; p++) {
        float *at = s + p * MHA__AVX512_MR * MHA__NR;
        __m512 x = _mm512_loadu_ps(at);
        __mmask16 gone = 0;
        if (how->cap_out != 0.0f) x = mha__cap_avx512(x, how->cap_in, how->cap_out);
        if (how->slope != 0.0f) {
            x = _mm512_fmadd_ps(_mm512_set1_ps(how->slope), _mm512_abs_ps(dist), x);
            dist = _mm512_add_ps(dist, _mm512_set1_ps(16.0f));
        }
        if (how->bias) {
            __m512 b = _mm512_loadu_ps(how->bias + p * MHA__NR);
            x = _mm512_fmadd_ps(b, _mm512_set1_ps(how->bias_mul), x);
            gone = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(b), ninf);
        }
        if (how->allow)
            gone = (__mmask16)(gone |
                               _mm_cmpeq_epi8_mask(
                                   _mm_loadu_si128(
                                       (const __m128i *)(const void *)(how->allow + p * MHA__NR)),
                                   _mm_setzero_si128()));
        any |= gone != 0xffff;
        _mm512_storeu_ps(at, _mm512_mask_blend_ps(gone, x, _mm512_castsi512_ps(ninf)));
    }
    return any;
}

static MHA__AVX512 void mha__weigh_avx512(int m, int np, float *s, const float *top,
                                          const float *inv)
{
    int p, i;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++) {
            float *at = s + (p * MHA__AVX512_MR + i) * MHA__NR;
            __m512 x = _mm512_sub_ps(_mm512_loadu_ps(at), _mm512_set1_ps(top[i]));
            x = _mm512_mul_ps(x, _mm512_set1_ps(16.0f));
            mha__exp2_avx512(1, &x);
            _mm512_storeu_ps(at, _mm512_mul_ps(x, _mm512_set1_ps(inv[i])));
        }
}

/* As mha__load_avx2, 16 numbers. */
MHA__INLINE MHA__AVX512 __m512 mha__load_avx512(const mha_type type, const char *at)
{
    if (type == MHA_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
    if (type == MHA_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at)), 16));
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)at)));
}

/* R rows and four panels: as mha__narrow_rows_avx2. */
MHA__INLINE MHA__AVX512 void mha__narrow_rows_avx512(const int R, int k, const float *a,
                                                     mha_type type, const char *b, ptrdiff_t b_row,
                                                     ptrdiff_t b_panel, ptrdiff_t ahead, float *c,
                                                     const float *start)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2;
    __m512 acc[4][4], x, y;
    int i, p, kk, n;
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        x = _mm512_set1_ps(start ? start[i] : 0.0f);
        MHA__UNROLL
        for (p = 0; p < 4; p++) {
            const float *at = c + (p * MHA__AVX512_MR + i) * MHA__NR;
            acc[i][p] = start ? _mm512_mul_ps(_mm512_loadu_ps(at), x) : x;
        }
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__AVX512_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        if (ahead) mha__ask(b + ahead, b_panel * size, 4, n * b_row * size);
        for (kk = 0; kk < n; kk++, a++, b += b_row * size) {
            MHA__UNROLL
            for (p = 0; p < 4; p++) {
                const char *at = b + p * b_panel * size;
                if (type == MHA_F16) y = mha__load_avx512(MHA_F16, at);
                else if (type == MHA_BF16) y = mha__load_avx512(MHA_BF16, at);
                else y = mha__load_avx512(MHA_INT8, at);
                MHA__UNROLL
                for (i = 0; i < R; i++)
                    acc[i][p] = _mm512_fmadd_ps(_mm512_set1_ps(a[i * MHA__NR]), y, acc[i][p]);
            }
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        MHA__UNROLL
        for (p = 0; p < 4; p++) _mm512_storeu_ps(c + (p * MHA__AVX512_MR + i) * MHA__NR, acc[i][p]);
    }
}

/* A function of its own, or addresses are kept on the stack. Halves are AVX2's work, which on Zen 4
   converts twice as many a cycle. BF16 and INT8 are 1.1 and 1.2 times as fast here on Zen 5, as fast on
   Zen 4. */
MHA__APART MHA__AVX512 void mha__narrow_1x4_avx512(int k, const float *a, mha_type type,
                                                   const char *b, ptrdiff_t b_row,
                                                   ptrdiff_t b_panel, ptrdiff_t ahead, float *c,
                                                   const float *start)
{
    if (type == MHA_F16) mha__narrow_1x4_avx2(k, a, type, b, b_row, b_panel, ahead, c, start);
    else if (type == MHA_BF16)
        mha__narrow_rows_avx512(1, k, a, MHA_BF16, b, b_row, b_panel, ahead, c, start);
    else mha__narrow_rows_avx512(1, k, a, MHA_INT8, b, b_row, b_panel, ahead, c, start);
}

static MHA__AVX512 void mha__narrow_avx512(int m, int np, int k, const float *a, mha_type type,
                                           const void *b, ptrdiff_t b_row, ptrdiff_t b_panel,
                                           ptrdiff_t ahead, float *c, const float *start)
{
    const ptrdiff_t size = type == MHA_INT8 ? 1 : 2;
    const char *at = (const char *)b;
    int i, rows;
    for (; np >= 4; np -= 4, at += 4 * b_panel * size, c += 4 * MHA__AVX512_MR * MHA__NR)
        for (i = 0; i < m; i += rows) {
            const float *x = a + i * MHA__NR, *first = start ? start + i : NULL;
            float *z = c + i * MHA__NR;
            rows = m - i < 4 ? m - i : 4;
            if (rows == 4)
                mha__narrow_rows_avx512(4, k, x, type, at, b_row, b_panel, ahead, z, first);
            else if (rows == 3)
                mha__narrow_rows_avx512(3, k, x, type, at, b_row, b_panel, ahead, z, first);
            else if (rows == 2)
                mha__narrow_rows_avx512(2, k, x, type, at, b_row, b_panel, ahead, z, first);
            else mha__narrow_1x4_avx512(k, x, type, at, b_row, b_panel, ahead, z, first);
        }
    if (np) mha__narrow_avx2(m, np, k, a, type, at, b_row, b_panel, ahead, c, start);
}

/* P blocks of each row at a time. */
MHA__INLINE MHA__AVX512 void mha__copy_blocks_avx512(const int P, int m, const float *from,
                                                     ptrdiff_t from_row, ptrdiff_t from_block,
                                                     float *to, ptrdiff_t to_row,
                                                     ptrdiff_t to_block, const float *mul,
                                                     const float *bias)
{
    __m512 f, b[4];
    int i, p;
    MHA__UNROLL
    for (p = 0; p < P; p++) b[p] = bias ? _mm512_loadu_ps(bias + p * MHA__NR) : _mm512_setzero_ps();
    for (i = 0; i < m; i++) {
        if (i) from += from_row, to += to_row; /* of one row, that could be anything */
        f = _mm512_set1_ps(mul[i]);
        MHA__UNROLL
        for (p = 0; p < P; p++)
            _mm512_storeu_ps(to + p * to_block,
                             _mm512_fmadd_ps(_mm512_loadu_ps(from + p * from_block), f, b[p]));
    }
}

static MHA__AVX512 void mha__copy_avx512(int m, int np, const float *from, ptrdiff_t from_row,
                                         ptrdiff_t from_block, float *to, ptrdiff_t to_row,
                                         ptrdiff_t to_block, const float *mul, const float *bias)
{
    for (; np > 8 && m > 1; m--, mul++, from += from_row, to += to_row) /* long ones one by one */
        mha__copy_avx512(1, np, from, 0, from_block, to, 0, to_block, mul, bias);
    for (; np >= 4; np -= 4, from += 4 * from_block, to += 4 * to_block) {
        mha__copy_blocks_avx512(4, m, from, from_row, from_block, to, to_row, to_block, mul, bias);
        if (bias) bias += 4 * MHA__NR;
    }
    for (; np > 0; np--, from += from_block, to += to_block) {
        mha__copy_blocks_avx512(1, m, from, from_row, from_block, to, to_row, to_block, mul, bias);
        if (bias) bias += MHA__NR;
    }
}

static MHA__AVX512 int mha__finite_avx512(ptrdiff_t n, const float *x)
{
    __m512i top = _mm512_setzero_si512();
    for (; n > 0; n -= MHA__NR, x += MHA__NR)
        top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_set1_epi32(INT32_MAX),
                                                     _mm512_castps_si512(_mm512_loadu_ps(x))));
    return _mm512_cmpge_epi32_mask(top, _mm512_set1_epi32(0x7f800000)) == 0;
}

/* 16 rows of 16 floats become its columns: quarters of the rows first, four of which make one
   register, then as in mha__transpose_avx2. */
MHA__INLINE MHA__AVX512 void mha__turn_avx512(__m512 *x)
{
    __m512 y[4];
    int i;
    MHA__UNROLL
    for (i = 0; i < 4; i++) {
        y[0] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x44);
        y[1] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44);
        y[2] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee);
        y[3] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xee);
        x[i] = _mm512_shuffle_f32x4(y[0], y[1], 0x88);
        x[i + 4] = _mm512_shuffle_f32x4(y[0], y[1], 0xdd);
        x[i + 8] = _mm512_shuffle_f32x4(y[2], y[3], 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(y[2], y[3], 0xdd);
    }
    MHA__UNROLL
    for (i = 0; i < MHA__NR; i += 4) {
        y[0] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        y[2] = _mm512_unpacklo_ps(x[i + 2], x[i + 3]);
        y[3] = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        x[i] = _mm512_shuffle_ps(y[0], y[2], 0x44);
        x[i + 1] = _mm512_shuffle_ps(y[0], y[2], 0xee);
        x[i + 2] = _mm512_shuffle_ps(y[1], y[3], 0x44);
        x[i + 3] = _mm512_shuffle_ps(y[1], y[3], 0xee);
    }
}

/* R rows times 16 keys, k in place: a whole line of each key, turned in registers, then the next. Four
   queries a key are 1.3 times as fast on Zen 5 as with AVX2's, one is 1.02 to 1.1 times; clang's 1.3.
   Meanwhile as many lines of the keys to come are read or asked for, as in mha__come, one after each
   load: all of them first, it takes 1.15 times as long from DRAM. With MHA__ASKS_LINES nothing is read:
   adjacent keys a page further on, others as they come, are asked for into L1: from DRAM that is 1.2
   times as fast, from L3 1.03 times. */
MHA__INLINE MHA__AVX512 void mha__dots_rows_avx512(const int R, int adjacent, int lines, int k,
                                                   const float *a, const float *b, ptrdiff_t b_row,
                                                   const float *next, ptrdiff_t next_row, float *c)
{
    const ptrdiff_t step = adjacent ? MHA__NR : next_row;
    const int reads = adjacent && !lines;
    __m512 acc[MHA__AVX512_MR], x[MHA__NR];
    int i, j;
    if (adjacent && lines) next += MHA__PAGE;
    MHA__UNROLL
    for (i = 0; i < R; i++) acc[i] = _mm512_setzero_ps();
    for (; k > 0; k -= MHA__NR, a += MHA__AVX512_MR * MHA__NR, b += MHA__NR) {
        const float *row = b;
        MHA__UNROLL
        for (j = 0; j < MHA__NR; j++) {
            if (j) row += b_row, next += step;
            MHA__OPAQUE(row); /* or the addresses of all rows are kept, on the stack */
            MHA__OPAQUE(next);
            x[j] = _mm512_loadu_ps(row);
            if (reads) MHA__TOUCH(next);
            else if (lines) MHA__PREFETCH_L1(next);
            else MHA__PREFETCH_L2(next);
        }
        next += adjacent ? MHA__NR : MHA__NR - 15 * next_row;
        mha__turn_avx512(x);
        MHA__UNROLL
        for (j = 0; j < MHA__NR; j++) {
            MHA__UNROLL
            for (i = 0; i < R; i++)
                acc[i] = _mm512_fmadd_ps(_mm512_set1_ps(a[i * MHA__NR + j]), x[j], acc[i]);
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) _mm512_storeu_ps(c + i * MHA__NR, acc[i]);
}

static MHA__AVX512 void mha__dots_avx512(int m, int np, int k, const float *a, const float *b,
                                         ptrdiff_t b_row, const float *next, int asks, float *c)
{
    int adjacent = next && b_row == k, lines = asks == MHA__ASKS_LINES;
    ptrdiff_t row = next ? b_row : 0; /* nothing is next: a, again and again */
    if (adjacent && asks == MHA__ASKS_PAGES) {
        mha__wanted pages;
        mha__wanted_none(&pages);
        mha__want_pages(&pages, next, 0, 1, (ptrdiff_t)np * MHA__NR * k);
        mha__wanted_now(&pages);
    }
    if (!next) next = a;
    for (; np > 0; np--, b += MHA__NR * b_row, c += MHA__AVX512_MR * MHA__NR, next += MHA__NR * row)
        switch (m) {
        case 6: mha__dots_rows_avx512(6, adjacent, lines, k, a, b, b_row, next, row, c); break;
        case 5: mha__dots_rows_avx512(5, adjacent, lines, k, a, b, b_row, next, row, c); break;
        case 4: mha__dots_rows_avx512(4, adjacent, lines, k, a, b, b_row, next, row, c); break;
        case 3: mha__dots_rows_avx512(3, adjacent, lines, k, a, b, b_row, next, row, c); break;
        case 2: mha__dots_rows_avx512(2, adjacent, lines, k, a, b, b_row, next, row, c); break;
        default: mha__dots_rows_avx512(1, adjacent, lines, k, a, b, b_row, next, row, c);
        }
}

static MHA__AVX512 void mha__transpose_avx512(int np, const float *const *row, ptrdiff_t step,
                                              const float *bias, float *to, ptrdiff_t to_block)
{
    __m512 x[MHA__NR];
    ptrdiff_t at = 0;
    int i, n;
    for (n = 0; n < np; n++, at += step, to += to_block) {
        const __m512 b = bias ? _mm512_loadu_ps(bias + n * MHA__NR) : _mm512_setzero_ps();
        MHA__UNROLL
        for (i = 0; i < MHA__NR; i++) x[i] = _mm512_add_ps(_mm512_loadu_ps(row[i] + at), b);
        mha__turn_avx512(x);
        MHA__UNROLL
        for (i = 0; i < MHA__NR; i++) _mm512_storeu_ps(to + i * MHA__NR, x[i]);
    }
}

/* One row is AVX2's work on Zen 4, which multiplies 512 bits as two halves: weights come 1.04 to 1.08
   times as fast from DRAM if half a line is read at a time, from L3 0.98 times. */
static MHA__AVX512 void mha__gemm_zen4(int m, int np, int k, const float *a, const float *b,
                                       ptrdiff_t b_row, ptrdiff_t b_panel, float *c,
                                       const float *start, mha__wanted *wanted)
{
    if (m == 1) mha__gemm_avx2(m, np, k, a, b, b_row, b_panel, c, start, wanted);
    else mha__gemm_avx512(m, np, k, a, b, b_row, b_panel, c, start, wanted);
}

/* By asks. */
#define MHA__AVX512_TABLE(gemm, asks) \
    { \
        MHA_ISA_AVX512, MHA__AVX512_MR, gemm, mha__dots_avx512, mha__finite_avx512, \
            mha__softmax_avx512, mha__shape_avx512, mha__weigh_avx512, mha__copy_avx512, \
            mha__transpose_avx512, mha__times_avx2, mha__widen_avx2, mha__narrow_avx512, 4, 1, 0, \
            asks \
    }
static const mha__kernels mha__avx512[] = { MHA__AVX512_TABLE(mha__gemm_zen4, MHA__ASKS_NOT),
                                            MHA__AVX512_TABLE(mha__gemm_avx512, MHA__ASKS_PAGES),
                                            MHA__AVX512_TABLE(mha__gemm_avx512, MHA__ASKS_LINES) };

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif /* MHA__X86 */

/* ==== >>neon ===================================================================== */

#ifdef MHA__ARM64

#define MHA__NEON_MR 4

/* As mha__rows_avx2 with four registers a panel. 4x16 takes 21 of 32 registers; 6x16 would fit in
   29, but then gcc and clang hoist loads until accumulators go to the stack. */
MHA__INLINE void mha__rows_neon(const int R, int k, const float *a, const float *b, ptrdiff_t b_row,
                                float *c, const float *start, mha__wanted *wanted)
{
    float32x4_t acc[MHA__NEON_MR][4], x, y[4];
    int i, j, kk, n;
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        x = vdupq_n_f32(start ? start[i] : 0.0f);
        MHA__UNROLL
        for (j = 0; j < 4; j++)
            acc[i][j] = start ? vmulq_f32(vld1q_f32(c + i * MHA__NR + 4 * j), x) : x;
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__NEON_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        mha__wanted_ask(wanted);
        MHA__UNROLL4
        for (kk = 0; kk < n; kk++, a++, b += b_row) {
            MHA__UNROLL
            for (j = 0; j < 4; j++) y[j] = vld1q_f32(b + 4 * j);
            MHA__UNROLL
            for (i = 0; i < R; i++) {
                x = vld1q_dup_f32(a + i * MHA__NR);
                MHA__UNROLL
                for (j = 0; j < 4; j++) acc[i][j] = vfmaq_f32(acc[i][j], x, y[j]);
            }
        }
    }
    MHA__UNROLL
    for (i = 0; i < R; i++) {
        MHA__UNROLL
        for (j = 0; j < 4; j++) vst1q_f32(c + i * MHA__NR + 4 * j, acc[i][j]);
    }
}

/* One row, the accumulators by name: clang 14 leaves an array of one row on the stack. */
MHA__INLINE void mha__row_neon(int k, const float *a, const float *b, ptrdiff_t b_row, float *c,
                               const float *start, mha__wanted *wanted)
{
    float32x4_t x = vdupq_n_f32(start ? *start : 0.0f), s0 = x, s1 = x, s2 = x, s3 = x;
    int kk, n;
    if (start) {
        s0 = vmulq_f32(vld1q_f32(c), x);
        s1 = vmulq_f32(vld1q_f32(c + 4), x);
        s2 = vmulq_f32(vld1q_f32(c + 8), x);
        s3 = vmulq_f32(vld1q_f32(c + 12), x);
    }
    for (; k > 0; k -= MHA__NR, a += (MHA__NEON_MR - 1) * MHA__NR) {
        n = k < MHA__NR ? k : MHA__NR;
        mha__wanted_ask(wanted);
        for (kk = 0; kk < n; kk++, a++, b += b_row) {
            x = vld1q_dup_f32(a);
            s0 = vfmaq_f32(s0, x, vld1q_f32(b));
            s1 = vfmaq_f32(s1, x, vld1q_f32(b + 4));
            s2 = vfmaq_f32(s2, x, vld1q_f32(b + 8));
            s3 = vfmaq_f32(s3, x, vld1q_f32(b + 12));
        }
    }
    vst1q_f32(c, s0);
    vst1q_f32(c + 4, s1);
    vst1q_f32(c + 8, s2);
    vst1q_f32(c + 12, s3);
}

static void mha__gemm_neon(int m, int np, int k, const float *a, const float *b, ptrdiff_t b_row,
                           ptrdiff_t b_panel, float *c, const float *start, mha__wanted *wanted)
{
    mha__wanted_spread(wanted, k, np, 1);
    for (; np > 0; np--, b += b_panel, c += MHA__NEON_MR * MHA__NR) switch (m) {
        case 4: mha__rows_neon(4, k, a, b, b_row, c, start, wanted); break;
        case 3: mha__rows_neon(3, k, a, b, b_row, c, start, wanted); break;
        case 2: mha__rows_neon(2, k, a, b, b_row, c, start, wanted); break;
        default: mha__row_neon(k, a, b, b_row, c, start, wanted);
        }
}

/* As mha__poly. */
MHA__INLINE float32x4_t mha__poly_neon(float32x4_t f)
{
    float32x4_t p = vdupq_n_f32(MHA__EXP2_C6);
    p = vfmaq_f32(vdupq_n_f32(MHA__EXP2_C5), p, f);
    p = vfmaq_f32(vdupq_n_f32(MHA__EXP2_C4), p, f);
    p = vfmaq_f32(vdupq_n_f32(MHA__EXP2_C3), p, f);
    p = vfmaq_f32(vdupq_n_f32(MHA__EXP2_C2), p, f);
    return vfmaq_f32(vdupq_n_f32(MHA__EXP2_C1), p, f);
}

/* As mha__exp2_avx2. */
MHA__INLINE float32x4_t mha__exp2_neon(float32x4_t x)
{
    uint32x4_t gone = vceqq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(MHA__NINF));
    float32x4_t n = vrndnq_f32(x), f = vsubq_f32(x, n), p;
    int32x4_t e = vmaxq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(-127));
    p = vfmaq_f32(vdupq_n_f32(1.0f), mha__poly_neon(f), f);
    e = vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23);
    p = vmulq_f32(p, vreinterpretq_f32_s32(e));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(p), gone));
}

static int mha__finite_neon(ptrdiff_t n, const float *x)
{
    uint32x4_t all = vdupq_n_u32(0);
    for (; n > 0; n -= 4, x += 4)
        all = vorrq_u32(
            all, vaddq_u32(vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x)), vdupq_n_u32(0x7f800000u)),
                           vdupq_n_u32(0x00800000u)));
    return vmaxvq_u32(all) >> 31 == 0;
}

static void mha__softmax_neon(int m, int np, float *s, float *top, float *sum, float *alpha)
{
    int p, i, j;
    for (i = 0; i < m; i++) {
        float *row = s + i * MHA__NR, hi;
        float32x4_t h = vdupq_n_f32(top[i]), t[4], u;
        for (p = 0; p < np; p++)
            for (j = 0; j < 4; j++) {
                u = vld1q_f32(row + p * MHA__NEON_MR * MHA__NR + 4 * j);
                h = vbslq_f32(vcgtq_f32(u, h), u, h);
            }
        hi = vmaxvq_f32(h);
        h = vdupq_n_f32(hi);
        for (j = 0; j < 4; j++) t[j] = vdupq_n_f32(0.0f);
        for (p = 0; p < np; p++)
            for (j = 0; j < 4; j++) {
                float *at = row + p * MHA__NEON_MR * MHA__NR + 4 * j;
                u = mha__exp2_neon(vsubq_f32(vld1q_f32(at), h));
                vst1q_f32(at, u);
                t[j] = vaddq_f32(t[j], u);
            }
        u = vaddq_f32(vaddq_f32(t[0], t[2]), vaddq_f32(t[1], t[3]));
        alpha[i] = mha__exp2(top[i] - hi);
        top[i] = hi;
        sum[i] = sum[i] * alpha[i] + vpadds_f32(vadd_f32(vget_low_f32(u), vget_high_f32(u)));
    }
}

/* As mha__cap. */
MHA__INLINE float32x4_t mha__cap_neon(float32x4_t s, float in, float out)
{
    uint32x4_t bits = vreinterpretq_u32_f32(s), minus = vdupq_n_u32(0x80000000u);
    uint32x4_t a = vbicq_u32(bits, minus), nan = vcgtq_u32(a, vdupq_n_u32(0x7f800000u));
    float32x4_t t = vminq_f32(vmulq_n_f32(vreinterpretq_f32_u32(a), in), vdupq_n_f32(30.0f));
    float32x4_t n = vrndnq_f32(t), f = vsubq_f32(t, n), q, e;
    q = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
    e = vfmaq_f32(vsubq_f32(q, vdupq_n_f32(1.0f)), q, vmulq_f32(mha__poly_neon(f), f));
    e = vmulq_n_f32(vdivq_f32(e, vaddq_f32(e, vdupq_n_f32(2.0f))), out);
    e = vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(e), vandq_u32(bits, minus)));
    return vbslq_f32(nan, s, e);
}

static int mha__shape_neon(int np, float *s, const mha__shape *how)
{
    static const float step[4] = { 0.0f, 1.0f, 2.0f, 3.0f };
    const uint32x4_t ninf = vdupq_n_u32(MHA__NINF);
    float32x4_t dist = vaddq_f32(vdupq_n_f32(how->first), vld1q_f32(step));
    uint32x4_t all = vdupq_n_u32(0xffffffffu);
    int j;
    for (j = 0; j < np * MHA__NR; j += 4) {
        float *at = s + j / MHA__NR * MHA__NEON_MR * MHA__NR + j % MHA__NR;
        float32x4_t x = vld1q_f32(at);
        uint32x4_t gone = vdupq_n_u32(0);
        if (how->cap_out != 0.0f) x = mha__cap_neon(x, how->cap_in, how->cap_out);
        if (how->slope != 0.0f) {
            x = vfmaq_f32(x, vdupq_n_f32(how->slope), vabsq_f32(dist));
            dist = vaddq_f32(dist, vdupq_n_f32(4.0f));
        }
        if (how->bias) {
            float32x4_t b = vld1q_f32(how->bias + j);
            x = vfmaq_f32(x, b, vdupq_n_f32(how->bias_mul));
            gone = vceqq_u32(vreinterpretq_u32_f32(b), ninf);
        }
        if (how->allow) {
            uint32_t four;
            memcpy(&four, how->allow + j, sizeof four);
            gone = vorrq_u32(gone, vceqq_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))),
                                             vdupq_n_u32(0)));
        }
        all = vandq_u32(all, gone);
        vst1q_f32(at, vbslq_f32(gone, vreinterpretq_f32_u32(ninf), x));
    }
    return vminvq_u32(all) == 0;
}

static void mha__weigh_neon(int m, int np, float *s, const float *top, const float *inv)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR; j += 4) {
                float *at = s + (p * MHA__NEON_MR + i) * MHA__NR + j;
                float32x4_t x = vsubq_f32(vld1q_f32(at), vdupq_n_f32(top[i]));
                x = mha__exp2_neon(vmulq_n_f32(x, 16.0f));
                vst1q_f32(at, vmulq_n_f32(x, inv[i]));
            }
}

static void mha__copy_neon(int m, int np, const float *from, ptrdiff_t from_row,
                           ptrdiff_t from_block, float *to, ptrdiff_t to_row, ptrdiff_t to_block,
                           const float *mul, const float *bias)
{
    int i, p, j;
    for (i = 0; i < m; i++)
        for (p = 0; p < np; p++)
            for (j = 0; j < MHA__NR; j += 4) {
                float32x4_t x = vld1q_f32(from + i * from_row + p * from_block + j);
                float32x4_t b = bias ? vld1q_f32(bias + p * MHA__NR + j) : vdupq_n_f32(0.0f);
                vst1q_f32(to + i * to_row + p * to_block + j, vfmaq_n_f32(b, x, mul[i]));
            }
}

static void mha__transpose_neon(int np, const float *const *row, ptrdiff_t step, const float *bias,
                                float *to, ptrdiff_t to_block)
{
    int n, r, i;
    for (n = 0; n < 4 * np; n++) { /* four columns */
        ptrdiff_t at = n / 4 * step + n % 4 * 4;
        float *col = to + n / 4 * to_block + n % 4 * 4 * MHA__NR;
        float32x4_t b = bias ? vld1q_f32(bias + 4 * n) : vdupq_n_f32(0.0f);
        for (r = 0; r < MHA__NR; r += 4) {
            float32x4x4_t x; /* stored four floats at a time, one of each: as columns */
            float out[16];
            for (i = 0; i < 4; i++) x.val[i] = vaddq_f32(vld1q_f32(row[r + i] + at), b);
            vst4q_f32(out, x);
            for (i = 0; i < 4; i++) vst1q_f32(col + i * MHA__NR + r, vld1q_f32(out + 4 * i));
        }
    }
}

static void mha__times_neon(int m, int np, float *c, const float *col)
{
    int p, i, j;
    for (p = 0; p < np; p++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR; j += 4) {
                float *at = c + (p * MHA__NEON_MR + i) * MHA__NR + j;
                vst1q_f32(at, vmulq_f32(vld1q_f32(at), vld1q_f32(col + p * MHA__NR + j)));
            }
}

static void mha__widen_neon(mha_type type, ptrdiff_t n, const void *from, float *to)
{
    ptrdiff_t i;
    int j;
    for (i = 0; i < n; i++, to += MHA__NR) {
        if (type == MHA_INT8) {
            int8x16_t b = vld1q_s8((const signed char *)from + i * MHA__NR);
            int16x8_t h[2];
            h[0] = vmovl_s8(vget_low_s8(b));
            h[1] = vmovl_s8(vget_high_s8(b));
            for (j = 0; j < 4; j++) {
                int16x4_t q = j % 2 ? vget_high_s16(h[j / 2]) : vget_low_s16(h[j / 2]);
                vst1q_f32(to + 4 * j, vcvtq_f32_s32(vmovl_s16(q)));
            }
            continue;
        }
        for (j = 0; j < MHA__NR; j += 4) {
            uint16x4_t h = vld1_u16((const uint16_t *)from + i * MHA__NR + j);
            vst1q_f32(to + j, type == MHA_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(h))
                                              : vreinterpretq_f32_u32(vshll_n_u16(h, 16)));
        }
    }
}

static const mha__kernels mha__neon = { MHA_ISA_NEON,
                                        MHA__NEON_MR,
                                        mha__gemm_neon,
                                        NULL,
                                        mha__finite_neon,
                                        mha__softmax_neon,
                                        mha__shape_neon,
                                        mha__weigh_neon,
                                        mha__copy_neon,
                                        mha__transpose_neon,
                                        mha__times_neon,
                                        mha__widen_neon,
                                        NULL,
                                        0,
                                        0,
                                        0,
                                        0 };

#endif /* MHA__ARM64 */

/* ==== >>dispatch ================================================================= */

#ifdef MHA__X86
#if defined(_MSC_VER) && defined(__clang__)
MHA__TARGET("xsave") /* for _xgetbv; __builtin_cpu_supports needs a library that no Windows has */
#endif
static int mha__cpu_has(mha_isa isa)
{
#if defined(_MSC_VER)
    int r[4];
    unsigned long long os;
    __cpuid(r, 0);
    if (r[0] < 7) return 0;
    __cpuid(r, 1); /* ecx: bit 12 FMA, 27 OSXSAVE, 28 AVX, 29 F16C */
    if ((r[2] & 0x38001000) != 0x38001000) return 0;
    os = _xgetbv(0);    /* what the OS saves: bits 1, 2 ymm; 5, 6, 7 zmm */
    __cpuidex(r, 7, 0); /* ebx: bit 5 AVX2, 16 AVX512F, 17 DQ, 30 BW, 31 VL */
    if (isa == MHA_ISA_AVX2) return (os & 6) == 6 && (r[1] & 0x20) != 0;
    return (os & 0xe6) == 0xe6 && ((unsigned)r[1] & 0xc0030020u) == 0xc0030020u;
#else
    /* F16C is on every CPU that has AVX2; clang has no name to ask for it */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return isa == MHA_ISA_AVX2 ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
#endif
}

/* Which of an isa's tables to take. AMD's CPUs with AVX-512 are Zen 4, of family 19h, and from Zen 5 on
   others. */
static int mha__cpu_asks(void)
{
#if defined(MHA__ASKS) /* in some of the tests */
    return MHA__ASKS;
#elif !defined(__GNUC__) /* MHA__PREFETCH_L1 does nothing */
    return MHA__ASKS_NOT;
#else
    if (__builtin_cpu_is("intel")) return MHA__ASKS_PAGES;
#if defined(__clang__) ? __clang_major__ > 12 : __GNUC__ > 10 /* those before do not know 19h */
    if (__builtin_cpu_is("amd") && mha__cpu_has(MHA_ISA_AVX512) && !__builtin_cpu_is("amdfam19h"))
        return MHA__ASKS_LINES;
#endif
    return MHA__ASKS_NOT;
#endif
}
#endif

/* The table for an isa, null if it is not to be had here. */
static const mha__kernels *mha__kernels_for(mha_isa isa)
{
#ifdef MHA__X86
    if ((isa == MHA_ISA_AUTO || isa == MHA_ISA_AVX512) && mha__cpu_has(MHA_ISA_AVX512))
        return &mha__avx512[mha__cpu_asks()];
    if ((isa == MHA_ISA_AUTO || isa == MHA_ISA_AVX2) && mha__cpu_has(MHA_ISA_AVX2))
        return &mha__avx2[mha__cpu_asks()];
#endif
#ifdef MHA__ARM64
    if (isa == MHA_ISA_AUTO || isa == MHA_ISA_NEON) return &mha__neon;
#endif
    return isa == MHA_ISA_AUTO || isa == MHA_ISA_SCALAR ? &mha__scalar : NULL;
}

/* ==== >>pack =====================================================================

   How the operands lie in memory, and the copies that put them there. */

/* Where element (b, h, t, c) of a tensor [B,H,T,d] is: at data + b*batch + h*head
   + t/16*t_hi + t%16*t_lo + c/16*c_hi + c%16*c_lo. Three layouts are enough. */
typedef struct mha__place {
    float *data;
    ptrdiff_t batch, head, t_hi, t_lo, c_hi, c_lo;
    const int *past;   /* [B] positions that are there already: t counts from past[b]; or null */
    const int *origin; /* [B] where sequence b starts, if not at b*batch; or null */
    ptrdiff_t ring;    /* positions are taken modulo this; 0: they are not */
    mha_type type;     /* other than F32: the numbers are at compact, laid out in the same way */
    void *compact;
    float *scale; /* INT8: [B,heads,scales], of each position */
    ptrdiff_t scales;
} mha__place;

/* One without a memset, which gcc makes a slow one: places are made for every unit of work. */
static mha__place mha__place_make(float *data)
{
    mha__place p;
    p.data = data;
    p.past = p.origin = NULL;
    p.ring = p.scales = 0;
    p.type = MHA_F32;
    p.compact = NULL;
    p.scale = NULL;
    return p;
}

/* rows of d floats, as the caller has them; cu: of sequences of many lengths, or null */
static mha__place mha__place_rows(float *data, mha_stride s, const int *cu)
{
    mha__place p = mha__place_make(data);
    p.batch = cu ? 0 : s.batch;
    p.origin = cu;
    p.head = s.head;
    p.t_hi = MHA__NR * s.seq;
    p.t_lo = s.seq;
    p.c_hi = MHA__NR;
    p.c_lo = 1;
    return p;
}

/* keys as the right operand of q k^T: panels of 16 keys, [G][S/16][d][16] */
MHA__APART mha__place mha__place_keys(float *data, ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d)
{
    mha__place p = mha__place_make(data);
    p.t_hi = d * MHA__NR;
    p.t_lo = 1;
    p.c_hi = MHA__NR * MHA__NR;
    p.c_lo = MHA__NR;
    p.head = mha__div_up(seq, MHA__NR) * p.t_hi;
    p.batch = heads * p.head;
    return p;
}

/* values as the right operand of p v: panels of 16 dims, [G][d/16][S][16] */
static mha__place mha__place_values(float *data, ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d)
{
    mha__place p = mha__place_make(data);
    p.t_hi = MHA__NR * MHA__NR;
    p.t_lo = MHA__NR;
    p.c_hi = seq * MHA__NR;
    p.c_lo = 1;
    p.head = mha__div_up(d, MHA__NR) * p.c_hi;
    p.batch = heads * p.head;
    return p;
}

/* bytes of the two packed layouts, in numbers of so many bytes */
static size_t mha__keys_sized(ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d, size_t size)
{
    return mha__mul(mha__mul(mha__mul((size_t)heads, (size_t)mha__div_up(seq, MHA__NR)), (size_t)d),
                    MHA__NR * size);
}

static size_t mha__values_sized(ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d, size_t size)
{
    return mha__mul(mha__mul(mha__mul((size_t)heads, (size_t)mha__div_up(d, MHA__NR)), (size_t)seq),
                    MHA__NR * size);
}

static size_t mha__keys_bytes(ptrdiff_t batch, ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d)
{
    return mha__mul((size_t)batch, mha__keys_sized(heads, seq, d, sizeof(float)));
}

static size_t mha__values_bytes(ptrdiff_t batch, ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d)
{
    return mha__mul((size_t)batch, mha__values_sized(heads, seq, d, sizeof(float)));
}

/* np blocks of 16 columns from column c on, of one head of width d, of positions t .. t+m-1, plus
   bias [16*np] if it is not null. Each row has its own pointer, its blocks step floats apart; the
   positions lie in one block of 16. fill: no key follows; the rest of its panel becomes something, 0
   or the bias, as panels are multiplied whole. */
static void mha__store(const mha__kernels *kern, const mha__place *to, ptrdiff_t b, ptrdiff_t h,
                       ptrdiff_t t, int m, ptrdiff_t c, int np, ptrdiff_t d,
                       const float *const *row, ptrdiff_t step, const float *bias, int fill)
{
    int full = (int)mha__min(np, (d - c) / MHA__NR), i, j, n;
    float *p = to->data + b * to->batch + h * to->head + c / MHA__NR * to->c_hi;
    if (to->ring && t >= to->ring) { /* the rest of the panel are keys of the lap before */
        fill = 0;
        t %= to->ring;
    }
    if (to->origin) t += to->origin[b];
    p += t / MHA__NR * to->t_hi + t % MHA__NR * to->t_lo;
    if (to->c_lo == 1) { /* as many rows at once as are equally far apart */
        for (i = 0; i < m; i += n) {
            ptrdiff_t apart = i + 1 < m ? row[i + 1] - row[i] : 0;
            for (n = 1; i + n < m && row[i + n] - row[i + n - 1] == apart; n++) continue;
            kern->copy(n, full, row[i], apart, step, p + i * to->t_lo, to->t_lo, to->c_hi,
                       mha__ones, bias);
        }
    } else if (m == MHA__NR) { /* whole panels at once */
        kern->transpose(full, row, step, bias, p, to->c_hi);
    } else { /* also those that rows of zeros fill up */
        const float *at[MHA__NR];
        if (!fill || t % MHA__NR) full = 0;
        for (n = 0; n < full; n++) {
            for (i = 0; i < MHA__NR; i++) at[i] = i < m ? row[i] + n * step : mha__zeros;
            kern->transpose(1, at, 0, bias ? bias + n * MHA__NR : NULL, p + n * to->c_hi, 0);
        }
        for (j = full * MHA__NR; fill && j < mha__min(np * MHA__NR, d - c); j++)
            memset(p + j * MHA__NR + m, 0, (size_t)(MHA__NR - t % MHA__NR - m) * sizeof(float));
    }
    for (n = full; n < np; n++)
        for (i = 0; i < m; i++)
            for (j = 0; j < MHA__NR && c + n * MHA__NR + j < d; j++)
                p[n * to->c_hi + i * to->t_lo + j * to->c_lo] =
                    row[i][n * step + j] + (bias ? bias[n * MHA__NR + j] : 0.0f);
}

/* m rows of a tile from to on: k floats each of src, whose rows are that far apart, times mul [m]. */
static void mha__tile_rows(const mha__kernels *kern, float *to, ptrdiff_t m, ptrdiff_t k,
                           const float *src, ptrdiff_t row, const float *mul)
{
    ptrdiff_t full = k / MHA__NR, i, j;
    kern->copy((int)m, (int)full, src, row, MHA__NR, to, MHA__NR, kern->mr * MHA__NR, mul, NULL);
    to += full * kern->mr * MHA__NR;
    src += full * MHA__NR;
    for (i = 0; i < m && k % MHA__NR; i++)
        for (j = 0; j < k % MHA__NR; j++) to[i * MHA__NR + j] = src[i * row + j] * mul[i];
}

/* floats of a tile with n columns */
static ptrdiff_t mha__tile_floats(int mr, ptrdiff_t n)
{
    return mha__div_up(n, MHA__NR) * mr * MHA__NR;
}

/* How many of so many rows each tile takes. */
static ptrdiff_t mha__height(const mha__kernels *kern, ptrdiff_t rows)
{
    if (!kern->even || rows < 1) return kern->mr;
    return mha__div_up(rows, mha__div_up(rows, kern->mr));
}

/* A projection x W + b whose result is [B,heads,T,d]. Each head has panels of its own, zeros
   filling the last: [heads][d/16][in][16], and the bias the same way: [heads][d/16][16]. Compact
   weights have their panels in groups of four, the last one smaller, in which row k of each panel
   comes before row k+1 of any: [panels/4][in][4][16]. One row of x then reads one stream of memory
   instead of four: int8 from DRAM is 16 % faster. */
typedef struct mha__matrix {
    mha_type type;
    const void *w;
    const float *b, *scale; /* scale: of each column, INT8 only */
    ptrdiff_t in, heads, d, head_panels;
} mha__matrix;

#define MHA__N_BLOCK 4 /* panels of a group, and per pass: what the 6x64 tile of AVX-512 takes */

static ptrdiff_t mha__matrix_groups(const mha__matrix *m)
{
    return mha__div_up(m->heads * m->head_panels, MHA__N_BLOCK);
}

/* Numbers from a row of panel p to the next, and where the panel begins. */
static ptrdiff_t mha__matrix_row(const mha__matrix *m, ptrdiff_t p)
{
    ptrdiff_t group = p / MHA__N_BLOCK * MHA__N_BLOCK;
    if (m->type == MHA_F32) return MHA__NR;
    return MHA__NR * mha__min(MHA__N_BLOCK, m->heads * m->head_panels - group);
}

static ptrdiff_t mha__matrix_at(const mha__matrix *m, ptrdiff_t p)
{
    ptrdiff_t first = m->type == MHA_F32 ? p : p / MHA__N_BLOCK * MHA__N_BLOCK;
    return (first * m->in + p - first) * MHA__NR;
}

MHA__APART mha__matrix mha__matrix_make(mha_type type, ptrdiff_t in, ptrdiff_t heads, ptrdiff_t d)
{
    mha__matrix m;
    m.type = type;
    m.w = m.b = m.scale = NULL;
    m.in = in;
    m.heads = heads;
    m.d = d;
    m.head_panels = mha__div_up(d, MHA__NR);
    return m;
}

/* numbers in so many rows of its panels */
static size_t mha__matrix_numbers(const mha__matrix *m, ptrdiff_t rows)
{
    return mha__mul(mha__mul((size_t)m->heads, (size_t)m->head_panels),
                    mha__mul((size_t)rows, MHA__NR));
}

/* Number i of an array of that type becomes x; scale: INT8 only. */
static void mha__put(mha_type type, void *to, ptrdiff_t i, float x, float scale)
{
    if (type == MHA_F32) ((float *)to)[i] = x;
    else if (type == MHA_INT8) ((signed char *)to)[i] = mha__to_int8(x, scale);
    else ((uint16_t *)to)[i] = type == MHA_F16 ? mha__to_f16(x) : mha__to_bf16(x);
}

/* Packs W, whose element (k, n) is at src[k*in_stride + n*out_stride], and its bias. */
static void mha__matrix_pack(const mha__matrix *m, void *w, float *b, float *scale,
                             const float *src, ptrdiff_t in_stride, ptrdiff_t out_stride,
                             const float *bias)
{
    ptrdiff_t h, p, k;
    int j, n;
    for (h = 0; h < m->heads; h++)
        for (p = 0; p < m->head_panels; p++, b += MHA__NR, scale = scale ? scale + MHA__NR : NULL) {
            ptrdiff_t col = h * m->d + p * MHA__NR, panel = h * m->head_panels + p;
            ptrdiff_t at = mha__matrix_at(m, panel), row = mha__matrix_row(m, panel);
            n = (int)mha__min(MHA__NR, m->d - p * MHA__NR);
            for (j = 0; j < MHA__NR; j++) b[j] = bias && j < n ? bias[col + j] : 0.0f;
            for (j = 0; j < MHA__NR && scale; j++)
                scale[j] =
                    j < n ? mha__int8_scale(src + (col + j) * out_stride, m->in, in_stride) : 0.0f;
            for (k = 0; k < m->in; k++, at += row)
                for (j = 0; j < MHA__NR; j++)
                    mha__put(m->type, w, at + j,
                             j < n ? src[k * in_stride + (col + j) * out_stride] : 0.0f,
                             scale ? scale[j] : 0.0f);
        }
}

/* ---- units of work --------------------------------------------------------------- */

/* A phase of a call: units 0..units-1, independent of each other, done by up to
   parallel.threads lanes, each with its own scratch memory. */
typedef struct mha__phase {
    void (*unit)(const void *job, ptrdiff_t unit, float *scratch);
    const void *job;
    ptrdiff_t units;
    char *scratch;
    size_t scratch_bytes; /* of one lane */
    int lanes;
    size_t next;
} mha__phase;

static void mha__lane(void *arg, int lane)
{
    mha__phase *ph = (mha__phase *)arg;
    float *scratch = (float *)(void *)(ph->scratch + (size_t)lane * ph->scratch_bytes);
    ptrdiff_t u;
#ifdef MHA__FETCH_ADD
    if (ph->lanes > 1) {
        while ((u = (ptrdiff_t)MHA__FETCH_ADD(&ph->next)) < ph->units)
            ph->unit(ph->job, u, scratch);
        return;
    }
#endif
    for (u = lane; u < ph->units; u += ph->lanes) ph->unit(ph->job, u, scratch);
}

static void mha__run(void (*unit)(const void *, ptrdiff_t, float *), const void *job,
                     ptrdiff_t units, const mha_parallel *par, char *scratch, size_t scratch_bytes)
{
    mha__phase ph;
    ph.unit = unit;
    ph.job = job;
    ph.units = units;
    ph.scratch = scratch;
    ph.scratch_bytes = scratch_bytes;
    ph.lanes = par->parallel_for ? (int)mha__min(par->threads, units) : 1;
    ph.next = 0;
    if (ph.lanes > 1) par->parallel_for(par->ctx, ph.lanes, mha__lane, &ph);
    else mha__lane(&ph, 0);
}

/* ---- sequences of one or of many lengths -------------------------------------------------- */

/* Rows of x, or tokens: those of sequence b are cu[b] .. cu[b+1]-1; cu = null: b*seq .. */
static ptrdiff_t mha__first(const int *cu, ptrdiff_t seq, ptrdiff_t b)
{
    return cu ? cu[b] : b * seq;
}

static ptrdiff_t mha__length(const int *cu, ptrdiff_t seq, ptrdiff_t b)
{
    return cu ? cu[b + 1] - cu[b] : seq;
}

/* Where position i of head h of sequence b is, in floats. */
static ptrdiff_t mha__at(const mha_stride *s, const int *cu, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    return (cu ? cu[b] * s->seq : b * s->batch) + h * s->head + i * s->seq;
}

/* ==== >>project ==================================================================

   x [rows, K] times packed matrices, plus bias, each head written where it is wanted. */

/* Measured with x [1024,768], W [768,2304] on an Ice Lake core, AVX2. */

/* Terms per pass: the 64-column block of weights, 192 KiB, stays in L2; 256 or 384 terms are no
   faster, and reload the results more often. */
#define MHA__K_BLOCK 768

/* Rows of x that the weights are read from memory for. Ice Lake: 48 reach 67 % of peak, 96 71 %, 192
   76 %, 384 80 %; with the next block fetched ahead, 192 are within 2 % of 384, for half the scratch
   memory. Zen 4, with twice the bandwidth: all within 1 %. */
#define MHA__M_BLOCK 192

/* Bytes of weights, or of keys and values, that are taken to be in L2, if they were used a short while
   ago. */
#ifndef MHA__NEAR /* 0 in some of the tests */
#define MHA__NEAR ((ptrdiff_t)1 << 20)
#endif

typedef struct mha__project_job {
    const mha__kernels *kern;
    const float *x;
    const int *cu;                 /* [batch+1] sequences of many lengths; or null */
    ptrdiff_t batch, rows, seq, k; /* else row r is position r % seq of batch element r / seq */
    int n;                         /* matrices that share x */
    const mha__matrix *mat[3];
    mha__place to[3];
    ptrdiff_t row_block;      /* a unit: so many rows, */
    ptrdiff_t groups, chunks; /* and one of so many parts of the groups of panels */
} mha__project_job;

/* Terms per pass when compact weights are widened for it: one or two tiles use them once, so they
   should still be in L1, 16 KiB, where they were just written. */
#define MHA__K_BLOCK_SMALL 64

/* scratch of a lane: a block of rows of x as tiles, as much of the result as one pass makes, and
   the weights of a pass if they are compact */
static size_t mha__project_scratch(const mha__kernels *kern, size_t rows, ptrdiff_t k,
                                   mha_type type)
{
    ptrdiff_t most = rows < MHA__M_BLOCK ? (ptrdiff_t)rows : MHA__M_BLOCK;
    size_t bytes = mha__floats(mha__div_up(most, kern->mr) * kern->mr,
                               mha__div_up(k, MHA__NR) + MHA__N_BLOCK, MHA__NR, 1);
    if (type == MHA_F32) return bytes;
    return mha__add(bytes, mha__floats(mha__min(k, MHA__K_BLOCK), MHA__N_BLOCK, MHA__NR, 1));
}

/* Puts rows from .. end-1 of np panels of results, from panel p on, where they belong, with the
   bias. c: the tiles, each ctile floats and height rows; their first row is row r0 of x. Unless
   these are the last rows, stops where a block of 16 positions ends; returns where it stopped. */
static ptrdiff_t mha__project_store(const mha__project_job *job, int which, ptrdiff_t r0,
                                    ptrdiff_t from, ptrdiff_t end, int last, ptrdiff_t p, int np,
                                    const float *c, ptrdiff_t ctile, ptrdiff_t height)
{
    const mha__matrix *mat = job->mat[which];
    const mha__place *to = &job->to[which];
    ptrdiff_t mr = job->kern->mr, r, past, tile, n, h, col;
    ptrdiff_t b, t, q;
    const float *row[MHA__NR];
    int m, i, fill;
    if (job->cu) { /* the last sequence that starts at or before this row */
        ptrdiff_t above = job->batch;
        for (b = 0; above - b > 1;) {
            if (job->cu[(b + above) / 2] <= r0 + from) b = (b + above) / 2;
            else above = (b + above) / 2;
        }
    } else {
        b = (r0 + from) / job->seq;
    }
    for (r = from; r < end; r += m) {
        while (r0 + r >= mha__first(job->cu, job->seq, b + 1)) b++;
        t = r0 + r - mha__first(job->cu, job->seq, b);
        past = to->past ? to->past[b] : 0;
        m = (int)mha__min(MHA__NR - (past + t) % MHA__NR, mha__length(job->cu, job->seq, b) - t);
        if (m > end - r) {
            if (!last) break;
            m = (int)(end - r);
        }
        for (i = 0, tile = r / height, n = r % height; i < m; i++, n++) {
            if (n == height) n = 0, tile++;
            row[i] = c + tile * ctile + n * MHA__NR;
        }
        /* unless the panel was begun by a call before this one, which filled it */
        fill = t + m == mha__length(job->cu, job->seq, b) && (past + t) / MHA__NR * MHA__NR >= past;
        h = p / mat->head_panels;
        col = p % mat->head_panels; /* the first panel's in its head */
        for (q = 0; q < np; q += n, col = 0, h++) {
            n = mha__min(np - q, mat->head_panels - col);
            mha__store(job->kern, to, b, h, past + t, m, col * MHA__NR, (int)n, mat->d, row,
                       mr * MHA__NR, mat->b + (p + q) * MHA__NR, fill);
            for (i = 0; i < m && q + n < np; i++) row[i] += n * mr * MHA__NR;
        }
    }
    return r;
}

/* Wanted: part of parts of np panels of kn rows, every second line: the other of a pair comes with
   it. */
static void mha__project_wanted(mha__wanted *wanted, const float *w, ptrdiff_t panel, int np,
                                ptrdiff_t kn, ptrdiff_t part, ptrdiff_t parts)
{
    ptrdiff_t from = kn / 8 * part / parts, to = kn / 8 * (part + 1) / parts;
    int p;
    wanted->step = 2 * MHA__NR;
    for (p = 0; p < np; p++)
        mha__want(wanted, w + p * panel + from * 8 * MHA__NR, 8 * MHA__NR, to - from, 4);
}

/* The first tile to use a block of weights waits for memory. Where there are so many, each of the
   others has some of the next block asked for: 3 to 4 % at 128 rows on Sapphire Rapids; with fewer it
   costs more than it brings, and the first one asks for pages ahead. On Zen 5 it costs 1 to 2 %. */
#define MHA__TILES_AHEAD 20

static void mha__project_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__project_job *job = (const mha__project_job *)arg;
    const mha__kernels *kern = job->kern;
    ptrdiff_t r0 = unit / job->chunks * job->row_block;
    ptrdiff_t rows = mha__min(job->row_block, job->rows - r0);
    ptrdiff_t chunk = unit % job->chunks, each = job->groups / job->chunks;
    ptrdiff_t more = job->groups % job->chunks; /* the first ones take one group more */
    ptrdiff_t first = (chunk * each + mha__min(chunk, more)) * MHA__N_BLOCK;
    ptrdiff_t last = first + (each + (chunk < more)) * MHA__N_BLOCK;
    ptrdiff_t tile = mha__tile_floats(kern->mr, job->k);
    ptrdiff_t height = mha__height(kern, rows), tiles = mha__div_up(rows, height);
    float *a = scratch, *c = scratch + tiles * tile;
    ptrdiff_t ctile = MHA__N_BLOCK * kern->mr * MHA__NR;
    float *wide = c + tiles * ctile;
    ptrdiff_t i, p, k0, stored, base = 0, block = MHA__K_BLOCK;
    mha_type type = job->mat[0]->type;
    int which, np, kn, m, k, step, ask, compact = type != MHA_F32;
    mha__wanted wanted;
    int narrow = compact && tiles <= kern->narrow_tiles && job->k < INT_MAX / 64;
    int large =
        job->groups * MHA__N_BLOCK * job->k > MHA__NEAR / MHA__NR / (ptrdiff_t)mha__type_size(type);
    int asks = kern->asks == MHA__ASKS_PAGES && tiles >= MHA__TILES_AHEAD && !compact;
    int turns = large && kern->terms && (!compact || narrow) &&
                type != MHA_INT8; /* of which four panels share a line */
    if (narrow) block = job->k;
    else if (compact && tiles <= 2) block = MHA__K_BLOCK_SMALL;

    for (i = 0; i < tiles; i++)
        mha__tile_rows(kern, a + i * tile, mha__min(height, rows - i * height), job->k,
                       job->x + (r0 + i * height) * job->k, job->k, mha__ones);

    for (which = 0; which < job->n; which++) {
        const mha__matrix *mat = job->mat[which];
        ptrdiff_t panels = mat->heads * mat->head_panels;
        ptrdiff_t end = mha__min(last - base, panels);
        for (p = mha__max(first - base, 0); p < end; p += np) {
            ptrdiff_t at = mha__matrix_at(mat, p), row = mha__matrix_row(mat, p);
            ptrdiff_t size = (ptrdiff_t)mha__type_size(mat->type);
            ptrdiff_t panel = compact ? MHA__NR : job->k * MHA__NR;
            const char *from = (const char *)mat->w + at * size;
            const float *w = (const float *)mat->w + (compact ? 0 : at);
            np = (int)mha__min(MHA__N_BLOCK, end - p);
            for (k0 = stored = 0; k0 < job->k; k0 += block) {
                ptrdiff_t left = job->k - k0;
                const float *wk = compact ? wide : w + k0 * MHA__NR;
                kn = (int)mha__min(block, left);
                if (compact && !narrow)
                    kern->widen(mat->type, kn * row / MHA__NR, from + k0 * row * size, wide);
                for (i = 0; i < tiles; i++) {
                    m = (int)mha__min(height, rows - i * height);
                    mha__wanted_none(&wanted);
                    if (i > 0 && asks && left > kn)
                        mha__project_wanted(&wanted, w + (k0 + kn) * MHA__NR, job->k * MHA__NR, np,
                                            mha__min(MHA__K_BLOCK, left - kn), i - 1, tiles - 1);
                    else if (i > 0 && asks && p + np < end)
                        mha__project_wanted(&wanted, w + np * job->k * MHA__NR, job->k * MHA__NR,
                                            (int)mha__min(MHA__N_BLOCK, end - p - np),
                                            mha__min(MHA__K_BLOCK, job->k), i - 1, tiles - 1);
                    /* floats are in L2 after the first tile; rows of halves are taken in groups */
                    step = turns && m > 1 && (i == 0 || narrow) ? kern->terms : kn;
                    ask = large && tiles < MHA__TILES_AHEAD && i == 0 ? kern->asks : MHA__ASKS_NOT;
                    if (ask && narrow && step == kn) /* a page at a time, or half of one */
                        step = (MHA__PAGE >> (ask == MHA__ASKS_LINES)) * (int)sizeof(float) /
                               (int)(row * size) / MHA__NR * MHA__NR;
                    for (k = 0; k < kn; k += step) {
                        const float *x = a + i * tile + (k0 + k) * kern->mr;
                        const float *begun = k0 + k ? mha__ones : NULL;
                        int n = (int)mha__min(step, kn - k);
                        if (ask == MHA__ASKS_PAGES && !compact)
                            mha__want_pages(&wanted, wk + k * row, panel, np, n * MHA__NR);
                        if (ask == MHA__ASKS_PAGES && narrow) {
                            mha__want_pages(
                                &wanted,
                                (const float *)(const void *)(from + (k0 + k) * row * size), 0, 1,
                                n * row * size / (ptrdiff_t)sizeof(float));
                            mha__wanted_now(&wanted);
                        }
                        if (ask == MHA__ASKS_LINES && narrow)
                            mha__fetch_near(from + (k0 + k) * row * size, n * row * size);
                        if (narrow)
                            kern->narrow(m, np, n, x, mat->type, from + k * row * size, row, panel,
                                         0, c + i * ctile, begun);
                        else
                            kern->gemm(m, np, n, x, wk + k * row, row, panel, c + i * ctile, begun,
                                       &wanted);
                    }
                    if (left == kn && mat->scale)
                        kern->times(m, np, c + i * ctile, mat->scale + p * MHA__NR);
                    if (left == kn)
                        stored = mha__project_store(job, which, r0, stored,
                                                    mha__min((i + 1) * height, rows),
                                                    i == tiles - 1, p, np, c, ctile, height);
                }
            }
        }
        base += mha__matrix_groups(mat) * MHA__N_BLOCK;
    }
}

/* x [rows, mat[0]->in] through n matrices. A unit is a block of rows; with threads there are as many
   blocks of each size for every one of them, and at least four units each, so that they end
   together: where there are too few rows for that, the panels are shared out too. (11 blocks of 192
   rows are 12 % slower on two threads than 12 of 174.) Few rows are two units each: all of them copy
   their rows of x, and begin; 128 rows of D = 384 are 1.5 % faster for it, 16 of D = 64 6 %. Eight
   tiles of rows or less are one block, if there are panels enough: every block reads all weights. (Two
   blocks of 7 rows, [2048,8192], are 1.5 times as slow, of 48 1.07.) */
static void mha__project(const mha__kernels *kern, const float *x, ptrdiff_t batch, ptrdiff_t seq,
                         const int *cu, int n, const mha__matrix *const *mat, const mha__place *to,
                         const mha_parallel *par, char *scratch, size_t scratch_bytes)
{
    mha__project_job job;
    ptrdiff_t threads = par->parallel_for ? par->threads : 1, blocks, each;
    int i;
    job.kern = kern;
    job.x = x;
    job.cu = cu;
    job.batch = batch;
    job.rows = mha__first(cu, seq, batch);
    job.seq = seq;
    job.n = n;
    job.k = mat[0]->in;
    job.groups = 0;
    for (i = 0; i < n; i++) {
        job.mat[i] = mat[i];
        job.to[i] = to[i];
        job.groups += mha__matrix_groups(mat[i]);
    }
    blocks = mha__div_up(mha__div_up(job.rows, MHA__M_BLOCK), threads) * threads;
    if (job.rows <= 8 * kern->mr && job.groups >= 4 * threads) blocks = 1;
    job.row_block = mha__div_up(job.rows, blocks);
    if (job.row_block > 4 * kern->mr && !kern->even) /* 16 rows on two threads: not 12 and 4 */
        job.row_block = mha__div_up(job.row_block, kern->mr) * kern->mr;
    blocks = mha__div_up(job.rows, job.row_block);
    each = job.rows <= MHA__M_BLOCK ? 2 : 4;
    job.chunks = threads > 1 ? mha__min(mha__div_up(each * threads, blocks), job.groups) : 1;
    mha__run(mha__project_unit, &job, blocks * job.chunks, par, scratch, scratch_bytes);
}

/* ==== >>rotate ===================================================================

   What happens to heads between projection and attention, when it does: a norm, a rotation by the
   position, a number format for the cache. x [B,T,heads,d], as rows. */

typedef struct mha__rotate_job {
    const mha__kernels *kern;
    ptrdiff_t batch, seq, heads, d; /* seq: of the longest sequence */
    const int *cu;                  /* [B+1] sequences of many lengths; or null */
    mha__place x;                   /* rows: read, and changed where they are */
    mha__place to;                  /* then written here too; data and compact null: nowhere */
    mha_norm norm;
    float eps;
    const float *weight, *bias; /* of the norm; or null */
    const mha_rope *rope;       /* null: no rotation */
    const double *freq;         /* [width/2] angle per position */
    const int *positions;       /* [tokens]; or null: from past[b] on */
    const int *past;            /* [B]; or null: from 0 on */
} mha__rotate_job;

/* Radians per position of pair i. rope has its defaults filled in. */
static double mha__rope_freq(const mha_rope *rope, int i)
{
    const double pi = 3.14159265358979323846;
    double w = rope->width, base = (double)rope->base, factor = (double)rope->factor, f, turns;
    if (rope->scaling == MHA_ROPE_NTK) base *= pow(factor, w / (w - 2.0));
    f = pow(base, -2.0 * i / w);
    if (rope->scaling == MHA_ROPE_LINEAR) return f / factor;
    if (rope->scaling == MHA_ROPE_YARN) { /* from which pair on, and up to which, f is divided */
        double per = w / (2.0 * log(base)), ramp;
        double low = floor(per * log(rope->original / ((double)rope->beta_fast * 2.0 * pi)));
        double high = ceil(per * log(rope->original / ((double)rope->beta_slow * 2.0 * pi)));
        if (low < 0.0) low = 0.0;
        if (high > w - 1.0) high = w - 1.0;
        if (low == high) high += 0.001;
        ramp = (i - low) / (high - low);
        ramp = ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
        return f / factor * ramp + f * (1.0 - ramp);
    }
    if (rope->scaling == MHA_ROPE_LLAMA3) {
        double low = (double)rope->low_freq, high = (double)rope->high_freq;
        turns = rope->original * f / (2.0 * pi); /* in the context of training */
        if (turns < low) return f / factor;
        if (turns > high) return f;
        turns = (turns - low) / (high - low);
        return (1.0 - turns) * f / factor + turns * f;
    }
    return f;
}

/* table [n][2]: cos and sin of the angles of n pairs at a position. */
static void mha__rope_table(const mha_rope *rope, int n, const double *freq, long position,
                            float *table)
{
    double size = rope->scaling == MHA_ROPE_YARN ? (double)rope->attention : 1.0;
    int i;
    for (i = 0; i < n; i++) {
        double angle = (double)position * freq[i];
        table[2 * i] = (float)(cos(angle) * size);
        table[2 * i + 1] = (float)(sin(angle) * size);
    }
}

/* n pairs of a head, from pair first on. */
static void mha__rope_row(const mha_rope *rope, int first, int n, const float *table, float *x)
{
    int half = rope->layout == MHA_ROPE_HALF, step = half ? 1 : 2, i;
    int other = half ? rope->width / 2 : 1;
    for (i = 0; i < n; i++) {
        float *a = x + (first + i) * step, *b = a + other, a0 = *a, b0 = *b;
        *a = a0 * table[2 * i] - b0 * table[2 * i + 1];
        *b = b0 * table[2 * i] + a0 * table[2 * i + 1];
    }
}

static void mha__norm_row(const mha__rotate_job *job, float *x)
{
    double mean = 0.0, sum = 0.0, inv;
    ptrdiff_t c;
    if (job->norm == MHA_NORM_LAYER) {
        for (c = 0; c < job->d; c++) mean += (double)x[c];
        mean /= (double)job->d;
    }
    for (c = 0; c < job->d; c++) sum += ((double)x[c] - mean) * ((double)x[c] - mean);
    inv = 1.0 / sqrt(sum / (double)job->d + (double)job->eps);
    for (c = 0; c < job->d; c++) {
        double y = ((double)x[c] - mean) * inv;
        if (job->weight) y *= (double)job->weight[c];
        if (job->bias) y += (double)job->bias[c];
        x[c] = (float)y;
    }
}

/* Rows of one head, from position t on, in the number format of a cache. What fills a panel up
   becomes 0, as panels are widened whole: the keys to come, the dims of a value past its width. */
static void mha__keep(const mha__place *to, ptrdiff_t b, ptrdiff_t heads, ptrdiff_t h, ptrdiff_t t,
                      int m, ptrdiff_t d, const float *const *row)
{
    ptrdiff_t at, c, wide = to->c_lo == 1 ? mha__div_up(d, MHA__NR) * MHA__NR : d;
    size_t size = mha__type_size(to->type);
    int i;
    for (i = 0; i < m; i++, t++) {
        ptrdiff_t slot = to->ring ? t % to->ring : t;
        float scale = 0.0f;
        if (to->scale) {
            scale = mha__int8_scale(row[i], d, 1);
            to->scale[(b * heads + h) * to->scales + slot] = scale;
        }
        at = b * to->batch + h * to->head + slot / MHA__NR * to->t_hi + slot % MHA__NR * to->t_lo;
        if (to->c_lo != 1 && slot % MHA__NR == 0 && slot == t) /* as in mha__store */
            memset((char *)to->compact + (size_t)at * size, 0, (size_t)(d * MHA__NR) * size);
        for (c = 0; c < wide; c++)
            mha__put(to->type, to->compact, at + c / MHA__NR * to->c_hi + c % MHA__NR * to->c_lo,
                     c < d ? row[i][c] : 0.0f, scale);
    }
}

/* A unit: up to 16 positions of one sequence that lie in one block of 16. scratch: a table. */
static void mha__rotate_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__rotate_job *job = (const mha__rotate_job *)arg;
    ptrdiff_t blocks = job->seq / MHA__NR + 2, b = unit / blocks, h, t, t0, t1;
    ptrdiff_t past = job->to.past ? job->to.past[b] : 0;
    const float *row[MHA__NR];
    t0 = mha__max(unit % blocks * MHA__NR - past % MHA__NR, 0);
    t1 =
        mha__min((unit % blocks + 1) * MHA__NR - past % MHA__NR, mha__length(job->cu, job->seq, b));
    for (t = t0; t < t1; t++) {
        float *x = job->x.data + b * job->x.batch +
                   (t + (job->x.origin ? job->x.origin[b] : 0)) * job->x.t_lo;
        if (job->rope) {
            ptrdiff_t token = mha__first(job->cu, job->seq, b) + t;
            mha__rope_table(job->rope, job->rope->width / 2, job->freq,
                            job->positions ? (long)job->positions[token]
                                           : (long)(t + (job->past ? job->past[b] : 0)),
                            scratch);
        }
        for (h = 0; h < job->heads; h++, x += job->x.head) {
            if (job->norm) mha__norm_row(job, x);
            if (job->rope) mha__rope_row(job->rope, 0, job->rope->width / 2, scratch, x);
        }
    }
    if (t0 >= t1 || (!job->to.data && !job->to.compact)) return;
    for (h = 0; h < job->heads; h++) {
        for (t = t0; t < t1; t++)
            row[t - t0] = job->x.data + b * job->x.batch + h * job->x.head +
                          (t + (job->x.origin ? job->x.origin[b] : 0)) * job->x.t_lo;
        if (job->to.compact)
            mha__keep(&job->to, b, job->heads, h, past + t0, (int)(t1 - t0), job->d, row);
        else
            mha__store(job->kern, &job->to, b, h, past + t0, (int)(t1 - t0), 0,
                       (int)mha__div_up(job->d, MHA__NR), job->d, row, MHA__NR, NULL,
                       (past + t0) % MHA__NR == 0);
    }
}

static void mha__rotate(const mha__rotate_job *job, const mha_parallel *par, char *scratch,
                        size_t scratch_bytes)
{
    ptrdiff_t tokens = job->batch * job->seq;
    mha_parallel serial;
    memset(&serial, 0, sizeof serial);
    /* a few tokens are done before another thread has begun */
    mha__run(mha__rotate_unit, job, job->batch * (job->seq / MHA__NR + 2),
             tokens < 4 * MHA__NR ? &serial : par, scratch, scratch_bytes);
}

/* ==== >>attend ===================================================================

   softmax(q k^T * scale + bias, masked) v, streamed over blocks of keys: only a tile of scores
   exists at any time, or those of a few blocks where threads share them. A row keeps its largest
   score so far (top), the sum of 2^(score - top) and the weighted sum of values; when a block raises
   top, the two sums are scaled down.

   Scores are in units of log2: q is multiplied by scale * log2(e) when it is packed, biases by
   log2(e) when they are added, so that e^x becomes 2^x.

   Blocks of keys start at multiples of MHA__KEYS whatever the query, so that a row's sums are
   cut at the same places in every run. The number changes bits: it is fixed, for all ISAs.
   256 keys of d = 64 are 64 KiB of k and as much of v, which stay in L2. */

#define MHA__KEYS 256
#define MHA__ROWS 96 /* of q per unit: what k and v are read from memory for */

typedef struct mha__attend_job {
    const mha__kernels *kern;
    ptrdiff_t batch, heads, kv_heads, seq, keys, d_k, d_v; /* seq, keys: of the longest sequence */
    const int *cu_q, *cu_k; /* [B+1] sequences of many lengths; or null */
    const int *past;        /* [B] keys in the cache before this call; or null: there is no cache */
    int appended;           /* 1: the call's own tokens follow those in the cache */
    float scale;            /* times log2(e) */
    const float *q;
    mha_stride q_stride;
    mha__place k, v;               /* packed */
    const float *k_from, *v_from;  /* the caller's, if they are yet to be packed; else null */
    mha_stride k_stride, v_stride; /* of those */
    int local;                     /* each lane packs what it needs in its own scratch */
    int v_rows;                    /* v_from is read where it is: it lies as a packed one could */
    float *o;
    mha_stride o_stride;
    mha_mask mask; /* strides resolved */
    float softcap;
    const float *alibi, *sink, *sink_value; /* [H] [H] [H,d_v]; or null */
    const float *bias_k, *bias_v;           /* [G,d_k] [G,d_v]; or null */
    int zero_attn;
    const float *gate; /* or null */
    mha_gate_stride gate_stride;
    float *lse, *attn, *attn_mean;
    float *top, *inv;         /* [B,H,T] of each row, kept for attn; else null */
    ptrdiff_t queries, tiles; /* a unit: queries queries of the heads of one kv head */
    int large;                /* 1: k and v are more than what is taken to be in L2 */
    ptrdiff_t ahead;          /* kv heads from one to the next of a lane: see mha__want_head */
    ptrdiff_t kv_at;          /* floats of a lane's scratch before its k and v */
    char *scratch;            /* of all lanes, lane_bytes each */
    size_t lane_bytes;
    /* see "a unit that all lanes work on" */
    float *shared;            /* scores */
    ptrdiff_t first;          /* the first such unit */
    ptrdiff_t block, window;  /* the first block of a round, and how many it takes */
    ptrdiff_t parts, v_parts; /* its tiles and the panels of values are cut into so many */
} mha__attend_job;

/* A row of a tile of scores. */
typedef struct mha__row {
    ptrdiff_t head, query;
    ptrdiff_t at;     /* its position */
    ptrdiff_t lo, hi; /* keys lo .. hi-1 it may see, masks aside */
    float gate;
    int seen;    /* 1 once it has seen a key */
    int started; /* of the first row of a tile: 1 once the tile's o holds something */
    int done;    /* 1 once its results are written */
} mha__row;

static ptrdiff_t mha__keys_of(const mha__attend_job *job, ptrdiff_t b)
{
    if (!job->past) return mha__length(job->cu_k, job->keys, b);
    return job->past[b] + (job->appended ? mha__length(job->cu_q, job->seq, b) : 0);
}

/* What the queries of one sequence have in common. */
typedef struct mha__view {
    ptrdiff_t keys, shift; /* query i stands at i + shift */
    ptrdiff_t lo, hi;      /* keys lo .. hi-1, by their lengths */
} mha__view;

static mha__view mha__view_make(const mha__attend_job *job, ptrdiff_t b)
{
    const mha_mask *mask = &job->mask;
    mha__view v;
    v.keys = mha__keys_of(job, b);
    v.shift =
        mask->causal == MHA_CAUSAL_UPPER_LEFT ? 0 : v.keys - mha__length(job->cu_q, job->seq, b);
    v.lo = mask->key_start ? mask->key_start[b] : 0;
    v.hi = mask->key_len ? mha__min(mask->key_len[b], v.keys) : v.keys;
    return v;
}

/* Fills in query i of head h. */
MHA__INLINE void mha__row_make(const mha_mask *mask, const mha__view *v, mha__row *row, ptrdiff_t h,
                               ptrdiff_t i)
{
    row->head = h;
    row->query = i;
    row->at = i + v->shift;
    row->lo = v->lo;
    row->hi = v->hi;
    if (mask->causal) row->hi = mha__min(row->hi, row->at + 1);
    if (mask->windowed && mask->left >= 0 && mask->left < row->at)
        row->lo = mha__max(row->lo, row->at - mask->left);
    if (mask->windowed && mask->right >= 0 && mask->right < v->keys - row->at)
        row->hi = mha__min(row->hi, row->at + mask->right + 1);
    if (row->lo >= row->hi) row->hi = row->lo = mha__max(mha__min(row->lo, v->keys), 0);
}

/* Keys that some of a few queries see, lo .. hi-1, and that all of them see, masks aside. */
typedef struct mha__sight {
    ptrdiff_t lo, hi;
    ptrdiff_t all_lo, all_hi;
} mha__sight;

/* Those of queries i0 .. i1-1 of sequence b. Neither end of what a query sees ever goes back from one
   query to the next. */
static mha__sight mha__sight_of(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t i0, ptrdiff_t i1)
{
    mha__view v = mha__view_make(job, b);
    mha__row first, last;
    mha__sight span;
    mha__row_make(&job->mask, &v, &first, 0, i0);
    mha__row_make(&job->mask, &v, &last, 0, i1 - 1);
    span.lo = first.lo;
    span.hi = last.hi;
    span.all_lo = last.lo;
    span.all_hi = first.hi;
    return span;
}

/* The gate of a row: 1 if there are none. */
static float mha__gate_of(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    const mha_gate_stride *s = &job->gate_stride;
    if (!job->gate) return 1.0f;
    return job->gate[(job->cu_q ? job->cu_q[b] * s->seq : b * s->batch) + i * s->seq + h * s->head];
}

/* Where a row's numbers are in [B,H,T] or, with many lengths, [H,tokens]. */
static ptrdiff_t mha__row_index(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    if (job->cu_q) return h * job->cu_q[job->batch] + job->cu_q[b] + i;
    return (b * job->heads + h) * job->seq + i;
}

/* Cap, biases and exclusions on one row of a tile of scores: keys j0 .. j0 + 16*np - 1. Returns 1
   if a key is left. unit: of the scores. */
static int mha__shape_row(const mha__attend_job *job, ptrdiff_t b, const mha__row *row,
                          ptrdiff_t j0, int np, float unit, float *s)
{
    const mha_mask *mask = &job->mask;
    const mha_mask_stride *as = &mask->allow_stride, *bs = &mask->bias_stride;
    ptrdiff_t n = np * MHA__NR, j;
    ptrdiff_t lo = mha__min(mha__max(row->lo - j0, 0), n), hi = mha__min(row->hi - j0, n);
    unsigned char allow[MHA__KEYS];
    float bias[MHA__KEYS], log2e = (float)MHA__LOG2E * unit;
    mha__shape how;
    memset(&how, 0, sizeof how);
    if (job->softcap != 0.0f) {
        how.cap_in = 2.0f / (job->softcap * unit);
        how.cap_out = job->softcap * log2e;
    }
    if (job->alibi) {
        how.slope = -job->alibi[row->head] * log2e;
        how.first = (float)(j0 - row->at);
    }
    if (lo > 0 || hi < n || mask->allow || mask->key_padding) {
        how.allow = allow;
        memset(allow, 0, (size_t)n);
        if (lo < hi) memset(allow + lo, 1, (size_t)(hi - lo));
        if (mask->allow) {
            const unsigned char *from = mask->allow + b * as->batch + row->head * as->head +
                                        row->query * as->query + j0 * as->key;
            if (as->key == 1 && lo < hi) memcpy(allow + lo, from + lo, (size_t)(hi - lo));
            else
                for (j = lo; j < hi; j++) allow[j] = from[j * as->key];
        }
        if (mask->key_padding) {
            const unsigned char *from = mask->key_padding + b * job->keys + j0;
            for (j = lo; j < hi; j++) allow[j] = allow[j] && !from[j];
        }
    }
    if (mask->bias) {
        const float *from = mask->bias + b * bs->batch + row->head * bs->head +
                            row->query * bs->query + j0 * bs->key;
        how.bias = bias;
        how.bias_mul = log2e;
        memset(bias, 0, (size_t)n * sizeof(float));
        if (bs->key == 1 && lo < hi)
            memcpy(bias + lo, from + lo, (size_t)(hi - lo) * sizeof(float));
        else
            for (j = lo; j < hi; j++) bias[j] = from[j * bs->key];
    }
    return job->kern->shape(np, s, &how);
}

/* The same where nothing but ranges of keys excludes: no mask is built. 128 queries with lengths are
   3.6 % faster, causal ones 2 to 3.5 %. */
MHA__APART void mha__exclude(const mha__row *row, ptrdiff_t j0, int np, int mr, float *s)
{
    const float ninf = mha__float(MHA__NINF);
    ptrdiff_t lo = row->lo - j0, hi = row->hi - j0, j;
    for (; np > 0; np--, lo -= MHA__NR, hi -= MHA__NR, s += mr * MHA__NR) {
        for (j = 0; j < mha__min(lo, MHA__NR); j++) s[j] = ninf;
        for (j = mha__max(hi, 0); j < MHA__NR; j++) s[j] = ninf;
    }
}

/* ---- packing the caller's k and v ---- */

/* Positions t0 .. t1-1 of one head, t0 a multiple of 16, to places counted from zero. The next 16 are
   asked for into L2, as in mha__fetch, and 64 dims at a time, not all at once: from DRAM, with 8
   queries a key, that is 1.3 times as fast at d = 64 and 1.4 times at 128 as all of them into L1. */
static void mha__pack_head(const mha__kernels *kern, const float *from, ptrdiff_t stride,
                           ptrdiff_t d, const mha__place *to, ptrdiff_t b, ptrdiff_t g,
                           ptrdiff_t t0, ptrdiff_t t1, ptrdiff_t zero)
{
    const float *row[MHA__NR];
    ptrdiff_t t, c, j, n;
    int m, i;
    for (t = t0; t < t1; t += MHA__NR)
        for (c = 0; c < d; c += n) {
            m = (int)mha__min(MHA__NR, t1 - t);
            n = mha__min(d - c, 4 * MHA__NR);
            for (i = 0; i < m; i++) {
                row[i] = from + (t + i) * stride + c;
                if (t + 2 * MHA__NR <= t1)
                    for (j = 0; j < n; j += MHA__NR)
                        MHA__PREFETCH_L2(row[i] + MHA__NR * stride + j);
            }
            mha__store(kern, to, b, g, t - zero, m, c, (int)mha__div_up(n, MHA__NR), d, row,
                       MHA__NR, NULL, 1);
        }
}

static void mha__pack_k(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g, ptrdiff_t t0,
                        ptrdiff_t t1, const mha__place *to, ptrdiff_t zero)
{
    mha__pack_head(job->kern, job->k_from + mha__at(&job->k_stride, job->cu_k, b, g, 0),
                   job->k_stride.seq, job->d_k, to, job->local ? 0 : b, job->local ? 0 : g, t0, t1,
                   zero);
}

/* Of the values, panels p0 .. p1-1. */
static void mha__pack_v(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g, ptrdiff_t t0,
                        ptrdiff_t t1, ptrdiff_t p0, ptrdiff_t p1, const mha__place *to,
                        ptrdiff_t zero)
{
    ptrdiff_t c = p0 * MHA__NR;
    mha__place at = *to;
    at.data += p0 * to->c_hi;
    mha__pack_head(job->kern, job->v_from + mha__at(&job->v_stride, job->cu_k, b, g, 0) + c,
                   job->v_stride.seq, mha__min(p1 * MHA__NR, job->d_v) - c, &at, job->local ? 0 : b,
                   job->local ? 0 : g, t0, t1, zero);
}

static ptrdiff_t mha__panels_v(const mha__attend_job *job)
{
    return mha__div_up(job->d_v, MHA__NR);
}

/* A phase before attention, for k and v that all lanes share. A unit: a block of one kv head. */
static void mha__pack_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t blocks = mha__div_up(job->keys, MHA__KEYS), t0 = unit % blocks * MHA__KEYS;
    ptrdiff_t b = unit / blocks / job->kv_heads, g = unit / blocks % job->kv_heads;
    ptrdiff_t t1 = mha__min(t0 + MHA__KEYS, mha__length(job->cu_k, job->keys, b));
    (void)scratch;
    mha__pack_k(job, b, g, t0, t1, &job->k, 0);
    if (!job->v_rows) mha__pack_v(job, b, g, t0, t1, 0, mha__panels_v(job), &job->v, 0);
}

/* Queries a unit takes of each head of a group: MHA__ROWS rows in all, evenly cut. */
static ptrdiff_t mha__most_queries(ptrdiff_t group)
{
    return mha__max(MHA__ROWS / mha__max(group, 1), 1); /* never 0; clang-tidy asks */
}

/* Whether each lane packs for itself: best when a head is one lane's work, and it is where there
   are enough of them, or a unit is all queries of a head. The attention weights need k once more. */
static int mha__pack_local(ptrdiff_t batch, ptrdiff_t kv_heads, ptrdiff_t group, ptrdiff_t seq,
                           int threads, int weights)
{
    size_t n = mha__mul((size_t)batch, (size_t)kv_heads), t = (size_t)threads;
    if (weights) return 0;
    return threads <= 1 || n % t == 0 || n / 4 >= t || seq <= mha__most_queries(group);
}

static ptrdiff_t mha__unit_queries(const mha__kernels *kern, ptrdiff_t group, ptrdiff_t seq)
{
    ptrdiff_t most = mha__most_queries(group), n = mha__div_up(seq, mha__div_up(seq, most));
    return mha__min(mha__div_up(n, kern->mr) * kern->mr, most);
}

enum {
    MHA__KV_SHARED, /* packed k and v are in the workspace */
    MHA__KV_LOCAL,  /* in each lane's scratch: see mha__pack_local */
    MHA__KV_CACHED, /* in a cache */
    MHA__KV_COMPACT /* in a cache, and widened in each lane's scratch, one block at a time */
};

/* scratch of a lane: q and o of a unit as tiles, one tile of scores, two numbers and a mha__row
   a row; then k and v packed, when local: of a block if a unit is all queries, else of all keys;
   of a block when compact */
static size_t mha__attend_scratch(const mha__kernels *kern, ptrdiff_t group, ptrdiff_t seq,
                                  ptrdiff_t keys, ptrdiff_t d_k, ptrdiff_t d_v, int kv,
                                  size_t *kv_at)
{
    /* mha__unit_queries at most: what it gives may be less for a longer seq, memory may not */
    ptrdiff_t most = mha__most_queries(group), mr = kern->mr;
    ptrdiff_t queries = mha__min(mha__div_up(mha__min(seq, most), mr) * mr, most);
    ptrdiff_t rows = mha__div_up(mha__min(group * queries, PTRDIFF_MAX - mr), mr) * mr;
    size_t bytes = 0;
    mha__take(&bytes, mha__floats(kern->mr, MHA__KEYS, 1, 1));
    mha__take(&bytes, mha__floats(rows, mha__div_up(d_k, MHA__NR), MHA__NR, 1));
    mha__take(&bytes, mha__floats(rows, mha__div_up(d_v, MHA__NR), MHA__NR, 1));
    mha__take(&bytes, mha__floats(rows, 2, 1, 1));
    mha__take(&bytes, mha__mul((size_t)rows, sizeof(mha__row)));
    if (kv == MHA__KV_COMPACT || (queries >= seq && keys > MHA__KEYS)) keys = MHA__KEYS;
    *kv_at = bytes;
    if (kv == MHA__KV_LOCAL || kv == MHA__KV_COMPACT) {
        mha__take(&bytes, mha__keys_bytes(1, 1, keys, d_k));
        mha__take(&bytes, mha__values_bytes(1, 1, keys, d_v));
    }
    return bytes;
}

/* ---- the careful way ----

   Two things can spoil a row that should be fine: something non-finite in v that other rows of
   its tile see, or that it sees itself with a score of -inf (0 * NaN is NaN), and scores so large
   that times log2(e) they are no float. Both show in the result, so nothing is paid for them
   beforehand. A tile in which it shows is done again with values taken key by key, which adds the
   same terms in the same order, those with a score of -inf left out: rows that were right keep their
   bits. Rows whose sum is still no good are done once more with scores in units of 16. (The whole
   unit goes that way, but of the other tiles the results are written by then, and stay.) */

#define MHA__CAREFUL (1.0f / 16.0f)

/* kern->softmax and kern->gemm of one tile, o = alpha * o + softmax(s) v, over n keys. */
MHA__APART void mha__careful_step(const mha__kernels *kern, int m, int n, int panels, float unit,
                                  float *s, const float *v, ptrdiff_t v_row, ptrdiff_t v_panel,
                                  const float *v_scale, float *o, float *top, float *sum)
{
    int np = (n + MHA__NR - 1) / MHA__NR, mr = kern->mr, i, j;
    for (i = 0; i < m; i++) {
        float hi = top[i], was, alpha;
        unsigned char excluded[MHA__KEYS];
        for (j = 0; j < np * MHA__NR; j++) {
            float x = s[(j / MHA__NR * mr + i) * MHA__NR + j % MHA__NR];
            excluded[j] = mha__bits(x) == MHA__NINF;
            hi = x > hi ? x : hi;
        }
        for (j = 0; j < np * MHA__NR; j++) {
            float *x = s + (j / MHA__NR * mr + i) * MHA__NR + j % MHA__NR;
            *x = (*x - hi) / unit;
        }
        was = (top[i] - hi) / unit;
        kern->softmax(1, np, s + i * MHA__NR, &was, sum + i, &alpha);
        top[i] = hi;
        if (v_scale) kern->times(1, np, s + i * MHA__NR, v_scale);
        kern->gemm(1, panels, 0, s, v, 0, 0, o + i * MHA__NR, &alpha, NULL);
        for (j = 0; j < n; j++)
            if (!excluded[j])
                kern->gemm(1, panels, 1, s + (j / MHA__NR * mr + i) * MHA__NR + j % MHA__NR,
                           v + j * v_row, v_row, v_panel, o + i * MHA__NR, mha__ones, NULL);
    }
}

/* A block of up to MHA__KEYS keys and values from j0 on, and how they lie. */
typedef struct mha__block {
    ptrdiff_t b, g, hi;     /* of sequence b and kv head g, of whose keys none from hi on is seen */
    ptrdiff_t j0, from, to; /* of this block, from .. to-1 are, from a multiple of 16 */
    int whole;              /* by all rows, masks aside */
    int lazy;               /* to be packed or widened, if that is needed, when it is made */
    int alone;              /* so few rows use it that it is read where it lies */
    const float *k;         /* panels; or, with k_rows, rows */
    ptrdiff_t k_row;        /* that far apart, of which those that do not fill a panel */
    float *k_room;          /* are packed here */
    int k_rows;
    const float *v; /* rows of panels */
    ptrdiff_t v_row, v_panel;
    int compact; /* k and v are in a compact cache, from here on: */
    const char *k_at, *v_at;
    int scaled; /* INT8: numbers of key j are times k_scale[j], of value j times v_scale[j]: here
                   products with keys are, and weights before they meet values */
    float k_scale[MHA__KEYS], v_scale[MHA__KEYS];
    int once; /* few tiles use the block, where it lies: the caller's, or a cache's */
} mha__block;

/* Keys that one tile alone uses come straight from memory, which is to be kept busy. Panels of floats,
   one after the other, not four at a time (10 % of the time of a layer), and values are streams, which
   the CPU fetches ahead: see mha__want_pages. Rows of keys are none, as a line of each of 16 or 32 is
   read, then the next line: see mha__come. Of compact ones, what is MHA__FAR bytes on is asked for, a
   few lines at a time (of many at once the CPU drops what it cannot take): at 16384 keys of d = 128,
   F16 and BF16 are 1.2 to 1.9 times as fast on Zen 4, INT8 1.1 to 1.4. 8 KiB are as good as 16. */
#define MHA__FAR 16384

/* Asks for n rows of so many bytes ahead of their use: into L2, as what is asked for L1 holds up
   loads that wait for memory too. Inlined, as all that only asks: gcc drops calls of functions that do
   nothing else. */
MHA__INLINE void mha__fetch(const void *from, ptrdiff_t row, ptrdiff_t n, ptrdiff_t bytes)
{
    ptrdiff_t i, c;
    for (i = 0; i < n; i++)
        for (c = 0; c < bytes; c += 64) MHA__PREFETCH_L2((const char *)from + i * row + c);
}

/* n rows of d floats, those that are adjacent by reading them. */
MHA__INLINE void mha__fetch_rows(const float *from, ptrdiff_t row, ptrdiff_t d, ptrdiff_t n)
{
    ptrdiff_t i;
    if (row != d) mha__fetch(from, row * (ptrdiff_t)sizeof(float), n, d * (ptrdiff_t)sizeof(float));
    else
        for (i = 0; i < n * d; i += MHA__NR) MHA__TOUCH(from + i);
}

/* s [m,n] = q k^T, for keys from .. from + n - 1 of a block that few tiles use, from a multiple
   of 16. wanted: what is asked for meanwhile, to which pages to come are added; or null. */
static void mha__products(const mha__attend_job *job, int m, const float *q,
                          const mha__block *block, ptrdiff_t from, ptrdiff_t n, float *s,
                          mha__wanted *wanted)
{
    const mha__kernels *kern = job->kern;
    ptrdiff_t panels = block->k_rows ? n / MHA__NR : mha__div_up(n, MHA__NR), p, did, left;
    ptrdiff_t panel = (block->k_rows ? MHA__NR * block->k_row : job->k.t_hi) *
                      (ptrdiff_t)mha__type_size(job->k.type);
    /* panels at a time: rows that are read ahead, and those that are used, should both fit in L1,
       where few of those a multiple of 2 KiB apart do */
    int adjacent = block->k_row == job->d_k, apart = block->k_row % 512 == 0;
    int single = block->k_rows && ((adjacent && (m > 1 || job->d_k > 96)) || (apart && m == 1));
    int asks =
        wanted && job->large && !block->k_rows && !block->compact ? kern->asks : MHA__ASKS_NOT;
    int lines = asks == MHA__ASKS_LINES && m == 1; /* else 2 % slower from DRAM */
    ptrdiff_t most = block->compact ? 4 : single ? 1 : 2;
    const char *at = block->compact ? block->k_at : (const char *)block->k;
    if (lines) most = mha__max(2 * MHA__NEAR_AHEAD / panel, 1);
    at += from / MHA__NR * panel;
    if (block->k_rows)
        mha__fetch_rows((const float *)(const void *)at, block->k_row, job->d_k,
                        mha__min(most * MHA__NR, n));
    for (p = 0; p < panels; p += did, at += did * panel, s += did * kern->mr * MHA__NR) {
        const float *keys = (const float *)(const void *)at;
        did = mha__min(panels - p, most);
        left = block->hi - block->j0 - from - (p + did) * MHA__NR; /* keys after these */
        if (block->k_rows)
            kern->dots(m, (int)did, (int)job->d_k, q, keys, block->k_row,
                       left >= did * MHA__NR ? keys + did * MHA__NR * block->k_row : NULL,
                       kern->asks, s);
        else if (block->compact)
            kern->narrow(m, (int)did, (int)job->d_k, q, job->k.type, at, MHA__NR, job->k.t_hi,
                         MHA__FAR, s, NULL);
        else {
            if (asks == MHA__ASKS_PAGES) mha__want_pages(wanted, keys, 0, 1, did * job->k.t_hi);
            if (lines) mha__fetch_near(keys, did * panel);
            kern->gemm(m, (int)did, (int)job->d_k, q, keys, MHA__NR, job->k.t_hi, s, NULL, wanted);
        }
    }
    if (block->k_rows && n % MHA__NR) { /* what does not fill a panel */
        mha__place room = mha__place_keys(block->k_room, 1, MHA__NR, job->d_k);
        mha__pack_head(kern, (const float *)(const void *)at, block->k_row, job->d_k, &room, 0, 0,
                       0, n % MHA__NR, 0);
        kern->gemm(m, 1, (int)job->d_k, q, block->k_room, MHA__NR, 0, s, NULL, NULL);
    }
}

/* Scores of a tile of m rows against a block of keys, with cap, biases and exclusions. rows: what
   they are; unit: of the scores. The rows see keys *from .. *from + n - 1 of the block at most,
   *from a multiple of 16: s holds those, and n is returned; 0: none. */
static int mha__scores(const mha__attend_job *job, ptrdiff_t b, mha__row *rows, int m,
                       const mha__block *block, float unit, const float *q, float *s, int *from,
                       mha__wanted *wanted)
{
    ptrdiff_t lo = MHA__KEYS, hi = 0, all_lo = 0, all_hi = MHA__KEYS, n;
    int i, np, any = 0, ranges, first = 0;
    if (block->whole) {
        lo = all_lo = block->from - block->j0;
        hi = all_hi = block->to - block->j0;
    }
    for (i = 0; i < m && !block->whole; i++) {
        ptrdiff_t l = mha__max(rows[i].lo - block->j0, 0);
        ptrdiff_t h = mha__min(rows[i].hi - block->j0, MHA__KEYS);
        if (l < h) {
            lo = mha__min(lo, l);
            hi = mha__max(hi, h);
        }
        all_lo = mha__max(all_lo, l);
        all_hi = mha__min(all_hi, h);
    }
    if (lo >= hi) return 0;
    lo = lo / MHA__NR * MHA__NR;
    n = hi - lo;
    np = (int)mha__div_up(n, MHA__NR);
    *from = (int)lo;
    if (block->once) mha__products(job, m, q, block, lo, n, s, wanted);
    else
        job->kern->gemm(m, np, (int)job->d_k, q, block->k + lo / MHA__NR * job->k.t_hi, MHA__NR,
                        job->k.t_hi, s, NULL, wanted);
    if (block->scaled) job->kern->times(m, np, s, block->k_scale + lo);
    ranges = !job->mask.allow && !job->mask.bias && !job->mask.key_padding && !job->alibi &&
             job->softcap == 0.0f;
    /* nothing but ranges of keys: what all rows see stays as it is */
    if (ranges && all_lo <= lo) first = (int)mha__min(mha__max(all_hi - lo, 0) / MHA__NR, np);
    for (i = 0; i < m; i++) {
        ptrdiff_t j = block->j0 + lo + first * MHA__NR;
        float *row = s + (first * job->kern->mr + i) * MHA__NR;
        int left = ranges && (block->whole || mha__max(rows[i].lo, block->j0) <
                                                  mha__min(rows[i].hi, block->j0 + MHA__KEYS));
        if (first < np && ranges) mha__exclude(&rows[i], j, np - first, job->kern->mr, row);
        else if (first < np && mha__shape_row(job, b, &rows[i], j, np - first, unit, row)) left = 1;
        if (left) rows[i].seen = any = 1;
    }
    return any ? (int)n : 0;
}

/* ---- a unit: some queries of all heads that share a kv head ----

   Rows of several heads stand in one tile, so that k and v are read once for the group. */

typedef struct mha__unit {
    const mha__attend_job *job;
    ptrdiff_t b, g, queries, rows;
    ptrdiff_t qtile, otile, height; /* floats of a tile, and rows */
    float *s, *q, *o, *top, *sum;
    mha__row *row;
    float unit;  /* of scores */
    int careful; /* 0; then 1, 2: see "the careful way" */
} mha__unit;

/* Row r, whose results go to o, before it sees a key: the scores that have none. They are a sink, a
   key and value of the layer's own, and a key and value of zeros, if they are there. */
MHA__APART void mha__row_start(mha__unit *u, ptrdiff_t r, const float *q, float *o)
{
    const mha__attend_job *job = u->job;
    ptrdiff_t h = u->row[r].head, g = u->g, mr = job->kern->mr, c;
    float score[3], top = -FLT_MAX, sum = 0.0f;
    const float *value[3];
    int count = 0, i;
    if (job->sink && mha__bits(job->sink[h]) != MHA__NINF) {
        value[count] = job->sink_value ? job->sink_value + h * job->d_v : NULL;
        score[count++] = (float)((double)job->sink[h] * MHA__LOG2E * (double)u->unit);
    }
    if (job->bias_k) {
        double dot = 0.0;
        for (c = 0; c < job->d_k; c++) dot += (double)q[c] * (double)job->bias_k[g * job->d_k + c];
        dot *= (double)job->scale;
        if (job->softcap != 0.0f) {
            double cap = (double)job->softcap * MHA__LOG2E;
            dot = cap * tanh(dot / cap);
        }
        value[count] = job->bias_v + g * job->d_v;
        score[count++] = (float)(dot * (double)u->unit);
    }
    if (job->zero_attn) {
        value[count] = NULL;
        score[count++] = 0.0f;
    }
    u->row[r].seen = job->bias_k || job->zero_attn;
    for (i = 0; i < count; i++)
        if (i == 0 || !(score[i] <= top)) top = score[i];
    for (i = 0; i < count; i++) {
        float w = mha__exp2((score[i] - top) / u->unit);
        sum += w;
        for (c = 0; value[i] && c < job->d_v; c++)
            o[c / MHA__NR * mr * MHA__NR + c % MHA__NR] += w * value[i][c];
    }
    u->top[r] = top;
    u->sum[r] = sum;
}

/* How many of m rows lie one after the other in q and o: queries in order, of one head. */
static ptrdiff_t mha__in_order(const mha__row *row, ptrdiff_t m)
{
    ptrdiff_t n = 1;
    while (n < m && row[n].head == row->head && row[n].query == row->query + n) n++;
    return n;
}

/* Lays out the scratch, packs q. Rows whose gate is 0 are left out: they are zeros. */
MHA__APART void mha__unit_begin(mha__unit *u, const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g,
                                ptrdiff_t i0, float *scratch, int careful)
{
    ptrdiff_t group = job->heads / job->kv_heads, mr = job->kern->mr, tiles, r, h, i, n;
    int start = job->sink || job->bias_k || job->zero_attn;
    int skip = job->gate && !job->lse && !job->top;
    mha__view view = mha__view_make(job, b);
    float *tile, *o, mul[MHA__MR_MAX];
    u->job = job;
    u->b = b;
    u->g = g;
    u->queries = mha__min(job->queries, mha__length(job->cu_q, job->seq, b) - i0);
    u->careful = careful;
    u->unit = careful == 2 ? MHA__CAREFUL : 1.0f;
    tiles = mha__div_up(group * u->queries, mr);
    u->qtile = mha__tile_floats(job->kern->mr, job->d_k);
    u->otile = mha__tile_floats(job->kern->mr, job->d_v);
    u->height = mha__height(job->kern, group * u->queries);
    u->s = scratch;
    u->q = u->s + MHA__KEYS * mr;
    u->o = u->q + tiles * u->qtile;
    u->top = u->o + tiles * u->otile;
    u->sum = u->top + tiles * mr;
    u->row = (mha__row *)(void *)(u->top + mha__div_up(2 * tiles * mr, MHA__NR) * MHA__NR);
    if (careful || start) memset(u->o, 0, (size_t)(tiles * u->otile) * sizeof(float));
    for (r = 0, h = g * group; h < (g + 1) * group; h++)
        for (i = i0; i < i0 + u->queries; i++) {
            float gate = mha__gate_of(job, b, h, i);
            if (skip && mha__is_zero(gate)) {
                memset(job->o + mha__at(&job->o_stride, job->cu_q, b, h, i), 0,
                       (size_t)job->d_v * sizeof(float));
                continue;
            }
            mha__row_make(&job->mask, &view, &u->row[r], h, i);
            u->row[r].gate = gate;
            u->row[r].seen = 0;
            u->row[r].started = careful > 0 || start;
            if (!careful) u->row[r].done = 0;
            u->top[r] = -FLT_MAX;
            u->sum[r++] = 0.0f;
        }
    u->rows = r;
    for (i = 0; i < MHA__MR_MAX; i++) mul[i] = job->scale * u->unit;
    for (r = i = 0, tile = u->q, o = u->o; r < u->rows; r += n, i += n) {
        const mha__row *row = u->row + r;
        const float *src = job->q + mha__at(&job->q_stride, job->cu_q, b, row->head, row->query);
        if (i == u->height) i = 0, tile += u->qtile, o += u->otile;
        n = mha__in_order(row, mha__min(u->height - i, u->rows - r));
        mha__tile_rows(job->kern, tile + i * MHA__NR, n, job->d_k, src, job->q_stride.seq, mul);
        for (h = 0; h < n && start; h++)
            mha__row_start(u, r + h, src + h * job->q_stride.seq, o + (i + h) * MHA__NR);
    }
}

/* n rows of d floats. */
static void mha__want_rows(mha__wanted *w, const float *from, ptrdiff_t row, ptrdiff_t n,
                           ptrdiff_t d)
{
    mha__want(w, from, row, n, mha__div_up(d, MHA__NR));
}

/* Wanted while rows r .. r+m-1 are worked on: the same rows of q and o of the kv head that is next, and
   their share of its k and v. 96 heads of 128 queries, 13 MB, are 16 % faster for it on one thread of
   Sapphire Rapids, 8 to 22 % on Zen 4, 256 heads of 64, 17 MB, 16 to 37 % there, 12 of 1024, 13 MB,
   1 %. Below MHA__CACHED bytes they stay in the caches, and asking would cost 2 %. More than
   MHA__FETCHED keys would not stay in L2. More than four keys a query are too many to ask for
   meanwhile: with one query it would take 1.3 times as long from L3, with four 1.2 times, from DRAM
   too. */
#ifndef MHA__CACHED /* 0 in some of the tests */
#define MHA__CACHED ((size_t)6 << 20)
#endif
#define MHA__FETCHED (4 * MHA__KEYS)

static void mha__want_head(mha__wanted *keys, mha__wanted *values, const mha__unit *u, ptrdiff_t r,
                           int m)
{
    const mha__attend_job *job = u->job;
    ptrdiff_t group = job->heads / job->kv_heads, next = u->b * job->kv_heads + u->g + job->ahead;
    ptrdiff_t b = next / job->kv_heads, g = next % job->kv_heads;
    ptrdiff_t i, run, t = 0, n = 0;
    if (b >= job->batch || job->seq < 1) return; /* there is no seq of 0: clang-tidy cannot know */
    for (i = 0; i < m; i += run) {
        const mha__row *row = u->row + r + i;
        ptrdiff_t h = row->head + (g - u->g) * group, at = row->query;
        run = mha__in_order(row, m - i);
        mha__want_rows(keys, job->q + mha__at(&job->q_stride, NULL, b, h, at), job->q_stride.seq,
                       run, job->d_k);
        mha__want_rows(values, job->o + mha__at(&job->o_stride, NULL, b, h, at), job->o_stride.seq,
                       run, job->d_v);
        if (row->head == u->g * group) { /* k and v once for the group */
            if (n == 0) t = job->keys * at / job->seq;
            n = job->keys * (at + run) / job->seq - t;
        }
    }
    if (n == 0) return;
    if (job->local)
        mha__want_rows(keys, job->k_from + mha__at(&job->k_stride, NULL, b, g, t),
                       job->k_stride.seq, n, job->d_k);
    else
        mha__want_rows(keys, job->k.data + b * job->k.batch + g * job->k.head + t * job->d_k,
                       job->d_k, n, job->d_k);
    if (job->local || job->v_rows)
        mha__want_rows(values, job->v_from + mha__at(&job->v_stride, NULL, b, g, t),
                       job->v_stride.seq, n, job->d_v);
    else
        mha__want_rows(values, job->v.data + b * job->v.batch + g * job->v.head + t * job->d_v,
                       job->d_v, n, job->d_v);
}

/* o [m, 16*panels] = alpha * o + s v, over n keys of a block from key from on; alpha null: o starts at
   zero. Rows of values in place that gemm does not take whole are no stream, as keys are not: 16 of
   them are read first. From DRAM that is 1.2 to 1.5 times as fast, one query a key from d = 128 on, or
   with AVX2 2 to 4 of them; from L3 that of AVX2 is 10 % slower. Two passes, four queries, of AVX-512
   are 1.1 times as fast from DRAM, but 12 to 20 % slower from L3: not those. wanted: as in
   mha__products. */
static void mha__values(const mha__attend_job *job, const mha__block *block, int m, int panels,
                        int n, int from, const float *s, const float *alpha, float *o,
                        mha__wanted *wanted)
{
    const mha__kernels *kern = job->kern;
    int most = m == 1 ? MHA__N_BLOCK : kern->terms ? 1 : 2 * MHA__N_BLOCK;
    int pieces = block->alone && block->v_panel == MHA__NR && panels > most;
    int step = pieces ? MHA__NR : n, k, kn;
    int stream = wanted && kern->asks == MHA__ASKS_PAGES && job->large && block->alone;
    if (block->compact) {
        kern->narrow(m, panels, n, s, job->v.type,
                     block->v_at + from * MHA__NR * (ptrdiff_t)mha__type_size(job->v.type), MHA__NR,
                     job->v.c_hi, MHA__FAR, o, alpha);
        return;
    }
    for (k = 0; k < n; k += step) {
        const float *v = block->v + (from + k) * block->v_row;
        kn = (int)mha__min(step, n - k);
        if (pieces) mha__fetch_rows(v, block->v_row, panels * MHA__NR, kn);
        if (stream && block->v_row == MHA__NR)
            mha__want_pages(wanted, v, block->v_panel, panels, kn * MHA__NR);
        else if (stream && block->v_row == panels * MHA__NR)
            mha__want_pages(wanted, v, 0, 1, kn * block->v_row);
        kern->gemm(m, panels, kn, s + k * kern->mr, v, block->v_row, block->v_panel, o,
                   k ? mha__ones : alpha, wanted);
    }
}

/* One block of keys, for all tiles. */
MHA__APART void mha__unit_block(mha__unit *u, const mha__block *block)
{
    const mha__attend_job *job = u->job;
    const mha__kernels *kern = job->kern;
    float *q = u->q, *o = u->o, alpha[MHA__MR_MAX];
    mha__wanted keys, values; /* for either product to ask for: the next head, and pages to come */
    ptrdiff_t r;
    int from = 0, m, n, np, asks, panels = (int)mha__panels_v(job);
    for (r = 0; r < u->rows; r += m, q += u->qtile, o += u->otile) {
        mha__row *row = u->row + r;
        m = (int)mha__min(u->height, u->rows - r);
        asks = job->ahead || r == 0; /* the first tile asks for the pages of a block */
        mha__wanted_none(&keys);
        mha__wanted_none(&values);
        if (job->ahead && block->to == block->hi) mha__want_head(&keys, &values, u, r, m);
        n = mha__scores(job, u->b, row, m, block, u->unit, q, u->s, &from, asks ? &keys : NULL);
        if (n == 0) {
            mha__wanted_now(&keys);
            mha__wanted_now(&values);
            continue;
        }
        if (u->careful) {
            mha__careful_step(kern, m, n, panels, u->unit, u->s, block->v + from * block->v_row,
                              block->v_row, block->v_panel,
                              block->scaled ? block->v_scale + from : NULL, o, u->top + r,
                              u->sum + r);
            continue;
        }
        np = (n + MHA__NR - 1) / MHA__NR;
        kern->softmax(m, np, u->s, u->top + r, u->sum + r, alpha);
        if (block->scaled) kern->times(m, np, u->s, block->v_scale + from);
        mha__values(job, block, m, panels, n, from, u->s, row->started ? alpha : NULL, o,
                    asks ? &values : NULL);
        row->started = 1;
    }
}

/* Whether the sum of row r is one to divide by. */
static int mha__row_good(const mha__unit *u, ptrdiff_t r)
{
    return !u->row[r].seen || mha__bits(u->sum[r]) - 1 < 0x7f7fffffu; /* finite and above 0 */
}

/* Whether the results of a tile, rows r .. r+m-1, stand as they came the first way. */
static int mha__tile_good(const mha__unit *u, ptrdiff_t r, ptrdiff_t m, const float *o)
{
    const mha__kernels *kern = u->job->kern;
    ptrdiff_t mr = kern->mr, full = u->job->d_v / MHA__NR, rest = u->job->d_v % MHA__NR, i, c;
    for (i = 0; i < m; i++)
        if (!mha__row_good(u, r + i)) return 0;
    if (!u->row[r].started) return 1;
    if (m == mr && !kern->finite(full * mr * MHA__NR, o)) return 0;
    for (c = 0; c < full && m < mr; c++)
        if (!kern->finite(m * MHA__NR, o + c * mr * MHA__NR)) return 0;
    for (i = 0; i < m && rest; i++)
        for (c = 0; c < rest; c++)
            if (!mha__is_finite(o[(full * mr + i) * MHA__NR + c])) return 0;
    return 1;
}

/* Writes the results of n rows from r on, which lie one after the other, from a tile at o. */
static void mha__rows_end(const mha__unit *u, ptrdiff_t r, ptrdiff_t n, const float *o)
{
    const mha__attend_job *job = u->job;
    ptrdiff_t mr = job->kern->mr, full = job->d_v / MHA__NR, i, c;
    ptrdiff_t h = u->row[r].head, at = mha__row_index(job, u->b, h, u->row[r].query);
    float *to = job->o + mha__at(&job->o_stride, job->cu_q, u->b, h, u->row[r].query);
    float inv[MHA__MR_MAX], mul[MHA__MR_MAX];
    int more = job->top || job->lse || full * MHA__NR < job->d_v;
    for (i = 0; i < n; i++) {
        mha__row *row = &u->row[r + i];
        inv[i] = row->seen ? 1.0f / u->sum[r + i] : 0.0f;
        mul[i] = inv[i] * row->gate;
        row->done = 1;
        if (!row->seen || mha__is_zero(row->gate)) more = 1;
    }
    job->kern->copy((int)n, (int)full, o, MHA__NR, mr * MHA__NR, to, job->o_stride.seq, MHA__NR,
                    mul, NULL);
    for (i = 0; i < n && more; i++, at++) {
        const mha__row *row = &u->row[r + i];
        float *end = to + i * job->o_stride.seq;
        for (c = full * MHA__NR; c < job->d_v; c++)
            end[c] = o[(full * mr + i) * MHA__NR + c % MHA__NR] * mul[i] + 0.0f;
        /* whatever it was that was multiplied by 0 */
        if (!row->seen || mha__is_zero(row->gate)) memset(end, 0, (size_t)job->d_v * sizeof(float));
        if (job->top) {
            job->top[at] = row->seen ? u->top[r + i] * (MHA__CAREFUL / u->unit) : 0.0f;
            job->inv[at] = inv[i];
        }
        if (job->lse) {
            double top = (double)u->top[r + i] / (double)u->unit;
            job->lse[at] = row->seen ? (float)(top * MHA__LN2 + log((double)u->sum[r + i]))
                                     : mha__float(MHA__NINF);
        }
    }
}

/* Writes the results of the rows that have none yet, but for those that have to be done again:
   returns 0 if there are any. */
MHA__APART int mha__unit_end(const mha__unit *u)
{
    ptrdiff_t r, m, i, n;
    const float *o = u->o;
    int all = 1;
    for (r = 0; r < u->rows; r += m, o += u->otile) {
        m = mha__min(u->height, u->rows - r);
        if (!u->careful && !mha__tile_good(u, r, m, o)) {
            all = 0;
            continue;
        }
        for (i = 0; i < m; i += n) {
            n = u->careful ? 1 : mha__in_order(u->row + r + i, m - i);
            if (u->row[r + i].done) continue;
            if (u->careful == 1 && !mha__row_good(u, r + i)) all = 0;
            else mha__rows_end(u, r + i, n, o + i * MHA__NR);
        }
    }
    return all;
}

/* Where position t of head g of sequence b is in a compact cache; t is a multiple of 16. */
static const char *mha__compact_at(const mha__place *x, ptrdiff_t b, ptrdiff_t g, ptrdiff_t t)
{
    ptrdiff_t slot = x->ring ? t % x->ring : t;
    return (const char *)x->compact + (b * x->batch + g * x->head + slot / MHA__NR * x->t_hi) *
                                          (ptrdiff_t)mha__type_size(x->type);
}

/* Of a block, the scales of t0 .. t1-1, and 0 for the rest: there may be none after the last key. */
static void mha__scales(const mha__place *x, ptrdiff_t b, ptrdiff_t g, ptrdiff_t heads,
                        ptrdiff_t j0, ptrdiff_t t0, ptrdiff_t t1, float *to)
{
    ptrdiff_t slot = x->ring ? t0 % x->ring : t0;
    memset(to, 0, MHA__KEYS * sizeof(float));
    memcpy(to + t0 - j0, x->scale + (b * heads + g) * x->scales + slot,
           (size_t)(t1 - t0) * sizeof(float));
}

/* ---- a block, as few copies as can be ---- */

/* The block from j0 on, for so many rows of kv head g of sequence b and what they see. What it holds
   is for the two functions below. */
static void mha__block_make(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g,
                            const mha__sight *span, ptrdiff_t j0, int lazy, ptrdiff_t rows,
                            int careful, mha__block *x)
{
    x->b = b;
    x->g = g;
    x->hi = span->hi;
    x->j0 = j0;
    x->from = mha__max(j0, span->lo / MHA__NR * MHA__NR);
    x->to = mha__min(j0 + MHA__KEYS, span->hi);
    x->whole = span->all_lo <= x->from && span->all_hi >= x->to && x->from < x->to;
    x->lazy = lazy;
    /* or two tiles of four: transposing them twice is 1.2 times as fast from DRAM as packing, and 1 to
       6 % slower from L3; with AVX2 and three such passes it is 15 % slower. In a cache of floats, read
       panel by panel then, d = 128: 3 % faster at 1024 keys, 7 % at 8192 */
    x->alone = rows <= job->kern->mr || (job->kern->even && rows <= 8);
    x->compact =
        job->k.type != MHA_F32 && !careful && rows <= job->kern->narrow_tiles / 2 * job->kern->mr;
    x->scaled = job->k.type == MHA_INT8;
}

/* Its keys: where they lie, if one tile uses them or they are packed, else in k, which is room. */
MHA__APART void mha__block_keys(const mha__attend_job *job, const mha__place *k, mha__block *x)
{
    const mha__kernels *kern = job->kern;
    ptrdiff_t at = k->ring ? x->j0 % k->ring : x->j0, t;
    int floats = job->k.type == MHA_F32;
    x->k = k->data + (x->lazy ? 0 : at / MHA__NR * k->t_hi);
    x->k_rows = x->lazy && x->alone && floats && kern->dots && job->d_k % MHA__NR == 0;
    x->k_row = 0;
    x->k_room = k->data;
    x->once = x->k_rows || x->compact || (x->alone && !x->lazy && !job->local && job->tiles == 1);
    if (x->scaled)
        mha__scales(&job->k, x->b, x->g, job->kv_heads, x->j0, x->from, x->to, x->k_scale);
    if (x->compact) {
        x->k_at = mha__compact_at(&job->k, x->b, x->g, x->j0);
    } else if (x->k_rows) {
        x->k = job->k_from + mha__at(&job->k_stride, job->cu_k, x->b, x->g, x->j0);
        x->k_row = job->k_stride.seq;
    } else if (x->lazy && floats) {
        mha__pack_k(job, x->b, x->g, x->from, x->to, k, x->j0);
    } else if (x->lazy) {
        for (t = x->from; t < x->to; t += MHA__NR)
            kern->widen(job->k.type, job->d_k, mha__compact_at(&job->k, x->b, x->g, t),
                        k->data + (t - x->j0) / MHA__NR * job->k.t_hi);
    }
}

/* Panels p0 .. p1-1 of its values, likewise. */
MHA__APART void mha__block_values(const mha__attend_job *job, const mha__place *v, ptrdiff_t p0,
                                  ptrdiff_t p1, mha__block *x)
{
    ptrdiff_t at = v->ring ? x->j0 % v->ring : x->j0, p,
              size = (ptrdiff_t)mha__type_size(job->v.type);
    int floats = job->v.type == MHA_F32;
    x->v = v->data + p0 * v->c_hi + (x->lazy ? 0 : at * MHA__NR);
    x->v_row = MHA__NR;
    x->v_panel = v->c_hi;
    if (x->scaled)
        mha__scales(&job->v, x->b, x->g, job->kv_heads, x->j0, x->from, x->to, x->v_scale);
    if (x->compact) {
        x->v_at = mha__compact_at(&job->v, x->b, x->g, x->j0) + p0 * job->v.c_hi * size;
    } else if (job->v_rows || (x->lazy && x->alone && floats && job->d_v % MHA__NR == 0)) {
        x->v = job->v_from + mha__at(&job->v_stride, job->cu_k, x->b, x->g, x->j0) + p0 * MHA__NR;
        x->v_row = job->v_stride.seq;
        x->v_panel = MHA__NR;
    } else if (x->lazy && floats) {
        mha__pack_v(job, x->b, x->g, x->from, x->to, p0, p1, v, x->j0);
    } else if (x->lazy) {
        const char *from = mha__compact_at(&job->v, x->b, x->g, x->from);
        for (p = p0; p < p1; p++)
            job->kern->widen(job->v.type, x->to - x->from, from + p * job->v.c_hi * size,
                             v->data + (p * MHA__KEYS + x->from - x->j0) * MHA__NR);
    }
}

/* Queries i0 .. of kv head g of sequence b. k, v: that head, packed; or, with lazy, room for one
   block, which is packed or widened here as it is needed. careful: where to begin, 1 if
   the first way was taken already. */
static void mha__attend_tiles(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g, ptrdiff_t i0,
                              const mha__place *k, const mha__place *v, int lazy, float *scratch,
                              int careful)
{
    ptrdiff_t end = mha__min(i0 + job->queries, mha__length(job->cu_q, job->seq, b)), j0;
    mha__sight span;
    mha__unit u;
    if (i0 >= end) return;
    span = mha__sight_of(job, b, i0, end);
    for (; careful < 3; careful++) {
        mha__unit_begin(&u, job, b, g, i0, scratch, careful);
        for (j0 = span.lo / MHA__KEYS * MHA__KEYS; j0 < span.hi && u.rows; j0 += MHA__KEYS) {
            mha__block block;
            mha__block_make(job, b, g, &span, j0, lazy, u.rows, careful, &block);
            mha__block_keys(job, k, &block);
            mha__block_values(job, v, 0, mha__panels_v(job), &block);
            mha__unit_block(&u, &block);
        }
        if (mha__unit_end(&u)) break;
    }
}

/* Room for packed k and v in a lane's scratch. */
static void mha__room(const mha__attend_job *job, ptrdiff_t keys, float *scratch, mha__place *k,
                      mha__place *v)
{
    float *at = scratch + job->kv_at;
    *k = mha__place_keys(at, 1, keys, job->d_k);
    at += (ptrdiff_t)((mha__keys_bytes(1, 1, keys, job->d_k) + 63) / 64 * (64 / sizeof(float)));
    *v = mha__place_values(at, 1, keys, job->d_v);
}

/* k and v of head g of sequence b, packed: 0. Or 1, and room for a block of them in a lane's scratch,
   which is packed or widened there if it is needed. */
MHA__APART int mha__kv_of(const mha__attend_job *job, ptrdiff_t b, ptrdiff_t g, float *scratch,
                          mha__place *k, mha__place *v)
{
    if (job->local || job->k.type != MHA_F32) {
        mha__room(job, job->local ? mha__min(job->keys, MHA__KEYS) : MHA__KEYS, scratch, k, v);
        return 1;
    }
    *k = job->k;
    *v = job->v;
    k->data += b * k->batch + g * k->head + (k->origin ? k->origin[b] / MHA__NR * k->t_hi : 0);
    v->data += b * v->batch + g * v->head + (v->origin ? v->origin[b] * v->t_lo : 0);
    return 0;
}

static void mha__attend_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t tile = job->tiles - 1 - unit % job->tiles; /* causal: the longest first */
    ptrdiff_t b = unit / job->tiles / job->kv_heads, g = unit / job->tiles % job->kv_heads;
    mha__place k, v;
    int lazy = mha__kv_of(job, b, g, scratch, &k, &v);
    mha__attend_tiles(job, b, g, tile * job->queries, &k, &v, lazy, scratch, 0);
}

/* The same where a lane packs k and v for itself, all of them. A unit: all queries of one kv head. */
static void mha__attend_local_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t b = unit / job->kv_heads, g = unit % job->kv_heads, tile, from;
    ptrdiff_t seq = mha__length(job->cu_q, job->seq, b);
    mha__sight span;
    mha__place k, v;
    if (seq == 0) return;
    mha__room(job, job->keys, scratch, &k, &v);
    span = mha__sight_of(job, b, 0, seq);
    from = span.lo / MHA__NR * MHA__NR;
    if (span.lo < span.hi) { /* without keys, k and v may be null */
        mha__pack_k(job, b, g, from, span.hi, &k, 0);
        if (!job->v_rows) mha__pack_v(job, b, g, from, span.hi, 0, mha__panels_v(job), &v, 0);
    }
    for (tile = 0; tile < job->tiles; tile++)
        mha__attend_tiles(job, b, g, tile * job->queries, &k, &v, 0, scratch, 0);
}

/* ---- a unit that all lanes work on ----

   Few queries are one unit a kv head: of those there may be fewer than lanes, or some left over. What
   does not go evenly is shared: lanes take blocks of keys, and leave scores; softmax goes over them
   in order; lanes take tiles and panels of values, over all those blocks. No sum is then cut in
   another place than where one lane cuts it: same bits. As many blocks as there is room for are a
   round. One kv head with 4 queries, d = 256, is 1.5 to 1.8 times as fast on two threads, 2048 or
   16384 keys.

   A unit lives in the scratch of a lane, before its k and v; its scores are at job->shared. */

#define MHA__SHARED_HEAD (2 * MHA__NR) /* floats that a mha__shared takes */

/* Floats there for each lane: a block, in tiles of 4 rows or more. */
#define MHA__SHARED (MHA__ROWS * (MHA__KEYS + MHA__SHARED_HEAD / 4))

/* Bytes of k and v of a unit, as floats: less is done before lanes have met a few times. Eight times
   as many if it is one left over: there is less to gain, at 1 MiB nothing. */
#ifndef MHA__SHARED_LEAST /* 1 in some of the tests */
#define MHA__SHARED_LEAST ((size_t)1 << 19)
#endif

/* What stands before a tile of scores. */
typedef struct mha__shared {
    int n, from;   /* as mha__scores has it */
    int started;   /* o held something before */
    unsigned seen; /* bit i: row i sees a key */
    float alpha[MHA__MR_MAX];
} mha__shared;

static ptrdiff_t mha__shared_tiles(const mha__attend_job *job)
{
    return mha__div_up(job->heads / job->kv_heads * job->seq, job->kern->mr);
}

static mha__unit *mha__shared_unit(const mha__attend_job *job, ptrdiff_t unit)
{
    return (mha__unit *)(void *)(job->scratch + (size_t)unit * job->lane_bytes);
}

/* Tile i of block w of the round. */
static mha__shared *mha__shared_at(const mha__attend_job *job, ptrdiff_t unit, ptrdiff_t w,
                                   ptrdiff_t i)
{
    ptrdiff_t size = job->kern->mr * MHA__KEYS + MHA__SHARED_HEAD;
    i += (unit * job->window + w) * mha__shared_tiles(job);
    return (mha__shared *)(void *)(job->shared + i * size);
}

static float *mha__shared_scores(mha__shared *x)
{
    return (float *)(void *)x + MHA__SHARED_HEAD;
}

/* Makes block w of the round. Returns 0 if there is none. */
static int mha__shared_block(const mha__unit *u, ptrdiff_t w, int lazy, mha__block *x)
{
    mha__sight span;
    ptrdiff_t j0;
    if (u->rows == 0) return 0;
    span = mha__sight_of(u->job, u->b, 0, u->queries);
    j0 = (span.lo / MHA__KEYS + u->job->block + w) * MHA__KEYS;
    if (j0 >= span.hi) return 0;
    mha__block_make(u->job, u->b, u->g, &span, j0, lazy, u->rows, 0, x);
    return 1;
}

static void mha__shared_scores_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t at = unit / job->window, w = unit % job->window, i, m, n;
    const mha__unit *u = mha__shared_unit(job, at);
    ptrdiff_t height = u->height;
    mha__row row[MHA__MR_MAX];
    mha__place k, v;
    mha__block block;
    mha__wanted wanted;
    if (!mha__shared_block(u, w, mha__kv_of(job, u->b, u->g, scratch, &k, &v), &block)) return;
    mha__wanted_none(&wanted);
    mha__block_keys(job, &k, &block);
    for (i = 0; i * height < u->rows; i++) {
        mha__shared *x = mha__shared_at(job, at, w, i);
        m = mha__min(height, u->rows - i * height);
        for (n = 0; n < m; n++) {
            row[n] = u->row[i * height + n];
            row[n].seen = 0;
        }
        x->from = 0;
        x->n = mha__scores(job, u->b, row, (int)m, &block, u->unit, u->q + i * u->qtile,
                           mha__shared_scores(x), &x->from, i ? NULL : &wanted);
        for (n = 0, x->seen = 0; n < m; n++) x->seen |= (unsigned)row[n].seen << n;
    }
}

/* Softmax of part of a unit's tiles. */
static void mha__shared_softmax_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t at = unit / job->parts, part = unit % job->parts, w, i, m, n;
    const mha__unit *u = mha__shared_unit(job, at);
    ptrdiff_t height = u->height, tiles = mha__div_up(u->rows, height),
              end = tiles * (part + 1) / job->parts;
    mha__block block;
    (void)scratch;
    for (w = 0; w < job->window && mha__shared_block(u, w, 0, &block); w++) {
        if (block.scaled)
            mha__scales(&job->v, u->b, u->g, job->kv_heads, block.j0, block.from, block.to,
                        block.v_scale);
        for (i = tiles * part / job->parts; i < end; i++) {
            mha__shared *x = mha__shared_at(job, at, w, i);
            mha__row *row = u->row + i * height;
            int np = (int)mha__div_up(x->n, MHA__NR);
            if (x->n == 0) continue;
            m = mha__min(height, u->rows - i * height);
            for (n = 0; n < m; n++) row[n].seen |= (int)(x->seen >> n & 1u);
            x->started = row->started;
            row->started = 1;
            job->kern->softmax((int)m, np, mha__shared_scores(x), u->top + i * height,
                               u->sum + i * height, x->alpha);
            if (block.scaled)
                job->kern->times((int)m, np, mha__shared_scores(x), block.v_scale + x->from);
        }
    }
}

/* Those tiles times part of the values' panels. */
static void mha__shared_values_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    ptrdiff_t rest = unit / job->v_parts, v_part = unit % job->v_parts;
    ptrdiff_t at = rest / job->parts, part = rest % job->parts, w, i;
    ptrdiff_t p0 = mha__panels_v(job) * v_part / job->v_parts;
    ptrdiff_t p1 = mha__panels_v(job) * (v_part + 1) / job->v_parts;
    const mha__unit *u = mha__shared_unit(job, at);
    ptrdiff_t height = u->height, tiles = mha__div_up(u->rows, height),
              begin = tiles * part / job->parts, end = tiles * (part + 1) / job->parts;
    mha__wanted wanted;
    mha__place k, v;
    mha__block block;
    int lazy = mha__kv_of(job, u->b, u->g, scratch, &k, &v);
    for (w = 0; w < job->window && mha__shared_block(u, w, lazy, &block); w++) {
        mha__block_values(job, &v, p0, p1, &block);
        mha__wanted_none(&wanted);
        for (i = begin; i < end; i++) {
            mha__shared *x = mha__shared_at(job, at, w, i);
            if (x->n)
                mha__values(job, &block, (int)mha__min(height, u->rows - i * height),
                            (int)(p1 - p0), x->n, x->from, mha__shared_scores(x),
                            x->started ? x->alpha : NULL,
                            u->o + i * u->otile + p0 * job->kern->mr * MHA__NR,
                            i == begin ? &wanted : NULL);
        }
    }
}

/* Writes the results; of tiles that do not stand, one lane makes them again, the careful way. */
static void mha__shared_end_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    mha__unit *u = mha__shared_unit(job, unit);
    mha__place k, v;
    int lazy;
    if (mha__unit_end(u)) return;
    scratch = (float *)(void *)u; /* its own: that of this lane may hold another unit */
    lazy = mha__kv_of(job, u->b, u->g, scratch, &k, &v);
    mha__attend_tiles(job, u->b, u->g, 0, &k, &v, lazy, scratch, 1);
}

/* Units from job->first on. */
static void mha__attend_shared(mha__attend_job *job, const mha_parallel *par)
{
    ptrdiff_t units = job->batch * job->kv_heads - job->first, blocks = 1, i;
    ptrdiff_t each = mha__div_up(par->threads, units), least = job->k.type == MHA_F32 ? 2 : 4;
    for (i = 0; i < units; i++) {
        ptrdiff_t b = (job->first + i) / job->kv_heads, g = (job->first + i) % job->kv_heads;
        ptrdiff_t seq = mha__length(job->cu_q, job->seq, b);
        float *scratch = (float *)(void *)mha__shared_unit(job, i);
        mha__sight span;
        mha__unit_begin((mha__unit *)(void *)scratch, job, b, g, 0, scratch, 0);
        if (seq == 0) continue;
        span = mha__sight_of(job, b, 0, seq);
        blocks = mha__max(blocks, mha__div_up(span.hi, MHA__KEYS) - span.lo / MHA__KEYS);
    }
    /* rounds as even as can be, and what each takes, if that fits */
    i = mha__div_up(blocks, mha__div_up(blocks, job->window));
    job->window = mha__min(job->window, mha__div_up(i, each) * each);
    job->parts = mha__min(each, mha__shared_tiles(job));
    job->v_parts = mha__min(mha__div_up(each, job->parts), mha__max(mha__panels_v(job) / least, 1));
    for (job->block = 0; job->block < blocks; job->block += job->window) {
        mha__run(mha__shared_scores_unit, job, units * job->window, par, job->scratch,
                 job->lane_bytes);
        mha__run(mha__shared_softmax_unit, job, units * job->parts, par, job->scratch,
                 job->lane_bytes);
        mha__run(mha__shared_values_unit, job, units * job->parts * job->v_parts, par, job->scratch,
                 job->lane_bytes);
    }
    mha__run(mha__shared_end_unit, job, units, par, job->scratch, job->lane_bytes);
}

/* Attention weights on request, after attention left top and inv of every row: scores
   again, in units of 16, one tile at a time. A unit: mr queries of one sequence, all heads. */
static void mha__weights_unit(const void *arg, ptrdiff_t unit, float *scratch)
{
    const mha__attend_job *job = (const mha__attend_job *)arg;
    const mha__kernels *kern = job->kern;
    ptrdiff_t group = job->heads / job->kv_heads, mr = kern->mr, tiles = mha__div_up(job->seq, mr);
    ptrdiff_t b = unit / tiles, i0 = unit % tiles * mr, h, j, j0;
    ptrdiff_t end = mha__min(i0 + mr, mha__length(job->cu_q, job->seq, b));
    int m = (int)(end - i0), i, n, from = 0;
    float *s = scratch, *q = s + MHA__KEYS * mr;
    float mean = 1.0f / (float)job->heads, mul[MHA__MR_MAX];
    mha__row row[MHA__MR_MAX];
    mha__place k, v;
    mha__view view = mha__view_make(job, b);
    mha__sight span;
    if (m <= 0) return;
    span = mha__sight_of(job, b, i0, end);
    for (h = 0; h < job->heads; h++) {
        ptrdiff_t at = mha__row_index(job, b, h, i0);
        for (i = 0; i < m; i++) {
            mha__row_make(&job->mask, &view, &row[i], h, i0 + i);
            mul[i] = job->scale * MHA__CAREFUL;
        }
        mha__tile_rows(kern, q, m, job->d_k, job->q + mha__at(&job->q_stride, job->cu_q, b, h, i0),
                       job->q_stride.seq, mul);
        for (j0 = 0; j0 < job->keys; j0 += MHA__KEYS) {
            ptrdiff_t width = mha__min(MHA__KEYS, job->keys - j0);
            n = 0;
            if (j0 < span.hi && j0 + MHA__KEYS > span.lo) {
                mha__block block;
                int lazy = mha__kv_of(job, b, h / group, scratch, &k, &v);
                mha__block_make(job, b, h / group, &span, j0, lazy, group * m, 1, &block);
                mha__block_keys(job, &k, &block);
                n = mha__scores(job, b, row, m, &block, MHA__CAREFUL, q, s, &from, NULL);
            }
            if (n) kern->weigh(m, (int)mha__div_up(n, MHA__NR), s, job->top + at, job->inv + at);
            for (i = 0; i < m; i++) {
                float w[MHA__KEYS];
                int bad = n && !mha__is_finite(job->inv[at + i]);
                if (bad) /* all NaN: mark what is excluded */
                    mha__shape_row(job, b, &row[i], j0 + from, (int)mha__div_up(n, MHA__NR),
                                   MHA__CAREFUL, s + i * MHA__NR);
                memset(w, 0, sizeof w);
                for (j = 0; j < n; j += MHA__NR)
                    memcpy(w + from + j, s + (j / MHA__NR * mr + i) * MHA__NR,
                           (size_t)mha__min(n - j, MHA__NR) * sizeof(float));
                for (j = 0; j < width && bad; j++)
                    if (mha__bits(w[j]) == MHA__NINF) w[j] = 0.0f;
                if (job->attn)
                    memcpy(job->attn + (at + i) * job->keys + j0, w, (size_t)width * sizeof(float));
                if (job->attn_mean) {
                    float *to = job->attn_mean + j0 +
                                (mha__first(job->cu_q, job->seq, b) + i0 + i) * job->keys;
                    for (j = 0; j < width; j++) to[j] = (h ? to[j] : 0.0f) + w[j];
                    for (j = 0; j < width && h == job->heads - 1; j++) to[j] *= mean;
                }
            }
        }
    }
}

/* Everything from q, k and v to o. */
static void mha__attend(mha__attend_job *job, const mha_parallel *par, char *scratch,
                        size_t scratch_bytes)
{
    ptrdiff_t heads = job->batch * job->kv_heads, lanes = par->parallel_for ? par->threads : 1;
    size_t bytes = mha__add(mha__floats(job->batch, job->heads, job->seq, job->d_k + job->d_v),
                            mha__floats(job->batch, job->kv_heads, job->keys, job->d_k + job->d_v));
    if (job->batch == 0 || job->seq == 0) return;
    job->large =
        mha__floats(job->batch, job->kv_heads, job->keys, job->d_k + job->d_v) > (size_t)MHA__NEAR;
    job->queries = mha__unit_queries(job->kern, job->heads / job->kv_heads, job->seq);
    job->tiles = mha__div_up(job->seq, job->queries);
    if (bytes > MHA__CACHED && !job->past && !job->cu_q && !job->cu_k && job->seq <= MHA__FETCHED &&
        job->keys <= MHA__FETCHED && job->keys / 4 <= job->seq)
        job->ahead = par->parallel_for && (job->local || job->tiles == 1) ? par->threads : 1;
    if (job->k_from && !job->local)
        mha__run(mha__pack_unit, job, heads * mha__div_up(job->keys, MHA__KEYS), par, scratch,
                 scratch_bytes);
    if (job->local && job->tiles > 1) {
        mha__run(mha__attend_local_unit, job, heads, par, scratch, scratch_bytes);
        return;
    }
    job->first = heads / lanes * lanes;
    if (job->shared && job->first < heads && job->tiles == 1 &&
        mha__floats(1, 1, job->keys, job->d_k + job->d_v) / (job->first ? 8 : 1) >=
            MHA__SHARED_LEAST)
        job->window = lanes * MHA__SHARED / (heads - job->first) /
                      (mha__shared_tiles(job) * (job->kern->mr * MHA__KEYS + MHA__SHARED_HEAD));
    if (job->window == 0) job->first = heads;
    mha__run(mha__attend_unit, job, job->first * job->tiles, par, scratch, scratch_bytes);
    job->scratch = scratch;
    job->lane_bytes = scratch_bytes;
    if (job->window) mha__attend_shared(job, par);
    if (job->attn || job->attn_mean)
        mha__run(mha__weights_unit, job, job->batch * mha__div_up(job->seq, job->kern->mr), par,
                 scratch, scratch_bytes);
}

/* ==== >>threads ================================================================== */

#if defined(MHA_THREADS) && !defined(MHA_NO_MALLOC)

/* Tasks of one parallel_for at a time, handed out under the lock. The caller works too, so a
   pool whose threads could not be started still does everything. */
struct mha_pool {
    mha__mutex turn; /* held by the caller whose tasks these are */
    mha__mutex lock; /* guards all below */
    mha__cond wake, done;
    mha_task task;
    void *arg;
    int n, next;          /* tasks, the next one to hand out */
    unsigned left, turns; /* tasks not finished; how many parallel_for there were, wrapping */
    int quit;
    int started; /* threads besides the caller */
    mha__thread *thread;
};

/* Takes tasks until none are left to hand out. Called and left with the lock held. */
static void mha__pool_work(mha_pool *pool)
{
    while (pool->next < pool->n) {
        mha_task task = pool->task;
        void *arg = pool->arg;
        int i = pool->next++;
        MHA__UNLOCK(&pool->lock);
        task(arg, i);
        MHA__LOCK(&pool->lock);
        MHA__STORE(&pool->left, pool->left - 1);
        if (pool->left == 0) MHA__WAKE_ALL(&pool->done);
    }
}

/* Waits a little, without the lock, for *value to change from what it was: the phases of a call
   follow each other within microseconds, and sleeping and waking takes longer than that. */
static void mha__pool_spin(mha_pool *pool, const unsigned *value, unsigned was)
{
#ifdef MHA__LOAD
    int i;
    MHA__UNLOCK(&pool->lock);
    for (i = 0; i < 2000 && MHA__LOAD(value) == was; i++) MHA__PAUSE();
    MHA__LOCK(&pool->lock);
#else
    (void)pool, (void)value, (void)was;
#endif
}

static MHA__THREAD_RESULT mha__pool_thread(void *arg)
{
    mha_pool *pool = (mha_pool *)arg;
    MHA__LOCK(&pool->lock);
    while (!pool->quit) {
        unsigned turns = pool->turns;
        mha__pool_work(pool);
        if (!pool->quit && pool->turns == turns) mha__pool_spin(pool, &pool->turns, turns);
        while (!pool->quit && pool->turns == turns) MHA__WAIT(&pool->wake, &pool->lock);
    }
    MHA__UNLOCK(&pool->lock);
    return 0;
}

static void mha__pool_for(void *ctx, int n, mha_task task, void *arg)
{
    mha_pool *pool = (mha_pool *)ctx;
    MHA__LOCK(&pool->turn);
    MHA__LOCK(&pool->lock);
    pool->task = task;
    pool->arg = arg;
    pool->n = n;
    pool->next = 0;
    MHA__STORE(&pool->left, (unsigned)n);
    MHA__STORE(&pool->turns, pool->turns + 1);
    MHA__WAKE_ALL(&pool->wake);
    mha__pool_work(pool);
    while (pool->left > 0) {
        unsigned left = pool->left;
        mha__pool_spin(pool, &pool->left, left);
        if (pool->left == left) MHA__WAIT(&pool->done, &pool->lock);
    }
    MHA__UNLOCK(&pool->lock);
    MHA__UNLOCK(&pool->turn);
}

static int mha__cpus(void)
{
#ifdef _WIN32
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return (int)info.dwNumberOfProcessors;
#else
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 && n < 4096 ? (int)n : 1;
#endif
}

MHA_API mha_status mha_pool_create(mha_pool **pool, int threads)
{
    mha_pool *p;
    size_t bytes;
    if (!pool) return MHA_ERR_NULL;
    *pool = NULL;
    if (threads < 0) return MHA_ERR_SIZE;
    if (threads == 0) threads = mha__cpus();
    bytes = mha__add(sizeof *p, mha__mul((size_t)threads, sizeof(mha__thread)));
    if (bytes > MHA__BIGGEST) return MHA_ERR_OVERFLOW;
    p = (mha_pool *)MHA_MALLOC(bytes);
    if (!p) return MHA_ERR_MEMORY;
    memset(p, 0, sizeof *p); /* not the array of threads, which may be more than there will be */
    p->thread = (mha__thread *)(void *)(p + 1);
    MHA__MUTEX_INIT(&p->turn);
    MHA__MUTEX_INIT(&p->lock);
    MHA__COND_INIT(&p->wake);
    MHA__COND_INIT(&p->done);
    while (p->started < threads - 1 &&
           MHA__THREAD_START(&p->thread[p->started], mha__pool_thread, p))
        p->started++;
    *pool = p;
    return MHA_OK;
}

MHA_API void mha_pool_free(mha_pool *pool)
{
    int i;
    if (!pool) return;
    MHA__LOCK(&pool->lock);
    pool->quit = 1;
    MHA__STORE(&pool->turns, pool->turns + 1);
    MHA__WAKE_ALL(&pool->wake);
    MHA__UNLOCK(&pool->lock);
    for (i = 0; i < pool->started; i++) MHA__THREAD_JOIN(pool->thread[i]);
    MHA__COND_FREE(&pool->done);
    MHA__COND_FREE(&pool->wake);
    MHA__MUTEX_FREE(&pool->lock);
    MHA__MUTEX_FREE(&pool->turn);
    MHA_FREE(pool);
}

MHA_API mha_parallel mha_pool_parallel(mha_pool *pool)
{
    mha_parallel par;
    par.parallel_for = pool ? mha__pool_for : NULL;
    par.ctx = pool;
    par.threads = pool ? pool->started + 1 : 0;
    return par;
}

#endif /* MHA_THREADS */

/* ==== >>cache ==================================================================== */

/* k and v as mha__place_keys and mha__place_values lay them out. A ring has a multiple of MHA__KEYS
   places, and position p is at place p modulo that: so blocks of keys, which start at multiples of
   MHA__KEYS whatever the query, lie in one piece.

   INT8 has a scale for each key and value, not for a block of them: the numbers that are kept then
   depend on that token alone, and tokens one by one or all at once give the same bits. */
struct mha_cache {
    mha_cache_config cfg;
    int kv_heads, d_k, d_v, places;
    int *length; /* [batch] */
    int *floor;  /* [batch] the first position that a ring still holds */
    int *mark;   /* [2*batch] for mha_cache_reorder */
    char *k, *v;
    float *k_scale, *v_scale; /* [batch,kv_heads,places], INT8 only */
    void *owned; /* what mha_cache_free gives back; null if the memory is the caller's */
};

/* Bytes of a part of one sequence, and where it is: 0 k, 1 v, 2 and 3 their scales. */
static size_t mha__cache_part(const mha_cache *c, int part)
{
    size_t size = mha__type_size(c->cfg.type);
    if (part == 0) return mha__keys_sized(c->kv_heads, c->places, c->d_k, size);
    if (part == 1) return mha__values_sized(c->kv_heads, c->places, c->d_v, size);
    return c->cfg.type == MHA_INT8 ? mha__floats(c->kv_heads, c->places, 1, 1) : 0;
}

MHA__APART char *mha__cache_at(const mha_cache *c, int part, int slot)
{
    char *base = part == 0   ? c->k
                 : part == 1 ? c->v
                             : (char *)(part == 2 ? c->k_scale : c->v_scale);
    return base + mha__cache_part(c, part) * (size_t)slot;
}

static void mha__cache_places(const mha_cache *c, mha__place *k, mha__place *v)
{
    mha__place *p[2];
    int i;
    *k = mha__place_keys(NULL, c->kv_heads, c->places, c->d_k);
    *v = mha__place_values(NULL, c->kv_heads, c->places, c->d_v);
    p[0] = k, p[1] = v;
    for (i = 0; i < 2; i++) {
        p[i]->type = c->cfg.type;
        p[i]->past = c->length;
        p[i]->ring = c->cfg.ring ? c->places : 0;
        p[i]->scales = c->places;
        p[i]->scale = c->cfg.type == MHA_INT8 ? (float *)(void *)mha__cache_at(c, 2 + i, 0) : NULL;
        if (c->cfg.type == MHA_F32) p[i]->data = (float *)(void *)mha__cache_at(c, i, 0);
        else p[i]->compact = mha__cache_at(c, i, 0);
    }
}

MHA_API int mha_cache_length(const mha_cache *cache, int slot)
{
    return cache && slot >= 0 && slot < cache->cfg.batch ? cache->length[slot] : -1;
}

MHA_API mha_status mha_cache_truncate(mha_cache *cache, int slot, int length)
{
    int b;
    if (!cache) return MHA_ERR_NULL;
    if (slot < -1 || slot >= cache->cfg.batch || length < 0) return MHA_ERR_SIZE;
    for (b = 0; b < cache->cfg.batch; b++)
        if ((slot == -1 || slot == b) && length > cache->length[b]) return MHA_ERR_SIZE;
    for (b = 0; b < cache->cfg.batch; b++)
        if (slot == -1 || slot == b) {
            cache->length[b] = length;
            if (cache->floor[b] > length) cache->floor[b] = length; /* nothing is left */
        }
    return MHA_OK;
}

MHA_API mha_status mha_cache_reset(mha_cache *cache, int slot)
{
    return mha_cache_truncate(cache, slot, 0);
}

/* How one sequence lies in a part: k and the scales are one row a head, v one a head and 16 dims. */
typedef struct mha__span {
    size_t rows, bytes, used; /* bytes of a row, and of those the ones that hold length tokens */
} mha__span;

MHA__APART mha__span mha__cache_span(const mha_cache *c, int part, int length)
{
    ptrdiff_t block = part == 0 ? MHA__NR : 1; /* tokens that lie together */
    mha__span s;
    s.rows = (size_t)(c->kv_heads * (part == 1 ? mha__div_up(c->d_v, MHA__NR) : 1));
    s.bytes = mha__cache_part(c, part) / s.rows;
    s.used = s.bytes / (size_t)mha__div_up(c->places, block) *
             (size_t)mha__div_up(mha__min(length, c->places), block);
    return s;
}

MHA_API mha_status mha_cache_fork(mha_cache *to, int to_slot, const mha_cache *from, int from_slot,
                                  int length)
{
    size_t r;
    int part;
    if (!to || !from) return MHA_ERR_NULL;
    if (to_slot < 0 || to_slot >= to->cfg.batch || from_slot < 0 || from_slot >= from->cfg.batch)
        return MHA_ERR_SIZE;
    if (to->kv_heads != from->kv_heads || to->d_k != from->d_k || to->d_v != from->d_v ||
        to->cfg.type != from->cfg.type || to->cfg.ring != from->cfg.ring ||
        (to->cfg.ring && to->cfg.capacity != from->cfg.capacity))
        return MHA_ERR_CONFLICT;
    if (length == -1) length = from->length[from_slot];
    if (length < 0 || length > from->length[from_slot]) return MHA_ERR_SIZE;
    if (to->cfg.ring && length != from->length[from_slot]) return MHA_ERR_CONFLICT;
    if (!to->cfg.ring && length > to->cfg.capacity) return MHA_ERR_FULL;
    if (to == from && to_slot == from_slot) return mha_cache_truncate(to, to_slot, length);
    for (part = 0; part < 4; part++) {
        mha__span a = mha__cache_span(to, part, length), b = mha__cache_span(from, part, length);
        for (r = 0; r < a.rows && b.used; r++)
            memcpy(mha__cache_at(to, part, to_slot) + r * a.bytes,
                   mha__cache_at(from, part, from_slot) + r * b.bytes, b.used);
    }
    to->length[to_slot] = length;
    to->floor[to_slot] = to->cfg.ring ? from->floor[from_slot] : 0;
    return MHA_OK;
}

/* Two sequences change places, with all that they hold. */
static void mha__cache_swap(mha_cache *c, int i, int j)
{
    char room[256];
    int part, n;
    for (part = 0; part < 4; part++) {
        mha__span s = mha__cache_span(c, part, (int)mha__max(c->length[i], c->length[j]));
        size_t r, at, step;
        for (r = 0; r < s.rows; r++)
            for (at = 0; at < s.used; at += step) {
                char *a = mha__cache_at(c, part, i) + r * s.bytes + at;
                char *b = mha__cache_at(c, part, j) + r * s.bytes + at;
                step = s.used - at < sizeof room ? s.used - at : sizeof room;
                memcpy(room, a, step);
                memcpy(a, b, step);
                memcpy(b, room, step);
            }
    }
    n = c->length[i], c->length[i] = c->length[j], c->length[j] = n;
    n = c->floor[i], c->floor[i] = c->floor[j], c->floor[j] = n;
}

MHA_API mha_status mha_cache_reorder(mha_cache *cache, const int *order)
{
    int *from, *wanted, b, c, next, n;
    if (!cache || !order) return MHA_ERR_NULL;
    if ((uintptr_t)order % sizeof(int) != 0) return MHA_ERR_ALIGN;
    n = cache->cfg.batch;
    from = cache->mark; /* where each sequence is to come from; itself once it is right */
    wanted = from + n;  /* by how many others each still is */
    for (b = 0; b < n; b++)
        if (order[b] < 0 || order[b] >= n) return MHA_ERR_SIZE;
    for (b = 0; b < n; b++) wanted[b] = 0;
    for (b = 0; b < n; b++) {
        from[b] = order[b];
        if (from[b] != b) wanted[from[b]]++;
    }
    /* One that no other wants can be written over; then perhaps the one it came from can. */
    for (b = 0; b < n; b++)
        for (c = b; from[c] != c && wanted[c] == 0; c = next) {
            next = from[c];
            mha_cache_fork(cache, c, cache, next, -1);
            from[c] = c;
            wanted[next]--;
        }
    /* What is left are circles: what b had goes all the way round. */
    for (b = 0; b < n; b++)
        for (c = b; from[c] != c; c = next) {
            next = from[c];
            if (next != b) mha__cache_swap(cache, c, next);
            from[c] = c;
        }
    return MHA_OK;
}

MHA_API mha_status mha_cache_info(const mha_cache *cache, mha_cache_facts *facts)
{
    int b, part;
    if (!cache || !facts) return MHA_ERR_NULL;
    facts->batch = cache->cfg.batch;
    facts->capacity = cache->cfg.capacity;
    facts->ring = cache->cfg.ring;
    facts->type = cache->cfg.type;
    facts->n_kv_heads = cache->kv_heads;
    facts->d_k = cache->d_k;
    facts->d_v = cache->d_v;
    facts->longest = 0;
    facts->bytes = 0;
    for (b = 0; b < cache->cfg.batch; b++)
        if (cache->length[b] > facts->longest) facts->longest = cache->length[b];
    for (part = 0; part < 4; part++)
        facts->bytes += mha__cache_part(cache, part) * (size_t)cache->cfg.batch;
    return MHA_OK;
}

/* ==== >>layer ==================================================================== */

struct mha_layer {
    mha_config cfg; /* defaults filled in */
    const mha__kernels *kern;
    mha__matrix mat[4];                                       /* q, k, v, out */
    const float *alibi, *sink, *sink_value, *bias_k, *bias_v; /* copies; null if there are none */
    const float *norm[2], *norm_bias[2];                      /* of q, of k */
    const double *freq;                                       /* [rope.width/2] */
    void *owned; /* what mha_layer_free gives back; null if the memory is the caller's */
};

MHA_API const char *mha_strerror(mha_status status)
{
    switch (status) {
    case MHA_OK: return "no error";
    case MHA_ERR_NULL: return "a required pointer is null";
    case MHA_ERR_SIZE:
        return "a size, length or index is negative, too large, or zero where it may not be";
    case MHA_ERR_OVERFLOW: return "the sizes multiply to more memory than can be addressed";
    case MHA_ERR_ENUM: return "an enum field holds an unknown value";
    case MHA_ERR_VALUE: return "a number is not finite or outside its range";
    case MHA_ERR_CONFLICT: return "two fields contradict each other";
    case MHA_ERR_ALIGN: return "a pointer is not aligned for its type";
    case MHA_ERR_BUFFER: return "the buffer is too small (see mha_layer_size, mha_cache_size)";
    case MHA_ERR_WORKSPACE:
        return "the workspace is missing or too small (see mha_workspace_size, "
               "mha_sdpa_workspace_size)";
    case MHA_ERR_MEMORY: return "out of memory";
    case MHA_ERR_FULL: return "the cache has no room for these tokens";
    case MHA_ERR_ISA: return "this instruction set is not available here (see mha_isa_available)";
    }
    return "unknown status";
}

MHA_API int mha_isa_available(mha_isa isa)
{
    return mha__kernels_for(isa) != NULL;
}

MHA_API const char *mha_isa_name(mha_isa isa)
{
    switch (isa) {
    case MHA_ISA_AUTO: return "auto";
    case MHA_ISA_SCALAR: return "scalar";
    case MHA_ISA_AVX2: return "avx2";
    case MHA_ISA_AVX512: return "avx512";
    case MHA_ISA_NEON: return "neon";
    }
    return "unknown";
}

/* ---- checks shared by all entry points ------------------------------------------------ */

/* A size: at least low. */
MHA__APART mha_status mha__check_size(mha__why *why, const char *name, int n, int low)
{
    if (n >= low) return MHA_OK;
    return mha__fail(why, MHA_ERR_SIZE, "@ is #; it must be at least #", name, n, low);
}

/* A float tensor [a,b,c,d]. Empty ones may be null. */
static mha_status mha__check_tensor(mha__why *why, const char *name, const void *p, int required,
                                    ptrdiff_t a, ptrdiff_t b, ptrdiff_t c, ptrdiff_t d)
{
    size_t bytes = mha__floats(a, b, c, d);
    if (bytes == 0) return MHA_OK;
    if (!p && required) return mha__fail(why, MHA_ERR_NULL, "@ is null", name, 0, 0);
    if (p && (uintptr_t)p % sizeof(float) != 0)
        return mha__fail(why, MHA_ERR_ALIGN, "@ is not aligned to # bytes", name,
                         (long long)sizeof(float), 0);
    if (bytes > MHA__BIGGEST && (p || required)) {
        mha__fail(why, MHA_ERR_OVERFLOW, "@, # x # x ", name, a, b);
        return mha__fail(why, MHA_ERR_OVERFLOW, "# x # floats, is more than can be addressed", "",
                         c, d);
    }
    return MHA_OK;
}

/* A pointer to floats, however many. */
MHA__APART mha_status mha__check_floats(mha__why *why, const char *name, const void *p,
                                        int required)
{
    return mha__check_tensor(why, name, p, required, 1, 1, 1, 1);
}

static mha_status mha__check_scale(mha__why *why, float scale)
{
    if (!mha__is_finite(scale))
        return mha__fail(why, MHA_ERR_VALUE, "scale is not a finite number", "", 0, 0);
    if (mha__is_finite((float)((double)scale * MHA__LOG2E))) return MHA_OK;
    return mha__fail(why, MHA_ERR_VALUE, "scale is too large: scores would be infinite", "", 0, 0);
}

static mha_status mha__check_isa(mha__why *why, mha_isa isa, const mha__kernels **kern)
{
    if ((unsigned)isa > (unsigned)MHA_ISA_NEON)
        return mha__fail(why, MHA_ERR_ENUM, "isa is #, which is no mha_isa", "", (int)isa, 0);
    *kern = mha__kernels_for(isa);
    if (!*kern)
        return mha__fail(why, MHA_ERR_ISA, "isa @ is not on this CPU or not in this build",
                         mha_isa_name(isa), 0, 0);
    return MHA_OK;
}

/* n_heads, n_kv_heads, d_k, d_v by whatever names the struct at hand has for them; fills in the
   defaults of the last three. */
static mha_status mha__check_heads(mha__why *why, const char *heads_name, int heads,
                                   const char *kv_name, int *kv, int *d_k, int *d_v)
{
    mha_status st;
    if ((st = mha__check_size(why, heads_name, heads, 1)) != MHA_OK) return st;
    if ((st = mha__check_size(why, kv_name, *kv, 0)) != MHA_OK) return st;
    if (*kv == 0) *kv = heads;
    if (heads % *kv != 0)
        return mha__fail(why, MHA_ERR_SIZE, "@ # does not divide the # query heads", kv_name, *kv,
                         heads);
    if ((st = mha__check_size(why, "d_k", *d_k, 1)) != MHA_OK) return st;
    if ((st = mha__check_size(why, "d_v", *d_v, 0)) != MHA_OK) return st;
    if (*d_v == 0) *d_v = *d_k;
    return MHA_OK;
}

/* A pointer to ints, however many. */
MHA__APART mha_status mha__check_ints(mha__why *why, const char *name, const int *p)
{
    if ((uintptr_t)p % sizeof(int) == 0) return MHA_OK;
    return mha__fail(why, MHA_ERR_ALIGN, "@ is not aligned to # bytes", name,
                     (long long)sizeof(int), 0);
}

/* A switch. */
MHA__APART mha_status mha__check_flag(mha__why *why, const char *name, int x)
{
    if (x == 0 || x == 1) return MHA_OK;
    return mha__fail(why, MHA_ERR_VALUE, "@ is #; it must be 0 or 1", name, x, 0);
}

/* A number that is at least low; 0 is always fine, as it stands for the default. */
static mha_status mha__check_number(mha__why *why, const char *name, float x, int low)
{
    if (!mha__is_finite(x))
        return mha__fail(why, MHA_ERR_VALUE, "@ is not a finite number", name, 0, 0);
    if (x == 0.0f || x >= (float)low) return MHA_OK;
    return mha__fail(why, MHA_ERR_VALUE, "@ is less than #", name, low, 0);
}

MHA__APART mha_status mha__check_softcap(mha__why *why, float x)
{
    mha_status st = mha__check_number(why, "softcap", x, 0);
    if (st != MHA_OK || x <= (float)1e30) return st; /* rounded, where constants are kept wider */
    return mha__fail(why, MHA_ERR_VALUE, "softcap is above 1e30, where it does nothing: use 0", "",
                     0, 0);
}

MHA__APART mha_status mha__check_type(mha__why *why, const char *name, mha_type type)
{
    if ((unsigned)type <= (unsigned)MHA_INT8) return MHA_OK;
    return mha__fail(why, MHA_ERR_ENUM, "@ is #, which is no mha_type", name, (int)type, 0);
}

/* Lengths of a call. A tensor of queries is [qb,heads,qt,d], as given, or a batch of one where
   sequences have many lengths; the keys that come with the call are [kb,heads,kt,d]. */
typedef struct mha__dims {
    ptrdiff_t qb, qt, kb, kt;
    ptrdiff_t seq, keys; /* of the longest sequence */
} mha__dims;

/* Where sequences of many lengths start: cu [batch+1]. b, t, longest: for mha__dims. */
static mha_status mha__check_cu(mha__why *why, const char *name, const int *cu, int batch,
                                const char *seq_name, int seq, ptrdiff_t *b, ptrdiff_t *t,
                                ptrdiff_t *longest)
{
    mha_status st;
    int i;
    *b = batch;
    *t = *longest = seq;
    if (!cu) return MHA_OK;
    if ((st = mha__check_ints(why, name, cu)) != MHA_OK) return st;
    *b = 1;
    *longest = 0;
    if (cu[0] != 0) return mha__fail(why, MHA_ERR_VALUE, "@[0] is #; it must be 0", name, cu[0], 0);
    for (i = 0; i < batch; i++) {
        if (cu[i + 1] < cu[i]) {
            mha__fail(why, MHA_ERR_VALUE, "@[#] is #", name, i + 1, cu[i + 1]);
            return mha__fail(why, MHA_ERR_VALUE, ", less than the one before, #", "", cu[i], 0);
        }
        *longest = mha__max(*longest, cu[i + 1] - cu[i]);
    }
    *t = cu[batch];
    if (seq == 0 || seq == cu[batch]) return MHA_OK;
    mha__fail(why, MHA_ERR_CONFLICT, "@ is # ", seq_name, seq, 0);
    return mha__fail(why, MHA_ERR_CONFLICT, "but the last number of @ is #", name, cu[batch], 0);
}

/* One number of each sequence, outside 0 .. keys? */
static mha_status mha__check_each(mha__why *why, const char *name, const int *p, int batch,
                                  ptrdiff_t keys, int need_data)
{
    mha_status st = mha__check_ints(why, name, p);
    int b;
    for (b = 0; st == MHA_OK && need_data && p && b < batch; b++)
        if (p[b] < 0 || p[b] > keys) {
            mha__fail(why, MHA_ERR_VALUE, "@[#] is #", name, b, p[b]);
            return mha__fail(why, MHA_ERR_VALUE, ", outside 0 .. #", "", keys, 0);
        }
    return st;
}

/* Mask, gate, outputs on request and threads: the part that mha_args and mha_sdpa_args share. */
static mha_status mha__check_common(mha__why *why, const mha_mask *mask, const float *gate,
                                    const float *attn, const float *attn_mean, const float *lse,
                                    const mha_parallel *par, int batch, int heads,
                                    const mha__dims *d, int need_data)
{
    mha_status st;
    if ((unsigned)mask->causal > (unsigned)MHA_CAUSAL_UPPER_LEFT)
        return mha__fail(why, MHA_ERR_ENUM, "mask.causal is #, which is no mha_causal", "",
                         (int)mask->causal, 0);
    if ((st = mha__check_floats(why, "mask.bias", mask->bias, 0)) != MHA_OK) return st;
    if ((st = mha__check_floats(why, "gate", gate, 0)) ||
        (st = mha__check_each(why, "mask.key_len", mask->key_len, batch, d->keys, need_data)) ||
        (st = mha__check_each(why, "mask.key_start", mask->key_start, batch, d->keys, need_data)) ||
        (st = mha__check_flag(why, "mask.windowed", mask->windowed)))
        return st;
    if (!mask->windowed && (mask->left || mask->right))
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "mask.left is # and mask.right is #, but mask.windowed is 0", "",
                         mask->left, mask->right);
    if (mask->left < -1 || mask->right < -1)
        return mha__fail(why, MHA_ERR_VALUE, "mask.left is # and mask.right is #; the least is -1",
                         "", mask->left, mask->right);
    if ((st = mha__check_tensor(why, "attn", attn, 0, d->qb, heads, d->qt, d->keys)) ||
        (st = mha__check_tensor(why, "attn_mean", attn_mean, 0, d->qb, d->qt, d->keys, 1)) ||
        (st = mha__check_tensor(why, "lse", lse, 0, d->qb, heads, d->qt, 1)))
        return st;
    if (par->parallel_for && par->threads < 1)
        return mha__fail(why, MHA_ERR_SIZE, "parallel.threads is #; it must be at least #", "",
                         par->threads, 1);
    if (!par->parallel_for && (par->threads < 0 || par->threads > 1))
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "parallel.threads is # but parallel.parallel_for is null", "",
                         par->threads, 0);
    return MHA_OK;
}

static mha_status mha__check_workspace(mha__why *why, const void *ws, size_t size, size_t need)
{
    if (need > MHA__BIGGEST)
        return mha__fail(why, MHA_ERR_OVERFLOW, "the workspace would be more than can be addressed",
                         "", 0, 0);
    if (ws && size < need)
        return mha__fail(why, MHA_ERR_WORKSPACE, "the workspace has # bytes; this call needs #", "",
                         (long long)size, (long long)need);
    if (!ws && size)
        return mha__fail(why, MHA_ERR_CONFLICT, "workspace is null but workspace_size is #", "",
                         (long long)size, 0);
#ifdef MHA_NO_MALLOC
    if (!ws)
        return mha__fail(why, MHA_ERR_WORKSPACE,
                         "workspace is null; under MHA_NO_MALLOC this call needs one of # bytes",
                         "", (long long)need, 0);
#endif
    return MHA_OK;
}

/* The caller's workspace, or one from MHA_MALLOC, which mha__close gives back. */
MHA__APART char *mha__open(void *ws, size_t need, void **owned)
{
    *owned = NULL;
#ifndef MHA_NO_MALLOC
    if (!ws) *owned = ws = MHA_MALLOC(need);
#endif
    (void)need;
    return ws ? mha__align(ws) : NULL;
}

MHA__APART void mha__close(void *owned)
{
#ifndef MHA_NO_MALLOC
    if (owned) MHA_FREE(owned);
#endif
    (void)owned;
}

static mha_gate_stride mha__gate_resolve(mha_gate_stride s)
{
    if (s.batch == 0 && s.seq == 0 && s.head == 0) s.head = 1;
    return s;
}

MHA__APART void mha__mask_stride_resolve(mha_mask_stride *s, ptrdiff_t keys)
{
    if (s->batch || s->head || s->query || s->key) return;
    s->query = keys;
    s->key = 1;
}

static void mha__mask_resolve(mha_mask *mask, ptrdiff_t keys)
{
    mha__mask_stride_resolve(&mask->allow_stride, keys);
    mha__mask_stride_resolve(&mask->bias_stride, keys);
}

/* Where everything of one call lies in its workspace. */
typedef struct mha__plan {
    const mha__kernels *kern;                                               /* of mha_sdpa */
    size_t q, k, v, o, stage_k, stage_v, origin, top, inv, shared, scratch; /* offsets */
    size_t lane, kv_at; /* bytes of scratch a lane, and where its k and v are */
    int group;          /* sequences done at a time: see mha__group_rows */
    int kv;             /* where packed k and v are */
    int shares;         /* whether there is room for what lanes share, at shared */
    ptrdiff_t packed;   /* positions of the packed k and v of a sequence, or of all if cu is set */
    size_t total;
} mha__plan;

/* Adds what attention needs to a plan. cu: where the keys of sequences of many lengths start; in
   the packed ones each starts at a multiple of 16. most: keys that there can be, whatever a cache
   holds now. lane: bytes of scratch other phases need. */
static void mha__plan_attend(mha__plan *plan, const mha__kernels *kern, int batch, int heads,
                             int kv_heads, const mha__dims *d, const int *cu, int d_k, int d_v,
                             int weights, int threads, int kv, ptrdiff_t most, size_t lane)
{
    size_t rows = weights ? mha__floats(d->qb, heads, d->qt, 1) : 0, need;
    ptrdiff_t shared = kv == MHA__KV_SHARED ? d->kb : 0;
    int b;
    plan->kv = kv;
    plan->packed = d->kt;
    if (cu)
        for (b = 0, plan->packed = 0; b < batch; b++)
            plan->packed += mha__div_up(cu[b + 1] - cu[b], MHA__NR) * MHA__NR;
    if (cu && plan->packed > INT_MAX) plan->total = MHA__TOO_BIG; /* origins are ints */
    plan->k = mha__take(&plan->total, mha__keys_bytes(shared, kv_heads, plan->packed, d_k));
    plan->v = mha__take(&plan->total, mha__values_bytes(shared, kv_heads, plan->packed, d_v));
    plan->origin = mha__take(&plan->total, cu && shared ? mha__mul((size_t)batch, sizeof(int)) : 0);
    plan->top = mha__take(&plan->total, rows);
    plan->inv = mha__take(&plan->total, rows);
    plan->shares = threads > 1 && mha__add(mha__floats(1, 1, most, d_k),
                                           mha__floats(1, 1, most, d_v)) >= MHA__SHARED_LEAST;
    plan->shared =
        mha__take(&plan->total, plan->shares ? mha__floats(threads, MHA__SHARED, 1, 1) : 0);
    need = mha__attend_scratch(kern, heads / kv_heads, d->seq, d->keys, d_k, d_v, kv, &plan->kv_at);
    plan->lane = 0;
    mha__take(&plan->lane, need > lane ? need : lane);
    plan->scratch =
        mha__take(&plan->total, mha__mul(plan->lane, (size_t)(threads > 1 ? threads : 1)));
    plan->total = mha__add(plan->total, 63);
}

/* The places of packed k and v in the workspace. */
static void mha__plan_places(const mha__plan *plan, char *ws, int batch, int kv_heads,
                             const int *cu, int d_k, int d_v, mha__place *k, mha__place *v)
{
    int *origin = (int *)(void *)(ws + plan->origin), b, at = 0;
    *k = mha__place_keys((float *)(void *)(ws + plan->k), kv_heads, plan->packed, d_k);
    *v = mha__place_values((float *)(void *)(ws + plan->v), kv_heads, plan->packed, d_v);
    if (!cu || plan->kv != MHA__KV_SHARED) return;
    for (b = 0; b < batch; b++) {
        origin[b] = at;
        at += (int)(mha__div_up(cu[b + 1] - cu[b], MHA__NR) * MHA__NR);
    }
    k->batch = v->batch = 0;
    k->origin = v->origin = origin;
}

/* The part of a job that mha_sdpa and mha_forward fill in alike. */
static void mha__job_make(mha__attend_job *job, const mha__kernels *kern, const mha__dims *d,
                          const mha__plan *plan, char *ws, int batch, int heads, int kv_heads,
                          int d_k, int d_v, float scale, const int *cu_q, const int *cu_k,
                          const mha_mask *mask, const float *gate, const mha_gate_stride *stride,
                          float *lse, float *attn, float *attn_mean)
{
    memset(job, 0, sizeof *job);
    job->kern = kern;
    job->batch = batch;
    job->heads = heads;
    job->kv_heads = kv_heads;
    job->seq = d->seq;
    job->keys = d->keys;
    job->cu_q = cu_q;
    job->cu_k = cu_k;
    job->d_k = d_k;
    job->d_v = d_v;
    job->scale = (float)((double)scale * MHA__LOG2E);
    job->kv_at = (ptrdiff_t)(plan->kv_at / sizeof(float));
    if (plan->shares) job->shared = (float *)(void *)(ws + plan->shared);
    job->mask = *mask;
    job->gate = gate;
    job->gate_stride = *stride;
    job->lse = lse;
    job->attn = attn;
    job->attn_mean = attn_mean;
    if (attn || attn_mean) {
        job->top = (float *)(void *)(ws + plan->top);
        job->inv = (float *)(void *)(ws + plan->inv);
    }
}

/* ---- core ------------------------------------------------------------------------------- */

static mha_stride mha__stride_or(mha_stride s, ptrdiff_t heads, ptrdiff_t seq, ptrdiff_t d)
{
    if (s.batch == 0 && s.head == 0 && s.seq == 0 &&
        mha__floats(1, heads, seq, d) <= MHA__BIGGEST) { /* else there are no elements */
        s.batch = heads * seq * d;
        s.head = seq * d;
        s.seq = d;
    }
    return s;
}

/* Rows of d numbers that are written may not overlap: an axis must step over all that those with
   smaller steps reach. (Rows that interleave in some other way are refused, too.) */
static mha_status mha__check_rows(mha__why *why, mha_stride s, ptrdiff_t batch, ptrdiff_t heads,
                                  ptrdiff_t seq, ptrdiff_t d)
{
    static const char *const name[3] = { "o_stride.batch", "o_stride.head", "o_stride.seq" };
    ptrdiff_t step[3], n[3];
    size_t reach = (size_t)d, by[3];
    int i, k, next;
    if (batch == 0 || seq == 0 || (!s.batch && !s.head && !s.seq)) return MHA_OK;
    step[0] = s.batch, step[1] = s.head, step[2] = s.seq;
    n[0] = batch, n[1] = heads, n[2] = seq;
    for (i = 0; i < 3; i++) by[i] = step[i] < 0 ? (size_t)0 - (size_t)step[i] : (size_t)step[i];
    for (k = 0; k < 3; k++) { /* the smallest step first */
        for (i = 0, next = -1; i < 3; i++)
            if (n[i] > 1 && (next < 0 || by[i] < by[next])) next = i;
        if (next < 0) break;
        if (by[next] < reach)
            return mha__fail(why, MHA_ERR_CONFLICT,
                             "@ is #, less than the # that it steps over: rows that are written "
                             "would overlap",
                             name[next], step[next],
                             reach > MHA__BIGGEST ? (ptrdiff_t)MHA__BIGGEST : (ptrdiff_t)reach);
        reach = mha__add(reach, mha__mul((size_t)n[next] - 1, by[next]));
        n[next] = 1;
    }
    return MHA_OK;
}

/* Validates; r becomes *args with every default filled in. need_data: pointers too. */
static mha_status mha__sdpa_resolve(mha__why *why, const mha_sdpa_args *args, mha_sdpa_args *r,
                                    mha__dims *d, mha__plan *plan, int need_data)
{
    mha_status st;
    ptrdiff_t group;
    size_t lane = 0;
    int weights, local;
    memset(plan, 0, sizeof *plan);
    memset(d, 0, sizeof *d);
    if (!args) return mha__fail(why, MHA_ERR_NULL, "args is null", "", 0, 0);
    *r = *args;
    if ((st = mha__check_size(why, "batch", r->batch, 0)) ||
        (st = mha__check_size(why, "seq", r->seq, 0)) ||
        (st = mha__check_size(why, "source_seq", r->source_seq, 0)) ||
        (st = mha__check_heads(why, "heads", r->heads, "kv_heads", &r->kv_heads, &r->d_k,
                               &r->d_v)) ||
        (st = mha__check_scale(why, r->scale)) || (st = mha__check_isa(why, r->isa, &plan->kern)) ||
        (st = mha__check_softcap(why, r->softcap)) ||
        (st = mha__check_floats(why, "alibi", r->alibi, 0)) ||
        (st = mha__check_floats(why, "sink", r->sink, 0)) ||
        (st = mha__check_floats(why, "sink_value", r->sink_value, 0)) ||
        (st = mha__check_cu(why, "cu_seq", r->cu_seq, r->batch, "seq", r->seq, &d->qb, &d->qt,
                            &d->seq)) ||
        (st = mha__check_cu(why, "cu_source", r->cu_source, r->batch, "source_seq", r->source_seq,
                            &d->kb, &d->kt, &d->keys)))
        return st;
    if (r->sink_value && !r->sink)
        return mha__fail(why, MHA_ERR_CONFLICT, "sink_value is given but sink is null", "", 0, 0);
    if (r->scale == 0.0f) r->scale = (float)(1.0 / sqrt((double)r->d_k));
    if ((st = mha__check_tensor(why, "q", r->q, need_data, d->qb, r->heads, d->qt, r->d_k)) ||
        (st = mha__check_tensor(why, "k", r->k, need_data, d->kb, r->kv_heads, d->kt, r->d_k)) ||
        (st = mha__check_tensor(why, "v", r->v, need_data, d->kb, r->kv_heads, d->kt, r->d_v)) ||
        (st = mha__check_tensor(why, "o", r->o, need_data, d->qb, r->heads, d->qt, r->d_v)) ||
        (st = mha__check_common(why, &r->mask, r->gate, r->attn, r->attn_mean, r->lse, &r->parallel,
                                r->batch, r->heads, d, need_data)))
        return st;
    weights = r->attn || r->attn_mean;
    group = r->heads / r->kv_heads;
    local = mha__pack_local(r->batch, r->kv_heads, group, d->seq, r->parallel.threads, weights);
    if (!local && !weights) /* what a shorter call needs, whose lanes pack for themselves */
        lane = mha__attend_scratch(plan->kern, group, mha__min(d->seq, mha__most_queries(group)),
                                   d->keys, r->d_k, r->d_v, MHA__KV_LOCAL, &plan->kv_at);
    mha__plan_attend(plan, plan->kern, r->batch, r->heads, r->kv_heads, d, r->cu_source, r->d_k,
                     r->d_v, weights, r->parallel.threads, local ? MHA__KV_LOCAL : MHA__KV_SHARED,
                     d->keys, lane);
    r->q_stride = mha__stride_or(r->q_stride, r->heads, d->qt, r->d_k);
    r->k_stride = mha__stride_or(r->k_stride, r->kv_heads, d->kt, r->d_k);
    r->v_stride = mha__stride_or(r->v_stride, r->kv_heads, d->kt, r->d_v);
    r->o_stride = mha__stride_or(r->o_stride, r->heads, d->qt, r->d_v);
    r->gate_stride = mha__gate_resolve(r->gate_stride);
    mha__mask_resolve(&r->mask, d->keys);
    if (need_data && r->o && r->o == r->q &&
        (r->d_v > r->d_k || r->o_stride.batch != r->q_stride.batch ||
         r->o_stride.head != r->q_stride.head || r->o_stride.seq != r->q_stride.seq))
        return mha__fail(why, MHA_ERR_CONFLICT, "o is q but has another shape or other strides", "",
                         0, 0);
    if (need_data && d->qb && d->qt && d->kt && (r->o == r->k || r->o == r->v))
        return mha__fail(why, MHA_ERR_CONFLICT, "o is @, which is still read while o is written",
                         r->o == r->k ? "k" : "v", 0, 0);
    if (need_data && r->o && r->o == r->q && weights)
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "o may not be q when attn or attn_mean is asked for", "", 0, 0);
    if ((st = mha__check_rows(why, args->o_stride, d->qb, r->heads, d->qt, r->d_v)) != MHA_OK)
        return st;
    if (need_data) return mha__check_workspace(why, r->workspace, r->workspace_size, plan->total);
    return plan->total > MHA__BIGGEST ? mha__check_workspace(why, NULL, 0, plan->total) : MHA_OK;
}

MHA_API mha_status mha_sdpa_check(const mha_sdpa_args *args, char *why, size_t why_size)
{
    mha__why w = mha__why_make(why, why_size);
    mha_sdpa_args r;
    mha__dims d;
    mha__plan plan;
    return mha__sdpa_resolve(&w, args, &r, &d, &plan, 1);
}

MHA_API mha_status mha_sdpa_workspace_size(const mha_sdpa_args *args, size_t *bytes)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_sdpa_args r;
    mha__dims d;
    mha__plan plan;
    mha_status st;
    if (!bytes) return MHA_ERR_NULL;
    st = mha__sdpa_resolve(&w, args, &r, &d, &plan, 0);
    if (st == MHA_OK) *bytes = plan.total;
    return st;
}

MHA_API mha_status mha_sdpa(const mha_sdpa_args *args)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_sdpa_args r;
    mha__dims d;
    mha__plan plan;
    mha__attend_job job;
    void *owned;
    char *ws;
    mha_status st = mha__sdpa_resolve(&w, args, &r, &d, &plan, 1);
    if (st != MHA_OK || r.batch == 0 || d.seq == 0) return st;
    ws = mha__open(r.workspace, plan.total, &owned);
    if (!ws) return MHA_ERR_MEMORY;

    mha__job_make(&job, plan.kern, &d, &plan, ws, r.batch, r.heads, r.kv_heads, r.d_k, r.d_v,
                  r.scale, r.cu_seq, r.cu_source, &r.mask, r.gate, &r.gate_stride, r.lse, r.attn,
                  r.attn_mean);
    job.q = r.q;
    job.q_stride = r.q_stride;
    job.k_from = r.k;
    job.v_from = r.v;
    job.k_stride = r.k_stride;
    job.v_stride = r.v_stride;
    job.local = plan.kv == MHA__KV_LOCAL;
    job.v_rows = r.v_stride.seq == r.d_v && r.d_v % MHA__NR == 0;
    mha__plan_places(&plan, ws, r.batch, r.kv_heads, r.cu_source, r.d_k, r.d_v, &job.k, &job.v);
    job.o = r.o;
    job.o_stride = r.o_stride;
    job.softcap = r.softcap;
    job.alibi = r.alibi;
    job.sink = r.sink;
    job.sink_value = r.sink_value;
    mha__attend(&job, &r.parallel, ws + plan.scratch, plan.lane);
    mha__close(owned);
    return MHA_OK;
}

MHA_API mha_status mha_merge(int batch, int heads, int seq, int d, const float *o_a,
                             const float *lse_a, const float *o_b, const float *lse_b,
                             mha_stride stride, float *o, float *lse)
{
    mha__why w = mha__why_make(NULL, 0);
    ptrdiff_t b, h, t, c;
    mha_status st;
    if (batch < 0 || heads < 1 || seq < 0 || d < 1) return MHA_ERR_SIZE;
    if ((st = mha__check_tensor(&w, "o_a", o_a, 1, batch, heads, seq, d)) ||
        (st = mha__check_tensor(&w, "o_b", o_b, 1, batch, heads, seq, d)) ||
        (st = mha__check_tensor(&w, "o", o, 1, batch, heads, seq, d)) ||
        (st = mha__check_tensor(&w, "lse_a", lse_a, 1, batch, heads, seq, 1)) ||
        (st = mha__check_tensor(&w, "lse_b", lse_b, 1, batch, heads, seq, 1)) ||
        (st = mha__check_tensor(&w, "lse", lse, 0, batch, heads, seq, 1)))
        return st;
    if (batch == 0 || seq == 0) return MHA_OK;
    if ((st = mha__check_rows(&w, stride, batch, heads, seq, d)) != MHA_OK) return st;
    stride = mha__stride_or(stride, heads, seq, d);
    for (b = 0; b < batch; b++)
        for (h = 0; h < heads; h++)
            for (t = 0; t < seq; t++) {
                ptrdiff_t at = mha__at(&stride, NULL, b, h, t), row = (b * heads + h) * seq + t;
                float la = lse_a[row], lb = lse_b[row];
                int no_a = mha__bits(la) == MHA__NINF, no_b = mha__bits(lb) == MHA__NINF;
                double top = la > lb ? (double)la : (double)lb;
                double a = exp((double)la - top), e = exp((double)lb - top), sum = a + e;
                for (c = 0; c < d; c++)
                    o[at + c] =
                        no_a   ? no_b ? 0.0f : o_b[at + c]
                          : no_b ? o_a[at + c]
                               : (float)((a * (double)o_a[at + c] + e * (double)o_b[at + c]) / sum);
                if (lse) lse[row] = no_a ? lb : no_b ? la : (float)(top + log(sum));
            }
    return MHA_OK;
}

/* ---- layer ------------------------------------------------------------------------------ */

/* Validates; fills in the defaults of r. d: width of a head. */
static mha_status mha__rope_resolve(mha__why *why, mha_rope *r, int d)
{
    int yarn = r->scaling == MHA_ROPE_YARN, llama = r->scaling == MHA_ROPE_LLAMA3;
    const char *unused;
    mha_status st;
    if ((unsigned)r->layout > (unsigned)MHA_ROPE_INTERLEAVED)
        return mha__fail(why, MHA_ERR_ENUM, "rope.layout is #, which is no mha_rope_layout", "",
                         (int)r->layout, 0);
    if ((unsigned)r->scaling > (unsigned)MHA_ROPE_LLAMA3)
        return mha__fail(why, MHA_ERR_ENUM, "rope.scaling is #, which is no mha_rope_scaling", "",
                         (int)r->scaling, 0);
    if (r->layout == MHA_ROPE_NONE) {
        if (r->width || r->base != 0.0f || r->scaling || r->factor != 0.0f || r->original ||
            r->beta_fast != 0.0f || r->beta_slow != 0.0f || r->attention != 0.0f ||
            r->low_freq != 0.0f || r->high_freq != 0.0f)
            return mha__fail(why, MHA_ERR_CONFLICT,
                             "fields of rope are set but rope.layout is MHA_ROPE_NONE", "", 0, 0);
        return MHA_OK;
    }
    if (r->width == 0) r->width = d;
    if (r->width < 2 || r->width > d || r->width % 2 != 0)
        return mha__fail(why, MHA_ERR_SIZE,
                         "rope.width is #; it must be even and between 2 and the head's #", "",
                         r->width, d);
    if ((st = mha__check_number(why, "rope.base", r->base, 1)) ||
        (st = mha__check_number(why, "rope.factor", r->factor, 1)) ||
        (st = mha__check_size(why, "rope.original", r->original, 0)) ||
        (st = mha__check_number(why, "rope.beta_fast", r->beta_fast, 0)) ||
        (st = mha__check_number(why, "rope.beta_slow", r->beta_slow, 0)) ||
        (st = mha__check_number(why, "rope.attention", r->attention, 0)) ||
        (st = mha__check_number(why, "rope.low_freq", r->low_freq, 0)) ||
        (st = mha__check_number(why, "rope.high_freq", r->high_freq, 0)))
        return st;
    if (r->scaling && r->factor == 0.0f)
        return mha__fail(why, MHA_ERR_VALUE, "rope.factor is 0; this rope.scaling needs it", "", 0,
                         0);
    if (r->base == 0.0f) r->base = 10000.0f;
    if (r->factor == 0.0f) r->factor = 1.0f;
    if (yarn && r->beta_fast == 0.0f) r->beta_fast = 32.0f;
    if (yarn && r->beta_slow == 0.0f) r->beta_slow = 1.0f;
    if (yarn && r->attention == 0.0f) r->attention = (float)(0.1 * log((double)r->factor) + 1.0);
    if (llama && r->low_freq == 0.0f) r->low_freq = 1.0f;
    if (llama && r->high_freq == 0.0f) r->high_freq = 4.0f;
    if ((yarn || llama) && r->original == 0)
        return mha__fail(why, MHA_ERR_VALUE, "rope.original is 0; this rope.scaling needs it", "",
                         0, 0);
    if (yarn && !(r->base > 1.0f))
        return mha__fail(why, MHA_ERR_VALUE, "MHA_ROPE_YARN needs rope.base above 1", "", 0, 0);
    if (yarn && !(r->beta_fast >= r->beta_slow))
        return mha__fail(why, MHA_ERR_VALUE, "rope.beta_fast is below rope.beta_slow", "", 0, 0);
    if (llama && !(r->high_freq > r->low_freq))
        return mha__fail(why, MHA_ERR_VALUE, "rope.high_freq is not above rope.low_freq", "", 0, 0);
    if (r->scaling == MHA_ROPE_NTK && r->width == 2)
        return mha__fail(why, MHA_ERR_VALUE, "MHA_ROPE_NTK needs rope.width above 2", "", 0, 0);
    unused = !r->scaling && r->factor > 1.0f  ? "factor"
             : !yarn && !llama && r->original ? "original"
             : !yarn && r->beta_fast != 0.0f  ? "beta_fast"
             : !yarn && r->beta_slow != 0.0f  ? "beta_slow"
             : !yarn && r->attention != 0.0f  ? "attention"
             : !llama && r->low_freq != 0.0f  ? "low_freq"
             : !llama && r->high_freq != 0.0f ? "high_freq"
                                              : NULL;
    if (!unused) return MHA_OK;
    return mha__fail(why, MHA_ERR_CONFLICT, "rope.@ is set, but this rope.scaling does not use it",
                     unused, 0, 0);
}

MHA_API mha_status mha_rotate(const mha_rope *rope, int batch, int heads, int seq, int d, float *x,
                              mha_stride stride, const int *positions)
{
    mha__why w = mha__why_make(NULL, 0);
    ptrdiff_t b, h, t;
    mha_status st;
    mha_rope r;
    int i, n;
    if (!rope) return MHA_ERR_NULL;
    if (batch < 0 || heads < 1 || seq < 0 || d < 1) return MHA_ERR_SIZE;
    r = *rope;
    if ((st = mha__rope_resolve(&w, &r, d)) ||
        (st = mha__check_tensor(&w, "x", x, 1, batch, heads, seq, d)) ||
        (st = mha__check_ints(&w, "positions", positions)))
        return st;
    if ((st = mha__check_rows(&w, stride, batch, heads, seq, d)) != MHA_OK) return st;
    if (r.layout == MHA_ROPE_NONE || batch == 0 || seq == 0) return MHA_OK;
    stride = mha__stride_or(stride, heads, seq, d);
    for (i = 0; i < r.width / 2; i += n) { /* some pairs of all rows, then the next ones */
        double freq[64];
        float table[2 * 64];
        for (n = 0; n < 64 && i + n < r.width / 2; n++) freq[n] = mha__rope_freq(&r, i + n);
        for (b = 0; b < batch; b++)
            for (t = 0; t < seq; t++) {
                long at = positions ? (long)positions[b * seq + t] : (long)t;
                mha__rope_table(&r, n, freq, at, table);
                for (h = 0; h < heads; h++)
                    mha__rope_row(&r, i, n, table, x + mha__at(&stride, NULL, b, h, t));
            }
    }
    return MHA_OK;
}

MHA_API mha_status mha_alibi_slopes(int heads, float *slopes)
{
    int n = 1, i;
    if (heads < 1) return MHA_ERR_SIZE;
    if (!slopes) return MHA_ERR_NULL;
    if ((uintptr_t)slopes % sizeof(float) != 0) return MHA_ERR_ALIGN;
    while (n <= heads / 2) n *= 2;
    for (i = 0; i < heads; i++) /* of n heads, then every other one of 2n */
        slopes[i] = (float)pow(2.0, i < n ? -8.0 * (i + 1) / n : -4.0 * (2 * (i - n) + 1) / n);
    return MHA_OK;
}

MHA_API mha_status mha_convert(mha_type from_type, const void *from, mha_type to_type, void *to,
                               size_t n)
{
    size_t i;
    if ((unsigned)from_type > (unsigned)MHA_INT8 || (unsigned)to_type > (unsigned)MHA_INT8)
        return MHA_ERR_ENUM;
    if (from_type == MHA_INT8 || to_type == MHA_INT8) return MHA_ERR_VALUE;
    if (n == 0) return MHA_OK;
    if (!from || !to) return MHA_ERR_NULL;
    if ((uintptr_t)from % mha__type_size(from_type) || (uintptr_t)to % mha__type_size(to_type))
        return MHA_ERR_ALIGN;
    for (i = 0; i < n; i++) {
        float x = from_type == MHA_F32   ? ((const float *)from)[i]
                  : from_type == MHA_F16 ? mha__from_f16(((const uint16_t *)from)[i])
                                         : mha__from_bf16(((const uint16_t *)from)[i]);
        mha__put(to_type, to, (ptrdiff_t)i, x, 0.0f);
    }
    return MHA_OK;
}

/* Validates; r becomes *cfg with every default filled in. */
static mha_status mha__config_resolve(mha__why *why, const mha_config *cfg, mha_config *r)
{
    const mha__kernels *kern = NULL;
    mha_status st;
    if (!cfg) return mha__fail(why, MHA_ERR_NULL, "cfg is null", "", 0, 0);
    *r = *cfg;
    if ((st = mha__check_size(why, "d_model", r->d_model, 1)) ||
        (st = mha__check_size(why, "n_heads", r->n_heads, 1)) ||
        (st = mha__check_size(why, "d_k", r->d_k, 0)))
        return st;
    if (r->d_k == 0) {
        if (r->d_model % r->n_heads != 0)
            return mha__fail(why, MHA_ERR_SIZE,
                             "d_model # is not divisible by n_heads #; make it so, or set d_k", "",
                             r->d_model, r->n_heads);
        r->d_k = r->d_model / r->n_heads;
    }
    if ((st = mha__check_heads(why, "n_heads", r->n_heads, "n_kv_heads", &r->n_kv_heads, &r->d_k,
                               &r->d_v)) ||
        (st = mha__check_size(why, "d_source", r->d_source, 0)) ||
        (st = mha__check_size(why, "d_source_v", r->d_source_v, 0)) ||
        (st = mha__check_scale(why, r->scale)) || (st = mha__check_isa(why, r->isa, &kern)) ||
        (st = mha__rope_resolve(why, &r->rope, r->d_k)) ||
        (st = mha__check_softcap(why, r->softcap)) ||
        (st = mha__check_flag(why, "alibi", r->alibi)) ||
        (st = mha__check_number(why, "norm_eps", r->norm_eps, 0)) ||
        (st = mha__check_flag(why, "zero_attn", r->zero_attn)) ||
        (st = mha__check_type(why, "weight_type", r->weight_type)))
        return st;
    if ((unsigned)r->qk_norm > (unsigned)MHA_NORM_LAYER)
        return mha__fail(why, MHA_ERR_ENUM, "qk_norm is #, which is no mha_norm", "",
                         (int)r->qk_norm, 0);
    if (r->norm_eps == 0.0f) r->norm_eps = 1e-6f;
    if (r->d_source == 0) r->d_source = r->d_model;
    if (r->d_source_v == 0) r->d_source_v = r->d_source;
    if (r->scale == 0.0f) r->scale = (float)(1.0 / sqrt((double)r->d_k));
    r->isa = kern->isa;
    return MHA_OK;
}

/* Where the packed weights lie in a layer's memory. */
typedef struct mha__layer_plan {
    mha__matrix mat[4];
    size_t w[4], b[4], scale[4], freq, extra, total;
} mha__layer_plan;

/* The small arrays of weights beside the matrices: array i, its name, how many floats it has. */
static const float *mha__extra(const mha_config *c, const mha_weights *w, int i, const char **name,
                               size_t *n)
{
    static const char *const names[9] = { "weights.alibi",       "weights.sink",
                                          "weights.sink_value",  "weights.q_norm",
                                          "weights.k_norm",      "weights.q_norm_bias",
                                          "weights.k_norm_bias", "weights.bias_k",
                                          "weights.bias_v" };
    const float *p[9];
    memset(p, 0, sizeof p);
    if (w) {
        p[0] = w->alibi, p[1] = w->sink, p[2] = w->sink_value, p[3] = w->q_norm, p[4] = w->k_norm;
        p[5] = w->q_norm_bias, p[6] = w->k_norm_bias, p[7] = w->bias_k, p[8] = w->bias_v;
    }
    *name = names[i];
    *n = i < 2    ? (size_t)c->n_heads
         : i == 2 ? mha__mul((size_t)c->n_heads, (size_t)c->d_v)
         : i < 7  ? (size_t)c->d_k
                  : mha__mul((size_t)c->n_kv_heads, (size_t)(i == 7 ? c->d_k : c->d_v));
    return p[i];
}

static mha_status mha__layer_plan_make(mha__why *why, const mha_config *r, mha__layer_plan *plan)
{
    size_t concat = mha__mul((size_t)r->n_heads, (size_t)r->d_v), n;
    mha_type type = r->weight_type;
    const char *name;
    int i;
    plan->total = 0;
    mha__take(&plan->total, sizeof(mha_layer));
    plan->freq = mha__take(&plan->total, mha__mul((size_t)r->rope.width / 2, sizeof(double)));
    plan->extra = plan->total;
    for (i = 0; i < 9; i++) {
        mha__extra(r, NULL, i, &name, &n);
        mha__take(&plan->total, mha__mul(n, sizeof(float)));
    }
    if (concat <= MHA__BIGGEST / sizeof(float)) {
        plan->mat[0] = mha__matrix_make(type, r->d_model, r->n_heads, r->d_k);
        plan->mat[1] = mha__matrix_make(type, r->d_source, r->n_kv_heads, r->d_k);
        plan->mat[2] = mha__matrix_make(type, r->d_source_v, r->n_kv_heads, r->d_v);
        plan->mat[3] = mha__matrix_make(type, (ptrdiff_t)concat, 1, r->d_model);
        for (i = 0; i < 4; i++) {
            const mha__matrix *m = &plan->mat[i];
            n = mha__matrix_numbers(m, 1);
            plan->w[i] = mha__take(&plan->total,
                                   mha__mul(mha__matrix_numbers(m, m->in), mha__type_size(type)));
            plan->b[i] = mha__take(&plan->total, mha__mul(n, sizeof(float)));
            plan->scale[i] =
                mha__take(&plan->total, type == MHA_INT8 ? mha__mul(n, sizeof(float)) : 0);
        }
        plan->total = mha__add(plan->total, 63);
        if (plan->total <= MHA__BIGGEST) return MHA_OK;
    }
    mha__fail(why, MHA_ERR_OVERFLOW, "d_model # and n_heads # ", "", r->d_model, r->n_heads);
    mha__fail(why, MHA_ERR_OVERFLOW, "with d_k # and d_v #, ", "", r->d_k, r->d_v);
    return mha__fail(why, MHA_ERR_OVERFLOW,
                     "d_source # and d_source_v # make more weights than can be addressed", "",
                     r->d_source, r->d_source_v);
}

/* cfg is resolved. */
static mha_status mha__weights_check(mha__why *why, const mha_config *cfg, const mha_weights *w)
{
    static const char *const name[9] = { "weights.q",   "weights.k",     "weights.v",
                                         "weights.out", "weights.b_q",   "weights.b_k",
                                         "weights.b_v", "weights.b_out", "weights.qkv" };
    const float *p[9];
    mha_status st;
    int i;
    if (!w) return mha__fail(why, MHA_ERR_NULL, "weights is null", "", 0, 0);
    if ((unsigned)w->layout > (unsigned)MHA_OUT_IN)
        return mha__fail(why, MHA_ERR_ENUM, "weights.layout is #, which is no mha_layout", "",
                         (int)w->layout, 0);
    if (!w->qkv && !w->q && !w->k && !w->v)
        return mha__fail(why, MHA_ERR_NULL,
                         "weights.qkv, q, k and v are all null; give qkv, or q, k and v", "", 0, 0);
    if (w->qkv && (w->q || w->k || w->v))
        return mha__fail(why, MHA_ERR_CONFLICT, "give weights.qkv or weights.q, k and v, not both",
                         "", 0, 0);
    if (w->b_qkv && (w->b_q || w->b_k || w->b_v))
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "give weights.b_qkv or weights.b_q, b_k and b_v, not both", "", 0, 0);
    if (w->qkv && (cfg->d_source != cfg->d_model || cfg->d_source_v != cfg->d_model)) {
        mha__fail(why, MHA_ERR_CONFLICT, "weights.qkv needs sources of width d_model #, but ", "",
                  cfg->d_model, 0);
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "d_source is # and d_source_v is #; give q, k and v instead", "",
                         cfg->d_source, cfg->d_source_v);
    }
    p[0] = w->q, p[1] = w->k, p[2] = w->v, p[3] = w->out;
    p[4] = w->b_q, p[5] = w->b_k, p[6] = w->b_v, p[7] = w->b_out, p[8] = w->qkv;
    for (i = 0; i < 9; i++)
        if ((st = mha__check_floats(why, name[i], p[i], i == 3 || (i < 3 && !w->qkv))) != MHA_OK)
            return st;
    for (i = 0; i < 9; i++) {
        const char *extra;
        size_t n;
        const float *at = mha__extra(cfg, w, i, &extra, &n);
        if ((st = mha__check_floats(why, extra, at, 0)) != MHA_OK) return st;
        if (at &&
            ((i == 0 && !cfg->alibi) || (i == 2 && !w->sink) || (i > 2 && i < 7 && !cfg->qk_norm) ||
             (i > 4 && i < 7 && cfg->qk_norm == MHA_NORM_RMS) || (i == 7 && !w->bias_v) ||
             (i == 8 && !w->bias_k)))
            return mha__fail(why, MHA_ERR_CONFLICT,
                             i == 0   ? "@ is given but alibi of the config is 0"
                             : i == 2 ? "@ is given but weights.sink is null"
                             : i < 7  ? "@ is given but qk_norm of the config has no use for it"
                                      : "@ is given: weights.bias_k and weights.bias_v go together",
                             extra, 0, 0);
    }
    return mha__check_floats(why, "weights.b_qkv", w->b_qkv, 0);
}

MHA__APART mha_status mha__layer_resolve(mha__why *why, const mha_config *cfg, const mha_weights *w,
                                         mha_config *r, mha__layer_plan *plan)
{
    mha_status st;
    if ((st = mha__config_resolve(why, cfg, r)) != MHA_OK) return st;
    if ((st = mha__weights_check(why, r, w)) != MHA_OK) return st;
    return mha__layer_plan_make(why, r, plan);
}

MHA_API mha_status mha_layer_check(const mha_config *cfg, const mha_weights *w, char *why,
                                   size_t why_size)
{
    mha__why s = mha__why_make(why, why_size);
    mha_config r;
    mha__layer_plan plan;
    return mha__layer_resolve(&s, cfg, w, &r, &plan);
}

MHA_API mha_status mha_layer_size(const mha_config *cfg, size_t *bytes)
{
    mha__why s = mha__why_make(NULL, 0);
    mha_config r;
    mha__layer_plan plan;
    mha_status st;
    if (!bytes) return MHA_ERR_NULL;
    if ((st = mha__config_resolve(&s, cfg, &r)) != MHA_OK) return st;
    if ((st = mha__layer_plan_make(&s, &r, &plan)) != MHA_OK) return st;
    *bytes = plan.total;
    return MHA_OK;
}

/* Everything was validated. */
static mha_layer *mha__layer_fill(void *buffer, const mha_config *r, const mha__layer_plan *plan,
                                  const mha_weights *w)
{
    char *base = mha__align(buffer);
    mha_layer *layer = (mha_layer *)(void *)base;
    ptrdiff_t nq = (ptrdiff_t)r->n_heads * r->d_k, nk = (ptrdiff_t)r->n_kv_heads * r->d_k;
    ptrdiff_t nv = (ptrdiff_t)r->n_kv_heads * r->d_v, out[4], skip[4], ld;
    const float *src[4], *bias[4], *extra[9];
    double *freq = (double *)(void *)(base + plan->freq);
    size_t n, at;
    int i;
    out[0] = nq, out[1] = nk, out[2] = nv, out[3] = r->d_model;
    skip[0] = 0, skip[1] = nq, skip[2] = nq + nk, skip[3] = 0; /* in the fused matrix */
    src[0] = w->q, src[1] = w->k, src[2] = w->v, src[3] = w->out;
    bias[0] = w->b_q, bias[1] = w->b_k, bias[2] = w->b_v, bias[3] = w->b_out;
    layer->cfg = *r;
    layer->kern = mha__kernels_for(r->isa);
    layer->owned = NULL;
    for (i = 0; i < r->rope.width / 2; i++) freq[i] = mha__rope_freq(&r->rope, i);
    layer->freq = freq;
    for (i = 0, at = plan->extra; i < 9; i++) {
        const char *name;
        const float *from = mha__extra(r, w, i, &name, &n);
        float *to = (float *)(void *)(base + mha__take(&at, n * sizeof(float)));
        extra[i] = from ? to : NULL;
        if (from) memcpy(to, from, n * sizeof(float));
        if (i == 0 && r->alibi && !from) {
            mha_alibi_slopes(r->n_heads, to);
            extra[i] = to;
        }
    }
    layer->alibi = extra[0];
    layer->sink = extra[1];
    layer->sink_value = extra[2];
    layer->norm[0] = extra[3];
    layer->norm[1] = extra[4];
    layer->norm_bias[0] = extra[5];
    layer->norm_bias[1] = extra[6];
    layer->bias_k = extra[7];
    layer->bias_v = extra[8];
    for (i = 0; i < 4; i++) {
        mha__matrix *m = &layer->mat[i];
        void *pw = base + plan->w[i];
        float *pb = (float *)(void *)(base + plan->b[i]);
        float *ps = r->weight_type == MHA_INT8 ? (float *)(void *)(base + plan->scale[i]) : NULL;
        int fused = i < 3 && w->qkv;
        *m = plan->mat[i];
        m->w = pw;
        m->b = pb;
        m->scale = ps;
        if (i < 3 && w->b_qkv) bias[i] = w->b_qkv + skip[i];
        if (w->layout == MHA_IN_OUT) {
            ld = fused ? nq + nk + nv : out[i];
            mha__matrix_pack(m, pw, pb, ps, fused ? w->qkv + skip[i] : src[i], ld, 1, bias[i]);
        } else {
            ld = m->in;
            mha__matrix_pack(m, pw, pb, ps, fused ? w->qkv + skip[i] * ld : src[i], 1, ld, bias[i]);
        }
    }
    return layer;
}

MHA_API mha_status mha_layer_init(mha_layer **layer, void *buffer, size_t bytes,
                                  const mha_config *cfg, const mha_weights *w)
{
    mha__why s = mha__why_make(NULL, 0);
    mha_config r;
    mha__layer_plan plan;
    mha_status st;
    if (!layer) return MHA_ERR_NULL;
    *layer = NULL;
    if ((st = mha__layer_resolve(&s, cfg, w, &r, &plan)) != MHA_OK) return st;
    if (!buffer) return MHA_ERR_NULL;
    if (bytes < plan.total) return MHA_ERR_BUFFER;
    *layer = mha__layer_fill(buffer, &r, &plan, w);
    return MHA_OK;
}

#ifndef MHA_NO_MALLOC
MHA_API mha_status mha_layer_create(mha_layer **layer, const mha_config *cfg, const mha_weights *w)
{
    mha__why s = mha__why_make(NULL, 0);
    mha_config r;
    mha__layer_plan plan;
    mha_status st;
    void *buffer;
    if (!layer) return MHA_ERR_NULL;
    *layer = NULL;
    if ((st = mha__layer_resolve(&s, cfg, w, &r, &plan)) != MHA_OK) return st;
    buffer = MHA_MALLOC(plan.total);
    if (!buffer) return MHA_ERR_MEMORY;
    *layer = mha__layer_fill(buffer, &r, &plan, w);
    (*layer)->owned = buffer;
    return MHA_OK;
}
#endif

MHA_API void mha_layer_free(mha_layer *layer)
{
    if (layer) mha__close(layer->owned);
}

MHA_API const mha_config *mha_layer_config(const mha_layer *layer)
{
    return layer ? &layer->cfg : NULL;
}

/* Where everything lies in a cache's memory. */
typedef struct mha__cache_plan {
    size_t length, part[4], total;
} mha__cache_plan;

/* Validates; c becomes the cache, but for its pointers. */
static mha_status mha__cache_plan_make(mha__why *why, const mha_layer *layer,
                                       const mha_cache_config *cfg, mha_cache *c,
                                       mha__cache_plan *plan)
{
    mha_status st;
    int i;
    memset(c, 0, sizeof *c);
    if (!layer) return mha__fail(why, MHA_ERR_NULL, "layer is null", "", 0, 0);
    if (!cfg) return mha__fail(why, MHA_ERR_NULL, "cfg is null", "", 0, 0);
    if ((st = mha__check_size(why, "batch", cfg->batch, 1)) ||
        (st = mha__check_size(why, "capacity", cfg->capacity, 1)) ||
        (st = mha__check_flag(why, "ring", cfg->ring)) ||
        (st = mha__check_type(why, "type", cfg->type)))
        return st;
    if (cfg->ring && cfg->capacity > INT_MAX - MHA__KEYS)
        return mha__fail(why, MHA_ERR_OVERFLOW, "capacity is #; a ring's can be # at most", "",
                         cfg->capacity, INT_MAX - MHA__KEYS);
    c->cfg = *cfg;
    c->kv_heads = layer->cfg.n_kv_heads;
    c->d_k = layer->cfg.d_k;
    c->d_v = layer->cfg.d_v;
    c->places =
        cfg->ring ? (int)(mha__div_up(cfg->capacity, MHA__KEYS) * MHA__KEYS) : cfg->capacity;
    plan->total = 0;
    mha__take(&plan->total, sizeof(mha_cache));
    plan->length = mha__take(&plan->total, mha__mul((size_t)cfg->batch, 4 * sizeof(int)));
    for (i = 0; i < 4; i++)
        plan->part[i] =
            mha__take(&plan->total, mha__mul(mha__cache_part(c, i), (size_t)cfg->batch));
    plan->total = mha__add(plan->total, 63);
    if (plan->total <= MHA__BIGGEST) return MHA_OK;
    return mha__fail(why, MHA_ERR_OVERFLOW,
                     "batch # with capacity # would be more bytes than can be addressed", "",
                     cfg->batch, cfg->capacity);
}

static mha_cache *mha__cache_fill(void *buffer, const mha_cache *made, const mha__cache_plan *plan)
{
    char *base = mha__align(buffer);
    mha_cache *c = (mha_cache *)(void *)base;
    *c = *made;
    c->length = (int *)(void *)(base + plan->length);
    c->floor = c->length + c->cfg.batch;
    c->mark = c->floor + c->cfg.batch;
    c->k = base + plan->part[0];
    c->v = base + plan->part[1];
    c->k_scale = (float *)(void *)(base + plan->part[2]);
    c->v_scale = (float *)(void *)(base + plan->part[3]);
    memset(c->length, 0, (size_t)c->cfg.batch * 4 * sizeof(int));
    return c;
}

MHA_API mha_status mha_cache_size(const mha_layer *layer, const mha_cache_config *cfg,
                                  size_t *bytes)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_cache made;
    mha__cache_plan plan;
    mha_status st = mha__cache_plan_make(&w, layer, cfg, &made, &plan);
    if (!bytes) return MHA_ERR_NULL;
    if (st == MHA_OK) *bytes = plan.total;
    return st;
}

MHA_API mha_status mha_cache_check(const mha_layer *layer, const mha_cache_config *cfg, char *why,
                                   size_t why_size)
{
    mha__why w = mha__why_make(why, why_size);
    mha_cache made;
    mha__cache_plan plan;
    return mha__cache_plan_make(&w, layer, cfg, &made, &plan);
}

MHA_API mha_status mha_cache_init(mha_cache **cache, void *buffer, size_t bytes,
                                  const mha_layer *layer, const mha_cache_config *cfg)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_cache made;
    mha__cache_plan plan;
    mha_status st;
    if (!cache) return MHA_ERR_NULL;
    *cache = NULL;
    if ((st = mha__cache_plan_make(&w, layer, cfg, &made, &plan)) != MHA_OK) return st;
    if (!buffer) return MHA_ERR_NULL;
    if (bytes < plan.total) return MHA_ERR_BUFFER;
    *cache = mha__cache_fill(buffer, &made, &plan);
    return MHA_OK;
}

#ifndef MHA_NO_MALLOC
MHA_API mha_status mha_cache_create(mha_cache **cache, const mha_layer *layer,
                                    const mha_cache_config *cfg)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_cache made;
    mha__cache_plan plan;
    mha_status st;
    void *buffer;
    if (!cache) return MHA_ERR_NULL;
    *cache = NULL;
    if ((st = mha__cache_plan_make(&w, layer, cfg, &made, &plan)) != MHA_OK) return st;
    buffer = MHA_MALLOC(plan.total);
    if (!buffer) return MHA_ERR_MEMORY;
    *cache = mha__cache_fill(buffer, &made, &plan);
    (*cache)->owned = buffer;
    return MHA_OK;
}
#endif

MHA_API void mha_cache_free(mha_cache *cache)
{
    if (cache) mha__close(cache->owned);
}

/* What the entry points of a layer require of args. */
enum { MHA__X = 1, MHA__Y = 2, MHA__WORK = 4, MHA__APPEND = 8 };

/* Tokens that the call brings for sequence b: cu_k, kt of d describe them. */
static ptrdiff_t mha__brought(const mha_args *r, const mha__dims *d, ptrdiff_t b)
{
    return r->cache_only ? 0 : mha__length(r->cu_source, d->kt, b);
}

static mha_status mha__check_same(mha__why *why, const char *name, int cache, int layer)
{
    if (cache == layer) return MHA_OK;
    return mha__fail(why, MHA_ERR_CONFLICT,
                     "the cache is for another layer: its @ is #, that of this one #", name, cache,
                     layer);
}

/* A cache in args: whether it fits, and S. d holds the lengths of x and of what is appended. */
static mha_status mha__check_cache(mha__why *why, const mha_config *c, const mha_args *r,
                                   mha__dims *d, int need)
{
    const mha_cache *cache = r->cache;
    ptrdiff_t longest = 0, first;
    mha_status st;
    int b;
    if (r->mask.key_len)
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "cache and mask.key_len are both set: the lengths are the cache's", "", 0,
                         0);
    if (r->mask.causal == MHA_CAUSAL_UPPER_LEFT)
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "with a cache positions count from its start: use MHA_CAUSAL", "", 0, 0);
    if (cache->cfg.batch != r->batch)
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "batch is # but the cache has # sequences: cu_seq can give some no tokens",
                         "", r->batch, cache->cfg.batch);
    if ((st = mha__check_same(why, "n_kv_heads", cache->kv_heads, c->n_kv_heads)) ||
        (st = mha__check_same(why, "d_k", cache->d_k, c->d_k)) ||
        (st = mha__check_same(why, "d_v", cache->d_v, c->d_v)))
        return st;
    if (cache->cfg.ring && !(need & MHA__APPEND) && (need & MHA__WORK) &&
        (!r->mask.windowed || r->mask.left < 0))
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "the cache is a ring: it needs mask.windowed = 1 and mask.left >= 0", "",
                         0, 0);
    for (b = 0; b < r->batch; b++) {
        ptrdiff_t more = mha__brought(r, d, b), had = cache->length[b], room, asked, left;
        room = (cache->cfg.ring ? INT_MAX : cache->cfg.capacity) - had;
        if (more > room &&
            (need & MHA__WORK)) { /* how much memory is needed can be asked all the same */
            mha__fail(why, MHA_ERR_FULL, "no room for # more: sequence # ", "", more, b);
            return mha__fail(why, MHA_ERR_FULL,
                             "of the cache holds # tokens of #: truncate or reset it, or make a "
                             "larger one",
                             "", had, had + room);
        }
        longest = mha__max(longest, had + mha__min(more, room));
        asked = need & MHA__APPEND ? more : mha__length(r->cu_seq, d->seq, b);
        left = need & MHA__APPEND ? 0 : r->mask.left;
        if (!cache->cfg.ring || asked == 0 || !(need & MHA__WORK)) continue;
        if ((need & MHA__APPEND) && asked > cache->cfg.capacity)
            return mha__fail(
                why, MHA_ERR_SIZE,
                "# new tokens are more than the ring's capacity #: append them in pieces", "",
                asked, cache->cfg.capacity);
        if (asked > cache->cfg.capacity || left > cache->cfg.capacity - asked) {
            mha__fail(why, MHA_ERR_SIZE, "a window of # and # new tokens", "", left, asked);
            return mha__fail(why, MHA_ERR_SIZE,
                             " need a ring of capacity #, but that of the cache is #", "",
                             (long long)left + asked, cache->cfg.capacity);
        }
        first = mha__max(had + more - asked - left, 0); /* position that is seen */
        if (!(need & MHA__APPEND) && first < cache->floor[b]) {
            mha__fail(why, MHA_ERR_CONFLICT, "sequence # was cut back to #, ", "", b, had);
            return mha__fail(
                why, MHA_ERR_CONFLICT,
                "and the ring no longer holds its position #, which the window sees: reset "
                "it and start again",
                "", first, 0);
        }
    }
    d->keys = longest;
    if (r->source_seq == 0 || r->source_seq == longest) return MHA_OK;
    if ((need & MHA__APPEND) && r->source != r->x) return MHA_OK; /* it is that of source */
    if (need & MHA__APPEND)
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "source_seq is # but source is null: what is appended is x, of seq #", "",
                         r->source_seq, d->qt);
    return mha__fail(why, MHA_ERR_CONFLICT,
                     "source_seq is #; with this cache it is 0 or the longest length, #", "",
                     r->source_seq, longest);
}

/* A batch is done a group of sequences at a time, from x to y: what lies between, q, k, v and o, is
   then still in a cache when it is needed. So many rows of x, or of the source, are a group, or one
   sequence that has more: as many as weights are read from memory for, or 2 MiB with what is made of
   them; with more than two threads in proportion. On Zen 5 32 sequences of 64 tokens, D = 512, are 6 %
   faster, on two threads 4 %; 8 of 128, D = 768, 4 % and 2 %. */
static ptrdiff_t mha__group_rows(const mha_layer *layer, int threads)
{
#ifdef MHA__GROUP_ROWS /* in some of the tests */
    (void)layer, (void)threads;
    return MHA__GROUP_ROWS;
#else
    const mha_config *c = &layer->cfg;
    ptrdiff_t heads = (ptrdiff_t)c->n_heads + c->n_kv_heads;
    ptrdiff_t floats = 2 * (ptrdiff_t)c->d_model + heads * ((ptrdiff_t)c->d_k + c->d_v);
    ptrdiff_t rows = mha__max(MHA__M_BLOCK, (1 << 19) / floats);
    return rows * mha__div_up(mha__min(mha__max(threads, 1), 4096), 2);
#endif
}

/* Rows that there is memory for: those of a whole batch, if that is less than most, or of one sequence.
   Never falls as either grows, though a group of longer sequences may have fewer. */
static ptrdiff_t mha__group_room(ptrdiff_t batch, ptrdiff_t seq, ptrdiff_t most)
{
    if (seq >= most) return seq;
    return seq > most / batch ? most : batch * seq;
}

/* Validates; r becomes *args with every default filled in: source and source_v are where keys and
   values come from, and cu_source is theirs. */
static mha_status mha__args_resolve(mha__why *why, const mha_layer *layer, const mha_args *args,
                                    mha_args *r, mha__dims *d, mha__plan *plan, int need)
{
    const mha_config *c;
    size_t lane = 0, n;
    ptrdiff_t most, longest;
    mha_status st;
    mha__dims room;
    int i, turned, compact, kv, keys_from_x, need_k;
    memset(plan, 0, sizeof *plan); /* or gcc 12 fears that they are used on errors */
    memset(d, 0, sizeof *d);
    if (!layer) return mha__fail(why, MHA_ERR_NULL, "layer is null", "", 0, 0);
    if (!args) return mha__fail(why, MHA_ERR_NULL, "args is null", "", 0, 0);
    c = &layer->cfg;
    *r = *args;
    if ((st = mha__check_size(why, "batch", r->batch, 0)) ||
        (st = mha__check_size(why, "seq", r->seq, 0)) ||
        (st = mha__check_size(why, "source_seq", r->source_seq, 0)) ||
        (st = mha__check_flag(why, "cache_only", r->cache_only)) ||
        (st = mha__check_cu(why, "cu_seq", r->cu_seq, r->batch, "seq", r->seq, &d->qb, &d->qt,
                            &d->seq)) ||
        (st = mha__check_ints(why, "positions", r->positions)) ||
        (st = mha__check_ints(why, "source_positions", r->source_positions)))
        return st;
    if (r->cache_only && !r->cache)
        return mha__fail(why, MHA_ERR_CONFLICT, "cache_only is 1 but cache is null", "", 0, 0);
    if (r->cache && r->source && !(need & MHA__APPEND))
        return mha__fail(why, MHA_ERR_CONFLICT,
                         "cache and source are both set: mha_cache_append takes a source, then "
                         "mha_forward attends to it with cache_only = 1",
                         "", 0, 0);
    if (!r->source && (r->source_v || r->source_positions))
        return mha__fail(why, MHA_ERR_CONFLICT, "@ is given but source is null",
                         r->source_v ? "source_v" : "source_positions", 0, 0);
    keys_from_x = !r->source;
    need_k = (need & MHA__X) && !r->cache_only;
    if (keys_from_x) {
        if (r->cu_source)
            return mha__fail(why, MHA_ERR_CONFLICT, "cu_source is given but source is null", "", 0,
                             0);
        if (!r->cache && r->source_seq != 0 && r->source_seq != d->qt)
            return mha__fail(why, MHA_ERR_CONFLICT,
                             "source_seq is # but source is null: keys come from x, of seq #", "",
                             r->source_seq, d->qt);
        if (need_k && c->d_source != c->d_model)
            return mha__fail(why, MHA_ERR_NULL, "source is null but d_source # is not d_model #",
                             "", c->d_source, c->d_model);
        r->source = r->x;
        r->cu_source = r->cu_seq;
        r->source_positions = r->positions;
        d->kb = d->qb;
        d->kt = d->qt;
        d->keys = d->seq;
    } else if ((st = mha__check_cu(why, "cu_source", r->cu_source, r->batch, "source_seq",
                                   r->source_seq, &d->kb, &d->kt, &d->keys)) != MHA_OK) {
        return st;
    }
    if (!r->source_v) {
        if (need_k && c->d_source_v != c->d_source)
            return mha__fail(why, MHA_ERR_NULL,
                             "source_v is null but d_source_v # is not d_source #", "",
                             c->d_source_v, c->d_source);
        r->source_v = r->source;
    }
    if (r->cache && (st = mha__check_cache(why, c, r, d, need)) != MHA_OK) return st;
    if (r->cache_only) d->kt = 0;
    if ((st = mha__check_tensor(why, "x", r->x,
                                (need & MHA__X) && (keys_from_x || !(need & MHA__APPEND)), d->qb,
                                d->qt, c->d_model, 1)) ||
        (st = mha__check_tensor(why, "source", r->source, need_k, d->kb, d->kt, c->d_source, 1)) ||
        (st = mha__check_tensor(why, "source_v", r->source_v, need_k, d->kb, d->kt, c->d_source_v,
                                1)) ||
        (st = mha__check_tensor(why, "y", r->y, need & MHA__Y, d->qb, d->qt, c->d_model, 1)) ||
        (st = mha__check_common(why, &r->mask, r->gate, r->attn, r->attn_mean, r->lse, &r->parallel,
                                r->batch, c->n_heads, d, need)))
        return st;
    mha__mask_resolve(&r->mask, d->keys);
    r->gate_stride = mha__gate_resolve(r->gate_stride);

    if (!(need & MHA__X) &&
        (need & MHA__Y)) { /* mha_project_out: a part of what mha_forward needs */
        mha__take(&plan->lane,
                  mha__project_scratch(layer->kern, mha__mul((size_t)d->qb, (size_t)d->qt),
                                       layer->mat[3].in, c->weight_type));
        n = (size_t)(r->parallel.threads > 1 ? r->parallel.threads : 1);
        plan->scratch = mha__take(&plan->total, mha__mul(plan->lane, n));
        plan->total = mha__add(plan->total, 63);
        return mha__check_workspace(why, r->workspace, r->workspace_size, plan->total);
    }
    room = *d;
    plan->group = r->batch;
    most = mha__group_rows(layer, r->parallel.threads);
    longest = mha__max(mha__max(d->qt, d->kt), 1);
    if (!r->cache && !r->cu_seq && !r->cu_source && r->batch > most / longest) {
        plan->group = (int)mha__max(most / longest, 1);
        room.qb = room.kb = 1;
        room.qt = mha__group_room(r->batch, d->qt, most);
        /* each sequence begins a panel of 16 */
        room.kt = d->kt < most ? mha__div_up(d->kt, MHA__NR) * MHA__NR : d->kt;
        most += (MHA__NR - 1) * mha__min(r->batch, most);
        room.kt = mha__group_room(r->batch, room.kt, most);
    }
    turned = c->rope.layout || c->qk_norm;
    compact = r->cache && r->cache->cfg.type != MHA_F32;
    kv = compact ? MHA__KV_COMPACT : r->cache ? MHA__KV_CACHED : MHA__KV_SHARED;
    plan->q = mha__take(&plan->total, mha__floats(room.qb, c->n_heads, room.qt, c->d_k));
    plan->o = mha__take(&plan->total, mha__floats(room.qb, c->n_heads, room.qt, c->d_v));
    plan->stage_k = mha__take(
        &plan->total, turned || compact ? mha__floats(room.kb, c->n_kv_heads, room.kt, c->d_k) : 0);
    plan->stage_v =
        mha__take(&plan->total, compact ? mha__floats(room.kb, c->n_kv_heads, room.kt, c->d_v) : 0);
    for (i = 0; i < 4; i++) {
        size_t rows =
            i % 3 ? mha__mul((size_t)d->kb, (size_t)d->kt) : mha__mul((size_t)d->qb, (size_t)d->qt);
        n = mha__project_scratch(layer->kern, rows, layer->mat[i].in, c->weight_type);
        if (n > lane) lane = n;
    }
    n = mha__floats(c->rope.width, 1, 1, 1);
    if (n > lane) lane = n;
    mha__plan_attend(plan, layer->kern, r->batch, c->n_heads, c->n_kv_heads, &room, r->cu_source,
                     c->d_k, c->d_v, r->attn || r->attn_mean, r->parallel.threads, kv,
                     r->cache ? r->cache->cfg.capacity : d->keys, lane);
    if (!r->cu_source) plan->packed = d->kt; /* of a sequence: there is room for a group */
    if (need & MHA__WORK)
        return mha__check_workspace(why, r->workspace, r->workspace_size, plan->total);
    return plan->total > MHA__BIGGEST ? mha__check_workspace(why, NULL, 0, plan->total) : MHA_OK;
}

MHA_API mha_status mha_forward_check(const mha_layer *layer, const mha_args *args, char *why,
                                     size_t why_size)
{
    mha__why w = mha__why_make(why, why_size);
    mha_args r;
    mha__dims d;
    mha__plan plan;
    return mha__args_resolve(&w, layer, args, &r, &d, &plan, MHA__X | MHA__Y | MHA__WORK);
}

MHA_API mha_status mha_workspace_size(const mha_layer *layer, const mha_args *args, size_t *bytes)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_args r;
    mha__dims d;
    mha__plan plan;
    mha_status st;
    if (!bytes) return MHA_ERR_NULL;
    /* with a cache and a source it can only be for mha_cache_append */
    st = mha__args_resolve(&w, layer, args, &r, &d, &plan,
                           args && args->cache && args->source ? MHA__APPEND : 0);
    if (st == MHA_OK) *bytes = plan.total;
    return st;
}

/* The projections of x, source and source_v; those that share an input share one product, so
   self-attention is one. A place without data is left out. */
static void mha__project_all(const mha_layer *layer, const mha_args *r, const mha__dims *d,
                             const mha__place *to, char *scratch, size_t lane)
{
    const float *in[3];
    const int *cu[3];
    ptrdiff_t seq[3];
    int i, j, n;
    in[0] = r->x, in[1] = r->source, in[2] = r->source_v;
    cu[0] = r->cu_seq, cu[1] = cu[2] = r->cu_source;
    seq[0] = d->qt, seq[1] = seq[2] = d->kt;
    for (i = 0; i < 3; i = j) {
        const mha__matrix *mat[3];
        mha__place place[3];
        for (j = i, n = 0; j < 3 && in[j] == in[i] && cu[j] == cu[i] && seq[j] == seq[i] &&
                           layer->mat[j].in == layer->mat[i].in;
             j++)
            if (to[j].data) {
                mat[n] = &layer->mat[j];
                place[n++] = to[j];
            }
        if (n && seq[i])
            mha__project(layer->kern, in[i], r->batch, seq[i], cu[i], n, mat, place, &r->parallel,
                         scratch, lane);
    }
}

static mha_stride mha__stride_make(ptrdiff_t batch, ptrdiff_t head, ptrdiff_t seq)
{
    mha_stride s;
    s.batch = batch;
    s.head = head;
    s.seq = seq;
    return s;
}

/* rows of heads side by side, [B,T,heads*d] */
MHA__APART mha__place mha__place_concat(const float *data, ptrdiff_t seq, ptrdiff_t heads,
                                        ptrdiff_t d, const int *cu)
{
    return mha__place_rows((float *)(uintptr_t)data,
                           mha__stride_make(seq * heads * d, d, heads * d), cu);
}

/* Norm and rotation of q (which = 0), k (1) or neither (2), which lie as rows at x, and their way
   to the cache if to is not null. */
static void mha__turn(const mha_layer *layer, const mha_args *r, const mha__dims *d, int which,
                      const mha__place *x, const mha__place *to, char *scratch, size_t lane)
{
    const mha_config *c = &layer->cfg;
    mha__rotate_job job;
    int b;
    memset(&job, 0, sizeof job);
    job.kern = layer->kern;
    job.batch = r->batch;
    job.cu = which ? r->cu_source : r->cu_seq;
    job.seq = which ? d->kt : d->seq;
    job.heads = which ? c->n_kv_heads : c->n_heads;
    job.d = which == 2 ? c->d_v : c->d_k;
    job.x = *x;
    if (to) job.to = *to;
    if (which < 2) {
        job.norm = c->qk_norm;
        job.eps = c->norm_eps;
        job.weight = layer->norm[which];
        job.bias = layer->norm_bias[which];
        job.rope = c->rope.layout ? &c->rope : NULL;
        job.freq = layer->freq;
        job.positions = which ? r->source_positions : r->positions;
        job.past = r->cache && !r->cache_only ? r->cache->length : NULL;
    }
    if (job.cu && which) /* the longest of what is brought */
        for (job.seq = b = 0; b < r->batch; b++)
            job.seq = mha__max(job.seq, mha__length(job.cu, 0, b));
    mha__rotate(&job, &r->parallel, scratch, lane);
}

/* Keys and values of a call, from x or source to where attention reads them; and q if it is not
   null. k, v: those places. */
static void mha__make_qkv(const mha_layer *layer, const mha_args *r, const mha__dims *d,
                          const mha__plan *plan, char *ws, float *q, const mha__place *k,
                          const mha__place *v)
{
    const mha_config *c = &layer->cfg;
    int turned = c->rope.layout || c->qk_norm, compact = k->type != MHA_F32;
    char *scratch = ws + plan->scratch;
    mha__place to[3];
    memset(to, 0, sizeof to);
    if (q)
        to[0] = mha__place_rows(
            q, mha__stride_make(c->n_heads * d->qt * c->d_k, d->qt * c->d_k, c->d_k), r->cu_seq);
    if (!r->cache_only) {
        to[1] = turned || compact ? mha__place_concat((float *)(void *)(ws + plan->stage_k), d->kt,
                                                      c->n_kv_heads, c->d_k, r->cu_source)
                                  : *k;
        to[2] = compact ? mha__place_concat((float *)(void *)(ws + plan->stage_v), d->kt,
                                            c->n_kv_heads, c->d_v, r->cu_source)
                        : *v;
    }
    mha__project_all(layer, r, d, to, scratch, plan->lane);
    if (q && turned) mha__turn(layer, r, d, 0, &to[0], NULL, scratch, plan->lane);
    if (!r->cache_only && (turned || compact))
        mha__turn(layer, r, d, 1, &to[1], k, scratch, plan->lane);
    if (!r->cache_only && compact) mha__turn(layer, r, d, 2, &to[2], v, scratch, plan->lane);
}

/* The call's tokens now belong to the cache. */
static void mha__cache_grow(const mha_args *r, const mha__dims *d)
{
    int b;
    for (b = 0; b < r->batch; b++) {
        r->cache->length[b] += (int)mha__brought(r, d, b);
        if (r->cache->cfg.ring && r->cache->length[b] - r->cache->places > r->cache->floor[b])
            r->cache->floor[b] = r->cache->length[b] - r->cache->places;
    }
}

static void mha__project_o(const mha_layer *layer, const mha_args *r, const mha__dims *d,
                           const float *o, char *scratch, size_t lane)
{
    const mha__matrix *mat = &layer->mat[3];
    ptrdiff_t rows = d->qb * d->qt;
    mha__place to = mha__place_concat(r->y, rows, 1, layer->cfg.d_model, NULL);
    if (rows)
        mha__project(layer->kern, o, 1, rows, NULL, 1, &mat, &to, &r->parallel, scratch, lane);
}

/* The call r without its first n sequences. */
static void mha__args_skip(const mha_config *c, const mha__dims *d, int n, mha_args *r)
{
    ptrdiff_t queries = n * d->qt, keys = n * d->kt;
    r->batch -= n;
    r->x += queries * c->d_model;
    r->source += keys * c->d_source;
    r->source_v += keys * c->d_source_v;
    r->y += queries * c->d_model;
    if (r->positions) r->positions += queries;
    if (r->source_positions) r->source_positions += keys;
    if (r->mask.allow) r->mask.allow += n * r->mask.allow_stride.batch;
    if (r->mask.bias) r->mask.bias += n * r->mask.bias_stride.batch;
    if (r->mask.key_len) r->mask.key_len += n;
    if (r->mask.key_start) r->mask.key_start += n;
    if (r->mask.key_padding) r->mask.key_padding += n * d->keys;
    if (r->gate) r->gate += n * r->gate_stride.batch;
    if (r->attn) r->attn += queries * c->n_heads * d->keys;
    if (r->attn_mean) r->attn_mean += queries * d->keys;
    if (r->lse) r->lse += queries * c->n_heads;
}

/* From x to y, all of r at once. */
static void mha__forward_group(const mha_layer *layer, const mha_args *r, const mha__dims *d,
                               const mha__plan *plan, char *ws)
{
    const mha_config *c = &layer->cfg;
    float *q = (float *)(void *)(ws + plan->q), *o = (float *)(void *)(ws + plan->o);
    mha__attend_job job;
    mha__job_make(&job, layer->kern, d, plan, ws, r->batch, c->n_heads, c->n_kv_heads, c->d_k,
                  c->d_v, c->scale, r->cu_seq, r->cu_source, &r->mask, r->gate, &r->gate_stride,
                  r->lse, r->attn, r->attn_mean);
    job.q = q;
    job.q_stride = mha__stride_or(job.q_stride, job.heads, d->qt, job.d_k);
    if (r->cache) {
        mha__cache_places(r->cache, &job.k, &job.v);
        job.past = r->cache->length;
        job.appended = !r->cache_only;
    } else {
        mha__plan_places(plan, ws, r->batch, c->n_kv_heads, r->cu_source, c->d_k, c->d_v, &job.k,
                         &job.v);
    }
    job.o = o;
    job.o_stride = mha__stride_make(d->qt * job.heads * job.d_v, job.d_v, job.heads * job.d_v);
    job.softcap = c->softcap;
    job.alibi = layer->alibi;
    job.sink = layer->sink;
    job.sink_value = layer->sink_value;
    job.bias_k = layer->bias_k;
    job.bias_v = layer->bias_v;
    job.zero_attn = c->zero_attn;
    mha__make_qkv(layer, r, d, plan, ws, q, &job.k, &job.v);
    mha__attend(&job, &r->parallel, ws + plan->scratch, plan->lane);
    mha__project_o(layer, r, d, o, ws + plan->scratch, plan->lane);
}

MHA_API mha_status mha_forward(const mha_layer *layer, const mha_args *args)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_args r, part;
    mha__dims d;
    mha__plan plan;
    void *owned;
    char *ws;
    int n;
    mha_status st = mha__args_resolve(&w, layer, args, &r, &d, &plan, MHA__X | MHA__Y | MHA__WORK);
    if (st != MHA_OK || r.batch == 0 || d.seq == 0) return st;
    ws = mha__open(r.workspace, plan.total, &owned);
    if (!ws) return MHA_ERR_MEMORY;

    n = (int)mha__div_up(r.batch, mha__div_up(r.batch, plan.group)); /* groups of equal size */
    for (;;) {
        part = r;
        if (n < r.batch) d.qb = d.kb = part.batch = n;
        mha__forward_group(layer, &part, &d, &plan, ws);
        if (part.batch == r.batch) break;
        mha__args_skip(&layer->cfg, &d, n, &r);
        d.qb = d.kb = r.batch;
    }
    if (r.cache) mha__cache_grow(&r, &d);
    mha__close(owned);
    return MHA_OK;
}

/* Validates; as mha__args_resolve, of what mha_cache_append uses of args. */
static mha_status mha__append_resolve(mha__why *why, const mha_layer *layer, const mha_args *args,
                                      mha_args *r, mha__dims *d, mha__plan *plan)
{
    mha_args only;
    mha_status st;
    memset(&only, 0, sizeof only);
    if (args) {
        if (!args->cache) return mha__fail(why, MHA_ERR_NULL, "cache is null", "", 0, 0);
        if ((st = mha__check_size(why, "seq", args->seq, 0)) ||
            (st = mha__check_size(why, "source_seq", args->source_seq, 0)))
            return st;
        if (args->source && !args->cu_source && args->source_seq == 0 && args->seq != 0)
            return mha__fail(why, MHA_ERR_CONFLICT,
                             "source_seq is 0 but seq is #: the length of source is source_seq", "",
                             args->seq, 0);
        only.batch = args->batch;
        only.seq = args->source ? 0 : args->seq;
        only.cu_seq = args->source ? NULL : args->cu_seq;
        only.source_seq = args->source_seq;
        only.cu_source = args->cu_source;
        only.x = args->source ? NULL : args->x;
        only.source = args->source;
        only.source_v = args->source_v;
        only.positions = args->positions;
        only.source_positions = args->source_positions;
        only.cache = args->cache;
        only.workspace = args->workspace;
        only.workspace_size = args->workspace_size;
        only.parallel = args->parallel;
    }
    return mha__args_resolve(why, layer, args ? &only : NULL, r, d, plan,
                             MHA__X | MHA__WORK | MHA__APPEND);
}

MHA_API mha_status mha_cache_append_check(const mha_layer *layer, const mha_args *args, char *why,
                                          size_t why_size)
{
    mha__why w = mha__why_make(why, why_size);
    mha_args r;
    mha__dims d;
    mha__plan plan;
    return mha__append_resolve(&w, layer, args, &r, &d, &plan);
}

MHA_API mha_status mha_cache_append(const mha_layer *layer, const mha_args *args)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_args r;
    mha__dims d;
    mha__plan plan;
    mha__place k, v;
    void *owned;
    char *ws;
    mha_status st = mha__append_resolve(&w, layer, args, &r, &d, &plan);
    if (st != MHA_OK || r.batch == 0 || d.kt == 0) return st;
    ws = mha__open(r.workspace, plan.total, &owned);
    if (!ws) return MHA_ERR_MEMORY;
    mha__cache_places(r.cache, &k, &v);
    mha__make_qkv(layer, &r, &d, &plan, ws, NULL, &k, &v);
    mha__cache_grow(&r, &d);
    mha__close(owned);
    return MHA_OK;
}

/* ---- the stages one by one ------------------------------------------------------------------ */

MHA_API mha_status mha_project_qkv(const mha_layer *layer, const mha_args *args, float *q, float *k,
                                   float *v)
{
    mha__why w = mha__why_make(NULL, 0);
    const mha_config *c;
    mha_args r;
    mha__dims d;
    mha__plan plan;
    mha__place to[3];
    const float *in[3], *out[3];
    void *owned;
    char *ws;
    int i, j;
    mha_status st = mha__args_resolve(&w, layer, args, &r, &d, &plan, MHA__X | MHA__WORK);
    if (st != MHA_OK) return st;
    c = &layer->cfg;
    if (r.cache) return MHA_ERR_CONFLICT; /* a stage does not append */
    /* threads would read what others have written; without any it may work, which is worse */
    out[0] = d.qb && d.qt ? q : NULL;
    out[1] = d.kb && d.kt ? k : NULL;
    out[2] = d.kb && d.kt ? v : NULL;
    in[0] = r.x, in[1] = r.source, in[2] = r.source_v;
    for (i = 0; i < 3; i++)
        for (j = 0; j < 3; j++)
            if (out[i] && out[j] && (out[i] == in[j] || (i != j && out[i] == out[j])))
                return MHA_ERR_CONFLICT;
    if ((st = mha__check_tensor(&w, "q", q, 0, d.qb, d.qt, c->n_heads, c->d_k)) ||
        (st = mha__check_tensor(&w, "k", k, 0, d.kb, d.kt, c->n_kv_heads, c->d_k)) ||
        (st = mha__check_tensor(&w, "v", v, 0, d.kb, d.kt, c->n_kv_heads, c->d_v)))
        return st;
    if (r.batch == 0) return MHA_OK;
    ws = mha__open(r.workspace, plan.total, &owned);
    if (!ws) return MHA_ERR_MEMORY;
    to[0] = mha__place_concat(q, d.qt, c->n_heads, c->d_k, r.cu_seq);
    to[1] = mha__place_concat(k, d.kt, c->n_kv_heads, c->d_k, r.cu_source);
    to[2] = mha__place_concat(v, d.kt, c->n_kv_heads, c->d_v, r.cu_source);
    mha__project_all(layer, &r, &d, to, ws + plan.scratch, plan.lane);
    if (c->rope.layout || c->qk_norm) {
        if (q) mha__turn(layer, &r, &d, 0, &to[0], NULL, ws + plan.scratch, plan.lane);
        if (k) mha__turn(layer, &r, &d, 1, &to[1], NULL, ws + plan.scratch, plan.lane);
    }
    mha__close(owned);
    return MHA_OK;
}

MHA_API mha_status mha_project_out(const mha_layer *layer, const mha_args *args, const float *o)
{
    mha__why w = mha__why_make(NULL, 0);
    mha_args r, only;
    mha__dims d;
    mha__plan plan;
    void *owned;
    char *ws;
    mha_status st;
    memset(&only, 0, sizeof only);
    if (args) {
        only.batch = args->batch;
        only.seq = args->seq;
        only.cu_seq = args->cu_seq;
        only.y = args->y;
        only.workspace = args->workspace;
        only.workspace_size = args->workspace_size;
        only.parallel = args->parallel;
    }
    st = mha__args_resolve(&w, layer, args ? &only : NULL, &r, &d, &plan, MHA__Y | MHA__WORK);
    if (st != MHA_OK) return st;
    st = mha__check_tensor(&w, "o", o, 1, d.qb, d.qt, layer->cfg.n_heads, layer->cfg.d_v);
    if (st != MHA_OK || r.batch == 0 || d.qt == 0) return st;
    if (o == r.y) return MHA_ERR_CONFLICT; /* as in mha_project_qkv */
    ws = mha__open(r.workspace, plan.total, &owned);
    if (!ws) return MHA_ERR_MEMORY;
    mha__project_o(layer, &r, &d, o, ws + plan.scratch, plan.lane);
    mha__close(owned);
    return MHA_OK;
}

/* x [B,n1,n2,d] -> y [B,n2,n1,d] */
static mha_status mha__swap_middle(int batch, int n1, int n2, int d, const float *x, float *y)
{
    mha__why w = mha__why_make(NULL, 0);
    ptrdiff_t b, i, j;
    mha_status st;
    if ((st = mha__check_tensor(&w, "x", x, 1, batch, n1, n2, d)) != MHA_OK ||
        (st = mha__check_tensor(&w, "y", y, 1, batch, n1, n2, d)) != MHA_OK)
        return st;
    if (mha__floats(batch, n1, n2, d) == 0) return MHA_OK;
    for (b = 0; b < batch; b++)
        for (i = 0; i < n1; i++)
            for (j = 0; j < n2; j++)
                memcpy(y + ((b * n2 + j) * n1 + i) * d, x + ((b * n1 + i) * n2 + j) * d,
                       (size_t)d * sizeof(float));
    return MHA_OK;
}

MHA_API mha_status mha_split_heads(int batch, int seq, int heads, int d, const float *x, float *y)
{
    if (batch < 0 || seq < 0 || heads < 1 || d < 1) return MHA_ERR_SIZE;
    return mha__swap_middle(batch, seq, heads, d, x, y);
}

MHA_API mha_status mha_merge_heads(int batch, int seq, int heads, int d, const float *x, float *y)
{
    if (batch < 0 || seq < 0 || heads < 1 || d < 1) return MHA_ERR_SIZE;
    return mha__swap_middle(batch, heads, seq, d, x, y);
}

MHA_API mha_status mha_fuse_heads(const mha_config *cfg, mha_layout layout, const float *const *w_q,
                                  const float *const *w_k, const float *const *w_v, float *fused)
{
    mha__why w = mha__why_make(NULL, 0);
    const float *const *src[3];
    ptrdiff_t heads[3], d[3], out = 0, col = 0, h, i, c;
    mha_config r;
    mha_status st;
    int part;
    if ((st = mha__config_resolve(&w, cfg, &r)) != MHA_OK) return st;
    if ((unsigned)layout > (unsigned)MHA_OUT_IN) return MHA_ERR_ENUM;
    if (r.d_source != r.d_model || r.d_source_v != r.d_model) return MHA_ERR_CONFLICT;
    if (!w_q || !w_k || !w_v || !fused) return MHA_ERR_NULL;
    if (mha__add(mha__floats(r.n_heads, r.d_k, r.d_model, 1),
                 mha__add(mha__floats(r.n_kv_heads, r.d_k, r.d_model, 1),
                          mha__floats(r.n_kv_heads, r.d_v, r.d_model, 1))) > MHA__BIGGEST)
        return MHA_ERR_OVERFLOW;
    src[0] = w_q, src[1] = w_k, src[2] = w_v;
    heads[0] = r.n_heads, heads[1] = heads[2] = r.n_kv_heads;
    d[0] = d[1] = r.d_k, d[2] = r.d_v;
    for (part = 0; part < 3; part++) {
        out += heads[part] * d[part];
        for (h = 0; h < heads[part]; h++)
            if ((st = mha__check_floats(&w, "w", src[part][h], 1)) != MHA_OK) return st;
    }
    if ((st = mha__check_floats(&w, "fused", fused, 1)) != MHA_OK) return st;
    for (part = 0; part < 3; part++)
        for (h = 0; h < heads[part]; h++, col += d[part])
            for (i = 0; i < r.d_model; i++)
                for (c = 0; c < d[part]; c++)
                    if (layout == MHA_IN_OUT)
                        fused[i * out + col + c] = src[part][h][i * d[part] + c];
                    else fused[(col + c) * r.d_model + i] = src[part][h][c * r.d_model + i];
    return MHA_OK;
}

#endif /* MHA_IMPLEMENTATION */

/* ==== licence =====================================================================

This software is available under 2 licences; choose whichever you prefer.

ALTERNATIVE A - MIT License
Copyright (c) 2026 the mha.h authors
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:
The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

ALTERNATIVE B - Public Domain (www.unlicense.org)
This is free and unencumbered software released into the public domain.
Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software, either in
source code form or as a compiled binary, for any purpose, commercial or non-commercial, and by any
means.
In jurisdictions that recognize copyright laws, the author or authors of this software dedicate any
and all copyright interest in the software to the public domain. We make this dedication for the
benefit of the public at large and to the detriment of our heirs and successors. We intend this
dedication to be an overt act of relinquishment in perpetuity of all present and future rights to
this software under copyright law.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY,
WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
*/
