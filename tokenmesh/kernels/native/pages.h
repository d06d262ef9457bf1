/* Rows of KV pages: one head's key or value of one token, in the model's type or in 8 bits.
 *
 * An int8 row ends with the float32 factor of its codes; a row of 8-bit floats has its layer's scale.
 */
#ifndef TM_PAGES_H
#define TM_PAGES_H

#include <math.h>
#include <string.h>

#include "vec.h"

enum { TM_PLAIN_PAGES, TM_INT8_PAGES, TM_E4M3_PAGES, TM_E5M2_PAGES };

enum { INT8_MAX_CODE = 127, E4M3_NAN = 0x7f };

TM_INLINE long bytes_of_row(long type, long dim, long element) {
    if (type == TM_PLAIN_PAGES) return dim * element;
    return dim + (type == TM_INT8_PAGES ? (long)sizeof(float) : 0);
}

/* 16 codes as the numbers that they stand for, before any factor. All are exact in bfloat16. */
TM_INLINE __m512 decode16(const char *codes, long type) {
    const __m128i code = _mm_loadu_si128((const __m128i *)codes);
    if (type == TM_INT8_PAGES) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code));
    const __m256i wide = _mm256_cvtepu8_epi16(code);
    if (type == TM_E5M2_PAGES) return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
    /* as a half whose exponent is 8 too low */
    const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m512 small = _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(size, 7)));
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(E4M3_NAN));
    return _mm512_mask_blend_ps(is_nan, _mm512_mul_ps(small, _mm512_set1_ps(256.0f)), _mm512_set1_ps(NAN));
}

/* To the nearest number of a format of 8 bits, ties to even: BITS of a mantissa, exponents from
 * `lowest` on; too large ones become `largest`, NaN stays NaN. */
TM_INLINE __m128i to_fp8(__m512 v, const int bits, const int lowest, const float largest) {
    const __m512i sign = _mm512_srli_epi32(_mm512_and_epi32(_mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000u)), 24);
    const __m512 size = _mm512_min_ps(_mm512_abs_ps(v), _mm512_set1_ps(largest));
    const __m512i raw = _mm512_castps_si512(size);
    const int dropped = 23 - bits;
    __m512i normal = _mm512_and_epi32(_mm512_srli_epi32(raw, (unsigned)dropped), _mm512_set1_epi32(1));
    normal = _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32((1 << (dropped - 1)) - 1)), normal);
    normal = _mm512_sub_epi32(_mm512_srli_epi32(normal, (unsigned)dropped), _mm512_set1_epi32((lowest + 126) << bits));
    const __m512 step = _mm512_set1_ps(ldexpf(1.0f, bits - lowest));
    const __m512i subnormal = _mm512_cvtps_epi32(_mm512_mul_ps(size, step));
    const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(ldexpf(1.0f, lowest)), _CMP_LT_OQ);
    __m512i code = _mm512_mask_blend_epi32(is_small, normal, subnormal);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    code = _mm512_mask_blend_epi32(is_nan, code, _mm512_set1_epi32(E4M3_NAN));
    return _mm512_cvtepi32_epi8(_mm512_or_epi32(code, sign));
}

TM_INLINE void encode16(__m512 v, char *codes, long type) {
    __m128i code;
    if (type == TM_INT8_PAGES)
        code = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
    else if (type == TM_E4M3_PAGES)
        code = to_fp8(v, 3, -6, 448.0f);
    else
        code = to_fp8(v, 2, -14, 57344.0f);
    _mm_storeu_si128((__m128i *)codes, code);
}

/* The factor of a row's codes. */
TM_INLINE float factor_of(const char *row, long type, long dim, float scale) {
    if (type != TM_INT8_PAGES) return scale;
    float factor;
    memcpy(&factor, row + dim, sizeof factor);
    return factor;
}

#endif
