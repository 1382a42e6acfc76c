/* test_golden.c - PyTorch's numbers: golden/make_golden.py wrote them, with the format. */
#include "test.h"

static const char *const names[] = { "mha_attn_mask_bool",
                                     "mha_attn_mask_bool_3d",
                                     "mha_attn_mask_float",
                                     "mha_bias",
                                     "mha_cross",
                                     "mha_kdim_vdim",
                                     "mha_key_padding",
                                     "mha_larger",
                                     "mha_need_weights",
                                     "mha_need_weights_heads",
                                     "mha_nobias",
                                     "mha_padding_and_causal",
                                     "sdpa_bool_mask",
                                     "sdpa_causal_lower_right",
                                     "sdpa_causal_square",
                                     "sdpa_causal_upper_left",
                                     "sdpa_dv",
                                     "sdpa_float_mask",
                                     "sdpa_gqa",
                                     "sdpa_long",
                                     "sdpa_mqa_causal",
                                     "sdpa_plain",
                                     "sdpa_scale" };

/* ---- reading ----------------------------------------------------------------------------- */

typedef struct item {
    char name[32];
    int ndim, dim[4]; /* ndim 0: a number, in value */
    double value;
    size_t n;
    double *data;
} item;

typedef struct golden {
    item items[32];
    int count;
} golden;

