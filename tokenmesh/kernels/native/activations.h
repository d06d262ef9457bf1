/* Activations of MLPs and experts, of 16 numbers at a time. */
#ifndef TM_ACTIVATIONS_H
#define TM_ACTIVATIONS_H

#include <math.h>

#include "vec.h"

static float gelu1(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }

TM_INLINE __m512 gelu16(__m512 x) {
    float numbers[16];
    _mm512_storeu_ps(numbers, x);
    for (int i = 0; i < 16; i++) numbers[i] = gelu1(numbers[i]);
    return _mm512_loadu_ps(numbers);
}

/* x * sigmoid(v) */
TM_INLINE __m512 times_sigmoid(__m512 x, __m512 v) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), v));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

TM_INLINE __m512 gelu_tanh16(__m512 x) {
    /* (1 + tanh(u)) / 2 = sigmoid(2u), with 2 * sqrt(2 / pi) = 1.59576912 */
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    cube = _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x);
    return times_sigmoid(x, _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), cube));
}

#endif
