"""Schemas as clients' libraries write them, and refusals that say why."""

import json
import time
from typing import Any

import pytest

from tests.engine.test_exact_regex import BACKENDS, EOS
from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.shared.messages.structured import Structured, StructuredKind

UNKNOWN = ["binary", "path", "password", "uuid4", "iri", "decimal", "int64", "byte", "unknown", "x"]


def texts_of(schema: Any, *texts: str) -> list[list[str]]:
    """For each library that accepts the schema, the texts that it allows."""
    found = []
    for backend in BACKENDS:
        try:
            data = backend.compile(Structured(kind="json", text=json.dumps(schema)))
        except CannotCompile:
            continue
        matchers = [(text, backend.load(data).start()) for text in texts]
        found.append(
            [text for text, m in matchers if all(m.accept(i) for i in [*text.encode(), EOS])]
        )
    assert found
    return found


def reasons(kind: StructuredKind, text: str) -> str:
    found = []
    for backend in BACKENDS:
        with pytest.raises(CannotCompile) as caught:
            backend.compile(Structured(kind=kind, text=text))
        found.append(caught.value.message)
    return "; ".join(found)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_format_says_nothing(name: str) -> None:
    for found in texts_of({"type": "string", "format": name}, '"a"', "1"):
        assert found == ['"a"']
    within = {"type": "object", "properties": {"format": {"type": "integer", "format": name}}}
    for found in texts_of({**within, "required": ["format"]}, '{"format":1}', "{}"):
        assert found == ['{"format":1}']


def tags(schema: Any) -> list[Any]:
    """A schema at each place of structural tags that takes one."""
    old = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    kinds = ("json_schema", "qwen_xml_parameter")
    formats = [{"type": kind, "json_schema": schema} for kind in kinds]
    nested = {"type": "or", "elements": [*formats, {"type": "const_string", "value": "a"}]}
    return [old, *({"type": "structural_tag", "format": each} for each in (*formats, nested))]


@pytest.mark.parametrize("number", range(4))
def test_schemas_within_structural_tags_are_held_to_the_same_rules(number: int) -> None:
    def compiled(named: dict[str, Any]) -> bytes:
        schema = {"type": "object", "properties": {"a": named}, "required": ["a"]}
        text = json.dumps(tags(schema)[number])
        return BACKENDS[0].compile(Structured(kind="structural_tag", text=text))

    assert compiled({"type": "string", "format": "unknown"}) == compiled({"type": "string"})
    # what looks like a part of a tag is data
    assert compiled({"const": {"type": "regex", "pattern": "a++", "json_schema": 1}})
    with pytest.raises(CannotCompile, match="does not follow pattern to the letter"):
        compiled({"type": "string", "pattern": "a"})


def test_a_known_format_is_followed() -> None:
    (found,) = texts_of({"type": "string", "format": "date"}, '"2026-11-28"', '"a"')
    assert found == ['"2026-11-28"']


def test_data_that_looks_like_a_format_is_data() -> None:
    for found in texts_of({"const": {"format": "x"}}, '{"format":"x"}', "{}"):
        assert found == ['{"format":"x"}']


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json", '{"type":"string","pattern":"^(?!x)[a-z]+$"}', "look-ahead"),
        ("json", '{"type":"string","pattern":"("}', "unclosed group"),
        ("json", '{"type":"string","pattern":"(?P<a>b"}', "unclosed group"),
        ("json", '{"type":"string","pattern":"\\\\y"}', "unrecognized escape"),
        ("regex", "(?=a)a", "look-around"),
    ],
)
def test_a_refusal_says_why(kind: StructuredKind, text: str, why: str) -> None:
    assert why in reasons(kind, text)


@pytest.mark.parametrize("schema", [{"type": []}, {"enum": []}, {"anyOf": []}])
def test_a_schema_that_nothing_satisfies_is_refused(schema: Any) -> None:
    assert reasons("json", json.dumps(schema))


LONG = "a" * 100_000


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"const": LONG}),
        ("json", {"enum": ["b", {"c": LONG}]}),
        ("json", {"type": "object", "properties": {LONG: {"type": "integer"}}}),
        ("choice", ["b", LONG]),
    ],
)
def test_long_constants_take_no_seconds(kind: StructuredKind, value: Any) -> None:
    began_s, num_taken = time.process_time(), 0
    for backend in BACKENDS:
        try:
            backend.compile(Structured(kind=kind, text=json.dumps(value)))
            num_taken += 1
        except CannotCompile:
            pass
    assert num_taken == 1
    assert time.process_time() - began_s < 2
