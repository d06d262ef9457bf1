"""Placeholders: the ids of a prompt that stand for media.

Embeddings take their place, so they need not be in the vocabulary; all others must be.
"""

from collections.abc import Sequence
from dataclasses import replace

from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.shared.messages.media import MediaItem


def largest_text_id(token_ids: Sequence[int], media: Sequence[MediaItem]) -> int:
    """The largest id outside of the media items, which are in order; -1 when there is none."""
    largest, start = -1, 0
    for item in media:
        largest = max(largest, max(token_ids[start : item.offset], default=-1))
        start = item.offset + item.length
    return max(largest, max(token_ids[start:], default=-1))


def within_vocabulary(new: NewRow, vocab_size: int) -> NewRow:
    """The same row without placeholders that are no token.

    In their place is a token that the text has anyway, so that penalties count nothing new.
    """
    if not new.media or max(new.token_ids) < vocab_size:
        return new
    token_ids = list(new.token_ids)
    spans = [range(item.offset, item.offset + item.length) for item in new.media]
    inside = {position for span in spans for position in span}
    text = (token for position, token in enumerate(token_ids) if position not in inside)
    known = next((token for token in text if token < vocab_size), 0)
    for position in inside:
        if token_ids[position] >= vocab_size:
            token_ids[position] = known
    return replace(new, token_ids=token_ids)
