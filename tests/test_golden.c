/* test_golden.c - other people's numbers: golden/make_golden.py wrote them, with the format. */
#include "test.h"

/* How the tokens of a layer come to it. */
typedef enum how {
    WHOLE = 0,
    CACHED = 1,   /* also one or two at a time, through a cache */
    RING = 2,     /* also through a cache that keeps no more than the window needs */
    APPENDED = 4, /* also the source into a cache first, then the queries one by one */
    NO_ISA = 8    /* calls without an isa: once is enough */
} how;

typedef struct golden_file {
    const char *name;
    int how;
} golden_file;

static const golden_file files[] = { { "layer_gemma2", CACHED | RING },
                                     { "layer_glm", CACHED },
                                     { "layer_gpt_oss", CACHED | RING },
                                     { "layer_llama", CACHED },
                                     { "layer_llama_linear", CACHED },
                                     { "layer_llama_llama3", CACHED },
                                     { "layer_llama_ntk", CACHED },
                                     { "layer_llama_ragged", CACHED },
                                     { "layer_llama_yarn", CACHED },
                                     { "layer_meta", CACHED },
                                     { "layer_meta_cross", APPENDED },
                                     { "layer_mistral", CACHED | RING },
                                     { "layer_mpt", CACHED },
                                     { "layer_phi", CACHED },
                                     { "layer_qwen3", CACHED },
                                     { "mha_attn_mask_bool", WHOLE },
                                     { "mha_attn_mask_bool_3d", WHOLE },
                                     { "mha_attn_mask_float", WHOLE },
                                     { "mha_bias", WHOLE },
                                     { "mha_bias_kv", APPENDED },
                                     { "mha_bias_kv_zero_attn", WHOLE },
                                     { "mha_cross", APPENDED },
                                     { "mha_kdim_vdim", APPENDED },
                                     { "mha_key_padding", WHOLE },
                                     { "mha_larger", WHOLE },
                                     { "mha_need_weights", WHOLE },
                                     { "mha_need_weights_heads", WHOLE },
                                     { "mha_nobias", WHOLE },
                                     { "mha_padding_and_causal", WHOLE },
                                     { "mha_zero_attn", WHOLE },
                                     { "onnx_attention_causal", WHOLE },
                                     { "onnx_attention_lengths", WHOLE },
                                     { "onnx_attention_past", WHOLE },
                                     { "onnx_attention_softcap_mask", WHOLE },
                                     { "onnx_attention_window", WHOLE },
                                     { "onnx_rotary_half", NO_ISA },
                                     { "onnx_rotary_interleaved", NO_ISA },
                                     { "ort_gqa", WHOLE },
                                     { "ort_gqa_interleaved", WHOLE },
                                     { "ort_gqa_lengths", WHOLE },
                                     { "ort_gqa_past", WHOLE },
                                     { "ort_gqa_rotary", WHOLE },
                                     { "ort_gqa_sink", WHOLE },
                                     { "ort_mha", WHOLE },
                                     { "ort_mha_bias", WHOLE },
                                     { "rope_half", NO_ISA },
                                     { "rope_half_partial", NO_ISA },
                                     { "rope_interleaved", NO_ISA },
                                     { "rope_interleaved_partial", NO_ISA },
                                     { "rope_linear", NO_ISA },
                                     { "rope_llama3", NO_ISA },
                                     { "rope_llama3_bands", NO_ISA },
                                     { "rope_ntk", NO_ISA },
                                     { "rope_ntk_partial", NO_ISA },
                                     { "rope_yarn", NO_ISA },
                                     { "rope_yarn_betas", NO_ISA },
                                     { "rope_yarn_short", NO_ISA },
                                     { "sdpa_alibi_12", WHOLE },
                                     { "sdpa_alibi_8", WHOLE },
                                     { "sdpa_alibi_both_ways", WHOLE },
                                     { "sdpa_bool_mask", WHOLE },
                                     { "sdpa_causal_lower_right", WHOLE },
                                     { "sdpa_causal_square", WHOLE },
                                     { "sdpa_causal_upper_left", WHOLE },
                                     { "sdpa_dv", WHOLE },
                                     { "sdpa_everything", WHOLE },
                                     { "sdpa_float_mask", WHOLE },
                                     { "sdpa_gemma2", WHOLE },
                                     { "sdpa_gpt_oss", WHOLE },
                                     { "sdpa_gqa", WHOLE },
                                     { "sdpa_long", WHOLE },
                                     { "sdpa_mqa_causal", WHOLE },
                                     { "sdpa_plain", WHOLE },
                                     { "sdpa_ragged", WHOLE },
                                     { "sdpa_scale", WHOLE },
                                     { "sdpa_sink", WHOLE },
                                     { "sdpa_softcap", WHOLE },
                                     { "sdpa_window", WHOLE },
                                     { "sdpa_window_left", WHOLE },
                                     { "sdpa_window_long", WHOLE },
                                     { "sdpa_window_more_queries", WHOLE },
                                     { "sdpa_window_right", WHOLE } };

