"""rms_norm on a GPU: one program a row, the whole row in registers, sums in float32."""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F] with weight [F], or x [T, N, F] with weight [F] or [N, F]; see the package."""
    by_head = x if x.dim() == 3 else x.flatten(0, -2).unsqueeze(1)
    tokens, heads, features = by_head.shape
    out = torch.empty(by_head.shape, dtype=x.dtype, device=x.device)
    assert_aligned_rows(by_head)
    if out.numel():
        stride_w = weight.stride(0) if weight.dim() == 2 else 0
        rms_norm_kernel[(tokens, heads)](
            by_head,
            weight,
            out,
            by_head.stride(0),
            by_head.stride(1),
            stride_w,
            eps,
            FEATURES=features,
            **tile_of(features),
            **FUSED,
        )
    return out.view(x.shape)


def add_rms_norm(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, alpha: float
) -> torch.Tensor:
    """hidden, x [T, F], weight [F]; hidden changes in place; see the package."""
    tokens, features = hidden.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert_aligned_rows(hidden, x)
    if out.numel():
        add_rms_norm_kernel[(tokens,)](
            hidden,
            x,
            weight,
            out,
            hidden.stride(0),
            x.stride(0),
            eps,
            alpha,
            FEATURES=features,
            **tile_of(features),
            **FUSED,
        )
    return out


def tile_of(features: int) -> dict[str, int]:
    """The tile depends on nothing but the row, so a row's result does not depend on the batch."""
    block = triton.next_power_of_2(features)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _normalize(x, offs, mask, weight_ptr, eps, FEATURES: tl.constexpr):
    """x [BLOCK] float32, zero past FEATURES -> normalized, scaled."""
    scale = tl.math.rsqrt(tl.sum(x * x, axis=0) / FEATURES + eps)
    return x * scale * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, N, FEATURES]
    weight_ptr,  # [FEATURES] or [N, FEATURES]
    out_ptr,  # [T, N, FEATURES] contiguous
    stride_x,
    stride_head,
    stride_w,
    eps,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < FEATURES
    x = tl.load(x_ptr + token * stride_x + head * stride_head + offs, mask=mask, other=0.0)
    y = _normalize(x.to(tl.float32), offs, mask, weight_ptr + head * stride_w, eps, FEATURES)
    row = token * tl.num_programs(1) + head
    tl.store(out_ptr + row * FEATURES + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr,  # [T, FEATURES], read and written
    x_ptr,  # [T, FEATURES]
    weight_ptr,  # [FEATURES]
    out_ptr,  # [T, FEATURES] contiguous
    stride_h,
    stride_x,
    eps,
    alpha,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < FEATURES
    h_ptrs = hidden_ptr + token * stride_h + offs
    h = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    # The norm reads what the next layer will read: the sum as it is stored.
    total = (h + x * alpha).to(hidden_ptr.dtype.element_ty)
    tl.store(h_ptrs, total, mask=mask)
    y = _normalize(total.to(tl.float32), offs, mask, weight_ptr, eps, FEATURES)
    tl.store(out_ptr + token * FEATURES + offs, y.to(out_ptr.dtype.element_ty), mask=mask)
