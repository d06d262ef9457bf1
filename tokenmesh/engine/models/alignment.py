"""Alignment: at which state of the encoder each token of a transcript begins.

Some heads of a decoder's cross attention follow the speech. Their weights over a whole transcript,
normalized and smoothed, give a path from its first to its last token by dynamic time warping. The
rules are those of transformers' `generate` with `return_token_timestamps`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import numpy.typing as npt
import torch

_DIAGONAL, _NEXT_TOKEN, _NEXT_STATE = 0, 1, 2
"""Steps of a path."""


@dataclass(slots=True)
class Alignment:
    """It follows the attention of one row, while its prompt is computed."""

    first: int
    """The first token of the transcript in the prompt."""
    num_states: int
    """States that are of the recording; the rest is padding."""
    filter_width: int
    """States over which weights are smoothed; odd."""
    _weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, layer: int, weights: torch.Tensor) -> None:
        """weights [heads, tokens, states] of the next tokens, of the heads in a layer."""
        self._weights.setdefault(layer, []).append(weights.float())

    def states(self) -> list[int]:
        """The state at which each token from `first` on begins."""
        layers = [torch.cat(parts, dim=1) for _, parts in sorted(self._weights.items())]
        whole = torch.cat(layers)[:, self.first :, : self.num_states]
        if not whole.shape[1]:
            return []
        std, mean = torch.std_mean(whole, dim=1, keepdim=True, correction=0)
        # states that no token attends to differently say nothing
        smooth = _median((whole - mean) / std.clamp(min=1e-9), self.filter_width)
        return first_states(-smooth.mean(0).double().numpy())


@dataclass(slots=True)
class RowAlignments:
    """The alignments of all rows at work; implements `Aligner`."""

    filter_width: int
    heads_by_layer: dict[int, list[int]]
    """The heads that follow the speech."""
    _by_row: dict[int, Alignment] = field(default_factory=dict)

    def begin(self, row: int, first: int, num_states: int) -> None:
        self._by_row[row] = Alignment(first, num_states, self.filter_width)

    def drop(self, row: int) -> None:
        self._by_row.pop(row, None)

    def take(self, row: int) -> list[int] | None:
        found = self._by_row.pop(row, None)
        return None if found is None else found.states()

    def add(self, row: int, layer: int, weights: torch.Tensor) -> None:
        """weights [heads, tokens, states] of a cross attention for a row's next tokens."""
        found, heads = self._by_row.get(row), self.heads_by_layer.get(layer)
        if found is not None and heads is not None:
            found.add(layer, weights[heads])


def read_heads(directory: Path, num_layers: int, num_heads: int) -> dict[int, list[int]]:
    """By layer, the heads that a checkpoint's generation_config.json names; empty: none."""
    try:
        config = json.loads((directory / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = config.get("alignment_heads") if isinstance(config, dict) else None
    found: dict[int, list[int]] = {}
    for pair in pairs if isinstance(pairs, list) else ():
        match pair:
            case [int(layer), int(head)] if 0 <= layer < num_layers and 0 <= head < num_heads:
                found.setdefault(layer, []).append(head)
            case _:
                return {}
    return found


def _median(values: torch.Tensor, width: int) -> torch.Tensor:
    """values [heads, tokens, states] -> the medians of `width` neighbours along the states."""
    side = width // 2
    if values.shape[-1] <= side:
        return values
    padded = torch.nn.functional.pad(values, (side, side), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., side]


def first_states(costs: npt.NDArray[numpy.float64]) -> list[int]:
    """costs [tokens, states] -> the first state of each token on the cheapest path.

    The path goes from the first token and state to the last ones. Where steps cost the same, the
    next state comes before the diagonal and the next token.
    """
    num_tokens, num_states = costs.shape
    steps = _steps(costs)
    found = [0] * num_tokens
    token, state = num_tokens, num_states
    while token > 0 and state > 0:
        found[token - 1] = state - 1
        step = int(steps[token, state])
        token -= step != _NEXT_STATE
        state -= step != _NEXT_TOKEN
    return found


def _steps(costs: npt.NDArray[numpy.float64]) -> npt.NDArray[numpy.int8]:
    """Return how the cheapest path comes to each place [1 + tokens, 1 + states].

    Computed by diagonals, whose places do not depend on each other: in a flat array they are
    `states` apart.
    """
    num_tokens, num_states = costs.shape
    width = num_states + 1
    total = numpy.full((num_tokens + 1) * width, numpy.inf, dtype=numpy.float32)
    total[0] = 0
    steps = numpy.full((num_tokens + 1) * width, _NEXT_STATE, dtype=numpy.int8)
    for diagonal in range(2, num_tokens + num_states + 1):
        top, bottom = max(1, diagonal - num_states), min(num_tokens, diagonal - 1)
        # place (token, state) is at token * width + state, with state = diagonal - token
        first, last = top * num_states + diagonal, bottom * num_states + diagonal
        here = slice(first, last + 1, num_states or 1)
        both = total[first - width - 1 : last - width : num_states]
        above = total[first - width : last - width + 1 : num_states]
        before = total[first - 1 : last : num_states]
        is_both = (both < above) & (both < before)
        is_above = ~is_both & (above < both) & (above < before)
        least = numpy.where(is_both, both, numpy.where(is_above, above, before))
        tokens = numpy.arange(top - 1, bottom)
        total[here] = costs[tokens, diagonal - 2 - tokens] + least
        steps[here] = numpy.where(
            is_both, _DIAGONAL, numpy.where(is_above, _NEXT_TOKEN, _NEXT_STATE)
        )
    found = steps.reshape(num_tokens + 1, width)
    found[:, 0] = _NEXT_TOKEN
    return found
