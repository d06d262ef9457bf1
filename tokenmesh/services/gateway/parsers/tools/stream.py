"""CharStream: the text of one choice as a script reads it, and the events that it writes.

A script is a generator: it reads as if the whole text were there, and a bare `yield` (in methods
that return `Steps`) waits for the next chunk. Its decisions therefore cannot depend on the chunks.

Whitespace around a call belongs to the format: it is dropped between content and a call, between
calls, and after the last one. All other text that is not part of a call is content.
"""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import CallArguments, CallBegin, Content, Event

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""To be driven with `yield from`; its value is what was read."""

_NOT_SPACE: Final = re.compile(r"\S")


class CharStream:
    """Input: text that was pushed and is not taken, and taken text that may be given back.

    Output: content, and calls with their arguments.
    """

    __slots__ = (
        "_call",
        "_events",
        "_is_after_call",
        "_kept",
        "_pieces",
        "_pos",
        "_space",
        "_text",
        "is_whole",
        "num_calls",
    )

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._kept: list[str] | None = None
        self.is_whole = False
        """It tells whether the text has ended."""
        self.num_calls = 0
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._call: int | None = None
        self._space: list[str] = []
        self._is_after_call = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._pos :] + text
        self._pos = 0

    @property
    def is_empty(self) -> bool:
        """Return whether all text so far is taken."""
        return self._pos >= len(self._text)

    @property
    def is_over(self) -> bool:
        """Return whether the text has ended and is taken."""
        return self.is_whole and self.is_empty

    def window(self) -> tuple[str, int]:
        """The text, and the position of its first character that is not taken."""
        return self._text, self._pos

    def take(self, num_chars: int) -> str:
        """Take up to that many of the characters so far."""
        taken = self._text[self._pos : self._pos + num_chars]
        self._pos += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    @property
    def is_keeping(self) -> bool:
        """Return whether taken text is kept."""
        return self._kept is not None

    def keep(self) -> None:
        """Keep the text that is taken from here on; no change if it is kept already."""
        if self._kept is None:
            self._kept = []

    def drop_kept(self) -> None:
        """Drop the kept text: it was part of the format."""
        self._kept = None

    def pop_kept(self) -> str:
        """Return the kept text and stop keeping."""
        kept, self._kept = self._kept, None
        return "".join(kept) if kept is not None else ""

    def drop_cut(self, *markers: str) -> bool:
        """Return whether the text ends here or within one of the markers, which is then taken."""
        tail = self._text[self._pos :]
        if not self.is_whole or not any(marker.startswith(tail) for marker in markers):
            return False
        self._pos = len(self._text)
        return True

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; empty at the end."""
        while self._pos >= len(self._text) and not self.is_whole:
            yield
        return self._text[self._pos : self._pos + 1]

    def skip_space(self) -> Steps[str]:
        """Take whitespace; returns the next character, which is not taken, empty at the end."""
        while True:
            found = _NOT_SPACE.search(self._text, self._pos)
            self.take((found.start() if found else len(self._text)) - self._pos)
            if found or self.is_whole:
                return found.group() if found else ""
            yield

    def at(self, markers: Markers) -> Steps[str]:
        """The marker that comes next, which is not taken; empty for none."""
        while True:
            text, pos = self._text, self._pos
            if self.is_whole:
                found = markers.at(text, pos)
                return found.group() if found else ""
            if pos < len(text):
                found = markers.at_open(text, pos)
                if found is None or found.lastindex is None:
                    return found.group() if found else ""
            yield

    def copy_until(self, markers: Markers, write: Callable[[str], None]) -> Steps[str]:
        """Take and write the text before the next marker; returns the marker, empty at the end."""
        while True:
            text, pos = self._text, self._pos
            is_whole = self.is_whole
            found = markers.find(text, pos) if is_whole else markers.find_open(text, pos)
            end = found.start() if found else len(text)
            if end > pos:
                write(self.take(end - pos))
            if found and (is_whole or found.lastindex is None):
                return found.group()
            if is_whole:
                return ""
            yield

    def read_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """Take the text before the next marker; returns both, the marker empty at the end."""
        pieces: list[str] = []
        marker = yield from self.copy_until(markers, pieces.append)
        return "".join(pieces), marker

    def read_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the characters that match the pattern, which must be a repeated class."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self._text, self._pos)
            if found is not None:
                pieces.append(self.take(found.end() - self._pos))
            if not self.is_empty or self.is_whole:
                return "".join(pieces)
            yield

    def content(self, text: str) -> None:
        """Write content; whitespace at its end is held back until more follows."""
        solid = text.rstrip()
        if solid:
            self._flush_space()
            self._add(None, solid)
            self._is_after_call = False
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def drop_space(self) -> None:
        """Drop the whitespace at the end of the content so far: it belongs to the format."""
        self._space.clear()

    def give_back(self) -> None:
        """Write the kept text as content."""
        if kept := self.pop_kept():
            self.content(kept)

    def begin_call(self, name: str, model_id: str | None = None) -> None:
        """Write the beginning of a call, and drop the kept text."""
        self.drop_kept()
        self._close()
        self._space.clear()
        self._is_after_call = True
        self._events.append(CallBegin(self.num_calls, name, model_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Write JSON text of the arguments of the last call."""
        if text:
            self._add(self.num_calls - 1, text)

    def pop_events(self) -> list[Event]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Write the held whitespace, unless it follows a call."""
        if not self._is_after_call:
            self._flush_space()

    def _flush_space(self) -> None:
        if self._space:
            self._add(None, "".join(self._space))
            self._space.clear()

    def _add(self, call: int | None, text: str) -> None:
        if call != self._call:
            self._close()
            self._call = call
        self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            call = self._call
            self._events.append(Content(text) if call is None else CallArguments(call, text))
            self._pieces.clear()


Script = Callable[[CharStream], Steps[None]]
"""Reads a stream to its end: returns when the text has ended and is taken."""


def copy_content(stream: CharStream) -> Steps[None]:
    """The script for text without calls, or for the rest after the last possible call."""
    while (yield from stream.peek()):
        text, pos = stream.window()
        stream.content(stream.take(len(text) - pos))
