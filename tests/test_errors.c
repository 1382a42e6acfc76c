/* test_errors.c - bad arguments: the right status, a sentence that names the field and the
   numbers, and nothing written. */
#include <limits.h>

#include "fixture.h"

/* Inputs of every call here; large enough for the calls that do succeed. */
static float data[1024];
static unsigned char bytes_of_ones[256];

#define BIG "2147483647" /* INT_MAX, as a sentence shows it */

static void *odd(void *p)
{
    return (char *)p + 1;
}

static mha_isa absent_isa(void)
{
    return mha_isa_available(MHA_ISA_NEON) ? MHA_ISA_AVX2 : MHA_ISA_NEON;
}

static void serial_for(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx;
    for (int i = 0; i < n; i++) task(arg, i);
}

/* ---- sentences ---------------------------------------------------------------------------- */

static int is_word_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

/* 1 if the n characters at word stand alone in the sentence. */
static int has_word(const char *sentence, const char *word, size_t n)
{
    for (const char *s = sentence; *s; s++)
        if (strncmp(s, word, n) == 0 && (s == sentence || !is_word_char(s[-1])) &&
            !is_word_char(s[n]))
            return 1;
    return 0;
}

/* words: separated by spaces, all must be in the sentence; a|b: one of them. */
static int has_words(const char *sentence, const char *words)
{
    while (*words) {
        int found = 0;
        for (;;) {
            const size_t n = strcspn(words, " |");
            found = found || has_word(sentence, words, n);
            words += n;
            if (*words != '|') break;
            words++;
        }
        if (!found) return 0;
        words += strspn(words, " ");
    }
    return 1;
}

typedef mha_status check_fn(const void *ctx, char *why, size_t why_size);

TEST sentence(check_fn *check, const void *ctx, mha_status want, const char *words)
{
    static char why[600], tiny[16];
    const size_t sizes[] = { 0, 1, 5 };

    memset(why, 0x5a, sizeof why);
    ASSERT_STATUS(want, check(ctx, why, 512));
    ASSERTm("not terminated", memchr(why, 0, 512) != NULL);
    for (size_t i = 512; i < sizeof why; i++) ASSERT_EQm("written past why_size", 0x5a, why[i]);
    if (want == MHA_OK) {
        ASSERT_STR_EQ("", why);
    } else {
        ASSERT(why[0] != '\0');
        ASSERTm("a place for a name or a number is left", !strpbrk(why, "@#"));
        if (!has_words(why, words)) {
            printf("\n  \"%s\"\n  has not all of: %s\n", why, words);
            FAILm("sentence");
        }
    }
    for (size_t t = 0; t < sizeof sizes / sizeof sizes[0]; t++) {
        const size_t n = sizes[t];
        memset(tiny, 0x5a, sizeof tiny);
        ASSERT_STATUS(want, check(ctx, tiny, n));
        for (size_t i = n; i < sizeof tiny; i++)
            ASSERT_EQm("written past a tiny why_size", 0x5a, tiny[i]);
        if (n == 0) continue;
        ASSERTm("tiny: not terminated", memchr(tiny, 0, n) != NULL);
        if (strlen(why) >= n) ASSERT_EQm("tiny: not cut at why_size", n - 1, strlen(tiny));
        ASSERT_MEM_EQm("tiny: not the start of the sentence", why, tiny, strlen(tiny));
    }
    ASSERT_STATUS(want, check(ctx, NULL, 512));
    ASSERT_STATUS(want, check(ctx, NULL, 0));
    PASS();
}

/* ---- a layer's config and weights --------------------------------------------------------- */

typedef struct layer_ctx {
    mha_config cfg;
    mha_weights w;
    const mha_config *cfg_p;
    const mha_weights *w_p;
} layer_ctx;

typedef struct layer_case {
    const char *name;
    void (*mutate)(layer_ctx *c);
    mha_status want;
    const char *words;
    int in_config; /* mha_layer_size sees it too */
} layer_case;

/* D = 8, H = 2, fused weights, no bias. */
static layer_ctx layer_base(void)
{
    layer_ctx c;
    memset(&c, 0, sizeof c);
    c.cfg.d_model = 8;
    c.cfg.n_heads = 2;
    c.w.qkv = data;
    c.w.out = data;
    return c;
}

static void separate(layer_ctx *c)
{
    c->w.qkv = NULL;
    c->w.q = c->w.k = c->w.v = data;
}

static void rope(layer_ctx *c)
{
    c->cfg.rope.layout = MHA_ROPE_HALF;
}

/* clang-format off */
#define LAYER(name, ...) \
    static void layer_##name(layer_ctx *c) { __VA_ARGS__; }
LAYER(good, (void)c)
LAYER(good_separate, separate(c))
LAYER(good_mixed_bias, c->w.b_q = data; c->w.b_v = data)
LAYER(good_fused_bias, separate(c); c->w.b_qkv = data)
LAYER(good_d_k, c->cfg.d_model = 7; c->cfg.d_k = 3)
LAYER(good_cross, separate(c); c->cfg.d_source = 6; c->cfg.d_source_v = 5)
LAYER(good_kv_heads, c->cfg.n_kv_heads = 1)
LAYER(good_out_in, c->w.layout = MHA_OUT_IN)
LAYER(cfg_null, c->cfg_p = NULL)
LAYER(w_null, c->w_p = NULL)
LAYER(d_model_0, c->cfg.d_model = 0)
LAYER(d_model_neg, c->cfg.d_model = -8)
LAYER(n_heads_0, c->cfg.n_heads = 0)
LAYER(n_heads_neg, c->cfg.n_heads = -2)
LAYER(d_model_not_divisible, c->cfg.d_model = 510; c->cfg.n_heads = 8)
LAYER(n_kv_heads_neg, c->cfg.n_kv_heads = -1)
LAYER(n_kv_heads_not_dividing, c->cfg.n_heads = 4; c->cfg.n_kv_heads = 3)
LAYER(n_kv_heads_more, c->cfg.n_kv_heads = 4)
LAYER(d_k_neg, c->cfg.d_k = -3)
LAYER(d_v_neg, c->cfg.d_v = -3)
LAYER(d_source_neg, c->cfg.d_source = -6)
LAYER(d_source_v_neg, c->cfg.d_source_v = -6)
LAYER(min_d_model, c->cfg.d_model = INT_MIN)
LAYER(scale_nan, c->cfg.scale = F_NAN)
LAYER(scale_inf, c->cfg.scale = F_INF)
LAYER(scale_ninf, c->cfg.scale = F_NINF)
LAYER(isa_99, c->cfg.isa = (mha_isa)99)
LAYER(isa_neg, c->cfg.isa = (mha_isa)-1)
LAYER(isa_absent, c->cfg.isa = absent_isa())
LAYER(over_d_model, c->cfg.d_model = INT_MAX; c->cfg.n_heads = 1)
LAYER(over_heads, c->cfg.n_heads = INT_MAX; c->cfg.d_k = INT_MAX)
LAYER(over_d_v, c->cfg.n_heads = INT_MAX; c->cfg.d_k = 1; c->cfg.d_v = INT_MAX)
LAYER(over_out, c->cfg.n_heads = INT_MAX; c->cfg.n_kv_heads = 1; c->cfg.d_k = 1;
      c->cfg.d_v = INT_MAX)
LAYER(over_d_source, separate(c); c->cfg.d_source = INT_MAX; c->cfg.d_k = INT_MAX)
LAYER(over_d_source_v, separate(c); c->cfg.d_source_v = INT_MAX; c->cfg.d_v = INT_MAX)
LAYER(none, c->w.qkv = NULL)
LAYER(out_null, c->w.out = NULL)
LAYER(only_q, c->w.qkv = NULL; c->w.q = data)
LAYER(only_k, c->w.qkv = NULL; c->w.k = data)
LAYER(only_v, c->w.qkv = NULL; c->w.v = data)
LAYER(without_q, separate(c); c->w.q = NULL)
LAYER(without_k, separate(c); c->w.k = NULL)
LAYER(without_v, separate(c); c->w.v = NULL)
LAYER(qkv_and_q, c->w.q = data)
LAYER(qkv_and_k, c->w.k = data)
LAYER(qkv_and_v, c->w.v = data)
LAYER(qkv_and_all, c->w.q = c->w.k = c->w.v = data)
LAYER(b_qkv_and_b_q, c->w.b_qkv = c->w.b_q = data)
LAYER(b_qkv_and_b_k, c->w.b_qkv = c->w.b_k = data)
LAYER(b_qkv_and_b_v, c->w.b_qkv = c->w.b_v = data)
LAYER(qkv_and_d_source, c->cfg.d_source = 6)
LAYER(qkv_and_d_source_v, c->cfg.d_source_v = 6)
LAYER(layout_7, c->w.layout = (mha_layout)7)
LAYER(layout_neg, c->w.layout = (mha_layout)-1)
LAYER(odd_qkv, c->w.qkv = odd(data))
LAYER(odd_q, separate(c); c->w.q = odd(data))
LAYER(odd_k, separate(c); c->w.k = odd(data))
LAYER(odd_v, separate(c); c->w.v = odd(data))
LAYER(odd_out, c->w.out = odd(data))
LAYER(odd_b_qkv, c->w.b_qkv = odd(data))
LAYER(odd_b_q, c->w.b_q = odd(data))
LAYER(odd_b_k, c->w.b_k = odd(data))
LAYER(odd_b_v, c->w.b_v = odd(data))
LAYER(odd_b_out, c->w.b_out = odd(data))
LAYER(good_rope, rope(c))
LAYER(good_rope_width, rope(c); c->cfg.rope.width = 2; c->cfg.rope.base = 500)
LAYER(good_yarn, rope(c); c->cfg.rope.scaling = MHA_ROPE_YARN; c->cfg.rope.factor = 2;
      c->cfg.rope.original = 64)
LAYER(good_llama3, rope(c); c->cfg.rope.scaling = MHA_ROPE_LLAMA3; c->cfg.rope.factor = 8;
      c->cfg.rope.original = 64)
LAYER(good_alibi, c->cfg.alibi = 1; c->w.alibi = data)
LAYER(good_sink, c->w.sink = c->w.sink_value = data)
LAYER(good_norm, c->cfg.qk_norm = MHA_NORM_LAYER; c->w.q_norm = c->w.k_norm_bias = data)
LAYER(good_bias_kv, c->w.bias_k = c->w.bias_v = data; c->cfg.zero_attn = 1)
LAYER(good_softcap, c->cfg.softcap = 30)
LAYER(rope_layout_9, c->cfg.rope.layout = (mha_rope_layout)9)
LAYER(rope_layout_neg, c->cfg.rope.layout = (mha_rope_layout)-1)
LAYER(rope_scaling_9, rope(c); c->cfg.rope.scaling = (mha_rope_scaling)9)
LAYER(rope_width_odd, rope(c); c->cfg.rope.width = 3)
LAYER(rope_width_neg, rope(c); c->cfg.rope.width = -2)
LAYER(rope_width_wide, rope(c); c->cfg.rope.width = 6)
LAYER(rope_d_k_odd, rope(c); c->cfg.d_k = 3)
LAYER(rope_base_neg, rope(c); c->cfg.rope.base = -1)
LAYER(yarn_base_1, layer_good_yarn(c); c->cfg.rope.base = 1)
LAYER(llama3_freqs, layer_good_llama3(c); c->cfg.rope.low_freq = c->cfg.rope.high_freq = 2)
LAYER(rope_base_nan, rope(c); c->cfg.rope.base = F_NAN)
LAYER(rope_base_inf, rope(c); c->cfg.rope.base = F_INF)
LAYER(rope_factor_small, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR;
      c->cfg.rope.factor = 0.5f)
LAYER(rope_factor_neg, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR;
      c->cfg.rope.factor = -2)
LAYER(rope_factor_nan, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR;
      c->cfg.rope.factor = F_NAN)
LAYER(rope_factor_inf, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR;
      c->cfg.rope.factor = F_INF)
LAYER(yarn_original_0, layer_good_yarn(c); c->cfg.rope.original = 0)
LAYER(yarn_factor_0, layer_good_yarn(c); c->cfg.rope.factor = 0)
LAYER(linear_factor_0, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR)
LAYER(llama3_original_0, layer_good_llama3(c); c->cfg.rope.original = 0)
LAYER(yarn_original_neg, rope(c); c->cfg.rope.scaling = MHA_ROPE_YARN; c->cfg.rope.original = -64)
LAYER(rope_beta_fast_nan, layer_good_yarn(c); c->cfg.rope.beta_fast = F_NAN)
LAYER(rope_beta_slow_nan, layer_good_yarn(c); c->cfg.rope.beta_slow = F_NAN)
LAYER(rope_attention_nan, layer_good_yarn(c); c->cfg.rope.attention = F_NAN)
LAYER(rope_low_freq_nan, layer_good_llama3(c); c->cfg.rope.low_freq = F_NAN)
LAYER(rope_low_freq_neg, layer_good_llama3(c); c->cfg.rope.low_freq = -1)
LAYER(rope_high_freq_nan, layer_good_llama3(c); c->cfg.rope.high_freq = F_NAN)
LAYER(ntk_width_2, rope(c); c->cfg.rope.scaling = MHA_ROPE_NTK; c->cfg.rope.factor = 2;
      c->cfg.rope.width = 2)
LAYER(yarn_betas, layer_good_yarn(c); c->cfg.rope.beta_fast = 1; c->cfg.rope.beta_slow = 32)
LAYER(good_yarn_betas, layer_good_yarn(c); c->cfg.rope.beta_fast = c->cfg.rope.beta_slow = 4)
LAYER(good_plain_factor, rope(c); c->cfg.rope.factor = 1)
LAYER(plain_factor, rope(c); c->cfg.rope.factor = 8)
LAYER(plain_original, rope(c); c->cfg.rope.original = 64)
LAYER(linear_original, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR; c->cfg.rope.factor = 2;
      c->cfg.rope.original = 64)
LAYER(llama3_beta_fast, layer_good_llama3(c); c->cfg.rope.beta_fast = 16)
LAYER(llama3_beta_slow, layer_good_llama3(c); c->cfg.rope.beta_slow = 2)
LAYER(linear_attention, rope(c); c->cfg.rope.scaling = MHA_ROPE_LINEAR; c->cfg.rope.factor = 2;
      c->cfg.rope.attention = 2)
