"""Static limits of a regular expression: its length, its nesting, what its repetitions multiply to.

It is not parsed to the end here: what is wrong in it the worker's grammar library says.
"""

import re
from typing import Final

from tokenmesh.shared.config.gateway import GatewaySettings

_COUNT: Final = re.compile(r"\{(\d*+)(,?+)(\d*+)\}", re.ASCII)
"""Possessive: digits without the brace are looked at once."""
_DIGITS: Final = 9
"""Longer counts are over any limit."""
_MOST: Final = 10**18
"""Products are not made larger: the work must not grow with the digits."""


def check_regex(pattern: str, limits: GatewaySettings) -> None:
    """Raises ValueError."""
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
        """For each group that is open: the most repetitions within."""
        self._last = 1
        """Of what a repetition would repeat."""
        position = 0
        while position < len(pattern):
            position += self._take(pattern, position)
        self.repetitions = max(self._open)

    def _take(self, pattern: str, position: int) -> int:
        """How many characters were looked at."""
        char = pattern[position]
        if char == "(":
            self._open.append(1)
            self.depth = max(self.depth, len(self._open) - 1)
        elif char == ")" and len(self._open) > 1:
            self._last = self._open.pop()
            self._note(self._last)
        elif char == "[":
            self._last = 1
            return _class_length(pattern, position)
        elif char == "{" and (count := _COUNT.match(pattern, position)):
            # a count repeats what stands before it with its own counts
            self._last = min(self._last * _largest(count), _MOST)
            self._note(self._last)
            return count.end() - position
        elif char not in "*+?":
            self._last = 1
            return 2 if char == "\\" else 1
        return 1

    def _note(self, repetitions: int) -> None:
        self._open[-1] = max(self._open[-1], repetitions)


def _largest(count: re.Match[str]) -> int:
    bounds = [each[: _DIGITS + 1] for each in (count[1], count[3]) if each]
    return max((int(each) for each in bounds), default=1)


def _class_length(pattern: str, start: int) -> int:
    position = start + 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1 - start
