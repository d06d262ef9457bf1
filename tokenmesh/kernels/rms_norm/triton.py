"""rms_norm on a GPU: one program a row, the whole row in registers, sums in float32."""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows, padded
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.rms_norm import TOLERANCE, add_rms_norm_reference, rms_norm_reference
from tokenmesh.kernels.specimen import (
    Compilation,
    Inputs,
    KernelCase,
    Limits,
    Make,
    Outputs,
    normal,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., F] with weight [F], or x [T, N, F] with weight [F] or [N, F]; see the package."""
    by_head = x if x.dim() == 3 else x.flatten(0, -2).unsqueeze(1)
    tokens, heads, features = by_head.shape
    out = torch.empty(by_head.shape, dtype=x.dtype, device=x.device)
    assert_aligned_rows(by_head)
    if out.numel():
        stride_w = weight.stride(0) if weight.dim() == 2 else 0
        _rms_norm_kernel[(tokens, heads)](
            by_head,
            weight,
            out,
            by_head.stride(0),
            by_head.stride(1),
            stride_w,
            eps,
            FEATURES=features,
            **_tile(features),
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
        _add_rms_norm_kernel[(tokens,)](
            hidden,
            x,
            weight,
            out,
            hidden.stride(0),
            x.stride(0),
            eps,
            alpha,
            FEATURES=features,
            **_tile(features),
            **FUSED,
        )
    return out


def _tile(features: int) -> dict[str, int]:
    """The tile depends on nothing but the row, so a row's result does not depend on the batch."""
    block = triton.next_power_of_2(features)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _normalize(x, offs, mask, weight_ptr, eps, FEATURES: tl.constexpr):
    """x [BLOCK] float32, zero past FEATURES -> normalized, scaled."""
    scale = tl.math.rsqrt(tl.sum(x * x, axis=0) / FEATURES + eps)
    return x * scale * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
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
def _add_rms_norm_kernel(
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


def specimens() -> list[KernelCase]:
    """Rows of one feature to several warps, padded rows, heads inside a wider buffer, nothing."""
    return [
        *(_plain(*shape) for shape in [(3, 1), (2, 33), (1, 896), (0, 64)]),
        *(_by_head(has_rows) for has_rows in (False, True)),
        *(_added(*shape) for shape in [(3, 40, 1.0), (2, 896, 0.22)]),
    ]


def _plain(tokens: int, features: int) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((tokens, padded(features + 1)), dtype, device, generator)
        weight = normal((features,), torch.float32, device, generator)
        return {"x": wide[:, :features], "weight": weight}

    return _norm_specimen(f"{tokens}x{features}", make)


def _by_head(has_rows: bool) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((3, 7, 16), dtype, device, generator)
        shape = (5, 16) if has_rows else (16,)
        weight = normal(shape, torch.float32, device, generator)
        return {"x": wide[:, 1:6], "weight": weight}

    return _norm_specimen(f"heads-weight-{'each' if has_rows else 'shared'}", make)


def _norm_specimen(name: str, make: Make) -> KernelCase:
    return KernelCase(
        name=name,
        make=make,
        run=lambda a: {"out": rms_norm(a["x"], a["weight"], 1e-5)},
        reference=lambda a: {"out": rms_norm_reference(a["x"], a["weight"], 1e-5)},
        tolerance=TOLERANCE,
    )


def _added(tokens: int, features: int, alpha: float) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((tokens, padded(features + 1)), dtype, device, generator)
        return {
            "hidden": wide[:, :features],
            "x": normal((tokens, padded(features)), dtype, device, generator)[:, :features],
            "weight": normal((features,), torch.float32, device, generator),
        }

    def run(a: Inputs) -> Outputs:
        out = add_rms_norm(a["hidden"], a["x"], a["weight"], 1e-6, alpha)
        return {"out": out, "hidden": a["hidden"]}

    def reference(a: Inputs) -> Outputs:
        hidden, out = add_rms_norm_reference(a["hidden"], a["x"], a["weight"], 1e-6, alpha)
        return {"out": out, "hidden": hidden}

    return KernelCase(f"add-{tokens}x{features}", make, run, reference, TOLERANCE)


def compilations() -> list[Compilation]:
    """Hidden sizes of a small and a large model."""
    return [_compilation(features) for features in (1024, 8192)] + [_add_compilation(4096)]


def _compilation(features: int) -> Compilation:
    tile = _tile(features)
    return Compilation(
        name=f"plain-{features}",
        kernel=_rms_norm_kernel,
        signature={
            "x_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "out_ptr": "*bf16",
            "stride_x": "i32",
            "stride_head": "i32",
            "stride_w": "i32",
            "eps": "fp32",
        },
        constants={"FEATURES": features, "BLOCK": tile["BLOCK"]},
        divisible_by_16=("x_ptr", "weight_ptr", "out_ptr", "stride_x", "stride_head", "stride_w"),
        num_warps=tile["num_warps"],
        limits=Limits(max_registers=64, max_shared_bytes=64),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )


def _add_compilation(features: int) -> Compilation:
    tile = _tile(features)
    return Compilation(
        name=f"add-{features}",
        kernel=_add_rms_norm_kernel,
        signature={
            "hidden_ptr": "*bf16",
            "x_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "out_ptr": "*bf16",
            "stride_h": "i32",
            "stride_x": "i32",
            "eps": "fp32",
            "alpha": "fp32",
        },
        constants={"FEATURES": features, "BLOCK": tile["BLOCK"]},
        divisible_by_16=("hidden_ptr", "x_ptr", "weight_ptr", "out_ptr", "stride_h", "stride_x"),
        num_warps=tile["num_warps"],
        limits=Limits(max_registers=64, max_shared_bytes=64),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )
