"""Cases of staged_writes: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.staged_writes import staged_writes_reference
from tokenmesh.kernels.staged_writes.triton import (
    BLOCK,
    NUM_WARPS,
    staged_writes,
    staged_writes_kernel,
)


def cases() -> list[KernelCase]:
    """Writes of nothing, of one number, of more than a tile, side by side; no writes at all."""
    lengths = [1, 0, BLOCK + 77, 3, 0]
    return [
        _case("ragged", [9, 500, 10, 5, 0], lengths, total=BLOCK + 200),
        _case("none", [], [], total=10),
    ]


def _case(name: str, destinations: list[int], lengths: list[int], total: int) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        values = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        flat = torch.empty(total, dtype=torch.int32, device=device)
        return {
            "flat": flat.random_(0, 1 << 30, generator=generator),
            "destinations": torch.tensor(destinations, dtype=torch.int64, device=device),
            "starts": starts.to(device, torch.int32),
            "values": values.random_(0, 1 << 30, generator=generator),
        }

    def run(a: Inputs) -> Outputs:
        staged_writes(a["flat"], a["destinations"], a["starts"], a["values"])
        return {"flat": a["flat"]}

    def reference(a: Inputs) -> Outputs:
        staged_writes_reference(a["flat"], a["destinations"], a["starts"], a["values"])
        return {"flat": a["flat"]}

    return KernelCase(name, make, run, reference, EXACT)


def compilations() -> list[Compilation]:
    """There is only one."""
    return [
        Compilation(
            name="int32",
            kernel=staged_writes_kernel,
            signature={
                "flat_ptr": "*i32",
                "destinations_ptr": "*i64",
                "starts_ptr": "*i32",
                "values_ptr": "*i32",
            },
            constants={"BLOCK": BLOCK},
            divisible_by_16=("flat_ptr",),
            num_warps=NUM_WARPS,
            limits=CompileLimits(max_registers=48),
        )
    ]