LAYER(yarn_low_freq, layer_good_yarn(c); c->cfg.rope.low_freq = 2)
LAYER(yarn_high_freq, layer_good_yarn(c); c->cfg.rope.high_freq = 8)
LAYER(no_rope_width, c->cfg.rope.width = 2)
LAYER(no_rope_base, c->cfg.rope.base = 100)
LAYER(no_rope_scaling, c->cfg.rope.scaling = MHA_ROPE_LINEAR)
LAYER(no_rope_factor, c->cfg.rope.factor = 2)
LAYER(no_rope_original, c->cfg.rope.original = 64)
LAYER(no_rope_beta_fast, c->cfg.rope.beta_fast = 32)
LAYER(no_rope_beta_slow, c->cfg.rope.beta_slow = 1)
LAYER(no_rope_attention, c->cfg.rope.attention = 1)
LAYER(no_rope_low_freq, c->cfg.rope.low_freq = 1)
LAYER(no_rope_high_freq, c->cfg.rope.high_freq = 4)
LAYER(softcap_neg, c->cfg.softcap = -1)
LAYER(softcap_nan, c->cfg.softcap = F_NAN)
LAYER(softcap_inf, c->cfg.softcap = F_INF)
LAYER(softcap_huge, c->cfg.softcap = 2e30f)
LAYER(alibi_2, c->cfg.alibi = 2)
LAYER(alibi_neg, c->cfg.alibi = -1)
LAYER(alibi_alone, c->w.alibi = data)
LAYER(qk_norm_9, c->cfg.qk_norm = (mha_norm)9)
LAYER(qk_norm_neg, c->cfg.qk_norm = (mha_norm)-1)
LAYER(norm_eps_neg, c->cfg.qk_norm = MHA_NORM_RMS; c->cfg.norm_eps = -1e-6f)
LAYER(norm_eps_nan, c->cfg.qk_norm = MHA_NORM_RMS; c->cfg.norm_eps = F_NAN)
LAYER(norm_eps_inf, c->cfg.qk_norm = MHA_NORM_RMS; c->cfg.norm_eps = F_INF)
LAYER(zero_attn_2, c->cfg.zero_attn = 2)
LAYER(zero_attn_neg, c->cfg.zero_attn = -1)
LAYER(weight_type_9, c->cfg.weight_type = (mha_type)9)
LAYER(weight_type_neg, c->cfg.weight_type = (mha_type)-1)
LAYER(sink_value_alone, c->w.sink_value = data)
LAYER(q_norm_alone, c->w.q_norm = data)
LAYER(k_norm_alone, c->w.k_norm = data)
LAYER(q_norm_bias_alone, c->w.q_norm_bias = data)
LAYER(k_norm_bias_alone, c->w.k_norm_bias = data)
LAYER(q_norm_bias_rms, c->cfg.qk_norm = MHA_NORM_RMS; c->w.q_norm_bias = data)
LAYER(k_norm_bias_rms, c->cfg.qk_norm = MHA_NORM_RMS; c->w.k_norm_bias = data)
LAYER(bias_k_alone, c->w.bias_k = data)
LAYER(bias_v_alone, c->w.bias_v = data)
LAYER(odd_alibi, c->cfg.alibi = 1; c->w.alibi = odd(data))
LAYER(odd_sink, c->w.sink = odd(data))
LAYER(odd_sink_value, c->w.sink = data; c->w.sink_value = odd(data))
LAYER(odd_q_norm, c->cfg.qk_norm = MHA_NORM_LAYER; c->w.q_norm = odd(data))
LAYER(odd_k_norm, c->cfg.qk_norm = MHA_NORM_LAYER; c->w.k_norm = odd(data))
LAYER(odd_q_norm_bias, c->cfg.qk_norm = MHA_NORM_LAYER; c->w.q_norm_bias = odd(data))
LAYER(odd_k_norm_bias, c->cfg.qk_norm = MHA_NORM_LAYER; c->w.k_norm_bias = odd(data))
LAYER(odd_bias_k, c->w.bias_k = odd(data); c->w.bias_v = data)
LAYER(odd_bias_v, c->w.bias_k = data; c->w.bias_v = odd(data))
/* clang-format on */

static const layer_case layer_cases[] = {
    { "good", layer_good, MHA_OK, "", 1 },
    { "good_separate", layer_good_separate, MHA_OK, "", 1 },
    { "good_mixed_bias", layer_good_mixed_bias, MHA_OK, "", 1 },
    { "good_fused_bias", layer_good_fused_bias, MHA_OK, "", 1 },
    { "good_d_k", layer_good_d_k, MHA_OK, "", 1 },
    { "good_cross", layer_good_cross, MHA_OK, "", 1 },
    { "good_kv_heads", layer_good_kv_heads, MHA_OK, "", 1 },
    { "good_out_in", layer_good_out_in, MHA_OK, "", 1 },
    { "cfg_null", layer_cfg_null, MHA_ERR_NULL, "cfg|config", 1 },
    { "w_null", layer_w_null, MHA_ERR_NULL, "w|weights", 0 },
    { "d_model_0", layer_d_model_0, MHA_ERR_SIZE, "d_model 0", 1 },
    { "d_model_neg", layer_d_model_neg, MHA_ERR_SIZE, "d_model -8", 1 },
    { "n_heads_0", layer_n_heads_0, MHA_ERR_SIZE, "n_heads 0", 1 },
    { "n_heads_neg", layer_n_heads_neg, MHA_ERR_SIZE, "n_heads -2", 1 },
    { "d_model_not_divisible", layer_d_model_not_divisible, MHA_ERR_SIZE, "d_model 510 n_heads 8",
      1 },
    { "n_kv_heads_neg", layer_n_kv_heads_neg, MHA_ERR_SIZE, "n_kv_heads -1", 1 },
    { "n_kv_heads_not_dividing", layer_n_kv_heads_not_dividing, MHA_ERR_SIZE, "n_kv_heads 3 4", 1 },
    { "n_kv_heads_more", layer_n_kv_heads_more, MHA_ERR_SIZE, "n_kv_heads 4 2", 1 },
    { "d_k_neg", layer_d_k_neg, MHA_ERR_SIZE, "d_k -3", 1 },
    { "d_v_neg", layer_d_v_neg, MHA_ERR_SIZE, "d_v -3", 1 },
    { "d_source_neg", layer_d_source_neg, MHA_ERR_SIZE, "d_source -6", 1 },
    { "d_source_v_neg", layer_d_source_v_neg, MHA_ERR_SIZE, "d_source_v -6", 1 },
    { "min_d_model", layer_min_d_model, MHA_ERR_SIZE, "d_model -2147483648", 1 },
    { "scale_nan", layer_scale_nan, MHA_ERR_VALUE, "scale", 1 },
    { "scale_inf", layer_scale_inf, MHA_ERR_VALUE, "scale", 1 },
    { "scale_ninf", layer_scale_ninf, MHA_ERR_VALUE, "scale", 1 },
    { "isa_99", layer_isa_99, MHA_ERR_ENUM, "isa 99", 1 },
    { "isa_neg", layer_isa_neg, MHA_ERR_ENUM, "isa -1", 1 },
    { "isa_absent", layer_isa_absent, MHA_ERR_ISA, "isa", 1 },
    { "over_d_model", layer_over_d_model, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_heads", layer_over_heads, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_d_v", layer_over_d_v, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_out", layer_over_out, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_d_source", layer_over_d_source, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_d_source_v", layer_over_d_source_v, MHA_ERR_OVERFLOW, BIG, 1 },
    { "none", layer_none, MHA_ERR_NULL, "qkv", 0 },
    { "out_null", layer_out_null, MHA_ERR_NULL, "out", 0 },
    { "only_q", layer_only_q, MHA_ERR_NULL, "k", 0 },
    { "only_k", layer_only_k, MHA_ERR_NULL, "q", 0 },
    { "only_v", layer_only_v, MHA_ERR_NULL, "q", 0 },
    { "without_q", layer_without_q, MHA_ERR_NULL, "q", 0 },
    { "without_k", layer_without_k, MHA_ERR_NULL, "k", 0 },
    { "without_v", layer_without_v, MHA_ERR_NULL, "v", 0 },
    { "qkv_and_q", layer_qkv_and_q, MHA_ERR_CONFLICT, "qkv q", 0 },
    { "qkv_and_k", layer_qkv_and_k, MHA_ERR_CONFLICT, "qkv k", 0 },
    { "qkv_and_v", layer_qkv_and_v, MHA_ERR_CONFLICT, "qkv v", 0 },
    { "qkv_and_all", layer_qkv_and_all, MHA_ERR_CONFLICT, "qkv q", 0 },
    { "b_qkv_and_b_q", layer_b_qkv_and_b_q, MHA_ERR_CONFLICT, "b_qkv b_q", 0 },
    { "b_qkv_and_b_k", layer_b_qkv_and_b_k, MHA_ERR_CONFLICT, "b_qkv b_k", 0 },
    { "b_qkv_and_b_v", layer_b_qkv_and_b_v, MHA_ERR_CONFLICT, "b_qkv b_v", 0 },
    { "qkv_and_d_source", layer_qkv_and_d_source, MHA_ERR_CONFLICT, "qkv d_source 6", 0 },
    { "qkv_and_d_source_v", layer_qkv_and_d_source_v, MHA_ERR_CONFLICT, "qkv d_source_v 6", 0 },
    { "layout_7", layer_layout_7, MHA_ERR_ENUM, "layout 7", 0 },
    { "layout_neg", layer_layout_neg, MHA_ERR_ENUM, "layout -1", 0 },
    { "odd_qkv", layer_odd_qkv, MHA_ERR_ALIGN, "qkv", 0 },
    { "odd_q", layer_odd_q, MHA_ERR_ALIGN, "q", 0 },
    { "odd_k", layer_odd_k, MHA_ERR_ALIGN, "k", 0 },
    { "odd_v", layer_odd_v, MHA_ERR_ALIGN, "v", 0 },
    { "odd_out", layer_odd_out, MHA_ERR_ALIGN, "out", 0 },
    { "odd_b_qkv", layer_odd_b_qkv, MHA_ERR_ALIGN, "b_qkv", 0 },
    { "odd_b_q", layer_odd_b_q, MHA_ERR_ALIGN, "b_q", 0 },
    { "odd_b_k", layer_odd_b_k, MHA_ERR_ALIGN, "b_k", 0 },
    { "odd_b_v", layer_odd_b_v, MHA_ERR_ALIGN, "b_v", 0 },
    { "odd_b_out", layer_odd_b_out, MHA_ERR_ALIGN, "b_out", 0 },
    { "good_rope", layer_good_rope, MHA_OK, "", 1 },
    { "good_rope_width", layer_good_rope_width, MHA_OK, "", 1 },
    { "good_yarn", layer_good_yarn, MHA_OK, "", 1 },
    { "good_llama3", layer_good_llama3, MHA_OK, "", 1 },
    { "good_alibi", layer_good_alibi, MHA_OK, "", 1 },
    { "good_sink", layer_good_sink, MHA_OK, "", 1 },
    { "good_norm", layer_good_norm, MHA_OK, "", 1 },
    { "good_bias_kv", layer_good_bias_kv, MHA_OK, "", 1 },
    { "good_softcap", layer_good_softcap, MHA_OK, "", 1 },
    { "rope_layout_9", layer_rope_layout_9, MHA_ERR_ENUM, "rope layout 9", 1 },
    { "rope_layout_neg", layer_rope_layout_neg, MHA_ERR_ENUM, "rope layout -1", 1 },
    { "rope_scaling_9", layer_rope_scaling_9, MHA_ERR_ENUM, "scaling 9", 1 },
    { "rope_width_odd", layer_rope_width_odd, MHA_ERR_SIZE, "width 3", 1 },
    { "rope_width_neg", layer_rope_width_neg, MHA_ERR_SIZE, "width -2", 1 },
    { "rope_width_wide", layer_rope_width_wide, MHA_ERR_SIZE, "width 6 4", 1 },
    { "rope_d_k_odd", layer_rope_d_k_odd, MHA_ERR_SIZE, "width|d_k 3", 1 },
    { "rope_base_neg", layer_rope_base_neg, MHA_ERR_VALUE, "base", 1 },
    { "rope_base_nan", layer_rope_base_nan, MHA_ERR_VALUE, "base", 1 },
    { "rope_base_inf", layer_rope_base_inf, MHA_ERR_VALUE, "base", 1 },
    { "rope_factor_small", layer_rope_factor_small, MHA_ERR_VALUE, "factor", 1 },
    { "rope_factor_neg", layer_rope_factor_neg, MHA_ERR_VALUE, "factor", 1 },
    { "rope_factor_nan", layer_rope_factor_nan, MHA_ERR_VALUE, "factor", 1 },
    { "rope_factor_inf", layer_rope_factor_inf, MHA_ERR_VALUE, "factor", 1 },
    { "yarn_original_0", layer_yarn_original_0, MHA_ERR_VALUE, "original", 1 },
    { "yarn_factor_0", layer_yarn_factor_0, MHA_ERR_VALUE, "factor scaling", 1 },
    { "linear_factor_0", layer_linear_factor_0, MHA_ERR_VALUE, "factor scaling", 1 },
    { "llama3_original_0", layer_llama3_original_0, MHA_ERR_VALUE, "original", 1 },
    { "yarn_original_neg", layer_yarn_original_neg, MHA_ERR_SIZE, "original -64", 1 },
    { "rope_beta_fast_nan", layer_rope_beta_fast_nan, MHA_ERR_VALUE, "beta_fast", 1 },
    { "rope_beta_slow_nan", layer_rope_beta_slow_nan, MHA_ERR_VALUE, "beta_slow", 1 },
    { "rope_attention_nan", layer_rope_attention_nan, MHA_ERR_VALUE, "attention", 1 },
    { "rope_low_freq_nan", layer_rope_low_freq_nan, MHA_ERR_VALUE, "low_freq", 1 },
    { "rope_low_freq_neg", layer_rope_low_freq_neg, MHA_ERR_VALUE, "low_freq less", 1 },
    { "rope_high_freq_nan", layer_rope_high_freq_nan, MHA_ERR_VALUE, "high_freq", 1 },
    { "ntk_width_2", layer_ntk_width_2, MHA_ERR_VALUE, "width 2", 1 },
    { "yarn_base_1", layer_yarn_base_1, MHA_ERR_VALUE, "base 1", 1 },
    { "llama3_freqs", layer_llama3_freqs, MHA_ERR_VALUE, "high_freq low_freq", 1 },
    { "yarn_betas", layer_yarn_betas, MHA_ERR_VALUE, "beta_fast beta_slow", 1 },
    { "good_yarn_betas", layer_good_yarn_betas, MHA_OK, "", 1 },
    { "good_plain_factor", layer_good_plain_factor, MHA_OK, "", 1 },
    { "plain_factor", layer_plain_factor, MHA_ERR_CONFLICT, "rope factor scaling", 1 },
    { "plain_original", layer_plain_original, MHA_ERR_CONFLICT, "rope original scaling", 1 },
    { "linear_original", layer_linear_original, MHA_ERR_CONFLICT, "rope original scaling", 1 },
    { "llama3_beta_fast", layer_llama3_beta_fast, MHA_ERR_CONFLICT, "rope beta_fast scaling", 1 },
    { "llama3_beta_slow", layer_llama3_beta_slow, MHA_ERR_CONFLICT, "rope beta_slow scaling", 1 },
    { "linear_attention", layer_linear_attention, MHA_ERR_CONFLICT, "rope attention scaling", 1 },
    { "yarn_low_freq", layer_yarn_low_freq, MHA_ERR_CONFLICT, "rope low_freq scaling", 1 },
    { "yarn_high_freq", layer_yarn_high_freq, MHA_ERR_CONFLICT, "rope high_freq scaling", 1 },
    { "no_rope_width", layer_no_rope_width, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_base", layer_no_rope_base, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_scaling", layer_no_rope_scaling, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_factor", layer_no_rope_factor, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_original", layer_no_rope_original, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_beta_fast", layer_no_rope_beta_fast, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_beta_slow", layer_no_rope_beta_slow, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_attention", layer_no_rope_attention, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_low_freq", layer_no_rope_low_freq, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "no_rope_high_freq", layer_no_rope_high_freq, MHA_ERR_CONFLICT, "rope layout", 1 },
    { "softcap_neg", layer_softcap_neg, MHA_ERR_VALUE, "softcap", 1 },
    { "softcap_nan", layer_softcap_nan, MHA_ERR_VALUE, "softcap", 1 },
    { "softcap_inf", layer_softcap_inf, MHA_ERR_VALUE, "softcap", 1 },
    { "softcap_huge", layer_softcap_huge, MHA_ERR_VALUE, "softcap", 1 },
    { "alibi_2", layer_alibi_2, MHA_ERR_VALUE, "alibi 2", 1 },
    { "alibi_neg", layer_alibi_neg, MHA_ERR_VALUE, "alibi -1", 1 },
    { "alibi_alone", layer_alibi_alone, MHA_ERR_CONFLICT, "alibi", 0 },
    { "qk_norm_9", layer_qk_norm_9, MHA_ERR_ENUM, "qk_norm 9", 1 },
    { "qk_norm_neg", layer_qk_norm_neg, MHA_ERR_ENUM, "qk_norm -1", 1 },
    { "norm_eps_neg", layer_norm_eps_neg, MHA_ERR_VALUE, "norm_eps", 1 },
    { "norm_eps_nan", layer_norm_eps_nan, MHA_ERR_VALUE, "norm_eps", 1 },
    { "norm_eps_inf", layer_norm_eps_inf, MHA_ERR_VALUE, "norm_eps", 1 },
    { "zero_attn_2", layer_zero_attn_2, MHA_ERR_VALUE, "zero_attn 2", 1 },
    { "zero_attn_neg", layer_zero_attn_neg, MHA_ERR_VALUE, "zero_attn -1", 1 },
    { "weight_type_9", layer_weight_type_9, MHA_ERR_ENUM, "weight_type 9", 1 },
    { "weight_type_neg", layer_weight_type_neg, MHA_ERR_ENUM, "weight_type -1", 1 },
    { "sink_value_alone", layer_sink_value_alone, MHA_ERR_CONFLICT, "sink_value sink", 0 },
    { "q_norm_alone", layer_q_norm_alone, MHA_ERR_CONFLICT, "q_norm qk_norm", 0 },
    { "k_norm_alone", layer_k_norm_alone, MHA_ERR_CONFLICT, "k_norm qk_norm", 0 },
    { "q_norm_bias_alone", layer_q_norm_bias_alone, MHA_ERR_CONFLICT, "q_norm_bias qk_norm", 0 },
    { "k_norm_bias_alone", layer_k_norm_bias_alone, MHA_ERR_CONFLICT, "k_norm_bias qk_norm", 0 },
    { "q_norm_bias_rms", layer_q_norm_bias_rms, MHA_ERR_CONFLICT, "q_norm_bias", 0 },
    { "k_norm_bias_rms", layer_k_norm_bias_rms, MHA_ERR_CONFLICT, "k_norm_bias", 0 },
    { "bias_k_alone", layer_bias_k_alone, MHA_ERR_CONFLICT, "bias_k bias_v", 0 },
    { "bias_v_alone", layer_bias_v_alone, MHA_ERR_CONFLICT, "bias_k bias_v", 0 },
    { "odd_alibi", layer_odd_alibi, MHA_ERR_ALIGN, "alibi", 0 },
    { "odd_sink", layer_odd_sink, MHA_ERR_ALIGN, "sink", 0 },
    { "odd_sink_value", layer_odd_sink_value, MHA_ERR_ALIGN, "sink_value", 0 },
    { "odd_q_norm", layer_odd_q_norm, MHA_ERR_ALIGN, "q_norm", 0 },
    { "odd_k_norm", layer_odd_k_norm, MHA_ERR_ALIGN, "k_norm", 0 },
    { "odd_q_norm_bias", layer_odd_q_norm_bias, MHA_ERR_ALIGN, "q_norm_bias", 0 },
    { "odd_k_norm_bias", layer_odd_k_norm_bias, MHA_ERR_ALIGN, "k_norm_bias", 0 },
    { "odd_bias_k", layer_odd_bias_k, MHA_ERR_ALIGN, "bias_k", 0 },
    { "odd_bias_v", layer_odd_bias_v, MHA_ERR_ALIGN, "bias_v", 0 },
};

static mha_status check_layer(const void *ctx, char *why, size_t why_size)
{
    const layer_ctx *c = (const layer_ctx *)ctx;
    return mha_layer_check(c->cfg_p, c->w_p, why, why_size);
}

static int all_are(const void *p, size_t n, int byte)
{
    const unsigned char *c = (const unsigned char *)p;
    for (size_t i = 0; i < n; i++)
        if (c[i] != byte) return 0;
    return 1;
}

TEST layer_arguments(const layer_case *t)
{
    layer_ctx good = layer_base(), c = good;
    mha_layer *const junk = (mha_layer *)(void *)data;
    mha_layer *layer = junk;
    size_t good_size = 0, size = 0;
    const long live = test_live;
    unsigned char *buffer;

    c.cfg_p = &c.cfg;
    c.w_p = &c.w;
    t->mutate(&c);
    ASSERT_STATUS(t->in_config ? t->want : MHA_OK, mha_layer_size(c.cfg_p, &size));

    ASSERT_STATUS(t->want, mha_layer_create(&layer, c.cfg_p, c.w_p));
    if (t->want == MHA_OK) ASSERT(layer != NULL && layer != junk);
    else ASSERT_EQ(NULL, layer);
    mha_layer_free(layer);
    ASSERT_EQ(live, test_live);

    /* In a buffer that would do for the good layer. */
    ASSERT_STATUS(MHA_OK, mha_layer_size(&good.cfg, &good_size));
    if (t->want == MHA_OK) good_size = size;
    buffer = (unsigned char *)malloc(good_size);
    ASSERT(buffer != NULL);
    memset(buffer, 0xa5, good_size);
    layer = junk;
    ASSERT_STATUS(t->want, mha_layer_init(&layer, buffer, good_size, c.cfg_p, c.w_p));
    if (t->want == MHA_OK) {
        ASSERT(layer != NULL && layer != junk);
    } else {
        ASSERT_EQ(NULL, layer);
        ASSERTm("buffer written on error", all_are(buffer, good_size, 0xa5));
    }
    free(buffer);
    CHECK_CALL(sentence(check_layer, &c, t->want, t->words));
    PASS();
}

TEST layer_pointers(void)
{
    layer_ctx c = layer_base();
    mha_layer *const junk = (mha_layer *)(void *)data;
    mha_layer *layer = junk;
    size_t size = 0;
    unsigned char *buffer;

    ASSERT_STATUS(MHA_ERR_NULL, mha_layer_create(NULL, &c.cfg, &c.w));
    ASSERT_STATUS(MHA_ERR_NULL, mha_layer_size(&c.cfg, NULL));
    ASSERT_STATUS(MHA_OK, mha_layer_size(&c.cfg, &size));
    buffer = (unsigned char *)malloc(size);
    ASSERT(buffer != NULL);
    memset(buffer, 0xa5, size);
    ASSERT_STATUS(MHA_ERR_NULL, mha_layer_init(NULL, buffer, size, &c.cfg, &c.w));
    ASSERT_STATUS(MHA_ERR_NULL, mha_layer_init(&layer, NULL, size, &c.cfg, &c.w));
    ASSERT_EQ(NULL, layer);
    layer = junk;
    ASSERT_STATUS(MHA_ERR_BUFFER, mha_layer_init(&layer, buffer, size - 1, &c.cfg, &c.w));
    ASSERT_EQ(NULL, layer);
    layer = junk;
    ASSERT_STATUS(MHA_ERR_BUFFER, mha_layer_init(&layer, buffer, 0, &c.cfg, &c.w));
    ASSERT_EQ(NULL, layer);
    ASSERT(all_are(buffer, size, 0xa5));
    free(buffer);
    mha_layer_free(NULL);
    ASSERT_EQ(NULL, mha_layer_config(NULL));
    PASS();
}

TEST layer_defaults(void)
{
    layer_ctx c = layer_base();
    mha_layer *layer = NULL;
    const mha_config *r;

    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &c.cfg, &c.w));
    r = mha_layer_config(layer);
    ASSERT(r != NULL);
    ASSERT_EQ_FMT(8, r->d_model, "%d");
    ASSERT_EQ_FMT(2, r->n_heads, "%d");
    ASSERT_EQ_FMT(2, r->n_kv_heads, "%d");
    ASSERT_EQ_FMT(4, r->d_k, "%d");
    ASSERT_EQ_FMT(4, r->d_v, "%d");
    ASSERT_EQ_FMT(8, r->d_source, "%d");
    ASSERT_EQ_FMT(8, r->d_source_v, "%d");
    ASSERT_EQ(bits_f(0.5f), bits_f(r->scale));
    ASSERT(r->isa != MHA_ISA_AUTO && mha_isa_available(r->isa));
    mha_layer_free(layer);

    separate(&c);
    c.cfg.d_k = 3;
    c.cfg.n_kv_heads = 1;
    c.cfg.d_source = 6;
    c.cfg.scale = -0.25f;
    c.cfg.isa = MHA_ISA_SCALAR;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &c.cfg, &c.w));
    r = mha_layer_config(layer);
    ASSERT_EQ_FMT(1, r->n_kv_heads, "%d");
    ASSERT_EQ_FMT(3, r->d_k, "%d");
    ASSERT_EQ_FMT(3, r->d_v, "%d");
    ASSERT_EQ_FMT(6, r->d_source, "%d");
    ASSERT_EQ_FMT(6, r->d_source_v, "%d");
    ASSERT_EQ(bits_f(-0.25f), bits_f(r->scale));
    ASSERT_EQ(MHA_ISA_SCALAR, r->isa);
    mha_layer_free(layer);
    PASS();
}

