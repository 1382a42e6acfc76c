/* decoder_layer.c - one layer of a Transformer decoder on mha.h

       post-norm:  h = LayerNorm(x + SelfAttention(x))   pre-norm:  h = x + SelfAttention(Norm(x))
                   g = LayerNorm(h + CrossAttention(h))             g = h + CrossAttention(Norm(h))
                   y = LayerNorm(g + FeedForward(g))                y = g + FeedForward(Norm(g))

   Self-attention looks at the target so far, cross-attention at the source, as its encoder left
   it: see encoder_layer.c. The first half is the layer, yours to keep. The second half runs two
   translations through it, draws what each target word looks at in the source, and checks itself.

       cc -O2 decoder_layer.c -lm && ./a.out --help                                          */

#define MHA_IMPLEMENTATION
#include "../mha.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#define stdout_is_terminal() (_isatty(1) && getenv("WT_SESSION")) /* older ones lack colours */
#else
#include <unistd.h>
#define stdout_is_terminal() isatty(1)
#endif

/* ---- the layer ------------------------------------------------------------------------ */

typedef struct decoder {
    int d_model, d_ff;             /* D, F */
    int pre_norm, gelu;            /* 0, 0: post-norm and ReLU, as in the 2017 paper */
    mha_layer *self, *cross;       /* each holds its own W_Q W_K W_V W_O */
    const float *gain[3], *off[3]; /* [D] LayerNorm of self-, cross-attention, feed-forward */
    const float *w1, *b1;          /* [D,F] [F] */
    const float *w2, *b2;          /* [F,D] [D] */
} decoder;

/* What one call attends to. Either the whole target at once, and a source of which sentence b has
   source_len[b] tokens, the rest of its S being padding; or the next tokens of a target that the
   cache self holds, and a source that decoder_read put into the cache cross. */
typedef struct context {
    int source_seq;        /* S */
    const float *source;   /* [B,S,D] */
    const int *source_len; /* [B] */
    mha_cache *self, *cross;
    float *self_attn;  /* [B,H,T,T] attention weights, on request; null with caches */
    float *cross_attn; /* [B,H,T,S] */
} context;

/* x [rows,n] -> y [rows,n], each row to mean 0 and variance 1, then * gain + off. y may be x. */
static void layer_norm(size_t rows, int n, const float *gain, const float *off, const float *x,
                       float *y)
{
    for (size_t r = 0; r < rows; r++, x += n, y += n) {
        double mean = 0, var = 0;
        for (int i = 0; i < n; i++) mean += (double)x[i] / n;
        for (int i = 0; i < n; i++) var += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
        double inv = 1 / sqrt(var + 1e-5);
        for (int i = 0; i < n; i++) y[i] = (float)(((double)x[i] - mean) * inv) * gain[i] + off[i];
    }
}

/* y [n_out] = x [n_in] * w [n_in,n_out] + b [n_out] */
static void linear(int n_in, int n_out, const float *w, const float *b, const float *x, float *y)
{
    for (int j = 0; j < n_out; j++) y[j] = b[j];
    for (int i = 0; i < n_in; i++, w += n_out)
        for (int j = 0; j < n_out; j++) y[j] += x[i] * w[j];
}

/* x [rows,D] -> y [rows,D], each position by itself. hidden [F] is scratch; y may be x. */
static void feed_forward(const decoder *m, size_t rows, const float *x, float *y, float *hidden)
{
    for (size_t r = 0; r < rows; r++, x += m->d_model, y += m->d_model) {
        linear(m->d_model, m->d_ff, m->w1, m->b1, x, hidden);
        for (int j = 0; j < m->d_ff; j++) {
            float h = hidden[j];
            hidden[j] = m->gelu ? 0.5f * h * (1 + erff(h * 0.70710678f)) : h > 0 ? h : 0;
        }
        linear(m->d_ff, m->d_model, m->w2, m->b2, hidden, y);
    }
}

