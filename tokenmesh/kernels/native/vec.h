/* Vectors of 16 floats, and what is loaded into and stored from them: float32 or bfloat16. */
#ifndef TM_VEC_H
#define TM_VEC_H

#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

#define TM_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
enum { HAS_32_REGISTERS = 1 };
#else
#include "avx2.h"
enum { HAS_32_REGISTERS = 0 }; /* 16 of 256 bits: tiles have a quarter of the accumulators */
#endif

TM_INLINE __m512 load16_f32(const float *p) { return _mm512_loadu_ps(p); }
TM_INLINE void store16_f32(float *p, __m512 v) { _mm512_storeu_ps(p, v); }
TM_INLINE void store_some_f32(float *p, __mmask16 m, __m512 v) { _mm512_mask_storeu_ps(p, m, v); }
TM_INLINE __m512 load_some_f32(const float *p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }

TM_INLINE __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
/* To the nearest bfloat16, ties to even; NaN stays NaN. */
TM_INLINE __m256i narrow(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, near, nan), 16));
}
#else
TM_INLINE __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#endif

TM_INLINE __m512 load16_bf16(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
TM_INLINE void store16_bf16(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, narrow(v)); }
TM_INLINE void store_some_bf16(bf16 *p, __mmask16 m, __m512 v) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }
TM_INLINE __m512 load_some_bf16(const bf16 *p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }

/* sum += products of neighbors: of pairs of bfloat16 numbers, of pairs of 16-bit integers, of four bytes
 * with four signed ones. By hand: compilers copy accumulators to and fro, or keep them on the stack. */
#ifdef __AVX512F__
#ifdef __AVX512BF16__
TM_INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
/* A bfloat16 number is the upper half of a float32: the products are exact before they are added. */
TM_INLINE __m512 upper_floats(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)));
}
TM_INLINE __m512 lower_floats(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
TM_INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
    sum = _mm512_fmadd_ps(lower_floats(a), lower_floats(b), sum);
    return _mm512_fmadd_ps(upper_floats(a), upper_floats(b), sum);
}
#endif
TM_INLINE __m512i dot_shorts(__m512i sum, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
enum { WIDE_CODES_FROM = 0 };
TM_INLINE __m512i dot_bytes(__m512i sum, __m512i codes, __m512i numbers, const int is_wide) {
    (void)is_wide;
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(numbers));
    return sum;
}
#else
TM_INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
    return (__m512){_tm_dot_bf16(sum.lo, a.lo, b.lo), _tm_dot_bf16(sum.hi, a.hi, b.hi)};
}
TM_INLINE __m512i dot_shorts(__m512i sum, __m512i a, __m512i b) { return TM_THREE(_tm_dot_shorts, sum, a, b); }
enum { WIDE_CODES_FROM = 128 }; /* is subtracted from codes of 8 bits */
TM_INLINE __m512i dot_bytes(__m512i sum, __m512i codes, __m512i numbers, const int is_wide) {
    return is_wide ? TM_THREE(_tm_dot_wide, sum, codes, numbers) : TM_THREE(_tm_dot_small, sum, codes, numbers);
}
#endif

/* Two neighbors in every pair of lanes. */
TM_INLINE __m512i spread_bf16(const bf16 *p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* The lanes of a group of 16 that exist when only `left` numbers are left. */
TM_INLINE __mmask16 lanes(long left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

/* e to the v, within 2 units in the last place; 0 below -87, for arguments up to 88; NaN for NaN:
 * of two operands the maximum is the second when either is NaN. */
TM_INLINE __m512 exp16(__m512 v) {
    v = _mm512_max_ps(_mm512_set1_ps(-104.0f), v);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* tanh of v, within 2 units in the last place; NaN for NaN: of two operands the minimum is the
 * second when either is NaN. */
TM_INLINE __m512 tanh16(__m512 v) {
    const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(v);
    /* near 0 the quotient below would lose digits: v + v^3 times a polynomial in v^2 */
    __m512 z = _mm512_mul_ps(v, v);
    __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1f));
    p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1f));
    __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, z), v, v);
    /* 1 - 2 / (e^2v + 1); beyond 10 it is 1 in float32 */
    __m512 e = exp16(_mm512_mul_ps(_mm512_set1_ps(2.0f), _mm512_min_ps(_mm512_set1_ps(10.0f), size)));
    __m512 far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000u));
    far = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(far), sign));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ), far, near);
}

/* v[i][j] becomes v[j][i]. */
TM_INLINE void transpose16(__m512 v[16]) {
    __m512 t[16];
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee);
        __m512 c = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x44), d = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xee);
        t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) v[i] = t[i];
}

#endif
