"""step_inputs on a GPU: a program a row of the batch, and one for the padded tail."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.specimen import EXACT, Compilation, Inputs, KernelCase, Limits, Outputs
from tokenmesh.kernels.step_inputs import RowState, StepTensors, step_inputs_reference

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
    _step_inputs_kernel[(len(rows) + 1,)](
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
def _step_inputs_kernel(
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


def specimens() -> list[KernelCase]:
    """Decode with padding, chunks that cross pages and tiles, nothing but padding."""
    return [
        _specimen("decode-padded", [(5, 1), (0, 1), (-1, 1), (-1, 0)], num_tokens=7),
        _specimen("mixed", [(3, 1), (1, 0), (4, 17), (2, BLOCK + 5)], num_tokens=BLOCK + 40),
        _specimen("only-padding", [(-1, 0), (-1, 0)], num_tokens=3),
        _specimen("page-of-one", [(2, 3), (0, 9)], num_tokens=12, page_size=1),
    ]


def _specimen(
    name: str, batch: list[tuple[int, int]], num_tokens: int, page_size: int = 16
) -> KernelCase:
    """batch: (row, tokens)."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        queries = torch.tensor([tokens for _, tokens in batch])
        starts = torch.cat([torch.zeros(1), queries.cumsum(0)])
        state = random_state(6, BLOCK + 60, BLOCK + 60, device, generator)
        out = StepTensors.zeros(num_tokens, len(batch), BLOCK + 60, device)
        for tensor in (out.token_ids, out.positions, out.lengths, out.slots, out.tables):
            tensor.fill_(-7)
        return {
            "rows": torch.tensor([row for row, _ in batch], dtype=torch.int32, device=device),
            "query_starts": starts.to(device, torch.int32),
            **inputs_of(state),
            **{f"out_{field}": getattr(out, field) for field in StepTensors.__slots__},
        }

    def run(a: Inputs) -> Outputs:
        out = _step_tensors(a)
        step_inputs(a["rows"], a["query_starts"], state_of(a), page_size, out)
        return _outputs(a)

    def reference(a: Inputs) -> Outputs:
        out = _step_tensors(a)
        step_inputs_reference(a["rows"], a["query_starts"], state_of(a), page_size, out)
        return _outputs(a)

    return KernelCase(name, make, run, reference, EXACT)


def random_state(
    num_rows: int,
    max_tokens: int,
    max_blocks: int,
    device: torch.device,
    generator: torch.Generator,
) -> RowState:
    """Rows with random tokens and blocks, some of them computed."""
    state = RowState.zeros(num_rows, max_tokens, max_blocks, device)
    for table, least, end in (
        (state.token_ids, 0, 152_000),
        (state.tables, 1, 1 << 27),
        (state.num_computed, 0, 50),
        (state.min_length, 1, 70),
    ):
        table.random_(least, end, generator=generator)
    return state


def inputs_of(state: RowState) -> Inputs:
    """A state as inputs of a specimen."""
    return {field: getattr(state, field) for field in RowState.__slots__}


def state_of(a: Inputs) -> RowState:
    """The state in the inputs of a specimen."""
    return RowState(**{field: a[field] for field in RowState.__slots__})


def _step_tensors(a: Inputs) -> StepTensors:
    return StepTensors(**{field: a[f"out_{field}"] for field in StepTensors.__slots__})


def _outputs(a: Inputs) -> Outputs:
    return {key: value for key, value in a.items() if key.startswith("out_")}


def compilations() -> list[Compilation]:
    """Pages of 16 slots."""
    inputs = ("rows", "query_starts", "state_token_ids", "state_tables", "num_computed")
    pointers = {f"{name}_ptr": "*i32" for name in (*inputs, "min_length", "seq_lens", "tables")}
    wide = ("token_ids", "positions", "lengths", "slots")
    pointers |= {f"{name}_ptr": "*i64" for name in wide}
    strides = ("stride_token_ids", "stride_state_tables", "stride_tables")
    return [
        Compilation(
            name="page-16",
            kernel=_step_inputs_kernel,
            signature={
                **pointers,
                **dict.fromkeys(("num_rows", "num_tokens", *strides), "i32"),
            },
            constants={"PAGE": 16, "BLOCK": BLOCK},
            divisible_by_16=(*pointers, *strides),
            num_warps=NUM_WARPS,
            limits=Limits(max_registers=96, max_shared_bytes=4096),
        )
    ]
