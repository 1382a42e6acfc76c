/* streams.h - caches next to a model of what they must hold: the list of tokens of each slot.
   Every call through a cache is checked, bit for bit, against the same queries and all tokens of
   their slot in one call: without a cache, or, where the cache rounds, in a new one. */
#ifndef STREAMS_H
#define STREAMS_H

#include "options.h"

enum { SLOTS = 4, CACHES = 2 };

/* The tokens of one slot. Of a ring, those from floor on must still be there. */
typedef struct line {
    float *x; /* [room, D] */
    int *pos; /* [room] of rope */
    int len, floor;
} line;

typedef struct world {
    const rich *l;
    mha_cache_config cfg;
    int caches, room;
    mha_cache *cache[CACHES];
    unsigned char *memory[CACHES], *before; /* the caches live here; before: a copy of one */
    size_t bytes;
    line line[CACHES][SLOTS];
    float *y; /* what the last call gave */
    size_t ny;
} world;

/* One call. */
typedef struct plan {
    int count[SLOTS]; /* tokens of each slot */
    int ragged;       /* by cu_seq; else all counts must be the same */
    int only;         /* cache_only: x asks, and is not appended */
    int append;       /* mha_cache_append: x is appended, and does not ask */
    mha_causal causal;
    int windowed, left, right;
    int starts, start[SLOTS]; /* key_start */
    int allow, bias, padding; /* other masks, drawn */
    int positions;            /* given, drawn; else the default */
    int gate, outputs;        /* drawn; attn, attn_mean and lse too */
    int threads;              /* 0 = serial */
    int workspace;            /* of the size that mha_workspace_size says */
    int unchecked;            /* y is compared by the caller */
} plan;

static inline void *stream_take(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "the test program is out of memory\n");
        abort();
    }
    return p;
}

/* 1 if all bytes of n floats are this one. */
static inline int bytes_are(const float *p, int byte, size_t n)
{
    const unsigned char *c = (const unsigned char *)p;
    for (size_t i = 0; i < n * sizeof *p; i++)
        if (c[i] != byte) return 0;
    return 1;
}

static inline mha_status world_make(world *w, const rich *l, int caches, mha_cache_config cfg,
                                    int room)
{
    mha_status st;
    memset(w, 0, sizeof *w);
    w->l = l;
    w->cfg = cfg;
    w->caches = caches;
    w->room = room;
    w->y = test_floats(1, 0.0f);
    st = mha_cache_size(l->n.layer, &cfg, &w->bytes);
    w->before = (unsigned char *)stream_take(w->bytes);
    for (int c = 0; c < caches && st == MHA_OK; c++) {
        w->memory[c] = (unsigned char *)stream_take(w->bytes);
        memset(w->memory[c], 0xff, w->bytes);
        st = mha_cache_init(&w->cache[c], w->memory[c], w->bytes, l->n.layer, &cfg);
        for (int b = 0; b < cfg.batch; b++) {
            w->line[c][b].x = test_floats((size_t)(room * l->n.cfg.d_model), 0.0f);
            w->line[c][b].pos = (int *)stream_take((size_t)room * sizeof(int));
        }
    }
    return st;
}

static inline void world_free(world *w)
{
    for (int c = 0; c < w->caches; c++) {
        mha_cache_free(w->cache[c]);
        free(w->memory[c]);
        for (int b = 0; b < SLOTS; b++) {
            free(w->line[c][b].x);
            free(w->line[c][b].pos);
        }
    }
    free(w->before);
    free(w->y);
    memset(w, 0, sizeof *w);
}

/* ---- the model ------------------------------------------------------------------------------ */

static inline void line_copy(const world *w, line *to, const line *from, int len)
{
    const size_t n = (size_t)len;
    if (to != from) {
        memmove(to->x, from->x, n * (size_t)w->l->n.cfg.d_model * sizeof(float));
        memmove(to->pos, from->pos, n * sizeof(int));
    }
    to->len = len;
    to->floor = from->floor;
}

static inline void line_truncate(line *to, int len)
{
    to->len = len;
    if (len == 0) to->floor = 0;
}

