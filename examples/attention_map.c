/* attention_map.c - a picture of what the heads of an attention layer look at

   One sentence goes through a layer of six heads, and their weights into an SVG file: a heat map
   for each head, a row for each word that looks, a column for each it looks at. The heads are not
   trained. Four are built by hand, to do what heads of trained models are often found to do, one
   sees only its neighbours, and one is random: the picture says which, and the program checks it.

       cc -O2 attention_map.c -lm && ./a.out map.svg                                         */

#define MHA_IMPLEMENTATION
#include "../mha.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the sentence and the layer ------------------------------------------------------- */

enum { OTHER, NOUN, VERB, KINDS };
enum { T = 13, H = 6, K = 16, D = K + KINDS + K, NEAR = 2 }; /* d_k = K, window NEAR each way */
enum { WORD = 0, KIND = WORD + K, POSITION = KIND + KINDS }; /* where each part of x begins */

static const struct token {
    const char *text;
    int kind;
} token[T] = { { "<s>", OTHER }, { "the", OTHER }, { "cat", NOUN }, { "&", OTHER },
               { "the", OTHER }, { "dog", NOUN },  { "ran", VERB }, { ",", OTHER },
               { "but", OTHER }, { "the", OTHER }, { "cat", NOUN }, { "slept", VERB },
               { ".", OTHER } };

static const struct head {
    const char *name, *how;
} head[H] = { { "same word", "W_Q and W_K read the word and nothing else" },
              { "previous word", "W_Q turns the position back by one" },
              { "nouns and verbs", "find each other by kind; ALiBi prefers the nearest" },
              { "nearby", "no q and no k: ALiBi alone, by distance" },
              { "window", "random, but sees two words either way and no more" },
              { "random", "random weights, as before any training" } };

static const float slope[H] = { 0, 0, 0.7f, 0.5f, 0, 0 }; /* of ALiBi, per head */

static float x[T][D], y[T][D], weight[H][T][T];
static float w_q[D][H * K], w_k[D][H * K], w_v[D][H * K], w_out[H * K][D];
static unsigned char allow[H][T][T];

/* n numbers, uniform, with this standard deviation; the same on every machine */
static void fill(float *w, int n, float deviation, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = (seed * 1664525u + 1013904223u) & 0xffffffffu;
        w[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * 1.7320508f * deviation;
    }
}

static double frequency(int pair)
{
    return pow(50.0, -2.0 * pair / K);
}

/* x is a vector seeded by the word's letters, then its kind as 0s and a 1, then its position as
   sines and cosines. */
static void embed(void)
{
    for (int t = 0; t < T; t++) {
        unsigned hash = 5381;
        for (const char *c = token[t].text; *c; c++) hash = hash * 33 + (unsigned char)*c;
        fill(&x[t][WORD], K, 1, hash);
        x[t][KIND + token[t].kind] = 1;
        for (int i = 0; i < K; i += 2) {
            x[t][POSITION + i] = (float)sin(t * frequency(i / 2));
            x[t][POSITION + i + 1] = (float)cos(t * frequency(i / 2));
        }
    }
}

static void build_heads(void)
{
    for (int i = 0; i < K; i++) {
        w_q[WORD + i][0 * K + i] = w_k[WORD + i][0 * K + i] = 1.2f;
        w_k[POSITION + i][1 * K + i] = 4;
    }
    for (int i = 0; i < K; i += 2) { /* sin(a - f) and cos(a - f) from sin a and cos a */
        float s = 4 * (float)sin(frequency(i / 2)), c = 4 * (float)cos(frequency(i / 2));
        w_q[POSITION + i][1 * K + i] = w_q[POSITION + i + 1][1 * K + i + 1] = c;
        w_q[POSITION + i + 1][1 * K + i] = -s;
        w_q[POSITION + i][1 * K + i + 1] = s;
    }
    w_q[KIND + NOUN][2 * K] = w_k[KIND + VERB][2 * K] = 4.5f;
    w_q[KIND + VERB][2 * K + 1] = w_k[KIND + NOUN][2 * K + 1] = 4.5f;
    for (int i = 0; i < D; i++) {
        fill(&w_q[i][4 * K], 2 * K, 0.3f, 100 + (unsigned)i);
        fill(&w_k[i][4 * K], 2 * K, 0.3f, 200 + (unsigned)i);
    }
    fill(w_v[0], D * H * K, 0.2f, 12);
    fill(w_out[0], H * K * D, 0.1f, 13);

    memset(allow, 1, sizeof allow);
    for (int i = 0; i < T; i++)
        for (int j = 0; j < T; j++) allow[4][i][j] = abs(i - j) <= NEAR;
}

