"""post_update on a GPU: all rows as one vector, a few programs for the largest batches."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.post_update import post_update_reference
from tokenmesh.kernels.specimen import EXACT, Compilation, Inputs, KernelCase, Limits, Outputs
from tokenmesh.kernels.step_inputs.row_state import RowState
from tokenmesh.kernels.step_inputs.triton import inputs_of, random_state, state_of

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
        _post_update_kernel[(triton.cdiv(len(rows), BLOCK),)](
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
def _post_update_kernel(
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


def specimens() -> list[KernelCase]:
    """Padding, rows that draw nothing, draws in another order, a full row; more than a tile."""
    mixed = [(3, 1, 2), (-1, 1, 0), (0, 40, -1), (4, 7, 0), (1, 0, -1), (2, 30, 1), (-1, 2, -1)]
    many = [(row, 1, BLOCK + 8 - row) for row in range(BLOCK + 9)]
    return [
        _specimen("mixed", mixed, num_rows=6, max_tokens=60),
        _specimen("many", many, num_rows=BLOCK + 9, max_tokens=45),
        _specimen("none", [], num_rows=2, max_tokens=5),
    ]


def _specimen(
    name: str, batch: list[tuple[int, int, int]], num_rows: int, max_tokens: int
) -> KernelCase:
    """batch: (row, tokens, draw). Random counts up to 50 leave some rows no room."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        starts = torch.tensor([0, *(tokens for _, tokens, _ in batch)]).cumsum(0)
        sampled = torch.empty(max([0, *(1 + draw for *_, draw in batch)]), dtype=torch.int64)
        return {
            "rows": torch.tensor([row for row, *_ in batch], dtype=torch.int32, device=device),
            "query_starts": starts.to(device, torch.int32),
            "draws": torch.tensor([draw for *_, draw in batch], dtype=torch.int32, device=device),
            "sampled": sampled.to(device).random_(0, 152_000, generator=generator),
            **inputs_of(random_state(num_rows, max_tokens, 4, device, generator)),
        }

    def run(a: Inputs) -> Outputs:
        post_update(a["rows"], a["query_starts"], a["draws"], a["sampled"], state_of(a))
        return {key: a[key] for key in ("token_ids", "num_computed")}

    def reference(a: Inputs) -> Outputs:
        state = state_of(a)
        post_update_reference(a["rows"], a["query_starts"], a["draws"], a["sampled"], state)
        return {key: a[key] for key in ("token_ids", "num_computed")}

    return KernelCase(name, make, run, reference, EXACT)


def compilations() -> list[Compilation]:
    """There is only one."""
    pointers = {
        "rows_ptr": "*i32",
        "query_starts_ptr": "*i32",
        "draws_ptr": "*i32",
        "sampled_ptr": "*i64",
        "token_ids_ptr": "*i32",
        "num_computed_ptr": "*i32",
    }
    return [
        Compilation(
            name="int32",
            kernel=_post_update_kernel,
            signature={
                **pointers,
                "num_rows": "i32",
                "max_tokens": "i32",
                "stride_token_ids": "i32",
            },
            constants={"BLOCK": BLOCK},
            divisible_by_16=(*pointers, "stride_token_ids"),
            num_warps=NUM_WARPS,
            limits=Limits(max_registers=48),
        )
    ]
