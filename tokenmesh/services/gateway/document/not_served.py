"""Fields that are known and not served: the document describes the values that ask for nothing."""

from collections.abc import Iterable
from typing import Any, Final

_NOTHING: Final[dict[str, dict[str, Any]]] = {
    "object": {"maxProperties": 0},
    "array": {"maxItems": 0},
    "string": {"maxLength": 0},
    "boolean": {"const": False},
    "integer": {"const": 0},
}
_ANY_NOTHING: Final[dict[str, Any]] = {"enum": [None, False, 0, "", [], {}]}
_VALUES: Final[dict[str, list[Any]]] = {
    "service_tier": [None, "auto", "default"],
    "mm_payload": [None, "tensors"],
    "function_call": [None, "none", "auto"],
    "web_search_options": [None],
    "best_of": [None, 1],
}


def narrow(properties: dict[str, Any], names: Iterable[str]) -> None:
    """Change the schemas of those fields in place."""
    for name in names:
        if name in _VALUES:
            properties[name] = {**properties[name], "enum": _VALUES[name]}
        elif name in properties and name != "modalities":
            properties[name] = _nothing(properties[name])


def _nothing(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_nothing(each) for each in schema["anyOf"]]}
    kind = schema.get("type")
    if kind is None:
        return {**schema, **_ANY_NOTHING}
    return {**schema, **_NOTHING.get(kind, {})}
