"""causal_conv on the CPU: rows of one token as a batch, the others in tiles that fit a cache."""

from typing import Final

import torch

from tokenmesh.kernels.state_rows import RowSpan, StateRows

TILE_ELEMENTS: Final = 1 << 16
"""Of a tile, which is read once for each weight of a channel."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: str | None,
) -> torch.Tensor:
    """See the package."""
    out = torch.empty(x.shape, dtype=x.dtype)
    spans = list(rows.spans())
    for row in spans:
        if row.start == 0:
            state[row.slot].zero_()  # and not read: whatever was there may be NaN
    single = [row for row in spans if row.last - row.first == 1]
    if single:
        tokens = torch.tensor([row.first for row in single])
        out[tokens] = _step(x[tokens], weight, bias, state, single, activation)
    if len(single) == len(spans):
        return out
    taps = weight.t().float().contiguous()
    for row in spans:
        if row.last - row.first > 1:
            _convolve(x[row.tokens], taps, bias, state[row.slot], activation, out[row.tokens])
    return out


def _step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: list[RowSpan],
    activation: str | None,
) -> torch.Tensor:
    """x [R, C], one token of each row -> [R, C]."""
    channels, width = weight.shape
    kept = torch.stack([state[row.slot] for row in rows])
    seen = torch.cat([kept, x.to(state.dtype)[..., None]], dim=2)
    for row, newest in zip(rows, seen[..., 1:], strict=True):
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
