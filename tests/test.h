/* test.h - what every test file shares. Tests are written with greatest's API.
   One program: main.c holds MHA_IMPLEMENTATION, each test_*.c one SUITE. */
#ifndef TEST_H
#define TEST_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "greatest.h"

/* The library under test allocates through these: they count, and fail on request. */
void *test_malloc(size_t bytes);
void test_free(void *p);
extern long test_live;       /* blocks taken and not given back */
extern long test_allocs;     /* allocations since the counter was last set to 0 */
extern long test_fail_after; /* the allocation after this many returns null; -1 = never */

/* Its pool starts threads through this, in main.c; there are to be no more after so many, -1 = any
   number. */
extern long test_threads_left;
#ifndef _WIN32
#include <pthread.h>
int test_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
#endif

#define MHA_MALLOC(n) test_malloc(n)
#define MHA_FREE(p) test_free(p)
#ifndef MHA_THREADS
#define MHA_THREADS
#endif
#include "../mha.h"

/* Seed and number of randomised cases: environment MHA_TEST_SEED, MHA_TEST_CASES. */
extern uint64_t test_seed;
extern long test_cases;

/* Random numbers: splitmix64. Same on every machine. */
typedef struct rng {
    uint64_t s;
} rng;
rng rng_make(uint64_t seed);
uint32_t rng_u32(rng *r);
int rng_int(rng *r, int lo, int hi);       /* lo..hi, both included */
int rng_chance(rng *r, int percent);       /* 1 in percent % of calls */
float rng_normal(rng *r);                  /* N(0,1) */
void rng_fill(rng *r, float *p, size_t n); /* N(0,1) */
float *rng_floats(rng *r, size_t n);       /* malloc + N(0,1); free() it; never null */
float *test_floats(size_t n, float value); /* malloc + constant; free() it; never null */

/* Every instruction set this machine can run, SCALAR first; returns how many. */
int test_isas(mha_isa out[8]);

/* Special values that survive -ffast-math: built from bits, tested as bits. */
float f_bits(uint32_t bits);
uint32_t bits_f(float f);
#define F_INF f_bits(0x7f800000u)
#define F_NINF f_bits(0xff800000u)
#define F_NAN f_bits(0x7fc00000u)
int is_nan(float f);
int is_finite(float f);
int same_bits(const float *a, const float *b, size_t n); /* 1 if equal bit for bit */

/* max |a-b|; NaN or Inf anywhere in either gives +inf, so that !(err <= tol) fails. */
double max_err(const float *a, const double *b, size_t n);
double max_abs(const double *a, size_t n);

/* Fails the test unless max|got - want| <= tol; says where and by how much. */
#define ASSERT_CLOSE(got, want, n, tol) \
    do { \
        double test_e_ = max_err((got), (want), (n)); \
        if (!(test_e_ <= (tol))) { \
            printf("\n  error %g > %g (%s:%d)\n", test_e_, (double)(tol), __FILE__, __LINE__); \
            FAILm(#got " differs from " #want); \
        } \
    } while (0)

#endif
