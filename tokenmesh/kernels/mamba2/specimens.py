"""Cases of mamba2: rows around a chunk's size and its borders, sizes that fill no tile."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.kernels.mamba2 import TOLERANCE, mamba2_reference
from tokenmesh.kernels.specimen import Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.state_rows.inputs import put_rows, rows_in, state_of


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one specimen."""

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


def specimens_of(op: Callable[..., torch.Tensor]) -> list[KernelCase]:
    """All cases, run by a launcher with the op's arguments."""
    return [specimen_of(op, case) for case in CASES]


def specimen_of(op: Callable[..., torch.Tensor], case: Case) -> KernelCase:
    """One case."""
    return KernelCase(
        name=case.name,
        make=partial(_make, case),
        run=partial(_call, case, op),
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
