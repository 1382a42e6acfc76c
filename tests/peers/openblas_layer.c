/* openblas_layer.c - multi-head attention as one would write it by hand on OpenBLAS: what mha.h
   is compared with in make bench-peers. Not part of the library.

   One sgemm for q, k and v together, bias included; attention in blocks of 128 queries, each one
   sgemm for the scores of the keys it can see, a vectorised softmax, one sgemm for the values;
   one sgemm for W_O. One token at a time: sgemv, and a cache of keys and values. The threads are
   OpenMP's; each calls OpenBLAS on its own part.

   Shapes: B batch, T queries, S keys, D model width, H heads, G key/value heads, d head width. */
#define _POSIX_C_SOURCE 200112L
#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCK 128 /* queries per block */
#define ALIGN 64

extern void openblas_set_num_threads(int n);
extern char *openblas_get_config(void);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *floats(size_t n)
{
    void *p = NULL;
    if (posix_memalign(&p, ALIGN, (n + 16) * sizeof(float)) != 0) return NULL;
    memset(p, 0, (n + 16) * sizeof(float));
    return p;
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* ---- softmax ------------------------------------------------------------------------- */

/* row [n] of scores -> 2^(row * c - max), unnormalised; returns the sum. c = log2(e) * scale.
   2^f on [-1/2, 1/2] is a polynomial of degree 6, good to about 1e-7. */
static float softmax_row(float *restrict row, int n, float c)
{
    float top = row[0], sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int j = 0; j < n; j++) top = row[j] > top ? row[j] : top;
    top *= c;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++) {
        float t = row[j] * c - top;
        t = t < -126.0f ? -126.0f : t;
        const float whole = (t + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to nearest */
        const float f = t - whole;
        float p = 1.5403530e-4f;
        p = p * f + 1.3333558e-3f;
        p = p * f + 9.6181291e-3f;
        p = p * f + 5.5504109e-2f;
        p = p * f + 2.4022651e-1f;
        p = p * f + 6.9314718e-1f;
        p = p * f + 1.0f;
        union {
            int i;
            float f;
        } power;
        power.i = ((int)whole + 127) * (1 << 23);
        p *= power.f;
        row[j] = p;
        sum += p;
    }
    return sum;
}

/* ---- attention ------------------------------------------------------------------------- */

/* Where the numbers of one head at one position start: batch, head and position strides. */
typedef struct view {
    float *p;
    size_t batch, head, seq;
} view;

typedef struct core {
    int B, H, G, T, S, d, causal; /* causal: key j is seen by query i iff j <= i + S - T */
    view q, k, v, o;
    float *scores; /* [threads][BLOCK * S] */
} core;

static float *at(const view *x, int b, int h, int i)
{
    return x->p + (size_t)b * x->batch + (size_t)h * x->head + (size_t)i * x->seq;
}

/* Queries i0 .. i0+rows-1 of one head. */
static void attend_block(const core *a, int b, int h, int i0, float *scores)
{
    const int g = h / (a->H / a->G), rows = min_int(BLOCK, a->T - i0);
    const int cols = a->causal ? min_int(a->S, i0 + rows + a->S - a->T) : a->S;
    const float c = 1.44269504f / sqrtf((float)a->d);
    float scale[BLOCK];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, cols, a->d, 1.0f,
                at(&a->q, b, h, i0), (int)a->q.seq, at(&a->k, b, g, 0), (int)a->k.seq, 0.0f, scores,
                cols);
    for (int i = 0; i < rows; i++) {
        float *row = scores + (size_t)i * (size_t)cols;
        const int seen = a->causal ? min_int(cols, i0 + i + 1 + a->S - a->T) : cols;
        scale[i] = 1.0f / softmax_row(row, seen, c);
        if (seen < cols) memset(row + seen, 0, (size_t)(cols - seen) * sizeof(float));
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, a->d, cols, 1.0f, scores, cols,
                at(&a->v, b, g, 0), (int)a->v.seq, 0.0f, at(&a->o, b, h, i0), (int)a->o.seq);
    for (int i = 0; i < rows; i++) {
        float *o = at(&a->o, b, h, i0 + i);
#pragma omp simd
        for (int x = 0; x < a->d; x++) o[x] *= scale[i];
    }
}