/* ---- mha_forward -------------------------------------------------------------------------- */

enum { B = 2, T = 3, S = 4, D = 8, H = 2 };

static const int good_len[B] = { 0, 3 }, negative_len[B] = { 1, -1 }, long_len[B] = { 9, 1 };
static const int cu_of_3[B + 1] = { 0, 1, 3 }, cu_from_1[B + 1] = { 1, 2, 3 };
static const int cu_down[B + 1] = { 0, 5, 3 }, cu_negative[B + 1] = { 0, -1, 3 };

/* All that a call may write, so that one look shows whether it wrote. */
typedef struct outputs {
    float y[B * T * D];
    float attn[B * H * T * S];
    float mean[B * T * S];
    float lse[B * H * T];
    float q[B * T * D], k[B * S * D], v[B * S * D];
} outputs;
static outputs out;

typedef struct call_ctx {
    mha_layer *layer; /* as made */
    const mha_layer *layer_p;
    mha_args a;
    const mha_args *a_p;
    float *q, *k, *v; /* of mha_project_qkv */
    const float *o;   /* of mha_project_out */
} call_ctx;

enum { SELF, CROSS, ROPE, ROPE_CROSS };

typedef struct call_case {
    const char *name;
    int kind;
    void (*mutate)(call_ctx *c);
    mha_status want;
    const char *words;
    int sized; /* mha_workspace_size sees it too */
} call_case;

/* CROSS: d_source 6, d_source_v 5. ROPE: with rotary positions. A workspace of exactly the right
   size. */
static mha_status call_base(call_ctx *c, int kind)
{
    layer_ctx l = layer_base();
    mha_status st;
    memset(c, 0, sizeof *c);
    memset(&out, 0xa5, sizeof out);
    if (kind == CROSS || kind == ROPE_CROSS) layer_good_cross(&l);
    if (kind == ROPE || kind == ROPE_CROSS) rope(&l);
    st = mha_layer_create(&c->layer, &l.cfg, &l.w);
    if (st != MHA_OK) return st;
    c->layer_p = c->layer;
    c->a_p = &c->a;
    c->a.batch = B;
    c->a.seq = T;
    c->a.x = data;
    if (kind == CROSS || kind == ROPE_CROSS) {
        c->a.source_seq = S;
        c->a.source = data;
        c->a.source_v = data;
    }
    c->a.y = out.y;
    c->a.attn = out.attn;
    c->a.attn_mean = out.mean;
    c->a.lse = out.lse;
    c->q = out.q;
    c->k = out.k;
    c->v = out.v;
    c->o = data;
    st = mha_workspace_size(c->layer, &c->a, &c->a.workspace_size);
    c->a.workspace = malloc(c->a.workspace_size);
    memset(c->a.workspace, 0xa5, c->a.workspace_size);
    return st;
}

/* clang-format off */
#define CALL(name, ...) \
    static void call_##name(call_ctx *c) { __VA_ARGS__; }
CALL(good, (void)c)
CALL(good_source_seq, c->a.source_seq = T)
CALL(good_key_len, c->a.mask.key_len = good_len)
CALL(good_allow, c->a.mask.allow = bytes_of_ones)
CALL(good_threads_1, c->a.parallel.threads = 1)
CALL(good_parallel, c->a.parallel.parallel_for = serial_for; c->a.parallel.threads = 1)
CALL(good_causal, c->a.mask.causal = MHA_CAUSAL_UPPER_LEFT)
CALL(layer_null, c->layer_p = NULL)
CALL(args_null, c->a_p = NULL)
CALL(x_null, c->a.x = NULL)
CALL(y_null, c->a.y = NULL)
CALL(source_null, c->a.source = NULL; c->a.source_v = NULL; c->a.source_seq = 0)
CALL(source_v_null, c->a.source_v = NULL)
CALL(batch_neg, c->a.batch = -1)
CALL(seq_neg, c->a.seq = -7)
CALL(source_seq_neg, c->a.source_seq = -7)
CALL(source_seq_alone, c->a.source_seq = 5)
CALL(source_v_alone, c->a.source_v = data)
CALL(source_positions_alone, c->a.source_positions = good_len)
CALL(over_batch, c->a.batch = INT_MAX; c->a.seq = INT_MAX)
CALL(over_source, c->a.batch = INT_MAX; c->a.seq = 1; c->a.source_seq = INT_MAX)
CALL(over_attn, c->a.batch = 1; c->a.seq = INT_MAX; c->a.attn_mean = NULL)
CALL(over_mean, c->a.batch = 2; c->a.seq = INT_MAX; c->a.attn = NULL)
CALL(over_cross_attn, c->a.batch = 1; c->a.seq = INT_MAX; c->a.source_seq = INT_MAX;
     c->a.attn_mean = NULL)
CALL(odd_x, c->a.x = odd(data))
CALL(odd_source, c->a.source = odd(data))
CALL(odd_source_v, c->a.source_v = odd(data))
CALL(odd_y, c->a.y = odd(out.y))
CALL(odd_attn, c->a.attn = odd(out.attn))
CALL(odd_mean, c->a.attn_mean = odd(out.mean))
CALL(odd_lse, c->a.lse = odd(out.lse))
CALL(odd_bias, c->a.mask.bias = odd(data))
CALL(odd_key_len, c->a.mask.key_len = odd(data))
CALL(causal_3, c->a.mask.causal = (mha_causal)3)
CALL(causal_neg, c->a.mask.causal = (mha_causal)-1)
CALL(key_len_neg, c->a.mask.key_len = negative_len)
CALL(key_len_long, c->a.mask.key_len = long_len)
CALL(workspace_short, c->a.workspace_size--)
CALL(workspace_0, c->a.workspace_size = 0)
CALL(threads_0, c->a.parallel.parallel_for = serial_for)
CALL(threads_neg, c->a.parallel.parallel_for = serial_for; c->a.parallel.threads = -3)
CALL(threads_alone, c->a.parallel.threads = 2)
CALL(threads_alone_neg, c->a.parallel.threads = -2)
CALL(workspace_missing, c->a.workspace = NULL)
CALL(good_window, c->a.mask.windowed = 1; c->a.mask.left = 1; c->a.mask.right = -1)
CALL(good_key_start, c->a.mask.key_start = good_len)
CALL(good_padding, c->a.mask.key_padding = bytes_of_ones)
CALL(good_gate, c->a.gate = data; c->a.gate_stride.seq = H)
CALL(left_alone, c->a.mask.left = 2)
CALL(right_alone, c->a.mask.right = -1)
CALL(windowed_2, c->a.mask.windowed = 2)
CALL(windowed_neg, c->a.mask.windowed = -1)
CALL(left_neg, c->a.mask.windowed = 1; c->a.mask.left = -2)
CALL(right_neg, c->a.mask.windowed = 1; c->a.mask.right = -2)
CALL(right_min, c->a.mask.windowed = 1; c->a.mask.right = INT_MIN)
CALL(key_start_neg, c->a.mask.key_start = negative_len)
CALL(key_start_long, c->a.mask.key_start = long_len)
CALL(odd_key_start, c->a.mask.key_start = odd(data))
CALL(odd_gate, c->a.gate = odd(data))
CALL(cu_seq_from_1, c->a.cu_seq = cu_from_1)
CALL(cu_seq_down, c->a.cu_seq = cu_down)
CALL(cu_seq_neg, c->a.cu_seq = cu_negative)
CALL(cu_seq_other, c->a.cu_seq = cu_of_3; c->a.seq = 4)
CALL(odd_cu_seq, c->a.cu_seq = odd(data))
CALL(cu_source_from_1, c->a.cu_source = cu_from_1; c->a.source_seq = 0)
CALL(cu_source_down, c->a.cu_source = cu_down; c->a.source_seq = 0)
CALL(cu_source_other, c->a.cu_source = cu_of_3)
CALL(odd_cu_source, c->a.cu_source = odd(data))
CALL(good_cu_seq, c->a.cu_seq = cu_of_3; c->a.workspace = NULL; c->a.workspace_size = 0)
CALL(good_cu_seq_0, c->a.cu_seq = cu_of_3; c->a.seq = 0; c->a.workspace = NULL;
     c->a.workspace_size = 0)