/* ---- reading ----------------------------------------------------------------------------- */

enum { MAX_ITEMS = 48, MAX_KEPT = 64 };

typedef struct item {
    char name[32];
    int ndim, dim[4]; /* ndim 0: a number, in value */
    double value;
    size_t n;
    double *data;
} item;

typedef struct golden {
    item items[MAX_ITEMS];
    int count;
    void *kept[MAX_KEPT]; /* what the test allocates, freed with the file */
    int n_kept;
} golden;

static void golden_free(golden *g)
{
    int i;
    for (i = 0; i < g->count; i++) free(g->items[i].data);
    for (i = 0; i < g->n_kept; i++) free(g->kept[i]);
    g->count = g->n_kept = 0;
}

static void *keep(golden *g, void *p)
{
    if (!p || g->n_kept == MAX_KEPT) abort();
    g->kept[g->n_kept++] = p;
    return p;
}

static const item *find(const golden *g, const char *name)
{
    int i;
    for (i = 0; i < g->count; i++)
        if (strcmp(g->items[i].name, name) == 0) return &g->items[i];
    return NULL;
}

/* The next word that is not in a comment; 0 at the end of the file. */
static int word(FILE *f, char *buf, int size)
{
    int c, n = 0;
    for (;;) {
        do c = getc(f);
        while (c == ' ' || c == '\n' || c == '\r' || c == '\t');
        if (c != '#') break;
        do c = getc(f);
        while (c != '\n' && c != EOF);
    }
    for (; c != EOF && c != ' ' && c != '\n' && c != '\r' && c != '\t'; c = getc(f))
        if (n < size - 1) buf[n++] = (char)c;
    buf[n] = 0;
    return n;
}

static int number(FILE *f, double *value)
{
    char buf[64], *end;
    if (!word(f, buf, (int)sizeof buf)) return 0;
    *value = strtod(buf, &end); /* knows "inf" and "-inf" */
    return *end == 0;
}

/* Null, or what is wrong with the file. */
static const char *golden_read(golden *g, const char *name)
{
    const char *dir = getenv("MHA_TEST_GOLDEN");
    char path[1024], kind[16];
    FILE *f;

    g->count = g->n_kept = 0;
    if (!dir || !*dir) dir = "tests/golden";
    snprintf(path, sizeof path, "%s/%s.txt", dir, name);
    f = fopen(path, "r");
    if (!f) {
        printf("\n  cannot open %s (MHA_TEST_GOLDEN names its folder)\n", path);
        return "a golden file is missing";
    }
    while (word(f, kind, (int)sizeof kind)) {
        item *t;
        double d = 0;
        size_t i;
        if (g->count == MAX_ITEMS) break;
        t = &g->items[g->count];
        memset(t, 0, sizeof *t);
        if (!word(f, t->name, (int)sizeof t->name)) break;
        if (strcmp(kind, "int") == 0 || strcmp(kind, "float") == 0) {
            if (!number(f, &t->value)) break;
        } else if (strcmp(kind, "tensor") == 0) {
            if (!number(f, &d) || d < 1 || d > 4) break;
            t->ndim = (int)d;
            t->n = 1;
            for (i = 0; i < (size_t)t->ndim; i++) {
                if (!number(f, &d) || d < 0 || d > 100000) break;
                t->dim[i] = (int)d;
                t->n *= (size_t)d;
            }
            if (i < (size_t)t->ndim) break;
            t->data = (double *)malloc((t->n + 1) * sizeof *t->data);
            if (!t->data) break;
            for (i = 0; i < t->n && number(f, &t->data[i]); i++) {}
            if (i < t->n) {
                free(t->data);
                break;
            }
        } else {
            break;
        }
        g->count++;
    }
    kind[0] = (char)(feof(f) ? 0 : 1);
    fclose(f);
    return kind[0] || g->count == 0 ? "a golden file is damaged" : NULL;
}

