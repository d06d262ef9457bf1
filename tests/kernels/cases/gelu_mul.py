"""Cases of gelu_mul: inputs, and kernels to compile ahead of time."""

from functools import partial

from tests.kernels.case import Compilation, Inputs, KernelCase, Outputs
from tests.kernels.cases.silu_mul import (
    SHAPES,
    gate_up_of,
    gated_compilation,
)
from tokenmesh.kernels.gelu_mul import TOLERANCE, Approximate, gelu_mul_reference
from tokenmesh.kernels.gelu_mul.triton import gelu_mul, gelu_mul_kernel


def cases() -> list[KernelCase]:
    """silu_mul's shapes with both definitions."""
    variants: tuple[Approximate, ...] = ("none", "tanh")
    return [
        KernelCase(
            name=f"{variant}-{tokens}x{features}",
            make=gate_up_of(tokens, features),
            run=partial(_run, variant),
            reference=partial(_reference, variant),
            tolerance=TOLERANCE,
        )
        for variant in variants
        for tokens, features in SHAPES
    ]


def _run(approximate: Approximate, inputs: Inputs) -> Outputs:
    return {"out": gelu_mul(inputs["gate_up"], approximate)}


def _reference(approximate: Approximate, inputs: Inputs) -> Outputs:
    return {"out": gelu_mul_reference(inputs["gate_up"], approximate)}


def compilations() -> list[Compilation]:
    """Both definitions in bfloat16."""
    return [
        gated_compilation("none", gelu_mul_kernel, IS_TANH=False),
        gated_compilation("tanh", gelu_mul_kernel, IS_TANH=True),
    ]
