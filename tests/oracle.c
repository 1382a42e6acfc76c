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
    for (size_t i = 0; i < n; i++) {
        const int finite = is_finite(a[i]) && is_finite(b[i]);
        if (!finite && bits_f(a[i]) != bits_f(b[i])) return 0;
        if (finite && !(fabs((double)a[i] - (double)b[i]) <= 1e-5 * fmax(1, fabs((double)a[i]))))
            return 0;
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

/* Where query i stands; key j stands at j. */
static int64_t position(const mha_mask *m, int T, int S, int i)
{
    return m->causal == MHA_CAUSAL_UPPER_LEFT ? i : (int64_t)i + S - T;
}

int oracle_visible(const mha_mask *m, int T, int S, int longest, int b, int h, int i, int j)
{
    const int64_t p = position(m, T, S, i);
    if (m->causal != MHA_NOT_CAUSAL && j > p) return 0;
    if (m->windowed && m->left >= 0 && j < p - m->left) return 0;
    if (m->windowed && m->right >= 0 && j > p + m->right) return 0;
    if (m->key_len && j >= m->key_len[b]) return 0;
    if (m->key_start && j < m->key_start[b]) return 0;
    if (m->key_padding && m->key_padding[b * longest + j]) return 0;
    if (m->allow && !m->allow[mask_index(m->allow_stride, longest, b, h, i, j)]) return 0;
    if (m->bias && bits_f(m->bias[mask_index(m->bias_stride, longest, b, h, i, j)]) == 0xff800000u)
        return 0;
    return 1;
}

float oracle_gate(const float *gate, mha_gate_stride s, const int *cu_seq, int b, int h, int i)
{
    if (!gate) return 1;
    if (s.batch == 0 && s.seq == 0 && s.head == 0) s.head = 1;
    if (cu_seq) return gate[(cu_seq[b] + i) * s.seq + h * s.head];
    return gate[b * s.batch + i * s.seq + h * s.head];
}

void oracle_slopes(int heads, double *slopes)
{
    int below = 1;
    while (2 * below <= heads) below *= 2;
    for (int i = 0; i < heads; i++)
        slopes[i] = i < below ? pow(2, -8.0 * (i + 1) / below)
                              : pow(2, -8.0 * (2 * (i - below) + 1) / (2 * below));
}

/* ---- which rows belong to which sequence ------------------------------------------------- */

/* Queries or keys of B sequences: row first[b] + t is token t < length[b]. */
typedef struct rows {
    int *first, *length;
    int total, longest;
} rows;

static int *ints(int n)
{
    int *p = (int *)calloc(n ? (size_t)n : 1, sizeof *p);
    if (!p) abort();
    return p;
}

/* By cu [B+1], or n of each. */
static rows rows_make(int B, int n, const int *cu)
{
    rows r;
    r.first = ints(B);
    r.length = ints(B);
    r.total = cu ? cu[B] : B * n;
    r.longest = cu ? 0 : n;
    for (int b = 0; b < B; b++) {
        r.first[b] = cu ? cu[b] : b * n;
        r.length[b] = cu ? cu[b + 1] - cu[b] : n;
        if (r.length[b] > r.longest) r.longest = r.length[b];
    }
    return r;
}

static void rows_free(rows *r)
{
    free(r->first);
    free(r->length);
}

/* ---- softmax(q k^T scale + bias, masked) v ----------------------------------------------- */

/* What attention needs, from either level. */
typedef struct core {
    int B, H, G, dk, dv;
    rows tq, sk;
    const int *cu_seq;
    double *q, *k, *v; /* [rows,H,dk] [rows,G,dk] [rows,G,dv] */
    double *e_q, *e_k; /* [rows,H] [rows,G], or null: see oracle_result.size */
    double scale, cap; /* cap 0: none */
    const mha_mask *mask;
    double *slopes;                 /* [H] or null */
    const float *sink, *sink_value; /* [H] [H,dv] or null */
    const float *bias_k, *bias_v;   /* [G,dk] [G,dv] or null */
    int zero_key;
    const float *gate;
    mha_gate_stride gate_stride;
    int asked; /* attn, attn_mean or lse is wanted */
} core;

static double norm_of(const double *x, int n)
{
    double s = 0;
    for (int i = 0; i < n; i++) s += x[i] * x[i];
    return sqrt(s);
}

/* What takes part in the softmax of a row. */
typedef struct part {
    int on;
    double score, size;
    const double *value; /* null: 0 */
} part;

/* scale q.k, capped. */
static void score(const core *c, const double *q, double e_q, const double *k, double e_k, part *p)
{
    double s = 0;
    for (int i = 0; i < c->dk; i++) s += q[i] * k[i];
    s *= c->scale;
    p->on = 1;
    p->score = s;
    p->size = fabs(s);
    if (c->cap > 0) {
        const double t = tanh(s / c->cap);
        p->score = c->cap * t;
        p->size = fabs(s) * (1 - t * t) + 2 * fabs(p->score);
    }
    if (c->e_q) p->size += fabs(c->scale) * (norm_of(k, c->dk) * e_q + norm_of(q, c->dk) * e_k);
}

/* o, attn and *size start as zeros. Parts: the keys, then bias_k, the key of zeros, the sink. */
static void attend_row(const core *c, int b, int h, int i, double *o, double *attn, double *lse,
                       double *size, double *rest, double *v_max)
{
    const int T = c->tq.length[b], S = c->sk.length[b], g = h / (c->H / c->G);
    const int row = (c->tq.first[b] + i) * c->H + h, n = S + 3;
    const double *q = c->q + row * c->dk, e_q = c->e_q ? c->e_q[row] : 0;
    part *parts = (part *)calloc((size_t)n, sizeof *parts), *more = parts + S;
    double *extra = doubles(c->dk + c->dv + c->dv), top = 0, sum = 0;
    int seen = 0;

    if (!parts) abort();
    *lse = ninf();
    for (int j = 0; j < S; j++) {
        const int kv = (c->sk.first[b] + j) * c->G + g;
        part *p = &parts[j];
        if (!oracle_visible(c->mask, T, S, c->sk.longest, b, h, i, j)) continue;
        score(c, q, e_q, c->k + kv * c->dk, c->e_k ? c->e_k[kv] : 0, p);
        p->value = c->v + kv * c->dv;
        if (c->mask->bias) {
            const ptrdiff_t at = mask_index(c->mask->bias_stride, c->sk.longest, b, h, i, j);
            p->score += (double)c->mask->bias[at];
            p->size += fabs((double)c->mask->bias[at]);
        }
        if (c->slopes) {
            const double far = fabs((double)(position(c->mask, T, S, i) - j));
            p->score -= c->slopes[h] * far;
            p->size += fabs(c->slopes[h] * far);
        }
    }
    if (c->bias_k) {
        for (int d = 0; d < c->dk; d++) extra[d] = (double)c->bias_k[g * c->dk + d];
        for (int d = 0; d < c->dv; d++) extra[c->dk + d] = (double)c->bias_v[g * c->dv + d];
        score(c, q, e_q, extra, 0, &more[0]);
        more[0].value = extra + c->dk;
    }
    if (c->zero_key) more[1].on = 1; /* a score of 0 */
    for (int j = 0; j < S + 2; j++)
        if (parts[j].on) seen = 1;
    if (seen && c->sink && bits_f(c->sink[h]) != 0xff800000u) {
        more[2].on = 1;
        more[2].score = (double)c->sink[h];
        more[2].size = fabs(more[2].score);
        if (c->sink_value) {
            for (int d = 0; d < c->dv; d++)
                extra[c->dk + c->dv + d] = (double)c->sink_value[h * c->dv + d];
            more[2].value = extra + c->dk + c->dv;
        }
    }

    seen = 0;
    for (int j = 0; j < n; j++)
        if (parts[j].on) {
            if (!seen || parts[j].score > top) top = parts[j].score;
            seen = 1;
        }
    for (int j = 0; j < n; j++)
        if (parts[j].on) sum += exp(parts[j].score - top);
    for (int j = 0; j < n; j++) {
        const part *p = &parts[j];
        double weight;
        if (!p->on) continue;
        weight = exp(p->score - top) / sum;
        *size += weight * p->size;
        if (j < S) attn[j] = weight;
        else *rest += weight;
        for (int d = 0; p->value && d < c->dv; d++) {
            o[d] += weight * p->value[d];
            if (fabs(p->value[d]) > *v_max) *v_max = fabs(p->value[d]);
        }
    }
    if (seen) *lse = top + log(sum);
    free(parts);
    free(extra);
}

static void attend(oracle_result *r, const core *c)
{
    const int B = c->B, H = c->H, S = c->sk.longest, n = c->tq.total * H;
    r->o = doubles(n * c->dv);
    r->attn = doubles(n * S);
    r->attn_mean = doubles(c->tq.total * S);
    r->lse = doubles(n);
    r->size = doubles(n);
    r->rest = doubles(n);
    r->gate = doubles(n);
    r->v_max = 0;
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < c->tq.length[b]; i++) {
                const int token = c->tq.first[b] + i;
                const int row =
                    c->cu_seq ? h * c->tq.total + token : (b * H + h) * c->tq.longest + i;
                const float gate = oracle_gate(c->gate, c->gate_stride, c->cu_seq, b, h, i);
                const int off = (bits_f(gate) << 1) == 0;
                r->gate[row] = (double)gate;
                r->lse[row] = ninf();
                if (off && !c->asked) continue;
                attend_row(c, b, h, i, r->o + row * c->dv, r->attn + row * S, &r->lse[row],
                           &r->size[row], &r->rest[row], &r->v_max);
                for (int d = 0; d < c->dv; d++)
                    r->o[row * c->dv + d] = off ? 0 : r->o[row * c->dv + d] * (double)gate;
                for (int j = 0; j < S; j++) r->attn_mean[token * S + j] += r->attn[row * S + j] / H;
            }
}

