"""response_format and structured_outputs become one constraint, or an error that names a field."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.openai.structured import (
    ResponseFormat,
    StructuredOutputs,
    read_structured,
)
from tokenmesh.services.gateway.apis.openai.structured_limits import check_structured
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured

LIMITS = GatewaySettings(
    max_schema_bytes=4000,
    max_schema_depth=12,
    max_schema_nodes=200,
    max_structured_choices=10,
    max_grammar_bytes=300,
    max_regex_chars=100,
    max_regex_depth=4,
    max_regex_repetitions=1000,
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def of_format(**fields: Any) -> Structured | None:
    structured = read_structured(ResponseFormat.model_validate(fields), None)
    if structured is not None:
        check_structured(structured, LIMITS)
    return structured


def of_outputs(**fields: Any) -> Structured:
    structured = read_structured(None, StructuredOutputs.model_validate(fields))
    assert structured is not None
    check_structured(structured, LIMITS)
    return structured


def refusal(**fields: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        of_outputs(**fields)
    return caught.value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_the_format_text_has_no_constraint() -> None:
    assert of_format(type="text") is None
    assert read_structured(None, None) is None


def test_a_json_schema_is_followed_strict_or_not() -> None:
    for strict in (True, False, None):
        given = {"name": "n", "schema": SCHEMA, "strict": strict}
        structured = of_format(type="json_schema", json_schema=given)
        assert structured is not None
        assert structured.kind == "json"
        assert json.loads(structured.text) == SCHEMA
        assert structured.field == "response_format.json_schema.schema"


def test_a_json_object_needs_no_schema() -> None:
    assert of_format(type="json_object") == Structured(kind="json_object", field="response_format")


def test_a_structural_tag_comes_in_two_forms() -> None:
    newer = of_format(type="structural_tag", format={"type": "any_text"})
    assert newer is not None
    assert json.loads(newer.text) == {"type": "structural_tag", "format": {"type": "any_text"}}
    structures = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
    older = of_format(type="structural_tag", structures=structures, triggers=["<f>"])
    assert older is not None
    assert json.loads(older.text)["triggers"] == ["<f>"]


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {"name": "n", "schema": {}}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": []},
        {"type": "text", "format": {}},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
        {"type": "text", "extra": 1},
    ],
)
def test_an_incomplete_format_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(fields)


def test_options_of_json_are_part_of_the_constraint() -> None:
    structured = of_outputs(
        json=SCHEMA,
        disable_any_whitespace=True,
        disable_additional_properties=True,
        whitespace_pattern=" ?",
    )
    assert not structured.any_whitespace
    assert not structured.additional_properties
    assert structured.whitespace_pattern == " ?"
    assert structured.field == "structured_outputs.json"
    assert of_outputs(json=json.dumps(SCHEMA)).text == json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "n\u00f6"]}, "choice", '["yes", "n\\u00f6"]'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_object": True}, "json_object", ""),
        ({"structural_tag": '{"format": {}}'}, "structural_tag", '{"format": {}}'),
    ],
)
def test_each_kind_of_output(fields: dict[str, Any], kind: str, text: str) -> None:
    structured = of_outputs(**fields)
    assert (structured.kind, structured.text) == (kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json_object": False},
        {"regex": "a", "choice": ["b"]},
        {"regex": ""},
        {"choice": []},
        {"choice": [1]},
        {"backend": "x", "regex": "a"},
    ],
)
def test_exactly_one_constraint_is_accepted(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(fields)


def test_both_fields_together_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_structured(ResponseFormat(type="json_object"), StructuredOutputs(regex="a"))
    assert caught.value.param == "structured_outputs"
    text = ResponseFormat(type="text")
    assert read_structured(text, StructuredOutputs(regex="a")) is not None


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"json": nested(5)}, "json", None),
        ({"json": nested(13)}, "json", "deep"),
        ({"json": {"enum": list(range(150))}}, "json", None),
        ({"json": {"enum": list(range(250))}}, "json", "parts"),
        ({"json": {"enum": ["x" * 5000]}}, "json", "bytes"),
        ({"json": "[1]"}, "json", "object"),
        ({"json": "{"}, "json", "JSON"),
        ({"json": "[" * 3999}, "json", "JSON"),
        ({"json": {"type": "string", "pattern": "(" * 6 + ")" * 6}}, "json", "pattern"),
        ({"json": {"properties": {"pattern": {"type": "string"}}}}, "json", None),
        ({"regex": "a" * 101}, "regex", "characters"),
        ({"json": r'{"const": "\ud800"}'}, "json", "surrogate"),
        ({"json": r'{"const": "\ud83d\ude00"}'}, "json", None),
        ({"regex": "a\\"}, "regex", "ends with a backslash"),
        ({"regex": "[a\\"}, "regex", "ends with a backslash"),
        ({"regex": "((((a))))"}, "regex", None),
        ({"regex": "(((((a)))))"}, "regex", "deep"),
        ({"regex": r"\(\(\(\(\(\(a[(((((]"}, "regex", None),
        ({"regex": "a{1,1000}"}, "regex", None),
        ({"regex": "a{1,100000}"}, "regex", "multiply"),
        ({"regex": "a{99999999999999999999}"}, "regex", "multiply"),
        ({"regex": "((a{100}){10}){2}"}, "regex", "multiply"),
        ({"regex": "a{100}{10}{2}"}, "regex", "multiply"),
        ({"regex": "(a{100}){10}?{2}"}, "regex", "multiply"),
        ({"regex": "a" + "{99}" * 20}, "regex", "multiply"),
        ({"regex": "a{100}{10}b{2}"}, "regex", None),
        ({"regex": "a{100}b{100}c{100}"}, "regex", None),
        ({"regex": "(x{100}|y{20}){11}"}, "regex", "multiply"),
        ({"regex": r"a\{10000}"}, "regex", None),
        ({"choice": ["a"] * 11}, "choice", "choices"),
        ({"choice": ["a", ""]}, "choice", "empty"),
        ({"grammar": "x" * 301}, "grammar", "bytes"),
        ({"structural_tag": "x"}, "structural_tag", "JSON"),
        ({"json_object": True, "whitespace_pattern": "a" * 101}, "json_object", "characters"),
    ],
)
def test_limits(fields: dict[str, Any], param: str, reason: str | None) -> None:
    if reason is None:
        assert of_outputs(**fields)
        return
    error = refusal(**fields)
    assert error.param == f"structured_outputs.{param}"
    assert error.message.startswith(f"structured_outputs.{param}: ")
    assert reason in error.message


LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}},
}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/list", "$defs": {"list": LIST}}, None),
        ({"$ref": "#/$defs/list", "$defs": {"list": LIST | {"required": ["next"]}}}, "without end"),
        ({"$ref": "#"}, "without end"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "without end",
        ),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "without end"),
        (
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
            None,
        ),
        ({"allOf": [{"$ref": "#"}]}, "without end"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://example.com/schema"}, "outside"),
        ({"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "null"}}}, None),
        ({"properties": {"x": {"$ref": "#/prefixItems/1"}}, "prefixItems": [{}, {}]}, None),
        *(
            ({"properties": {"x": {word: {"$ref": "#/nowhere"}}}}, None)
            for word in ("default", "const", "example")
        ),
        *(({word: [{"$ref": "#/nowhere"}]}, None) for word in ("enum", "examples")),
        ({"properties": {"default": {"$ref": "#/nowhere"}}}, "nowhere"),
        ({"$defs": {"const": {"$ref": "#/nowhere"}}}, "nowhere"),
    ],
)
def test_references(schema: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert of_outputs(json=schema)
    else:
        assert reason in refusal(json=schema).message


def test_references_in_the_schemas_of_a_structural_tag_are_checked() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    assert of_outputs(structural_tag=json.dumps(tag))
    del schema["$defs"]
    assert "matches nothing" in refusal(structural_tag=json.dumps(tag)).message


def _check_s(schema: dict[str, Any]) -> float:
    structured = Structured(kind="json", text=json.dumps(schema), field="f")
    began_s = time.process_time()
    with suppress(InvalidInput):
        check_structured(structured, GatewaySettings())
    return time.process_time() - began_s


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"anyOf": [{"pattern": "{" + "1" * 4000} for _ in range(n)]},
        lambda n: {"anyOf": [{"pattern": "{1,1" * 1000} for _ in range(n)]},
        lambda n: {"anyOf": [{"pattern": "[" * 4000} for _ in range(n)]},
        lambda n: {"$defs": {"a": {}}, "anyOf": [{"$ref": "#/$defs/a"} for _ in range(100 * n)]},
        lambda n: {"a": {"a": {}}, "anyOf": [{"$ref": "#" + "/a" * 1900} for _ in range(n)]},
        lambda n: {"required": ["a"] * 200 * n, "type": "object", "properties": {"a": {}}},
    ],
)
def test_the_time_of_a_check_grows_with_the_schema(make: Any) -> None:
    small, large = make(15), make(60)
    assert min(_check_s(large) for _ in range(3)) < 12 * min(_check_s(small) for _ in range(3))


def test_digits_without_a_brace_are_scanned_once() -> None:
    def best_s(length: int) -> float:
        return min(_check_s({"pattern": "{" + "1" * length}) for _ in range(5))

    assert best_s(4000) < 10 * best_s(500) + 0.001


def test_repetitions_of_repetitions_multiply() -> None:
    assert "multiply to 1000000" in refusal(regex="a{1000}{1000}").message
    assert "multiply to 8000" in refusal(regex="(?:a{20}b{20}){20}{20}").message
    of_outputs(regex="a{10}b{10}{10}")
