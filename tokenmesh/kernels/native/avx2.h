/* Those AVX-512 instructions that the kernels use, for processors that have AVX2, FMA and F16C only:
 * a vector of 512 bits is two of 256. Masks stay integers; they are cheap where all lanes are set. */
#ifndef TM_AVX2_H
#define TM_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

struct tm_floats { __m256 lo, hi; };
struct tm_doubles { __m256d lo, hi; };
struct tm_ints { __m256i lo, hi; };
#define __m512 struct tm_floats
#define __m512d struct tm_doubles
#define __m512i struct tm_ints

/* An instruction on both halves of one, two or three operands; with a number; as another type. */
#define TM_ONE(op, a) ({ const __auto_type a_ = (a); (__typeof__(a_)){op(a_.lo), op(a_.hi)}; })
#define TM_TWO(op, a, b) \
    ({ const __auto_type a_ = (a); const __auto_type b_ = (b); (__typeof__(a_)){op(a_.lo, b_.lo), op(a_.hi, b_.hi)}; })
#define TM_THREE(op, a, b, c)                                                                      \
    ({ const __auto_type a_ = (a); const __auto_type b_ = (b); const __auto_type c_ = (c);         \
       (__typeof__(a_)){op(a_.lo, b_.lo, c_.lo), op(a_.hi, b_.hi, c_.hi)}; })
#define TM_BY(op, a, number) ({ const __auto_type a_ = (a); (__typeof__(a_)){op(a_.lo, number), op(a_.hi, number)}; })
#define TM_AS(type, op, a) ({ const __auto_type a_ = (a); (type){op(a_.lo), op(a_.hi)}; })
#define TM_ALL(type, value) ({ const __auto_type a_ = (value); (type){a_, a_}; })

#define _mm512_setzero_ps() TM_ALL(__m512, _mm256_setzero_ps())
#define _mm512_setzero_si512() TM_ALL(__m512i, _mm256_setzero_si256())
#define _mm512_set1_ps(x) TM_ALL(__m512, _mm256_set1_ps(x))
#define _mm512_set1_epi8(x) TM_ALL(__m512i, _mm256_set1_epi8(x))
#define _mm512_set1_epi32(x) TM_ALL(__m512i, _mm256_set1_epi32(x))
#define _mm512_set1_epi64(x) TM_ALL(__m512i, _mm256_set1_epi64x(x))
#define _mm512_broadcast_i32x4(x) TM_ALL(__m512i, _mm256_broadcastsi128_si256(x))
#undef _mm512_setr_epi64
#define _mm512_setr_epi64(a, b, c, d, e, f, g, h) \
    ((__m512i){_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)})
#undef _mm512_set_epi32
#define _mm512_set_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    ((__m512i){_mm256_set_epi32(i, j, k, l, m, n, o, p), _mm256_set_epi32(a, b, c, d, e, f, g, h)})

#define _mm512_castps_si512(a) TM_AS(__m512i, _mm256_castps_si256, a)
#define _mm512_castsi512_ps(a) TM_AS(__m512, _mm256_castsi256_ps, a)
#define _mm512_castps_pd(a) TM_AS(__m512d, _mm256_castps_pd, a)
#define _mm512_castpd_ps(a) TM_AS(__m512, _mm256_castpd_ps, a)
#define _mm512_castsi256_si512(a) ((__m512i){a, _mm256_setzero_si256()})
#define _mm512_cvtepi32_ps(a) TM_AS(__m512, _mm256_cvtepi32_ps, a)
#define _mm512_cvtps_epi32(a) TM_AS(__m512i, _mm256_cvtps_epi32, a)
#define _mm512_cvtss_f32(a) _mm256_cvtss_f32((a).lo)