/* One query of each of the heads that share keys and values. */
static void attend_one(const core *a, int b, int g, float *scores)
{
    const int group = a->H / a->G;
    const float c = 1.44269504f / sqrtf((float)a->d);
    const float *k = at(&a->k, b, g, 0), *v = at(&a->v, b, g, 0);
    for (int h = g * group; h < (g + 1) * group; h++) {
        float *o = at(&a->o, b, h, 0);
        float sum;
        cblas_sgemv(CblasRowMajor, CblasNoTrans, a->S, a->d, 1.0f, k, (int)a->k.seq,
                    at(&a->q, b, h, 0), 1, 0.0f, scores, 1);
        sum = softmax_row(scores, a->S, c);
        cblas_sgemv(CblasRowMajor, CblasTrans, a->S, a->d, 1.0f / sum, v, (int)a->v.seq, scores, 1,
                    0.0f, o, 1);
    }
}

static void attend(const core *a, int threads)
{
    const size_t room = (size_t)BLOCK * (size_t)a->S;
    if (a->T == 1) {
        const int tasks = a->B * a->G;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int t = 0; t < tasks; t++)
            attend_one(a, t / a->G, t % a->G, a->scores + (size_t)omp_get_thread_num() * room);
    } else {
        const int blocks = (a->T + BLOCK - 1) / BLOCK, tasks = a->B * a->H * blocks;
        /* The longest blocks of a causal mask first. */
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
        for (int t = 0; t < tasks; t++) {
            const int bh = t % (a->B * a->H), block = blocks - 1 - t / (a->B * a->H);
            attend_block(a, bh / a->H, bh % a->H, block * BLOCK,
                         a->scores + (size_t)omp_get_thread_num() * room);
        }
    }
}

/* ---- projections ----------------------------------------------------------------------- */

/* A matrix of weights, K in, N out. [K][N] is what sgemm is fastest with, [N][K] what sgemv is. */
typedef struct matrix {
    int K, N, out_in;
    float *w;
    const float *bias; /* [N] or null */
} matrix;

static matrix matrix_of(const float *w, const float *bias, int K, int N, int out_in)
{
    const size_t ld = (size_t)(out_in ? K : N);
    matrix m = { K, N, out_in, floats((size_t)K * (size_t)N), bias };
    for (int k = 0; m.w && k < K; k++)
        for (int n = 0; n < N; n++)
            m.w[out_in ? (size_t)n * ld + (size_t)k : (size_t)k * ld + (size_t)n] = *w++;
    return m;
}

/* Rows m0..m1-1, columns n0..n1-1 of y. */
static void project_part(const matrix *a, const float *x, float *y, int m0, int m1, int n0, int n1)
{
    const int K = a->K, N = a->N;
    const float *w = a->w + (size_t)n0 * (size_t)(a->out_in ? K : 1);
    const float beta = a->bias ? 1.0f : 0.0f;
    if (m1 <= m0 || n1 <= n0) return;
    x += (size_t)m0 * (size_t)K;
    y += (size_t)m0 * (size_t)N + (size_t)n0;
    for (int m = 0; a->bias && m < m1 - m0; m++)
        memcpy(y + (size_t)m * (size_t)N, a->bias + n0, (size_t)(n1 - n0) * sizeof(float));
    if (m1 - m0 == 1 && a->out_in)
        cblas_sgemv(CblasRowMajor, CblasNoTrans, n1 - n0, K, 1.0f, w, K, x, 1, beta, y, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, a->out_in ? CblasTrans : CblasNoTrans, m1 - m0,
                    n1 - n0, K, 1.0f, x, K, w, a->out_in ? K : N, beta, y, N);
}

/* x [M,K] -> y [M,N] = x w + bias. */
static void project(const matrix *a, int M, const float *x, float *y, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const long n = omp_get_num_threads(), t = omp_get_thread_num();
        if (M > a->N) /* split the longer side */
            project_part(a, x, y, (int)(M * t / n), (int)(M * (t + 1) / n), 0, a->N);
        else { /* in whole cache lines */ const long lines = a->N / 16;
            const int n0 = (int)(lines * t / n) * 16;
            const int n1 = t + 1 == n ? a->N : (int)(lines * (t + 1) / n) * 16;
            project_part(a, x, y, 0, M, n0, n1);
        }
    }
}

/* ---- the layer ----------------------------------------------------------------------------- */

typedef struct ob_layer {
    int D, H, G, d, capacity, threads;
    matrix in, out;
    float *k, *v; /* the cache: [G][capacity][d] */
    float *qkv, *merged, *scores;
} ob_layer;

void ob_free(ob_layer *l)
{
    if (!l) return;
    free(l->in.w), free(l->out.w), free(l->k), free(l->v);
    free(l->qkv), free(l->merged), free(l->scores), free(l);
}

/* w_qkv [D][(H+2G)d], w_out [H*d][D]; biases may be null and have to stay. rows: the largest
   B * T, keys: the largest S; capacity: of the cache, or 0. */
