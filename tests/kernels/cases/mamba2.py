"""Cases of mamba2: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tests.kernels.state_inputs import put_rows, rows_in, state_of
from tokenmesh.kernels.mamba2 import TOLERANCE, mamba2_reference
from tokenmesh.kernels.mamba2.triton import LAUNCH, mamba2, recurrent_kernel, scan_kernel, tile_of


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one case."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    heads: int = 2
    groups: int = 1
    dim: int = 16
    size: int = 16
    has_parts: bool = True
    """D, z, the bias and limits of time steps; otherwise none of them."""


CASES: Final = (
    Case("decode", (1, 1, 1), (5, 0, 64), heads=4, groups=2, dim=24),
    Case("plain", (1, 3), (9, 0), has_parts=False),
    Case("mixed", (63, 1, 66, 0), (0, 7, 30, 3), dim=40, size=48),
    Case("borders", (64, 65, 10), (64, 0, 60), groups=2, has_parts=False),
    Case("wide-state", (12,), (1,), dim=64, size=256),
    Case("empty", (), ()),
)


def cases() -> list[KernelCase]:
    """All cases, run by a launcher with the mamba2's arguments."""
    return [case_of(case) for case in CASES]


def case_of(case: Case) -> KernelCase:
    """One case."""
    return KernelCase(
        name=case.name,
        make=partial(_make, case),
        run=partial(_call, case, mamba2),
        reference=partial(_call, case, mamba2_reference),
        tolerance=TOLERANCE,
    )


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    tokens, width, groups = sum(case.lengths), case.heads * case.dim, case.groups * case.size
    wide = normal((tokens, width + 2 * groups + 16), dtype, device, generator)
    wide = wide * case.size**-0.25  # so that B and C meet in numbers of about 1
    make = partial(normal, dtype=torch.float32, device=device, generator=generator)
    inputs: Inputs = {
        "x": wide[:, :width].view(tokens, case.heads, case.dim),
        "B": wide[:, width : width + groups].view(tokens, case.groups, case.size),
        "C": wide[:, width + groups : width + 2 * groups].view(tokens, case.groups, case.size),
        "dt": normal((tokens, case.heads), dtype, device, generator),
        "A": -2 * torch.rand(case.heads, device=device, generator=generator),
        "D": make((case.heads,)) if case.has_parts else None,
        "z": normal((tokens, case.heads, case.dim), dtype, device, generator),
        "dt_bias": make((case.heads,)) if case.has_parts else None,
    }
    if not case.has_parts:
        inputs["z"] = None
    put_rows(inputs, case.lengths, case.starts, device)
    shape = (case.heads, case.dim, case.size)
    inputs["state"] = state_of(case.starts, shape, torch.float32, device, generator)
    return inputs


def _call(case: Case, op: Callable[..., Any], a: Inputs) -> Outputs:
    rows = rows_in(a, case.lengths)
    tensors = (a["x"], a["dt"], a["A"], a["B"], a["C"], a["state"])
    limit = (0.1, 1.5) if case.has_parts else (0.0, float("inf"))
    out = op(*tensors, rows, a["D"], a["z"], a["dt_bias"], limit)
    return {"out": out, "state": a["state"]}


def compilations() -> list[Compilation]:
    """Mamba 2 2.7B and, with states of 256 and gates, Falcon H1."""
    return [
        _compilation("recurrent", recurrent_kernel, 128, CompileLimits(96, 4 << 10)),
        _compilation("recurrent-256", recurrent_kernel, 256, CompileLimits(104, 4 << 10)),
        _compilation("scan", scan_kernel, 128, CompileLimits(255, 96 << 10), (r"HGMMA",)),
        _compilation("scan-256", scan_kernel, 256, CompileLimits(255, 96 << 10), (r"HMMA",)),
    ]


def _compilation(
    name: str, kernel: Any, size: int, limits: CompileLimits, required: tuple[str, ...] = ()
) -> Compilation:
    tokens = ("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "z_ptr", "out_ptr")
    weights = ("a_ptr", "d_ptr", "bias_ptr", "state_ptr")
    strides = ("stride_x", "stride_dt", "stride_b", "stride_c", "stride_z")
    has_z = size == 256
    return Compilation(
        name=name,
        kernel=kernel,
        signature={
            **dict.fromkeys(tokens, "*bf16"),
            **dict.fromkeys(weights, "*fp32"),
            "slots_ptr": "*i64",
            **dict.fromkeys(("cu_q_ptr", "starts_ptr"), "*i32"),
            **dict.fromkeys(strides, "i32"),
            **dict.fromkeys(("least", "most"), "fp32"),
        },
        constants={
            "GROUPS": 1,
            "HEADS": 80,
            "P": 64,
            "N": size,
            "HAS_D": True,
            "HAS_Z": has_z,
            "HAS_BIAS": True,
            **tile_of(64, size),
        },
        divisible_by_16=(
            *(*tokens, *weights, "slots_ptr", "cu_q_ptr", "starts_ptr"),
            *("stride_x", "stride_b", "stride_c", "stride_z"),
        ),
        limits=replace(limits, oldest_triton=(3, 9)),
        required=required,
        num_warps=LAUNCH["num_warps"],
        num_stages=LAUNCH["num_stages"],
    )
