"""causal_conv on a GPU: a program takes some tokens of one row and some channels."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.kernels.state_rows.triton_chunk import find_chunk, max_chunks

BLOCK_C: Final = 128
TOKENS: Final = 16
"""Tokens of a program, where rows are longer than one token."""
NUM_WARPS: Final = 4


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: str | None,
) -> torch.Tensor:
    num_tokens, channels = x.shape
    assert_aligned_rows(x)
    assert state.is_contiguous(), "a state is changed in place"
    assert weight.shape[1] <= TOKENS, "a row's second program would read the state"
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    num_rows = len(rows.slots)
    is_decode = rows.longest <= 1
    programs = num_rows if is_decode else max_chunks(num_tokens, num_rows, TOKENS)
    if out.numel():
        causal_conv_kernel[(programs, triton.cdiv(channels, BLOCK_C))](
            x,
            weight,
            bias,
            state,
            out,
            rows.slots,
            rows.cu_q,
            rows.starts,
            num_rows,
            channels,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            WIDTH=weight.shape[1],
            KEPT=state.shape[2],
            HAS_BIAS=bias is not None,
            SILU=activation == "silu",
            TOKENS=1 if is_decode else TOKENS,
            BLOCK_C=BLOCK_C,
            BLOCK_K=triton.next_power_of_2(max(1, state.shape[2])),
            num_warps=NUM_WARPS,
            **FUSED,
        )
    return out


@triton.jit
def _load_input(x_rows, state_rows, token, channel, oldest, mask, stride_x, KEPT: tl.constexpr):
    """Inputs number `token` [N, 1] of the row; of those before it, what the state has kept."""
    is_new = token >= 0
    x = tl.load(x_rows + token * stride_x + channel, mask=mask & is_new, other=0.0)
    column = KEPT + token
    is_kept = (token < 0) & (column >= oldest)
    kept = tl.load(state_rows + channel * KEPT + column, mask=mask & is_kept, other=0.0)
    return tl.where(is_new, x.to(tl.float32), kept.to(tl.float32))


@triton.jit(do_not_specialize=["num_rows"])
def causal_conv_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, WIDTH]
    bias_ptr,  # [C]; None: HAS_BIAS is false
    state_ptr,  # [slots, C, KEPT], read and written
    out_ptr,  # [T, C]
    slots_ptr,  # [R]
    cu_q_ptr,  # [R + 1] int32
    starts_ptr,  # [R] int32
    num_rows,
    channels,
    stride_x,
    stride_weight,
    stride_tap,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if TOKENS == 1:
        row = tl.program_id(0)
        first = tl.load(cu_q_ptr + row)
        length = tl.load(cu_q_ptr + row + 1) - first
        offset = 0
    else:
        row, first, length, chunk = find_chunk(cu_q_ptr, tl.program_id(0), num_rows, TOKENS)
        offset = chunk * TOKENS
    if offset < length:
        oldest = tl.where(tl.load(starts_ptr + row) > 0, 0, KEPT)  # column that may be read
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        is_channel = channel < channels
        x_rows = x_ptr + first.to(tl.int64) * stride_x
        state_rows = state_ptr + tl.load(slots_ptr + row).to(tl.int64) * channels * KEPT
        token = offset + tl.arange(0, TOKENS)[:, None]
        mask = is_channel & (token >= 0) & (token < length)
        value = tl.zeros([TOKENS, BLOCK_C], dtype=tl.float32)
        if HAS_BIAS:
            value += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            weight_ptrs = weight_ptr + channel * stride_weight + tap * stride_tap
            weight = tl.load(weight_ptrs, mask=is_channel, other=0.0).to(tl.float32)
            seen = token + (tap - WIDTH + 1)
            value += weight * _load_input(
                x_rows, state_rows, seen, channel, oldest, mask, stride_x, KEPT
            )
        if SILU:
            value = value * tl.sigmoid(value)
        out = (first + token).to(tl.int64) * channels + channel
        tl.store(out_ptr + out, value.to(out_ptr.dtype.element_ty), mask=mask)

        if KEPT > 0:
            if offset == 0:  # the row's only program that has read its state, so it may write it
                column = tl.arange(0, BLOCK_K)[:, None]
                is_kept = is_channel & (column < KEPT)
                last = length - KEPT + column
                newest = _load_input(
                    x_rows, state_rows, last, channel, oldest, is_kept, stride_x, KEPT
                )
                tl.debug_barrier()  # until all threads have read
                newest = newest.to(state_ptr.dtype.element_ty)
                tl.store(state_rows + channel * KEPT + column, newest, mask=is_kept)