static void core_free(core *c)
{
    rows_free(&c->tq);
    rows_free(&c->sk);
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->e_q);
    free(c->e_k);
    free(c->slopes);
}

/* ---- mha_sdpa ---------------------------------------------------------------------------- */

static double *widen(const float *x, int n)
{
    double *y = doubles(n);
    for (int i = 0; i < n; i++) y[i] = (double)x[i];
    return y;
}

/* Strided floats [B,H,T,d], or [H,rows,d] with cu, to doubles [rows,H,d]. */
static double *gather(const float *x, mha_stride s, const rows *r, const int *cu, int B, int H,
                      int d)
{
    double *y = doubles(r->total * H * d);
    if (s.batch == 0 && s.head == 0 && s.seq == 0) {
        const int T = cu ? r->total : r->longest;
        s.batch = H * T * d;
        s.head = T * d;
        s.seq = d;
    }
    for (int b = 0; b < B; b++)
        for (int h = 0; h < H; h++)
            for (int t = 0; t < r->length[b]; t++) {
                const int row = r->first[b] + t;
                const ptrdiff_t at = h * s.head + (cu ? row * s.seq : b * s.batch + t * s.seq);
                for (int c = 0; c < d; c++) y[(row * H + h) * d + c] = (double)x[at + c];
            }
    return y;
}