/* A number; 0, which is every default, if the file has none. */
static double get(const golden *g, const char *name)
{
    const item *t = find(g, name);
    return t && t->ndim == 0 ? t->value : 0;
}

static int get_int(const golden *g, const char *name)
{
    return (int)get(g, name);
}

static float get_float(const golden *g, const char *name)
{
    return (float)get(g, name);
}

/* The tensor, as floats, ints or bytes; null if the file has none. */
static float *get_floats(golden *g, const char *name)
{
    const item *t = find(g, name);
    float *f;
    size_t i;
    if (!t) return NULL;
    f = (float *)keep(g, test_floats(t->n, 0));
    for (i = 0; i < t->n; i++) f[i] = (float)t->data[i];
    return f;
}

static int *get_ints(golden *g, const char *name)
{
    const item *t = find(g, name);
    int *p;
    size_t i;
    if (!t) return NULL;
    p = (int *)keep(g, malloc((t->n + 1) * sizeof *p));
    for (i = 0; i < t->n; i++) p[i] = (int)t->data[i];
    return p;
}

static unsigned char *get_bytes(golden *g, const char *name)
{
    const item *t = find(g, name);
    unsigned char *p;
    size_t i;
    if (!t) return NULL;
    p = (unsigned char *)keep(g, malloc(t->n + 1));
    for (i = 0; i < t->n; i++) p[i] = t->data[i] > 0.5;
    return p;
}

/* Room for the result of that name; null if the file does not say what it should be. */
static float *result(golden *g, const char *name)
{
    const item *t = find(g, name);
    return t ? (float *)keep(g, test_floats(t->n, 0)) : NULL;
}

static mha_rope get_rope(const golden *g)
{
    mha_rope r;
    memset(&r, 0, sizeof r);
    r.layout = (mha_rope_layout)get_int(g, "rope_layout");
    r.width = get_int(g, "rope_width");
    r.base = get_float(g, "rope_base");
    r.scaling = (mha_rope_scaling)get_int(g, "rope_scaling");
    r.factor = get_float(g, "rope_factor");
    r.original = get_int(g, "rope_original");
    r.beta_fast = get_float(g, "rope_beta_fast");
    r.beta_slow = get_float(g, "rope_beta_slow");
    r.attention = get_float(g, "rope_attention");
    r.low_freq = get_float(g, "rope_low_freq");
    r.high_freq = get_float(g, "rope_high_freq");
    return r;
}

/* A mask's strides: [T,S], [B,T,S] or [B,H,T,S], an axis of length 1 is broadcast. */
static mha_mask_stride strides(const item *t)
{
    mha_mask_stride s = { 0, 0, 0, 0 };
    ptrdiff_t step = 1, by[4] = { 0, 0, 0, 0 };
    int i;
    for (i = t->ndim - 1; i >= 0; i--) {
        by[i] = t->dim[i] == 1 ? 0 : step;
        step *= t->dim[i];
    }
    s.key = by[t->ndim - 1];
    s.query = by[t->ndim - 2];
    if (t->ndim == 4) s.head = by[1];
    if (t->ndim > 2) s.batch = by[0];
    return s;
}

