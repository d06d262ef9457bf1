/* Runs a program over the tokens of a step: one call a forward pass, so that Python's cost and its
 * lock are paid once instead of at each of some hundred operations. */
#include "program.h"

#include <math.h>
#include <string.h>

#include "gemm.h"
#include "pool.h"
#include "vec.h"

enum { TOKENS_OF_CHUNK_WORK = 1 << 14 }; /* numbers worth handing to another thread */

/* Sums of the lanes of 16 vectors, one in each lane. */
TM_INLINE __m512 sum_each(const __m512 v[16]) {
    __m512 a[16];
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
    __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x88), _mm512_shuffle_f32x4(a[2], a[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

/* The first position that a query sees. */
TM_INLINE long first_seen(const struct tm_attention *shape, long position) {
    return shape->window > 0 && position >= shape->window ? position - shape->window + 1 : 0;
}

#include "typed.h"
#include "elementwise.inc"
#include "attention.inc"
#include "tokens.inc"
#define TM_BF16
#include "typed.h"
#include "elementwise.inc"
#include "attention.inc"
#include "tokens.inc"

void tm_run(const struct tm_model *model, const struct tm_op *ops, int64_t count,
            const struct tm_step *step) {
    for (int64_t i = 0; i < count; i++) {
        if (model->is_bf16)
            run_op_bf16(model, ops + i, step);
        else
            run_op_f32(model, ops + i, step);
    }
}