static int is_zero(float x)
{
    return (bits_f(x) << 1) == 0;
}

static double scale_of(float scale, int d_k)
{
    return is_zero(scale) ? 1.0 / sqrt((double)d_k) : (double)scale;
}

oracle_result oracle_sdpa(const mha_sdpa_args *a)
{
    core c;
    oracle_result r;

    memset(&r, 0, sizeof r);
    memset(&c, 0, sizeof c);
    c.B = a->batch;
    c.H = a->heads;
    c.G = a->kv_heads ? a->kv_heads : c.H;
    c.dk = a->d_k;
    c.dv = a->d_v ? a->d_v : c.dk;
    c.tq = rows_make(c.B, a->seq, a->cu_seq);
    c.sk = rows_make(c.B, a->source_seq, a->cu_source);
    c.cu_seq = a->cu_seq;
    c.q = gather(a->q, a->q_stride, &c.tq, a->cu_seq, c.B, c.H, c.dk);
    c.k = gather(a->k, a->k_stride, &c.sk, a->cu_source, c.B, c.G, c.dk);
    c.v = gather(a->v, a->v_stride, &c.sk, a->cu_source, c.B, c.G, c.dv);
    c.scale = scale_of(a->scale, c.dk);
    c.cap = (double)a->softcap;
    c.mask = &a->mask;
    if (a->alibi) c.slopes = widen(a->alibi, c.H);
    c.sink = a->sink;
    c.sink_value = a->sink_value;
    c.gate = a->gate;
    c.gate_stride = a->gate_stride;
    c.asked = a->attn || a->attn_mean || a->lse;
    attend(&r, &c);
    core_free(&c);
    return r;
}

