"""causal_conv on the CPU: rows of one token as a batch, the others in tiles that fit a cache.

Rows of one token run in C where the C kernels have been started.
"""

from typing import Final

import torch

from tokenmesh.kernels.native import has_started, native_conv
from tokenmesh.kernels.native.states import MAX_KEPT, fits
from tokenmesh.kernels.state_rows import SingleRows, StateRows

TILE_ELEMENTS: Final = 1 << 16
"""Size of a tile, which is read once for each weight of a channel."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: str | None,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows.clear(state)
    single = rows.single
    kept, width = state.shape[2], weight.shape[1]
    in_c = has_started() and 0 < kept <= MAX_KEPT and width <= MAX_KEPT
    if single is not None and in_c and fits(state, state, x, weight, bias):
        at = (single.tokens, single.slots)
        native_conv(x, weight, bias, state, *at, out, activation == "silu")
        single = None
    if single is not None:
        seen = x[single.tokens]
        out[single.tokens] = _step(seen, weight, bias, state, single, activation)
    if not rows.long:
        return out
    taps = weight.t().float().contiguous()
    for row in rows.long:
        _convolve(x[row.tokens], taps, bias, state[row.slot], activation, out[row.tokens])
    return out


def _step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: SingleRows,
    activation: str | None,
) -> torch.Tensor:
    """x [R, C], one token of each row -> [R, C]."""
    channels, width = weight.shape
    kept = torch.stack([state[row.slot] for row in rows.spans])
    seen = torch.cat([kept, x.to(state.dtype)[..., None]], dim=2)
    for row, newest in zip(rows.spans, seen[..., 1:], strict=True):
        state[row.slot] = newest
    window = seen[..., -width:].float()
    value = torch.nn.functional.conv1d(window, weight.float()[:, None], groups=channels)
    return _activated(value[..., 0], bias, activation).to(x.dtype)


def _convolve(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """x, out [n, C] of one row, taps [W, C], state [C, K]."""
    width, channels = taps.shape
    kept = state.shape[1]
    before = state.t().to(x.dtype)
    size = max(width, TILE_ELEMENTS // channels)
    for first in range(0, len(x), size):
        last = min(first + size, len(x))
        if first == 0:
            seen = torch.cat([before[kept - width + 1 :], x[:last]])
        else:
            seen = x[first - width + 1 : last]
        out[first:last] = _activated(_tile(seen.float(), taps), bias, activation)
    newest = torch.cat([before, x[max(0, len(x) - kept) :]])
    state.copy_(newest[len(newest) - kept :].t())


def _tile(seen: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """seen [W - 1 + n, C] float32 -> [n, C]."""
    count = len(seen) - len(taps) + 1
    value = seen[:count] * taps[0]
    for offset in range(1, len(taps)):
        value.addcmul_(seen[offset : offset + count], taps[offset])
    return value


def _activated(
    value: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Changes value, which is float32."""
    if bias is not None:
        value += bias
    return torch.nn.functional.silu(value, inplace=True) if activation == "silu" else value
