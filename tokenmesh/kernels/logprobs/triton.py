"""logprobs on a GPU: blocks of the vocabulary side by side, then one program a row joins them.

Logits and ids are packed into one int64 whose order is "larger logit, then smaller id", so the
most likely tokens are found by taking the largest again and again.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.logprobs.answer import Logprobs

BLOCK: Final = 4096
"""Tokens of one program."""
MAX_TOP: Final = 64
"""More alternatives than that are sorted out by torch."""
USUAL_TOP: Final = 32
"""Up to this many alternatives, one compiled kernel serves every batch."""
_LARGEST_ID = tl.constexpr(0x7FFFFFFF)
_NONE = tl.constexpr(-(2**63))


def logprobs(
    logits: torch.Tensor,
    indices: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    block: int = BLOCK,
) -> Logprobs:
    num_top = min(num_top, logits.shape[1])
    in_kernel = num_top if num_top <= MAX_TOP else 0
    answer, norm = _launch(logits, indices, tokens, in_kernel, block)
    if in_kernel == num_top:
        return answer
    asked = logits[indices.long()].float()
    top, top_ids = asked.sort(dim=-1, descending=True, stable=True)
    top = top[:, :num_top] - norm.unsqueeze(1)
    return Logprobs(answer.chosen, answer.ranks, top_ids[:, :num_top].int(), top)


def _launch(
    logits: torch.Tensor, indices: torch.Tensor, tokens: torch.Tensor, num_top: int, block: int
) -> tuple[Logprobs, torch.Tensor]:
    """The answer and the logarithm of each row's sum."""
    assert logits.stride(1) == 1, "the logits of a row are not contiguous"
    num_rows, vocab_size = len(indices), logits.shape[1]
    num_blocks = triton.cdiv(vocab_size, block)
    device = logits.device
    answer = Logprobs(
        chosen=torch.empty(num_rows, device=device),
        ranks=torch.empty(num_rows, dtype=torch.int32, device=device),
        top_ids=torch.empty(num_rows, num_top, dtype=torch.int32, device=device),
        top=torch.empty(num_rows, num_top, device=device),
    )
    norm = torch.empty(num_rows, device=device)
    if not num_rows:
        return answer, norm
    best = torch.empty(num_rows, num_blocks, device=device)
    total = torch.empty_like(best)
    larger = torch.empty_like(best, dtype=torch.int32)
    keys = torch.empty(num_rows, num_blocks, num_top, dtype=torch.int64, device=device)
    batch = (logits, logits.stride(0), indices, tokens)
    parts = (best, total, larger, keys)
    logprobs_survey_kernel[num_rows, num_blocks](
        *batch,
        *parts,
        vocab_size,
        num_top,
        BLOCK=block,
        num_warps=8,
        **FUSED,
    )
    logprobs_join_kernel[(num_rows,)](
        *batch,
        *parts,
        norm,
        answer.chosen,
        answer.ranks,
        answer.top_ids,
        answer.top,
        num_blocks,
        num_top,
        BLOCKS=triton.next_power_of_2(num_blocks),
        KEYS=triton.next_power_of_2(num_blocks * (USUAL_TOP if num_top <= USUAL_TOP else MAX_TOP)),
        num_warps=8,
        **FUSED,
    )
    return answer, norm


@triton.jit
def _order(bits):
    """Bits of floats, int32 -> integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_top"])
def logprobs_survey_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    indices_ptr,  # [A]
    tokens_ptr,  # [N]
    best_ptr,  # [A, blocks] out: the largest logit
    total_ptr,  # [A, blocks] out: sum of exp(logit - best)
    larger_ptr,  # [A, blocks] out: how many logits are larger than the token's
    keys_ptr,  # [A, blocks, num_top] out
    vocab_size,
    num_top,
    BLOCK: tl.constexpr,
):
    partial = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    n = tl.load(indices_ptr + tl.program_id(0)).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < vocab_size
    row_ptr = logits_ptr + n * stride_n
    x = tl.load(row_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), axis=0)
    target = tl.load(row_ptr + tl.load(tokens_ptr + n)).to(tl.float32)
    tl.store(best_ptr + partial, best)
    tl.store(total_ptr + partial, total)
    tl.store(larger_ptr + partial, tl.sum((x > target).to(tl.int32), axis=0))
    if num_top > 0:
        # minus zero is no less than zero
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        order = _order(bits).to(tl.int64)
        keys = tl.where(mask, (order << 32) | (offs ^ _LARGEST_ID), _NONE)
        for place in range(0, num_top):
            key = tl.max(keys, axis=0)
            tl.store(keys_ptr + partial * num_top + place, key)
            keys = tl.where(keys == key, _NONE, keys)


@triton.jit(do_not_specialize=["num_top"])
def logprobs_join_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    indices_ptr,  # [A]
    tokens_ptr,  # [N]
    best_ptr,  # [A, blocks], as the next two
    total_ptr,
    larger_ptr,
    keys_ptr,  # [A, blocks, num_top]
    norm_ptr,  # [A] out
    chosen_ptr,  # [A] out
    ranks_ptr,  # [A] out
    top_ids_ptr,  # [A, num_top] out
    top_ptr,  # [A, num_top] out
    num_blocks,
    num_top,
    BLOCKS: tl.constexpr,
    KEYS: tl.constexpr,
):
    a = tl.program_id(0).to(tl.int64)
    n = tl.load(indices_ptr + a).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    offs = a * num_blocks + blocks
    bests = tl.load(best_ptr + offs, mask=mask, other=float("-inf"))
    best = tl.max(bests, axis=0)
    totals = tl.load(total_ptr + offs, mask=mask, other=0.0)
    norm = best + tl.log(tl.sum(totals * tl.exp(bests - best), axis=0))
    target = tl.load(logits_ptr + n * stride_n + tl.load(tokens_ptr + n)).to(tl.float32)
    tl.store(norm_ptr + a, norm)
    tl.store(chosen_ptr + a, target - norm)
    tl.store(ranks_ptr + a, 1 + tl.sum(tl.load(larger_ptr + offs, mask=mask, other=0), axis=0))
    if num_top > 0:
        places = tl.arange(0, KEYS)
        num_keys = num_blocks * num_top
        keys = tl.load(keys_ptr + a * num_keys + places, mask=places < num_keys, other=_NONE)
        for place in range(0, num_top):
            key = tl.max(keys, axis=0)
            value = _order((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            out = a * num_top + place
            tl.store(top_ids_ptr + out, (key & _LARGEST_ID).to(tl.int32) ^ _LARGEST_ID)
            tl.store(top_ptr + out, value - norm)
            keys = tl.where(keys == key, _NONE, keys)