ob_layer *ob_create(int D, int H, int G, int d, const float *w_qkv, const float *w_out,
                    const float *b_qkv, const float *b_out, int rows, int keys, int capacity,
                    int threads)
{
    ob_layer *l = calloc(1, sizeof *l);
    const int N = (H + 2 * G) * d, W = H * d;
    const size_t kv = (size_t)G * (size_t)capacity * (size_t)d;
    if (!l) return NULL;
    l->D = D, l->H = H, l->G = G, l->d = d, l->capacity = capacity, l->threads = threads;
    l->in = matrix_of(w_qkv, b_qkv, D, N, capacity > 0);
    l->out = matrix_of(w_out, b_out, W, D, capacity > 0);
    l->k = floats(kv), l->v = floats(kv);
    l->qkv = floats((size_t)rows * (size_t)N), l->merged = floats((size_t)rows * (size_t)W);
    l->scores = floats((size_t)threads * BLOCK * (size_t)keys);
    if (!l->in.w || !l->out.w || !l->k || !l->v || !l->qkv || !l->merged || !l->scores) {
        ob_free(l);
        return NULL;
    }
    openblas_set_num_threads(1); /* the threads are OpenMP's */
    return l;
}

/* Keys and values of T tokens, from l->qkv into the cache at position `past`. */
static void append(ob_layer *l, int past, int T)
{
    const size_t d = (size_t)l->d, bytes = d * sizeof(float);
    for (int g = 0; g < l->G; g++)
        for (int i = 0; i < T; i++) {
            const size_t to = ((size_t)g * (size_t)l->capacity + (size_t)(past + i)) * d;
            const float *from = l->qkv + (size_t)i * (size_t)l->in.N + (size_t)(l->H + g) * d;
            memcpy(l->k + to, from, bytes);
            memcpy(l->v + to, from + (size_t)l->G * d, bytes);
        }
}

/* x [B,T,D] -> y [B,T,D]. past < 0: no cache; else B = 1 and the T tokens go after that many. */
static void forward(ob_layer *l, int B, int T, int causal, int past, const float *x, float *y)
{
    const size_t d = (size_t)l->d, N = (size_t)l->in.N, W = (size_t)l->H * d;
    core a = { B, l->H, l->G, T, T, l->d, causal, { 0 }, { 0 }, { 0 }, { 0 }, l->scores };
    project(&l->in, B * T, x, l->qkv, l->threads);
    a.q = (view){ l->qkv, (size_t)T * N, d, N };
    a.o = (view){ l->merged, (size_t)T * W, d, W };
    if (past < 0) {
        a.k = (view){ l->qkv + W, (size_t)T * N, d, N };
        a.v = (view){ l->qkv + W + (size_t)l->G * d, (size_t)T * N, d, N };
    } else {
        append(l, past, T);
        a.S = past + T;
        a.k = (view){ l->k, 0, (size_t)l->capacity * d, d };
        a.v = (view){ l->v, 0, (size_t)l->capacity * d, d };
    }
    attend(&a, l->threads);
    project(&l->out, B * T, l->merged, y, l->threads);
}

/* n calls; seconds[i] is what the i-th took. before() is called, untimed, before each. */
void ob_layer_run(ob_layer *l, int B, int T, int causal, int past, const float *x, float *y, int n,
                  void (*before)(void), double *seconds)
{
    for (int i = 0; i < n; i++) {
        double t;
        if (before) before();
        t = now();
        forward(l, B, T, causal, past, x, y);
        seconds[i] = now() - t;
    }
}

/* The same for attention alone: q [B,H,T,d], k and v [B,G,S,d] -> o [B,H,T,d].
   scores: threads * 128 * S floats. */
void ob_core_run(int B, int H, int G, int T, int S, int d, int causal, float *q, float *k, float *v,
                 float *o, float *scores, int threads, int n, void (*before)(void), double *seconds)
{
    const size_t dd = (size_t)d, qh = (size_t)T * dd, kh = (size_t)S * dd;
    const core a = { B,
                     H,
                     G,
                     T,
                     S,
                     d,
                     causal,
                     { q, (size_t)H * qh, qh, dd },
                     { k, (size_t)G * kh, kh, dd },
                     { v, (size_t)G * kh, kh, dd },
                     { o, (size_t)H * qh, qh, dd },
                     scores };
    openblas_set_num_threads(1);
    for (int i = 0; i < n; i++) {
        double t;
        if (before) before();
        t = now();
        attend(&a, threads);
        seconds[i] = now() - t;
    }
}

/* "OpenBLAS 0.3.x ..." and the kernels it chose for this CPU. */
const char *ob_version(void)
{
    static char text[256];
    text[0] = 0;
    strncat(text, openblas_get_config(), sizeof text - 1);
    return text;
}