static inline void line_append(const world *w, line *to, const float *x, const int *pos, int n)
{
    const size_t D = (size_t)w->l->n.cfg.d_model;
    if (n == 0) return;
    if (to->len + n > w->room) abort();
    if (to->floor > to->len) to->floor = to->len; /* nothing before was there any more */
    memcpy(to->x + (size_t)to->len * D, x, (size_t)n * D * sizeof(float));
    memcpy(to->pos + to->len, pos, (size_t)n * sizeof(int));
    to->len += n;
    if (w->cfg.ring && to->floor < to->len - w->cfg.capacity) to->floor = to->len - w->cfg.capacity;
}

static inline int world_longest(const world *w, int c)
{
    int n = 0;
    for (int b = 0; b < w->cfg.batch; b++)
        if (w->line[c][b].len > n) n = w->line[c][b].len;
    return n;
}

/* ---- one call ------------------------------------------------------------------------------- */

/* Tasks in an order that no loop would take. */
static inline void stream_for(void *ctx, int n, mha_task task, void *arg)
{
    (void)ctx;
    for (int i = n - 1; i >= 0; i -= 2) task(arg, i);
    for (int i = n - 2; i >= 0; i -= 2) task(arg, i);
}

/* All that a call is given and gives, [rows, ...] by token, and the stream it came from. */
typedef struct turn {
    int cu[SLOTS + 1], T, S, rows; /* T, S: the longest */
    float *x, *bias, *gate, *y, *attn, *mean, *lse;
    int *pos;
    unsigned char *allow, *padding;
} turn;

static inline void turn_free(turn *t)
{
    free(t->x), free(t->bias), free(t->gate), free(t->y), free(t->attn), free(t->mean);
    free(t->lse), free(t->pos), free(t->allow), free(t->padding);
}

static inline float *nan_floats(size_t n)
{
    float *p = test_floats(n, 0.0f);
    memset(p, 0xff, n * sizeof(float));
    return p;
}

/* Masks by drawing: allow [B,T,S], bias [B,H,T,S], padding [B,S]; gate [rows,H]. */
static inline turn turn_make(const world *w, int c, const plan *p, rng *r)
{
    const mha_config *cfg = &w->l->n.cfg;
    const int B = w->cfg.batch, H = cfg->n_heads, D = cfg->d_model;
    turn t;
    size_t n;
    memset(&t, 0, sizeof t);
    for (int b = 0; b < B; b++) {
        const int len = w->line[c][b].len + (p->only ? 0 : p->count[b]);
        t.cu[b + 1] = t.cu[b] + p->count[b];
        if (p->count[b] > t.T) t.T = p->count[b];
        if (len > t.S) t.S = len;
    }
    t.rows = t.cu[B];
    t.x = rng_floats(r, (size_t)(t.rows * D));
    t.pos = (int *)stream_take((size_t)t.rows * sizeof(int));
    for (int b = 0; b < B; b++)
        for (int i = 0; i < p->count[b]; i++)
            t.pos[t.cu[b] + i] = p->positions ? rng_int(r, -40, 400)
                                 : p->only    ? i
                                              : w->line[c][b].len + i;
    n = (size_t)(B * t.T) * (size_t)t.S;
    t.allow = (unsigned char *)stream_take(n);
    if (p->allow)
        for (size_t i = 0; i < n; i++) t.allow[i] = (unsigned char)rng_chance(r, 80);
    if (p->bias) {
        t.bias = rng_floats(r, n * (size_t)H);
        for (size_t i = 0; i < n * (size_t)H; i++)
            if (rng_chance(r, 10)) t.bias[i] = F_NINF;
    }
    t.padding = (unsigned char *)stream_take((size_t)(B * t.S));
    if (p->padding)
        for (int i = 0; i < B * t.S; i++) t.padding[i] = (unsigned char)(rng_chance(r, 15) ? 3 : 0);
    if (p->gate) {
        t.gate = rng_floats(r, (size_t)(t.rows * H));
        for (int i = 0; i < t.rows * H; i++)
            if (rng_chance(r, 20)) t.gate[i] = 0.0f;
    }
    t.y = nan_floats((size_t)(t.rows * D));
    t.attn = nan_floats((size_t)(t.rows * H) * (size_t)t.S);
    t.mean = nan_floats((size_t)t.rows * (size_t)t.S);
    t.lse = nan_floats((size_t)(t.rows * H));
    return t;
}

