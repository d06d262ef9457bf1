"""Text without quotes as a JSON value of the type in a parameter's schema.

The order is vLLM's: null, integer, number, boolean, object, array, string. Text that fits none of
the schema's types is kept if it is valid JSON, else it becomes a string.
"""

import json
import math
import re
from typing import Any, Final

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
    """Whether the text is valid JSON; Infinity and NaN, which Python accepts, are not."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)
