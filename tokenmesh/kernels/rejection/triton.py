"""rejection on a GPU: the best recovered token of each block of the vocabulary, then one a row."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.triton import _bits_of, exponential_from
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.rejection.reference import ACCEPTING, RECOVERING

BLOCK: Final = 8192
"""Tokens of one program."""
TILE: Final = 1024
"""Tokens that it holds at a time."""
_ACCEPTING = tl.constexpr(ACCEPTING)
_RECOVERING = tl.constexpr(RECOVERING)


def rejection(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab_size = target.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=target.device)
    if not num_rows:
        return out
    assert target.stride(1) == 1
    assert draft is None or draft.stride(1) == 1
    grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
    score = torch.empty(grid, dtype=torch.float32, device=target.device)
    token = torch.empty_like(score, dtype=torch.int32)
    stride = 0 if draft is None else draft.stride(0)
    given = (target, target.stride(0), draft, stride, ids, seeds, positions)
    recover_kernel[grid](*given, score, token, vocab_size, BLOCK=BLOCK, TILE=TILE, **FUSED)
    blocks = triton.next_power_of_2(grid[1])
    judge_kernel[(num_rows,)](*given, score, token, out, grid[1], BLOCKS=blocks, **FUSED)
    return out


@triton.jit
def recover_kernel(
    target_ptr,  # [M, V] float32
    stride_target,
    draft_ptr,  # [M, V] float32, or None
    stride_draft,
    ids_ptr,  # [M]
    seeds_ptr,  # [M] int64
    positions_ptr,  # [M] int64
    score_ptr,  # [M, blocks] float32
    token_ptr,  # [M, blocks] int32
    vocab_size,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed = tl.load(seeds_ptr + row) ^ _RECOVERING
    position, drafted = tl.load(positions_ptr + row), tl.load(ids_ptr + row)
    best = tl.full((), -1.0, tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, BLOCK, TILE):
        first = block * BLOCK + start
        offs = first + tl.arange(0, TILE)
        mask = offs < vocab_size
        weight = tl.load(target_ptr + row * stride_target + offs, mask=mask, other=0.0)
        if draft_ptr is None:
            weight = tl.where(offs == drafted, 0.0, weight)
        else:
            proposed = tl.load(draft_ptr + row * stride_draft + offs, mask=mask, other=0.0)
            weight = tl.maximum(weight - proposed, 0.0)
        scores = tl.where(mask, weight / exponential_from(seed, position, first, TILE), -1.0)
        highest = tl.max(scores, 0)
        token = tl.where(highest > best, first + tl.argmax(scores, 0).to(tl.int32), token)
        best = tl.maximum(highest, best)
    at = row * tl.num_programs(1) + block
    tl.store(score_ptr + at, best)
    tl.store(token_ptr + at, token)


@triton.jit
def judge_kernel(
    target_ptr,  # as above
    stride_target,
    draft_ptr,
    stride_draft,
    ids_ptr,
    seeds_ptr,
    positions_ptr,
    score_ptr,
    token_ptr,
    out_ptr,  # [M] int64
    num_blocks,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    drafted = tl.load(ids_ptr + row).to(tl.int64)
    seed, position = tl.load(seeds_ptr + row) ^ _ACCEPTING, tl.load(positions_ptr + row)
    bits = _bits_of(seed, position, tl.full((), 0, tl.int32))
    # in float64, as the bits are more than a float32 holds
    uniform = (bits.to(tl.float64) + 0.5) / 2147483648.0
    if draft_ptr is not None:
        uniform *= tl.load(draft_ptr + row * stride_draft + drafted).to(tl.float64)
    is_kept = uniform < tl.load(target_ptr + row * stride_target + drafted).to(tl.float64)
    offs = tl.arange(0, BLOCKS)
    at = row * num_blocks + offs
    scores = tl.load(score_ptr + at, mask=offs < num_blocks, other=-1.0)
    place = tl.argmax(scores, 0)
    recovered = tl.load(token_ptr + row * num_blocks + place).to(tl.int64)
    # where rounding left nothing, the two distributions are equal
    is_kept |= tl.max(scores, 0) <= 0.0
    tl.store(out_ptr + row, tl.where(is_kept, drafted, recovered))
