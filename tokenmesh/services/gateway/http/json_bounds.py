"""Bounds of a JSON text, counted before it is parsed: depth, objects, names, strings, values.

The bytes are scanned in portions by C functions. In text that is not JSON the counts may be too
high, but not too low for the part that a parser reads before it finds the error.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from tokenmesh.services.gateway.http.event_loop import Turns
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_PORTION_BYTES: Final = 64 * 1024
_BRACKETS: Final = b"[]{}"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_STEP: Final = {char: 1 if char in b"[{" else -1 for char in _BRACKETS}


async def check_bounds(data: bytes, limits: GatewaySettings) -> None:
    """Raises PayloadTooLarge, or InvalidInput for JSON that is nested too deep."""
    turns, counts = Turns(), _Counts(limits)
    for portion in _portions(data):
        counts.take(portion)
        await turns.rest()


def check_bounds_now(data: bytes, limits: GatewaySettings) -> None:
    """The same without yielding to the event loop, for short texts."""
    counts = _Counts(limits)
    for portion in _portions(data):
        counts.take(portion)


def _portions(data: bytes) -> Iterator[bytes]:
    """Portions that do not end within an escape sequence."""
    start = 0
    while start < len(data):
        end = start + _PORTION_BYTES
        portion = data[start:end]
        num_backslashes = len(portion) - len(portion.rstrip(b"\\"))
        if num_backslashes % 2:
            portion += data[end : end + 1]
        start += len(portion)
        yield portion


class _Counts:
    """The counts of the portions so far."""

    def __init__(self, limits: GatewaySettings) -> None:
        self._limits = limits
        self._is_in_string = False
        self._depth = 0
        self._num_quotes = 0
        self._num_values = 1
        self._num_objects = 0
        self._num_names = 0

    def take(self, portion: bytes) -> None:
        """Raises what `check_bounds` raises."""
        if b"\\" in portion:
            # Escaped backslashes first: in pairs from the left, as a parser reads them.
            portion = portion.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = portion.split(b'"')
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._is_in_string ^= len(pieces) % 2 == 0
        self._count(outside, len(pieces) - 1)
        brackets = outside.translate(None, _NOT_BRACKETS)
        if brackets:
            self._check_depth(brackets)

    def _count(self, outside: bytes, num_quotes: int) -> None:
        limits = self._limits
        num_opened = outside.count(b"[") + outside.count(b"{")
        self._num_quotes += num_quotes
        self._num_objects += num_opened
        self._num_values += num_opened + outside.count(b",")
        self._num_names += outside.count(b":")
        for found, most, what in (
            (self._num_quotes // 2, limits.max_json_strings, "strings"),
            (self._num_objects, limits.max_json_objects, "objects and lists"),
            (self._num_names, limits.max_json_names, "names of fields"),
            (self._num_values, limits.max_json_values, "values"),
        ):
            if found > most:
                raise PayloadTooLarge(f"the body holds more than {most} {what}")

    def _check_depth(self, brackets: bytes) -> None:
        limit = self._limits.max_json_depth
        depths = list(accumulate(map(_STEP.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > limit:
            raise InvalidInput(f"the body is nested deeper than {limit} levels")
