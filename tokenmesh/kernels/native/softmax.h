/* The part of attention that is the same for all element types: scores of 16 keys for some queries,
 * their weights under a running softmax, and the weighted sum of 16 values. */
#ifndef TM_SOFTMAX_H
#define TM_SOFTMAX_H

#include <math.h>

#include "program.h"
#include "vec.h"

/* What a query has seen so far. */
struct tm_query {
    _Alignas(64) float scaled[MAX_DIM];
    _Alignas(64) float mixed[MAX_DIM];
    float top, total;
    long first, last; /* the positions that it sees */
};

enum { QUERIES_AT_ONCE = 8 };

/* The first position that a query sees. */
TM_INLINE long first_seen(const struct tm_attention *shape, long position) {
    return shape->window > 0 && position >= shape->window ? position - shape->window + 1 : 0;
}

TM_INLINE __mmask16 seen_from(const struct tm_query *q, long base) {
    if (base > q->last || base + 16 <= q->first) return 0;
    __mmask16 seen = lanes(q->last - base + 1);
    return base < q->first ? seen & (__mmask16)(0xffffu << (q->first - base)) : seen;
}

/* Weights of 16 scores relative to the highest so far; what was mixed before is scaled to it. */
TM_INLINE __m512 soften(struct tm_query *q, __m512 scores, __mmask16 seen, long dim) {
    scores = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), scores);
    float higher = fmaxf(q->top, _mm512_reduce_max_ps(scores));
    if (higher != q->top && q->top != -INFINITY) {
        __m512 kept = exp16(_mm512_set1_ps(q->top - higher));
        q->total *= _mm512_cvtss_f32(kept);
        for (long d = 0; d < dim; d += 16)
            _mm512_store_ps(q->mixed + d, _mm512_mul_ps(_mm512_load_ps(q->mixed + d), kept));
    }
    q->top = higher;
    __m512 weights = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(scores, _mm512_set1_ps(higher))));
    q->total += _mm512_reduce_add_ps(weights);
    return weights;
}

/* keys: [dim][16]. Even and odd numbers are added up apart, which hides half of the latency. */
TM_INLINE void weigh_some(struct tm_query *queries, const float *keys, long base, long dim,
                          float (*weights)[16], const int QUERIES) {
    __m512 even[QUERIES_AT_ONCE], odd[QUERIES_AT_ONCE];
    for (int j = 0; j < QUERIES; j++) even[j] = odd[j] = _mm512_setzero_ps();
    for (long d = 0; d < dim; d += 2) {
        __m512 k0 = _mm512_load_ps(keys + d * 16), k1 = _mm512_load_ps(keys + d * 16 + 16);
        for (int j = 0; j < QUERIES; j++) {
            even[j] = _mm512_fmadd_ps(_mm512_set1_ps(queries[j].scaled[d]), k0, even[j]);
            odd[j] = _mm512_fmadd_ps(_mm512_set1_ps(queries[j].scaled[d + 1]), k1, odd[j]);
        }
    }
    for (int j = 0; j < QUERIES; j++) {
        __m512 scores = _mm512_add_ps(even[j], odd[j]);
        __mmask16 seen = seen_from(queries + j, base);
        _mm512_store_ps(weights[j], seen ? soften(queries + j, scores, seen, dim) : _mm512_setzero_ps());
    }
}

/* weights: of each query, zeros where it does not see a key. */
static void weigh(struct tm_query *queries, long count, const float *keys, long base, long dim,
                  float (*weights)[16]) {
    for (long i = 0; i < count; i += QUERIES_AT_ONCE) {
        switch (count - i) {
        case 1: weigh_some(queries + i, keys, base, dim, weights + i, 1); break;
        case 2: weigh_some(queries + i, keys, base, dim, weights + i, 2); break;
        case 3: weigh_some(queries + i, keys, base, dim, weights + i, 3); break;
        case 4: weigh_some(queries + i, keys, base, dim, weights + i, 4); break;
        case 5: weigh_some(queries + i, keys, base, dim, weights + i, 5); break;
        case 6: weigh_some(queries + i, keys, base, dim, weights + i, 6); break;
        case 7: weigh_some(queries + i, keys, base, dim, weights + i, 7); break;
        default: weigh_some(queries + i, keys, base, dim, weights + i, QUERIES_AT_ONCE);
        }
    }
}

/* Adds numbers d to d + 16 * PARTS of values [16][dim] to QUERIES queries, by their weights. */
TM_INLINE void mix_part(struct tm_query *queries, const float *values, const float (*weights)[16],
                        long dim, long d, const int QUERIES, const int PARTS) {
    __m512 sum[2][4];
    for (int j = 0; j < QUERIES; j++)
        for (int n = 0; n < PARTS; n++) sum[j][n] = _mm512_load_ps(queries[j].mixed + d + 16 * n);
    for (int key = 0; key < 16; key++) {
        const float *value = values + key * dim + d;
        for (int j = 0; j < QUERIES; j++) {
            __m512 w = _mm512_set1_ps(weights[j][key]);
            for (int n = 0; n < PARTS; n++)
                sum[j][n] = _mm512_fmadd_ps(w, _mm512_load_ps(value + 16 * n), sum[j][n]);
        }
    }
    for (int j = 0; j < QUERIES; j++)
        for (int n = 0; n < PARTS; n++) _mm512_store_ps(queries[j].mixed + d + 16 * n, sum[j][n]);
}

/* Adds values [16][dim] to all queries. */
static void mix(struct tm_query *queries, long count, const float *values,
                const float (*weights)[16], long dim) {
    for (long d = 0; d < dim;) {
        const int whole = dim - d >= 64;
        long i = 0;
        for (; i + 2 <= count; i += 2) {
            if (whole)
                mix_part(queries + i, values, weights + i, dim, d, 2, 4);
            else
                mix_part(queries + i, values, weights + i, dim, d, 2, 1);
        }
        if (i < count) {
            if (whole)
                mix_part(queries + i, values, weights + i, dim, d, 1, 4);
            else
                mix_part(queries + i, values, weights + i, dim, d, 1, 1);
        }
        d += whole ? 64 : 16;
    }
}

#endif
