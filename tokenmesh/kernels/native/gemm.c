/* Linear layers for any number of tokens on one packed copy of the weight. */
#include "gemm.h"

#include "pool.h"
#include "vec.h"

enum {
    PANEL = 32,
    MAX_ROWS = 12,     /* tokens of a tile of one panel: 24 accumulators of 32 registers */
    MAX_PAIR_ROWS = 6, /* of a tile of two panels */
    CHUNKS_OF_THREAD = 8,
    WORK_OF_CHUNK = 1 << 15, /* multiplications worth handing to another thread */
};

TM_INLINE __m512i spread_bf16(const bf16 *p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

#define T float
#define TYPED(name) name##_f32
#define STEP 1
#define WVEC __m512
#define SPREAD(p) _mm512_set1_ps(*(p))
#define LOADW(p) _mm512_loadu_ps(p)
#define MULADD(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#define LOAD_SOME load_some_f32
#define STORE_SOME store_some_f32
#include "gemm.inc"
#undef T
#undef TYPED
#undef STEP
#undef WVEC
#undef SPREAD
#undef LOADW
#undef MULADD
#undef LOAD_SOME
#undef STORE_SOME

#define T bf16
#define TYPED(name) name##_bf16
#define STEP 2
#define WVEC __m512i
#define SPREAD(p) spread_bf16(p)
#define LOADW(p) _mm512_loadu_si512(p)
#define MULADD(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#define LOAD_SOME load_some_bf16
#define STORE_SOME store_some_bf16
#include "gemm.inc"

void tm_linear(const void *x, long ldx, const void *weight, const void *bias, void *out,
               int out_is_float, long M, long N, long K, int is_bf16) {
    if (is_bf16)
        multiply_bf16(x, ldx, weight, bias, out, out_is_float, M, N, K);
    else
        multiply_f32(x, ldx, weight, bias, out, out_is_float, M, N, K);
}