static inline mha_args turn_args(const world *w, int c, const plan *p, const turn *t)
{
    const int H = w->l->n.cfg.n_heads;
    const ptrdiff_t TS = (ptrdiff_t)t->T * t->S;
    mha_args a;
    memset(&a, 0, sizeof a);
    a.batch = w->cfg.batch;
    a.seq = p->ragged ? t->rows * (t->rows % 2) : t->T; /* 0 stands for the sum too */
    a.cu_seq = p->ragged ? t->cu : NULL;
    a.x = t->x;
    a.cache = w->cache[c];
    if (p->positions) a.positions = t->pos;
    if (p->threads) {
        a.parallel.parallel_for = stream_for;
        a.parallel.threads = p->threads;
    }
    if (p->append) return a;
    a.y = t->y;
    a.cache_only = p->only;
    a.mask.causal = p->causal;
    a.mask.windowed = p->windowed;
    a.mask.left = p->left;
    a.mask.right = p->right;
    if (p->starts) a.mask.key_start = p->start;
    if (p->allow) {
        a.mask.allow = t->allow;
        a.mask.allow_stride.batch = TS;
        a.mask.allow_stride.query = t->S;
        a.mask.allow_stride.key = 1;
    }
    if (p->bias) {
        a.mask.bias = t->bias;
        a.mask.bias_stride.batch = H * TS;
        a.mask.bias_stride.head = TS;
        a.mask.bias_stride.query = t->S;
        a.mask.bias_stride.key = 1;
    }
    if (p->padding) a.mask.key_padding = t->padding;
    if (p->gate) {
        a.gate = t->gate;
        a.gate_stride.batch = p->ragged ? 0 : t->T * H;
        a.gate_stride.seq = H;
        a.gate_stride.head = 1;
    }
    if (p->outputs) {
        a.attn = t->attn;
        a.attn_mean = t->mean;
        a.lse = t->lse;
        a.source_seq = t->S;
    }
    return a;
}

