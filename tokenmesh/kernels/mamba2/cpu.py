"""mamba2 on the CPU: rows of one token together, longer ones chunk by chunk.

Rows of one token run in C where the C kernels have been started.
"""

from typing import Final, NamedTuple

import torch

from tokenmesh.kernels.native import has_started, native_scan
from tokenmesh.kernels.native.states import fits
from tokenmesh.kernels.state_rows import SingleRows, StateRows

CHUNK: Final = 64
GATHERED_BYTES: Final = 1 << 18
"""Rows with smaller states are gathered; larger states are changed where they are, one by one."""


class ScanTokens(NamedTuple):
    """Inputs by token; shapes as in the package."""

    x: torch.Tensor
    dt: torch.Tensor
    """[T, H], before anything is done to it"""
    B: torch.Tensor
    C: torch.Tensor

    def at(self, place: slice | torch.Tensor) -> "ScanTokens":
        """Some of them, in float32."""
        return ScanTokens(*(each[place].float() for each in self))


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows.clear(state)
    single = rows.single
    if single is not None and has_started() and fits(state, x, B, C, z):
        at = (single.tokens, single.slots)
        native_scan(x, dt, A, B, C, state, *at, out, D, z, dt_bias, dt_limit)
        single = None
    if single is None and not rows.long:
        return out
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = torch.nn.functional.softplus(step).clamp_(*dt_limit)
    tokens, rate = ScanTokens(x, step, B, C), A.float()

    def put(place: slice | torch.Tensor, some: ScanTokens, value: torch.Tensor) -> None:
        if D is not None:
            value = torch.addcmul(value, some.x, D.float()[:, None])
        if z is not None:
            value = value * torch.nn.functional.silu(z[place].float())
        out[place] = value.to(out.dtype)

    if single is not None:
        some = tokens.at(single.tokens)
        put(single.tokens, some, _decode(some, rate, state, single))
    for row in rows.long:
        for place in row.chunks(CHUNK):
            some = tokens.at(place)
            put(place, some, _chunk(some, rate, state[row.slot]))
    return out


def _decode(
    tokens: ScanTokens, rate: torch.Tensor, state: torch.Tensor, rows: SingleRows
) -> torch.Tensor:
    """One token of each row -> [R, H, P]."""
    if state[:1].nbytes < GATHERED_BYTES:
        held = state[rows.slots]
        out = _step(tokens, rate, held)
        state[rows.slots] = held
        return out
    steps = [
        _step(tokens.at(slice(number, number + 1)), rate, state[row.slot : row.slot + 1])
        for number, row in enumerate(rows.spans)
    ]
    return torch.cat(steps)


def _step(tokens: ScanTokens, rate: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """held [R, H, P, N] is changed. The heads of a group share B and C."""
    x, dt, gain, read = tokens
    count, groups, size = gain.shape
    grouped = held.view(count, groups, -1, size)
    entered = (x * dt[..., None]).view(count, groups, -1, 1)
    added = (entered * gain[:, :, None]).view_as(held)
    torch.addcmul(added, held, (dt * rate).exp()[..., None, None], out=held)
    return (grouped @ read[..., None]).view_as(x)


def _chunk(tokens: ScanTokens, rate: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The outputs [n, H, P] of a row's next n tokens; held [H, P, N] is changed."""
    x, dt, gain, read = tokens
    count, heads, dim = x.shape
    groups, size = gain.shape[1:]
    # Differences of long sums: in float32 they would lose the short ones.
    fallen = (dt * rate).double().cumsum(0)
    by_head = fallen.t()
    between = (by_head[:, :, None] - by_head[:, None]).float().tril_().exp_().tril_()
    gain, read = gain.transpose(0, 1), read.transpose(0, 1)
    weights = between.view(groups, -1, count, count) * (read @ gain.mT)[:, None]
    entered = x * dt[..., None]
    met = weights.view(heads, count, count) @ entered.transpose(0, 1)

    grouped = held.view(groups, -1, size)
    seen = (read @ grouped.mT).transpose(0, 1).reshape(count, heads, dim)
    left = entered * (fallen[-1] - fallen).float().exp()[..., None]
    left = left.view(count, groups, -1).permute(1, 2, 0)
    decayed = held * fallen[-1].float().exp()[:, None, None]
    torch.baddbmm(decayed.view_as(grouped), left, gain, out=grouped)
    return torch.addcmul(met.transpose(0, 1), seen, fallen.float().exp()[..., None])