/* ---- rotary positions -------------------------------------------------------------------- */

static double value_or(float value, double otherwise)
{
    return is_zero(value) ? otherwise : (double)value;
}

/* Angle of pair i per step of position. */
static double frequency(const mha_rope *r, int width, int i)
{
    const double pi = 3.14159265358979323846, context = r->original;
    const double factor = value_or(r->factor, 1);
    double base = value_or(r->base, 10000), f;

    if (r->scaling == MHA_ROPE_NTK) base *= pow(factor, width / (width - 2.0));
    f = pow(base, -2.0 * i / width);
    if (r->scaling == MHA_ROPE_LINEAR) f /= factor;
    if (r->scaling == MHA_ROPE_YARN) {
        /* the pair that turns so many times within the context of training */
        const double per = width / (2 * log(base));
        double low = floor(per * log(context / (value_or(r->beta_fast, 32) * 2 * pi)));
        double high = ceil(per * log(context / (value_or(r->beta_slow, 1) * 2 * pi))), ramp;
        low = low < 0 ? 0 : low > width - 1 ? width - 1 : low;
        high = high < 0 ? 0 : high > width - 1 ? width - 1 : high;
        if (!(high - low > 0) && !(low - high > 0)) high += 0.001;
        ramp = (i - low) / (high - low);
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        f = f / factor * ramp + f * (1 - ramp);
    }
    if (r->scaling == MHA_ROPE_LLAMA3) {
        const double low = value_or(r->low_freq, 1), high = value_or(r->high_freq, 4);
        const double turns = context * f / (2 * pi);
        if (turns < low) f /= factor;
        else if (turns <= high) {
            const double smooth = (turns - low) / (high - low);
            f = (1 - smooth) * f / factor + smooth * f;
        }
    }
    return f;
}

void oracle_rotate(const mha_rope *rope, int d, int at, double *x)
{
    const int width = rope->width ? rope->width : d;
    double size = 1;
    if (rope->layout == MHA_ROPE_NONE) return;
    if (rope->scaling == MHA_ROPE_YARN)
        size = value_or(rope->attention, 0.1 * log(value_or(rope->factor, 1)) + 1);
    for (int i = 0; i < width / 2; i++) {
        const int m = rope->layout == MHA_ROPE_HALF ? i : 2 * i;
        const int n = rope->layout == MHA_ROPE_HALF ? i + width / 2 : 2 * i + 1;
        const double angle = at * frequency(rope, width, i), u = x[m], v = x[n];
        x[m] = size * (u * cos(angle) - v * sin(angle));
        x[n] = size * (v * cos(angle) + u * sin(angle));
    }
}

