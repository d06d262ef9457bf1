/* linear: y = x @ weight.T + bias on packed weights; see gemm.inc for the packing. */
#ifndef TM_GEMM_H
#define TM_GEMM_H

/* x [M, K] with rows ldx elements apart, out [M, N] in x's type or in float32. is_bf16: 0 float32,
 * 1 bfloat16 (K even). */
void tm_linear(const void *x, long ldx, const void *weight, const void *bias, void *out,
               int out_is_float, long M, long N, long K, int is_bf16);

#endif