static void golden_free(golden *g)
{
    int i;
    for (i = 0; i < g->count; i++) free(g->items[i].data);
    g->count = 0;
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

    g->count = 0;
    if (!dir || !*dir) dir = "tests/golden";
    snprintf(path, sizeof path, "%s/%s.txt", dir, name);
    f = fopen(path, "r");
    if (!f) {
        printf("\n  cannot open %s (MHA_TEST_GOLDEN names its folder)\n", path);
        return "a golden file is missing";
    }
    while (word(f, kind, (int)sizeof kind)) {
        item *t = &g->items[g->count];
        double d = 0;
        size_t i;
        if (g->count == 32) break;
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

static int get_int(const golden *g, const char *name)
{
    const item *t = find(g, name);
    return t && t->ndim == 0 ? (int)t->value : -1;
}

/* The tensor as floats, to be freed; null if the file has none. */
static float *get_floats(const golden *g, const char *name)
{
    const item *t = find(g, name);
    float *f;
    size_t i;
    if (!t) return NULL;
    f = test_floats(t->n, 0);
    for (i = 0; i < t->n; i++) f[i] = (float)t->data[i];
    return f;
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

/* allow and key_allow, combined into one [B,H,T,S]; to be freed. Null if there is neither. */
static unsigned char *get_allow(const golden *g, int B, int H, int T, int S)
{
    const item *allow = find(g, "allow"), *keys = find(g, "key_allow");
    const size_t n = (size_t)B * (size_t)H * (size_t)T * (size_t)S;
    mha_mask_stride s = { 0, 0, 0, 0 };
    unsigned char *out, *p;
    int b, h, i, j;
    if (!allow && !keys) return NULL;
    if (allow) s = strides(allow);
    out = (unsigned char *)malloc(n + 1);
    if (!out) abort();
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

/* ---- comparing --------------------------------------------------------------------------- */

/* The tolerances are those of mha.h's promises: 2e-6 max|v| for mha_sdpa, 1e-5 max|y| for a
   layer; attention weights are at most 1 and take the same factors. The golden numbers are
   float64 results rounded to float32, which costs at most 6e-8. */
#define COMPARE(g, name, got, tol) \
    do { \
        const item *want_ = find((g), (name)); \
        if (want_) ASSERT_CLOSE((got), want_->data, want_->n, (tol)); \
    } while (0)

static enum greatest_test_res compare_sdpa(const golden *g, mha_sdpa_args *a)
{
    ASSERT(find(g, "q") && find(g, "k") && find(g, "v") && find(g, "o"));
    ASSERT_EQ(MHA_OK, mha_sdpa(a));
    COMPARE(g, "o", a->o, 2e-6 * max_abs(find(g, "v")->data, find(g, "v")->n));
    if (find(g, "lse"))
        COMPARE(g, "lse", a->lse, 1e-6 * (1 + max_abs(find(g, "lse")->data, find(g, "lse")->n)));
    PASS();
}

TEST sdpa(const golden *g, mha_isa isa)
{
    enum greatest_test_res result;
    mha_sdpa_args a;
    float *q = get_floats(g, "q"), *k = get_floats(g, "k"), *v = get_floats(g, "v");
    float *bias = get_floats(g, "bias");
    unsigned char *allow;

    memset(&a, 0, sizeof a);
    a.batch = get_int(g, "batch");
    a.heads = get_int(g, "heads");
    a.kv_heads = get_int(g, "kv_heads");
    a.seq = get_int(g, "seq");
    a.source_seq = get_int(g, "source_seq");
    a.d_k = get_int(g, "d_k");
    a.d_v = get_int(g, "d_v");
    a.scale = find(g, "scale") ? (float)find(g, "scale")->value : 0;
    a.mask.causal = (mha_causal)get_int(g, "causal");
    a.q = q;
    a.k = k;
    a.v = v;
    a.o = test_floats((size_t)(a.batch * a.heads * a.seq * a.d_v), 0);
    a.lse = test_floats((size_t)(a.batch * a.heads * a.seq), 0);
    a.isa = isa;
    a.mask.allow = allow = get_allow(g, a.batch, a.heads, a.seq, a.source_seq);
    if (allow) a.mask.allow_stride = full(a.heads, a.seq, a.source_seq);
    a.mask.bias = bias;
    if (bias) a.mask.bias_stride = strides(find(g, "bias"));

    result = compare_sdpa(g, &a);
    free(q);
    free(k);
    free(v);
    free(bias);
    free(allow);
    free(a.o);
    free(a.lse);
    return result;
}

static enum greatest_test_res compare_layer(const golden *g, const mha_config *cfg,
                                            const mha_weights *w, const mha_args *a)
{
    mha_layer *layer;
    mha_status status;
    ASSERT(find(g, "y") && a->x && w->out);
    ASSERT_EQ(MHA_OK, mha_layer_create(&layer, cfg, w));
    status = mha_forward(layer, a);
    mha_layer_free(layer);
    ASSERT_EQ(MHA_OK, status);
    COMPARE(g, "y", a->y, 1e-5 * max_abs(find(g, "y")->data, find(g, "y")->n));
    COMPARE(g, "attn", a->attn, 1e-5);
    COMPARE(g, "attn_mean", a->attn_mean, 1e-5);
    PASS();
}

TEST layer(const golden *g, mha_isa isa)
{
    static const char *const w_name[] = {
        "in_proj_weight", "q_proj_weight",   "k_proj_weight", "v_proj_weight",
        "in_proj_bias",   "out_proj_weight", "out_proj_bias", "x",
        "source",         "source_v",        "bias"
    };
    enum greatest_test_res result;
    mha_config cfg;
    mha_weights w;
    mha_args a;
    float *t[11];
    unsigned char *allow;
    size_t cells;
    int i;

    for (i = 0; i < 11; i++) t[i] = get_floats(g, w_name[i]);
    memset(&cfg, 0, sizeof cfg);
    memset(&w, 0, sizeof w);
    memset(&a, 0, sizeof a);
    cfg.d_model = get_int(g, "d_model");
    cfg.n_heads = get_int(g, "n_heads");
    cfg.d_source = get_int(g, "d_source");
    cfg.d_source_v = get_int(g, "d_source_v");
    cfg.isa = isa;
    w.layout = MHA_OUT_IN;
    w.qkv = t[0];
    w.q = t[1];
    w.k = t[2];
    w.v = t[3];
    w.out = t[5];
    w.b_out = t[6];
    if (t[4] && w.qkv) {
        w.b_qkv = t[4];
    } else if (t[4]) {
        w.b_q = t[4];
        w.b_k = t[4] + cfg.d_model;
        w.b_v = t[4] + 2 * cfg.d_model;
    }
    a.batch = get_int(g, "batch");
    a.seq = get_int(g, "seq");
    a.source_seq = get_int(g, "source_seq");
    a.x = t[7];
    a.source = t[8];
    a.source_v = t[9];
    a.mask.allow = allow = get_allow(g, a.batch, cfg.n_heads, a.seq, a.source_seq);
    if (allow) a.mask.allow_stride = full(cfg.n_heads, a.seq, a.source_seq);
    a.mask.bias = t[10];
    if (t[10]) a.mask.bias_stride = strides(find(g, "bias"));
    cells = (size_t)a.batch * (size_t)a.seq;
    a.y = test_floats(cells * (size_t)cfg.d_model, 0);
    a.attn = test_floats(cells * (size_t)cfg.n_heads * (size_t)a.source_seq, 0);
    a.attn_mean = test_floats(cells * (size_t)a.source_seq, 0);
    if (!find(g, "attn")) free(a.attn), a.attn = NULL;
    if (!find(g, "attn_mean")) free(a.attn_mean), a.attn_mean = NULL;

    result = compare_layer(g, &cfg, &w, &a);
    for (i = 0; i < 11; i++) free(t[i]);
    free(allow);
    free(a.y);
    free(a.attn);
    free(a.attn_mean);
    return result;
}

TEST golden_case(const char *name, mha_isa isa)
{
    enum greatest_test_res result;
    golden g;
    const char *error = golden_read(&g, name);
    if (error) {
        golden_free(&g);
        FAILm(error);
    }
    result = strncmp(name, "mha_", 4) == 0 ? layer(&g, isa) : sdpa(&g, isa);
    golden_free(&g);
    return result;
}

SUITE(golden_suite)
{
    mha_isa isa[8];
    char suffix[64];
    int i, c, n = test_isas(isa);
    for (c = 0; c < (int)(sizeof names / sizeof names[0]); c++)
        for (i = 0; i < n; i++) {
            snprintf(suffix, sizeof suffix, "%s_%s", names[c], mha_isa_name(isa[i]));
            greatest_set_test_suffix(suffix);
            RUN_TESTp(golden_case, names[c], isa[i]);
        }
}