/* The rows of slot b again, with all its tokens in one call, on one thread. */
TEST check_slot(const world *w, int c, const plan *p, const turn *t, int b, int whole)
{
    const mha_config *cfg = &w->l->n.cfg;
    const line *l = &w->line[c][b]; /* after the call */
    const int H = cfg->n_heads, D = cfg->d_model, S = l->len, n = p->count[b], at = t->cu[b];
    const int rounds = w->cfg.type != MHA_F32, first = whole ? S - n : 0, T = first + n;
    unsigned char *allow = NULL, *padding = NULL;
    float *bias = NULL, *gate = NULL, *y = nan_floats((size_t)(T * D));
    float *attn = nan_floats((size_t)(H * T) * (size_t)S), *lse = nan_floats((size_t)(H * T));
    float *mean = nan_floats((size_t)T * (size_t)S);
    const float zero = 0.0f;
    mha_cache *fresh = NULL;
    mha_args a;
    memset(&a, 0, sizeof a);
    a.batch = 1;
    if (rounds) { /* whole is 0 */
        mha_cache_config one = w->cfg;
        one.batch = 1;
        one.ring = 0;
        one.capacity = S ? S : 1;
        ASSERT_STATUS(MHA_OK, mha_cache_create(&fresh, w->l->n.layer, &one));
        a.cache = fresh;
        a.x = l->x;
        a.positions = l->pos;
        a.seq = p->only ? S : S - n;
        if (a.seq) ASSERT_STATUS(MHA_OK, mha_cache_append(w->l->n.layer, &a));
        a.cache_only = p->only;
    } else if (!whole) {
        a.source = l->x;
        a.source_seq = S;
        a.source_positions = l->pos;
    }
    a.seq = T;
    a.x = whole ? l->x : t->x + at * D;
    a.positions = whole ? l->pos : t->pos + at;
    a.y = y;
    a.mask.causal = p->causal;
    a.mask.windowed = p->windowed;
    a.mask.left = p->left;
    a.mask.right = p->right;
    if (p->starts) a.mask.key_start = p->start + b;
    if (p->allow) {
        a.mask.allow = allow = (unsigned char *)stream_take((size_t)T * (size_t)S);
        memset(allow, 1, (size_t)T * (size_t)S);
        for (int i = 0; i < n; i++)
            memcpy(allow + (first + i) * S, t->allow + (b * t->T + i) * t->S, (size_t)S);
    }
    if (p->bias) {
        a.mask.bias = bias = test_floats((size_t)(H * T) * (size_t)S, 0.0f);
        a.mask.bias_stride.head = (ptrdiff_t)T * S;
        a.mask.bias_stride.query = S;
        a.mask.bias_stride.key = 1;
        for (int h = 0; h < H; h++)
            for (int i = 0; i < n; i++)
                memcpy(bias + (h * T + first + i) * S, t->bias + ((b * H + h) * t->T + i) * t->S,
                       (size_t)S * sizeof(float));
    }
    if (p->padding) {
        a.mask.key_padding = padding = (unsigned char *)stream_take((size_t)S);
        memcpy(padding, t->padding + b * t->S, (size_t)S);
    }
    if (p->gate) {
        a.gate = gate = test_floats((size_t)(T * H), 1.0f);
        memcpy(gate + first * H, t->gate + at * H, (size_t)(n * H) * sizeof(float));
        a.gate_stride.seq = H;
        a.gate_stride.head = 1;
    }
    if (p->outputs) a.attn = attn, a.attn_mean = mean, a.lse = lse;
    ASSERT_STATUS(MHA_OK, mha_forward(w->l->n.layer, &a));

    ASSERTm("y differs from that of one call",
            same_result(y + first * D, t->y + at * D, (size_t)(n * D)));
    for (int i = 0; i < n && p->outputs; i++) {
        for (int h = 0; h <= H; h++) { /* H: the mean */
            const float *want = h < H ? attn + (h * T + first + i) * S : mean + (first + i) * S;
            const ptrdiff_t by_head =
                p->ragged ? h * t->rows + at + i : (b * H + h) * t->T + i; /* h < H */
            const float *got = h < H ? t->attn + by_head * t->S : t->mean + (at + i) * t->S;
            ASSERTm("attn differs from that of one call", same_result(want, got, (size_t)S));
            for (int j = S; j < t->S; j++)
                ASSERTm("attn past the end of a sequence", same_bits(got + j, &zero, 1));
            if (h < H)
                ASSERTm("lse differs from that of one call",
                        same_result(lse + h * T + first + i, t->lse + by_head, 1));
        }
    }
    mha_cache_free(fresh);
    free(allow), free(padding), free(bias), free(gate), free(y), free(attn), free(lse), free(mean);
    PASS();
}

/* The call of a plan. Refused: nothing may have changed, neither the cache nor y. Done: checked
   against the model, which takes the new tokens. */
TEST feed(world *w, int c, const plan *p, rng *r, mha_status *status)
{
    const int B = w->cfg.batch, D = w->l->n.cfg.d_model;
    const size_t heads = (size_t)w->l->n.cfg.n_heads;
    turn t = turn_make(w, c, p, r);
    mha_args a = turn_args(w, c, p, &t);
    unsigned char *workspace = NULL;
    size_t size = 0;
    memcpy(w->before, w->memory[c], w->bytes);
    if (p->workspace) {
        mha_status st = mha_workspace_size(w->l->n.layer, &a, &size);
        if (st == MHA_OK) {
            a.workspace = workspace = (unsigned char *)stream_take(size + 8);
            a.workspace_size = size;
            memset(workspace, 0xff, size);
            memset(workspace + size, 0xa5, 8);
        }
    }
    *status = p->append ? mha_cache_append(w->l->n.layer, &a) : mha_forward(w->l->n.layer, &a);
    for (int i = 0; i < 8 && workspace; i++)
        ASSERTm("wrote behind the workspace", workspace[size + (size_t)i] == 0xa5);
    free(workspace);
    if (*status != MHA_OK || p->only)
        ASSERTm("a cache changed that must not", memcmp(w->before, w->memory[c], w->bytes) == 0);
    if (*status != MHA_OK) {
        ASSERTm("y written although refused", bytes_are(t.y, 0xff, (size_t)(t.rows * D)));
        ASSERTm("attn written although refused",
                bytes_are(t.attn, 0xff, (size_t)t.rows * heads * (size_t)t.S));
        turn_free(&t);
        PASS();
    }
    for (int b = 0; b < B; b++) {
        if (!p->only)
            line_append(w, &w->line[c][b], t.x + t.cu[b] * D, t.pos + t.cu[b], p->count[b]);
        ASSERT_EQ_FMT(w->line[c][b].len, mha_cache_length(w->cache[c], b), "%d");
    }
    for (int b = 0; b < B && !p->append && !p->unchecked; b++)
        if (p->count[b])
            CHECK_CALL(check_slot(w, c, p, &t, b,
                                  w->cfg.type == MHA_F32 && !p->only &&
                                      rng_chance(r, w->line[c][b].len > 200 ? 5 : 40)));
    free(w->y);
    w->y = t.y;
    w->ny = (size_t)(t.rows * D);
    t.y = NULL;
    turn_free(&t);
    PASS();
}

