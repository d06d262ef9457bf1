"""MediaFacts: what a model takes besides text, and what a step has to bring for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmesh.engine.api.media import ADD, AUDIO, EMBEDS, IMAGE, VIDEO, MediaItem

_SEEN_WHOLE = (IMAGE, VIDEO)


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """These are facts of one model; the default is that of a model that takes text only."""

    kinds: frozenset[str] = frozenset()
    """These are kinds of items, EMBEDS aside, which every model takes."""
    position_rows: int = 1
    """Positions of a token: more than 1 where an image's have a height and a width (M-RoPE)."""
    num_deepstack: int = 0
    """Layers whose output is added to: an embedding is 1 + as many times the hidden size wide."""
    sees_ahead: bool = False
    """It tells whether the tokens of an image see each other both ways, so that no chunk may end in
    it."""
    hears_all: bool = False
    """It tells whether a recording is added to all tokens of a row, those of its output
    included."""

    def reach(self, num_prompt: int, max_model_len: int) -> int:
        """Where the last item of a prompt has to end."""
        return max_model_len if self.hears_all else num_prompt

    def problem_of(self, media: Sequence[MediaItem], num_tokens: int) -> str | None:
        """Why a model that hears all its tokens cannot compute so many of them; None: it can.

        The recording may come in parts, one after the other.
        """
        if not self.hears_all:
            return None
        end = 0
        for item in media:
            if (item.kind, item.combine, item.offset, item.holes) != (AUDIO, ADD, end, ()):
                end = 0
                break
            end = item.end
        if not end:
            return "this model transcribes recordings: a prompt has one, added to all tokens"
        if num_tokens > end:
            return f"prompt and output have {num_tokens} tokens, the recording {end}"
        return None

    def width_of(self, item: MediaItem, hidden_size: int) -> int:
        """Width of the embeddings of an item."""
        is_seen = item.kind not in (EMBEDS, AUDIO)
        return hidden_size * (1 + self.num_deepstack) if is_seen else hidden_size

    def whole_runs(self, media: Sequence[MediaItem]) -> tuple[tuple[int, int], ...]:
        """Positions (first, end) that have to be computed in one step, in order."""
        if not self.sees_ahead:
            return ()
        return tuple(run for item in media if item.kind in _SEEN_WHOLE for run in item.runs())


TEXT_ONLY = MediaFacts()


def ends_outside(runs: Sequence[tuple[int, int]], start: int, num_tokens: int) -> int:
    """Return how many tokens from `start` on one step computes: so many, or fewer, to end before a
    run that it would cut, or more, to compute the rest of a run that it begins with."""
    end = start + num_tokens
    for first, last in runs:
        if first < end < last:
            return (first if first > start else last) - start
    return num_tokens
