"""Cases of gated_delta: rows around a chunk's size and its borders, sizes that fill no tile."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.kernels.gated_delta import TOLERANCE, gated_delta_reference
from tokenmesh.kernels.specimen import Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.state_rows.inputs import put_rows, rows_in, state_of


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one specimen."""

    name: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    key_heads: int = 1
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    has_channels: bool = False
    scale: float | None = None
    use_qk_l2norm: bool = True


CASES: Final = (
    Case("decode", (1, 1, 1), (5, 0, 64), key_heads=2, heads=4, value_dim=48),
    Case("decode-channels", (1, 3), (9, 0), key_heads=2, has_channels=True),
    Case("mixed", (63, 1, 66, 0), (0, 7, 30, 3), key_dim=24, value_dim=40),
    Case("borders", (64, 65, 10), (64, 0, 60), key_heads=2, key_dim=16, scale=1.0),
    Case("channels", (70, 2), (63, 0), key_heads=2, key_dim=48, has_channels=True),
    Case("not-normalized", (12,), (1,), key_dim=16, use_qk_l2norm=False, scale=0.1),
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
        reference=partial(_call, case, gated_delta_reference),
        tolerance=TOLERANCE,
    )


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    tokens, key_width = sum(case.lengths), case.key_heads * case.key_dim
    width = 2 * key_width + case.heads * case.value_dim
    wide = normal((tokens, width + 16), dtype, device, generator)
    gates = (tokens, case.heads, *([case.key_dim] if case.has_channels else []))
    drawn = torch.rand((tokens, case.heads), device=device, generator=generator)
    inputs: Inputs = {
        "q": wide[:, :key_width].view(tokens, case.key_heads, case.key_dim),
        "k": wide[:, key_width : 2 * key_width].view(tokens, case.key_heads, case.key_dim),
        "v": wide[:, 2 * key_width : width].view(tokens, case.heads, case.value_dim),
        "g": -2 * torch.rand(gates, device=device, generator=generator),
        "beta": (2 * drawn).to(dtype),
    }
    if not case.use_qk_l2norm:  # keys of about unit length, as without them states explode
        inputs["k"].mul_(case.key_dim**-0.5)
    put_rows(inputs, case.lengths, case.starts, device)
    shape = (case.heads, case.key_dim, case.value_dim)
    inputs["state"] = state_of(case.starts, shape, torch.float32, device, generator)
    return inputs


def _call(case: Case, op: Callable[..., Any], a: Inputs) -> Outputs:
    rows = rows_in(a, case.lengths)
    tensors = (a["q"], a["k"], a["v"], a["g"], a["beta"], a["state"])
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    out = op(*tensors, rows, scale, case.use_qk_l2norm)
    return {"out": out, "state": a["state"]}
