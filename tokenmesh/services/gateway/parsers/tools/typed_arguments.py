"""TypedArguments: the arguments of a call whose parameters are text without quotes.

A parameter that can only be a string is written chunk by chunk, any other when it is complete,
since its type is unknown until then. Parameters that the model did not finish are written
incomplete.
"""

import enum
import json
from collections.abc import Callable
from typing import Any, Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.services.gateway.parsers.tools.schema_values import to_json, types_of
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps

STRING: Final = frozenset({"string"})


class Trim(enum.Enum):
    """The whitespace around a value that belongs to the format."""

    NOTHING = enum.auto()
    NEWLINE = enum.auto()
    """One newline at each end."""
    SPACE = enum.auto()
    """All whitespace."""


class TypedArguments:
    """Writes the arguments object of one call."""

    __slots__ = ("_is_open", "_properties", "_root", "_stream")

    def __init__(self, stream: CharStream, tools: tuple[ToolSchema, ...], name: str) -> None:
        self._stream = stream
        self._root = next((tool.parameters for tool in tools if tool.name == name), {})
        properties = self._root.get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._is_open = False

    def types(self, key: str) -> frozenset[str]:
        """The types that the schema allows for a parameter."""
        return types_of(self._properties.get(key), self._root)

    def begin(self, key: str) -> None:
        """Write a parameter's name; its value comes next."""
        opening = ", " if self._is_open else "{"
        self._is_open = True
        self._stream.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")

    def cut(self, key: str) -> None:
        """Write a parameter's incomplete name: the text has ended within it."""
        if key:
            opening = ", " if self._is_open else "{"
            self._stream.arguments(opening + json.dumps(key, ensure_ascii=False)[:-1])

    def copy_value(self, types: frozenset[str], ends: Markers, trim: Trim) -> Steps[str]:
        """Take a value; returns the marker after it, which is not taken, empty at the end."""
        if trim is Trim.SPACE:
            yield from self._stream.skip_space()
        elif trim is Trim.NEWLINE and (yield from self._stream.peek()) == "\n":
            self._stream.take(1)
        if types == STRING:
            return (yield from self._copy_string(ends, trim))
        text, marker = yield from self._stream.read_until(ends)
        trimmed = _trim_end(text, trim)
        self._stream.arguments(to_json(trimmed, types) if marker else trimmed)
        return marker

    def end(self) -> None:
        """Write the end of a complete call."""
        self._stream.arguments("}" if self._is_open else "{}")

    def _copy_string(self, ends: Markers, trim: Trim) -> Steps[str]:
        self._stream.arguments('"')
        writer = _StringWriter(self._stream.arguments, trim)
        marker = yield from self._stream.copy_until(ends, writer.write)
        if marker:
            self._stream.arguments('"')
        return marker


class _StringWriter:
    """Writes the inside of a JSON string; holds back whitespace that may be at its end."""

    __slots__ = ("_held", "_trim", "_write")

    def __init__(self, write: Callable[[str], None], trim: Trim) -> None:
        self._write = write
        self._trim = trim
        self._held: list[str] = []

    def write(self, text: str) -> None:
        solid = _trim_end(text, self._trim)
        if solid or self._trim is Trim.NEWLINE:
            self._put("".join(self._held) + solid)
            self._held.clear()
        if len(solid) < len(text):
            self._held.append(text[len(solid) :])

    def _put(self, text: str) -> None:
        if text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])


def _trim_end(text: str, trim: Trim) -> str:
    if trim is Trim.SPACE:
        return text.rstrip()
    return text.removesuffix("\n") if trim is Trim.NEWLINE else text