/* A call that must succeed. */
TEST feed_ok(world *w, int c, const plan *p, rng *r)
{
    mha_status st = MHA_OK;
    CHECK_CALL(feed(w, c, p, r, &st));
    ASSERT_STATUS(MHA_OK, st);
    PASS();
}

/* Slots that are shorter grow to these lengths, by mha_cache_append: for streams that are long
   before anything is asked. */
TEST world_advance(world *w, int c, const int *to, rng *r)
{
    const int B = w->cfg.batch, D = w->l->n.cfg.d_model;
    for (;;) {
        int cu[SLOTS + 1] = { 0 }, *pos;
        mha_args a;
        memset(&a, 0, sizeof a);
        for (int b = 0; b < B; b++) {
            int n = to[b] - w->line[c][b].len;
            if (n > w->cfg.capacity) n = w->cfg.capacity;
            cu[b + 1] = cu[b] + (n > 0 ? n : 0);
        }
        if (cu[B] == 0) PASS();
        float *x = rng_floats(r, (size_t)(cu[B] * D));
        pos = (int *)stream_take((size_t)cu[B] * sizeof(int));
        a.batch = B, a.cu_seq = cu, a.x = x, a.cache = w->cache[c];
        ASSERT_STATUS(MHA_OK, mha_cache_append(w->l->n.layer, &a));
        for (int b = 0; b < B; b++) {
            line *l = &w->line[c][b];
            for (int i = cu[b]; i < cu[b + 1]; i++) pos[i] = l->len + i - cu[b];
            line_append(w, l, x + cu[b] * D, pos + cu[b], cu[b + 1] - cu[b]);
            ASSERT_EQ_FMT(l->len, mha_cache_length(w->cache[c], b), "%d");
        }
        free(x), free(pos);
    }
}

/* n tokens of every slot, causal. */
static inline plan plan_of(int n)
{
    plan p;
    memset(&p, 0, sizeof p);
    for (int b = 0; b < SLOTS; b++) p.count[b] = n;
    p.causal = MHA_CAUSAL;
    return p;
}

/* ---- random histories ----------------------------------------------------------------------- */

/* A call with everything drawn. most: the largest count; a ring also needs a window. */
static inline plan plan_draw(const world *w, int c, rng *r, int most)
{
    plan p;
    int same = rng_int(r, 0, most), top = 0;
    const int longest = world_longest(w, c);
    memset(&p, 0, sizeof p);
    p.ragged = rng_chance(r, 60);
    for (int b = 0; b < w->cfg.batch; b++) {
        p.count[b] = !p.ragged           ? same
                     : rng_chance(r, 30) ? 0
                     : rng_chance(r, 40) ? 1
                                         : rng_int(r, 0, most);
        if (p.count[b] > most) p.count[b] = most;
        if (p.count[b] > top) top = p.count[b];
    }
    p.causal = rng_chance(r, 75) ? MHA_CAUSAL : MHA_NOT_CAUSAL;
    p.only = rng_chance(r, 15);
    p.append = !p.only && rng_chance(r, 12);
    if (w->cfg.ring) {
        p.windowed = 1;
        p.left = rng_int(r, 0, w->cfg.capacity - top);
        p.right = rng_int(r, -1, 3);
    } else if (rng_chance(r, 35)) {
        p.windowed = 1;
        p.left = rng_int(r, -1, longest + 3);
        p.right = rng_int(r, -1, 5);
    }
    p.starts = !w->cfg.ring && rng_chance(r, 15);
    for (int b = 0; b < w->cfg.batch; b++)
        p.start[b] = p.starts ? rng_int(r, 0, w->line[c][b].len) : 0;
    p.allow = rng_chance(r, 15);
    p.bias = rng_chance(r, 15);
    p.padding = rng_chance(r, 15);
    p.positions = rng_chance(r, 25);
    p.gate = rng_chance(r, 20);
    p.outputs = rng_chance(r, 25);
    p.threads = rng_chance(r, 40) ? rng_int(r, 1, 4) : 0;
    p.workspace = rng_chance(r, 40);
    return p;
}