/* allow and key_allow, combined into one [B,H,T,S]. Null if there is neither. */
static unsigned char *get_allow(golden *g, int B, int H, int T, int S)
{
    const item *allow = find(g, "allow"), *keys = find(g, "key_allow");
    const size_t n = (size_t)B * (size_t)H * (size_t)T * (size_t)S;
    mha_mask_stride s = { 0, 0, 0, 0 };
    unsigned char *out, *p;
    int b, h, i, j;
    if (!allow && !keys) return NULL;
    if (allow) s = strides(allow);
    out = (unsigned char *)keep(g, malloc(n + 1));
    p = out;
    for (b = 0; b < B; b++)
        for (h = 0; h < H; h++)
            for (i = 0; i < T; i++)
                for (j = 0; j < S; j++) {
                    int yes = 1;
                    if (allow)
                        yes = allow->data[b * s.batch + h * s.head + i * s.query + j * s.key] > 0.5;
                    if (keys) yes = yes && keys->data[b * S + j] > 0.5;
                    *p++ = (unsigned char)yes;
                }
    return out;
}

static mha_mask_stride full(int H, int T, int S)
{
    mha_mask_stride s;
    s.batch = (ptrdiff_t)H * T * S;
    s.head = (ptrdiff_t)T * S;
    s.query = S;
    s.key = 1;
    return s;
}

static mha_mask get_mask(golden *g, int B, int H, int T, int S)
{
    mha_mask m;
    memset(&m, 0, sizeof m);
    m.causal = (mha_causal)get_int(g, "causal");
    m.allow = get_allow(g, B, H, T, S);
    if (m.allow) m.allow_stride = full(H, T, S);
    m.bias = get_floats(g, "bias");
    if (m.bias) m.bias_stride = strides(find(g, "bias"));
    m.key_len = get_ints(g, "key_len");
    m.key_padding = get_bytes(g, "key_padding");
    m.windowed = get_int(g, "windowed");
    m.left = get_int(g, "left");
    m.right = get_int(g, "right");
    return m;
}

/* Of [B,T,H,d]; zero, the default, for [B,H,T,d]. */
static mha_stride heads_last(const golden *g, int T, int H, int d)
{
    mha_stride s = { 0, 0, 0 };
    if (get_int(g, "heads_last")) {
        s.batch = (ptrdiff_t)T * H * d;
        s.head = d;
        s.seq = (ptrdiff_t)H * d;
    }
    return s;
}

/* ---- comparing --------------------------------------------------------------------------- */

/* The tolerances are those of mha.h's promises: 2e-6 max|v| for mha_sdpa, 1e-5 max|y| for a
   layer; attention weights are at most 1 and take the same factors. The golden numbers are
   float64 results rounded to float32, which costs at most 6e-8; those of ONNX Runtime, float32
   throughout, are within 3e-7 of the exact ones. */
#define COMPARE(g, name, got, tol) \
    do { \
        const item *want_ = find((g), (name)); \
        if (want_) ASSERT_CLOSE((got), want_->data, want_->n, (tol)); \
    } while (0)

/* If the file's slopes are the usual ones, they are those of mha_alibi_slopes. */
static enum greatest_test_res compare_slopes(golden *g, int heads)
{
    const item *want = find(g, "alibi");
    float *got = result(g, "alibi");
    size_t i;
    if (!get_int(g, "usual_slopes")) PASS();
    ASSERT(want && want->n == (size_t)heads);
    ASSERT_EQ(MHA_OK, mha_alibi_slopes(heads, got));
    for (i = 0; i < want->n; i++)
        ASSERT(fabs((double)got[i] - want->data[i]) <= 1.2e-7 * want->data[i]);
    PASS();
}

/* x0 cos - x1 sin, with cos and sin rounded to float: three roundings of each product's size, and
   one of the golden number. 4 * 2^-24 * sqrt(2) max|x|, times what multiplies cos and sin. */
