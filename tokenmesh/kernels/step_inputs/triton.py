"""step_inputs on a GPU: a program a row of the batch, and one for the padded tail."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.step_inputs.row_state import RowState
from tokenmesh.kernels.step_inputs.step_tensors import StepTensors

BLOCK: Final = 1024
NUM_WARPS: Final = 4


def step_inputs(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    state: RowState,
    page_size: int,
    out: StepTensors,
) -> None:
    """See the package; nothing here reads a tensor back."""
    assert_aligned_rows(state.token_ids, state.tables, out.tables)
    step_inputs_kernel[(len(rows) + 1,)](
        rows,
        query_starts,
        state.token_ids,
        state.tables,
        state.num_computed,
        state.min_length,
        out.token_ids,
        out.positions,
        out.lengths,
        out.slots,
        out.seq_lens,
        out.tables,
        len(rows),
        len(out.token_ids),
        state.token_ids.stride(0),
        state.tables.stride(0),
        out.tables.stride(0),
        PAGE=page_size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **FUSED,
    )


@triton.jit
def _zero_tail(ptr, begin, end, BLOCK: tl.constexpr):
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(ptr + offs, tl.zeros([BLOCK], tl.int64), mask=offs < end)


# These change from step to step; a value of 1 or a multiple of 16 is not worth a compilation.
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def step_inputs_kernel(
    rows_ptr,  # [B] int32
    query_starts_ptr,  # [B + 1] int32
    state_token_ids_ptr,  # [R, L] int32
    state_tables_ptr,  # [R, C] int32
    num_computed_ptr,  # [R] int32
    min_length_ptr,  # [R] int32
    token_ids_ptr,  # [T] int64, as the next three
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    seq_lens_ptr,  # [B] int32
    tables_ptr,  # [B, C] int32
    num_rows,
    num_tokens,
    stride_token_ids,
    stride_state_tables,
    stride_tables,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_starts_ptr + index)
    if index == num_rows:
        _zero_tail(token_ids_ptr, begin, num_tokens, BLOCK)
        _zero_tail(positions_ptr, begin, num_tokens, BLOCK)
        _zero_tail(lengths_ptr, begin, num_tokens, BLOCK)
        _zero_tail(slots_ptr, begin, num_tokens, BLOCK)
        return
    end = tl.load(query_starts_ptr + index + 1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_row = row >= 0
    first = tl.load(num_computed_ptr + row, mask=is_row, other=0)
    min_length = tl.load(min_length_ptr + row, mask=is_row, other=0)
    row_tokens = state_token_ids_ptr + row * stride_token_ids
    row_table = state_tables_ptr + row * stride_state_tables
    known_end = tl.where(is_row, end, begin)

    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < end
        known = offs < known_end
        at = first + offs - begin
        token_id = tl.load(row_tokens + at, mask=known, other=0)
        block = tl.load(row_table + at // PAGE, mask=known, other=0).to(tl.int64)
        tl.store(token_ids_ptr + offs, token_id.to(tl.int64), mask=mask)
        tl.store(positions_ptr + offs, tl.where(known, at, 0).to(tl.int64), mask=mask)
        length = tl.where(known, tl.maximum(min_length, at + 1), 0)
        tl.store(lengths_ptr + offs, length.to(tl.int64), mask=mask)
        slot = tl.where(known, block * PAGE + at % PAGE, 0)
        tl.store(slots_ptr + offs, slot, mask=mask)

    seq_len = tl.where(is_row, first + end - begin, 0)
    tl.store(seq_lens_ptr + index, seq_len)
    columns = tl.cdiv(seq_len, PAGE)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < columns
        block = tl.load(row_table + offs, mask=mask, other=0)
        tl.store(tables_ptr + index * stride_tables + offs, block, mask=mask)
