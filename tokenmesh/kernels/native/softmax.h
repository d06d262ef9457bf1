/* The part of attention that is the same for all element types: the weights of 16 scores under a
 * running softmax. */
#ifndef TM_SOFTMAX_H
#define TM_SOFTMAX_H

#include <math.h>

#include "program.h"
#include "vec.h"

/* What a query has seen so far. */
struct tm_query {
    _Alignas(64) float mixed[MAX_DIM];
    float top, total;
    long first, last; /* the positions that it sees */
};

/* The first position that a query sees. */
TM_INLINE long first_seen(const struct tm_attention *shape, long position) {
    return shape->window > 0 && position >= shape->window ? position - shape->window + 1 : 0;
}

TM_INLINE __mmask16 seen_from(const struct tm_query *q, long base) {
    if (base > q->last || base + 16 <= q->first) return 0;
    __mmask16 seen = lanes(q->last - base + 1);
    return base < q->first ? seen & (__mmask16)(0xffffu << (q->first - base)) : seen;
}

/* 16 scores of each query become softcap * tanh(score / softcap). */
static __attribute__((noinline)) void cap_scores(float (*scores)[16], long queries, float softcap) {
    const __m512 cap = _mm512_set1_ps(softcap);
    for (long i = 0; i < queries; i++) {
        __m512 share = tanh16(_mm512_div_ps(_mm512_load_ps(scores[i]), cap));
        _mm512_store_ps(scores[i], _mm512_mul_ps(cap, share));
    }
}

/* A sink is a score that is there from the start and has no value; -infinity: none. */
TM_INLINE void begin_softmax(struct tm_query *q, float sink) {
    q->top = sink;
    q->total = sink == -INFINITY ? 0.0f : 1.0f;
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

#endif