/* x [B,T,D] -> y [B,T,D]. scratch [B*T*D + F]. */
static mha_status decoder_forward(const decoder *m, const context *c, int batch, int seq,
                                  const float *x, float *y, float *scratch)
{
    size_t rows = (size_t)batch * (size_t)seq, n = rows * (size_t)m->d_model;
    float *t = scratch, *hidden = scratch + n;
    mha_args self = { .batch = batch, .seq = seq, .x = t, .y = t };
    self.mask.causal = MHA_CAUSAL; /* hides padding at the target's end, too */
    self.attn = c->self_attn;
    self.cache = c->self;

    mha_args cross = { .batch = batch, .seq = seq, .x = t, .y = t };
    cross.attn = c->cross_attn;
    if (c->cross) {
        cross.cache = c->cross;
        cross.cache_only = 1;
    } else {
        cross.source = c->source;
        cross.source_seq = c->source_seq;
        cross.mask.key_len = c->source_len;
    }

    memmove(y, x, n * sizeof *y);
    for (int part = 0; part < 3; part++) { /* each: t = part(y), y = y + t, and a norm */
        const float *gain = m->gain[part], *off = m->off[part];
        mha_status st = MHA_OK;
        memcpy(t, y, n * sizeof *t);
        if (m->pre_norm) layer_norm(rows, m->d_model, gain, off, t, t);
        if (part == 0) st = mha_forward(m->self, &self);
        else if (part == 1) st = mha_forward(m->cross, &cross);
        else feed_forward(m, rows, t, t, hidden);
        if (st != MHA_OK) return st;
        for (size_t i = 0; i < n; i++) y[i] += t[i];
        if (!m->pre_norm) layer_norm(rows, m->d_model, gain, off, y, y);
    }
    return MHA_OK;
}

/* Projects a source [B,S,D] into the empty cache, once, for any number of targets or of their
   tokens, and drops its padding. */
static mha_status decoder_read(const decoder *m, mha_cache *cache, int batch, int source_seq,
                               const float *source, const int *source_len)
{
    mha_args a = { .batch = batch, .source_seq = source_seq, .source = source, .cache = cache };
    mha_status st = mha_cache_append(m->cross, &a);
    for (int b = 0; b < batch && !st; b++) st = mha_cache_truncate(cache, b, source_len[b]);
    return st;
}

/* ---- two translations through it ------------------------------------------------------- */

enum { B = 2, T = 6, S = 5, D = 32, H = 4, F = 64 };

static const char *const target[B][T] = { { "<s>", "the", "black", "cat", "sleeps", "." },
                                          { "<s>", "she", "laughs", ".", "pad", "pad" } };
static const char *const source[B][S] = { { "le", "chat", "noir", "dort", "." },
                                          { "elle", "rit", ".", "pad", "pad" } };
/* Nothing here was trained. That "chat" is a cat it knows from us: a word of the source has the
   vector of the word it translates to. */
static const char *const meaning[B][S] = { { "the", "cat", "black", "sleeps", "." },
                                           { "she", "laughs", ".", "pad", "pad" } };
static const int target_len[B] = { 6, 4 }, source_len[B] = { 5, 3 };

static float x[B][T][D], memory[B][S][D], y[B][T][D], normed[B][T][D], other[B][T][D];
static float self_weight[B][H][T][T], cross_weight[B][H][T][S];
static float self_qkv[D][3 * D], self_out[D][D], cross_qkv[D][3 * D], cross_out[D][D];
static float w1[D][F], w2[F][D], zeros[F], ones[D], scratch[B * T * D + F];

/* n numbers, uniform, with this standard deviation; the same on every machine */
static void fill(float *w, int n, float deviation, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = (seed * 1664525u + 1013904223u) & 0xffffffffu;
        w[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * 1.7320508f * deviation;
    }
}

/* A word's vector, seeded by its letters, plus sines and cosines of its position. */
static void embed(const char *text, int pos, float *out)
{
    unsigned hash = 5381;
    for (const char *c = text; *c; c++) hash = hash * 33 + (unsigned char)*c;
    fill(out, D, 1.0f, hash);
    for (int i = 0; i < D; i += 2) {
        double angle = pos / pow(10000.0, (double)i / D);
        out[i] += 0.3f * (float)sin(angle);
        out[i + 1] += 0.3f * (float)cos(angle);
    }
}

