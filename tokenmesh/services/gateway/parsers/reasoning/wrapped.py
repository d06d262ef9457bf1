"""WrappedParser: takes the markers off an answer that stands between two."""

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers


class WrappedParser:
    """Reads content. An answer that does not begin with the marker is passed on as it is."""

    __slots__ = ("_ends", "_is_open", "_starts", "_text")

    def __init__(self, starts: Markers, ends: Markers) -> None:
        self._starts = starts
        self._ends = ends
        self._text = MarkedText()
        self._is_open: bool | None = None

    @property
    def is_reasoning(self) -> bool:
        """Never."""
        return False

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        """The rest."""
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


def _content(text: str) -> list[Event]:
    return [Content(text)] if text else []
