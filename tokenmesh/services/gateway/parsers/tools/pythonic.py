"""Calls written as Python: [name(key=value, ...), name(...)], or one a line in Olmo 3.

Only keyword arguments are allowed, and a list counts only at the beginning of the text: "[1]" and
"[see](there)" are content. A value that is not a literal becomes a string with its source text.
Text after a call that is not a call is content.
"""

import json
import re
from typing import Final

from tokenmesh.services.gateway.parsers.formats import NAME
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps, copy_content
from tokenmesh.services.gateway.parsers.tools.typed_arguments import (
    TypedArguments,
    is_json,
    to_json,
)

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


_WORD_CHARS: Final = re.compile(r"[\w.]+")
_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY: Final = re.compile(r"[^\W\d]\w*")


def read_python_calls(stream: CharStream, is_list: bool) -> Steps[None]:
    """Take calls, and the brackets and commas of a list."""
    before = stream.num_calls
    while True:
        stream.keep()
        char = yield from stream.skip_space()
        has_calls = stream.num_calls > before
        if is_list and char == "]" and has_calls:
            stream.drop_kept()
            stream.take(1)
            return
        if is_list and char == ("," if has_calls else "["):
            stream.take(1)
            yield from stream.skip_space()
        if not (yield from _call(stream)):
            break
    stream.give_back()


def _call(stream: CharStream) -> Steps[bool]:
    """Take a call; False if there is none, or if no call can follow."""
    name = yield from stream.read_while(_WORD_CHARS)
    if not _NAME.fullmatch(name) or (yield from stream.peek()) != "(":
        return False
    stream.take(1)
    key = yield from _keyword(stream)
    if key is None:
        return False
    stream.begin_call(name)
    arguments = TypedArguments(stream, (), name)
    while key:
        arguments.begin(key)
        value, is_complete = yield from read_literal(stream)
        stream.arguments(value)
        if not is_complete:
            return False
        stream.keep()
        if (yield from stream.peek()) == ",":
            stream.take(1)
            key = yield from _keyword(stream)
        else:
            key = ""
        if key is not None:
            stream.drop_kept()
    return (yield from _end(stream, arguments))


def _end(stream: CharStream, arguments: TypedArguments) -> Steps[bool]:
    char = yield from stream.peek()
    if not char:
        arguments.cut(stream.pop_kept().lstrip(", \n"))
        return False
    arguments.end()
    if char != ")" or stream.is_keeping:
        return False
    stream.take(1)
    return True


def _keyword(stream: CharStream) -> Steps[str | None]:
    """Take `key=`; returns empty if a bracket ends the call, None if neither follows."""
    if (yield from stream.skip_space()) == ")":
        return ""
    key = yield from stream.read_while(_WORD_CHARS)
    char = yield from stream.skip_space()
    if not _KEY.fullmatch(key) or char != "=":
        return None
    stream.take(1)
    return key


def _starting_with_list(rest: Script) -> Script:
    def script(stream: CharStream) -> Steps[None]:
        stream.keep()
        if (yield from stream.skip_space()) == "[":
            yield from read_python_calls(stream, is_list=True)
        stream.give_back()
        yield from rest(stream)

    return script


def _blocks(begin: str, end: str, *, is_list: bool) -> Script:
    return sections(
        Layout(calls=(begin,), ends=(end,)), lambda stream: read_python_calls(stream, is_list)
    )


_PYTHONIC: Final = _starting_with_list(copy_content)
PYTHONIC: Final = tool_format(
    lambda context: _PYTHONIC, needs_special_tokens=False, begins=(f"[{NAME}(",)
)

_LLAMA4: Final = _starting_with_list(_blocks("<|python_start|>", "<|python_end|>", is_list=True))
LLAMA4_PYTHONIC: Final = tool_format(
    lambda context: _LLAMA4, begins=("<|python_start|>", f"[{NAME}(")
)

_LFM2: Final = _blocks("<|tool_call_start|>", "<|tool_call_end|>", is_list=True)
LFM2: Final = tool_format(lambda context: _LFM2, begins=("<|tool_call_start|>",))

_OLMO3: Final = _blocks("<function_calls>", "</function_calls>", is_list=False)
OLMO3: Final = tool_format(
    lambda context: _OLMO3, needs_special_tokens=False, begins=("<function_calls>",)
)
