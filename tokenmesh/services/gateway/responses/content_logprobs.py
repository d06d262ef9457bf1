"""ContentLogprobs: of a stream's tokens those that the answer's text is made of.

Tokens of reasoning, calls and markers have log-probabilities too, which no text shows.
"""

from typing import Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import ChatLogprob

_MAX_UNDECIDED: Final = 64


class ContentLogprobs:
    """Of one turn of the model."""

    def __init__(self, shapes: LogprobShapes) -> None:
        self._shapes = shapes
        self._undecided: list[ChatLogprob] = []
        """Tokens whose text a parser still holds: a marker, or the beginning of text."""

    def push(self, piece: OutputChunk) -> list[list[ChatLogprob]]:
        """Those of the piece's content: one list for each stretch of it."""
        entries = self._shapes.chat(piece.logprobs).content
        last = entries[-1] if entries and piece.finish_reason is not None else None
        is_end = last is not None and not piece.text.endswith(last.token)
        if piece.events is None:
            return [entries[:-1] if is_end else entries]
        stretches: list[list[ChatLogprob]] = [[]]
        for entry, num_bytes in zip(entries, piece.content_bytes, strict=True):
            if entry is not last or not is_end:
                self._undecided.append(entry)
            if num_bytes is None:
                del self._undecided[:-_MAX_UNDECIDED]
                continue
            if num_bytes:
                stretches[-1] += _last_of(self._undecided, num_bytes)
            elif stretches[-1]:
                stretches.append([])
            self._undecided.clear()
        return stretches


def _last_of(entries: list[ChatLogprob], num_bytes: int) -> list[ChatLogprob]:
    """As many from the end as so many bytes of text need."""
    first, missing = len(entries), num_bytes
    while first and missing > 0:
        first -= 1
        missing -= len(entries[first].bytes)
    return entries[first:]
