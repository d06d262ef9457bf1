"""rope on a GPU: a program turns some heads of one token; pairs are neighbors in registers."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED

BLOCK_H: Final = 8
NUM_WARPS: Final = 4


def rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """x [T, H, D] in place, turns [T, 1, P] complex64; see the package."""
    tokens, heads, _ = x.shape
    assert_aligned_rows(x)
    if x.numel():
        rope_kernel[(tokens, triton.cdiv(heads, BLOCK_H))](
            x,
            torch.view_as_real(turns),
            heads,
            x.stride(0),
            x.stride(1),
            ROTARY=2 * turns.shape[-1],
            BLOCK_H=BLOCK_H,
            BLOCK_R=triton.next_power_of_2(2 * turns.shape[-1]),
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit
def load_turns(turns_ptr, token, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """cos and sin [BLOCK / 2] of one token; past ROTARY they turn nothing."""
    offs = tl.arange(0, BLOCK)
    turns = tl.load(turns_ptr + token * ROTARY + offs, mask=offs < ROTARY, other=0.0)
    turns = tl.where((offs >= ROTARY) & (offs % 2 == 0), 1.0, turns)
    return tl.split(tl.reshape(turns, [BLOCK // 2, 2]))


@triton.jit
def turned(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK_H, BLOCK] with each pair (2i, 2i + 1) turned by cos, sin [BLOCK / 2]."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, BLOCK // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [BLOCK_H, BLOCK])


@triton.jit
def rope_kernel(
    x_ptr,  # [T, heads, >= ROTARY], read and written
    turns_ptr,  # [T, ROTARY]: real and imaginary parts in turn
    heads,
    stride_x,
    stride_head,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs = tl.arange(0, BLOCK_R)
    mask = (head < heads)[:, None] & (offs < ROTARY)[None, :]
    ptrs = x_ptr + token * stride_x + head.to(tl.int64)[:, None] * stride_head + offs[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    cos, sin = load_turns(turns_ptr, token, ROTARY, BLOCK_R)
    out = turned(x, cos, sin, BLOCK_H, BLOCK_R)
    tl.store(ptrs, out.to(x_ptr.dtype.element_ty), mask=mask)
