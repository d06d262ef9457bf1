"""Finds markers in a text that comes in chunks, also across chunks.

The result does not depend on the chunks: the leftmost marker counts, of two at the same place the
longer one, and text is held back only while it may be the beginning of a marker.
"""

import re
from typing import Final, NamedTuple

_MOST_SPACE: Final = 1024
"""Most characters of whitespace before a leading marker; so much may be held back."""


class Taken(NamedTuple):
    """Text that is decided, and the marker after it."""

    text: str
    """The text before the marker; without a marker, the text in which none can begin."""
    marker: str | None
    """A complete marker, which is removed from the text."""


class Markers:
    """A set of markers that may come at one place of a format. Make it once, for all requests."""

    def __init__(self, *markers: str) -> None:
        ordered = sorted(set(markers), key=len, reverse=True)
        assert ordered
        assert all(ordered)
        self._whole = re.compile("|".join(map(re.escape, ordered)))
        self._any = re.compile("|".join(map(_marker_or_beginning, ordered)))

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The leftmost marker in a text that has ended."""
        return self._whole.search(text, start)

    def find_open(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The leftmost marker, or the beginning of one at the text's end (`lastindex` is set)."""
        return self._any.search(text, start)

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """The marker at that position of a text that has ended."""
        return self._whole.match(text, start)

    def at_open(self, text: str, start: int) -> re.Match[str] | None:
        """The marker, or the beginning of one (`lastindex` is set), at that position."""
        return self._any.match(text, start)


def _marker_or_beginning(marker: str) -> str:
    beginning = ""
    for char in reversed(marker[1:-1]):
        beginning = f"(?:{re.escape(char)}{beginning})?"
    if len(marker) == 1:
        return re.escape(marker)
    return f"{re.escape(marker)}|({re.escape(marker[0])}{beginning})\\Z"


class MarkedText:
    """The text of one choice that was pushed and is not taken."""

    __slots__ = ("_is_whole", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._is_whole = False

    def push(self, text: str) -> None:
        self._text = self._text + text if self._text else text

    def finish(self) -> None:
        """End the text: an incomplete marker is text."""
        self._is_whole = True

    def take(self, markers: Markers) -> Taken:
        """Take the text before the next marker, and the marker.

        Call it until `marker` is None; then only a possible beginning of a marker is left.
        """
        text = self._text
        match = markers.find(text) if self._is_whole else markers.find_open(text)
        if match is None:
            self._text = ""
            return Taken(text, None)
        begin, end = match.span()
        if not self._is_whole and match.lastindex is not None:
            self._text = text[begin:]
            return Taken(text[:begin], None)
        self._text = text[end:]
        return Taken(text[:begin], text[begin:end])

    def take_leading(self, markers: Markers) -> str | None:
        """Take a marker at the beginning of the text, and the whitespace before it.

        Returns an empty string if there is none, None while that is not decided.
        """
        text = self._text
        begin = len(text) - len(text.lstrip())
        if begin > _MOST_SPACE:
            return ""
        if begin == len(text):
            return "" if self._is_whole else None
        match = markers.find(text, begin) if self._is_whole else markers.find_open(text, begin)
        if match is None or match.start() != begin:
            return ""
        if not self._is_whole and match.lastindex is not None:
            return None
        self._text = text[match.end() :]
        return match.group()

    def take_all(self) -> str:
        text, self._text = self._text, ""
        return text

    def give_back(self, text: str) -> None:
        """Put taken text back to the front."""
        self._text = text + self._text