static mha_status attend(void)
{
    mha_config cfg = { .d_model = D, .n_heads = H, .d_k = K };
    mha_weights w = { .q = w_q[0], .k = w_k[0], .v = w_v[0], .out = w_out[0], .alibi = slope };
    mha_layer *layer;
    cfg.alibi = 1;
    mha_status st = mha_layer_create(&layer, &cfg, &w);
    if (!st) {
        mha_args a = { .batch = 1, .seq = T, .x = x[0], .y = y[0] };
        a.mask.allow = allow[0][0]; /* a mask for each head */
        a.mask.allow_stride.head = T * T;
        a.mask.allow_stride.query = T;
        a.mask.allow_stride.key = 1;
        a.attn = weight[0][0];
        st = mha_forward(layer, &a);
    }
    mha_layer_free(layer);
    return st;
}

/* ---- the picture ------------------------------------------------------------------------ */

enum {
    CELL = 24,
    LEFT = 56,  /* room for the words beside a map */
    ABOVE = 92, /* for its title and the words above it */
    GAP = 32,
    HEADER = 100,
    FOOTER = 64,
    ACROSS = 3,
    WIDTH = GAP + ACROSS * (LEFT + T * CELL + GAP),
    HEIGHT = HEADER + H / ACROSS * (ABOVE + T * CELL + GAP) + FOOTER
};

static void put_escaped(FILE *f, const char *text)
{
    for (; *text; text++) {
        if (*text == '&') fputs("&amp;", f);
        else if (*text == '<') fputs("&lt;", f);
        else if (*text == '>') fputs("&gt;", f);
        else fputc(*text, f);
    }
}

static void put_text(FILE *f, double left, double top, const char *style, const char *text)
{
    fprintf(f, "<text x=\"%g\" y=\"%g\" class=\"%s\">", left, top, style);
    put_escaped(f, text);
    fprintf(f, "</text>\n");
}

/* Opacity of a weight. The root lets the smaller ones be seen; the legend has it too. */
static double ink(double w)
{
    return 0.05 + 0.95 * sqrt(w);
}

static void put_head(FILE *f, int h, int left, int top)
{
    char title[64];
    snprintf(title, sizeof title, "head %d: %s", h, head[h].name);
    put_text(f, left, top + 16, "b", title);
    put_text(f, left, top + 34, "dim", head[h].how);
    left += LEFT, top += ABOVE;
    for (int t = 0; t < T; t++) {
        int middle = t * CELL + CELL / 2;
        put_text(f, left - 8, top + middle + 4, "end", token[t].text);
        fprintf(f, "<g transform=\"translate(%d %d) rotate(-60)\">", left + middle + 3, top - 6);
        put_text(f, 0, 0, "w", token[t].text);
        fprintf(f, "</g>\n");
    }
    for (int i = 0; i < T; i++)
        for (int j = 0; j < T; j++) {
            double w = (double)weight[h][i][j];
            if (!allow[h][i][j]) continue; /* no cell at all */
            fprintf(f,
                    "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"3\" class=\"c\" "
                    "fill-opacity=\"%.3f\"><title>",
                    left + j * CELL + 1, top + i * CELL + 1, CELL - 2, CELL - 2, ink(w));
            put_escaped(f, token[i].text);
            fprintf(f, " looks at ");
            put_escaped(f, token[j].text);
            fprintf(f, ": %.1f %%</title></rect>\n", 100 * w);
        }
}

static void put_legend(FILE *f, int left, int top)
{
    enum { LENGTH = 360, STOPS = 40 };
    fprintf(f, "<linearGradient id=\"ink\">");
    for (int i = 0; i <= STOPS; i++)
        fprintf(f, "<stop class=\"c\" offset=\"%g\" stop-opacity=\"%.3f\"/>\n", (double)i / STOPS,
                ink((double)i / STOPS));
    fprintf(f,
            "</linearGradient>\n<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"12\" rx=\"3\" "
            "fill=\"url(#ink)\"/>\n",
            left, top, LENGTH);
    for (int i = 0; i <= 4; i++) {
        char percent[16];
        snprintf(percent, sizeof percent, "%d %%", 25 * i);
        put_text(f, left + i * LENGTH / 4.0, top + 28, "dim mid", percent);
    }
}

