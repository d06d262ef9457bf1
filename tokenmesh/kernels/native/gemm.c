/* Linear layers for any number of tokens on one packed copy of the weight. */
#include "gemm.h"

#include "pool.h"
#include "vec.h"

enum {
    CHUNKS_OF_THREAD = 8,
    WORK_OF_CHUNK = 1 << 15, /* multiplications worth handing to another thread */
};

#include "typed.h"
#include "tile.inc"
#include "gemm.inc"
#define TM_BF16
#include "typed.h"
#include "tile.inc"
#include "gemm.inc"

void tm_linear(const void *x, long ldx, const void *weight, const void *bias, void *out,
               int out_is_float, long M, long N, long K, int is_bf16) {
    if (is_bf16)
        multiply_bf16(x, ldx, weight, bias, out, out_is_float, M, N, K);
    else
        multiply_f32(x, ldx, weight, bias, out, out_is_float, M, N, K);
}
