"""quantized_linear on a GPU: a kernel that decodes the codes of every format in registers, and one
that multiplies codes of 8 bits with activations that are rounded to their type.

4 bits stand for a number of a table (NVFP4, MXFP4, NF4, IQ4_NL) or for themselves less a center
(integers), 8 bits for integers or floats.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.quantized_linear.device_codes import CHUNK, ROUNDED_GROUP, DeviceCodes
from tokenmesh.kernels.quantized_linear.triton_weight import decoded

BLOCK_N: Final = 64
FEW_TOKENS: Final = 16
"""Up to so many, a tile has 16 rows: reading the weight takes most of the time."""
NUM_WARPS: Final = 4
NUM_STAGES: Final = 3


def block_m(tokens: int) -> int:
    """Rows of a tile."""
    return FEW_TOKENS if tokens <= FEW_TOKENS else 64


def quantized_linear(x: torch.Tensor, codes: DeviceCodes, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, I] -> [T, O] in out_dtype."""
    if codes.order is not None:
        x = x.index_select(1, codes.order)
    assert_aligned_rows(x)
    out = torch.empty((x.shape[0], codes.numbers.shape[0]), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    if codes.multiplies_codes(x.dtype):
        _multiply_codes(x, codes, out)
    else:
        _decode(x, codes, out)
    return out


def _decode(x: torch.Tensor, codes: DeviceCodes, out: torch.Tensor) -> None:
    (tokens, inputs), outputs = x.shape, out.shape[1]
    rows = block_m(tokens)
    decode_kernel[(triton.cdiv(outputs, BLOCK_N), triton.cdiv(tokens, rows))](
        x,
        codes.numbers,
        codes.scales,
        codes.offsets,
        codes.table,
        codes.bias,
        out,
        x.stride(0),
        codes.numbers.stride(0),
        tokens,
        outputs,
        inputs,
        codes.shift,
        IS_NARROW=codes.is_narrow,
        GROUP=0 if codes.group_size >= inputs else codes.group_size,
        BLOCK_M=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=CHUNK,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **FUSED,
    )


def _multiply_codes(x: torch.Tensor, codes: DeviceCodes, out: torch.Tensor) -> None:
    (tokens, inputs), outputs = x.shape, out.shape[1]
    groups = triton.cdiv(inputs, ROUNDED_GROUP)
    rounded = torch.empty((tokens, inputs), dtype=codes.numbers.dtype, device=x.device)
    factors = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    is_float = codes.numbers.dtype.is_floating_point
    round_kernel[(tokens, groups)](
        x,
        rounded,
        factors,
        x.stride(0),
        inputs,
        groups,
        IS_FLOAT=is_float,
        LIMIT=torch.finfo(codes.numbers.dtype).max if is_float else 127.0,
        BLOCK=ROUNDED_GROUP,
        num_warps=1,
        **FUSED,
    )
    rows = block_m(tokens)
    codes_kernel[(triton.cdiv(outputs, BLOCK_N), triton.cdiv(tokens, rows))](
        rounded,
        factors,
        codes.numbers,
        codes.scales,
        codes.bias,
        out,
        groups,
        tokens,
        outputs,
        inputs,
        IS_FLOAT=is_float,
        GROUP=0 if codes.group_size >= inputs else codes.group_size,
        BLOCK_M=rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=ROUNDED_GROUP,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **FUSED,
    )


@triton.jit(do_not_specialize=["tokens"])
def decode_kernel(
    x_ptr,  # [tokens, inputs]
    numbers_ptr,  # [outputs, *], see DeviceCodes
    scales_ptr,  # [groups, outputs], see DeviceCodes
    offsets_ptr,  # the same, or None
    table_ptr,  # [16] float32 or None
    bias_ptr,  # [outputs] or None
    out_ptr,  # [tokens, outputs] out, contiguous
    x_stride,
    row_stride,
    tokens,
    outputs,
    inputs,
    shift,
    IS_NARROW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (outputs / BLOCK_N, tokens / BLOCK_M)."""
    HALVES: tl.constexpr = 2 if IS_NARROW else 1
    SIZE: tl.constexpr = BLOCK_K // HALVES
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask_m = m < tokens
    mask_n = n < outputs
    numbers = numbers_ptr + (n.to(tl.int64) * row_stride)[None, :]
    scales = scales_ptr + n[None, :]
    offsets = scales
    if HAS_OFFSETS:
        offsets = offsets_ptr + n[None, :]
    x_ptrs = x_ptr + (m * x_stride)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        for half in tl.static_range(HALVES):
            k = start + half * SIZE + tl.arange(0, SIZE)
            mask_x = mask_m[:, None] & (k < inputs)[None, :]
            x = tl.load(x_ptrs + k[None, :], mask=mask_x, other=0.0)
            weight = decoded(
                numbers, scales, offsets, table_ptr, start, mask_n[None, :], outputs, inputs,
                shift, half, SIZE, IS_NARROW, HAS_OFFSETS, GROUP,
            )  # fmt: skip
            acc = tl.dot(x, weight.to(x.dtype), acc, input_precision="tf32x3")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (m * outputs)[:, None] + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def round_kernel(
    x_ptr,  # [tokens, inputs]
    out_ptr,  # [tokens, inputs] out, contiguous: int8 or a float of 8 bits
    factors_ptr,  # [tokens, groups] out: float32
    x_stride,
    inputs,
    groups,
    IS_FLOAT: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, groups of BLOCK inputs)."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < inputs
    x = tl.load(x_ptr + token * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    # the sum is 0, or NaN where an input is not finite: integers have no NaN
    factor = tl.max(tl.abs(x), 0) / LIMIT + tl.sum(x * 0.0, 0)
    x = x / tl.where(factor > 0, factor, 1.0)
    if not IS_FLOAT:
        x = tl.floor(x + 0.5)
    tl.store(out_ptr + token * inputs + k, x.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(factors_ptr + token * groups + tl.program_id(1), factor)


@triton.jit(do_not_specialize=["tokens"])
def codes_kernel(
    x_ptr,  # [tokens, inputs] int8 or a float of 8 bits
    factors_ptr,  # [tokens, x_groups] float32
    numbers_ptr,  # [outputs, inputs] of x's type
    scales_ptr,  # [groups, outputs], see DeviceCodes
    bias_ptr,  # [outputs] or None
    out_ptr,  # [tokens, outputs] out, contiguous
    x_groups,
    tokens,
    outputs,
    inputs,
    IS_FLOAT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale, a multiple of BLOCK_K; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (outputs / BLOCK_N, tokens / BLOCK_M). Sums of int8 are exact within BLOCK_K inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask_m = m < tokens
    mask_n = n < outputs
    x_ptrs = x_ptr + (m * inputs)[:, None]
    weight_ptrs = numbers_ptr + (n.to(tl.int64) * inputs)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask_k = k < inputs
        x = tl.load(x_ptrs + k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        mask_w = mask_k[:, None] & mask_n[None, :]
        weight = tl.load(weight_ptrs + k[:, None], mask=mask_w, other=0.0)
        if IS_FLOAT:
            part = tl.dot(x, weight)
        else:
            part = tl.dot(x, weight, out_dtype=tl.int32).to(tl.float32)
        factor = tl.load(factors_ptr + m * x_groups + start // BLOCK_K, mask=mask_m, other=0.0)
        scale_ptrs = scales_ptr + n
        if GROUP:
            scale_ptrs += start // GROUP * outputs
        scale = tl.load(scale_ptrs, mask=mask_n, other=0.0)
        acc += part * factor[:, None] * scale.to(tl.float32)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (m * outputs)[:, None] + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
