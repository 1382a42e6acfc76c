/* oracle.c - see oracle.h. The sizes of tests fit an int, so indices are ints. */
#include "oracle.h"

static double *doubles(int n)
{
    double *p = (double *)calloc(n ? (size_t)n : 1, sizeof *p);
    if (!p) {
        fprintf(stderr, "the test program is out of memory\n");
        abort();
    }
    return p;
}

static double ninf(void)
{
    const uint64_t bits = 0xfff0000000000000u;
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

int oracle_is_ninf(double d)
{
    const double inf = ninf();
    return memcmp(&d, &inf, sizeof d) == 0;
}

int same_result(const float *a, const float *b, size_t n)
{
#ifdef TEST_FAST_MATH
    double size = 1;
    for (size_t i = 0; i < n; i++)
        if (is_finite(a[i]) && fabs((double)a[i]) > size) size = fabs((double)a[i]);
    for (size_t i = 0; i < n; i++) {
        const int finite = is_finite(a[i]) && is_finite(b[i]);
        if (!finite && bits_f(a[i]) != bits_f(b[i])) return 0;
        if (finite && !(fabs((double)a[i] - (double)b[i]) <= 1e-5 * size)) return 0;
    }
    return 1;
#else
    return same_bits(a, b, n);
#endif
}

/* ---- masks ------------------------------------------------------------------------------- */

static ptrdiff_t mask_index(mha_mask_stride s, int S, int b, int h, int i, int j)
{
    if (s.batch == 0 && s.head == 0 && s.query == 0 && s.key == 0) {
        s.query = S;
        s.key = 1;
    }
    return b * s.batch + h * s.head + i * s.query + j * s.key;
}

int oracle_visible(const mha_mask *m, int T, int S, int b, int h, int i, int j)
{
    if (m->causal == MHA_CAUSAL && j > i + (S - T)) return 0;
    if (m->causal == MHA_CAUSAL_UPPER_LEFT && j > i) return 0;
    if (m->key_len && j >= m->key_len[b]) return 0;
    if (m->allow && !m->allow[mask_index(m->allow_stride, S, b, h, i, j)]) return 0;
    if (m->bias && bits_f(m->bias[mask_index(m->bias_stride, S, b, h, i, j)]) == 0xff800000u)
        return 0;
    return 1;
}

static double bias_at(const mha_mask *m, int S, int b, int h, int i, int j)
{
    return m->bias ? (double)m->bias[mask_index(m->bias_stride, S, b, h, i, j)] : 0;
}

/* ---- softmax(q k^T scale + bias, masked) v ----------------------------------------------- */

/* One row: q [dk], k [S,dk], v [S,dv] -> o [dv], attn [S]. Both start as zeros. */
static void attend_row(const double *q, const double *k, const double *v, int T, int S, int dk,
                       int dv, double scale, const mha_mask *m, int b, int h, int i, double *o,
                       double *attn, double *lse, double *size, double *v_max)
{
    double *score = doubles(S), top = 0, sum = 0;
    int seen = 0;

    *lse = ninf();
    for (int j = 0; j < S; j++) {
        if (!oracle_visible(m, T, S, b, h, i, j)) continue;
        for (int c = 0; c < dk; c++) score[j] += q[c] * k[j * dk + c];
        score[j] = score[j] * scale + bias_at(m, S, b, h, i, j);
        if (!seen || score[j] > top) top = score[j];
        seen = 1;
    }
    for (int j = 0; j < S; j++)
        if (oracle_visible(m, T, S, b, h, i, j)) {
            attn[j] = exp(score[j] - top);
            sum += attn[j];
        }
    for (int j = 0; j < S; j++) {
        double bias;
        if (!oracle_visible(m, T, S, b, h, i, j)) continue;
        bias = bias_at(m, S, b, h, i, j);
        attn[j] /= sum;
        *size += attn[j] * (fabs(score[j] - bias) + fabs(bias));
        for (int c = 0; c < dv; c++) {
            o[c] += attn[j] * v[j * dv + c];
            if (fabs(v[j * dv + c]) > *v_max) *v_max = fabs(v[j * dv + c]);
        }
    }
    if (seen) *lse = top + log(sum);
    free(score);
}

/* q [B,H,T,dk], k [B,G,S,dk], v [B,G,S,dv], all contiguous. */
static void attend(oracle_result *r, const double *q, const double *k, const double *v, int B,
                   int H, int G, int T, int S, int dk, int dv, double scale, const mha_mask *m)
{
    r->o = doubles(B * H * T * dv);
    r->attn = doubles(B * H * T * S);
    r->attn_mean = doubles(B * T * S);
    r->lse = doubles(B * H * T);
    r->size = doubles(B * H * T);
    r->v_max = 0;
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < T; i++) {
                const int row = (b * H + h) * T + i, kv = (b * G + h / (H / G)) * S;
                attend_row(q + row * dk, k + kv * dk, v + kv * dv, T, S, dk, dv, scale, m, b, h, i,
                           r->o + row * dv, r->attn + row * S, &r->lse[row], &r->size[row],
                           &r->v_max);
                for (int j = 0; j < S; j++)
                    r->attn_mean[(b * T + i) * S + j] += r->attn[row * S + j] / H;
            }
}

