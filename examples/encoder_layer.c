/* encoder_layer.c - one layer of a Transformer encoder on mha.h

       post-norm:  h = LayerNorm(x + Attention(x))    y = LayerNorm(h + FeedForward(h))
       pre-norm:   h = x + Attention(LayerNorm(x))    y = h + FeedForward(LayerNorm(h))

   The first half is the layer, yours to keep. The second half runs two sentences through it,
   the shorter one padded, draws what each head looks at, and checks itself.

       cc -O2 encoder_layer.c -lm && ./a.out --help                                          */

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

typedef struct encoder {
    int d_model, d_ff;             /* D, F */
    int pre_norm, gelu;            /* 0, 0: post-norm and ReLU, as in the 2017 paper */
    mha_layer *attn;               /* holds W_Q W_K W_V W_O */
    const float *gain[2], *off[2]; /* [D] LayerNorm after (or before) attention, feed-forward */
    const float *w1, *b1;          /* [D,F] [F] */
    const float *w2, *b2;          /* [F,D] [D] */
} encoder;

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
static void feed_forward(const encoder *e, size_t rows, const float *x, float *y, float *hidden)
{
    for (size_t r = 0; r < rows; r++, x += e->d_model, y += e->d_model) {
        linear(e->d_model, e->d_ff, e->w1, e->b1, x, hidden);
        for (int j = 0; j < e->d_ff; j++) {
            float h = hidden[j];
            hidden[j] = e->gelu ? 0.5f * h * (1 + erff(h * 0.70710678f)) : h > 0 ? h : 0;
        }
        linear(e->d_ff, e->d_model, e->w2, e->b2, hidden, y);
    }
}

/* y [n] += x [n]: the residual connection */
static void add(size_t n, const float *x, float *y)
{
    for (size_t i = 0; i < n; i++) y[i] += x[i];
}

/* x [B,T,D] -> y [B,T,D]. Sentence b has key_len[b] tokens, the rest of its T is padding; null:
   all have T. attn [B,H,T,T] gets the attention weights unless null. scratch [B*T*D + F]. */
static mha_status encoder_forward(const encoder *e, int batch, int seq, const int *key_len,
                                  const float *x, float *y, float *attn, float *scratch)
{
    size_t rows = (size_t)batch * (size_t)seq, n = rows * (size_t)e->d_model;
    float *t = scratch, *hidden = scratch + n;

    mha_args a = { .batch = batch, .seq = seq, .x = x, .y = y, .attn = attn };
    a.mask.key_len = key_len;
    if (e->pre_norm) {
        layer_norm(rows, e->d_model, e->gain[0], e->off[0], x, t);
        a.x = t;
    }
    mha_status st = mha_forward(e->attn, &a);
    if (st != MHA_OK) return st;
    add(n, x, y);

    if (e->pre_norm) {
        layer_norm(rows, e->d_model, e->gain[1], e->off[1], y, t);
        feed_forward(e, rows, t, t, hidden);
        add(n, t, y);
    } else {
        layer_norm(rows, e->d_model, e->gain[0], e->off[0], y, y);
        feed_forward(e, rows, y, t, hidden);
        add(n, t, y);
        layer_norm(rows, e->d_model, e->gain[1], e->off[1], y, y);
    }
    return MHA_OK;
}

/* ---- two sentences through it ----------------------------------------------------------- */

enum { B = 2, T = 7, D = 32, H = 4, F = 64 };

static const char *const word[B][T] = { { "the", "cat", "sat", "on", "the", "mat", "." },
                                        { "a", "dog", "ran", ".", "pad", "pad", "pad" } };
static const int len[B] = { 7, 4 };

static float x[B][T][D], y[B][T][D], normed[B][T][D], alone[T][D], weight[B][H][T][T];
static float w_qkv[D][3 * D], w_out[D][D], w1[D][F], w2[F][D], zeros[F], ones[D];
static float scratch[B * T * D + F];

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
        out[i] += (float)sin(angle);
        out[i + 1] += (float)cos(angle);
    }
}

static void print_step(const char *what, const char *shape, int heads, int rows, int columns)
{
    printf("  %-26s  %-12s %d x ", what, shape, B);
    if (heads) printf("%d x ", heads);
    printf("%d x %d\n", rows, columns);
}

static void print_steps(const encoder *e, int d)
{
    printf("A Transformer encoder layer, %s-norm, %s: B = %d sentences, T = %d tokens,\n"
           "D = %d wide, H = %d heads of d = D/H = %d, F = %d wide inside.\n\n",
           e->pre_norm ? "pre" : "post", e->gelu ? "GELU" : "ReLU", B, T, D, H, d, F);
    print_step("x: embedding + position", "[B,T,D]", 0, T, D);
    if (e->pre_norm) print_step("LayerNorm", "[B,T,D]", 0, T, D);
    print_step("W_QKV, all heads at once", "[B,T,3*D]", 0, T, 3 * D);
    print_step("split: q, k and v, each", "[B,H,T,d]", H, T, d);
    print_step("scores: q k^T / sqrt(d)", "[B,H,T,T]", H, T, T);
    print_step("softmax, padding masked", "[B,H,T,T]", H, T, T);
    print_step("weights times v", "[B,H,T,d]", H, T, d);
    print_step("concat heads", "[B,T,H*d]", 0, T, H * d);
    print_step("W_O", "[B,T,D]", 0, T, D);
    print_step(e->pre_norm ? "add x" : "add x, LayerNorm", "[B,T,D]", 0, T, D);
    if (e->pre_norm) print_step("LayerNorm", "[B,T,D]", 0, T, D);
    print_step(e->gelu ? "W_1, GELU" : "W_1, ReLU", "[B,T,F]", 0, T, F);
    print_step("W_2", "[B,T,D]", 0, T, D);
    print_step(e->pre_norm ? "add: y" : "add, LayerNorm: y", "[B,T,D]", 0, T, D);
}

