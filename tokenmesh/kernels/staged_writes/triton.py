"""staged_writes on a GPU: a program a write, however long it is."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED

BLOCK: Final = 1024
NUM_WARPS: Final = 4


def staged_writes(
    flat: torch.Tensor, destinations: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    if len(destinations):
        staged_writes_kernel[(len(destinations),)](
            flat,
            destinations,
            starts,
            values,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **FUSED,
        )


# These three lie anywhere in one packed buffer: their alignment must not cause a new compilation.
@triton.jit(do_not_specialize_on_alignment=["destinations_ptr", "starts_ptr", "values_ptr"])
def staged_writes_kernel(
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
