"""Gemma 4 and FunctionGemma: call:name{key:value,...} between markers.

Keys have no quotes. Strings stand between two equal markers, without escapes. Other values are
JSON; one that is not valid JSON becomes a string.
"""

import json
import re
from typing import Final

from tokenmesh.services.gateway.parsers.formats import ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps
from tokenmesh.services.gateway.parsers.tools.typed_arguments import is_json

_CALL: Final = "call:"
_NAME: Final = re.compile(r"[^\s{}\[\]<>:,\"]+")
_BARE: Final = re.compile(r"[^,{}\[\]<]+")
_MAX_DEPTH: Final = 100


def _gemma(begin: str, end: str, quote: str) -> ToolFormat:
    reader = _Reader(quote)
    script = sections(Layout(calls=(begin,), ends=(end,)), reader.read_call)
    return tool_format(lambda context: script, begins=(begin,))


class _Reader:
    __slots__ = ("_call", "_quote")

    def __init__(self, quote: str) -> None:
        self._quote = Markers(quote)
        self._call = Markers(_CALL)

    def read_call(self, stream: CharStream) -> Steps[None]:
        yield from stream.skip_space()
        marker = yield from stream.at(self._call)
        stream.take(len(marker))
        name = yield from stream.read_while(_NAME)
        if not marker or not name or (yield from stream.skip_space()) != "{":
            stream.give_back()
            return
        stream.begin_call(name)
        yield from self._object(stream, 0)
        stream.give_back()

    def _object(self, stream: CharStream, depth: int) -> Steps[bool]:
        """Take an object that comes next; False if it is incomplete."""
        stream.take(1)
        opening = "{"
        while True:
            stream.keep()
            char = yield from stream.skip_space()
            if char == "," and opening != "{":
                stream.take(1)
                char = yield from stream.skip_space()
            if char == "}":
                return _close(stream, "{}" if opening == "{" else "}")
            key = yield from self._key(stream)
            if (yield from stream.skip_space()) != ":":
                if stream.is_over:
                    stream.drop_kept()
                    stream.arguments(opening + _quoted(key)[:-1] if key else "")
                return False
            stream.take(1)
            stream.drop_kept()
            stream.arguments(f"{opening}{_quoted(key)}: ")
            opening = ", "
            if not (yield from self._value(stream, depth)):
                return False

    def _list(self, stream: CharStream, depth: int) -> Steps[bool]:
        stream.take(1)
        stream.arguments("[")
        is_first = True
        while True:
            stream.keep()
            char = yield from stream.skip_space()
            if char == "," and not is_first:
                stream.take(1)
                char = yield from stream.skip_space()
            if char == "]":
                return _close(stream, "]")
            if not char or char in ",}":
                return False
            stream.drop_kept()
            stream.arguments("" if is_first else ", ")
            is_first = False
            if not (yield from self._value(stream, depth)):
                return False

    def _value(self, stream: CharStream, depth: int) -> Steps[bool]:
        char = yield from stream.skip_space()
        if (yield from stream.at(self._quote)):
            return (yield from self._string(stream))
        if char and char in "{[" and depth < _MAX_DEPTH:
            read = self._object if char == "{" else self._list
            return (yield from read(stream, depth + 1))
        bare = yield from stream.read_while(_BARE)
        if stream.is_over:
            stream.arguments(bare.rstrip())
            return False
        bare = bare.rstrip()
        stream.arguments(bare if is_json(bare) else _quoted(bare))
        return bool(bare)

    def _string(self, stream: CharStream) -> Steps[bool]:
        stream.take(len((yield from stream.at(self._quote))))
        stream.arguments('"')
        write = stream.arguments
        marker = yield from stream.copy_until(self._quote, lambda text: write(_quoted(text)[1:-1]))
        stream.take(len(marker))
        stream.arguments('"' if marker else "")
        return bool(marker)

    def _key(self, stream: CharStream) -> Steps[str]:
        quote = yield from stream.at(self._quote)
        if not quote:
            return (yield from stream.read_while(_NAME))
        stream.take(len(quote))
        key, quote = yield from stream.read_until(self._quote)
        stream.take(len(quote))
        return key


def _close(stream: CharStream, written: str) -> bool:
    stream.take(1)
    stream.drop_kept()
    stream.arguments(written)
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


GEMMA4: Final = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA: Final = _gemma("<start_function_call>", "<end_function_call>", "<escape>")
