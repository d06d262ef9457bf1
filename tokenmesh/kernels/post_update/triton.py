"""post_update on a GPU: all rows as one vector, a few programs for the largest batches."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.step_inputs.row_state import RowState

BLOCK: Final = 128
NUM_WARPS: Final = 4


def post_update(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    draws: torch.Tensor,
    sampled: torch.Tensor,
    state: RowState,
) -> None:
    """See the package; nothing here reads a tensor back."""
    assert_aligned_rows(state.token_ids)
    if len(rows):
        post_update_kernel[(triton.cdiv(len(rows), BLOCK),)](
            rows,
            query_starts,
            draws,
            sampled,
            state.token_ids,
            state.num_computed,
            len(rows),
            state.token_ids.shape[1],
            state.token_ids.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def post_update_kernel(
    rows_ptr,  # [B] int32
    query_starts_ptr,  # [B + 1] int32
    draws_ptr,  # [B] int32
    sampled_ptr,  # [N] int64
    token_ids_ptr,  # [R, max_tokens] int32
    num_computed_ptr,  # [R] int32
    num_rows,
    max_tokens,
    stride_token_ids,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = index < num_rows
    row = tl.load(rows_ptr + index, mask=in_batch, other=-1).to(tl.int64)
    is_row = row >= 0
    begin = tl.load(query_starts_ptr + index, mask=in_batch, other=0)
    end = tl.load(query_starts_ptr + index + 1, mask=in_batch, other=0)
    computed = tl.load(num_computed_ptr + row, mask=is_row, other=0) + end - begin
    tl.store(num_computed_ptr + row, computed, mask=is_row)

    draw = tl.load(draws_ptr + index, mask=in_batch, other=-1)
    appends = is_row & (draw >= 0) & (computed < max_tokens)
    token_id = tl.load(sampled_ptr + draw, mask=appends, other=0).to(tl.int32)
    tl.store(token_ids_ptr + row * stride_token_ids + computed, token_id, mask=appends)
