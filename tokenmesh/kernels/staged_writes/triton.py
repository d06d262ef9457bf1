"""staged_writes on a GPU: a program a write, however long it is."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.specimen import EXACT, Compilation, Inputs, KernelCase, Limits, Outputs
from tokenmesh.kernels.staged_writes import staged_writes_reference

BLOCK: Final = 1024
NUM_WARPS: Final = 4


def staged_writes(
    flat: torch.Tensor, destinations: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    """See the package."""
    if len(destinations):
        _staged_writes_kernel[(len(destinations),)](
            flat,
            destinations,
            starts,
            values,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **FUSED,
        )


# These three lie in one packed buffer, somewhere: that is no reason to compile again.
@triton.jit(do_not_specialize_on_alignment=["destinations_ptr", "starts_ptr", "values_ptr"])
def _staged_writes_kernel(
    flat_ptr,  # [total] int32
    destinations_ptr,  # [W] int64
    starts_ptr,  # [W + 1] int32
    values_ptr,  # [V] int32
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    destination = flat_ptr + tl.load(destinations_ptr + index)
    begin, end = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1)
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < end
        tl.store(destination + (offs - begin), tl.load(values_ptr + offs, mask=mask), mask=mask)


def specimens() -> list[KernelCase]:
    """Writes of nothing, of one number, of more than a tile, side by side; no writes at all."""
    lengths = [1, 0, BLOCK + 77, 3, 0]
    return [
        _specimen("ragged", [9, 500, 10, 5, 0], lengths, total=BLOCK + 200),
        _specimen("none", [], [], total=10),
    ]


def _specimen(name: str, destinations: list[int], lengths: list[int], total: int) -> KernelCase:
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
            kernel=_staged_writes_kernel,
            signature={
                "flat_ptr": "*i32",
                "destinations_ptr": "*i64",
                "starts_ptr": "*i32",
                "values_ptr": "*i32",
            },
            constants={"BLOCK": BLOCK},
            divisible_by_16=("flat_ptr",),
            num_warps=NUM_WARPS,
            limits=Limits(max_registers=48),
        )
    ]
