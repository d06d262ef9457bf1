"""Cases of rms_norm: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import (
    Compilation,
    CompileLimits,
    Inputs,
    KernelCase,
    Make,
    Outputs,
    normal,
)
from tokenmesh.kernels.alignment import padded
from tokenmesh.kernels.rms_norm import TOLERANCE, add_rms_norm_reference, rms_norm_reference
from tokenmesh.kernels.rms_norm.triton import (
    add_rms_norm,
    add_rms_norm_kernel,
    rms_norm,
    rms_norm_kernel,
    tile_of,
)


def cases() -> list[KernelCase]:
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

    return _norm_case(f"{tokens}x{features}", make)


def _by_head(has_rows: bool) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = normal((3, 7, 16), dtype, device, generator)
        shape = (5, 16) if has_rows else (16,)
        weight = normal(shape, torch.float32, device, generator)
        return {"x": wide[:, 1:6], "weight": weight}

    return _norm_case(f"heads-weight-{'each' if has_rows else 'shared'}", make)


def _norm_case(name: str, make: Make) -> KernelCase:
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
    tile = tile_of(features)
    return Compilation(
        name=f"plain-{features}",
        kernel=rms_norm_kernel,
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
        limits=CompileLimits(max_registers=64, max_shared_bytes=64),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )


def _add_compilation(features: int) -> Compilation:
    tile = tile_of(features)
    return Compilation(
        name=f"add-{features}",
        kernel=add_rms_norm_kernel,
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
        limits=CompileLimits(max_registers=64, max_shared_bytes=64),
        required=(r"LDG\.E\.128", r"STG\.E\.128"),
    )