static void put_picture(FILE *f)
{
    static const char title[] = "What six attention heads look at";
    static const char style[] =
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
        "fill:#1f2328}\n"
        ".t{font-size:24px;font-weight:600}.s{font-size:15px}.b{font-size:15px;font-weight:600}\n"
        ".mid{text-anchor:middle}.end{text-anchor:end}\n"
        ".bg{fill:#fff;stroke:#d1d9e0}.c{fill:#0a4f9e;stop-color:#0a4f9e}.s,.dim{fill:#59636e}\n"
        "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.s,.dim{fill:#9198a1}\n"
        ".bg{fill:#0d1117;stroke:#3d444d}.c{fill:#6cb6ff;stop-color:#6cb6ff}}\n";
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\">\n<title>%s</title>\n<style>\n%s"
            "</style>\n<rect x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"8\" "
            "class=\"bg\"/>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, title, style, WIDTH - 1, HEIGHT - 1);

    put_text(f, GAP, 46, "t", title);
    put_text(f, GAP, 72, "s",
             "Each row is a word that looks (query), each column a word it looks at (key). Nothing "
             "was trained: under each name is how it comes about.");
    for (int h = 0; h < H; h++)
        put_head(f, h, GAP + h % ACROSS * (LEFT + T * CELL + GAP),
                 HEADER + h / ACROSS * (ABOVE + T * CELL + GAP));
    put_legend(f, GAP + LEFT, HEIGHT - FOOTER + 4);
    put_text(f, GAP + LEFT + 400, HEIGHT - FOOTER + 15, "dim",
             "attention weight; each row sums to 100 %. No cell: the key is excluded.");
    fprintf(f, "</svg>\n");
}

/* Writes the file, and reads its length and its end again. Returns its bytes, -1 on error. */
static long write_picture(const char *path)
{
    char end[8] = "";
    FILE *f = fopen(path, "wb");
    if (!f) return -1;
    put_picture(f);
    long size = ftell(f);
    int bad = ferror(f) != 0;
    bad |= fclose(f) != 0;
    f = bad ? NULL : fopen(path, "rb");
    if (!f) return -1;
    bad = fseek(f, -7, SEEK_END) != 0 || fread(end, 1, 7, f) != 7 || ftell(f) != size;
    fclose(f);
    return bad || strcmp(end, "</svg>\n") != 0 ? -1 : size;
}

/* ---- is it what it says? ---------------------------------------------------------------- */

static int check(int ok, const char *what)
{
    printf("  %-4s  %s\n", ok ? "ok" : "FAIL", what);
    return !ok;
}

/* The key that query i of head h looks at most */
static int most(int h, int i)
{
    int best = 0;
    for (int j = 1; j < T; j++)
        if (weight[h][i][j] > weight[h][i][best]) best = j;
    return best;
}

/* The place of the word of this kind that is nearest to i */
static int nearest(int i, int kind)
{
    int best = -1;
    for (int j = 0; j < T; j++)
        if (token[j].kind == kind && (best < 0 || abs(j - i) < abs(best - i))) best = j;
    return best;
}

static int check_all(void)
{
    int sums = 1, same = 1, previous = 1, kinds = 1, nearby = 1, window = 1;
    for (int i = 0; i < T; i++) {
        for (int h = 0; h < H; h++) {
            double sum = 0;
            for (int j = 0; j < T; j++) sum += (double)weight[h][i][j];
            sums &= fabs(sum - 1) < 1e-5;
        }
        same &= !strcmp(token[most(0, i)].text, token[i].text);
        if (i) previous &= most(1, i) == i - 1;
        if (token[i].kind != OTHER)
            kinds &= most(2, i) == nearest(i, token[i].kind == NOUN ? VERB : NOUN);
        for (int j = 1; j <= i; j++) nearby &= weight[3][i][j] > weight[3][i][j - 1];
        for (int j = i + 1; j < T; j++) nearby &= weight[3][i][j] < weight[3][i][j - 1];
        for (int j = 0; j < T; j++) window &= (weight[4][i][j] > 0) == (abs(i - j) <= NEAR);
    }
    return check(sums, "each query's weights sum to one") +
           check(same, "head 0 looks most at the same word") +
           check(previous, "head 1 at the word before, where there is one") +
           check(kinds, "head 2 from nouns at the nearest verb, from verbs at the nearest noun") +
           check(nearby, "head 3 the less the farther") +
           check(window, "head 4 at all of its window and at nothing else");
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "build/attention_map.svg";
    if (argc > 2 || path[0] == '-') {
        int help = !strcmp(argv[1], "--help");
        fprintf(help ? stdout : stderr,
                "usage: attention_map [file.svg]\n"
                "Draws what the heads of an attention layer look at. Default: %s\n",
                "build/attention_map.svg");
        return help ? 0 : 2;
    }
    embed();
    build_heads();
    mha_status st = attend();
    if (st) {
        fprintf(stderr, "attention_map: %s\n", mha_strerror(st));
        return 1;
    }
    long size = write_picture(path);
    if (size < 0) {
        fprintf(stderr, "attention_map: cannot write %s\n", path);
        return 1;
    }
    printf("%d heads of %d words drawn to %s, %ld bytes. Open it in a browser.\n\n", H, T, path,
           size);
    return check_all() != 0;
}