CALL(good_cu_source, c->a.cu_source = cu_of_3; c->a.source_seq = 3; c->a.workspace = NULL;
     c->a.workspace_size = 0)
CALL(cu_source_alone, c->a.cu_source = cu_of_3)
CALL(cache_only_alone, c->a.cache_only = 1)
CALL(good_positions, c->a.positions = good_len; c->a.batch = 1; c->a.seq = 2)
CALL(positions_unused, c->a.positions = good_len)
CALL(odd_positions, c->a.positions = odd(data))
CALL(odd_source_positions, c->a.source_positions = odd(data))
/* clang-format on */

static const call_case call_cases[] = {
    { "good", SELF, call_good, MHA_OK, "", 1 },
    { "good_cross", CROSS, call_good, MHA_OK, "", 1 },
    { "good_source_seq", SELF, call_good_source_seq, MHA_OK, "", 1 },
    { "good_key_len", CROSS, call_good_key_len, MHA_OK, "", 1 },
    { "good_allow", CROSS, call_good_allow, MHA_OK, "", 1 },
    { "good_threads_1", SELF, call_good_threads_1, MHA_OK, "", 1 },
    { "good_parallel", SELF, call_good_parallel, MHA_OK, "", 1 },
    { "good_causal", CROSS, call_good_causal, MHA_OK, "", 1 },
    { "layer_null", SELF, call_layer_null, MHA_ERR_NULL, "layer", 1 },
    { "args_null", SELF, call_args_null, MHA_ERR_NULL, "args", 1 },
    { "x_null", SELF, call_x_null, MHA_ERR_NULL, "x", 0 },
    { "y_null", SELF, call_y_null, MHA_ERR_NULL, "y", 0 },
    { "source_null", CROSS, call_source_null, MHA_ERR_NULL, "source d_source 6 8", 0 },
    { "source_v_null", CROSS, call_source_v_null, MHA_ERR_NULL, "source_v d_source_v 5 6", 0 },
    { "batch_neg", SELF, call_batch_neg, MHA_ERR_SIZE, "batch -1", 1 },
    { "batch_neg_cross", CROSS, call_batch_neg, MHA_ERR_SIZE, "batch -1", 1 },
    { "seq_neg", SELF, call_seq_neg, MHA_ERR_SIZE, "seq -7", 1 },
    { "source_seq_neg", CROSS, call_source_seq_neg, MHA_ERR_SIZE, "source_seq -7", 1 },
    { "source_seq_alone", SELF, call_source_seq_alone, MHA_ERR_CONFLICT, "source_seq 5 3", 1 },
    { "source_v_alone", SELF, call_source_v_alone, MHA_ERR_CONFLICT, "source_v source", 0 },
    { "source_positions_alone", SELF, call_source_positions_alone, MHA_ERR_CONFLICT,
      "source_positions source", 0 },
    { "over_batch", SELF, call_over_batch, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_source", CROSS, call_over_source, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_attn", SELF, call_over_attn, MHA_ERR_OVERFLOW, BIG, 0 },
    { "over_mean", SELF, call_over_mean, MHA_ERR_OVERFLOW, BIG, 0 },
    { "over_cross_attn", CROSS, call_over_cross_attn, MHA_ERR_OVERFLOW, BIG, 0 },
    { "odd_x", SELF, call_odd_x, MHA_ERR_ALIGN, "x", 0 },
    { "odd_source", CROSS, call_odd_source, MHA_ERR_ALIGN, "source", 0 },
    { "odd_source_v", CROSS, call_odd_source_v, MHA_ERR_ALIGN, "source_v", 0 },
    { "odd_y", SELF, call_odd_y, MHA_ERR_ALIGN, "y", 0 },
    { "odd_attn", SELF, call_odd_attn, MHA_ERR_ALIGN, "attn", 0 },
    { "odd_mean", SELF, call_odd_mean, MHA_ERR_ALIGN, "attn_mean", 0 },
    { "odd_lse", SELF, call_odd_lse, MHA_ERR_ALIGN, "lse", 0 },
    { "odd_bias", SELF, call_odd_bias, MHA_ERR_ALIGN, "bias", 0 },
    { "odd_key_len", SELF, call_odd_key_len, MHA_ERR_ALIGN, "key_len", 0 },
    { "causal_3", SELF, call_causal_3, MHA_ERR_ENUM, "causal 3", 0 },
    { "causal_neg", SELF, call_causal_neg, MHA_ERR_ENUM, "causal -1", 0 },
    { "key_len_neg", CROSS, call_key_len_neg, MHA_ERR_VALUE, "key_len 1 -1", 0 },
    { "key_len_long", CROSS, call_key_len_long, MHA_ERR_VALUE, "key_len 0 9 4", 0 },
    { "workspace_short", SELF, call_workspace_short, MHA_ERR_WORKSPACE, "workspace|workspace_size",
      0 },
    { "workspace_short_cross", CROSS, call_workspace_short, MHA_ERR_WORKSPACE,
      "workspace|workspace_size", 0 },
    { "workspace_0", SELF, call_workspace_0, MHA_ERR_WORKSPACE, "workspace|workspace_size 0", 0 },
    { "threads_0", SELF, call_threads_0, MHA_ERR_SIZE, "threads 0", 1 },
    { "threads_neg", SELF, call_threads_neg, MHA_ERR_SIZE, "threads -3", 1 },
    { "threads_alone", SELF, call_threads_alone, MHA_ERR_CONFLICT, "threads 2 parallel_for", 1 },
    { "threads_alone_neg", SELF, call_threads_alone_neg, MHA_ERR_CONFLICT,
      "threads -2 parallel_for", 1 },
    { "workspace_missing", SELF, call_workspace_missing, MHA_ERR_CONFLICT,
      "workspace workspace_size", 0 },
    { "good_window", CROSS, call_good_window, MHA_OK, "", 0 },
    { "good_key_start", CROSS, call_good_key_start, MHA_OK, "", 0 },
    { "good_padding", CROSS, call_good_padding, MHA_OK, "", 0 },
    { "good_gate", CROSS, call_good_gate, MHA_OK, "", 0 },
    { "left_alone", CROSS, call_left_alone, MHA_ERR_CONFLICT, "left windowed", 0 },
    { "right_alone", CROSS, call_right_alone, MHA_ERR_CONFLICT, "right windowed", 0 },
    { "windowed_2", CROSS, call_windowed_2, MHA_ERR_VALUE, "windowed 2", 0 },
    { "windowed_neg", CROSS, call_windowed_neg, MHA_ERR_VALUE, "windowed -1", 0 },
    { "left_neg", CROSS, call_left_neg, MHA_ERR_VALUE, "left -2", 0 },
    { "right_neg", CROSS, call_right_neg, MHA_ERR_VALUE, "right -2", 0 },
    { "right_min", CROSS, call_right_min, MHA_ERR_VALUE, "right -2147483648", 0 },
    { "key_start_neg", CROSS, call_key_start_neg, MHA_ERR_VALUE, "key_start 1 -1", 0 },
    { "key_start_long", CROSS, call_key_start_long, MHA_ERR_VALUE, "key_start 0 9 4", 0 },
    { "odd_key_start", CROSS, call_odd_key_start, MHA_ERR_ALIGN, "key_start", 0 },
    { "odd_gate", CROSS, call_odd_gate, MHA_ERR_ALIGN, "gate", 0 },
    { "cu_seq_from_1", CROSS, call_cu_seq_from_1, MHA_ERR_VALUE, "cu_seq 1", 0 },
    { "cu_seq_down", CROSS, call_cu_seq_down, MHA_ERR_VALUE, "cu_seq 5 3", 0 },
    { "cu_seq_neg", CROSS, call_cu_seq_neg, MHA_ERR_VALUE, "cu_seq -1", 0 },
    { "cu_seq_other", CROSS, call_cu_seq_other, MHA_ERR_CONFLICT, "seq 4 cu_seq 3", 0 },
    { "odd_cu_seq", CROSS, call_odd_cu_seq, MHA_ERR_ALIGN, "cu_seq", 0 },
    { "cu_source_from_1", CROSS, call_cu_source_from_1, MHA_ERR_VALUE, "cu_source 1", 0 },
    { "cu_source_down", CROSS, call_cu_source_down, MHA_ERR_VALUE, "cu_source 5 3", 0 },
    { "cu_source_other", CROSS, call_cu_source_other, MHA_ERR_CONFLICT, "source_seq 4 cu_source 3",
      0 },
    { "odd_cu_source", CROSS, call_odd_cu_source, MHA_ERR_ALIGN, "cu_source", 0 },
    { "good_cu_seq", SELF, call_good_cu_seq, MHA_OK, "", 0 },
    { "good_cu_seq_0", SELF, call_good_cu_seq_0, MHA_OK, "", 0 },
    { "good_cu_source", CROSS, call_good_cu_source, MHA_OK, "", 0 },
    { "cu_source_alone", SELF, call_cu_source_alone, MHA_ERR_CONFLICT, "cu_source source", 0 },
    { "cache_only_alone", SELF, call_cache_only_alone, MHA_ERR_CONFLICT, "cache_only cache", 0 },
    { "good_positions", ROPE, call_good_positions, MHA_OK, "", 0 },
    { "positions_unused", SELF, call_positions_unused, MHA_OK, "", 0 },
    { "odd_positions", ROPE, call_odd_positions, MHA_ERR_ALIGN, "positions", 0 },
    { "odd_source_positions", ROPE_CROSS, call_odd_source_positions, MHA_ERR_ALIGN,
      "source_positions", 0 },
};

static mha_status check_call(const void *ctx, char *why, size_t why_size)
{
    const call_ctx *c = (const call_ctx *)ctx;
    return mha_forward_check(c->layer_p, c->a_p, why, why_size);
}

TEST forward_arguments(const call_case *t)
{
    call_ctx c;
    size_t size = 0, full;
    void *workspace;

    ASSERT_STATUS(MHA_OK, call_base(&c, t->kind));
    full = c.a.workspace_size;
    workspace = c.a.workspace;
    t->mutate(&c);
    ASSERT_STATUS(t->want, mha_forward_check(c.layer_p, c.a_p, NULL, 0));
    ASSERTm("a check wrote", all_are(&out, sizeof out, 0xa5) && all_are(workspace, full, 0xa5));
    if (t->sized) ASSERT_STATUS(t->want, mha_workspace_size(c.layer_p, c.a_p, &size));
    ASSERT_STATUS(t->want, mha_forward(c.layer_p, c.a_p));
    if (t->want != MHA_OK) {
        ASSERTm("output written on error", all_are(&out, sizeof out, 0xa5));
        ASSERTm("workspace written on error", all_are(workspace, full, 0xa5));
    } else {
        ASSERTm("nothing written", !all_are(out.y, sizeof out.y, 0xa5));
    }
    CHECK_CALL(sentence(check_call, &c, t->want, t->words));
    free(workspace);
    mha_layer_free(c.layer);
    PASS();
}

/* The sentence for a workspace has both numbers. */
TEST workspace_numbers(void)
{
    call_ctx c;
    char why[512], need[32], have[32];

    ASSERT_STATUS(MHA_OK, call_base(&c, SELF));
    snprintf(need, sizeof need, "%lu", (unsigned long)c.a.workspace_size);
    c.a.workspace_size--;
    snprintf(have, sizeof have, "%lu", (unsigned long)c.a.workspace_size);
    ASSERT_STATUS(MHA_ERR_WORKSPACE, mha_forward_check(c.layer, &c.a, why, sizeof why));
    ASSERTm(why, has_words(why, need) && has_words(why, have));
    free(c.a.workspace);
    mha_layer_free(c.layer);
    PASS();
}

/* x, y and lse fit into the address space, what is made of them in between need not. However
   little of it a call keeps at a time, a byte is not enough for it. */
TEST workspace_overflow(void)
{
    layer_ctx l = layer_base();
    mha_layer *layer = NULL;
    mha_args a;
    mha_status st;
    unsigned char workspace[1] = { 0xa5 };
    size_t size = 0;

    memset(&out, 0xa5, sizeof out);
    memset(&a, 0, sizeof a);
    l.cfg.d_model = 1;
    l.cfg.n_heads = 1;
    l.cfg.d_k = 64;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &l.cfg, &l.w));
    a.batch = a.seq = 1 << 30;
    a.x = data;
    a.y = out.y;
    a.workspace = workspace;
    a.workspace_size = 1;
    st = mha_workspace_size(layer, &a, &size);
    ASSERT(st == MHA_ERR_OVERFLOW || (st == MHA_OK && size > 1 && size < (size_t)-1 / 2));
    st = mha_forward(layer, &a);
    ASSERT(st == MHA_ERR_OVERFLOW || st == MHA_ERR_WORKSPACE);
    ASSERT(all_are(&out, sizeof out, 0xa5) && workspace[0] == 0xa5);
    mha_layer_free(layer);
    PASS();
}

TEST workspace_size_pointers(void)
{
    call_ctx c;
    size_t full, size = 0;

    ASSERT_STATUS(MHA_OK, call_base(&c, SELF));
    full = c.a.workspace_size;
    ASSERT_STATUS(MHA_ERR_NULL, mha_workspace_size(c.layer, &c.a, NULL));
    /* It depends on neither x nor y nor the mask, so it can be asked before they are there. */
    c.a.x = NULL;
    c.a.y = NULL;
    c.a.lse = NULL;
    ASSERT_STATUS(MHA_OK, mha_workspace_size(c.layer, &c.a, &size));
    ASSERT_EQ(full, size);
    free(c.a.workspace);
    mha_layer_free(c.layer);
    PASS();
}

TEST no_workspace_allocates(void)
{
    call_ctx c;
    const long live = test_live;

    ASSERT_STATUS(MHA_OK, call_base(&c, SELF));
    free(c.a.workspace);
    c.a.workspace = NULL;
    c.a.workspace_size = 0;
    test_allocs = 0;
    ASSERT_STATUS(MHA_OK, mha_forward(c.layer, &c.a));
    ASSERT(test_allocs > 0);
    mha_layer_free(c.layer);
    ASSERT_EQ(live, test_live);
    PASS();
}

