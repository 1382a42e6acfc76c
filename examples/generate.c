/* generate.c - a small decoder that writes text on mha.h, with a cache per layer

       x = E[token]
       each layer:  x = x + Attention(RMSNorm(x))     causal, grouped heads, rotary positions
                    x = x + SwiGLU(RMSNorm(x))
       logits = RMSNorm(x) E^T                        input and output share E

   This is how Llama, Mistral and Qwen are built. They were trained and this was not: its weights
   are random numbers, so what it writes is babble. That the caches change nothing is not babble:
   the program writes once with them, then computes every token again without, and compares bits.
   (Equal bits are not promised under -ffast-math.)

   The first half is the model, yours to keep. The second half makes one and lets it talk.

       cc -O2 generate.c -lm && ./a.out --help                                               */

#define MHA_IMPLEMENTATION
#include "../mha.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the model ------------------------------------------------------------------------ */

typedef struct block {
    mha_layer *attn;          /* holds W_Q W_K W_V W_O, and turns q and k by their position */
    mha_cache *cache;         /* keys and values of the text so far */
    const float *gain[2];     /* [D] RMSNorm before attention, before feed-forward */
    const float *w_gate, *w1; /* [D,F] */
    const float *w2;          /* [F,D] */
} block;

typedef struct decoder {
    int layers, d_model, d_ff, vocabulary; /* L, D, F, V */
    block *blocks;                         /* [L] */
    const float *embed;                    /* [V,D] */
    const float *gain;                     /* [D] RMSNorm after the last layer */
} decoder;

/* x [rows,n] -> y [rows,n], each row to a mean square of 1, then * gain. y may be x. */
static void rms_norm(size_t rows, int n, const float *gain, const float *x, float *y)
{
    for (size_t r = 0; r < rows; r++, x += n, y += n) {
        double mean = 0;
        for (int i = 0; i < n; i++) mean += (double)x[i] * (double)x[i] / n;
        float inv = (float)(1 / sqrt(mean + 1e-6));
        for (int i = 0; i < n; i++) y[i] = x[i] * inv * gain[i];
    }
}

/* y [n_out] += x [n_in] * w [n_in,n_out] */
static void add_product(int n_in, int n_out, const float *w, const float *x, float *y)
{
    for (int i = 0; i < n_in; i++, w += n_out)
        for (int j = 0; j < n_out; j++) y[j] += x[i] * w[j];
}

/* y [D] += (silu(x W_gate) * (x W_1)) W_2 for x [D]. hidden [2*F] is scratch. */
static void add_swiglu(const decoder *m, const block *b, const float *x, float *y, float *hidden)
{
    float *gate = hidden, *up = hidden + m->d_ff;
    for (int j = 0; j < 2 * m->d_ff; j++) hidden[j] = 0;
    add_product(m->d_model, m->d_ff, b->w_gate, x, gate);
    add_product(m->d_model, m->d_ff, b->w1, x, up);
    for (int j = 0; j < m->d_ff; j++) up[j] *= gate[j] / (1 + expf(-gate[j]));
    add_product(m->d_ff, m->d_model, b->w2, up, y);
}

/* token [n] -> x [n,D], what the layers make of each. With use_cache they are the next n of a text
   that the caches hold; without, they are the whole text. scratch [n*D + 2*F]. */
static mha_status decoder_forward(const decoder *m, int use_cache, int n, const int *token,
                                  float *x, float *scratch)
{
    size_t rows = (size_t)n, d = (size_t)m->d_model;
    float *t = scratch, *hidden = scratch + rows * d;
    for (size_t r = 0; r < rows; r++)
        memcpy(x + r * d, m->embed + (size_t)token[r] * d, d * sizeof *x);

    for (int i = 0; i < m->layers; i++) {
        const block *b = &m->blocks[i];
        rms_norm(rows, m->d_model, b->gain[0], x, t);
        mha_args a = { .batch = 1, .seq = n, .x = t, .y = t };
        a.mask.causal = MHA_CAUSAL;
        if (use_cache) a.cache = b->cache;
        mha_status st = mha_forward(b->attn, &a);
        if (st != MHA_OK) return st;
        for (size_t k = 0; k < rows * d; k++) x[k] += t[k];

        rms_norm(rows, m->d_model, b->gain[1], x, t);
        for (size_t r = 0; r < rows; r++) add_swiglu(m, b, t + r * d, x + r * d, hidden);
    }
    rms_norm(rows, m->d_model, m->gain, x, x);
    return MHA_OK;
}

