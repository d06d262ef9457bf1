"""JSON values, copied chunk by chunk.

Models do not always write valid JSON. Two errors inside strings are repaired, since a client's JSON
parser would fail: raw control characters (a newline in a program), and backslashes before a
character that needs no escape (a regular expression). Everything else stays as the model wrote it.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps

_STRUCTURE: Final = re.compile(r'["{}\[\]<]')
_IN_STRING: Final = re.compile(r'["\\\x00-\x1f]')
_SCALAR: Final = re.compile(r'[^\s,:"{}\[\]<]+')
_ESCAPABLE: Final = frozenset('"\\/bfnrtu')


class _Copy:
    """The state of copying an object, an array or a string."""

    __slots__ = ("_depth", "_in_string", "_stops", "is_broken", "is_done")

    def __init__(self, stops: Markers | None) -> None:
        self._stops = stops
        self._depth = 0
        self._in_string = False
        self.is_done = False
        self.is_broken = False

    def portion(self, text: str, start: int, is_whole: bool) -> tuple[str, int]:
        """Copy text from `start`; returns what to write, and the position of the rest."""
        pieces: list[str] = []
        pos = start
        while pos < len(text) and not (self.is_done or self.is_broken):
            step = self._string if self._in_string else self._structure
            piece, end = step(text, pos, is_whole)
            if end == pos:
                break
            pieces.append(piece)
            pos = end
        return "".join(pieces), pos

    def _structure(self, text: str, pos: int, is_whole: bool) -> tuple[str, int]:
        found = _STRUCTURE.search(text, pos)
        if found is None:
            return text[pos:], len(text)
        char = found.group()
        if char == "<" and (end := self._stop(text, found.start(), is_whole)) is not None:
            return text[pos:end], end
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0
        return text[pos : found.end()], found.end()

    def _stop(self, text: str, pos: int, is_whole: bool) -> int | None:
        """The position to stop at if a marker is, or may be, at `pos`; else None."""
        if self._stops is None:
            return None
        found = self._stops.at(text, pos) if is_whole else self._stops.at_open(text, pos)
        if found is None:
            return None
        self.is_broken = found.lastindex is None
        return pos

    def _string(self, text: str, pos: int, is_whole: bool) -> tuple[str, int]:
        found = _IN_STRING.search(text, pos)
        if found is None:
            return text[pos:], len(text)
        before, char, end = text[pos : found.start()], found.group(), found.end()
        if char == "\\":
            if end == len(text):
                return (before, found.start()) if not is_whole else (before + char, end)
            after = text[end]
            return before + (char if after in _ESCAPABLE else "\\\\") + _plain(after), end + 1
        if char != '"':
            return before + _plain(char), end
        self._in_string = False
        self.is_done = self._depth == 0
        return before + char, end


def _plain(char: str) -> str:
    return json.dumps(char)[1:-1] if char < " " else char


def copy_container(
    stream: CharStream, write: Callable[[str], None], stops: Markers | None
) -> Steps[bool]:
    """Copy an object, array or string that comes next; False if it is incomplete.

    It is incomplete at the end of the text, or before a stop marker outside of its strings.
    """
    copy = _Copy(stops)
    while True:
        text, pos = stream.window()
        written, end = copy.portion(text, pos, stream.is_whole)
        stream.take(end - pos)
        if written:
            write(written)
        if copy.is_done:
            return True
        if copy.is_broken or stream.is_whole:
            return False
        yield


def copy_value(
    stream: CharStream, write: Callable[[str], None], stops: Markers | None
) -> Steps[bool]:
    """Copy any value; a scalar may be invalid JSON."""
    first = yield from stream.peek()
    if first and first in '{["':
        return (yield from copy_container(stream, write, stops))
    scalar = yield from stream.read_while(_SCALAR)
    write(scalar)
    return bool(scalar)


def read_string(stream: CharStream) -> Steps[str | None]:
    """Take a string that comes next, and decode it; None if it is incomplete."""
    pieces: list[str] = []
    is_complete = yield from copy_container(stream, pieces.append, None)
    return decode_string("".join(pieces)) if is_complete else None


def decode_string(text: str) -> str:
    """The value of a JSON string; an invalid one without its quotes."""
    try:
        decoded = str(json.loads(text))
        decoded.encode()
    except ValueError:
        return text[1:-1]
    return decoded