static double rotation_error(const item *x, const mha_rope *rope)
{
    double times = 1;
    if (rope->scaling == MHA_ROPE_YARN) times = 0.1 * log((double)rope->factor) + 1;
    if (rope->attention > 0) times = (double)rope->attention;
    return 3.4e-7 * max_abs(x->data, x->n) * times;
}

TEST rotation(golden *g)
{
    const item *x = find(g, "x");
    const mha_rope rope = get_rope(g);
    const int B = get_int(g, "batch"), H = get_int(g, "heads"), T = get_int(g, "seq"),
              d = get_int(g, "d");
    float *y = get_floats(g, "x");
    ASSERT(x && find(g, "rotated"));
    ASSERT_EQ(MHA_OK,
              mha_rotate(&rope, B, H, T, d, y, heads_last(g, T, H, d), get_ints(g, "positions")));
    COMPARE(g, "rotated", y, rotation_error(x, &rope));
    PASS();
}

/* past [B,G,P,d] and now [B,G,T,d], one after the other. */
static float *join(golden *g, int BG, int P, int T, int d, const float *past, const float *now)
{
    const size_t p = (size_t)P * (size_t)d, t = (size_t)T * (size_t)d;
    float *out = (float *)keep(g, test_floats((size_t)BG * (p + t), 0));
    size_t i;
    for (i = 0; i < (size_t)BG; i++) {
        memcpy(out + i * (p + t), past + i * p, p * sizeof *out);
        memcpy(out + i * (p + t) + p, now + i * t, t * sizeof *out);
    }
    return out;
}

TEST sdpa(golden *g, mha_isa isa)
{
    const mha_rope rope = get_rope(g);
    const item *values = find(g, "v"), *past = find(g, "past_k");
    mha_sdpa_args a;
    float *q = get_floats(g, "q"), *k = get_floats(g, "k"), *v = get_floats(g, "v");
    const int *positions = get_ints(g, "positions");
    int now;

    ASSERT(q && k && v && find(g, "o"));
    memset(&a, 0, sizeof a);
    a.batch = get_int(g, "batch");
    a.heads = get_int(g, "heads");
    a.kv_heads = get_int(g, "kv_heads");
    a.seq = get_int(g, "seq");
    a.source_seq = get_int(g, "source_seq");
    a.d_k = get_int(g, "d_k");
    a.d_v = get_int(g, "d_v");
    a.scale = get_float(g, "scale");
    a.softcap = get_float(g, "softcap");
    a.alibi = get_floats(g, "alibi");
    a.sink = get_floats(g, "sink");
    a.cu_seq = get_ints(g, "cu_seq");
    a.cu_source = get_ints(g, "cu_source");
    a.mask = get_mask(g, a.batch, a.heads, a.seq, a.source_seq);
    a.isa = isa;
    now = past ? a.source_seq - past->dim[2] : a.source_seq;
    a.q_stride = heads_last(g, a.seq, a.heads, a.d_k);
    a.k_stride = heads_last(g, now, a.kv_heads, a.d_k);
    a.v_stride = heads_last(g, now, a.kv_heads, a.d_v);
    a.o_stride = heads_last(g, a.seq, a.heads, a.d_v);
    if (rope.layout) {
        ASSERT_EQ(MHA_OK,
                  mha_rotate(&rope, a.batch, a.heads, a.seq, a.d_k, q, a.q_stride, positions));
        ASSERT_EQ(MHA_OK,
                  mha_rotate(&rope, a.batch, a.kv_heads, now, a.d_k, k, a.k_stride, positions));
    }
    if (past) {
        const int pairs = a.batch * a.kv_heads, P = past->dim[2];
        k = join(g, pairs, P, now, a.d_k, get_floats(g, "past_k"), k);
        v = join(g, pairs, P, now, a.d_v, get_floats(g, "past_v"), v);
    }
    a.q = q;
    a.k = k;
    a.v = v;
    a.o = result(g, "o");
    a.lse = (float *)keep(g, test_floats(find(g, "o")->n / (size_t)a.d_v, 0));

    ASSERT_EQ(MHA_OK, mha_sdpa(&a));
    COMPARE(g, "o", a.o, 2e-6 * max_abs(values->data, values->n));
    if (find(g, "lse"))
        COMPARE(g, "lse", a.lse, 1e-6 * (1 + max_abs(find(g, "lse")->data, find(g, "lse")->n)));
    return compare_slopes(g, a.heads);
}

/* ---- layers ------------------------------------------------------------------------------ */

/* Rows of x (or source, ...) of every sequence, a few at a time. */
typedef struct rows {
    int batch, width;
    const int *cu; /* null: all of the same length */
    int length;
} rows;

static int row_begin(const rows *r, int b)
{
    return r->cu ? r->cu[b] : b * r->length;
}

static int row_count(const rows *r, int b)
{
    return r->cu ? r->cu[b + 1] - r->cu[b] : r->length;
}

/* Tokens at .. at+n-1 of each sequence, as far as it has them: from all to some (or back), some's
   sequences without padding. cu, if not null, gets where they begin. Returns how many there are. */
static int take(const rows *r, int at, int n, float *all, float *some, int back, int *cu)
{
    int b, i, count = 0;
    for (b = 0; b < r->batch; b++) {
        if (cu) cu[b] = count;
        for (i = at; i < at + n && i < row_count(r, b); i++, count++) {
            float *p = all + (ptrdiff_t)(row_begin(r, b) + i) * r->width;
            float *q = some + (ptrdiff_t)count * r->width;
            memcpy(back ? p : q, back ? q : p, (size_t)r->width * sizeof *p);
        }
    }
    if (cu) cu[r->batch] = count;
    return count;
}

static int *take_ints(golden *g, const rows *r, int at, int n, const int *all)
{
    int *out = (int *)keep(g, malloc((size_t)(r->batch * n + 1) * sizeof *out));
    int b, i, count = 0;
    for (b = 0; b < r->batch; b++)
        for (i = at; i < at + n && i < row_count(r, b); i++)
            out[count++] = all[row_begin(r, b) + i];
    return out;
}

/* The queries of whole, two, one, two, ... of each sequence at a time: with cache_only or not. */
static mha_status forward_in_steps(golden *g, const mha_layer *layer, const mha_args *whole)
{
    const int D = mha_layer_config(layer)->d_model, B = whole->batch;
    rows r;
    int *cu = whole->cu_seq ? (int *)keep(g, malloc((size_t)(B + 1) * sizeof *cu)) : NULL;
    float *x = (float *)keep(g, test_floats((size_t)(B * 2 * D), 0));
    float *y = (float *)keep(g, test_floats((size_t)(B * 2 * D), 0));
    float *all_x = get_floats(g, "x");
    int at, n;

    r.batch = B;
    r.width = D;
    r.cu = whole->cu_seq;
    r.length = whole->seq;
    for (at = 0, n = 2;; at += n, n = 3 - n) {
        mha_args a = *whole;
        mha_status status;
        int b, count = take(&r, at, n, all_x, x, 0, cu);
        if (count == 0) return MHA_OK;
        a.x = x;
        a.y = y;
        a.source_seq = 0;
        a.attn = a.attn_mean = NULL;
        if (cu) {
            a.cu_seq = cu;
            a.seq = count;
        } else {
            a.seq = count / B;
        }
        if (whole->positions) a.positions = take_ints(g, &r, at, n, whole->positions);
        for (b = 0; !whole->cache_only && b < B; b++) {
            int before = at < row_count(&r, b) ? at : row_count(&r, b);
            if (mha_cache_length(whole->cache, b) != before) return MHA_ERR_SIZE;
        }
        status = mha_forward(layer, &a);
        if (status != MHA_OK) return status;
        take(&r, at, n, whole->y, y, 1, NULL);
    }
}