/* Nothing is read from or written to a tensor of size zero: it may be null. */
TEST empty_may_be_null(void)
{
    const mha_stride any = { 0, 0, 0 };
    mha_rope rope = { 0 };
    call_ctx c;
    mha_sdpa_args s;

    ASSERT_STATUS(MHA_OK, call_base(&c, SELF));
    free(c.a.workspace);
    memset(&c.a, 0, sizeof c.a);
    c.a.seq = T;
    ASSERT_STATUS(MHA_OK, mha_forward(c.layer, &c.a));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(c.layer, &c.a, NULL, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_project_out(c.layer, &c.a, NULL));
    c.a.batch = B;
    c.a.seq = 0;
    ASSERT_STATUS(MHA_OK, mha_forward(c.layer, &c.a));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(c.layer, &c.a, NULL, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_project_out(c.layer, &c.a, NULL));
    mha_layer_free(c.layer);

    memset(&s, 0, sizeof s);
    s.heads = H;
    s.d_k = 4;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&s));
    s.batch = B;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&s));
    s.source_seq = S; /* k and v have elements, q and o do not */
    s.k = data;
    s.v = data;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&s));

    ASSERT_STATUS(MHA_OK, mha_split_heads(0, T, H, 4, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_split_heads(B, 0, H, 4, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_merge_heads(0, T, H, 4, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_merge_heads(B, 0, H, 4, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_merge(0, H, T, 4, NULL, NULL, NULL, NULL, any, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_merge(B, H, 0, 4, NULL, NULL, NULL, NULL, any, NULL, NULL));
    rope.layout = MHA_ROPE_HALF;
    ASSERT_STATUS(MHA_OK, mha_rotate(&rope, 0, H, T, 4, NULL, any, NULL));
    ASSERT_STATUS(MHA_OK, mha_rotate(&rope, B, H, 0, 4, NULL, any, NULL));
    PASS();
}

/* ---- mha_project_qkv, mha_project_out ----------------------------------------------------- */

/* clang-format off */
CALL(qkv_odd_q, c->q = odd(out.q))
CALL(qkv_odd_k, c->k = odd(out.k))
CALL(qkv_odd_v, c->v = odd(out.v))
CALL(qkv_none, c->q = c->k = c->v = NULL)
CALL(qkv_only_k, c->q = c->v = NULL)
CALL(qkv_without_v, c->v = NULL)
CALL(out_odd_o, c->o = odd(data))
CALL(out_o_null, c->o = NULL)
/* clang-format on */

static const call_case qkv_cases[] = {
    { "good", SELF, call_good, MHA_OK, "", 0 },
    { "good_cross", CROSS, call_good, MHA_OK, "", 0 },
    { "none_wanted", SELF, call_qkv_none, MHA_OK, "", 0 },
    { "only_k", CROSS, call_qkv_only_k, MHA_OK, "", 0 },
    { "without_v", CROSS, call_qkv_without_v, MHA_OK, "", 0 },
    { "rope_only_k", ROPE_CROSS, call_qkv_only_k, MHA_OK, "", 0 },
    { "y_null", SELF, call_y_null, MHA_OK, "", 0 },
    { "layer_null", SELF, call_layer_null, MHA_ERR_NULL, "", 0 },
    { "args_null", SELF, call_args_null, MHA_ERR_NULL, "", 0 },
    { "x_null", SELF, call_x_null, MHA_ERR_NULL, "", 0 },
    { "source_null", CROSS, call_source_null, MHA_ERR_NULL, "", 0 },
    { "source_v_null", CROSS, call_source_v_null, MHA_ERR_NULL, "", 0 },
    { "batch_neg", SELF, call_batch_neg, MHA_ERR_SIZE, "", 0 },
    { "seq_neg", SELF, call_seq_neg, MHA_ERR_SIZE, "", 0 },
    { "source_seq_neg", CROSS, call_source_seq_neg, MHA_ERR_SIZE, "", 0 },
    { "source_seq_alone", SELF, call_source_seq_alone, MHA_ERR_CONFLICT, "", 0 },
    { "source_v_alone", SELF, call_source_v_alone, MHA_ERR_CONFLICT, "", 0 },
    { "over_batch", SELF, call_over_batch, MHA_ERR_OVERFLOW, "", 0 },
    { "over_source", CROSS, call_over_source, MHA_ERR_OVERFLOW, "", 0 },
    { "odd_x", SELF, call_odd_x, MHA_ERR_ALIGN, "", 0 },
    { "odd_source", CROSS, call_odd_source, MHA_ERR_ALIGN, "", 0 },
    { "odd_source_v", CROSS, call_odd_source_v, MHA_ERR_ALIGN, "", 0 },
    { "odd_q", SELF, call_qkv_odd_q, MHA_ERR_ALIGN, "", 0 },
    { "odd_k", SELF, call_qkv_odd_k, MHA_ERR_ALIGN, "", 0 },
    { "odd_v", SELF, call_qkv_odd_v, MHA_ERR_ALIGN, "", 0 },
    { "workspace_short", SELF, call_workspace_short, MHA_ERR_WORKSPACE, "", 0 },
    { "threads_0", SELF, call_threads_0, MHA_ERR_SIZE, "", 0 },
    { "threads_alone", SELF, call_threads_alone, MHA_ERR_CONFLICT, "", 0 },
};

TEST project_qkv_arguments(const call_case *t)
{
    call_ctx c;
    void *workspace;
    size_t full;

    ASSERT_STATUS(MHA_OK, call_base(&c, t->kind));
    c.a.attn = c.a.attn_mean = c.a.lse = NULL;
    workspace = c.a.workspace;
    ASSERT_STATUS(MHA_OK, mha_workspace_size(c.layer, &c.a, &full));
    ASSERT(full <= c.a.workspace_size);
    c.a.workspace_size = full;
    t->mutate(&c);
    ASSERT_STATUS(t->want, mha_project_qkv(c.layer_p, c.a_p, c.q, c.k, c.v));
    ASSERTm("y written", all_are(out.y, sizeof out.y, 0xa5));
    if (t->want != MHA_OK) {
        ASSERTm("output written on error", all_are(&out, sizeof out, 0xa5));
        ASSERTm("workspace written on error", all_are(workspace, full, 0xa5));
    } else {
        ASSERT_EQ(!c.q, all_are(out.q, sizeof out.q, 0xa5));
        ASSERT_EQ(!c.k, all_are(out.k, sizeof out.k, 0xa5));
        ASSERT_EQ(!c.v, all_are(out.v, sizeof out.v, 0xa5));
    }
    free(workspace);
    mha_layer_free(c.layer);
    PASS();
}

static const call_case out_cases[] = {
    { "good", SELF, call_good, MHA_OK, "", 0 },
    { "good_cross", CROSS, call_good, MHA_OK, "", 0 },
    { "x_null", SELF, call_x_null, MHA_OK, "", 0 },
    { "source_null", CROSS, call_source_null, MHA_OK, "", 0 },
    { "layer_null", SELF, call_layer_null, MHA_ERR_NULL, "", 0 },
    { "args_null", SELF, call_args_null, MHA_ERR_NULL, "", 0 },
    { "o_null", SELF, call_out_o_null, MHA_ERR_NULL, "", 0 },
    { "y_null", SELF, call_y_null, MHA_ERR_NULL, "", 0 },
    { "batch_neg", SELF, call_batch_neg, MHA_ERR_SIZE, "", 0 },
    { "seq_neg", SELF, call_seq_neg, MHA_ERR_SIZE, "", 0 },
    { "over_batch", SELF, call_over_batch, MHA_ERR_OVERFLOW, "", 0 },
    { "odd_o", SELF, call_out_odd_o, MHA_ERR_ALIGN, "", 0 },
    { "odd_y", SELF, call_odd_y, MHA_ERR_ALIGN, "", 0 },
    { "threads_0", SELF, call_threads_0, MHA_ERR_SIZE, "", 0 },
    { "threads_alone", SELF, call_threads_alone, MHA_ERR_CONFLICT, "", 0 },
};

TEST project_out_arguments(const call_case *t)
{
    call_ctx c;
    void *workspace;
    size_t full;

    ASSERT_STATUS(MHA_OK, call_base(&c, t->kind));
    workspace = c.a.workspace;
    full = c.a.workspace_size;
    t->mutate(&c);
    ASSERT_STATUS(t->want, mha_project_out(c.layer_p, c.a_p, c.o));
    if (t->want != MHA_OK) {
        ASSERTm("output written on error", all_are(&out, sizeof out, 0xa5));
        ASSERTm("workspace written on error", all_are(workspace, full, 0xa5));
    } else {
        ASSERT(!all_are(out.y, sizeof out.y, 0xa5));
        ASSERTm("more than y written", all_are(out.attn, sizeof out - sizeof out.y, 0xa5));
    }
    free(workspace);
    mha_layer_free(c.layer);
    PASS();
}

/* ---- mha_sdpa ----------------------------------------------------------------------------- */

typedef struct sdpa_ctx {
    mha_sdpa_args a;
    const mha_sdpa_args *a_p;
} sdpa_ctx;

typedef struct sdpa_case {
    const char *name;
    void (*mutate)(sdpa_ctx *c);
    mha_status want;
    const char *words;
    int sized;
} sdpa_case;

/* B = 2, H = 2, G = 1, T = 3, S = 4, d_k = 4, d_v = 2. */
static mha_status sdpa_base(sdpa_ctx *c)
{
    mha_status st;
    memset(c, 0, sizeof *c);
    memset(&out, 0xa5, sizeof out);
    c->a_p = &c->a;
    c->a.batch = B;
    c->a.heads = H;
    c->a.kv_heads = 1;
    c->a.seq = T;
    c->a.source_seq = S;
    c->a.d_k = 4;
    c->a.d_v = 2;
    c->a.q = c->a.k = c->a.v = data;
    c->a.o = out.y;
    c->a.attn = out.attn;
    c->a.attn_mean = out.mean;
    c->a.lse = out.lse;
    st = mha_sdpa_workspace_size(&c->a, &c->a.workspace_size);
    c->a.workspace = malloc(c->a.workspace_size ? c->a.workspace_size : 1);
    memset(c->a.workspace, 0xa5, c->a.workspace_size);
    return st;
}

/* q and o alike, as in [B,H,T,4] */
static void strides_of_4(sdpa_ctx *c)
{
    c->a.q_stride.seq = 4;
    c->a.q_stride.head = T * 4;
    c->a.q_stride.batch = H * T * 4;
    c->a.o_stride = c->a.q_stride;
}

/* clang-format off */
#define SDPA(name, ...) \
    static void sdpa_##name(sdpa_ctx *c) { __VA_ARGS__; }
SDPA(good, (void)c)
SDPA(good_defaults, c->a.kv_heads = 0; c->a.d_v = 0; free(c->a.workspace); c->a.workspace = NULL;
     c->a.workspace_size = 0)
SDPA(good_scale, c->a.scale = -2.0f)
SDPA(good_key_len, c->a.mask.key_len = good_len)
SDPA(args_null, c->a_p = NULL)
SDPA(q_null, c->a.q = NULL)
SDPA(k_null, c->a.k = NULL)
SDPA(v_null, c->a.v = NULL)
SDPA(o_null, c->a.o = NULL)
SDPA(o_is_k, c->a.k = c->a.o)
SDPA(o_is_v, c->a.v = c->a.o)
SDPA(batch_neg, c->a.batch = -5)
SDPA(heads_0, c->a.heads = 0)
SDPA(heads_neg, c->a.heads = -5)
SDPA(kv_heads_neg, c->a.kv_heads = -5)
SDPA(kv_heads_not_dividing, c->a.heads = 5; c->a.kv_heads = 3)
SDPA(kv_heads_more, c->a.kv_heads = 4)
SDPA(seq_neg, c->a.seq = -5)
SDPA(source_seq_neg, c->a.source_seq = -5)
SDPA(d_k_0, c->a.d_k = 0)
SDPA(d_k_neg, c->a.d_k = -5)
SDPA(d_v_neg, c->a.d_v = -5)
SDPA(scale_nan, c->a.scale = F_NAN)
SDPA(scale_inf, c->a.scale = F_INF)
SDPA(scale_ninf, c->a.scale = F_NINF)
SDPA(odd_q, c->a.q = odd(data))
SDPA(odd_k, c->a.k = odd(data))
SDPA(odd_v, c->a.v = odd(data))
SDPA(odd_o, c->a.o = odd(out.y))
SDPA(odd_attn, c->a.attn = odd(out.attn))
SDPA(odd_mean, c->a.attn_mean = odd(out.mean))
SDPA(odd_lse, c->a.lse = odd(out.lse))
SDPA(odd_bias, c->a.mask.bias = odd(data))
SDPA(odd_key_len, c->a.mask.key_len = odd(data))
SDPA(causal_3, c->a.mask.causal = (mha_causal)3)
SDPA(key_len_neg, c->a.mask.key_len = negative_len)
SDPA(key_len_long, c->a.mask.key_len = long_len)
SDPA(isa_99, c->a.isa = (mha_isa)99)
SDPA(isa_neg, c->a.isa = (mha_isa)-1)
SDPA(isa_absent, c->a.isa = absent_isa())
SDPA(over_q, c->a.batch = INT_MAX; c->a.seq = INT_MAX)
SDPA(over_k, c->a.batch = INT_MAX; c->a.source_seq = INT_MAX)
SDPA(over_v, c->a.source_seq = INT_MAX; c->a.d_v = INT_MAX)
SDPA(over_o, c->a.seq = INT_MAX; c->a.d_v = INT_MAX)
SDPA(over_attn, c->a.batch = 1; c->a.seq = c->a.source_seq = INT_MAX; c->a.attn_mean = NULL)
SDPA(over_mean, c->a.heads = 1; c->a.seq = c->a.source_seq = INT_MAX; c->a.attn = NULL)
SDPA(over_heads, c->a.heads = INT_MAX; c->a.batch = INT_MAX)
SDPA(over_d_k, c->a.heads = INT_MAX; c->a.d_k = INT_MAX)
SDPA(workspace_short, c->a.workspace_size--)
SDPA(workspace_0, c->a.workspace_size = 0)
SDPA(threads_0, c->a.parallel.parallel_for = serial_for)
SDPA(threads_neg, c->a.parallel.parallel_for = serial_for; c->a.parallel.threads = -3)
SDPA(threads_alone, c->a.parallel.threads = 2)
SDPA(in_place, c->a.q = c->a.o; c->a.attn = c->a.attn_mean = NULL; c->a.d_v = 4;
     c->a.workspace_size = 0; free(c->a.workspace); c->a.workspace = NULL)
SDPA(in_place_narrow, sdpa_in_place(c); c->a.d_v = 2; strides_of_4(c))
SDPA(in_place_wide, sdpa_in_place(c); c->a.d_v = 5; strides_of_4(c))
SDPA(in_place_batch, sdpa_in_place(c); strides_of_4(c); c->a.o_stride.batch++)
SDPA(in_place_head, sdpa_in_place(c); strides_of_4(c); c->a.o_stride.head++)
SDPA(in_place_seq, sdpa_in_place(c); strides_of_4(c); c->a.q_stride.seq++)
SDPA(in_place_weights, sdpa_in_place(c); c->a.attn = out.attn)
SDPA(o_backwards, strides_of_4(c); c->a.d_v = 4; c->a.o += 4; c->a.o_stride.seq = -4;
     c->a.seq = 2; c->a.heads = c->a.kv_heads = c->a.batch = 1; c->a.attn = c->a.attn_mean = NULL;
     c->a.o_stride.head = c->a.o_stride.batch = 0)
SDPA(o_batch_0, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.batch = 0)
SDPA(o_head_0, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.head = 0)
SDPA(o_seq_0, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.seq = 0)
SDPA(o_seq_3, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.seq = 3)
SDPA(o_seq_m3, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.seq = -3)
/* [B,T,H,4] is {T*H*4, 4, H*4} */
SDPA(o_swapped, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.head = H * 4; c->a.o_stride.seq = 4)
SDPA(o_batch_short, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.batch = H * T * 4 - 1)
SDPA(o_tokens, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.head = 4; c->a.o_stride.seq = H * 4)
SDPA(o_batch_inner, strides_of_4(c); c->a.d_v = 4; c->a.o_stride.batch = 4; c->a.o_stride.seq = B * 4;
     c->a.o_stride.head = B * T * 4)
SDPA(good_window, c->a.mask.windowed = 1; c->a.mask.left = 1; c->a.mask.right = -1)
SDPA(good_key_start, c->a.mask.key_start = good_len)
SDPA(good_padding, c->a.mask.key_padding = bytes_of_ones)
SDPA(good_gate, c->a.gate = data; c->a.gate_stride.seq = H)
SDPA(left_alone, c->a.mask.left = 2)
SDPA(right_alone, c->a.mask.right = -1)
SDPA(windowed_2, c->a.mask.windowed = 2)
SDPA(windowed_neg, c->a.mask.windowed = -1)
SDPA(left_neg, c->a.mask.windowed = 1; c->a.mask.left = -2)
SDPA(right_neg, c->a.mask.windowed = 1; c->a.mask.right = -2)
SDPA(right_min, c->a.mask.windowed = 1; c->a.mask.right = INT_MIN)
SDPA(key_start_neg, c->a.mask.key_start = negative_len)
SDPA(key_start_long, c->a.mask.key_start = long_len)
SDPA(odd_key_start, c->a.mask.key_start = odd(data))
SDPA(odd_gate, c->a.gate = odd(data))
SDPA(cu_seq_from_1, c->a.cu_seq = cu_from_1)
SDPA(cu_seq_down, c->a.cu_seq = cu_down)
SDPA(cu_seq_neg, c->a.cu_seq = cu_negative)
SDPA(cu_seq_other, c->a.cu_seq = cu_of_3; c->a.seq = 4)
SDPA(odd_cu_seq, c->a.cu_seq = odd(data))
SDPA(cu_source_from_1, c->a.cu_source = cu_from_1; c->a.source_seq = 0)
SDPA(cu_source_down, c->a.cu_source = cu_down; c->a.source_seq = 0)
SDPA(cu_source_other, c->a.cu_source = cu_of_3)
SDPA(odd_cu_source, c->a.cu_source = odd(data))
SDPA(good_cu, c->a.cu_seq = c->a.cu_source = cu_of_3; c->a.source_seq = 0; free(c->a.workspace);
     c->a.workspace = NULL; c->a.workspace_size = 0)
SDPA(good_softcap, c->a.softcap = 2)
SDPA(good_alibi, c->a.alibi = data)
SDPA(good_sink, c->a.sink = c->a.sink_value = data)
SDPA(softcap_neg, c->a.softcap = -2)
SDPA(softcap_nan, c->a.softcap = F_NAN)
SDPA(softcap_inf, c->a.softcap = F_INF)
SDPA(softcap_huge, c->a.softcap = 2e30f)
SDPA(sink_value_alone, c->a.sink_value = data)
SDPA(odd_alibi, c->a.alibi = odd(data))
SDPA(odd_sink, c->a.sink = odd(data))
SDPA(odd_sink_value, c->a.sink = data; c->a.sink_value = odd(data))
/* clang-format on */

static const sdpa_case sdpa_cases[] = {
    { "good", sdpa_good, MHA_OK, "", 1 },
    { "good_defaults", sdpa_good_defaults, MHA_OK, "", 1 },
    { "good_scale", sdpa_good_scale, MHA_OK, "", 1 },
    { "good_key_len", sdpa_good_key_len, MHA_OK, "", 1 },
    { "args_null", sdpa_args_null, MHA_ERR_NULL, "args", 1 },
    { "q_null", sdpa_q_null, MHA_ERR_NULL, "q", 0 },
    { "k_null", sdpa_k_null, MHA_ERR_NULL, "k", 0 },
    { "v_null", sdpa_v_null, MHA_ERR_NULL, "v", 0 },
    { "o_null", sdpa_o_null, MHA_ERR_NULL, "o", 0 },
    { "o_is_k", sdpa_o_is_k, MHA_ERR_CONFLICT, "o k read", 0 },
    { "o_is_v", sdpa_o_is_v, MHA_ERR_CONFLICT, "o v read", 0 },
    { "batch_neg", sdpa_batch_neg, MHA_ERR_SIZE, "batch -5", 1 },
    { "heads_0", sdpa_heads_0, MHA_ERR_SIZE, "heads 0", 1 },
    { "heads_neg", sdpa_heads_neg, MHA_ERR_SIZE, "heads -5", 1 },
    { "kv_heads_neg", sdpa_kv_heads_neg, MHA_ERR_SIZE, "kv_heads -5", 1 },
    { "kv_heads_not_dividing", sdpa_kv_heads_not_dividing, MHA_ERR_SIZE, "kv_heads 3 5", 1 },
    { "kv_heads_more", sdpa_kv_heads_more, MHA_ERR_SIZE, "kv_heads 4 2", 1 },
    { "seq_neg", sdpa_seq_neg, MHA_ERR_SIZE, "seq -5", 1 },
    { "source_seq_neg", sdpa_source_seq_neg, MHA_ERR_SIZE, "source_seq -5", 1 },
    { "d_k_0", sdpa_d_k_0, MHA_ERR_SIZE, "d_k 0", 1 },
    { "d_k_neg", sdpa_d_k_neg, MHA_ERR_SIZE, "d_k -5", 1 },
    { "d_v_neg", sdpa_d_v_neg, MHA_ERR_SIZE, "d_v -5", 1 },
    { "scale_nan", sdpa_scale_nan, MHA_ERR_VALUE, "scale", 0 },
    { "scale_inf", sdpa_scale_inf, MHA_ERR_VALUE, "scale", 0 },
    { "scale_ninf", sdpa_scale_ninf, MHA_ERR_VALUE, "scale", 0 },
    { "odd_q", sdpa_odd_q, MHA_ERR_ALIGN, "q", 0 },
    { "odd_k", sdpa_odd_k, MHA_ERR_ALIGN, "k", 0 },
    { "odd_v", sdpa_odd_v, MHA_ERR_ALIGN, "v", 0 },
    { "odd_o", sdpa_odd_o, MHA_ERR_ALIGN, "o", 0 },
    { "odd_attn", sdpa_odd_attn, MHA_ERR_ALIGN, "attn", 0 },
    { "odd_mean", sdpa_odd_mean, MHA_ERR_ALIGN, "attn_mean", 0 },
    { "odd_lse", sdpa_odd_lse, MHA_ERR_ALIGN, "lse", 0 },
    { "odd_bias", sdpa_odd_bias, MHA_ERR_ALIGN, "bias", 0 },
    { "odd_key_len", sdpa_odd_key_len, MHA_ERR_ALIGN, "key_len", 0 },
    { "causal_3", sdpa_causal_3, MHA_ERR_ENUM, "causal 3", 0 },
    { "key_len_neg", sdpa_key_len_neg, MHA_ERR_VALUE, "key_len 1 -1", 0 },
    { "key_len_long", sdpa_key_len_long, MHA_ERR_VALUE, "key_len 0 9 4", 0 },
    { "isa_99", sdpa_isa_99, MHA_ERR_ENUM, "isa 99", 1 },
    { "isa_neg", sdpa_isa_neg, MHA_ERR_ENUM, "isa -1", 1 },
    { "isa_absent", sdpa_isa_absent, MHA_ERR_ISA, "isa", 1 },
    { "over_q", sdpa_over_q, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_k", sdpa_over_k, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_v", sdpa_over_v, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_o", sdpa_over_o, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_attn", sdpa_over_attn, MHA_ERR_OVERFLOW, BIG, 0 },
    { "over_mean", sdpa_over_mean, MHA_ERR_OVERFLOW, BIG, 0 },
    { "over_heads", sdpa_over_heads, MHA_ERR_OVERFLOW, BIG, 1 },
    { "over_d_k", sdpa_over_d_k, MHA_ERR_OVERFLOW, BIG, 1 },
    { "workspace_short", sdpa_workspace_short, MHA_ERR_WORKSPACE, "workspace|workspace_size", 0 },
    { "workspace_0", sdpa_workspace_0, MHA_ERR_WORKSPACE, "workspace|workspace_size 0", 0 },
    { "threads_0", sdpa_threads_0, MHA_ERR_SIZE, "threads 0", 1 },
    { "threads_neg", sdpa_threads_neg, MHA_ERR_SIZE, "threads -3", 1 },
    { "threads_alone", sdpa_threads_alone, MHA_ERR_CONFLICT, "threads 2 parallel_for", 1 },
    { "in_place", sdpa_in_place, MHA_OK, "", 1 },
    { "in_place_narrow", sdpa_in_place_narrow, MHA_OK, "", 1 },
    { "in_place_wide", sdpa_in_place_wide, MHA_ERR_CONFLICT, "o q shape", 0 },
    { "in_place_batch", sdpa_in_place_batch, MHA_ERR_CONFLICT, "o q strides", 0 },
    { "in_place_head", sdpa_in_place_head, MHA_ERR_CONFLICT, "o q strides", 0 },
    { "in_place_seq", sdpa_in_place_seq, MHA_ERR_CONFLICT, "o q strides", 0 },
    { "in_place_weights", sdpa_in_place_weights, MHA_ERR_CONFLICT, "o q attn", 0 },
    { "o_backwards", sdpa_o_backwards, MHA_OK, "", 0 },
    { "o_batch_0", sdpa_o_batch_0, MHA_ERR_CONFLICT, "o_stride batch 0 4", 1 },
    { "o_head_0", sdpa_o_head_0, MHA_ERR_CONFLICT, "o_stride head 0 4", 1 },
    { "o_seq_0", sdpa_o_seq_0, MHA_ERR_CONFLICT, "o_stride seq 0 4", 1 },
    { "o_seq_3", sdpa_o_seq_3, MHA_ERR_CONFLICT, "o_stride seq 3 4", 1 },
    { "o_seq_m3", sdpa_o_seq_m3, MHA_ERR_CONFLICT, "o_stride seq -3 4", 1 },
    { "o_swapped", sdpa_o_swapped, MHA_ERR_CONFLICT, "o_stride head 8 12", 1 },
    { "o_batch_short", sdpa_o_batch_short, MHA_ERR_CONFLICT, "o_stride batch 23 24", 1 },
    { "o_tokens", sdpa_o_tokens, MHA_OK, "", 0 },
    { "o_batch_inner", sdpa_o_batch_inner, MHA_OK, "", 0 },
    { "good_window", sdpa_good_window, MHA_OK, "", 0 },
    { "good_key_start", sdpa_good_key_start, MHA_OK, "", 0 },
    { "good_padding", sdpa_good_padding, MHA_OK, "", 0 },
    { "good_gate", sdpa_good_gate, MHA_OK, "", 0 },
    { "left_alone", sdpa_left_alone, MHA_ERR_CONFLICT, "left windowed", 0 },
    { "right_alone", sdpa_right_alone, MHA_ERR_CONFLICT, "right windowed", 0 },
    { "windowed_2", sdpa_windowed_2, MHA_ERR_VALUE, "windowed 2", 0 },
    { "windowed_neg", sdpa_windowed_neg, MHA_ERR_VALUE, "windowed -1", 0 },
    { "left_neg", sdpa_left_neg, MHA_ERR_VALUE, "left -2", 0 },
    { "right_neg", sdpa_right_neg, MHA_ERR_VALUE, "right -2", 0 },
    { "right_min", sdpa_right_min, MHA_ERR_VALUE, "right -2147483648", 0 },
    { "key_start_neg", sdpa_key_start_neg, MHA_ERR_VALUE, "key_start 1 -1", 0 },
    { "key_start_long", sdpa_key_start_long, MHA_ERR_VALUE, "key_start 0 9 4", 0 },
    { "odd_key_start", sdpa_odd_key_start, MHA_ERR_ALIGN, "key_start", 0 },
    { "odd_gate", sdpa_odd_gate, MHA_ERR_ALIGN, "gate", 0 },
    { "cu_seq_from_1", sdpa_cu_seq_from_1, MHA_ERR_VALUE, "cu_seq 1", 0 },
    { "cu_seq_down", sdpa_cu_seq_down, MHA_ERR_VALUE, "cu_seq 5 3", 0 },
    { "cu_seq_neg", sdpa_cu_seq_neg, MHA_ERR_VALUE, "cu_seq -1", 0 },
    { "cu_seq_other", sdpa_cu_seq_other, MHA_ERR_CONFLICT, "seq 4 cu_seq 3", 0 },
    { "odd_cu_seq", sdpa_odd_cu_seq, MHA_ERR_ALIGN, "cu_seq", 0 },
    { "cu_source_from_1", sdpa_cu_source_from_1, MHA_ERR_VALUE, "cu_source 1", 0 },
    { "cu_source_down", sdpa_cu_source_down, MHA_ERR_VALUE, "cu_source 5 3", 0 },
    { "cu_source_other", sdpa_cu_source_other, MHA_ERR_CONFLICT, "source_seq 4 cu_source 3", 0 },
    { "odd_cu_source", sdpa_odd_cu_source, MHA_ERR_ALIGN, "cu_source", 0 },
    { "good_cu", sdpa_good_cu, MHA_OK, "", 0 },
    { "good_softcap", sdpa_good_softcap, MHA_OK, "", 0 },
    { "good_alibi", sdpa_good_alibi, MHA_OK, "", 0 },
    { "good_sink", sdpa_good_sink, MHA_OK, "", 0 },
    { "softcap_neg", sdpa_softcap_neg, MHA_ERR_VALUE, "softcap", 0 },
    { "softcap_nan", sdpa_softcap_nan, MHA_ERR_VALUE, "softcap", 0 },
    { "softcap_inf", sdpa_softcap_inf, MHA_ERR_VALUE, "softcap", 0 },
    { "softcap_huge", sdpa_softcap_huge, MHA_ERR_VALUE, "softcap", 0 },
    { "sink_value_alone", sdpa_sink_value_alone, MHA_ERR_CONFLICT, "sink_value sink", 0 },
    { "odd_alibi", sdpa_odd_alibi, MHA_ERR_ALIGN, "alibi", 0 },
    { "odd_sink", sdpa_odd_sink, MHA_ERR_ALIGN, "sink", 0 },
    { "odd_sink_value", sdpa_odd_sink_value, MHA_ERR_ALIGN, "sink_value", 0 },
};

static mha_status check_sdpa(const void *ctx, char *why, size_t why_size)
{
    const sdpa_ctx *c = (const sdpa_ctx *)ctx;
    return mha_sdpa_check(c->a_p, why, why_size);
}

TEST sdpa_arguments(const sdpa_case *t)
{
    sdpa_ctx c;
    size_t size = 0, full;

    ASSERT_STATUS(MHA_OK, sdpa_base(&c));
    full = c.a.workspace_size;
    t->mutate(&c);
    ASSERT_STATUS(t->want, mha_sdpa_check(c.a_p, NULL, 0));
    ASSERTm("a check wrote", all_are(&out, sizeof out, 0xa5));
    if (t->sized) ASSERT_STATUS(t->want, mha_sdpa_workspace_size(c.a_p, &size));
    ASSERT_STATUS(t->want, mha_sdpa(c.a_p));
    if (t->want != MHA_OK) {
        ASSERTm("output written on error", all_are(&out, sizeof out, 0xa5));
        ASSERTm("workspace written on error", !c.a.workspace || all_are(c.a.workspace, full, 0xa5));
    } else {
        ASSERTm("nothing written", !all_are(out.y, sizeof out.y, 0xa5));
    }
    CHECK_CALL(sentence(check_sdpa, &c, t->want, t->words));
    free(c.a.workspace);
    PASS();
}

TEST sdpa_size_pointer(void)
{
    sdpa_ctx c;
    size_t size = 0;

    ASSERT_STATUS(MHA_OK, sdpa_base(&c));
    ASSERT_STATUS(MHA_ERR_NULL, mha_sdpa_workspace_size(&c.a, NULL));
    c.a.q = c.a.k = c.a.v = NULL;
    c.a.o = NULL;
    ASSERT_STATUS(MHA_OK, mha_sdpa_workspace_size(&c.a, &size));
    ASSERT_EQ(c.a.workspace_size, size);
    free(c.a.workspace);
    PASS();
}

/* The number of bytes is an output like any other: not touched on error. */
TEST sizes_untouched(void)
{
    layer_ctx l = layer_base();
    call_ctx c;
    sdpa_ctx s;
    size_t size = 12345;

    l.cfg.d_model = -1;
    ASSERT_STATUS(MHA_ERR_SIZE, mha_layer_size(&l.cfg, &size));
    ASSERT_EQm("mha_layer_size", (size_t)12345, size);
    ASSERT_STATUS(MHA_OK, call_base(&c, SELF));
    c.a.batch = -1;
    ASSERT_STATUS(MHA_ERR_SIZE, mha_workspace_size(c.layer, &c.a, &size));
    ASSERT_EQm("mha_workspace_size", (size_t)12345, size);
    ASSERT_STATUS(MHA_OK, sdpa_base(&s));
    s.a.batch = -1;
    ASSERT_STATUS(MHA_ERR_SIZE, mha_sdpa_workspace_size(&s.a, &size));
    ASSERT_EQm("mha_sdpa_workspace_size", (size_t)12345, size);
    free(c.a.workspace);
    free(s.a.workspace);
    mha_layer_free(c.layer);
    PASS();
}

/* ---- mha_rotate, mha_alibi_slopes, mha_merge ----------------------------------------------- */

typedef struct rotate_ctx {
    mha_rope rope;
    const mha_rope *rope_p;
    int batch, heads, seq, d;
    float *x;
    mha_stride stride;
    const int *positions;
} rotate_ctx;

typedef struct rotate_case {
    const char *name;
    void (*mutate)(rotate_ctx *c);
    mha_status want;
} rotate_case;

/* clang-format off */
#define ROTATE(name, ...) \
    static void rotate_##name(rotate_ctx *c) { __VA_ARGS__; }
ROTATE(good, (void)c)
ROTATE(none, c->rope.layout = MHA_ROPE_NONE)
ROTATE(rope_null, c->rope_p = NULL)
ROTATE(x_null, c->x = NULL)
ROTATE(batch_neg, c->batch = -1)
ROTATE(heads_neg, c->heads = -1)
ROTATE(heads_0, c->heads = 0)
ROTATE(seq_neg, c->seq = -1)
ROTATE(d_0, c->d = 0)
ROTATE(d_neg, c->d = -4)
ROTATE(d_odd, c->d = 3)
ROTATE(layout_9, c->rope.layout = (mha_rope_layout)9)
ROTATE(scaling_9, c->rope.scaling = (mha_rope_scaling)9)
ROTATE(width_odd, c->rope.width = 3)
ROTATE(width_neg, c->rope.width = -2)
ROTATE(width_wide, c->rope.width = 6)
ROTATE(base_neg, c->rope.base = -1)
ROTATE(factor_small, c->rope.scaling = MHA_ROPE_LINEAR; c->rope.factor = 0.25f)
ROTATE(original_0, c->rope.scaling = MHA_ROPE_LLAMA3)
ROTATE(odd_x, c->x = (float *)odd(out.y))
ROTATE(odd_positions, c->positions = (const int *)odd(data))
ROTATE(over, c->batch = c->seq = INT_MAX)
ROTATE(good_strides, c->stride.batch = 16; c->stride.head = 4; c->stride.seq = 8)
ROTATE(stride_0, c->stride.seq = 8)
/* clang-format on */

static const rotate_case rotate_cases[] = {
    { "good", rotate_good, MHA_OK },
    { "none", rotate_none, MHA_OK },
    { "rope_null", rotate_rope_null, MHA_ERR_NULL },
    { "x_null", rotate_x_null, MHA_ERR_NULL },
    { "batch_neg", rotate_batch_neg, MHA_ERR_SIZE },
    { "heads_neg", rotate_heads_neg, MHA_ERR_SIZE },
    { "heads_0", rotate_heads_0, MHA_ERR_SIZE },
    { "seq_neg", rotate_seq_neg, MHA_ERR_SIZE },
    { "d_0", rotate_d_0, MHA_ERR_SIZE },
    { "d_neg", rotate_d_neg, MHA_ERR_SIZE },
    { "d_odd", rotate_d_odd, MHA_ERR_SIZE },
    { "layout_9", rotate_layout_9, MHA_ERR_ENUM },
    { "scaling_9", rotate_scaling_9, MHA_ERR_ENUM },
    { "width_odd", rotate_width_odd, MHA_ERR_SIZE },
    { "width_neg", rotate_width_neg, MHA_ERR_SIZE },
    { "width_wide", rotate_width_wide, MHA_ERR_SIZE },
    { "base_neg", rotate_base_neg, MHA_ERR_VALUE },
    { "factor_small", rotate_factor_small, MHA_ERR_VALUE },
    { "original_0", rotate_original_0, MHA_ERR_VALUE },
    { "odd_x", rotate_odd_x, MHA_ERR_ALIGN },
    { "odd_positions", rotate_odd_positions, MHA_ERR_ALIGN },
    { "over", rotate_over, MHA_ERR_OVERFLOW },
    { "good_strides", rotate_good_strides, MHA_OK },
    { "stride_0", rotate_stride_0, MHA_ERR_CONFLICT },
};

TEST rotate_arguments(const rotate_case *t)
{
    rotate_ctx c;
    memset(&c, 0, sizeof c);
    memset(&out, 0xa5, sizeof out);
    c.rope.layout = MHA_ROPE_INTERLEAVED;
    c.rope_p = &c.rope;
    c.batch = c.heads = c.seq = 2;
    c.d = 4;
    c.x = out.y;
    t->mutate(&c);
    ASSERT_STATUS(t->want,
                  mha_rotate(c.rope_p, c.batch, c.heads, c.seq, c.d, c.x, c.stride, c.positions));
    ASSERT_EQ(t->want != MHA_OK || c.rope.layout == MHA_ROPE_NONE,
              all_are(out.y, sizeof out.y, 0xa5));
    PASS();
}

TEST slopes_arguments(void)
{
    memset(&out, 0xa5, sizeof out);
    ASSERT_STATUS(MHA_ERR_NULL, mha_alibi_slopes(4, NULL));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_alibi_slopes(0, out.y));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_alibi_slopes(-4, out.y));
    ASSERT_STATUS(MHA_ERR_ALIGN, mha_alibi_slopes(4, (float *)odd(out.y)));
    ASSERT(all_are(&out, sizeof out, 0xa5));
    ASSERT_STATUS(MHA_OK, mha_alibi_slopes(4, out.y));
    PASS();
}

typedef struct merge_case {
    const char *name;
    int batch, heads, seq, d;
    int which, bad; /* pointer o_a lse_a o_b lse_b o lse is 1 null, 2 misaligned; bad 0: none is */
    mha_status want;
} merge_case;

static const merge_case merge_cases[] = {
    { "good", 2, 2, 3, 4, 0, 0, MHA_OK },
    { "no_lse", 2, 2, 3, 4, 5, 1, MHA_OK },
    { "batch_neg", -2, 2, 3, 4, 0, 0, MHA_ERR_SIZE },
    { "heads_0", 2, 0, 3, 4, 0, 0, MHA_ERR_SIZE },
    { "heads_neg", 2, -2, 3, 4, 0, 0, MHA_ERR_SIZE },
    { "seq_neg", 2, 2, -3, 4, 0, 0, MHA_ERR_SIZE },
    { "d_0", 2, 2, 3, 0, 0, 0, MHA_ERR_SIZE },
    { "d_neg", 2, 2, 3, -4, 0, 0, MHA_ERR_SIZE },
    { "o_a_null", 2, 2, 3, 4, 0, 1, MHA_ERR_NULL },
    { "lse_a_null", 2, 2, 3, 4, 1, 1, MHA_ERR_NULL },
    { "o_b_null", 2, 2, 3, 4, 2, 1, MHA_ERR_NULL },
    { "lse_b_null", 2, 2, 3, 4, 3, 1, MHA_ERR_NULL },
    { "o_null", 2, 2, 3, 4, 4, 1, MHA_ERR_NULL },
    { "odd_o_a", 2, 2, 3, 4, 0, 2, MHA_ERR_ALIGN },
    { "odd_lse_a", 2, 2, 3, 4, 1, 2, MHA_ERR_ALIGN },
    { "odd_o_b", 2, 2, 3, 4, 2, 2, MHA_ERR_ALIGN },
    { "odd_lse_b", 2, 2, 3, 4, 3, 2, MHA_ERR_ALIGN },
    { "odd_o", 2, 2, 3, 4, 4, 2, MHA_ERR_ALIGN },
    { "odd_lse", 2, 2, 3, 4, 5, 2, MHA_ERR_ALIGN },
    { "over", INT_MAX, 2, INT_MAX, 4, 0, 0, MHA_ERR_OVERFLOW },
};

TEST merge_arguments(const merge_case *t)
{
    const mha_stride contiguous = { 0, 0, 0 }, forgotten = { 24, 0, 4 };
    float *p[6] = { data, data, data, data, out.y, out.lse };
    memset(&out, 0xa5, sizeof out);
    if (t->want == MHA_OK) /* a stride of 0 among others: heads would lie on each other */
        ASSERT_STATUS(MHA_ERR_CONFLICT, mha_merge(t->batch, t->heads, t->seq, t->d, p[0], p[1],
                                                  p[2], p[3], forgotten, p[4], p[5]));
    ASSERT(all_are(&out, sizeof out, 0xa5));
    if (t->bad == 1) p[t->which] = NULL;
    if (t->bad == 2) p[t->which] = (float *)odd(p[t->which]);
    ASSERT_STATUS(t->want, mha_merge(t->batch, t->heads, t->seq, t->d, p[0], p[1], p[2], p[3],
                                     contiguous, p[4], p[5]));
    ASSERT_EQ(t->want != MHA_OK, all_are(out.y, sizeof out.y, 0xa5));
    ASSERT_EQ(t->want != MHA_OK || !p[5], all_are(out.lse, sizeof out.lse, 0xa5));
    PASS();
}

/* ---- mha_split_heads, mha_merge_heads, mha_fuse_heads ------------------------------------- */

typedef struct heads_case {
    const char *name;
    int batch, seq, heads, d, x, y; /* x, y: 0 null, 1 good, 2 misaligned */
    mha_status want;
} heads_case;

static const heads_case heads_cases[] = {
    { "good", 2, 3, 2, 4, 1, 1, MHA_OK },
    { "batch_neg", -2, 3, 2, 4, 1, 1, MHA_ERR_SIZE },
    { "seq_neg", 2, -3, 2, 4, 1, 1, MHA_ERR_SIZE },
    { "heads_0", 2, 3, 0, 4, 1, 1, MHA_ERR_SIZE },
    { "heads_neg", 2, 3, -2, 4, 1, 1, MHA_ERR_SIZE },
    { "d_0", 2, 3, 2, 0, 1, 1, MHA_ERR_SIZE },
    { "d_neg", 2, 3, 2, -4, 1, 1, MHA_ERR_SIZE },
    { "x_null", 2, 3, 2, 4, 0, 1, MHA_ERR_NULL },
    { "y_null", 2, 3, 2, 4, 1, 0, MHA_ERR_NULL },
    { "odd_x", 2, 3, 2, 4, 2, 1, MHA_ERR_ALIGN },
    { "odd_y", 2, 3, 2, 4, 1, 2, MHA_ERR_ALIGN },
    { "over", INT_MAX, INT_MAX, 2, 4, 1, 1, MHA_ERR_OVERFLOW },
    { "over_heads", 2, 1, INT_MAX, INT_MAX, 1, 1, MHA_ERR_OVERFLOW },
};

TEST heads_arguments(const heads_case *t)
{
    const float *x = t->x == 0 ? NULL : t->x == 1 ? data : (const float *)odd(data);
    float *y = t->y == 0 ? NULL : t->y == 1 ? out.y : (float *)odd(out.y);

    memset(&out, 0xa5, sizeof out);
    ASSERT_STATUS(t->want, mha_split_heads(t->batch, t->seq, t->heads, t->d, x, y));
    ASSERT_EQ(t->want != MHA_OK, all_are(out.y, sizeof out.y, 0xa5));
    memset(&out, 0xa5, sizeof out);
    ASSERT_STATUS(t->want, mha_merge_heads(t->batch, t->seq, t->heads, t->d, x, y));
    ASSERT_EQ(t->want != MHA_OK, all_are(out.y, sizeof out.y, 0xa5));
    ASSERT(all_are(out.attn, sizeof out - sizeof out.y, 0xa5));
    PASS();
}

typedef struct fuse_ctx {
    mha_config cfg;
    const mha_config *cfg_p;
    mha_layout layout;
    const float *q[2], *k[2], *v[2];
    const float *const *q_p, *const *k_p, *const *v_p;
    float *fused;
} fuse_ctx;

typedef struct fuse_case {
    const char *name;
    void (*mutate)(fuse_ctx *c);
    mha_status want;
} fuse_case;

static float fused[4 * 12];

/* clang-format off */
#define FUSE(name, ...) \
    static void fuse_##name(fuse_ctx *c) { __VA_ARGS__; }
FUSE(good, (void)c)
FUSE(good_kv_heads, c->cfg.n_kv_heads = 1; c->k[1] = c->v[1] = NULL)
FUSE(cfg_null, c->cfg_p = NULL)
FUSE(q_null, c->q_p = NULL)
FUSE(k_null, c->k_p = NULL)
FUSE(v_null, c->v_p = NULL)
FUSE(fused_null, c->fused = NULL)
FUSE(q_1_null, c->q[1] = NULL)
FUSE(k_1_null, c->k[1] = NULL)
FUSE(v_1_null, c->v[1] = NULL)
FUSE(layout_9, c->layout = (mha_layout)9)
FUSE(d_model_0, c->cfg.d_model = 0)
FUSE(n_heads_neg, c->cfg.n_heads = -1)
FUSE(not_divisible, c->cfg.d_model = 5)
FUSE(d_source, c->cfg.d_source = 3)
FUSE(d_source_v, c->cfg.d_source_v = 3)
FUSE(odd_fused, c->fused = (float *)odd(fused))
FUSE(odd_q_1, c->q[1] = (const float *)odd(data))
FUSE(odd_k_1, c->k[1] = (const float *)odd(data))
FUSE(odd_v_1, c->v[1] = (const float *)odd(data))
FUSE(over, c->cfg.d_model = INT_MAX; c->cfg.n_heads = 1)
/* clang-format on */

static const fuse_case fuse_cases[] = {
    { "good", fuse_good, MHA_OK },
    { "good_kv_heads", fuse_good_kv_heads, MHA_OK },
    { "cfg_null", fuse_cfg_null, MHA_ERR_NULL },
    { "q_null", fuse_q_null, MHA_ERR_NULL },
    { "k_null", fuse_k_null, MHA_ERR_NULL },
    { "v_null", fuse_v_null, MHA_ERR_NULL },
    { "fused_null", fuse_fused_null, MHA_ERR_NULL },
    { "q_1_null", fuse_q_1_null, MHA_ERR_NULL },
    { "k_1_null", fuse_k_1_null, MHA_ERR_NULL },
    { "v_1_null", fuse_v_1_null, MHA_ERR_NULL },
    { "layout_9", fuse_layout_9, MHA_ERR_ENUM },
    { "d_model_0", fuse_d_model_0, MHA_ERR_SIZE },
    { "n_heads_neg", fuse_n_heads_neg, MHA_ERR_SIZE },
    { "not_divisible", fuse_not_divisible, MHA_ERR_SIZE },
    { "d_source", fuse_d_source, MHA_ERR_CONFLICT },
    { "d_source_v", fuse_d_source_v, MHA_ERR_CONFLICT },
    { "odd_fused", fuse_odd_fused, MHA_ERR_ALIGN },
    { "odd_q_1", fuse_odd_q_1, MHA_ERR_ALIGN },
    { "odd_k_1", fuse_odd_k_1, MHA_ERR_ALIGN },
    { "odd_v_1", fuse_odd_v_1, MHA_ERR_ALIGN },
    { "over", fuse_over, MHA_ERR_OVERFLOW },
};

TEST fuse_heads_arguments(const fuse_case *t)
{
    fuse_ctx c;
    memset(&c, 0, sizeof c);
    c.cfg.d_model = 4;
    c.cfg.n_heads = 2;
    c.cfg_p = &c.cfg;
    for (int i = 0; i < 2; i++) c.q[i] = c.k[i] = c.v[i] = data;
    c.q_p = c.q;
    c.k_p = c.k;
    c.v_p = c.v;
    c.fused = fused;
    t->mutate(&c);
    memset(fused, 0xa5, sizeof fused);
    ASSERT_STATUS(t->want, mha_fuse_heads(c.cfg_p, c.layout, c.q_p, c.k_p, c.v_p, c.fused));
    ASSERT_EQ(t->want != MHA_OK, all_are(fused, sizeof fused, 0xa5));
    PASS();
}

/* ---- names -------------------------------------------------------------------------------- */

TEST strerror_sentences(void)
{
    const int junk[] = { -1, MHA_ERR_FULL + 1, 1000, INT_MAX, INT_MIN };
    for (int i = MHA_OK; i <= MHA_ERR_FULL; i++) {
        const char *a = mha_strerror((mha_status)i);
        ASSERT(a != NULL && strlen(a) > 1);
        for (int j = MHA_OK; j < i; j++) ASSERT(strcmp(a, mha_strerror((mha_status)j)) != 0);
    }
    for (size_t i = 0; i < sizeof junk / sizeof junk[0]; i++) {
        const char *a = mha_strerror((mha_status)junk[i]);
        ASSERT(a != NULL && strlen(a) > 1);
        ASSERT(strcmp(a, mha_strerror(MHA_OK)) != 0);
    }
    PASS();
}

TEST isa_names(void)
{
    const int junk[] = { -1, MHA_ISA_NEON + 1, 1000, INT_MAX, INT_MIN };
    ASSERT_STR_EQ("auto", mha_isa_name(MHA_ISA_AUTO));
    ASSERT_STR_EQ("scalar", mha_isa_name(MHA_ISA_SCALAR));
    ASSERT_STR_EQ("avx2", mha_isa_name(MHA_ISA_AVX2));
    ASSERT_STR_EQ("avx512", mha_isa_name(MHA_ISA_AVX512));
    ASSERT_STR_EQ("neon", mha_isa_name(MHA_ISA_NEON));
    ASSERT_EQ(1, mha_isa_available(MHA_ISA_AUTO));
    ASSERT_EQ(1, mha_isa_available(MHA_ISA_SCALAR));
    for (int i = MHA_ISA_AUTO; i <= MHA_ISA_NEON; i++) {
        const int there = mha_isa_available((mha_isa)i);
        ASSERT(there == 0 || there == 1);
    }
    for (size_t i = 0; i < sizeof junk / sizeof junk[0]; i++) {
        ASSERT_STR_EQ("unknown", mha_isa_name((mha_isa)junk[i]));
        ASSERT_EQ(0, mha_isa_available((mha_isa)junk[i]));
    }
    PASS();
}

/* ---- the pool ----------------------------------------------------------------------------- */

TEST pool_arguments(void)
{
    mha_pool *pool = NULL;
    mha_parallel par;

    ASSERT_STATUS(MHA_ERR_NULL, mha_pool_create(NULL, 2));
    ASSERT_STATUS(MHA_ERR_SIZE, mha_pool_create(&pool, -1));
    ASSERT_EQ(NULL, pool);
    ASSERT_STATUS(MHA_ERR_SIZE, mha_pool_create(&pool, INT_MIN));
    ASSERT_EQ(NULL, pool);
    mha_pool_free(NULL);
    par = mha_pool_parallel(NULL);
    ASSERT(par.parallel_for == NULL);
    ASSERT(par.ctx == NULL);
    ASSERT_EQ(0, par.threads);
    PASS();
}

#define RUN_CASES(test, cases) \
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) { \
        greatest_set_test_suffix(cases[i].name); \
        RUN_TESTp(test, &cases[i]); \
    }

/* Empty tensors whose other sizes are enormous: nothing to do, at once, and no overflow on the way. */
TEST empty_but_enormous(void)
{
    mha_sdpa_args a = { 0 };
    a.heads = a.seq = a.source_seq = a.d_k = INT_MAX;
    ASSERT_STATUS(MHA_OK, mha_merge_heads(INT_MAX, 0, INT_MAX, 1, NULL, NULL));
    ASSERT_STATUS(MHA_OK, mha_split_heads(INT_MAX, 0, INT_MAX, INT_MAX, NULL, NULL));
    ASSERT_STATUS(MHA_ERR_OVERFLOW, mha_sdpa_check(&a, NULL, 0)); /* the workspace's tiles */
    a.heads = 1, a.d_k = 8, a.source_seq = 0;
    a.q = a.o = &(float){ 0 };
    a.batch = 0;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    PASS();
}

/* How much memory is needed can be asked before the tensors are there, and is said to be too much
   where it is. */
TEST sizes_without_tensors(void)
{
    const int cu[3] = { 0, 1, INT_MAX };
    mha_sdpa_args a = { 0 };
    size_t size = 0;
    a.batch = a.heads = 1;
    a.seq = a.source_seq = INT_MAX; /* attn, which is not asked for, would be too large */
    a.d_k = 8;
    ASSERT_STATUS(sizeof(size_t) > 4 ? MHA_OK : MHA_ERR_OVERFLOW,
                  mha_sdpa_workspace_size(&a, &size));
    ASSERT(size < (size_t)-1 / 2);
    a.d_k = INT_MAX;
    ASSERT_STATUS(MHA_ERR_OVERFLOW, mha_sdpa_workspace_size(&a, &size));
    a.d_k = 8;
    a.batch = 2;
    a.cu_source = cu; /* each sequence starts at a multiple of 16: one too many for an int */
    ASSERT_STATUS(MHA_ERR_OVERFLOW, mha_sdpa_workspace_size(&a, &size));
    PASS();
}

/* A finite scale whose product with log2(e) is none. */
TEST scale_next_to_flt_max(void)
{
    float x = 1.0f, o = 0.0f;
    mha_sdpa_args a = { 0 };
    a.batch = a.heads = a.seq = a.source_seq = a.d_k = 1;
    a.q = a.k = a.v = &x, a.o = &o;
    a.scale = 3e38f;
    ASSERT_STATUS(MHA_ERR_VALUE, mha_sdpa(&a));
    a.scale = -3e38f;
    ASSERT_STATUS(MHA_ERR_VALUE, mha_sdpa(&a));
    a.scale = 2e38f;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&a));
    ASSERT(o == 1.0f);
    PASS();
}

