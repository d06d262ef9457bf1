"""ContentLogprobs: of a stream's tokens those that the answer's text is made of.

Tokens of reasoning, calls and markers have log-probabilities too, which no text shows.
"""

from typing import Final

from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.parsers.events import Content, Reasoning
from tokenmesh.services.gateway.piece import Piece

_MAX_UNDECIDED: Final = 64


class ContentLogprobs:
    """Of one turn of the model."""

    def __init__(self, shapes: LogprobShapes) -> None:
        self._shapes = shapes
        self._undecided: list[ChatLogprob] = []
        """Tokens whose text a parser still holds: a marker, or the beginning of text."""

    def push(self, piece: Piece) -> list[ChatLogprob]:
        """Those of the piece's content."""
        own = self._shapes.chat(piece.logprobs).content
        if piece.finish_reason is not None and own and not piece.text.endswith(own[-1].token):
            own.pop()
        events = piece.all_events()
        if not events:
            self._undecided = [*self._undecided, *own][-_MAX_UNDECIDED:]
            return []
        held, self._undecided = self._undecided, []
        text = "".join([event.text for event in events if isinstance(event, Content)])
        if not text:
            return []
        if any(isinstance(event, Reasoning) for event in events):
            held, own = [*held, *own], []
        return _last_of(held, len(text.encode()) - _size(own)) + own


def _last_of(entries: list[ChatLogprob], num_bytes: int) -> list[ChatLogprob]:
    """As many from the end as so many bytes of text need."""
    first, missing = len(entries), num_bytes
    while first and missing > 0:
        first -= 1
        missing -= len(entries[first].bytes)
    return entries[first:]


def _size(entries: list[ChatLogprob]) -> int:
    return sum(len(entry.bytes) for entry in entries)