/* ---- mha_forward ------------------------------------------------------------------------- */

/* W[i][o], whichever way it lies; it has in rows and out columns. */
static double weight(const float *w, mha_layout layout, int in, int out, int i, int o)
{
    return (double)(layout == MHA_IN_OUT ? w[i * out + o] : w[o * in + i]);
}

/* y [rows,n] = x [rows,in] times columns first .. first+n-1 of W, plus b [n]. If terms is not null:
   the norm of what was added up for each number of y. */
static void project(const double *x, int count, int in, const float *w, mha_layout layout, int out,
                    int first, int n, const float *b, double *y, double *terms)
{
    for (int r = 0; r < count; r++)
        for (int o = 0; o < n; o++) {
            double s = b ? (double)b[o] : 0, squares = s * s;
            for (int i = 0; i < in; i++) {
                const double term = x[r * in + i] * weight(w, layout, in, out, i, first + o);
                s += term;
                squares += term * term;
            }
            y[r * n + o] = s;
            if (terms) terms[r * n + o] = sqrt(squares);
        }
}

void oracle_project(const double *x, int count, int in, int out, const float *w, mha_layout layout,
                    const float *b, double *y)
{
    project(x, count, in, w, layout, out, 0, out, b, y, NULL);
}

/* Norm and rope of one head x [d] at a position. terms [d]: see project, of `in` terms each.
   Returns e: 2^-24 e is about the norm of the error in x. The projection makes one of 2^-24 terms
   (1 + sqrt(in) / 4), which the norm divides by its root; rope rounds cos, sin and the result. */
static double finish_head(const mha_config *cfg, const float *norm, const float *norm_bias,
                          int position_of, double *x, const double *terms, int d, int in)
{
    const double eps = value_or(cfg->norm_eps, (double)1e-6f);
    double mean = 0, square = 0, root, e = 0;
    if (cfg->qk_norm != MHA_NORM_NONE) {
        for (int i = 0; i < d; i++) mean += x[i] / d;
        if (cfg->qk_norm == MHA_NORM_RMS) mean = 0;
        for (int i = 0; i < d; i++) square += (x[i] - mean) * (x[i] - mean) / d;
        root = sqrt(square + eps);
        for (int i = 0; i < d; i++) {
            const double w = norm ? (double)norm[i] : 1;
            const double error = terms[i] * (1 + sqrt((double)in) / 4) / root * w;
            x[i] = (x[i] - mean) / root * w + (norm_bias ? (double)norm_bias[i] : 0);
            e += error * error;
        }
        e = sqrt(e);
    }
    oracle_rotate(&cfg->rope, d, position_of, x);
    return cfg->rope.layout == MHA_ROPE_NONE ? e : e + norm_of(x, d);
}

/* x [rows,heads,d]: q or k. at [rows]: positions. Returns e [rows,heads], or null if it is 0. */
static double *finish(const mha_config *cfg, const float *norm, const float *norm_bias,
                      const int *at, double *x, const double *terms, int count, int heads, int d,
                      int in)
{
    double *e;
    if (cfg->qk_norm == MHA_NORM_NONE && cfg->rope.layout == MHA_ROPE_NONE) return NULL;
    e = doubles(count * heads);
    for (int r = 0; r < count * heads; r++)
        e[r] = finish_head(cfg, norm, norm_bias, at[r / heads], x + r * d, terms + r * d, d, in);
    return e;
}

/* The norms that tolerances are made from; o [rows,in]. */
static void sizes(oracle_result *r, const double *o, int count, int in, int D, const mha_weights *w)
{
    r->y_size = max_abs(r->y, (size_t)(count * D));
    for (int c = 0; c < D; c++) {
        const double bias = w->b_out ? (double)w->b_out[c] : 0;
        double column = 0;
        for (int i = 0; i < in; i++) column += pow(weight(w->out, w->layout, in, D, i, c), 2);
        if (sqrt(column) > r->w_size) r->w_size = sqrt(column);
        for (int t = 0; t < count; t++) {
            double terms = bias * bias;
            for (int i = 0; i < in; i++) {
                const double term = o[t * in + i] * weight(w->out, w->layout, in, D, i, c);
                terms += term * term;
            }
            if (sqrt(terms) > r->y_size) r->y_size = sqrt(terms);
        }
    }
}