/* The last stage looks at what it uses, and at nothing else: not at a full cache, say. */
/* What mha_layer_config gives holds the defaults of the fields that its scaling uses: it can be
   changed and used again. */
TEST rope_defaults(void)
{
    for (int n = 0; n <= (int)MHA_ROPE_LLAMA3; n++) {
        layer_ctx c = layer_base();
        mha_layer *layer = NULL, *again = NULL;
        const mha_rope *r;
        c.cfg.rope.layout = MHA_ROPE_HALF;
        c.cfg.rope.width = 4;
        c.cfg.rope.scaling = (mha_rope_scaling)n;
        if (n) c.cfg.rope.factor = 3;
        if (n >= (int)MHA_ROPE_YARN) c.cfg.rope.original = 64;
        ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &c.cfg, &c.w));
        r = &mha_layer_config(layer)->rope;
        ASSERT(r->base >= 10000 && r->base <= 10000);
        ASSERT_EQ(n == (int)MHA_ROPE_YARN, r->beta_fast >= 32 && r->beta_slow >= 1);
        ASSERT_EQ(n == (int)MHA_ROPE_YARN, r->attention > 1);
        ASSERT_EQ(n == (int)MHA_ROPE_LLAMA3, r->low_freq >= 1 && r->high_freq >= 4);
        c.cfg = *mha_layer_config(layer);
        if (n) c.cfg.rope.factor = 5;
        ASSERT_STATUS(MHA_OK, mha_layer_create(&again, &c.cfg, &c.w));
        mha_layer_free(again);
        mha_layer_free(layer);
    }
    PASS();
}

