"""Keywords that xgrammar would silently ignore are never given to it."""

from typing import Any

import pytest

from tokenmesh.engine.grammar.exact_schema import inexact_keyword

OBJECT: dict[str, Any] = {
    "type": "object",
    "title": "t",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 5}, "b": {"$ref": "#"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT,
        {},
        {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": 9},
        {"anyOf": [OBJECT, {"type": "null"}], "description": "d"},
        {"enum": ["a", 1, None]},
        {"type": "string", "enum": ["a"]},
        {"type": ["string", "null"]},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "number"}}},
        {"type": "object", "properties": {"pattern": {"type": "string"}}},
    ],
)
def test_plain_schemas_are_for_xgrammar(schema: dict[str, Any]) -> None:
    assert inexact_keyword(schema) is None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "maxLength": 3}, "maxLength"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "number", "minimum": 3}, "minimum"),
        ({"type": "integer", "minimum": 0.5}, "minimum"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"type": "integer", "maximum": 1 << 60}, "maximum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "maxItems": 10_000}, "maxItems"),
        ({"type": "array", "prefixItems": []}, "prefixItems"),
        ({"type": "object", "required": ["x"]}, "required"),
        ({**OBJECT, "additionalProperties": True}, "additionalProperties"),
        ({**OBJECT, "minProperties": 1}, "minProperties"),
        ({"properties": {}}, "properties"),
        ({"type": "string", "enum": [1]}, "enum"),
        ({"type": "integer", "enum": [True]}, "enum"),
        ({"enum": []}, "enum"),
        ({"anyOf": [{}], "type": "string"}, "type"),
        ({"anyOf": []}, "anyOf"),
        ({"anyOf": {"type": "string"}}, "anyOf"),
        ({"type": "object", "properties": ["a"]}, "properties"),
        ({"type": "object", "properties": {"a": {}}, "required": "a"}, "required"),
        ({"type": "object", "properties": {"a": {}}, "required": [["a"]]}, "required"),
        ({"$defs": 5}, "$defs"),
        ({"oneOf": [{}]}, "oneOf"),
        ({"$ref": "#", "type": "string"}, "type"),
        ({"type": "array", "items": {"not": {}}}, "not"),
        ({"$defs": {"x": {"multipleOf": 2}}, "$ref": "#/$defs/x"}, "multipleOf"),
        ({"type": "anything"}, "type"),
        ({"type": "object", "properties": {"a": False}}, "a schema that is not an object"),
        ({"type": "object", "properties": {str(n): {} for n in range(100)}}, "properties"),
    ],
)
def test_all_others_are_not(schema: dict[str, Any], keyword: str) -> None:
    assert inexact_keyword(schema) == keyword