TM_INLINE __m512 _tm_cvtph_ps(__m256i a) {
    return (__m512){_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
TM_INLINE __m512i _tm_cvtepu16_epi32(__m256i a) {
    return (__m512i){_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                     _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
TM_INLINE __m512i _tm_cvtepi8_epi32(__m128i a) {
    return (__m512i){_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))};
}
TM_INLINE __m256i _tm_cvtsepi32_epi16(__m512i a) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
}
TM_INLINE __m128i _tm_cvtepi32_epi8(__m512i a) {
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xd8);
    return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 1, 3, 0, 2, 1, 3)));
}
TM_INLINE __m256i _tm_cvtepi64_epi32(__m512i a) {
    const __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi), 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(both), 0xd8);
}
#define _mm512_cvtph_ps _tm_cvtph_ps
#define _mm512_cvtepu16_epi32 _tm_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 _tm_cvtepi8_epi32
#define _mm512_cvtsepi32_epi16 _tm_cvtsepi32_epi16
#define _mm512_cvtepi32_epi8 _tm_cvtepi32_epi8
#define _mm512_cvtepi64_epi32 _tm_cvtepi64_epi32

#define _mm512_add_ps(a, b) TM_TWO(_mm256_add_ps, a, b)
#define _mm512_sub_ps(a, b) TM_TWO(_mm256_sub_ps, a, b)
#define _mm512_mul_ps(a, b) TM_TWO(_mm256_mul_ps, a, b)
#define _mm512_div_ps(a, b) TM_TWO(_mm256_div_ps, a, b)
#define _mm512_max_ps(a, b) TM_TWO(_mm256_max_ps, a, b)
#define _mm512_min_ps(a, b) TM_TWO(_mm256_min_ps, a, b)
#define _mm512_fmadd_ps(a, b, c) TM_THREE(_mm256_fmadd_ps, a, b, c)
#define _mm512_fnmadd_ps(a, b, c) TM_THREE(_mm256_fnmadd_ps, a, b, c)
#define _mm512_fnmsub_ps(a, b, c) TM_THREE(_mm256_fnmsub_ps, a, b, c)
#define _mm512_fmaddsub_ps(a, b, c) TM_THREE(_mm256_fmaddsub_ps, a, b, c)
#define _mm512_abs_ps(a) TM_TWO(_mm256_andnot_ps, _mm512_set1_ps(-0.0f), a)
#define _mm512_roundscale_ps(a, how) TM_BY(_mm256_round_ps, a, (how) | _MM_FROUND_NO_EXC)
#define _mm512_permute_ps(a, order) TM_BY(_mm256_permute_ps, a, order)
#define _mm512_moveldup_ps(a) TM_ONE(_mm256_moveldup_ps, a)
#define _mm512_movehdup_ps(a) TM_ONE(_mm256_movehdup_ps, a)
#define _mm512_unpacklo_ps(a, b) TM_TWO(_mm256_unpacklo_ps, a, b)
#define _mm512_unpackhi_ps(a, b) TM_TWO(_mm256_unpackhi_ps, a, b)
#define _mm512_unpacklo_pd(a, b) TM_TWO(_mm256_unpacklo_pd, a, b)
#define _mm512_unpackhi_pd(a, b) TM_TWO(_mm256_unpackhi_pd, a, b)
#define _mm512_unpacklo_epi64(a, b) TM_TWO(_mm256_unpacklo_epi64, a, b)
#define _mm512_unpackhi_epi64(a, b) TM_TWO(_mm256_unpackhi_epi64, a, b)
/* two of four lanes of a, then two of b; a 256-bit instruction numbers them alike */
#define TM_LANES(a, first, second) _mm256_permute2f128_ps((a).lo, (a).hi, (first) | (second) << 4)
#define _mm512_shuffle_f32x4(a, b, which)                                                          \
    ({ const __auto_type a_ = (a); const __auto_type b_ = (b);                                     \
       (__m512){TM_LANES(a_, (which) & 3, (which) >> 2 & 3), TM_LANES(b_, (which) >> 4 & 3, (which) >> 6 & 3)}; })