/* x [D] of one token -> logits [V] of the token after it */
static void decoder_logits(const decoder *m, const float *x, float *logits)
{
    const float *e = m->embed;
    for (int v = 0; v < m->vocabulary; v++, e += m->d_model) {
        float sum = 0;
        for (int i = 0; i < m->d_model; i++) sum += x[i] * e[i];
        logits[v] = sum;
    }
}

/* ---- letters and syllables as tokens ------------------------------------------------------ */

static const char letters[] = " abcdefghijklmnopqrstuvwxyz.,!?'", consonants[] = "bdfghjklmnprstvz",
                  vowels[] = "aeiou";

/* Every letter, then "ba" ... "zu", then the same with a space before: 192 pieces. */
enum { LETTERS = sizeof letters - 1, PAIRS = 16 * 5, V = LETTERS + 2 * PAIRS };

static const char *piece(int token)
{
    static char text[4];
    int pair = token - LETTERS;
    char *c = text;
    if (token < LETTERS) *c++ = letters[token];
    else {
        if (pair >= PAIRS) *c++ = ' ';
        *c++ = consonants[pair % PAIRS / 5];
        *c++ = vowels[pair % 5];
    }
    *c = 0;
    return text;
}

/* The longest piece that the text begins with; a '?' for a character that is none. */
static int next_token(const char **text)
{
    int best = (int)(strchr(letters, '?') - letters);
    size_t longest = 0, n;
    for (int v = 0; v < V; v++)
        if ((n = strlen(piece(v))) > longest && !strncmp(*text, piece(v), n)) longest = n, best = v;
    *text += longest ? longest : 1;
    return best;
}

/* ---- it talks ------------------------------------------------------------------------------- */

enum { L = 4, D = 64, H = 4, G = 2, K = D / H, F = 176, NEW = 120, ROOM = 2 * NEW };

static float embed[V][D], w_qkv[L][D][(H + 2 * G) * K], w_out[L][D][D], ones[D];
static float w_gate[L][D][F], w1[L][D][F], w2[L][F][D];
static float x[ROOM][D], scratch[ROOM * D + 2 * F], logits[NEW][V], again[V];
static int token[ROOM];

static unsigned next_random(unsigned *seed)
{
    *seed = (*seed * 1664525u + 1013904223u) & 0xffffffffu;
    return *seed >> 8;
}

/* n numbers, uniform, with this standard deviation; the same on every machine */
static void fill(float *w, int n, double deviation, unsigned *seed)
{
    for (int i = 0; i < n; i++)
        w[i] = (float)((next_random(seed) / 8388608.0 - 1.0) * 1.7320508 * deviation);
}

static mha_status create(decoder *m, unsigned seed)
{
    mha_config cfg = { .d_model = D, .n_heads = H, .n_kv_heads = G };
    cfg.rope.layout = MHA_ROPE_HALF;
    fill(embed[0], V * D, 0.3, &seed);
    for (int i = 0; i < D; i++) ones[i] = 1;
    m->embed = embed[0];
    m->gain = ones;
    for (int i = 0; i < L; i++) {
        block *b = &m->blocks[i];
        fill(w_qkv[i][0], D * (H + 2 * G) * K, 0.25, &seed);
        fill(w_out[i][0], D * D, 0.125, &seed);
        fill(w_gate[i][0], D * F, 0.125, &seed);
        fill(w1[i][0], D * F, 0.125, &seed);
        fill(w2[i][0], F * D, 0.075, &seed);
        b->gain[0] = b->gain[1] = ones;
        b->w_gate = w_gate[i][0], b->w1 = w1[i][0], b->w2 = w2[i][0];

        mha_weights w = { .qkv = w_qkv[i][0], .out = w_out[i][0] };
        mha_cache_config room = { .batch = 1, .capacity = ROOM };
        mha_status st = mha_layer_create(&b->attn, &cfg, &w);
        if (!st) st = mha_cache_create(&b->cache, b->attn, &room);
        if (st) return st;
    }
    return MHA_OK;
}

/* The likeliest token, or each as often as its probability says. */
static int choose(const float *score, int greedy, unsigned *seed)
{
    int best = 0, v;
    double sum = 0;
    for (v = 1; v < V; v++)
        if (score[v] > score[best]) best = v;
    if (greedy) return best;
    for (v = 0; v < V; v++) sum += exp((double)(score[v] - score[best]));
    sum *= next_random(seed) / 16777216.0;
    for (v = 0; v < V - 1; v++)
        if ((sum -= exp((double)(score[v] - score[best]))) < 0) break;
    return v;
}

