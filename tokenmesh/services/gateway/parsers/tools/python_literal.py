"""Python literals as JSON, read chunk by chunk without eval or ast.

Strings with escapes, numbers, True, False, None (and JSON's names), lists, tuples and dictionaries.
Anything else, such as a set or an expression, becomes a string with its source text.
"""

import json
import re
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.schema_values import is_json, to_json
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps

_PLAIN: Final = re.compile(r"""[^"'()\[\]{},]+""")
_TRIPLE: Final = Markers('"""', "'''")
_ENDS: Final = {quote: Markers(quote, "\\") for quote in ('"', "'", '"""', "'''")}
_ESCAPE: Final = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_WORD: Final = re.compile(r"\b(?:True|False|None)\b")
_BRACKETS: Final = {"(": "[", "[": "[", "{": "{", ")": "]", "]": "]", "}": "}"}
_NUMBERS: Final = frozenset({"integer", "number"})


class _Literal:
    """The source text and the JSON of one literal so far."""

    __slots__ = ("_comma", "_json", "_raw", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self._raw: list[str] = []
        self._json: list[str] = []
        self._comma = ""

    def add(self, raw: str, written: str) -> None:
        self._raw.append(raw)
        if self._comma and not written.strip():
            self._comma += written
            return
        self._json.append(self._comma + written)
        self._comma = ""

    def punctuate(self, char: str) -> None:
        if char == ",":
            self._raw.append(char)
            self._comma += char
            return
        opens = char in "([{"
        if not opens:
            # Python allows a comma before the closing bracket, JSON does not.
            self._comma = ""
        self.depth += 1 if opens else -1
        self.add(char, _BRACKETS[char])

    def finish(self, is_complete: bool) -> str:
        written = "".join(self._json).strip()
        if not is_complete or is_json(written):
            return written
        raw = "".join(self._raw).strip()
        return to_json(raw, _NUMBERS)


def read_literal(stream: CharStream) -> Steps[tuple[str, bool]]:
    """Take a literal up to the comma or bracket after it; its JSON, and whether it is complete.

    If the text ends within the literal, its JSON is incomplete, too.
    """
    literal = _Literal()
    while True:
        plain = yield from stream.read_while(_PLAIN)
        if plain:
            literal.add(plain, _WORD.sub(lambda found: _WORDS[found.group()], plain))
        char = yield from stream.peek()
        if not char:
            return literal.finish(is_complete=False), False
        if char in "\"'":
            raw, written, is_complete = yield from _string(stream)
            literal.add(raw, written)
            if not is_complete:
                return literal.finish(is_complete=False), False
        elif literal.depth == 0 and char in ",)]}":
            return literal.finish(is_complete=True), True
        else:
            literal.punctuate(stream.take(1))


def _string(stream: CharStream) -> Steps[tuple[str, str, bool]]:
    """Take a string: its source text, its JSON, and whether it is complete."""
    quote = (yield from stream.at(_TRIPLE)) or (yield from stream.peek())
    stream.take(len(quote))
    pieces: list[str] = []
    while True:
        marker = yield from stream.copy_until(_ENDS[quote], pieces.append)
        if marker != "\\":
            break
        pieces.append(stream.take(1))
        yield from stream.peek()
        pieces.append(stream.take(1))
    stream.take(len(marker))
    inside = "".join(pieces)
    written = json.dumps(_ESCAPE.sub(_unescape, inside), ensure_ascii=False)
    return (
        quote + inside + marker,
        _repair(written) if marker else _repair(written)[:-1],
        bool(marker),
    )


def _unescape(found: re.Match[str]) -> str:
    escape = found.group()[1:]
    if len(escape) == 1:
        return _SIMPLE.get(escape, "\\" + escape)
    number = int(escape[1:], 16)
    return chr(number) if number <= 0x10FFFF else found.group()


def _repair(text: str) -> str:
    """Join surrogate pairs, and replace a lone surrogate, which no encoding can write."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