/* ---- mha_sdpa ---------------------------------------------------------------------------- */

/* Strided floats [B,H,T,d] to contiguous doubles. */
static double *gather(const float *x, mha_stride s, int B, int H, int T, int d)
{
    double *y = doubles(B * H * T * d), *p = y;
    if (s.batch == 0 && s.head == 0 && s.seq == 0) {
        s.batch = H * T * d;
        s.head = T * d;
        s.seq = d;
    }
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++)
                for (int c = 0; c < d; c++)
                    *p++ = (double)x[b * s.batch + h * s.head + t * s.seq + c];
    return y;
}

static double scale_of(float scale, int d_k)
{
    return bits_f(scale) << 1 ? (double)scale : 1.0 / sqrt((double)d_k);
}

oracle_result oracle_sdpa(const mha_sdpa_args *a)
{
    const int B = a->batch, H = a->heads, G = a->kv_heads ? a->kv_heads : H;
    const int T = a->seq, S = a->source_seq, dk = a->d_k, dv = a->d_v ? a->d_v : dk;
    double *q = gather(a->q, a->q_stride, B, H, T, dk);
    double *k = gather(a->k, a->k_stride, B, G, S, dk);
    double *v = gather(a->v, a->v_stride, B, G, S, dv);
    oracle_result r;

    memset(&r, 0, sizeof r);
    attend(&r, q, k, v, B, H, G, T, S, dk, dv, scale_of(a->scale, dk), &a->mask);
    free(q);
    free(k);
    free(v);
    return r;
}

/* ---- mha_forward ------------------------------------------------------------------------- */

/* W[i][o], whichever way it lies; it has in rows and out columns. */
static double weight(const float *w, mha_layout layout, int in, int out, int i, int o)
{
    return (double)(layout == MHA_IN_OUT ? w[i * out + o] : w[o * in + i]);
}

/* y [rows,n] = x [rows,in] times columns first .. first+n-1 of W, plus b [n]. */
static void project(const double *x, int rows, int in, const float *w, mha_layout layout, int out,
                    int first, int n, const float *b, double *y)
{
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < n; o++) {
            double s = b ? (double)b[o] : 0;
            for (int i = 0; i < in; i++)
                s += x[r * in + i] * weight(w, layout, in, out, i, first + o);
            y[r * n + o] = s;
        }
}

void oracle_project(const double *x, int rows, int in, int out, const float *w, mha_layout layout,
                    const float *b, double *y)
{
    project(x, rows, in, w, layout, out, 0, out, b, y);
}

/* x [B,T,H,d] -> [B,H,T,d]; with T and H exchanged it is its own inverse. Frees x. */
static double *swap_axes(double *x, int B, int T, int H, int d)
{
    double *y = doubles(B * H * T * d);
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int h = 0; h < H; h++)
                for (int c = 0; c < d; c++)
                    y[((b * H + h) * T + t) * d + c] = x[((b * T + t) * H + h) * d + c];
    free(x);
    return y;
}

