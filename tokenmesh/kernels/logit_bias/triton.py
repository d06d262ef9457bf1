"""logit_bias on a GPU: one program a row that has a slot, three stages with a barrier between them.

The barriers are needed: a stage reads logits that other threads of the program wrote in the last.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.logit_bias.rows import LimitRows
from tokenmesh.kernels.sample.rows import HID_DEFECT, HID_NUMBER

BLOCK: Final = 2048
"""Tokens at a time."""
EDITS: Final = 256
"""Edits, or bad words, at a time."""
LEAST_RECENT: Final = 32
"""Recent tokens that `record` has room for, so that shorter words share a kernel."""
_HID_DEFECT = tl.constexpr(HID_DEFECT)
_HID_NUMBER = tl.constexpr(HID_NUMBER)


def logit_bias(
    logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor, rows: LimitRows
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, "biases would be rounded"
    assert logits.stride(1) == 1, "the logits of a row are not contiguous"
    marks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        logit_bias_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            idx_mapping,
            positions,
            rows.slot,
            rows.has_allowed,
            rows.allowed,
            rows.num_edits,
            rows.edit_ids,
            rows.edit_bias,
            rows.edit_is_stop,
            rows.min_tokens,
            rows.num_words,
            rows.word_ends,
            rows.word_tokens,
            rows.recent,
            marks,
            vocab_size,
            rows.allowed.shape[1],
            rows.edit_ids.shape[1],
            rows.word_ends.shape[1],
            rows.word_tokens.shape[1],
            rows.recent.shape[1],
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            EDITS=EDITS,
            num_warps=8,
            **FUSED,
        )
    return marks


def record(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: LimitRows
) -> None:
    size = rows.recent.shape[1]
    if len(tokens) and size:
        record_kernel[(len(tokens),)](
            tokens,
            flaws,
            idx_mapping,
            rows.slot,
            rows.recent,
            size,
            BLOCK=max(LEAST_RECENT, triton.next_power_of_2(size)),
            num_warps=1,
            **FUSED,
        )


@triton.jit
def _marks_of(x, is_hidden):
    """Marks for logits that will not be seen any more."""
    has_defect = tl.max((is_hidden & ((x != x) | (x == float("inf")))).to(tl.int32), axis=0)
    is_number = (x > float("-inf")) & (x < float("inf"))
    has_number = tl.max((is_hidden & is_number).to(tl.int32), axis=0)
    return has_defect * _HID_DEFECT | has_number * _HID_NUMBER


@triton.jit
def _forbid_others(logits_ptr, allowed_ptr, vocab_size, BLOCK: tl.constexpr):
    """Leave only the allowed tokens; -> marks."""
    marks = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < vocab_size
        words = tl.load(allowed_ptr + offs // 32, mask=mask, other=0)
        is_hidden = mask & (((words >> (offs % 32)) & 1) == 0)
        x = tl.load(logits_ptr + offs, mask=is_hidden, other=float("-inf"))
        marks |= _marks_of(x, is_hidden)
        tl.store(logits_ptr + offs, float("-inf"), mask=is_hidden)
    return marks


@triton.jit
def _edit(logits_ptr, ids_ptr, bias_ptr, is_stop_ptr, num_edits, is_too_short, EDITS: tl.constexpr):
    """Add biases and, while the output is too short, forbid stop tokens; -> marks."""
    marks = tl.zeros((), tl.int32)
    for start in range(0, num_edits, EDITS):
        offs = start + tl.arange(0, EDITS)
        mask = offs < num_edits
        ids = tl.load(ids_ptr + offs, mask=mask, other=0)
        x = tl.load(logits_ptr + ids, mask=mask, other=0.0)
        is_stop = tl.load(is_stop_ptr + offs, mask=mask, other=0)
        is_hidden = mask & (is_stop * is_too_short != 0)
        marks |= _marks_of(x, is_hidden)
        bias = tl.load(bias_ptr + offs, mask=mask, other=0.0)
        tl.store(logits_ptr + ids, tl.where(is_hidden, float("-inf"), x + bias), mask=mask)
    return marks


@triton.jit
def _ban(logits_ptr, ends_ptr, tokens_ptr, recent_ptr, num_words, num_recent, EDITS: tl.constexpr):
    """Forbid the last token of each word whose others were just generated; -> marks."""
    marks = tl.zeros((), tl.int32)
    for start in range(0, num_words, EDITS):
        offs = start + tl.arange(0, EDITS)
        mask = offs < num_words
        end = tl.load(ends_ptr + offs, mask=mask, other=0)
        begin = tl.load(ends_ptr + offs - 1, mask=mask & (offs > 0), other=0)
        is_hidden = mask
        for age in range(0, num_recent):
            place = end - 2 - age
            is_head = mask & (place >= begin)
            token = tl.load(tokens_ptr + place, mask=is_head, other=0)
            is_hidden = is_hidden & ((token == tl.load(recent_ptr + age)) | (place < begin))
        last = tl.load(tokens_ptr + end - 1, mask=is_hidden, other=0)
        x = tl.load(logits_ptr + last, mask=is_hidden, other=float("-inf"))
        marks |= _marks_of(x, is_hidden)
        tl.store(logits_ptr + last, float("-inf"), mask=is_hidden)
    return marks


# Tables grow with what requests bring: a step must not wait for the compiler then.
@triton.jit(do_not_specialize=["max_edits", "max_words", "max_word_tokens", "num_recent"])
def logit_bias_kernel(
    logits_ptr,  # [N, V], changed
    stride_n,
    idx_mapping_ptr,  # [N]
    positions_ptr,  # [N]
    slot_ptr,  # [R]
    has_allowed_ptr,  # [S]
    allowed_ptr,  # [S, num_mask_words]
    num_edits_ptr,  # [S]
    edit_ids_ptr,  # [S, max_edits], as the next two
    edit_bias_ptr,
    edit_is_stop_ptr,
    min_tokens_ptr,  # [S]
    num_words_ptr,  # [S]
    word_ends_ptr,  # [S, max_words]
    word_tokens_ptr,  # [S, max_word_tokens]
    recent_ptr,  # [S, num_recent]
    marks_ptr,  # [N] out
    vocab_size,
    num_mask_words,
    max_edits,
    max_words,
    max_word_tokens,
    num_recent,
    BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    slot = tl.load(slot_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    marks = tl.zeros((), tl.int32)
    if slot >= 0:
        row_ptr = logits_ptr + n * stride_n
        if tl.load(has_allowed_ptr + slot) != 0:
            marks |= _forbid_others(row_ptr, allowed_ptr + slot * num_mask_words, vocab_size, BLOCK)
        tl.debug_barrier()
        is_too_short = tl.load(positions_ptr + n) < tl.load(min_tokens_ptr + slot)
        marks |= _edit(
            row_ptr,
            edit_ids_ptr + slot * max_edits,
            edit_bias_ptr + slot * max_edits,
            edit_is_stop_ptr + slot * max_edits,
            tl.load(num_edits_ptr + slot),
            is_too_short.to(tl.int32),
            EDITS,
        )
        tl.debug_barrier()
        marks |= _ban(
            row_ptr,
            word_ends_ptr + slot * max_words,
            word_tokens_ptr + slot * max_word_tokens,
            recent_ptr + slot * num_recent,
            tl.load(num_words_ptr + slot),
            num_recent,
            EDITS,
        )
    tl.store(marks_ptr + n, marks)


@triton.jit(do_not_specialize=["num_recent"], do_not_specialize_on_alignment=["flaws_ptr"])
def record_kernel(
    tokens_ptr,  # [N]
    flaws_ptr,  # [N]
    idx_mapping_ptr,  # [N]
    slot_ptr,  # [R]
    recent_ptr,  # [S, num_recent], changed
    num_recent,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    slot = tl.load(slot_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    if slot >= 0:
        if tl.load(flaws_ptr + n) == 0:
            offs = tl.arange(0, BLOCK)
            ptrs = recent_ptr + slot * num_recent + offs
            older = tl.load(ptrs - 1, mask=(offs > 0) & (offs < num_recent), other=-1)
            tl.debug_barrier()
            newest = tl.load(tokens_ptr + n).to(tl.int32)
            tl.store(ptrs, tl.where(offs == 0, newest, older), mask=offs < num_recent)
