"""The two grouped products, with what follows each of them, and the sum over a token's pairs."""

import triton
import triton.language as tl

from tokenmesh.kernels.moe.triton_align import find_block
from tokenmesh.kernels.quantized_linear.triton_weight import decoded


@triton.jit
def activate(x, alpha, ACTIVATION: tl.constexpr):
    """Float32; ACTIVATION as in ExpertsSpec."""
    if ACTIVATION == "gelu":
        return x * (0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), with 2 * sqrt(2 / pi) = 1.59576912
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive
    else:
        return x * tl.sigmoid(alpha * x)


@triton.jit
def at_most(x, limit):
    return tl.where(x > limit, limit, x)


@triton.jit
def x_tile(
    rows,  # [M, 1] pointers
    order_ptr,  # [E, inputs] int32 or None
    expert,
    begin,
    mask_m,
    inputs,
    SIZE: tl.constexpr,
):
    """[M, SIZE]: what columns begin and on of an expert's weight are multiplied with."""
    k = tl.arange(0, SIZE)
    mask_k = k < inputs - begin
    mask = mask_m[:, None] & mask_k[None, :]
    if order_ptr is not None:
        index = tl.load(order_ptr + expert * inputs + begin + k, mask=mask_k, other=0)
        return tl.load(rows + index[None, :], mask=mask, other=0.0)
    else:
        return tl.load(rows + k[None, :] + begin, mask=mask, other=0.0)