static double *widen(const float *x, int n)
{
    double *y = doubles(n);
    for (int i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

/* The norms that tolerances are made from; o [rows,in]. */
static void sizes(oracle_result *r, const double *o, int rows, int in, int D, const mha_weights *w)
{
    r->y_size = max_abs(r->y, (size_t)(rows * D));
    for (int c = 0; c < D; c++) {
        const double bias = w->b_out ? (double)w->b_out[c] : 0;
        double column = 0;
        for (int i = 0; i < in; i++) column += pow(weight(w->out, w->layout, in, D, i, c), 2);
        if (sqrt(column) > r->w_size) r->w_size = sqrt(column);
        for (int t = 0; t < rows; t++) {
            double terms = bias * bias;
            for (int i = 0; i < in; i++) {
                const double term = o[t * in + i] * weight(w->out, w->layout, in, D, i, c);
                terms += term * term;
            }
            if (sqrt(terms) > r->y_size) r->y_size = sqrt(terms);
        }
    }
}

oracle_result oracle_forward(const mha_config *cfg, const mha_weights *w, const mha_args *a)
{
    const int B = a->batch, T = a->seq, S = a->source ? a->source_seq : T;
    const int D = cfg->d_model, H = cfg->n_heads, G = cfg->n_kv_heads ? cfg->n_kv_heads : H;
    const int dk = cfg->d_k ? cfg->d_k : D / H, dv = cfg->d_v ? cfg->d_v : dk;
    const int Dk = cfg->d_source ? cfg->d_source : D, Dv = cfg->d_source_v ? cfg->d_source_v : Dk;
    const int nq = H * dk, nk = G * dk, nv = G * dv, all = nq + nk + nv;
    const float *source = a->source ? a->source : a->x;
    const float *source_v = a->source_v ? a->source_v : source;
    const float *bq = w->b_qkv ? w->b_qkv : w->b_q;
    const float *bk = w->b_qkv ? w->b_qkv + nq : w->b_k;
    const float *bv = w->b_qkv ? w->b_qkv + nq + nk : w->b_v;
    double *x = widen(a->x, B * T * D), *xk = widen(source, B * S * Dk);
    double *xv = widen(source_v, B * S * Dv);
    double *q = doubles(B * T * nq), *k = doubles(B * S * nk), *v = doubles(B * S * nv), *o;
    oracle_result r;

    memset(&r, 0, sizeof r);
    if (w->qkv) {
        project(x, B * T, D, w->qkv, w->layout, all, 0, nq, bq, q);
        project(xk, B * S, D, w->qkv, w->layout, all, nq, nk, bk, k);
        project(xv, B * S, D, w->qkv, w->layout, all, nq + nk, nv, bv, v);
    } else {
        project(x, B * T, D, w->q, w->layout, nq, 0, nq, bq, q);
        project(xk, B * S, Dk, w->k, w->layout, nk, 0, nk, bk, k);
        project(xv, B * S, Dv, w->v, w->layout, nv, 0, nv, bv, v);
    }
    q = swap_axes(q, B, T, H, dk);
    k = swap_axes(k, B, S, G, dk);
    v = swap_axes(v, B, S, G, dv);
    attend(&r, q, k, v, B, H, G, T, S, dk, dv, scale_of(cfg->scale, dk), &a->mask);

    o = doubles(B * H * T * dv);
    memcpy(o, r.o, (size_t)(B * H * T * dv) * sizeof *o);
    o = swap_axes(o, B, H, T, dv);
    r.y = doubles(B * T * D);
    project(o, B * T, H * dv, w->out, w->layout, D, 0, D, w->b_out, r.y);
    sizes(&r, o, B * T, H * dv, D, w);

    free(x);
    free(xk);
    free(xv);
    free(q);
    free(k);
    free(v);
    free(o);
    return r;
}

void oracle_free(oracle_result *r)
{
    free(r->y);
    free(r->o);
    free(r->attn);
    free(r->attn_mean);
    free(r->lse);
    free(r->size);
    memset(r, 0, sizeof *r);
}
