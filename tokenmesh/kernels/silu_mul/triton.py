"""silu_mul on a GPU: a program takes a stretch of one row; the sigmoid is computed in float32."""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED

BLOCK: Final = 1024
NUM_WARPS: Final = 4


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F], a new tensor; see the package."""
    return launch_gated(silu_mul_kernel, gate_up)


def launch_gated(kernel: Any, gate_up: torch.Tensor, **constants: bool) -> torch.Tensor:
    """Launch a kernel of the arguments below over gate_up [T, 2F]; returns [T, F]."""
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, features), dtype=gate_up.dtype, device=gate_up.device)
    assert_aligned_rows(gate_up)
    if out.numel():
        kernel[(tokens, triton.cdiv(features, BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            features,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **constants,
            **FUSED,
        )
    return out


@triton.jit
def load_gate_up(gate_up_ptr, stride, features, BLOCK: tl.constexpr):
    """This program's stretch of both halves in float32, its offsets in the row and their mask."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < features
    gate_ptrs = gate_up_ptr + token * stride + offs
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + features, mask=mask, other=0.0).to(tl.float32)
    return gate, up, token * features + offs, mask


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 * features]
    out_ptr,  # [T, features] contiguous
    stride,
    features,
    BLOCK: tl.constexpr,
):
    gate, up, offs, mask = load_gate_up(gate_up_ptr, stride, features, BLOCK)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)
