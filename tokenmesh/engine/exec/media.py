"""Embeddings for tokens of a prompt: in place of those of their ids, or added to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from tokenmesh.engine.api.media import ADD, MediaItem
from tokenmesh.engine.layers.step import Patch, StepMedia
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.plan import NewRow
from tokenmesh.shared.tensor_blob import TensorBlob


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Positions of a row whose prompt's do not count from 0 in every row of them."""

    values: torch.Tensor
    """[position_rows, num_prompt]"""
    shift: float
    """From the place of an output token to its position."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        return cls(values, float(values.max()) + 1 - values.shape[1])

    def at(self, start: int, count: int) -> torch.Tensor:
        """[position_rows, count] from a place on; output tokens count on from the prompt's."""
        num_rows, num_prompt = self.values.shape
        own = torch.arange(start, start + count).expand(num_rows, -1)
        kind = self.values.dtype
        if start >= num_prompt:
            return (own.double() + self.shift).to(kind)
        known = self.values[:, start : start + count]
        rest = own[:, known.shape[1] :].double() + self.shift
        return torch.cat([known, rest.to(kind)], dim=1)


PositionsOf = Callable[[Sequence[int], Sequence[MediaItem]], torch.Tensor | None]
"""See `LanguageModel.positions_of`."""


def positions_of_prompt(
    new: NewRow, facts: ModelFacts, positions_of: PositionsOf | None
) -> tuple[PromptPositions | None, str | None]:
    """Those of a request, None where they count from 0, and what is wrong with its media."""
    if positions_of is None or not new.media or facts.media.position_rows == 1:
        return None, None
    try:
        values = positions_of(new.token_ids[: new.num_prompt], new.media)
    except ValueError as problem:
        return None, str(problem)
    return None if values is None else PromptPositions.of(values), None


class MediaRow(Protocol):
    """It holds what a row brings besides tokens."""

    @property
    def whole_runs(self) -> tuple[tuple[int, int], ...]:
        """Positions (first, end) whose tokens see each other both ways."""

    @property
    def positions(self) -> PromptPositions | None:
        """None: they count from 0."""


def step_media(
    entries: Sequence[tuple[MediaRow, int, int]], num_rows: int, patches: Sequence[Patch]
) -> StepMedia:
    """Return what the rows of a step bring besides tokens: of each, in batch order, the row, its
    first position and its new tokens; num_rows: of positions."""
    spans: list[tuple[int, int]] = []
    positions, first = [], 0
    for row, start, count in entries:
        spans += spans_within(row.whole_runs, start, start + count, first)
        if num_rows > 1 and row.positions is None:
            positions.append(torch.arange(start, start + count).expand(num_rows, -1))
        elif row.positions is not None:
            positions.append(row.positions.at(start, count))
        first += count
    return StepMedia(patches, torch.cat(positions, dim=1) if positions else None, spans)


@dataclass(frozen=True, slots=True)
class MediaPatch:
    """Consecutive embeddings of an item and the prompt positions they are for."""

    start: int
    embeddings: torch.Tensor
    """[length, width]"""
    adds: bool = False

    def within(self, start: int, end: int, first: int) -> Patch | None:
        """The part for positions [start, end), which are a batch's tokens from `first` on."""
        begin = max(start, self.start)
        stop = min(end, self.start + len(self.embeddings))
        if begin >= stop:
            return None
        values = self.embeddings[begin - self.start : stop - self.start]
        return Patch(slice(first + begin - start, first + stop - start), values, self.adds)


def states_of(new: NewRow, facts: ModelFacts) -> tuple[torch.Tensor | None, str | None]:
    """The encoder's states [length, hidden] that a prompt attends to, and what is wrong with them.

    Its item lies at the prompt's first token, which makes the whole prefix depend on its hash.
    """
    if len(new.media) != 1:
        return None, f"the prompt has {len(new.media)} recordings, not one"
    item = new.media[0]
    blob = new.embeddings.get(item.content_hash)
    if blob is not None and item.offset:
        return None, f"the recording lies at token {item.offset}, not at the first one"
    return _values_of(item, blob, (facts.encoder_states, facts.hidden_size))


def patches_of(new: NewRow, facts: ModelFacts) -> tuple[list[MediaPatch], str | None]:
    """The patches of a request, and what is wrong with its media, if anything."""
    patches = []
    for item in new.media:
        blob = new.embeddings.get(item.content_hash)
        width = facts.media.width_of(item, facts.hidden_size)
        values, problem = _values_of(item, blob, (item.num_embeddings, width))
        if values is None:
            return [], problem
        runs = item.runs()
        sizes = [end - first for first, end in runs]
        for (first, _), part in zip(runs, torch.split(values, sizes), strict=True):
            patches.append(MediaPatch(first, part, item.combine == ADD))
    return patches, None


def spans_within(
    runs: Sequence[tuple[int, int]], start: int, end: int, first: int
) -> list[tuple[int, int]]:
    """The parts of runs of positions within [start, end), as tokens of a batch, as in `within`.

    A single token sees itself anyway and is left out.
    """
    parts = [(max(start, begin), min(end, stop)) for begin, stop in runs]
    return [(first + a - start, first + b - start) for a, b in parts if b - a > 1]


def _values_of(
    item: MediaItem, blob: TensorBlob | None, shape: tuple[int, int]
) -> tuple[torch.Tensor | None, str | None]:
    """Return what an encoder has computed for an item, or what is wrong with it."""
    problem = _problem(item, blob, shape)
    if blob is None or problem is not None:
        return None, problem
    dtype = getattr(torch, blob.dtype)
    values = torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)
    if not bool(values.isfinite().all()):
        return None, f"the embeddings of {item.kind} {item.content_hash[:12]} are not finite"
    return values, None


def _problem(item: MediaItem, blob: TensorBlob | None, shape: tuple[int, int]) -> str | None:
    name = f"the embeddings of {item.kind} {item.content_hash[:12]}"
    if blob is None:
        return f"{name} are missing"
    if blob.dtype not in ("float32", "bfloat16", "float16"):
        return f"{name} have type {blob.dtype}"
    if tuple(blob.shape) != shape:
        return f"{name} have shape {list(blob.shape)}, not {list(shape)}"
    return None
