"""BlockParser: an answer that may begin with one block of reasoning between two markers."""

from typing import Final

from tokenmesh.services.gateway.parsers.events import Content, Event, Reasoning
from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers

_OPENING: Final = 0
_REASONING: Final = 1
_ANSWER: Final = 2


class BlockParser:
    """Text is passed on as it is: whitespace around the markers belongs to what it stands in.

    Only whitespace before the start marker goes with the marker. A marker anywhere else than at
    the beginning is text, so a model may write about its own markers.
    """

    __slots__ = ("_begins", "_ends", "_kept", "_starts", "_state", "_text")

    def __init__(
        self, starts: Markers, ends: Markers, begins: bool, kept: tuple[str, ...] = ()
    ) -> None:
        """`begins`: text without a start marker is reasoning. `kept`: ends that are content."""
        self._starts = starts
        self._ends = ends
        self._begins = begins
        self._kept = kept
        self._text = MarkedText()
        self._state = _OPENING

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character pushed belongs to reasoning."""
        return self._state == _REASONING or (self._state == _OPENING and self._begins)

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        if self._state == _ANSWER:
            return [Content(text)] if text else []
        self._text.push(text)
        return self._read_block() if self._state == _REASONING else self._read()

    def finish(self) -> list[Event]:
        """The rest: a block that was not ended is reasoning."""
        self._text.finish()
        return self._read()

    def _read(self) -> list[Event]:
        if self._state == _OPENING and not self._open():
            return []
        return self._read_block() if self._state == _REASONING else self._read_answer()

    def _open(self) -> bool:
        """Leave the beginning, if what is there tells how."""
        state = _REASONING if self._begins else _ANSWER
        marker = self._text.take_leading(self._starts)
        if marker is None:
            return False
        self._state = _REASONING if marker else state
        return True

    def _read_block(self) -> list[Event]:
        text, marker = self._text.take(self._ends)
        events: list[Event] = [Reasoning(text)] if text else []
        if marker is None:
            return events
        self._state = _ANSWER
        return events + self._read_answer(marker if marker in self._kept else "")

    def _read_answer(self, before: str = "") -> list[Event]:
        text = before + self._text.take_all()
        return [Content(text)] if text else []
