"""Parsers of reasoning between markers."""

from typing import Final

from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers
from tokenmesh.services.gateway.parsers.parser import Content, Event, ParseContext, Reasoning

_OPENING: Final = 0
_REASONING: Final = 1
_ANSWER: Final = 2


class BlockParser:
    """An answer that may begin with one block of reasoning between two markers.

    Whitespace around the markers is kept, except before the start marker. A marker elsewhere than
    at the beginning is text, so a model may write about its own markers.
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
        return self._state == _REASONING or (self._state == _OPENING and self._begins)

    def push(self, text: str) -> list[Event]:
        if self._state == _ANSWER:
            return _content(text)
        self._text.push(text)
        return self._read_block() if self._state == _REASONING else self._read()

    def finish(self) -> list[Event]:
        """A block without an end is reasoning."""
        self._text.finish()
        return self._read()

    def _read(self) -> list[Event]:
        if self._state == _OPENING and not self._open():
            return []
        return self._read_block() if self._state == _REASONING else self._read_answer()

    def _open(self) -> bool:
        """Leave the opening state if the text decides how."""
        marker = self._text.take_leading(self._starts)
        if marker is None:
            return False
        self._state = _REASONING if marker or self._begins else _ANSWER
        return True

    def _read_block(self) -> list[Event]:
        text, marker = self._text.take(self._ends)
        events: list[Event] = [Reasoning(text)] if text else []
        if marker is None:
            return events
        self._state = _ANSWER
        return events + self._read_answer(marker if marker in self._kept else "")

    def _read_answer(self, before: str = "") -> list[Event]:
        return _content(before + self._text.take_all())


class BlocksParser:
    """Blocks of reasoning anywhere in an answer, between markers that are special tokens."""

    __slots__ = ("_ends", "_starts", "_text", "is_reasoning")

    def __init__(self, starts: Markers, ends: Markers, begins: bool) -> None:
        """`begins`: the prompt has opened a block."""
        self._starts = starts
        self._ends = ends
        self._text = MarkedText()
        self.is_reasoning = begins

    def push(self, text: str) -> list[Event]:
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        """A block without an end is reasoning."""
        self._text.finish()
        return self._read()

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while True:
            text, marker = self._text.take(self._ends if self.is_reasoning else self._starts)
            if text:
                events.append(Reasoning(text) if self.is_reasoning else Content(text))
            if marker is None:
                return events
            self.is_reasoning = not self.is_reasoning


class WrappedParser:
    """Removes the markers around an answer; one that does not begin with a marker is unchanged."""

    __slots__ = ("_ends", "_is_open", "_starts", "_text")

    is_reasoning = False

    def __init__(self, starts: Markers, ends: Markers) -> None:
        self._starts = starts
        self._ends = ends
        self._text = MarkedText()
        self._is_open: bool | None = None

    def push(self, text: str) -> list[Event]:
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        self._text.finish()
        return self._read()

    def _read(self) -> list[Event]:
        if self._is_open is None:
            marker = self._text.take_leading(self._starts)
            if marker is None:
                return []
            self._is_open = bool(marker)
        if not self._is_open:
            return _content(self._text.take_all())
        text, marker = self._text.take(self._ends)
        if marker is None:
            return _content(text)
        self._is_open = False
        return _content(text + self._text.take_all())


class AppendThinkParser:
    """Keeps reasoning in the content, as the clients of MiniMax M2 expect it.

    Puts the start marker, which is at the end of the prompt, before the content.
    """

    __slots__ = ("_has_begun",)

    is_reasoning = False
    start: Final = "<think>"

    def __init__(self, _context: ParseContext) -> None:
        self._has_begun = False

    def push(self, text: str) -> list[Event]:
        if self._has_begun:
            return _content(text)
        self._has_begun = True
        return [Content(self.start + text)]

    def finish(self) -> list[Event]:
        return [] if self._has_begun else self.push("")


def _content(text: str) -> list[Event]:
    return [Content(text)] if text else []