#define _mm512_add_epi32(a, b) TM_TWO(_mm256_add_epi32, a, b)
#define _mm512_add_epi64(a, b) TM_TWO(_mm256_add_epi64, a, b)
#define _mm512_sub_epi32(a, b) TM_TWO(_mm256_sub_epi32, a, b)
#define _mm512_mullo_epi32(a, b) TM_TWO(_mm256_mullo_epi32, a, b)
#define _mm512_mul_epu32(a, b) TM_TWO(_mm256_mul_epu32, a, b)
#define _mm512_max_epi32(a, b) TM_TWO(_mm256_max_epi32, a, b)
#define _mm512_max_epu32(a, b) TM_TWO(_mm256_max_epu32, a, b)
#define _mm512_and_si512(a, b) TM_TWO(_mm256_and_si256, a, b)
#define _mm512_and_epi32 _mm512_and_si512
#define _mm512_and_epi64 _mm512_and_si512
#define _mm512_or_si512(a, b) TM_TWO(_mm256_or_si256, a, b)
#define _mm512_or_epi32 _mm512_or_si512
#define _mm512_slli_epi32(a, bits) TM_BY(_mm256_slli_epi32, a, (int)(bits))
#define _mm512_srli_epi32(a, bits) TM_BY(_mm256_srli_epi32, a, (int)(bits))
#define _mm512_srai_epi32(a, bits) TM_BY(_mm256_srai_epi32, a, (int)(bits))
#define _mm512_srli_epi64(a, bits) TM_BY(_mm256_srli_epi64, a, (int)(bits))
#define _mm512_srli_epi16(a, bits) TM_BY(_mm256_srli_epi16, a, (int)(bits))
#define _mm512_shuffle_epi8(a, b) TM_TWO(_mm256_shuffle_epi8, a, b)
#define _tm_xor(a, b) TM_TWO(_mm256_xor_si256, a, b)
#define _mm512_ternarylogic_epi64(a, b, c, table) \
    ({ _Static_assert((table) == 0x96, "only the exclusive or of three"); _tm_xor(_tm_xor(a, b), c); })

#define _mm512_loadu_ps(p) ({ const float *p_ = (const float *)(p); (__m512){_mm256_loadu_ps(p_), _mm256_loadu_ps(p_ + 8)}; })
#define _mm512_load_ps(p) ({ const float *p_ = (const float *)(p); (__m512){_mm256_load_ps(p_), _mm256_load_ps(p_ + 8)}; })
#define _mm512_loadu_si512(p) \
    ({ const __m256i *p_ = (const __m256i *)(p); (__m512i){_mm256_loadu_si256(p_), _mm256_loadu_si256(p_ + 1)}; })
TM_INLINE void _tm_storeu(float *p, __m512 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
#define _mm512_storeu_ps(p, v) _tm_storeu((float *)(p), v)
#define _mm512_store_ps _mm512_storeu_ps
#define _mm512_i32gather_ps(index, p, scale) \
    ({ const __auto_type i_ = (index); (__m512){_mm256_i32gather_ps(p, i_.lo, scale), _mm256_i32gather_ps(p, i_.hi, scale)}; })

/* All bits of the lanes of 32 or 64 bits, or of the bytes, that a mask names. */
TM_INLINE __m256i _tm_lanes8(unsigned mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bits), bits);
}
TM_INLINE __m512i _tm_lanes16(unsigned mask) { return (__m512i){_tm_lanes8(mask), _tm_lanes8(mask >> 8)}; }
TM_INLINE __m256i _tm_lanes4(unsigned mask) {
    const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((long long)mask), bits), bits);
}
TM_INLINE __m256i _tm_bytes32(uint32_t mask) {
    const __m256i place = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((long long)0x8040201008040201);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int)mask), place);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
}

TM_INLINE __m512 _tm_blend(__mmask16 m, __m512 a, __m512 b) {
    const __m512i at = _tm_lanes16(m);
    return (__m512){_mm256_blendv_ps(a.lo, b.lo, _mm256_castsi256_ps(at.lo)),
                    _mm256_blendv_ps(a.hi, b.hi, _mm256_castsi256_ps(at.hi))};
}
TM_INLINE __m512i _tm_blend_epi64(__mmask8 m, __m512i a, __m512i b) {
    return (__m512i){_mm256_blendv_epi8(a.lo, b.lo, _tm_lanes4(m)), _mm256_blendv_epi8(a.hi, b.hi, _tm_lanes4(m >> 4))};
}
#define _tm_blend_ints(m, a, b) \
    _mm512_castps_si512(_tm_blend(m, _mm512_castsi512_ps(a), _mm512_castsi512_ps(b)))