/* Where tokens come from, and their positions. Takes what it is given. */
typedef struct tokens {
    rows tq, sk;
    double *x, *xk, *xv; /* [rows,D] [rows,d_source] [rows,d_source_v] */
    int *at_q, *at_k;    /* [rows] */
} tokens;

static oracle_result forward(const mha_config *cfg, const mha_weights *w, const mha_args *a,
                             tokens *t)
{
    const int D = cfg->d_model, H = cfg->n_heads, G = cfg->n_kv_heads ? cfg->n_kv_heads : H;
    const int dk = cfg->d_k ? cfg->d_k : D / H, dv = cfg->d_v ? cfg->d_v : dk;
    const int Dk = cfg->d_source ? cfg->d_source : D, Dv = cfg->d_source_v ? cfg->d_source_v : Dk;
    const int nq = H * dk, nk = G * dk, nv = G * dv, all = nq + nk + nv;
    const int Q = t->tq.total, K = t->sk.total;
    const float *bq = w->b_qkv ? w->b_qkv : w->b_q;
    const float *bk = w->b_qkv ? w->b_qkv + nq : w->b_k;
    const float *bv = w->b_qkv ? w->b_qkv + nq + nk : w->b_v;
    double *q_terms = doubles(Q * nq), *k_terms = doubles(K * nk), *o = doubles(Q * H * dv);
    core c;
    oracle_result r;

    memset(&r, 0, sizeof r);
    memset(&c, 0, sizeof c);
    c.q = doubles(Q * nq);
    c.k = doubles(K * nk);
    c.v = doubles(K * nv);
    if (w->qkv) {
        project(t->x, Q, D, w->qkv, w->layout, all, 0, nq, bq, c.q, q_terms);
        project(t->xk, K, D, w->qkv, w->layout, all, nq, nk, bk, c.k, k_terms);
        project(t->xv, K, D, w->qkv, w->layout, all, nq + nk, nv, bv, c.v, NULL);
    } else {
        project(t->x, Q, D, w->q, w->layout, nq, 0, nq, bq, c.q, q_terms);
        project(t->xk, K, Dk, w->k, w->layout, nk, 0, nk, bk, c.k, k_terms);
        project(t->xv, K, Dv, w->v, w->layout, nv, 0, nv, bv, c.v, NULL);
    }
    c.e_q = finish(cfg, w->q_norm, w->q_norm_bias, t->at_q, c.q, q_terms, Q, H, dk, D);
    c.e_k = finish(cfg, w->k_norm, w->k_norm_bias, t->at_k, c.k, k_terms, K, G, dk, Dk);
    c.B = a->batch;
    c.H = H;
    c.G = G;
    c.dk = dk;
    c.dv = dv;
    c.tq = t->tq;
    c.sk = t->sk;
    c.cu_seq = a->cu_seq;
    c.scale = scale_of(cfg->scale, dk);
    c.cap = (double)cfg->softcap;
    c.mask = &a->mask;
    if (cfg->alibi && w->alibi) {
        c.slopes = widen(w->alibi, H);
    } else if (cfg->alibi) {
        c.slopes = doubles(H);
        oracle_slopes(H, c.slopes);
    }
    c.sink = w->sink;
    c.sink_value = w->sink_value;
    c.bias_k = w->bias_k;
    c.bias_v = w->bias_v;
    c.zero_key = cfg->zero_attn;
    c.gate = a->gate;
    c.gate_stride = a->gate_stride;
    c.asked = a->attn || a->attn_mean || a->lse;
    attend(&r, &c);

    for (int b = 0; b < c.B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < c.tq.length[b]; i++) {
                const int token = c.tq.first[b] + i;
                const int row = c.cu_seq ? h * Q + token : (b * H + h) * c.tq.longest + i;
                for (int d = 0; d < dv; d++) o[(token * H + h) * dv + d] = r.o[row * dv + d];
            }
    r.y = doubles(Q * D);
    project(o, Q, H * dv, w->out, w->layout, D, 0, D, w->b_out, r.y, NULL);
    sizes(&r, o, Q, H * dv, D, w);

    core_free(&c); /* with the rows of t */
    free(q_terms);
    free(k_terms);
    free(o);
    free(t->x);
    free(t->xk);
    free(t->xv);
    free(t->at_q);
    free(t->at_k);
    return r;
}

