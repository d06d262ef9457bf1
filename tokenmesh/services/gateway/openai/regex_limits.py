"""Static limits of a regular expression: length, nesting, and the product of its repetitions.

It is not fully parsed here: the worker's grammar library reports its errors.
"""

import re
from typing import Final

from tokenmesh.shared.config.gateway import GatewaySettings

_COUNT: Final = re.compile(r"\{(\d*+)(,?+)(\d*+)\}", re.ASCII)
"""Possessive quantifiers: digits without a closing brace are scanned once."""
_DIGITS: Final = 9
"""A count with more digits exceeds every limit."""
_MOST: Final = 10**18
"""Products are cut here, so that the work does not grow with their digits."""


def check_regex(pattern: str, limits: GatewaySettings) -> None:
    """Raise ValueError for an expression that exceeds a limit."""
    if len(pattern) > limits.max_regex_chars:
        raise ValueError(f"{len(pattern)} characters, at most {limits.max_regex_chars}")
    scan = _Scan(pattern)
    if scan.depth > limits.max_regex_depth:
        raise ValueError(f"its groups are {scan.depth} deep, at most {limits.max_regex_depth}")
    if scan.repetitions > limits.max_regex_repetitions:
        raise ValueError(
            f"its repetitions multiply to {scan.repetitions}, at most "
            f"{limits.max_regex_repetitions}"
        )


class _Scan:
    """One pass over an expression."""

    def __init__(self, pattern: str) -> None:
        self.depth = 0
        self._open = [1]
        """The highest number of repetitions in each open group."""
        self._last = 1
        """The repetitions of the element that a following count repeats."""
        position = 0
        while position < len(pattern):
            position += self._scan(pattern, position)
        self.repetitions = max(self._open)

    def _scan(self, pattern: str, position: int) -> int:
        """Scan one element; the number of its characters."""
        char = pattern[position]
        if char == "(":
            self._open.append(1)
            self.depth = max(self.depth, len(self._open) - 1)
        elif char == ")" and len(self._open) > 1:
            self._last = self._open.pop()
            self._record(self._last)
        elif char == "[":
            self._last = 1
            return _class_length(pattern, position)
        elif char == "{" and (count := _COUNT.match(pattern, position)):
            # A count multiplies the counts inside the element before it.
            self._last = min(self._last * _largest(count), _MOST)
            self._record(self._last)
            return count.end() - position
        elif char not in "*+?":
            self._last = 1
            return 2 if char == "\\" else 1
        return 1

    def _record(self, repetitions: int) -> None:
        self._open[-1] = max(self._open[-1], repetitions)


def _largest(count: re.Match[str]) -> int:
    bounds = [each[: _DIGITS + 1] for each in (count[1], count[3]) if each]
    return max((int(each) for each in bounds), default=1)


def _class_length(pattern: str, start: int) -> int:
    position = start + 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1 - start