/* One cell of a heat map, two columns wide: a colour, or a letter with more ink. */
static void print_cell(float w, int colour)
{
    static const int heat[9] = { 234, 17, 54, 90, 126, 162, 203, 215, 229 };
    int level = w > 0.99f ? 8 : w > 0 ? (int)(w * 9) : 0;
    if (colour) printf("\033[48;5;%dm  \033[0m", heat[level]);
    else printf("%c%c", ".:-=+*#%@"[level], ".:-=+*#%@"[level]);
}

/* The heads of one sentence side by side: a row is a query, a column is a key. */
static void print_heads(int b, int colour)
{
    printf("\n    ");
    for (int h = 0; h < H; h++) printf("  head %-*d", 2 * T - 5, h);
    for (int line = 0; line < 3; line++) { /* the keys, written downwards */
        printf("\n    ");
        for (int h = 0; h < H; h++) {
            printf("  ");
            for (int j = 0; j < T; j++) {
                int skip = 3 - (int)strlen(word[b][j]);
                printf(" %c", line < skip ? ' ' : word[b][j][line - skip]);
            }
        }
    }
    for (int i = 0; i < len[b]; i++) {
        printf("\n%4s", word[b][i]);
        for (int h = 0; h < H; h++) {
            printf("  ");
            for (int j = 0; j < T; j++) print_cell(weight[b][h][i][j], colour);
        }
    }
    printf("\n");
}

static int check(int ok, const char *what)
{
    printf("  %-4s  %s\n", ok ? "ok" : "FAIL", what);
    return !ok;
}

static int check_all(void)
{
    int finite = 1, norms = 1, sums = 1, padding = 1;
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
                sum = 0;
                for (int j = 0; j < T; j++) sum += (double)weight[b][h][t][j];
                for (int j = len[b]; j < T; j++) padding &= weight[b][h][t][j] == 0;
                sums &= fabs(sum - 1) < 1e-5;
            }
        }
    return check(finite, "every number of the result is finite") +
           check(norms, "LayerNorm leaves mean 0 and variance 1") +
           check(sums, "each query's weights sum to one") +
           check(padding, "padding gets no weight at all") +
           check(memcmp(y[1], alone, (size_t)len[1] * sizeof alone[0]) == 0,
                 "the short sentence without its padding gives the same bits");
}

int main(int argc, char **argv)
{
    encoder e = { D, F, 0, 0, NULL, { ones, ones }, { zeros, zeros }, w1[0], zeros, w2[0], zeros };
    for (int i = 1; i < argc; i++) {
        int pre = !strcmp(argv[i], "--pre"), gelu = !strcmp(argv[i], "--gelu");
        int help = !strcmp(argv[i], "--help");
        if (pre || !strcmp(argv[i], "--post")) e.pre_norm = pre;
        else if (gelu || !strcmp(argv[i], "--relu")) e.gelu = gelu;
        else {
            fprintf(help ? stdout : stderr,
                    "usage: encoder_layer [--post | --pre] [--relu | --gelu]\n"
                    "Runs one Transformer encoder layer; the first of each pair is the default.\n");
            return help ? 0 : 2;
        }
    }

    fill(w_qkv[0], D * 3 * D, 0.18f, 3);
    for (int i = 0; i < D; i++) { /* q and k larger than usual: heads with strong opinions */
        for (int j = 0; j < 2 * D; j++) w_qkv[i][j] *= 1.5f;
        ones[i] = 1;
    }
    fill(w_out[0], D * D, 0.18f, 300);
    fill(w1[0], D * F, 0.18f, 400);
    fill(w2[0], F * D, 0.12f, 500);
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) embed(word[b][t], t, x[b][t]);

    mha_config cfg = { .d_model = D, .n_heads = H };
    mha_weights w = { .qkv = w_qkv[0], .out = w_out[0] };
    mha_status st = mha_layer_create(&e.attn, &cfg, &w);
    if (!st) st = encoder_forward(&e, B, T, len, x[0][0], y[0][0], weight[0][0][0], scratch);
    if (!st) st = encoder_forward(&e, 1, len[1], NULL, x[1][0], alone[0], NULL, scratch);
    if (st) {
        fprintf(stderr, "encoder_layer: %s\n", mha_strerror(st));
        mha_layer_free(e.attn);
        return 1;
    }
    /* What comes out of a stack of layers: pre-norm ones end in one more LayerNorm. */
    memcpy(normed, y, sizeof y);
    if (e.pre_norm) layer_norm(B * T, D, ones, zeros, y[0][0], normed[0][0]);

    int colour = stdout_is_terminal() && !getenv("NO_COLOR");
    print_steps(&e, mha_layer_config(e.attn)->d_k);
    for (int b = 0; b < B; b++) print_heads(b, colour);
    printf("\n  weight 0 ");
    for (int i = 0; i < 9; i++) print_cell(((float)i + 0.5f) / 9, colour);
    printf(" 1   row: query, column: key\n\n");
    mha_layer_free(e.attn);
    return check_all() != 0;
}
