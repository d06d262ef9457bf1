"""MediaFacts: what a model takes beside text, and what a step has to bring for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmesh.shared.messages.media import EMBEDS, IMAGE, VIDEO, MediaItem

_SEEN_WHOLE = (IMAGE, VIDEO)


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Of one model; the default is that of a model that takes text only."""

    kinds: frozenset[str] = frozenset()
    """Of items, EMBEDS aside, which every model takes."""
    position_rows: int = 1
    """Positions of a token: more than 1 where an image's have a height and a width (M-RoPE)."""
    num_deepstack: int = 0
    """Layers whose output is added to: an embedding is 1 + as many times the hidden size wide."""
    sees_ahead: bool = False
    """Whether the tokens of an image see each other both ways, so that no chunk may end in it."""

    def width_of(self, item: MediaItem, hidden_size: int) -> int:
        """Width of the embeddings of an item."""
        return hidden_size if item.kind == EMBEDS else hidden_size * (1 + self.num_deepstack)

    def whole_runs(self, media: Sequence[MediaItem]) -> tuple[tuple[int, int], ...]:
        """Positions (first, end) that have to be computed in one step, in order."""
        if not self.sees_ahead:
            return ()
        return tuple(run for item in media if item.kind in _SEEN_WHOLE for run in item.runs())


TEXT_ONLY = MediaFacts()


def ends_outside(runs: Sequence[tuple[int, int]], start: int, num_tokens: int) -> int:
    """How many tokens from `start` on one step computes: so many, or fewer, to end before a run
    that it would cut, or more, to compute the rest of a run that it begins with."""
    end = start + num_tokens
    for first, last in runs:
        if first < end < last:
            return (first if first > start else last) - start
    return num_tokens
