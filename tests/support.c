/* support.c - what test.h declares. */
#include <errno.h>

#include "test.h"

uint64_t test_seed = 1;
long test_cases = 2000;

/* ---- memory ------------------------------------------------------------------------------ */

long test_live = 0;
long test_allocs = 0;
long test_fail_after = -1;

/* The library may allocate on several threads at once; the tests read the counters when
   those threads are done. */
#if defined(__GNUC__) || defined(__clang__)
#define ADD(counter, n) __sync_fetch_and_add(&(counter), (long)(n))
#else
#define ADD(counter, n) ((counter) += (n))
#endif

void *test_malloc(size_t bytes)
{
    void *p;
    if (test_fail_after == 0) return NULL; /* and so on, until the test sets it again */
    if (test_fail_after > 0) ADD(test_fail_after, -1);
    p = malloc(bytes ? bytes : 1);
    if (p) {
        ADD(test_live, 1);
        ADD(test_allocs, 1);
#ifndef TEST_UNDEFINED          /* MSan and valgrind know for themselves what was never written */
        memset(p, 0xff, bytes); /* NaNs: whoever reads what it did not write shows */
#endif
    }
    return p;
}

void test_free(void *p)
{
    if (!p) return;
    ADD(test_live, -1);
    free(p);
}

/* ---- threads ----------------------------------------------------------------------------- */

long test_threads_left = -1;

#ifndef _WIN32
int test_pthread_create(pthread_t *id, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    if (test_threads_left == 0) return EAGAIN;
    if (test_threads_left > 0) test_threads_left--;
    return pthread_create(id, attr, run, arg);
}
#endif

/* ---- random numbers ---------------------------------------------------------------------- */

static uint64_t next(rng *r)
{
    uint64_t z = (r->s += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

rng rng_make(uint64_t seed)
{
    rng r;
    r.s = seed;
    r.s = next(&r); /* neighbouring seeds start far apart */
    return r;
}

uint32_t rng_u32(rng *r)
{
    return (uint32_t)(next(r) >> 32);
}

int rng_int(rng *r, int lo, int hi)
{
    uint64_t n = (uint64_t)((int64_t)hi - lo + 1);
    return (int)(lo + (int64_t)((n * rng_u32(r)) >> 32));
}

int rng_chance(rng *r, int percent)
{
    return rng_int(r, 0, 99) < percent;
}

/* The sum of 12 uniform numbers has variance 1 and is normal enough. Integers up to the last
   step, so the numbers are the same on every machine. */
float rng_normal(rng *r)
{
    int64_t sum = (int64_t)(next(r) >> 48); /* the digits below the sum of the twelve */
    int i;
    for (i = 0; i < 3; i++) {
        uint64_t z = next(r);
        sum += (int64_t)((z & 0xffff) + ((z >> 16) & 0xffff) + ((z >> 32) & 0xffff) + (z >> 48))
               << 16;
    }
    sum -= (int64_t)6 << 32;
    return (float)((double)sum / 4294967296.0);
}

void rng_fill(rng *r, float *p, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++) p[i] = rng_normal(r);
}

static float *floats(size_t n)
{
    float *p = (float *)malloc((n ? n : 1) * sizeof *p);
    if (!p) {
        fprintf(stderr, "the test program is out of memory\n");
        abort();
    }
    return p;
}

float *rng_floats(rng *r, size_t n)
{
    float *p = floats(n);
    rng_fill(r, p, n);
    return p;
}

float *test_floats(size_t n, float value)
{
    float *p = floats(n);
    size_t i;
    for (i = 0; i < n; i++) p[i] = value;
    return p;
}

/* ---- instruction sets -------------------------------------------------------------------- */

int test_isas(mha_isa out[8])
{
    static const mha_isa all[] = { MHA_ISA_SCALAR, MHA_ISA_AVX2, MHA_ISA_AVX512, MHA_ISA_NEON };
    const char *only = getenv("MHA_TEST_ISA");
    int i, n = 0;
    for (i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        if (only && *only && strcmp(only, mha_isa_name(all[i])) != 0) continue;
        if (mha_isa_available(all[i])) out[n++] = all[i];
    }
    return n;
}

/* ---- bits -------------------------------------------------------------------------------- */

float f_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

uint32_t bits_f(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static uint64_t bits_d(double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return bits;
}

int is_nan(float f)
{
    return (bits_f(f) & 0x7fffffffu) > 0x7f800000u;
}

int is_finite(float f)
{
    return (bits_f(f) & 0x7f800000u) != 0x7f800000u;
}

int same_bits(const float *a, const float *b, size_t n)
{
    return n == 0 || memcmp(a, b, n * sizeof *a) == 0;
}

/* ---- errors ------------------------------------------------------------------------------ */

double max_err(const float *a, const double *b, size_t n)
{
    const uint64_t inf = 0x7ff0000000000000u;
    double worst = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        double d;
        if (!is_finite(a[i]) || (bits_d(b[i]) & inf) == inf) {
            memcpy(&worst, &inf, sizeof worst);
            return worst;
        }
        d = fabs((double)a[i] - b[i]);
        if (d > worst) worst = d;
    }
    return worst;
}

double max_abs(const double *a, size_t n)
{
    double worst = 0;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs(a[i]) > worst) worst = fabs(a[i]);
    return worst;
}
