/* oracle.h - attention as the formula says, in double precision, one number after the other.
   The specification that mha.h is compared with; shares no code with it. */
#ifndef ORACLE_H
#define ORACLE_H

#include "test.h"

/* All contiguous. A row is a query of a head. With cu_seq the rows are [H,seq] instead of [B,H,T],
   and attn_mean is [seq,S]; S is then the longest, columns past a sequence's own are 0.
   size says how large the numbers were that went into exp, as the row's mean over its keys: sum_j
   attn_j (|scale q.k_j| + |bias_j| + |slope distance|). With softcap the first of them is
   |s| (1 - tanh^2) + 2 |cap tanh|: an error of s shrinks by the slope of tanh, and tanh makes some
   of its own. Norm and rope add scale (|k_j| e_q + |q| e_j), where 2^-24 e is the rounding error
   that they leave in q and in k. Extra keys and the sink count as keys. Tolerances are made from
   it. */
typedef struct oracle_result {
    double *y;         /* [B,T,D]; null after oracle_sdpa */
    double *o;         /* [B,H,T,d_v], after the gate */
    double *attn;      /* [B,H,T,S] */
    double *attn_mean; /* [B,T,S] */
    double *lse;       /* [B,H,T]; -inf where no key is visible */
    double *size;      /* [B,H,T] */
    double *rest;      /* [B,H,T]; the weight of what is no key of S: extra keys and the sink */
    double *gate;      /* [B,H,T]; 1 if there is none */
    double v_max;      /* max |v|, over all that is visible to any query */
    double y_size;     /* max over y of the norm of the terms that were added up; >= max |y| */
    double w_size;     /* max over the columns of W_O of their norm */
} oracle_result;

/* 1 if query i of head h sees key j. Decided by the mask alone. T and S are the lengths of
   sequence b; longest is the S of the call, which gives masks their shape. */
int oracle_visible(const mha_mask *m, int T, int S, int longest, int b, int h, int i, int j);

/* The gate of query i: 1 if there is none. cu_seq or null. */
float oracle_gate(const float *gate, mha_gate_stride s, const int *cu_seq, int b, int h, int i);

/* What mha_sdpa gives for these arguments. Reads nothing but inputs. A row with a gate of 0 is left
   out (o = 0, lse = -inf) unless attn, attn_mean or lse is asked for, as in mha.h. */
oracle_result oracle_sdpa(const mha_sdpa_args *a);

/* What mha_forward gives for a layer made from cfg and w. Without a cache. */
oracle_result oracle_forward(const mha_config *cfg, const mha_weights *w, const mha_args *a);

/* What mha_forward gives with a cache that holds the first before[b] tokens of sequence b. all
   [B,rows,D] has each sequence from its first token on, the old ones and then those of this call
   (a->seq of them, or as many as a->cu_seq says); before[b] + T_b <= rows, the numbers behind are
   not read. Of a: batch, seq, cu_seq, mask, gate, and whether attn, attn_mean or lse is asked for;
   not x, y, cache. positions [B,rows] for rope, of old and new tokens, or null. */
oracle_result oracle_forward_cached(const mha_config *cfg, const mha_weights *w, const mha_args *a,
                                    const float *all, int rows, const int *before,
                                    const int *positions);

/* y [rows][out] = x [rows][in] * W + b: one projection, W in either layout, b or null. */
void oracle_project(const double *x, int rows, int in, int out, const float *w, mha_layout layout,
                    const float *b, double *y);

/* One vector of d numbers at one position, rotated in place. */
void oracle_rotate(const mha_rope *rope, int d, int position, double *x);

/* The usual slopes of ALiBi. */
void oracle_slopes(int heads, double *slopes);

void oracle_free(oracle_result *r);

/* 1 if two results are equal bit for bit: what mha.h promises of results that must not differ.
   With TEST_FAST_MATH, where it promises no bits, to 1e-5 of each number, at least of 1. */
int same_result(const float *a, const float *b, size_t n);

/* 1 if this is -inf; by bits, for -ffast-math. */
int oracle_is_ninf(double d);

#endif