/* The stages cannot write over what they read, whatever the number of threads. */
TEST outputs_are_not_inputs(void)
{
    enum { WIDE = 8, LONG = 3 };
    float x[LONG * WIDE] = { 0 }, s[LONG * WIDE] = { 0 }, y[3][LONG * WIDE],
                   w[3 * WIDE * WIDE] = { 0 };
    mha_config cfg = { 0 };
    mha_weights weights = { 0 };
    mha_args a = { 0 };
    mha_sdpa_args sdpa = { 0 };
    mha_layer *layer = NULL;
    cfg.d_model = WIDE, cfg.n_heads = 2;
    weights.qkv = w, weights.out = w;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &weights));
    a.batch = 1, a.seq = LONG, a.x = x;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, y[0], y[1], y[2]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, x, y[1], y[2]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, y[0], x, y[2]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, y[0], y[1], x));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, y[0], y[0], NULL));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, y[0], NULL, y[0]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, NULL, y[1], y[1]));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, NULL, NULL, NULL));
    a.source = s, a.source_seq = LONG;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, s, y[1], NULL));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, NULL, s, NULL));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, NULL, NULL, s));
    a.source_v = y[0];
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, NULL, NULL, y[0]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, NULL, y[0], y[1]));
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_qkv(layer, &a, y[0], NULL, y[1]));
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, y[0], y[1], NULL)); /* source_v is not read */
    memset(&a, 0, sizeof a);
    a.batch = 1, a.seq = LONG, a.y = x;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_project_out(layer, &a, x));
    ASSERT_STATUS(MHA_OK, mha_project_out(layer, &a, y[0]));
    /* what is empty may be anywhere, and what is not read may be written */
    a.seq = 0;
    ASSERT_STATUS(MHA_OK, mha_project_out(layer, &a, x));
    a.seq = LONG, a.batch = 0;
    ASSERT_STATUS(MHA_OK, mha_project_out(layer, &a, x));
    a.y = NULL, a.x = x;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, x, x, x));
    a.batch = 1, a.source = s, a.source_seq = 0;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, y[0], y[0], y[0]));
    a.source_seq = LONG;
    ASSERT_STATUS(MHA_OK, mha_project_qkv(layer, &a, NULL, x, y[0]));
    sdpa.batch = 1, sdpa.heads = 2, sdpa.d_k = 4, sdpa.q = s, sdpa.k = sdpa.v = sdpa.o = x;
    sdpa.seq = LONG;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&sdpa));
    sdpa.seq = 0, sdpa.source_seq = LONG;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&sdpa));
    sdpa.seq = LONG;
    ASSERT_STATUS(MHA_ERR_CONFLICT, mha_sdpa(&sdpa));
    sdpa.batch = 0;
    ASSERT_STATUS(MHA_OK, mha_sdpa(&sdpa));
    mha_layer_free(layer);
    PASS();
}