/* Random matrices. In the first half of the heads of cross-attention, W_K is W_Q: alike finds
   alike. The other half are as random as they come. */
static void fill_weights(void)
{
    fill(self_qkv[0], D * 3 * D, 0.18f, 3);
    fill(self_out[0], D * D, 0.12f, 300);
    fill(cross_qkv[0], D * 3 * D, 0.25f, 21);
    fill(cross_out[0], D * D, 0.12f, 301);
    fill(w1[0], D * F, 0.18f, 400);
    fill(w2[0], F * D, 0.12f, 500);
    for (int i = 0; i < D; i++) {
        memcpy(&cross_qkv[i][D], cross_qkv[i], D / 2 * sizeof(float));
        ones[i] = 1;
    }
}

static void print_step(const char *what, const char *shape, int heads, int rows, int columns)
{
    printf("  %-32s  %-12s %d x ", what, shape, B);
    if (heads) printf("%d x ", heads);
    printf("%d x %d\n", rows, columns);
}

static void print_steps(const decoder *m, int d)
{
    const char *norm = m->pre_norm ? "add" : "add, LayerNorm";
    printf("A Transformer decoder layer, %s-norm, %s: B = %d sentences, T = %d target and S = %d\n"
           "source tokens, D = %d wide, H = %d heads of d = D/H = %d, F = %d wide inside.\n\n",
           m->pre_norm ? "pre" : "post", m->gelu ? "GELU" : "ReLU", B, T, S, D, H, d, F);
    print_step("x: target, shifted by one", "[B,T,D]", 0, T, D);
    print_step("source: as its encoder left it", "[B,S,D]", 0, S, D);
    printf(" self-attention\n");
    if (m->pre_norm) print_step("LayerNorm", "[B,T,D]", 0, T, D);
    print_step("q, k and v of x, each", "[B,H,T,d]", H, T, d);
    print_step("softmax(q k^T / sqrt(d)), causal", "[B,H,T,T]", H, T, T);
    print_step("weights times v", "[B,H,T,d]", H, T, d);
    print_step("concat heads, W_O", "[B,T,D]", 0, T, D);
    print_step(norm, "[B,T,D]", 0, T, D);
    printf(" cross-attention\n");
    if (m->pre_norm) print_step("LayerNorm", "[B,T,D]", 0, T, D);
    print_step("q of the target", "[B,H,T,d]", H, T, d);
    print_step("k and v of the source, each", "[B,H,S,d]", H, S, d);
    print_step("softmax(...), padding masked", "[B,H,T,S]", H, T, S);
    print_step("weights times v", "[B,H,T,d]", H, T, d);
    print_step("concat heads, W_O", "[B,T,D]", 0, T, D);
    print_step(norm, "[B,T,D]", 0, T, D);
    printf(" feed-forward\n");
    if (m->pre_norm) print_step("LayerNorm", "[B,T,D]", 0, T, D);
    print_step(m->gelu ? "W_1, GELU" : "W_1, ReLU", "[B,T,F]", 0, T, F);
    print_step("W_2", "[B,T,D]", 0, T, D);
    print_step(m->pre_norm ? "add: y" : "add, LayerNorm: y", "[B,T,D]", 0, T, D);
    printf("\nCross-attention. Heads 0 and 1 have W_K = W_Q, so that alike finds alike: chat has\n"
           "the vector of cat. Heads 2 and 3 are random, as all heads are before training.\n");
}

/* One cell of a heat map, two columns wide: a colour, or a letter with more ink. */
static void print_cell(float w, int colour)
{
    static const int heat[9] = { 234, 17, 54, 90, 126, 162, 203, 215, 229 };
    int level = w > 0.99f ? 8 : w > 0 ? (int)(w * 9) : 0;
    if (colour) printf("\033[48;5;%dm  \033[0m", heat[level]);
    else printf("%c%c", ".:-=+*#%@"[level], ".:-=+*#%@"[level]);
}

