"""penalties on a GPU: a row's blocks of the vocabulary side by side.

Products and sums are not fused: the CPU rounds each, and the same token must come of it.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED, ROUNDED_APART
from tokenmesh.kernels.penalties.rows import PenaltyRows

BLOCK: Final = 1024
"""Tokens of one program."""
ROWS: Final = 128
"""Rows of one program that counts."""


def penalties(
    logits: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows, block: int = BLOCK
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, "penalties would be rounded"
    assert logits.stride(1) == 1, "the logits of a row are not contiguous"
    if num_rows:
        penalties_kernel[num_rows, triton.cdiv(vocab_size, block)](
            logits,
            logits.stride(0),
            idx_mapping,
            rows.slot,
            rows.repetition,
            rows.presence,
            rows.frequency,
            rows.prompt,
            rows.counts,
            vocab_size,
            rows.prompt.shape[1],
            BLOCK=block,
            **ROUNDED_APART,
        )


def count_tokens(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: PenaltyRows
) -> None:
    if len(tokens):
        count_tokens_kernel[(triton.cdiv(len(tokens), ROWS),)](
            tokens,
            flaws,
            idx_mapping,
            rows.slot,
            rows.counts,
            len(tokens),
            rows.counts.shape[1],
            ROWS=ROWS,
            **FUSED,
        )


@triton.jit
def penalties_kernel(
    logits_ptr,  # [N, V], changed
    stride_n,
    idx_mapping_ptr,  # [N]
    slot_ptr,  # [R]
    repetition_ptr,  # [S], as the next two
    presence_ptr,
    frequency_ptr,
    prompt_ptr,  # [S, num_mask_words]
    counts_ptr,  # [S, V]
    vocab_size,
    num_mask_words,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    slot = tl.load(slot_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    if slot < 0:
        return
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < vocab_size
    counts = tl.load(counts_ptr + slot * vocab_size + offs, mask=mask, other=0)
    words = tl.load(prompt_ptr + slot * num_mask_words + offs // 32, mask=mask, other=0)
    ptrs = logits_ptr + n * stride_n + offs
    x = tl.load(ptrs, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + slot)
    is_seen = (((words >> (offs % 32)) & 1) == 1) | (counts > 0)
    penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    value = tl.where(is_seen, penalized, x)
    presence = tl.where(counts > 0, tl.load(presence_ptr + slot), 0.0)
    value -= tl.load(frequency_ptr + slot) * counts.to(tl.float32) + presence
    tl.store(ptrs, value, mask=mask & is_seen)


# The batch changes from step to step, and with it where the flaws lie behind the tokens.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["flaws_ptr"])
def count_tokens_kernel(
    tokens_ptr,  # [N]
    flaws_ptr,  # [N]
    idx_mapping_ptr,  # [N]
    slot_ptr,  # [R]
    counts_ptr,  # [S, V], changed
    num_rows,
    vocab_size,
    ROWS: tl.constexpr,
):
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = offs < num_rows
    row = tl.load(idx_mapping_ptr + offs, mask=mask, other=-1)
    slot = tl.load(slot_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    mask = (slot >= 0) & (tl.load(flaws_ptr + offs, mask=mask, other=1) == 0)
    ptrs = counts_ptr + slot * vocab_size + tl.load(tokens_ptr + offs, mask=mask, other=0)
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0) + 1, mask=mask)
