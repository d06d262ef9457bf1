"""TypedArguments: the arguments of a call whose parameters are text without quotes.

A parameter that can only be a string is written chunk by chunk, any other when it is complete,
since its type is unknown until then. Parameters that the model did not finish are written
incomplete.
"""

import enum
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BOOLEANS: Final = {"true": "true", "1": "true", "false": "false", "0": "false"}
_UNIONS: Final = ("anyOf", "oneOf", "allOf")
_ALIASES: Final = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; string if unknown. `root` resolves references."""
    types: set[str] = set()
    # Schemas may be recursive: each reference is followed once.
    seen: set[str] = set()
    branches = [schema]
    while branches:
        branch = branches.pop()
        if isinstance(branch, dict):
            types |= _own_types(branch)
            branches += _branches(branch, root, seen)
    return frozenset(types) or frozenset({"string"})


def _own_types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    values = schema.get("enum")
    types |= {_type_of(value) for value in (values if isinstance(values, list) else [])}
    if "const" in schema:
        types.add(_type_of(schema["const"]))
    if schema.get("nullable") is True and types:
        types.add("null")
    return types


def _branches(schema: dict[str, Any], root: dict[str, Any], seen: set[str]) -> list[Any]:
    unions = [schema[key] for key in _UNIONS if isinstance(schema.get(key), list)]
    branches = [branch for union in unions for branch in union]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        branches.append(_resolve(reference, root))
    return branches


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        if not isinstance(found, dict):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case dict():
            return "object"
        case list():
            return "array"
    return "string"


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text for a value that was written without quotes."""
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "integer" in types and (integer := _integer(bare)) is not None:
        return integer
    if "number" in types and (number := _number(bare)) is not None:
        return number
    if "boolean" in types and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    if "string" in types and not (types & {"object", "array"} and bare[:1] in ("{", "[")):
        return json.dumps(text, ensure_ascii=False)
    return bare if is_json(bare) else json.dumps(text, ensure_ascii=False)


def _integer(text: str) -> str | None:
    try:
        return str(int(text))
    except ValueError:
        return None


def _number(text: str) -> str | None:
    if _NUMBER.fullmatch(text):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


def is_json(text: str) -> bool:
    """Return whether the text is valid JSON; Infinity and NaN, which Python accepts, are not."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)


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