TEST project_out_alone(void)
{
    float w[16] = { 0 }, x[4] = { 0 }, y[4] = { 1, 1, 1, 1 };
    mha_config cfg = { 0 };
    mha_weights weights = { 0 };
    mha_layer *layer;
    mha_cache *cache;
    mha_cache_config cache_cfg = { 0 };
    mha_args a = { 0 };
    cfg.d_model = 4, cfg.n_heads = 1;
    cache_cfg.batch = cache_cfg.capacity = 1;
    weights.q = weights.k = weights.v = weights.out = w;
    ASSERT_STATUS(MHA_OK, mha_layer_create(&layer, &cfg, &weights));
    ASSERT_STATUS(MHA_OK, mha_cache_create(&cache, layer, &cache_cfg));
    a.batch = a.seq = 1, a.x = x, a.y = y, a.cache = cache;
    ASSERT_STATUS(MHA_OK, mha_forward(layer, &a));
    ASSERT_STATUS(MHA_ERR_FULL, mha_forward(layer, &a));
    a.source_seq = 7;
    y[0] = 1.0f;
    ASSERT_STATUS(MHA_OK, mha_project_out(layer, &a, x));
    ASSERT(y[0] == 0.0f);
    mha_cache_free(cache);
    mha_layer_free(layer);
    PASS();
}

SUITE(errors_suite)
{
    memset(bytes_of_ones, 1, sizeof bytes_of_ones);
    RUN_CASES(layer_arguments, layer_cases)
    RUN_TEST(layer_pointers);
    RUN_TEST(layer_defaults);
    RUN_TEST(rope_defaults);
    RUN_TEST(outputs_are_not_inputs);
    RUN_CASES(forward_arguments, call_cases)
    RUN_TEST(workspace_numbers);
    RUN_TEST(workspace_overflow);
    RUN_TEST(workspace_size_pointers);
    RUN_TEST(empty_but_enormous);
    RUN_TEST(sizes_without_tensors);
    RUN_TEST(scale_next_to_flt_max);
    RUN_TEST(project_out_alone);
    RUN_TEST(no_workspace_allocates);
    RUN_TEST(empty_may_be_null);
    RUN_CASES(project_qkv_arguments, qkv_cases)
    RUN_CASES(project_out_arguments, out_cases)
    RUN_CASES(sdpa_arguments, sdpa_cases)
    RUN_TEST(sdpa_size_pointer);
    RUN_TEST(sizes_untouched);
    RUN_CASES(rotate_arguments, rotate_cases)
    RUN_TEST(slopes_arguments);
    RUN_CASES(merge_arguments, merge_cases)
    RUN_CASES(heads_arguments, heads_cases)
    RUN_CASES(fuse_heads_arguments, fuse_cases)
    RUN_TEST(strerror_sentences);
    RUN_TEST(isa_names);
    RUN_TEST(pool_arguments);
}