/* The source into the cache, two tokens and then the others; then the queries. */
static mha_status append_then_forward(golden *g, const mha_layer *layer, const mha_args *whole)
{
    const mha_config *cfg = mha_layer_config(layer);
    mha_args a = *whole;
    float *source = get_floats(g, "source"), *source_v = get_floats(g, "source_v");
    rows k, v;
    int at, n;

    k.batch = whole->batch;
    k.width = cfg->d_source;
    k.cu = NULL;
    k.length = whole->source_seq;
    v = k;
    v.width = cfg->d_source_v;
    for (at = 0, n = 2; at < whole->source_seq; at += n, n = whole->source_seq - at) {
        mha_status status;
        const size_t tokens = (size_t)(whole->batch * n);
        float *some = (float *)keep(g, test_floats(tokens * (size_t)k.width, 0));
        float *some_v = (float *)keep(g, test_floats(tokens * (size_t)v.width, 0));
        mha_args s;
        memset(&s, 0, sizeof s);
        s.batch = whole->batch;
        s.source_seq = n;
        s.cache = whole->cache;
        take(&k, at, n, source, some, 0, NULL);
        s.source = some;
        if (source_v) {
            take(&v, at, n, source_v, some_v, 0, NULL);
            s.source_v = some_v;
        }
        if (whole->source_positions)
            s.source_positions = take_ints(g, &k, at, n, whole->source_positions);
        status = mha_cache_append(layer, &s);
        if (status != MHA_OK) return status;
    }
    a.source = a.source_v = NULL;
    a.source_positions = NULL;
    a.cache_only = 1;
    return forward_in_steps(g, layer, &a);
}

static mha_status run_layer(golden *g, const mha_config *cfg, const mha_weights *w, mha_args *a,
                            how way)
{
    mha_layer *layer;
    mha_cache_config cc;
    mha_status status = mha_layer_create(&layer, cfg, w);
    int b;
    if (status != MHA_OK || way == WHOLE) {
        if (status == MHA_OK) status = mha_forward(layer, a);
        mha_layer_free(layer);
        return status;
    }
    memset(&cc, 0, sizeof cc);
    cc.batch = a->batch;
    cc.capacity = a->source ? a->source_seq : a->seq;
    if (a->cu_seq)
        for (b = 0, cc.capacity = 1; b < a->batch; b++)
            if (a->cu_seq[b + 1] - a->cu_seq[b] > cc.capacity)
                cc.capacity = a->cu_seq[b + 1] - a->cu_seq[b];
    if (way == RING) {
        cc.ring = 1;
        cc.capacity = a->mask.left + 2; /* steps are of two tokens at most */
    }
    status = mha_cache_create(&a->cache, layer, &cc);
    if (status == MHA_OK)
        status = way == APPENDED ? append_then_forward(g, layer, a) : forward_in_steps(g, layer, a);
    mha_cache_free(a->cache);
    mha_layer_free(layer);
    return status;
}