@triton.jit
def weight_tile(
    rows,  # [1, N] pointers to the first weight, or code, of each output's row
    scales,  # see `decoded`, when IS_CODED
    offsets,
    table_ptr,
    start,  # the first input of the chunk
    mask_n,  # [1, N]
    outputs,
    inputs,
    shift,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,  # inputs
    IS_CODED: tl.constexpr,
    IS_NARROW: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """[SIZE, N]: the weights of inputs start + HALF * SIZE and on; float32 where they are codes."""
    if IS_CODED:
        return decoded(
            rows, scales, offsets, table_ptr, start, mask_n, outputs, inputs, shift,
            HALF, SIZE, IS_NARROW, HAS_OFFSETS, GROUP,
        )  # fmt: skip
    else:
        k = tl.arange(0, SIZE)[:, None]
        return tl.load(rows + k + start, mask=mask_n & (k < inputs - start), other=0.0)


@triton.jit
def first_kernel(
    x_ptr,  # [T, hidden]
    pairs_ptr,
    first_ptr,
    block_ends_ptr,
    w13_ptr,  # [E, 2 * inner or inner, hidden], or codes, see DeviceExperts
    scales_ptr,  # [groups, E * outputs], or None where weights are plain
    offsets_ptr,  # the same, or None
    table_ptr,  # [16] float32 or None
    order_ptr,  # [E, hidden] int32 or None
    b13_ptr,  # [E, 2 * inner or inner] or None
    out_ptr,  # [P, inner] out, by pair
    x_stride,
    expert_stride,
    w_stride,
    out_stride,
    hidden,
    inner,
    num_experts,
    shift,
    alpha,
    limit,
    up_offset,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITS: tl.constexpr,  # "nothing", "gate" or "activated"
    IS_NARROW: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks, inner / BLOCK_N)."""
    expert, pair, mask_m = find_block(
        pairs_ptr, first_ptr, block_ends_ptr, num_experts, EXPERTS, BLOCK_M
    )
    if expert == num_experts:
        return
    IS_CODED: tl.constexpr = scales_ptr is not None
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    HALVES: tl.constexpr = 2 if IS_NARROW else 1
    SIZE: tl.constexpr = BLOCK_K // HALVES
    SLICES: tl.constexpr = 2 if IS_GATED else 1
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < inner
    mask_w = mask_n[None, :]
    x_rows = x_ptr + (pair // TOP_K * x_stride)[:, None]
    rows = w13_ptr + expert.to(tl.int64) * expert_stride
    up_rows = rows + ((n.to(tl.int64) + inner) * w_stride)[None, :]
    rows += (n.to(tl.int64) * w_stride)[None, :]
    scales = rows
    offsets = rows
    outputs = num_experts * SLICES * inner
    first_output = (expert * SLICES * inner + n)[None, :]
    if IS_CODED:
        scales = scales_ptr + first_output
    if HAS_OFFSETS:
        offsets = offsets_ptr + first_output
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        for half in tl.static_range(HALVES):
            x = x_tile(x_rows, order_ptr, expert, start + half * SIZE, mask_m, hidden, SIZE)
            w = weight_tile(
                rows, scales, offsets, table_ptr, start, mask_w, outputs, hidden, shift,
                half, SIZE, IS_CODED, IS_NARROW, HAS_OFFSETS, GROUP,
            )  # fmt: skip
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="tf32x3")
            if IS_GATED:
                w = weight_tile(
                    up_rows, scales + inner, offsets + inner, table_ptr, start, mask_w, outputs,
                    hidden, shift, half, SIZE, IS_CODED, IS_NARROW, HAS_OFFSETS, GROUP,
                )  # fmt: skip
                up = tl.dot(x, w.to(x.dtype), up, input_precision="tf32x3")
    if b13_ptr is not None:
        bias_ptrs = b13_ptr + expert * SLICES * inner + n
        acc += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up += tl.load(bias_ptrs + inner, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if LIMITS == "gate":
        acc = at_most(acc, limit)
    acc = activate(acc, alpha, ACTIVATION)
    if LIMITS == "activated":
        acc = at_most(acc, limit)
    if IS_GATED:
        if LIMITS != "nothing":
            up = at_most(-at_most(-up, limit), limit)
        acc = acc * (up + up_offset)
    out_ptrs = out_ptr + (pair * out_stride)[:, None] + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def second_kernel(
    x_ptr,  # [P, inner]
    pairs_ptr,
    first_ptr,
    block_ends_ptr,
    w2_ptr,  # [E, hidden, inner], or codes, see DeviceExperts
    scales_ptr,  # [groups, E * hidden], or None where weights are plain
    offsets_ptr,  # the same, or None
    table_ptr,  # [16] float32 or None
    order_ptr,  # [E, inner] int32 or None
    b2_ptr,  # [E, hidden] or None
    weights_ptr,  # [P]
    out_ptr,  # [P, hidden] out, float32, by pair
    x_stride,
    expert_stride,
    w_stride,
    out_stride,
    hidden,
    inner,
    num_experts,
    shift,
    EXPERTS: tl.constexpr,
    IS_NARROW: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (blocks, hidden / BLOCK_N)."""
    expert, pair, mask_m = find_block(
        pairs_ptr, first_ptr, block_ends_ptr, num_experts, EXPERTS, BLOCK_M
    )
    if expert == num_experts:
        return
    IS_CODED: tl.constexpr = scales_ptr is not None
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    HALVES: tl.constexpr = 2 if IS_NARROW else 1
    SIZE: tl.constexpr = BLOCK_K // HALVES
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < hidden
    x_rows = x_ptr + (pair * x_stride)[:, None]
    rows = w2_ptr + expert.to(tl.int64) * expert_stride
    rows += (n.to(tl.int64) * w_stride)[None, :]
    scales = rows
    offsets = rows
    first_output = (expert * hidden + n)[None, :]
    if IS_CODED:
        scales = scales_ptr + first_output
    if HAS_OFFSETS:
        offsets = offsets_ptr + first_output
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        for half in tl.static_range(HALVES):
            x = x_tile(x_rows, order_ptr, expert, start + half * SIZE, mask_m, inner, SIZE)
            w = weight_tile(
                rows, scales, offsets, table_ptr, start, mask_n[None, :], num_experts * hidden,
                inner, shift, half, SIZE, IS_CODED, IS_NARROW, HAS_OFFSETS, GROUP,
            )  # fmt: skip
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="tf32x3")
    if b2_ptr is not None:
        bias = tl.load(b2_ptr + expert * hidden + n, mask=mask_n, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    weight = tl.load(weights_ptr + pair, mask=mask_m, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + (pair * out_stride)[:, None] + n[None, :]
    tl.store(out_ptrs, acc * weight[:, None], mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def sum_kernel(
    parts_ptr,  # [P, hidden] float32; those of experts that are not here have not been written
    ids_ptr,  # [P]
    out_ptr,  # [T, hidden] out, contiguous
    parts_stride,
    hidden,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, hidden / BLOCK); always in the order of the pairs."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(ids_ptr + pair)
        is_here = (expert >= 0) & (expert < num_experts)
        end = tl.where(is_here, hidden, 0)
        total += tl.load(parts_ptr + pair * parts_stride + n, mask=n < end, other=0.0)
    tl.store(out_ptr + token * hidden + n, total.to(out_ptr.dtype.element_ty), mask=mask)
