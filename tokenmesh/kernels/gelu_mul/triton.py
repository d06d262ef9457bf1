"""gelu_mul on a GPU: silu_mul's launch with another activation."""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.gelu_mul.reference import Approximate
from tokenmesh.kernels.silu_mul.triton import (
    launch_gated,
    load_gate_up,
)


def gelu_mul(gate_up: torch.Tensor, approximate: Approximate) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F], a new tensor; see the package."""
    return launch_gated(gelu_mul_kernel, gate_up, IS_TANH=approximate == "tanh")


@triton.jit
def gelu_mul_kernel(
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
