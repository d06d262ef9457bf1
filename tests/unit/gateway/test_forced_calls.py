"""The schema of a forced call accepts such calls and nothing else."""

import json
from typing import Any

import jsonschema
import pytest

from tokenmesh.services.gateway.apis.openai.tools import named_call, required_calls
from tokenmesh.services.gateway.parsers.parser import ToolSchema

TREE = ToolSchema(
    name="tree",
    parameters={
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/Leaf"}, "child": {"$ref": "#"}},
        "required": ["leaf"],
        "$defs": {"Leaf": {"type": "integer"}},
    },
)
NOTE = ToolSchema(
    name="note",
    parameters={
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/Leaf"}},
        "$defs": {"Leaf": {"type": "string"}},
    },
)


def accepts(schema: str, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(schema)).is_valid(value))


def call(name: str, parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [
        ([call("tree", {"leaf": 1})], True),
        ([call("tree", {"leaf": 1, "child": {"leaf": 2}}), call("note", {"leaf": "x"})], True),
        ([call("tree", {"leaf": 1, "child": {"leaf": "x"}})], False),
        ([call("tree", {})], False),
        ([call("note", {"leaf": 1})], False),
        ([call("other", {})], False),
        ([{"name": "note"}], False),
        ([{**call("note", {}), "more": 1}], False),
        ([], False),
        (call("note", {}), False),
    ],
)
def test_a_list_of_declared_calls_is_required(calls: Any, is_right: bool) -> None:
    constraint = required_calls([TREE, NOTE], max_calls=9)
    assert accepts(constraint.text, calls) is is_right
    assert (constraint.kind, constraint.field) == ("json", "tools")


@pytest.mark.parametrize("most", [1, 3])
def test_a_list_of_calls_is_bounded(most: int) -> None:
    schema = required_calls([NOTE], max_calls=most).text
    assert accepts(schema, [call("note", {})] * most)
    assert not accepts(schema, [call("note", {})] * (most + 1))


def test_the_arguments_of_a_named_function() -> None:
    schema = named_call(TREE).text
    assert accepts(schema, {"leaf": 1})
    assert not accepts(schema, {"leaf": "x"})
