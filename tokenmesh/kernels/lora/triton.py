"""lora on a GPU: two grouped products; a program takes a tile of tokens that have one adapter."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.lora.device import BLOCK_TOKENS, DeviceAdapterRows, DeviceBank

BLOCK_K: Final = 128
BLOCK_N: Final = 128
NUM_WARPS: Final = 4
MAX_BLOCK_RANK: Final = 64


def add_by_slot(
    x: torch.Tensor, out: torch.Tensor, bank: DeviceBank, rows: DeviceAdapterRows
) -> None:
    """Add to out [T, O], in place, what the adapters make of x [T, I]."""
    num_tiles, num_tokens, rank = len(rows.tiles), len(rows.tokens), bank.rank
    if not num_tiles:
        return
    assert_aligned_rows(x, bank.a, bank.b)
    shrunk = torch.empty((num_tokens, bank.a.shape[1]), dtype=x.dtype, device=x.device)
    block_rank = min(MAX_BLOCK_RANK, rank & -rank)
    shrink_kernel[(num_tiles, shrunk.shape[1] // block_rank)](
        x,
        rows.tokens,
        rows.tiles,
        bank.a,
        shrunk,
        x.stride(0),
        bank.a.stride(0),
        bank.a.stride(1),
        shrunk.stride(0),
        x.shape[1],
        BLOCK_M=BLOCK_TOKENS,
        BLOCK_K=BLOCK_K,
        BLOCK_R=block_rank,
        num_warps=NUM_WARPS,
        **FUSED,
    )
    for part, (first, size) in enumerate(bank.parts):
        expand_kernel[(num_tiles, triton.cdiv(size, BLOCK_N))](
            shrunk,
            rows.tokens,
            rows.tiles,
            bank.b,
            out,
            shrunk.stride(0),
            bank.b.stride(0),
            bank.b.stride(1),
            out.stride(0),
            first,
            size,
            part * rank,
            rank,
            BLOCK_M=BLOCK_TOKENS,
            BLOCK_N=BLOCK_N,
            BLOCK_R=block_rank,
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit
def find_tile(tokens_ptr, tiles_ptr, BLOCK_M: tl.constexpr):
    """This program's slot, its places among the tokens, the tokens, and which of them there are."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    m = tl.arange(0, BLOCK_M)
    mask = m < count
    token = tl.load(tokens_ptr + first + m, mask=mask, other=0)
    return slot.to(tl.int64), (first + m).to(tl.int64), token.to(tl.int64), mask


@triton.jit
def shrink_kernel(
    x_ptr,  # [T, inputs]
    tokens_ptr,  # int32 [T']
    tiles_ptr,  # int32 [tiles, 3]
    a_ptr,  # [slots, parts * rank, inputs]
    out_ptr,  # [T', parts * rank] out
    x_stride,
    slot_stride,
    a_stride,
    out_stride,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (tiles, parts * rank / BLOCK_R)."""
    slot, place, token, mask_m = find_tile(tokens_ptr, tiles_ptr, BLOCK_M)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (token * x_stride)[:, None] + k[None, :]
    a_ptrs = a_ptr + slot * slot_stride + (r * a_stride)[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        mask_k = k < inputs - start
        x = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        a = tl.load(a_ptrs + start, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="tf32x3")
    out_ptrs = out_ptr + (place * out_stride)[:, None] + r[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def expand_kernel(
    x_ptr,  # [T', parts * rank]
    tokens_ptr,  # int32 [T']
    tiles_ptr,  # int32 [tiles, 3]
    b_ptr,  # [slots, O, rank]
    out_ptr,  # [T, O] in and out
    x_stride,
    slot_stride,
    b_stride,
    out_stride,
    first_output,
    outputs,
    first_rank,
    rank,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (tiles, outputs / BLOCK_N), for the outputs of one part."""
    slot, place, token, mask_m = find_tile(tokens_ptr, tiles_ptr, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = n < outputs
    column = first_output + n
    r = tl.arange(0, BLOCK_R)
    x_ptrs = x_ptr + (place * x_stride)[:, None] + (first_rank + r)[None, :]
    b_ptrs = b_ptr + slot * slot_stride + (column.to(tl.int64) * b_stride)[None, :] + r[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        x = tl.load(x_ptrs + start, mask=mask_m[:, None], other=0.0)
        b = tl.load(b_ptrs + start, mask=mask_n[None, :], other=0.0)
        acc = tl.dot(x, b, acc, input_precision="tf32x3")
    mask = mask_m[:, None] & mask_n[None, :]
    out_ptrs = out_ptr + (token * out_stride)[:, None] + column[None, :]
    total = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
