/* immintrin.h - in front of the compiler's own, for tests/emulate.sh: AVX2 and AVX-512 in plain C,
   by SIMDe, so that those kernels run on any x86-64. Here is what Debian's SIMDe 0.7.4 lacks or
   does otherwise than the instructions, from Intel's description of them. */
#ifndef SIMDE_IMMINTRIN_H
#define SIMDE_IMMINTRIN_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <math.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#ifdef SIMDE_X86_AVX_NATIVE
#error "compiled for AVX: this would be no emulation"
#endif

/* No function is compiled for more than the rest, and the CPU has all that is asked for. */
#define target(isa)
#define __builtin_cpu_supports(name) 1

#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif

#undef _mm_pause
#define _mm_pause() __builtin_ia32_pause()

static inline void emu_get(float f[16], __m512 x)
{
    simde_mm512_storeu_ps(f, x);
}

/* One rounding. SIMDe rounds the product too. */
static inline __m512 emu_fmadd512(__m512 a, __m512 b, __m512 c)
{
    float x[16], y[16], z[16];
    int i;
    emu_get(x, a);
    emu_get(y, b);
    emu_get(z, c);
    for (i = 0; i < 16; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return simde_mm512_loadu_ps(z);
}
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps(a, b, c) emu_fmadd512(a, b, c)

static inline __m256 emu_fmadd256(__m256 a, __m256 b, __m256 c)
{
    float x[8], y[8], z[8];
    int i;
    simde_mm256_storeu_ps(x, a);
    simde_mm256_storeu_ps(y, b);
    simde_mm256_storeu_ps(z, c);
    for (i = 0; i < 8; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return simde_mm256_loadu_ps(z);
}
#undef _mm256_fmadd_ps
#define _mm256_fmadd_ps(a, b, c) emu_fmadd256(a, b, c)

/* x less x rounded to an integer, halves to even (the only way used); 0 for an infinity. */
static inline __m512 emu_reduce(__m512 x)
{
    float f[16];
    int i;
    emu_get(f, x);
    for (i = 0; i < 16; i++) f[i] = f[i] - f[i] == 0 || f[i] != f[i] ? f[i] - rintf(f[i]) : 0.0f;
    return simde_mm512_loadu_ps(f);
}
#define _mm512_reduce_ps(x, how) emu_reduce(x)

/* a * 2^floor(b), rounded once; by 2^-inf 0. SIMDe flushes denormals. */
static inline __m512 emu_scalef(__m512 a, __m512 b)
{
    float x[16], y[16];
    int i;
    emu_get(x, a);
    emu_get(y, b);
    for (i = 0; i < 16; i++) {
        if (x[i] != x[i] || y[i] != y[i]) x[i] = x[i] + y[i];
        else x[i] = ldexpf(x[i], y[i] < -1000 ? -1000 : y[i] > 1000 ? 1000 : (int)floorf(y[i]));
    }
    return simde_mm512_loadu_ps(x);
}
#undef _mm512_scalef_ps
#define _mm512_scalef_ps(a, b) emu_scalef(a, b)

static inline float emu_reduce_max(__m512 x)
{
    float f[16];
    int n, i;
    emu_get(f, x);
    for (n = 8; n > 0; n /= 2)
        for (i = 0; i < n; i++) f[i] = f[i] > f[i + n] ? f[i] : f[i + n];
    return f[0];
}
#define _mm512_reduce_max_ps(x) emu_reduce_max(x)

static inline __m256 emu_extract8(__m512 x, int which)
{
    float f[16];
    emu_get(f, x);
    return simde_mm256_loadu_ps(f + 8 * which);
}
#define _mm512_extractf32x8_ps(x, which) emu_extract8(x, which)

static inline float emu_first(__m512 x)
{
    float f[16];
    emu_get(f, x);
    return f[0];
}
#define _mm512_cvtss_f32(x) emu_first(x)

#ifndef __mmask16
#define __mmask16 simde__mmask16
#endif

static inline __mmask16 emu_zero_bytes(__m128i a, __m128i b)
{
    return (__mmask16)simde_mm_movemask_epi8(simde_mm_cmpeq_epi8(a, b));
}
#define _mm_cmpeq_epi8_mask(a, b) emu_zero_bytes(a, b)

static inline __m512 emu_from_ints(__m512i x)
{
    int u[16], i;
    float f[16];
    simde_mm512_storeu_si512(u, x);
    for (i = 0; i < 16; i++) f[i] = (float)u[i];
    return simde_mm512_loadu_ps(f);
}
#define _mm512_cvtepi32_ps(x) emu_from_ints(x)

static inline __m512i emu_from_bytes(__m128i x)
{
    signed char b[16];
    int u[16], i;
    simde_mm_storeu_si128((__m128i *)b, x);
    for (i = 0; i < 16; i++) u[i] = b[i];
    return simde_mm512_loadu_si512(u);
}
#define _mm512_cvtepi8_epi32(x) emu_from_bytes(x)

static inline __m512i emu_from_shorts(__m256i x)
{
    unsigned short b[16];
    int u[16], i;
    simde_mm256_storeu_si256((__m256i *)b, x);
    for (i = 0; i < 16; i++) u[i] = b[i];
    return simde_mm512_loadu_si512(u);
}
#define _mm512_cvtepu16_epi32(x) emu_from_shorts(x)

static inline __m512 emu_from_halves(__m256i x)
{
    __m128i h[2];
    float f[16];
    simde_mm256_storeu_si256((__m256i *)h, x);
    simde_mm256_storeu_ps(f, simde_mm256_cvtph_ps(h[0]));
    simde_mm256_storeu_ps(f + 8, simde_mm256_cvtph_ps(h[1]));
    return simde_mm512_loadu_ps(f);
}
#define _mm512_cvtph_ps(x) emu_from_halves(x)

/* Lanes by a mask of their numbers; what is not in it is not touched. */
#ifndef __mmask8
#define __mmask8 simde__mmask8
#endif

static inline __m256 emu_maskz_load(int mask, const float *p)
{
    float f[8] = { 0 };
    int i;
    for (i = 0; i < 8; i++)
        if (mask >> i & 1) f[i] = p[i];
    return simde_mm256_loadu_ps(f);
}
#undef _mm256_maskz_loadu_ps
#define _mm256_maskz_loadu_ps(mask, p) emu_maskz_load(mask, p)

static inline void emu_mask_store(float *p, int mask, __m256 x)
{
    float f[8];
    int i;
    simde_mm256_storeu_ps(f, x);
    for (i = 0; i < 8; i++)
        if (mask >> i & 1) p[i] = f[i];
}
#undef _mm256_mask_storeu_ps
#define _mm256_mask_storeu_ps(p, mask, x) emu_mask_store(p, mask, x)

static inline __m256 emu_mask_mov(__m256 old, int mask, __m256 x)
{
    float f[8];
    simde_mm256_storeu_ps(f, old);
    emu_mask_store(f, mask, x);
    return simde_mm256_loadu_ps(f);
}
#undef _mm256_mask_mov_ps
#define _mm256_mask_mov_ps(old, mask, x) emu_mask_mov(old, mask, x)
#undef _mm256_mask_broadcastss_ps
#define _mm256_mask_broadcastss_ps(old, mask, x) \
    emu_mask_mov(old, mask, simde_mm256_set1_ps(simde_mm_cvtss_f32(x)))

#endif