#define _mm512_mask_blend_ps(m, a, b) _tm_blend(m, a, b)
#define _mm512_mask_blend_epi32(m, a, b) _tm_blend_ints(m, a, b)
#define _mm512_mask_mov_epi64(a, m, b) _tm_blend_epi64(m, a, b)
#define _mm512_maskz_mov_ps(m, a) _tm_blend(m, _mm512_setzero_ps(), a)
#define _mm512_mask_sub_ps(kept, m, a, b) _tm_blend(m, kept, _mm512_sub_ps(a, b))
#define _mm512_maskz_sub_ps(m, a, b) _tm_blend(m, _mm512_setzero_ps(), _mm512_sub_ps(a, b))
#define _mm512_mask_max_ps(kept, m, a, b) _tm_blend(m, kept, _mm512_max_ps(a, b))
#define _mm512_mask_shuffle_epi32(kept, m, a, order) _tm_blend_ints(m, kept, TM_BY(_mm256_shuffle_epi32, a, order))
TM_INLINE __m512i _tm_mask_add_epi8(__m512i kept, __mmask64 m, __m512i a, __m512i b) {
    (void)kept; /* is a */
    return (__m512i){_mm256_add_epi8(a.lo, _mm256_and_si256(_tm_bytes32((uint32_t)m), b.lo)),
                     _mm256_add_epi8(a.hi, _mm256_and_si256(_tm_bytes32((uint32_t)(m >> 32)), b.hi))};
}
#define _mm512_mask_add_epi8 _tm_mask_add_epi8

#define TM_MASK(a) ((__mmask16)(_mm256_movemask_ps((a).lo) | _mm256_movemask_ps((a).hi) << 8))
#define _mm512_cmp_ps_mask(a, b, how)                                                              \
    ({ const __auto_type a_ = (a); const __auto_type b_ = (b);                                     \
       const __m512 c_ = {_mm256_cmp_ps(a_.lo, b_.lo, how), _mm256_cmp_ps(a_.hi, b_.hi, how)}; TM_MASK(c_); })
TM_INLINE __mmask16 _tm_testn(__m512i a, __m512i b) {
    const __m256i zero = _mm256_setzero_si256();
    const __m512 c = {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(a.lo, b.lo), zero)),
                      _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(a.hi, b.hi), zero))};
    return TM_MASK(c);
}
#define _mm512_testn_epi32_mask _tm_testn
TM_INLINE __mmask8 _tm_cmpeq_epi64(__m512i a, __m512i b) {
    return (__mmask8)(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a.lo, b.lo))) |
                      _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a.hi, b.hi))) << 4);
}
#define _mm512_cmpeq_epi64_mask _tm_cmpeq_epi64
TM_INLINE __mmask16 _tm_cmpeq_epi16(__m256i a, __m256i b) {
    const __m256i same = _mm256_cmpeq_epi16(a, b);
    return (__mmask16)_mm_movemask_epi8(
        _mm_packs_epi16(_mm256_castsi256_si128(same), _mm256_extracti128_si256(same, 1)));
}
#define _mm256_cmpeq_epi16_mask _tm_cmpeq_epi16

TM_INLINE __m512 _tm_load_some(__mmask16 m, const float *p) {
    if (m == 0xffff) return _mm512_loadu_ps(p);
    const __m512i at = _tm_lanes16(m);
    return (__m512){_mm256_maskload_ps(p, at.lo), _mm256_maskload_ps(p + 8, at.hi)};
}
TM_INLINE void _tm_store_some(float *p, __mmask16 m, __m512 v) {
    if (m == 0xffff) {
        _tm_storeu(p, v);
        return;
    }
    const __m512i at = _tm_lanes16(m);
    _mm256_maskstore_ps(p, at.lo, v.lo);
    _mm256_maskstore_ps(p + 8, at.hi, v.hi);
}
#define _mm512_maskz_loadu_ps(m, p) _tm_load_some(m, (const float *)(p))
#define _mm512_mask_storeu_ps(p, m, v) _tm_store_some((float *)(p), m, v)
#define _mm512_mask_storeu_epi32(p, m, v) _tm_store_some((float *)(p), m, _mm512_castsi512_ps(v))
TM_INLINE __m512i _tm_load_some_epi64(__mmask8 m, const int64_t *p) {
    const long long *from = (const long long *)p;
    return (__m512i){_mm256_maskload_epi64(from, _tm_lanes4(m)), _mm256_maskload_epi64(from + 4, _tm_lanes4(m >> 4))};
}
#define _mm512_maskz_loadu_epi64 _tm_load_some_epi64
TM_INLINE __m256i _tm_load_some_epi16(__mmask16 m, const uint16_t *p) {
    if (m == 0xffff) return _mm256_loadu_si256((const __m256i *)p);
    _Alignas(32) uint16_t some[16] = {0};
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) some[i] = p[i];
    return _mm256_load_si256((const __m256i *)some);
}
TM_INLINE void _tm_store_some_epi16(uint16_t *p, __mmask16 m, __m256i v) {
    if (m == 0xffff) {
        _mm256_storeu_si256((__m256i *)p, v);
        return;
    }
    _Alignas(32) uint16_t some[16];
    _mm256_store_si256((__m256i *)some, v);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) p[i] = some[i];
}
#define _mm256_maskz_loadu_epi16 _tm_load_some_epi16
#define _mm256_mask_storeu_epi16 _tm_store_some_epi16

