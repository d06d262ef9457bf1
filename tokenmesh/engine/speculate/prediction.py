"""Prediction: a text that an answer is expected to be close to, and where the answer is in it."""

from collections.abc import Sequence
from typing import Final

from tokenmesh.engine.speculate.indexed_text import IndexedText, Match

_BEGINNING: Final = 8
"""That an answer begins like its prediction is as likely as what follows so long a match."""
_NEAR: Final = 64
"""Tokens of a prediction that an answer may leave out before its place is looked up by an index."""
_FAR_LENGTH: Final = 3
"""Tokens that must be the same for a place further away."""
_COMPARED: Final = 24
"""Tokens of a match beyond which it is as good as any."""


class Prediction:
    """Follows one stream: a token that is not the next one of the prediction may be new, in place
    of some, or come after some were left out."""

    def __init__(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """The stream's output begins after so many tokens."""
        self._ids = token_ids
        self._index = IndexedText(token_ids, [_FAR_LENGTH])
        self._num_seen = num_prompt
        """Tokens of the stream that it was compared with."""
        self._place = 0
        """Up to here the prediction has been followed."""
        self._length = _BEGINNING
        """Tokens before the place that are the same; 0: the stream has gone another way."""
        self._anchor = 0
        """The last place that was no coincidence: from there on others are searched."""

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def offer(self, stream: Sequence[int], limit: int) -> tuple[Match, list[int]] | None:
        """Return what follows the stream, and the match before it; None: it is not in the
        prediction."""
        is_indexed = self._index.update()
        self._follow(stream)
        if not self._length:
            match = self._near(stream)
            if is_indexed and (match is None or match.length < _FAR_LENGTH):
                match = self._index.find(stream, _COMPARED) or match
            if match is not None:
                self._move(*match)
        ids = list(self._ids[self._place : self._place + limit]) if self._length else []
        return (Match(self._place, self._length), ids) if ids else None

    def _follow(self, stream: Sequence[int]) -> None:
        """Compare what the stream drew since."""
        ids, place = self._ids, self._place
        for index in range(self._num_seen, len(stream)):
            if not self._length or place == len(ids) or stream[index] != ids[place]:
                self._length = 0
                break
            place += 1
            self._move(place, min(self._length + 1, _COMPARED))
        self._num_seen = len(stream)

    def _move(self, place: int, length: int) -> None:
        self._place, self._length = place, length
        if length >= _FAR_LENGTH:
            self._anchor = place

    def _near(self, stream: Sequence[int]) -> Match | None:
        """The longest match a little further on, the nearest one of its length."""
        ids, token, best = self._ids, stream[-1], None
        for place in range(self._anchor, min(self._anchor + _NEAR, len(ids) - 1)):
            if ids[place] != token:
                continue
            length, longest = 1, min(place + 1, len(stream), _COMPARED)
            while length < longest and ids[place - length] == stream[-1 - length]:
                length += 1
            if best is None or length > best.length:
                best = Match(place + 1, length)
        return best