/* Writes a token, on a new line where a word begins late in this one, or at its very end. */
static void say(int t, int *column)
{
    const char *text = piece(t);
    if ((*column > 80 && *text == ' ') || *column > 94) {
        text += *text == ' ';
        *column = printf("\n  ") - 1;
    }
    *column += printf("%s", text);
}

static void print_speed(const char *what, int n, double seconds, const char *how)
{
    printf("  %-8s %4d tokens  %8.2f ms", what, n, seconds * 1e3);
    if (seconds > 0) printf("  %8.0f tokens/s", n / seconds);
    printf("  %s\n", how);
}

static double now(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

static mha_status talk(const decoder *m, const char *prompt, int greedy, unsigned seed, int *wrong)
{
    int n = 0, column = 3;
    while (*prompt && n < ROOM - NEW) token[n++] = next_token(&prompt);
    if (!n) token[n++] = 0; /* something to start from */

    /* Written once with the caches: the prompt in one call, then a call for each new token. */
    double begin = now(), prefill = 0;
    mha_status st = decoder_forward(m, 1, n, token, x[0], scratch);
    for (int i = 0; i < NEW && !st; i++) {
        decoder_logits(m, i ? x[0] : x[n - 1], logits[i]);
        token[n + i] = choose(logits[i], greedy, &seed);
        if (i == 0) prefill = now() - begin;
        if (i < NEW - 1) st = decoder_forward(m, 1, 1, &token[n + i], x[0], scratch);
    }
    double decode = now() - begin - prefill;
    if (st) return st;

    printf("  [");
    for (int i = 0; i < n + NEW; i++) {
        if (i == n) column += printf("]");
        say(token[i], &column);
    }
    printf("\n\n");
    print_speed("prefill", n, prefill, "the prompt, in one call");
    print_speed("decode", NEW - 1, decode, "one call each, with the caches");

    /* Now without: all of the text again for each new token. */
    begin = now();
    for (int i = 0; i < NEW && !st; i++) {
        st = decoder_forward(m, 0, n + i, token, x[0], scratch);
        decoder_logits(m, x[n + i - 1], again);
        if (!st && memcmp(again, logits[i], sizeof again)) {
            if (!*wrong) printf("  the logits of new token %d differ\n", i);
            *wrong += 1;
        }
    }
    print_speed("again", NEW, now() - begin, "without: all of the text for each");
    return st;
}

int main(int argc, char **argv)
{
    static block blocks[L];
    decoder m = { L, D, F, V, blocks, NULL, NULL };
    const char *prompt = "once upon a time";
    int greedy = 0, wrong = 0;
    unsigned seed = 14;
    for (int i = 1; i < argc; i++) {
        int help = !strcmp(argv[i], "--help");
        if (!strcmp(argv[i], "--greedy")) greedy = 1;
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            seed = (unsigned)strtoul(argv[++i], NULL, 10);
        else if (argv[i][0] != '-') prompt = argv[i];
        else {
            fprintf(help ? stdout : stderr,
                    "usage: generate [--greedy] [--seed n] [prompt]\n"
                    "Continues a prompt, in small letters, by a model of random weights. Another\n"
                    "seed is another model; --greedy takes the likeliest token each time.\n");
            return help ? 0 : 2;
        }
    }

    mha_cache_facts facts;
    mha_status st = create(&m, seed);
    if (!st) st = mha_cache_info(blocks[0].cache, &facts);
    if (!st) {
        int weights = V * D + L * (D * (H + 2 * G) * K + D * D + 3 * D * F);
        printf("A decoder of %d layers: D = %d wide, H = %d query heads on G = %d key/value\n"
               "heads, F = %d wide inside, V = %d tokens. It has %d random weights, %d\n"
               "caches of %.0f KiB, and has never read a word. The language of seed %u:\n\n",
               L, D, H, G, F, V, weights, L, (double)facts.bytes / 1024, seed);
        st = talk(&m, prompt, greedy, seed, &wrong);
    }
    for (int i = 0; i < L; i++) mha_cache_free(blocks[i].cache), mha_layer_free(blocks[i].attn);
    if (st) {
        fprintf(stderr, "generate: %s\n", mha_strerror(st));
        return 1;
    }
    printf("\n  %-4s  the logits of %d of %d new tokens: the same bits with caches and without\n",
           wrong ? "FAIL" : "ok", NEW - wrong, NEW);
    return wrong != 0;
}
