"""Cases of silu_mul: inputs, and kernels to compile ahead of time."""

from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Make, normal
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.silu_mul import TOLERANCE, silu_mul_reference
from tokenmesh.kernels.silu_mul.triton import (
    BLOCK,
    NUM_WARPS,
    silu_mul,
    silu_mul_kernel,
)


def cases() -> list[KernelCase]:
    """Less than a tile, several tiles with a tail, nothing."""
    return [
        KernelCase(
            name=f"{tokens}x{features}",
            make=gate_up_of(tokens, features),
            run=lambda a: {"out": silu_mul(a["gate_up"])},
            reference=lambda a: {"out": silu_mul_reference(a["gate_up"])},
            tolerance=TOLERANCE,
        )
        for tokens, features in SHAPES
    ]


def compilations() -> list[Compilation]:
    """bfloat16 rows."""
    return [gated_compilation("bf16", silu_mul_kernel)]


SHAPES: Final = ((3, 1), (2, 2 * BLOCK + 37), (0, 16))


def gate_up_of(tokens: int, features: int) -> Make:
    """Inputs in padded rows, large enough to saturate the activation."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = 4 * normal((tokens, padded(2 * features + 1)), dtype, device, generator)
        return {"gate_up": wide[:, : 2 * features]}

    return make


def gated_compilation(name: str, kernel: Any, **constants: bool) -> Compilation:
    """A kernel of `launch_gated`, as it is launched for a real model."""
    return Compilation(
        name=name,
        kernel=kernel,
        signature={"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32", "features": "i32"},
        constants={"BLOCK": BLOCK, **constants},
        divisible_by_16=("gate_up_ptr", "out_ptr", "stride", "features"),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=48),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )
