"""Bare text becomes the JSON that a parameter's schema asks for."""

from typing import Any

import pytest

from tokenmesh.services.gateway.parsers.tools.typed_arguments import to_json, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "Place": {"type": "object"},
        "a/b": {"enum": ["x", "y"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Tree"}]},
        "Many": {"anyOf": [{"$ref": "#/$defs/Many"}, {"$ref": "#/$defs/More"}] * 20},
        "More": {"oneOf": [{"$ref": "#/$defs/Many"}, {"type": "null"}] * 20},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, {"string"}),
        ({}, {"string"}),
        ([], {"string"}),
        ({"type": 5, "enum": "x", "anyOf": 1, "$ref": 2}, {"string"}),
        ({"type": "integer"}, {"integer"}),
        ({"type": "Int"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number", "nullable": True}, {"number", "null"}),
        ({"enum": ["a", 1, 2.5, True, None, {}, []]},
         {"string", "integer", "number", "boolean", "null", "object", "array"}),
        ({"const": 3}, {"integer"}),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {}]}]}, {"integer", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, {"object"}),
        ({"$ref": "#/$defs/a~1b"}, {"string"}),
        ({"$ref": "#/$defs/Loop"}, {"string"}),
        ({"$ref": "#/$defs/Tree"}, {"integer"}),
        ({"$ref": "#/$defs/Many"}, {"null"}),
        ({"$ref": "#/$defs/Missing/deeper"}, {"string"}),
        ({"$ref": "http://elsewhere/schema"}, {"string"}),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "json"),
    [
        ("12", "string", '"12"'),
        (" a\n", "string", '" a\\n"'),
        ('{"a": 1}', "string", '"{\\"a\\": 1}"'),
        (" 12 ", "integer", "12"),
        ("007", "integer", "7"),
        ("5.5", "integer", "5.5"),
        ("twelve", "integer", '"twelve"'),
        ("9" * 5000, "integer", f'"{"9" * 5000}"'),
        ("1e3", "number", "1e3"),
        (".5", "number", "0.5"),
        ("inf", "number", '"inf"'),
        ("NaN", "number", '"NaN"'),
        ("[1e5, NaN]", "array", '"[1e5, NaN]"'),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("null", "null", "null"),
        ("None", "string null", "null"),
        ("nothing", "string null", '"nothing"'),
        ("5", "string integer", "5"),
        ('{"a": "\\ud800"}', "object", '{"a": "\\ud800"}'),
        ("{'a': 1}", "object", "\"{'a': 1}\""),
        ("[1, 2", "array", '"[1, 2"'),
        ("[1]", "object", "[1]"),
        ("[1]", "string array", "[1]"),
        ("[see]", "string array", '"[see]"'),
        ("7", "string array", '"7"'),
        ("[" * 100_000, "array", f'"{"[" * 100_000}"'),
        ("", "integer", '""'),
        ("{}", "any", "{}"),
        ("x", "any", '"x"'),
    ],
)
def test_text_as_json(text: str, types: str, json: str) -> None:
    assert to_json(text, frozenset(types.split())) == json
