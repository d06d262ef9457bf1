"""BlocksParser: blocks of reasoning anywhere in an answer, between markers that are no text."""

from tokenmesh.services.gateway.parsers.events import Content, Event, Reasoning
from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers


class BlocksParser:
    """For families whose markers are special tokens, which no model writes about."""

    __slots__ = ("_ends", "_starts", "_text", "is_reasoning")

    def __init__(self, starts: Markers, ends: Markers, begins: bool) -> None:
        """`begins`: the prompt has opened a block."""
        self._starts = starts
        self._ends = ends
        self._text = MarkedText()
        self.is_reasoning = begins

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        """The rest: a block that was not ended is reasoning."""
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
