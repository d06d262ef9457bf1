"""Cases of causal_conv: rows shorter and longer than a state and a tile, new ones and others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.kernels.causal_conv import TOLERANCE, causal_conv_reference
from tokenmesh.kernels.specimen import Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.kernels.state_rows.inputs import put_rows, rows_in, state_of


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one specimen."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    channels: int = 48
    width: int = 4
    kept: int = 4
    has_bias: bool = True
    activation: str | None = "silu"


CASES: Final = (
    Case("decode", lengths=(1, 1, 1), starts=(5, 0, 63), channels=272),
    Case("mixed", lengths=(3, 37, 1, 0, 16), starts=(15, 0, 2, 9, 33)),
    Case("least", lengths=(2, 5), starts=(0, 7), width=3, kept=2, has_bias=False, activation=None),
    Case("one-weight", lengths=(2,), starts=(1,), width=1, kept=0),
    Case("empty", lengths=(), starts=()),
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
        reference=partial(_call, case, causal_conv_reference),
        tolerance=TOLERANCE,
    )


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    wide = normal((sum(case.lengths), case.channels + 16), dtype, device, generator)
    inputs: Inputs = {
        "x": wide[:, : case.channels],
        "weight": normal((case.channels, case.width), dtype, device, generator),
        "bias": normal((case.channels,), dtype, device, generator) if case.has_bias else None,
    }
    put_rows(inputs, case.lengths, case.starts, device)
    shape = (case.channels, case.kept)
    inputs["state"] = state_of(case.starts, shape, dtype, device, generator)
    return inputs


def _call(case: Case, op: Callable[..., Any], a: Inputs) -> Outputs:
    rows: StateRows = rows_in(a, case.lengths)
    out = op(a["x"], a["weight"], a["bias"], a["state"], rows, case.activation)
    return {"out": out, "state": a["state"]}
