"""LongStrings: the long strings of one JSON body, decoded in portions.

A prompt or an inlined image may be most of a body: decoding 8 MiB of escapes at once would block
the event loop for some tens of milliseconds.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from pydantic_core import from_json

from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import new_request_id

_PORTION_BYTES: Final = 64 * 1024
_MIN_BYTES: Final = _PORTION_BYTES // 2
_LONGEST_CHAR: Final = 12
"""Two escapes of six bytes: a character outside of the basic plane."""
_MOST_MORE_BYTES: Final = 3
"""It bounds the bytes of a character in UTF-8, after its first byte."""
_STEP: Final = 512
"""Values between two looks at the clock."""
_FIRST_HALF: Final = re.compile(rb"\\u[dD][89abAB]")


class LongStrings:
    """`cut` and then `fill`."""

    def __init__(self) -> None:
        self._mark = new_request_id("text")
        """Unknown to the client: none of its strings begins with it."""
        self._texts: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._texts)

    async def cut(self, data: bytes) -> bytes:
        """The body with a short string in place of each long one. Raises InvalidInput."""
        turns = Turns()
        kept, done, position = [], 0, 0
        start = -1
        """This is the start of the string that goes on beyond the portion, without its quote."""
        for portion in portions(data, _PORTION_BYTES):
            plain = without_escapes(portion)
            num_quotes = plain.count(b'"')
            if start >= 0 and num_quotes:
                end = position + plain.index(b'"')
                if end - start >= _MIN_BYTES:
                    kept += [data[done:start], await self._take(data, start, end, turns)]
                    done = end
            if (start >= 0) == num_quotes % 2:
                start = -1
            elif num_quotes:
                start = position + plain.rindex(b'"') + 1
            position += len(portion)
            await turns.rest()
        if start >= 0:
            raise InvalidInput("the body is not valid JSON: EOF while parsing a string")
        return b"".join((*kept, data[done:])) if kept else data

    async def _take(self, data: bytes, start: int, end: int, turns: Turns) -> bytes:
        parts: list[str] = []
        while start < end:
            cut = (
                end if end - start <= _PORTION_BYTES else _cut(data, start, start + _PORTION_BYTES)
            )
            try:
                parts.append(from_json(b'"%b"' % data[start:cut]))
            except ValueError as error:
                reason = str(error).partition(" at line ")[0]
                text = f"the body is not valid JSON: {reason} in the string up to byte {cut}"
                raise InvalidInput(text) from None
            start = cut
            await turns.rest()
        name = f"{self._mark}{len(self._texts)}"
        self._texts[name] = "".join(parts)
        return name.encode()

    async def fill(self, body: Any) -> Any:
        """The parsed body with its long strings, changed in place. Raises InvalidInput."""
        turns, root = Turns(), [body]
        holders: list[Any] = [root]
        while holders:
            holder = holders.pop()
            entries = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for index, (key, value) in enumerate(entries):
                if isinstance(value, str) and value.startswith(self._mark):
                    holder[key] = self._texts[value]
                elif isinstance(value, dict | list):
                    holders.append(value)
                if isinstance(key, str) and key.startswith(self._mark):
                    raise InvalidInput(f"a field's name is longer than {_MIN_BYTES} bytes")
                if index % _STEP == 0:
                    await turns.rest()
        return root[0]


def _cut(data: bytes, start: int, end: int) -> int:
    """The last position up to `end` that is not within a character."""
    for _ in range(_MOST_MORE_BYTES):
        if data[end] & 0xC0 == 0x80:
            end -= 1
    # What is left of backslashes after the pairs begins an escape.
    text = data[start:end].replace(rb"\\", b"__")
    found = text.rfind(b"\\", len(text) - _LONGEST_CHAR)
    if found < 0:
        return end
    # The last escape may go on beyond the end, or be the second half of a character.
    return start + (found - 6 if _FIRST_HALF.match(text, found - 6) else found)


def portions(data: bytes, num_bytes: int) -> Iterator[bytes]:
    """Portions of that size that do not end within an escape of two characters."""
    start = 0
    while start < len(data):
        end = start + num_bytes
        portion = data[start:end]
        num_backslashes = len(portion) - len(portion.rstrip(b"\\"))
        if num_backslashes % 2:
            portion += data[end : end + 1]
        start += len(portion)
        yield portion


def without_escapes(portion: bytes) -> bytes:
    """Return bytes of the same length, without escaped backslashes and quotes."""
    if b"\\" not in portion:
        return portion
    # Escaped backslashes first: in pairs from the left, as a parser reads them.
    return portion.replace(b"\\\\", b"__").replace(b'\\"', b"__")