/* The heads of one sentence side by side: a row is a target word, a column is a source word. */
static void print_heads(int b, int colour)
{
    printf("\n      ");
    for (int h = 0; h < H; h++) printf("  head %-*d", 2 * S - 5, h);
    for (int line = 0; line < 4; line++) { /* the source, written downwards */
        printf("\n      ");
        for (int h = 0; h < H; h++) {
            printf("  ");
            for (int j = 0; j < S; j++) {
                int skip = 4 - (int)strlen(source[b][j]);
                printf(" %c", line < skip ? ' ' : source[b][j][line - skip]);
            }
        }
    }
    for (int i = 0; i < target_len[b]; i++) {
        printf("\n%6s", target[b][i]);
        for (int h = 0; h < H; h++) {
            printf("  ");
            for (int j = 0; j < S; j++) print_cell(cross_weight[b][h][i][j], colour);
        }
    }
    printf("\n");
}

static int check(int ok, const char *what)
{
    printf("  %-4s  %s\n", ok ? "ok" : "FAIL", what);
    return !ok;
}

static int check_numbers(void)
{
    int finite = 1, norms = 1, sums = 1, padding = 1, future = 1;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            double sum = 0, squares = 0;
            for (int i = 0; i < D; i++) {
                finite &= isfinite(y[b][t][i]) != 0;
                sum += (double)normed[b][t][i];
                squares += (double)normed[b][t][i] * (double)normed[b][t][i];
            }
            norms &= fabs(sum / D) < 1e-5 && fabs(squares / D - 1) < 1e-3;
            for (int h = 0; h < H; h++) {
                double self = 0, cross = 0;
                for (int j = 0; j < T; j++) self += (double)self_weight[b][h][t][j];
                for (int j = 0; j < S; j++) cross += (double)cross_weight[b][h][t][j];
                sums &= fabs(self - 1) < 1e-5 && fabs(cross - 1) < 1e-5;
                for (int j = t + 1; j < T; j++) future &= self_weight[b][h][t][j] == 0;
                for (int j = source_len[b]; j < S; j++) padding &= cross_weight[b][h][t][j] == 0;
            }
        }
    return check(finite, "every number of the result is finite") +
           check(norms, "LayerNorm leaves mean 0 and variance 1") +
           check(sums, "each target word's weights sum to one, over target and source") +
           check(padding, "the source's padding gets no weight at all") +
           check(future, "nor do target words that are yet to come");
}

/* The heads with W_K = W_Q give the most weight to the word that means the same. */
static int check_meaning(void)
{
    int found = 1;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < target_len[b]; t++)
            for (int s = 0; s < source_len[b]; s++) {
                if (strcmp(target[b][t], meaning[b][s])) continue;
                for (int h = 0; h < H / 2; h++)
                    for (int j = 0; j < S; j++)
                        found &= cross_weight[b][h][t][j] <= cross_weight[b][h][t][s];
            }
    return check(found, "in heads 0 and 1 each word looks most at the one it translates");
}

/* Another word at t changes row t, and no row before it. */
static mha_status check_peeking(const decoder *m, const context *c, int *failed)
{
    int same = 1, noticed = 1;
    for (int t = 0; t < T; t++) {
        float kept[B][D];
        for (int b = 0; b < B; b++) {
            memcpy(kept[b], x[b][t], sizeof kept[b]);
            embed("dog", t, x[b][t]);
        }
        mha_status st = decoder_forward(m, c, B, T, x[0][0], other[0][0], scratch);
        if (st) return st;
        for (int b = 0; b < B; b++) {
            same &= !memcmp(y[b], other[b], (size_t)t * sizeof y[b][0]);
            noticed &= memcmp(y[b][t], other[b][t], sizeof y[b][t]) != 0;
            memcpy(x[b][t], kept[b], sizeof kept[b]);
        }
    }
    *failed += check(same && noticed, "another word at t changes row t, and no bit before it");
    return MHA_OK;
}

