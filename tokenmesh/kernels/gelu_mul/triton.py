"""gelu_mul on a GPU: silu_mul's launch with another activation."""

from functools import partial

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.gelu_mul import TOLERANCE, Approximate, gelu_mul_reference
from tokenmesh.kernels.silu_mul.triton import (
    SHAPES,
    gate_up_of,
    gated_compilation,
    launch_gated,
    load_gate_up,
)
from tokenmesh.kernels.specimen import Compilation, Inputs, KernelCase, Outputs


def gelu_mul(gate_up: torch.Tensor, approximate: Approximate) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F], a new tensor; see the package."""
    return launch_gated(_gelu_mul_kernel, gate_up, IS_TANH=approximate == "tanh")


@triton.jit
def _gelu_mul_kernel(
    gate_up_ptr,  # [T, 2 * features]
    out_ptr,  # [T, features] contiguous
    stride,
    features,
    IS_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    gate, up, offs, mask = load_gate_up(gate_up_ptr, stride, features, BLOCK)
    if IS_TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2u), with 2 * sqrt(2 / pi) = 1.59576912
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + offs, (gate * share * up).to(out_ptr.dtype.element_ty), mask=mask)


def specimens() -> list[KernelCase]:
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
        gated_compilation("none", _gelu_mul_kernel, IS_TANH=False),
        gated_compilation("tanh", _gelu_mul_kernel, IS_TANH=True),
    ]
