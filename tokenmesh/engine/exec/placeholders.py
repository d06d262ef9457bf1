"""Placeholders of media among the token ids of a prompt."""

from collections.abc import Sequence
from dataclasses import replace

from tokenmesh.engine.api.media import REPLACE, MediaItem
from tokenmesh.engine.plan import NewRow


def replaced_runs(media: Sequence[MediaItem]) -> list[tuple[int, int]]:
    """Positions (first, end) whose ids are placeholders and embed nothing, in order."""
    return [run for item in media if item.combine == REPLACE for run in item.runs()]


def largest_text_id(token_ids: Sequence[int], media: Sequence[MediaItem]) -> int:
    """The largest id that is embedded; -1 when there is none. The media are in order."""
    largest, start = -1, 0
    for first, end in replaced_runs(media):
        largest = max(largest, max(token_ids[start:first], default=-1))
        start = end
    return max(largest, max(token_ids[start:], default=-1))


def within_vocabulary(new: NewRow, vocab_size: int) -> NewRow:
    """The same row without placeholders that are no token.

    In their place is a token that the text has anyway, so that penalties count nothing new.
    """
    if not new.media or max(new.token_ids) < vocab_size:
        return new
    token_ids = list(new.token_ids)
    inside = {position for run in replaced_runs(new.media) for position in range(*run)}
    text = (token for position, token in enumerate(token_ids) if position not in inside)
    known = next((token for token in text if token < vocab_size), 0)
    for position in inside:
        if token_ids[position] >= vocab_size:
            token_ids[position] = known
    return replace(new, token_ids=token_ids)
