"""Cases of post_update: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tests.kernels.cases.step_inputs import inputs_of, random_state, state_of
from tokenmesh.kernels.post_update import post_update_reference
from tokenmesh.kernels.post_update.triton import BLOCK, NUM_WARPS, post_update, post_update_kernel


def cases() -> list[KernelCase]:
    """Padding, rows that draw nothing, draws in another order, a full row; more than a tile."""
    mixed = [(3, 1, 2), (-1, 1, 0), (0, 40, -1), (4, 7, 0), (1, 0, -1), (2, 30, 1), (-1, 2, -1)]
    many = [(row, 1, BLOCK + 8 - row) for row in range(BLOCK + 9)]
    return [
        _case("mixed", mixed, num_rows=6, max_tokens=60),
        _case("many", many, num_rows=BLOCK + 9, max_tokens=45),
        _case("none", [], num_rows=2, max_tokens=5),
    ]


def _case(
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
            kernel=post_update_kernel,
            signature={
                **pointers,
                "num_rows": "i32",
                "max_tokens": "i32",
                "stride_token_ids": "i32",
            },
            constants={"BLOCK": BLOCK},
            divisible_by_16=(*pointers, "stride_token_ids"),
            num_warps=NUM_WARPS,
            limits=CompileLimits(max_registers=48),
        )
    ]