/* 1 if the window of this call reaches tokens that a ring need not hold any more. */
static inline int plan_reaches_lost(const world *w, int c, const plan *p)
{
    for (int b = 0; b < w->cfg.batch; b++) {
        const line *l = &w->line[c][b];
        const int low = l->len - (p->only ? p->count[b] : 0) - p->left;
        const int end = l->floor < l->len ? l->floor : l->len;
        if (p->count[b] && (low > 0 ? low : 0) < end) return 1;
    }
    return 0;
}

/* One step of a history: a call, or something done to the slots. */
TEST world_step(world *w, rng *r, int most)
{
    const int c = rng_int(r, 0, w->caches - 1), b = rng_int(r, 0, w->cfg.batch - 1);
    const int what = rng_int(r, 0, 99);
    line *l = w->line[c];
    if (what < 60) {
        plan p = plan_draw(w, c, r, most);
        mha_status st = MHA_OK;
        int fits = 1;
        for (int s = 0; s < w->cfg.batch && !p.only; s++) {
            if (l[s].len + p.count[s] > w->room) PASS(); /* of the model: the history is over */
            if (!w->cfg.ring && l[s].len + p.count[s] > w->cfg.capacity) fits = 0;
        }
        const int lost = w->cfg.ring && !p.append && plan_reaches_lost(w, c, &p);
        CHECK_CALL(feed(w, c, &p, r, &st));
        if (!fits) ASSERT_STATUS(MHA_ERR_FULL, st);
        else if (!lost || st != MHA_ERR_CONFLICT) ASSERT_STATUS(MHA_OK, st);
    } else if (what < 72) {
        const int to = rng_chance(r, 70) ? l[b].len - rng_int(r, 0, 5) : rng_int(r, 0, l[b].len);
        if (rng_chance(r, 10)) {
            int shortest = l[0].len;
            for (int s = 1; s < w->cfg.batch; s++)
                if (l[s].len < shortest) shortest = l[s].len;
            ASSERT_STATUS(MHA_OK, mha_cache_truncate(w->cache[c], -1, shortest));
            for (int s = 0; s < w->cfg.batch; s++) line_truncate(&l[s], shortest);
        } else if (to >= 0) {
            ASSERT_STATUS(MHA_OK, mha_cache_truncate(w->cache[c], b, to));
            line_truncate(&l[b], to);
        }
    } else if (what < 76) {
        ASSERT_STATUS(MHA_OK, mha_cache_reset(w->cache[c], b));
        line_truncate(&l[b], 0);
    } else if (what < 90) {
        const int other = rng_int(r, 0, w->caches - 1), s = rng_int(r, 0, w->cfg.batch - 1);
        line *from = &w->line[other][s];
        const int all = w->cfg.ring || rng_chance(r, 30);
        const int len = all ? from->len : rng_int(r, 0, from->len);
        ASSERT_STATUS(MHA_OK, mha_cache_fork(w->cache[c], b, w->cache[other], s,
                                             all && rng_chance(r, 50) ? -1 : len));
        line_copy(w, &l[b], from, len);
        if (len == 0) line_truncate(&l[b], 0);
    } else {
        int order[SLOTS];
        line old[SLOTS];
        for (int s = 0; s < w->cfg.batch; s++) {
            order[s] = rng_int(r, 0, w->cfg.batch - 1);
            old[s] = l[s];
            old[s].x = copy_floats(l[s].x, (size_t)(l[s].len * w->l->n.cfg.d_model));
            old[s].pos = (int *)stream_take((size_t)l[s].len * sizeof(int));
            memcpy(old[s].pos, l[s].pos, (size_t)l[s].len * sizeof(int));
        }
        ASSERT_STATUS(MHA_OK, mha_cache_reorder(w->cache[c], order));
        for (int s = 0; s < w->cfg.batch; s++)
            line_copy(w, &l[s], &old[order[s]], old[order[s]].len);
        for (int s = 0; s < w->cfg.batch; s++) free(old[s].x), free(old[s].pos);
    }
    for (int s = 0; s < w->cfg.batch; s++)
        ASSERT_EQ_FMT(l[s].len, mha_cache_length(w->cache[c], s), "%d");
    PASS();
}

