"""Markers in a text that comes in portions, found across their borders.

What a parser sees does not depend on the portions: the leftmost marker counts, of two that begin at
the same place the longer, and text is held back only while it may still be a marker's beginning.
"""

import re
from typing import Final, NamedTuple

_MOST_SPACE: Final = 1024
"""Characters of whitespace that may stand before a leading marker: so much is held back for one."""


class Taken(NamedTuple):
    """What has become certain."""

    text: str
    """Before the marker; with none, as far as no marker can begin in it any more."""
    marker: str | None
    """A marker that is complete; it is taken off the text."""


class Markers:
    """A set of markers to look for at one place of a format. Make it once, for all requests."""

    def __init__(self, *markers: str) -> None:
        ordered = sorted(set(markers), key=len, reverse=True)
        assert ordered
        assert all(ordered)
        self._whole = re.compile("|".join(map(re.escape, ordered)))
        self._any = re.compile("|".join(map(_marker_or_beginning, ordered)))

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The leftmost marker in a text of which all is there."""
        return self._whole.search(text, start)

    def find_open(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The leftmost marker, or beginning of one at the text's end (its `lastindex` is set)."""
        return self._any.search(text, start)

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """The marker at just that place of a text of which all is there."""
        return self._whole.match(text, start)

    def at_open(self, text: str, start: int) -> re.Match[str] | None:
        """The marker, or beginning of one (`lastindex` is set), at just that place."""
        return self._any.match(text, start)


def _marker_or_beginning(marker: str) -> str:
    beginning = ""
    for char in reversed(marker[1:-1]):
        beginning = f"(?:{re.escape(char)}{beginning})?"
    if len(marker) == 1:
        return re.escape(marker)
    return f"{re.escape(marker)}|({re.escape(marker[0])}{beginning})\\Z"


class MarkedText:
    """One stream's text that has come and is not taken yet."""

    __slots__ = ("_is_whole", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._is_whole = False

    def push(self, text: str) -> None:
        """More of it."""
        self._text = self._text + text if self._text else text

    def finish(self) -> None:
        """No more will come: what could have become a marker is text."""
        self._is_whole = True

    def take(self, markers: Markers) -> Taken:
        """Take off the text before the next marker, and the marker.

        To be called until `marker` is None; then everything is taken but a possible beginning.
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
        """Take off a marker that the text begins with, and the whitespace before it.

        An empty string when it begins with none; None while that is not certain.
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
        """Take everything, whatever it is."""
        text, self._text = self._text, ""
        return text

    def give_back(self, text: str) -> None:
        """Put text that was taken before what is there."""
        self._text = text + self._text