TM_INLINE float _tm_reduce_add(__m512 v) {
    const __m256 eight = _mm256_add_ps(v.lo, v.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
TM_INLINE float _tm_reduce_max(__m512 v) {
    const __m256 eight = _mm256_max_ps(v.lo, v.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#define TM_REDUCE_INTS(name, op)                                                                   \
    TM_INLINE int name(__m512i v) {                                                                \
        const __m256i eight = _mm256_##op(v.lo, v.hi);                                             \
        __m128i four = _mm_##op(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1)); \
        four = _mm_##op(four, _mm_shuffle_epi32(four, 0x4e));                                      \
        return _mm_cvtsi128_si32(_mm_##op(four, _mm_shuffle_epi32(four, 0xb1)));                   \
    }
TM_REDUCE_INTS(_tm_reduce_add_ints, add_epi32)
TM_REDUCE_INTS(_tm_reduce_max_ints, max_epi32)
TM_REDUCE_INTS(_tm_reduce_max_unsigned, max_epu32)
#undef TM_REDUCE_INTS
#define _mm512_reduce_add_ps _tm_reduce_add
#define _mm512_reduce_max_ps _tm_reduce_max
#define _mm512_reduce_add_epi32 _tm_reduce_add_ints
#define _mm512_reduce_max_epi32 _tm_reduce_max_ints
#define _mm512_reduce_max_epu32(v) ((unsigned)_tm_reduce_max_unsigned(v))

/* p times 2 to the n for positive p and whole n from -252 on: in two steps, since 2 to the n alone may
 * be too small or too large for a float. NaN for NaN, but infinity for an infinite n, whatever p is. */
TM_INLINE __m256 _tm_scale8(__m256 p, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(254.0f), n));
    const __m256i half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i rest = _mm256_sub_epi32(whole, half);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
    return _mm256_blendv_ps(p, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(n, _mm256_set1_ps(129.0f), _CMP_GE_OQ));
}
#define _mm512_scalef_ps(p, n) TM_TWO(_tm_scale8, p, n)

/* To the nearest bfloat16, ties to even; NaN stays NaN. */
TM_INLINE __m256i _tm_to_bf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, nan, is_nan), 16);
}
#define _mm512_cvtneps_pbh(v) \
    ({ const __m512 v_ = (v); _mm256_permute4x64_epi64(_mm256_packus_epi32(_tm_to_bf16(v_.lo), _tm_to_bf16(v_.hi)), 0xd8); })

TM_INLINE __m256 _tm_low(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
TM_INLINE __m256 _tm_high(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u)));
}
TM_INLINE __m256 _tm_dot_bf16(__m256 sum, __m256i a, __m256i b) {
    return _mm256_fmadd_ps(_tm_high(a), _tm_high(b), _mm256_fmadd_ps(_tm_low(a), _tm_low(b), sum));
}
TM_INLINE __m256i _tm_dot_shorts(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
/* Sums of two products have to fit 16 bits: codes below 128, or signed ones by their sizes. */
TM_INLINE __m256i _tm_dot_small(__m256i sum, __m256i codes, __m256i numbers) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, numbers);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
TM_INLINE __m256i _tm_dot_wide(__m256i sum, __m256i codes, __m256i numbers) {
    const __m256i from_128 = _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
    return _tm_dot_small(sum, _mm256_abs_epi8(from_128), _mm256_sign_epi8(numbers, from_128));
}

#endif