/* As when translating: the source projected once, the target word by word. */
static mha_status check_caches(const decoder *m, int *failed)
{
    context c = { 0 };
    mha_cache_config self = { .batch = B, .capacity = T }, cross = { .batch = B, .capacity = S };
    float in[B][D], out[B][D];
    int same = 1;
    mha_status st = mha_cache_create(&c.self, m->self, &self);
    if (!st) st = mha_cache_create(&c.cross, m->cross, &cross);
    if (!st) st = decoder_read(m, c.cross, B, S, memory[0][0], source_len);
    for (int t = 0; t < T && !st; t++) {
        for (int b = 0; b < B; b++) memcpy(in[b], x[b][t], sizeof in[b]);
        st = decoder_forward(m, &c, B, 1, in[0], out[0], scratch);
        for (int b = 0; b < B && !st; b++) same &= !memcmp(out[b], y[b][t], sizeof out[b]);
    }
    mha_cache_free(c.self);
    mha_cache_free(c.cross);
    if (!st) *failed += check(same, "word by word, the source projected once: the same bits");
    return st;
}

int main(int argc, char **argv)
{
    decoder m = {
        D,     F,     0,     0,    NULL, NULL, { ones, ones, ones }, { zeros, zeros, zeros },
        w1[0], zeros, w2[0], zeros
    };
    for (int i = 1; i < argc; i++) {
        int pre = !strcmp(argv[i], "--pre"), gelu = !strcmp(argv[i], "--gelu");
        int help = !strcmp(argv[i], "--help");
        if (pre || !strcmp(argv[i], "--post")) m.pre_norm = pre;
        else if (gelu || !strcmp(argv[i], "--relu")) m.gelu = gelu;
        else {
            fprintf(help ? stdout : stderr,
                    "usage: decoder_layer [--post | --pre] [--relu | --gelu]\n"
                    "Runs one Transformer decoder layer; the first of each pair is the default.\n");
            return help ? 0 : 2;
        }
    }

    fill_weights();
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) embed(target[b][t], t, x[b][t]);
        for (int s = 0; s < S; s++) embed(meaning[b][s], s, memory[b][s]);
    }
    layer_norm(B * S, D, ones, zeros, memory[0][0], memory[0][0]); /* an encoder ends in one */

    mha_config cfg = { .d_model = D, .n_heads = H };
    mha_weights self = { .qkv = self_qkv[0], .out = self_out[0] };
    mha_weights cross = { .qkv = cross_qkv[0], .out = cross_out[0] };
    context c = { .source_seq = S, .source = memory[0][0], .source_len = source_len };
    mha_status st = mha_layer_create(&m.self, &cfg, &self);
    if (!st) st = mha_layer_create(&m.cross, &cfg, &cross);
    if (!st) {
        c.self_attn = self_weight[0][0][0], c.cross_attn = cross_weight[0][0][0];
        st = decoder_forward(&m, &c, B, T, x[0][0], y[0][0], scratch);
        c.self_attn = c.cross_attn = NULL;
    }

    int failed = 0;
    if (!st) {
        /* What comes out of a stack of layers: pre-norm ones end in one more LayerNorm. */
        memcpy(normed, y, sizeof y);
        if (m.pre_norm) layer_norm(B * T, D, ones, zeros, y[0][0], normed[0][0]);

        int colour = stdout_is_terminal() && !getenv("NO_COLOR");
        print_steps(&m, mha_layer_config(m.cross)->d_k);
        for (int b = 0; b < B; b++) print_heads(b, colour);
        printf("\n  weight 0 ");
        for (int i = 0; i < 9; i++) print_cell(((float)i + 0.5f) / 9, colour);
        printf(" 1   row: target, column: source\n\n");
        failed = check_numbers() + check_meaning();
        st = check_peeking(&m, &c, &failed);
        if (!st) st = check_caches(&m, &failed);
    }
    mha_layer_free(m.self);
    mha_layer_free(m.cross);
    if (st) fprintf(stderr, "decoder_layer: %s\n", mha_strerror(st));
    return st || failed;
}
