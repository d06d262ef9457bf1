"""Cases of step_inputs: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.step_inputs import RowState, StepTensors, step_inputs_reference
from tokenmesh.kernels.step_inputs.triton import (
    BLOCK,
    NUM_WARPS,
    step_inputs,
    step_inputs_kernel,
)


def cases() -> list[KernelCase]:
    """Decode with padding, chunks that cross pages and tiles, nothing but padding."""
    return [
        _case("decode-padded", [(5, 1), (0, 1), (-1, 1), (-1, 0)], num_tokens=7),
        _case("mixed", [(3, 1), (1, 0), (4, 17), (2, BLOCK + 5)], num_tokens=BLOCK + 40),
        _case("only-padding", [(-1, 0), (-1, 0)], num_tokens=3),
        _case("page-of-one", [(2, 3), (0, 9)], num_tokens=12, page_size=1),
    ]


def _case(
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
            kernel=step_inputs_kernel,
            signature={
                **pointers,
                **dict.fromkeys(("num_rows", "num_tokens", *strides), "i32"),
            },
            constants={"PAGE": 16, "BLOCK": BLOCK},
            divisible_by_16=(*pointers, *strides),
            num_warps=NUM_WARPS,
            limits=CompileLimits(max_registers=96, max_shared_bytes=4096),
        )
    ]


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
    """A state as inputs of a kernel case."""
    return {field: getattr(state, field) for field in RowState.__slots__}


def state_of(a: Inputs) -> RowState:
    """The state in the inputs of a kernel case."""
    return RowState(**{field: a[field] for field in RowState.__slots__})