TEST layer(golden *g, mha_isa isa, how way)
{
    mha_config cfg;
    mha_weights w;
    mha_args a;
    const float *bias = get_floats(g, "in_proj_bias");

    memset(&cfg, 0, sizeof cfg);
    memset(&w, 0, sizeof w);
    memset(&a, 0, sizeof a);
    cfg.d_model = get_int(g, "d_model");
    cfg.n_heads = get_int(g, "n_heads");
    cfg.n_kv_heads = get_int(g, "n_kv_heads");
    cfg.d_k = get_int(g, "d_k");
    cfg.d_source = get_int(g, "d_source");
    cfg.d_source_v = get_int(g, "d_source_v");
    cfg.scale = get_float(g, "scale");
    cfg.isa = isa;
    cfg.rope = get_rope(g);
    cfg.softcap = get_float(g, "softcap");
    cfg.alibi = find(g, "alibi") != NULL;
    cfg.qk_norm = (mha_norm)get_int(g, "qk_norm");
    cfg.norm_eps = get_float(g, "norm_eps");
    cfg.zero_attn = get_int(g, "zero_attn");
    w.layout = MHA_OUT_IN;
    w.qkv = get_floats(g, "in_proj_weight");
    w.q = get_floats(g, "q_proj_weight");
    w.k = get_floats(g, "k_proj_weight");
    w.v = get_floats(g, "v_proj_weight");
    w.out = get_floats(g, "out_proj_weight");
    w.b_q = get_floats(g, "q_proj_bias");
    w.b_k = get_floats(g, "k_proj_bias");
    w.b_v = get_floats(g, "v_proj_bias");
    w.b_out = get_floats(g, "out_proj_bias");
    if (bias && w.qkv) {
        w.b_qkv = bias;
    } else if (bias) {
        w.b_q = bias;
        w.b_k = bias + cfg.d_model;
        w.b_v = bias + 2 * cfg.d_model;
    }
    w.bias_k = get_floats(g, "bias_k");
    w.bias_v = get_floats(g, "bias_v");
    w.q_norm = get_floats(g, "q_norm");
    w.k_norm = get_floats(g, "k_norm");
    w.q_norm_bias = get_floats(g, "q_norm_bias");
    w.k_norm_bias = get_floats(g, "k_norm_bias");
    w.sink = get_floats(g, "sink");
    if (!get_int(g, "usual_slopes")) w.alibi = get_floats(g, "alibi");
    a.batch = get_int(g, "batch");
    a.seq = get_int(g, "seq");
    a.x = get_floats(g, "x");
    a.source = get_floats(g, "source");
    a.source_v = get_floats(g, "source_v");
    a.cu_seq = get_ints(g, "cu_seq");
    a.source_seq = a.cu_seq ? 0 : get_int(g, "source_seq");
    a.positions = get_ints(g, "positions");
    a.source_positions = get_ints(g, "source_positions");
    a.mask = get_mask(g, a.batch, cfg.n_heads, a.seq, a.source_seq);
    a.y = result(g, "y");
    a.attn = result(g, "attn");
    a.attn_mean = result(g, "attn_mean");

    ASSERT(a.x && a.y && w.out);
    ASSERT_EQ(MHA_OK, run_layer(g, &cfg, &w, &a, way));
    COMPARE(g, "y", a.y, 1e-5 * max_abs(find(g, "y")->data, find(g, "y")->n));
    if (way == WHOLE) {
        COMPARE(g, "attn", a.attn, 1e-5);
        COMPARE(g, "attn_mean", a.attn_mean, 1e-5);
    }
    return compare_slopes(g, cfg.n_heads);
}

TEST golden_case(const char *name, mha_isa isa, how way)
{
    enum greatest_test_res res;
    golden g;
    const char *error = golden_read(&g, name);
    if (error) {
        golden_free(&g);
        FAILm(error);
    }
    res = find(&g, "d_model")   ? layer(&g, isa, way)
          : find(&g, "rotated") ? rotation(&g)
                                : sdpa(&g, isa);
    golden_free(&g);
    return res;
}

static void run_case(const golden_file *file, mha_isa isa, how way, const char *way_name)
{
    char suffix[64];
    snprintf(suffix, sizeof suffix, "%s%s%s%s", file->name, way_name,
             file->how == NO_ISA ? "" : "_", file->how == NO_ISA ? "" : mha_isa_name(isa));
    greatest_set_test_suffix(suffix);
    RUN_TESTp(golden_case, file->name, isa, way);
}

SUITE(golden_suite)
{
    mha_isa isa[8];
    int i, c, n = test_isas(isa);
    for (c = 0; c < (int)(sizeof files / sizeof files[0]); c++)
        for (i = 0; i < (files[c].how == NO_ISA ? 1 : n); i++) {
            run_case(&files[c], isa[i], WHOLE, "");
            if (files[c].how & CACHED) run_case(&files[c], isa[i], CACHED, "_cached");
            if (files[c].how & RING) run_case(&files[c], isa[i], RING, "_ring");
            if (files[c].how & APPENDED) run_case(&files[c], isa[i], APPENDED, "_appended");
        }
}