/* positions [rows] as given, else 0, 1, ... in each sequence. */
static int *positions_of(const int *positions, const rows *r, int B)
{
    int *at = ints(r->total);
    for (int b = 0; b < B; b++)
        for (int i = 0; i < r->length[b]; i++)
            at[r->first[b] + i] = positions ? positions[r->first[b] + i] : i;
    return at;
}

oracle_result oracle_forward(const mha_config *cfg, const mha_weights *w, const mha_args *a)
{
    const int B = a->batch, D = cfg->d_model, Dk = cfg->d_source ? cfg->d_source : D;
    const int Dv = cfg->d_source_v ? cfg->d_source_v : Dk;
    const float *source = a->source ? a->source : a->x;
    const float *source_v = a->source_v ? a->source_v : source;
    tokens t;

    t.tq = rows_make(B, a->seq, a->cu_seq);
    t.sk = a->source ? rows_make(B, a->source_seq, a->cu_source) : rows_make(B, a->seq, a->cu_seq);
    t.x = widen(a->x, t.tq.total * D);
    t.xk = widen(source, t.sk.total * Dk);
    t.xv = widen(source_v, t.sk.total * Dv);
    t.at_q = positions_of(a->positions, &t.tq, B);
    t.at_k = positions_of(a->source ? a->source_positions : a->positions, &t.sk, B);
    return forward(cfg, w, a, &t);
}

oracle_result oracle_forward_cached(const mha_config *cfg, const mha_weights *w, const mha_args *a,
                                    const float *all, int count, const int *before,
                                    const int *positions)
{
    const int B = a->batch, D = cfg->d_model;
    int *cu = ints(B + 1);
    tokens t;

    t.tq = rows_make(B, a->seq, a->cu_seq);
    for (int b = 0; b < B; b++) cu[b + 1] = cu[b] + before[b] + t.tq.length[b];
    t.sk = rows_make(B, 0, cu);
    t.x = doubles(t.tq.total * D);
    t.xk = doubles(t.sk.total * D);
    t.xv = doubles(t.sk.total * D);
    t.at_q = ints(t.tq.total);
    t.at_k = ints(t.sk.total);
    for (int b = 0; b < B; b++)
        for (int j = 0; j < t.sk.length[b]; j++) {
            const int from = b * count + j, k = cu[b] + j, q = t.tq.first[b] + j - before[b];
            t.at_k[k] = positions ? positions[from] : j;
            if (j >= before[b]) t.at_q[q] = t.at_k[k];
            for (int d = 0; d < D; d++) {
                t.xk[k * D + d] = t.xv[k * D + d] = (double)all[from * D + d];
                if (j >= before[b]) t.x[q * D + d] = (double)all[from * D + d];
            }
        }
    free(cu);
    return forward(cfg, w, a, &t);
}

void oracle_free(oracle_result *r)
{
    free(r->y);
    free(r->o);
    free(r->attn);
    free(r->attn_mean);
    free(r->lse);
    free(r->size);
    free(r->rest);
    free(r->gate);
    memset(r, 0, sizeof *r);
}
