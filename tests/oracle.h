/* oracle.h - attention as the formula says, in double precision, one number after the other.
   The specification that mha.h is compared with; shares no code with it. */
#ifndef ORACLE_H
#define ORACLE_H

#include "test.h"

/* All contiguous. size says how large the numbers were that went into exp, as the row's mean
   over its keys: sum_j attn_j (|scale q.k_j| + |bias_j|). Tolerances are made from it. */
typedef struct oracle_result {
    double *y;         /* [B,T,D]; null after oracle_sdpa */
    double *o;         /* [B,H,T,d_v] */
    double *attn;      /* [B,H,T,S] */
    double *attn_mean; /* [B,T,S] */
    double *lse;       /* [B,H,T]; -inf where no key is visible */
    double *size;      /* [B,H,T] */
    double v_max;      /* max |v|, over all that is visible to any query */
    double y_size;     /* max over y of the norm of the terms that were added up; >= max |y| */
    double w_size;     /* max over the columns of W_O of their norm */
} oracle_result;

/* 1 if query i of head h sees key j. Decided by the mask alone. */
int oracle_visible(const mha_mask *m, int T, int S, int b, int h, int i, int j);

/* What mha_sdpa gives for these arguments. Reads nothing but inputs. */
oracle_result oracle_sdpa(const mha_sdpa_args *a);

/* What mha_forward gives for a layer made from cfg and w. */
oracle_result oracle_forward(const mha_config *cfg, const mha_weights *w, const mha_args *a);

/* y [rows][out] = x [rows][in] * W + b: one projection, W in either layout, b or null. */
void oracle_project(const double *x, int rows, int in, int out, const float *w, mha_layout layout,
                    const float *b, double *y);

void oracle_free(oracle_result *r);

/* 1 if two results are equal bit for bit: what mha.h promises of results that must not differ.
   With TEST_FAST_MATH, where it promises no bits, to 1e-5 of the largest number, at least 1. */
int same_result(const float *a, const float *b, size_t n);

/* 1 if this is -inf; by bits, for -ffast-math. */
int oracle_is_ninf(double d);

#endif