/* A random layer, two random caches, and a few dozen steps. */
TEST one_history(mha_isa isa, uint64_t seed, int ring, mha_type type)
{
    rng r = rng_make(seed);
    const int G = rng_int(&r, 1, 3), H = G * rng_int(&r, 1, 3), D = rng_int(&r, 3, 20);
    const int wide = rng_chance(&r, 15), deep = rng_chance(&r, 10);
    const int dk = wide ? rng_int(&r, 15, 33) : rng_int(&r, 2, 9);
    const int dv = wide ? rng_int(&r, 15, 33) : rng_int(&r, 1, 9);
    const int with = rng_chance(&r, 15) ? 0 : (int)(rng_u32(&r) & rng_u32(&r)) & WITH_ALL;
    rich l = rich_weights(isa, D, H, G, dk, dv, 0, 0, with, seed + 1);
    mha_cache_config cfg;
    world w;
    int most, to[SLOTS];
    memset(&cfg, 0, sizeof cfg);
    cfg.batch = rng_int(&r, 1, SLOTS);
    cfg.capacity = deep ? rng_int(&r, 250, 300) : rng_int(&r, 1, ring ? 24 : 70);
    cfg.ring = ring;
    cfg.type = type;
    most = cfg.capacity < 12 ? cfg.capacity : deep ? 90 : 12;
    if (rng_chance(&r, 10)) most = cfg.capacity;
    ASSERT_STATUS(MHA_OK, rich_create(&l));
    ASSERT_STATUS(MHA_OK, world_make(&w, &l, CACHES, cfg, ring ? 1300 : cfg.capacity));
    for (int c = 0; c < CACHES && ring && rng_chance(&r, 70); c++) {
        /* it went round before, and does soon again: places may be blocks of a power of two */
        for (int b = 0; b < SLOTS; b++)
            to[b] = rng_chance(&r, 70) ? 256 * rng_int(&r, 1, 3) - rng_int(&r, 0, 30)
                                       : rng_int(&r, 0, 700);
        if (cfg.capacity > 3) CHECK_CALL(world_advance(&w, c, to, &r));
    }
    for (int i = 0; i < 24; i++) CHECK_CALL(world_step(&w, &r, most));
    world_free(&w);
    rich_free(&l);
    PASS();
}

/* Every so many of the randomised cases is a history. */
TEST histories(mha_isa isa, int ring, mha_type type, long every)
{
    const char *only = getenv("MHA_TEST_CASE");
    rng r = rng_make(test_seed + 0x686973u);
    const uint64_t base = (uint64_t)rng_u32(&r) << 32 | rng_u32(&r);
    long n = 0, last = test_cases;
    if (only && *only) n = strtol(only, NULL, 0), last = n + 1;
    for (; n < last; n += every) {
        const enum greatest_test_res res =
            one_history(isa, base + (uint64_t)n * 8 + (uint64_t)ring, ring, type);
        if (res == GREATEST_TEST_RES_PASS) continue;
        printf("\n  history %ld on %s; again: MHA_TEST_SEED=%llu MHA_TEST_CASE=%ld\n", n,
               mha_isa_name(isa), (unsigned long long)test_seed, n);
        return res;
    }
    PASS();
}

#endif
