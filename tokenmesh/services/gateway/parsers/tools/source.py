"""CharSource: one stream's text, read by a script that waits wherever it needs more.

A script is a generator: it reads as if all text were there, and a bare `yield` (inside of the
methods that return `Steps`) is where it waits for the next portion. What it decides therefore
cannot depend on how the text is cut.
"""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from tokenmesh.services.gateway.parsers.markers import Markers

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""To be driven with `yield from`; its value is what it read."""

_NOT_SPACE: Final = re.compile(r"\S")


class CharSource:
    """The text that has come and is not taken yet, and what was taken but may be given back."""

    __slots__ = ("_kept", "_pos", "_text", "is_whole")

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._kept: list[str] | None = None
        self.is_whole = False

    def feed(self, text: str) -> None:
        """More of it."""
        self._text = self._text[self._pos :] + text
        self._pos = 0

    @property
    def is_empty(self) -> bool:
        """Whether all that came is taken."""
        return self._pos >= len(self._text)

    @property
    def is_over(self) -> bool:
        """Whether all text there will be is taken."""
        return self.is_whole and self.is_empty

    def window(self) -> tuple[str, int]:
        """The text and where in it the part begins that is not taken."""
        return self._text, self._pos

    def take(self, num_chars: int) -> str:
        """The next characters, of those that are there."""
        taken = self._text[self._pos : self._pos + num_chars]
        self._pos += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    @property
    def is_keeping(self) -> bool:
        """Whether what is taken is being remembered."""
        return self._kept is not None

    def keep(self) -> None:
        """From here on remember what is taken, or go on remembering."""
        if self._kept is None:
            self._kept = []

    def drop_kept(self) -> None:
        """What was remembered has been understood."""
        self._kept = None

    def pop_kept(self) -> str:
        """What was remembered, to be given back as content."""
        kept, self._kept = self._kept, None
        return "".join(kept) if kept is not None else ""

    def drop_cut(self, *markers: str) -> bool:
        """Whether the text ends here, or within one of the markers, which is then taken."""
        tail = self._text[self._pos :]
        if not self.is_whole or not any(marker.startswith(tail) for marker in markers):
            return False
        self._pos = len(self._text)
        return True

    def peek(self) -> Steps[str]:
        """The next character, not taken; empty at the end."""
        while self._pos >= len(self._text) and not self.is_whole:
            yield
        return self._text[self._pos : self._pos + 1]

    def skip_space(self) -> Steps[str]:
        """Takes white space; returns the character after it, not taken, empty at the end."""
        while True:
            found = _NOT_SPACE.search(self._text, self._pos)
            self.take((found.start() if found else len(self._text)) - self._pos)
            if found or self.is_whole:
                return found.group() if found else ""
            yield

    def at(self, markers: Markers) -> Steps[str]:
        """Which marker comes next, not taken; empty for none."""
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
        """Takes and writes the text before the next marker; returns that, or empty at the end."""
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
        """Takes the text before the next marker; returns both, or all there is and empty."""
        pieces: list[str] = []
        marker = yield from self.copy_until(markers, pieces.append)
        return "".join(pieces), marker

    def read_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Takes the characters that each match the pattern, a repeated class."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self._text, self._pos)
            if found is not None:
                pieces.append(self.take(found.end() - self._pos))
            if not self.is_empty or self.is_whole:
                return "".join(pieces)
            yield
