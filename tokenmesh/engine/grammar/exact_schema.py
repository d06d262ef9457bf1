"""Know which JSON schemas xgrammar follows to the letter, and in a bounded time.

What it does not know it ignores, and its output would not be valid; llguidance refuses instead.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from tokenmesh.shared.json_schema import changed_schema

KNOWN_FORMATS: Final = frozenset(
    (
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    )
)
"""Formats that llguidance follows."""
_ANNOTATIONS: Final = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "strict",
    ]
)
_BY_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    # strings of a bounded length it lets hold bare control characters
    "string": frozenset(),
    "integer": frozenset(("minimum", "maximum")),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SHAPES: Final[dict[str, type]] = {
    "properties": dict,
    "$defs": dict,
    "definitions": dict,
    "required": list,
    "anyOf": list,
}
_MAX_COUNT: Final = 256
"""Longer repetitions, and more properties, take it seconds and gigabytes."""
_MAX_CHARS: Final = 4096
"""It bounds the characters of a constant or a name."""
_MAX_INTEGER: Final = 1 << 53


def inexact_keyword(schema: Any) -> str | None:
    """The first keyword that makes a schema one for another backend; None when all is well."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if node is True:
            continue
        if not isinstance(node, dict):
            return "a schema that is not an object"
        keyword = _inexact(node)
        if keyword is not None:
            return keyword
        nodes.extend(_children(node))
    return None


def _children(node: dict[str, Any]) -> list[Any]:
    children = [node[name] for name in ("items", "additionalProperties") if node.get(name)]
    children += node.get("anyOf", [])
    for name in ("properties", "$defs", "definitions"):
        children += node.get(name, {}).values()
    return children


def _inexact(node: dict[str, Any]) -> str | None:
    for name, shape in _SHAPES.items():
        if not isinstance(node.get(name, shape()), shape):
            return name
    keywords = frozenset(node) - _ANNOTATIONS
    for alone in ("$ref", "anyOf"):
        if alone in keywords:
            return _beyond(keywords, frozenset((alone,))) or _empty_choice(node)
    kind = node.get("type")
    if keywords & {"enum", "const"}:
        return _inexact_enum(node, keywords)
    if isinstance(kind, list):
        if not kind:
            # no value has none of the types; xgrammar lets any value have it
            return "type"
        return _beyond(keywords, frozenset(("type",)))
    if kind is None:
        return _beyond(keywords, frozenset())
    if kind not in _BY_TYPE:
        return "type"
    return _beyond(keywords, _BY_TYPE[kind] | {"type"}) or _inexact_count(node)


def _empty_choice(node: dict[str, Any]) -> str | None:
    """No value satisfies an empty `anyOf`; xgrammar lets it stand for an empty text."""
    return None if node.get("anyOf", True) else "anyOf"


def _beyond(keywords: frozenset[str], known: frozenset[str]) -> str | None:
    return min(keywords - known, default=None)


def _inexact_enum(node: dict[str, Any], keywords: frozenset[str]) -> str | None:
    """A type next to the values must be that of all of them."""
    values = [node["const"]] if "const" in node else node["enum"]
    kind = node.get("type")
    if not isinstance(values, list) or not values or {"enum", "const"} <= keywords:
        return "enum"
    if is_long(values):
        return "enum"
    if kind is not None:
        types = _PYTHON_TYPES.get(kind, ()) if isinstance(kind, str) else ()
        is_number = bool not in types
        if not all(
            isinstance(value, types) and not (is_number and isinstance(value, bool))
            for value in values
        ):
            return "enum"
    return _beyond(keywords, frozenset(("enum", "const", "type")))


def is_long(values: Iterable[Any]) -> bool:
    """Return whether xgrammar takes seconds for one of the values: it takes a time quadratic in
    one.
    """
    return any(len(json.dumps(value)) > _MAX_CHARS for value in values)


def _inexact_count(node: dict[str, Any]) -> str | None:
    for low, high, largest in (
        ("minItems", "maxItems", _MAX_COUNT),
        ("minimum", "maximum", _MAX_INTEGER),
    ):
        bounds = [node[name] for name in (low, high) if name in node]
        is_whole = all(isinstance(bound, int) and abs(bound) <= largest for bound in bounds)
        if not is_whole or bounds != sorted(bounds):
            return low if low in node else high
    properties = node.get("properties", {})
    if len(properties) > _MAX_COUNT // 4 or is_long(properties):
        return "properties"
    if not all(isinstance(name, str) and name in properties for name in node.get("required", ())):
        return "required"
    if properties and node.get("additionalProperties") not in (None, False):
        return "additionalProperties"
    return None


def without_unknown_formats(schema: Any) -> Any:
    """A copy of a schema. A format is an annotation: one that is not known says nothing."""
    return changed_schema(schema, _without_format)


def _without_format(node: dict[str, Any]) -> dict[str, Any]:
    given = node.get("format")
    if isinstance(given, str) and given not in KNOWN_FORMATS:
        del node["format"]
    return node
