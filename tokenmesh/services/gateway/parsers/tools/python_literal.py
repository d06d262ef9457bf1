"""Python literals as JSON, read as they come: no eval, no ast.

Strings with their escapes, numbers, True, False, None (and JSON's own names), lists, tuples and
dictionaries. Anything else, such as a set or an expression, becomes a string with its text.
"""

import json
import re
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.schema_values import is_json, to_json
from tokenmesh.services.gateway.parsers.tools.source import CharSource, Steps

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
    """One literal's own text and what there is of its JSON."""

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


def read_literal(source: CharSource) -> Steps[tuple[str, bool]]:
    """Takes a literal up to the comma or bracket after it; its JSON, and whether it is complete.

    Of one that the text's end breaks off the JSON is what there is of it.
    """
    literal = _Literal()
    while True:
        plain = yield from source.read_while(_PLAIN)
        if plain:
            literal.add(plain, _WORD.sub(lambda found: _WORDS[found.group()], plain))
        char = yield from source.peek()
        if not char:
            return literal.finish(is_complete=False), False
        if char in "\"'":
            raw, written, is_complete = yield from _string(source)
            literal.add(raw, written)
            if not is_complete:
                return literal.finish(is_complete=False), False
        elif literal.depth == 0 and char in ",)]}":
            return literal.finish(is_complete=True), True
        else:
            literal.punctuate(source.take(1))


def _string(source: CharSource) -> Steps[tuple[str, str, bool]]:
    """Takes a string: its text, its JSON, and whether it is complete."""
    quote = (yield from source.at(_TRIPLE)) or (yield from source.peek())
    source.take(len(quote))
    pieces: list[str] = []
    while True:
        marker = yield from source.copy_until(_ENDS[quote], pieces.append)
        if marker != "\\":
            break
        pieces.append(source.take(1))
        yield from source.peek()
        pieces.append(source.take(1))
    source.take(len(marker))
    inside = "".join(pieces)
    written = json.dumps(_ESCAPE.sub(_unescape, inside), ensure_ascii=False)
    return quote + inside + marker, _mend(written) if marker else _mend(written)[:-1], bool(marker)


def _unescape(found: re.Match[str]) -> str:
    escape = found.group()[1:]
    if len(escape) == 1:
        return _SIMPLE.get(escape, "\\" + escape)
    number = int(escape[1:], 16)
    return chr(number) if number <= 0x10FFFF else found.group()


def _mend(text: str) -> str:
    """Two halves of a character joined; a lone half, which no encoding can write, replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
