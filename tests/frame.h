/* frame.h - which queries and keys a call has, and which of them meet. */
#ifndef FRAME_H
#define FRAME_H

#include "oracle.h"

typedef struct frame {
    int B, H, T, S;         /* T and S: of the longest sequence */
    const int *cu_q, *cu_k; /* or null: all are of one length */
    const mha_mask *mask;
    const float *gate;
    mha_gate_stride gate_stride;
    int asked; /* attn, attn_mean or lse is wanted: a gate of 0 skips nothing */
    int extra; /* every query sees a key that is not of S */
    int far;   /* a bias times log2(e) can be -inf: then a key weighs 0, and is not read */
} frame;

static inline int q_len(const frame *f, int b)
{
    return f->cu_q ? f->cu_q[b + 1] - f->cu_q[b] : f->T;
}

static inline int k_len(const frame *f, int b)
{
    return f->cu_k ? f->cu_k[b + 1] - f->cu_k[b] : f->S;
}

/* Tokens of all sequences together, and the one that is t of sequence b. */
static inline int q_total(const frame *f)
{
    return f->cu_q ? f->cu_q[f->B] : f->B * f->T;
}

static inline int k_total(const frame *f)
{
    return f->cu_k ? f->cu_k[f->B] : f->B * f->S;
}

static inline int q_token(const frame *f, int b, int t)
{
    return f->cu_q ? f->cu_q[b] + t : b * f->T + t;
}

static inline int k_token(const frame *f, int b, int j)
{
    return f->cu_k ? f->cu_k[b] + j : b * f->S + j;
}

/* Of lse: [B,H,T], or [H,seq] with cu_seq. */
static inline size_t q_row(const frame *f, int b, int h, int t)
{
    return (size_t)(f->cu_q ? h * f->cu_q[f->B] + f->cu_q[b] + t : (b * f->H + h) * f->T + t);
}

/* 0 if this row's gate is 0 and nothing else wants it. */
static inline int works(const frame *f, int b, int h, int t)
{
    return f->asked || bits_f(oracle_gate(f->gate, f->gate_stride, f->cu_q, b, h, t)) << 1;
}

static inline int sees(const frame *f, int b, int h, int t, int j)
{
    return oracle_visible(f->mask, q_len(f, b), k_len(f, b), f->S, b, h, t, j);
}

/* The same, but for rows that are not computed. */
static inline int looks(const frame *f, int b, int h, int t, int j)
{
    return works(f, b, h, t) && sees(f, b, h, t, j);
}

#endif
