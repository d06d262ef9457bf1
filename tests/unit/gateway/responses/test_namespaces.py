"""Tools of namespaces, which a model calls as functions, and custom tools with a grammar."""

import time
from typing import Any

import pytest

from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.tools import ToolName, read_tools
from tokenmesh.services.gateway.apis.responses.translation import (
    ResponsesTranslation,
    is_long,
    translate,
)
from tokenmesh.shared.errors import InvalidInput

SPAWN: Any = {
    "type": "function",
    "name": "spawn",
    "description": "Begin one.",
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}},
}
CLOSE: Any = {"type": "function", "name": "close"}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents of mine.",
    "tools": [SPAWN, CLOSE, {"type": "custom", "name": "tell"}],
}


def translated(*tools: Any, **fields: Any) -> ResponsesTranslation:
    body = {"input": "Hi", "tools": list(tools), **fields}
    return translate(ResponsesRequest.model_validate(body))


def functions(*tools: Any, **fields: Any) -> dict[str, Any]:
    chat = translated(*tools, **fields).chat
    return {each["function"]["name"]: each["function"] for each in chat.tools or ()}


def test_tools_of_a_namespace_are_functions_of_the_chat() -> None:
    translation = translated(CLOSE, AGENTS)
    assert translation.warnings == []
    assert translation.names == {
        "close": ToolName(name="close"),
        "agents__spawn": ToolName(name="spawn", namespace="agents"),
        "agents__close": ToolName(name="close", namespace="agents"),
        "agents__tell": ToolName("custom", name="tell", namespace="agents"),
    }
    shown = functions(CLOSE, AGENTS)
    assert list(shown) == list(translation.names)
    assert shown["agents__spawn"] == {
        "name": "agents__spawn",
        "description": "Begin one.\n\nAbout agents: Agents of mine.",
        "parameters": SPAWN["parameters"],
    }
    assert shown["agents__close"] == {"name": "agents__close"}


@pytest.mark.parametrize("name", ["a" * 100, "\u00e4 b", "f"])
def test_names_that_cannot_be_joined_become_others_that_are_always_the_same(name: str) -> None:
    other = {"type": "function", "name": ToolName(name=name, namespace="n").flat_name}
    space = {"type": "namespace", "name": "n", "tools": [{**CLOSE, "name": name}]}
    first, second = (translated(*tools).names for tools in ([other, space], [space, other]))
    assert first == second
    assert set(first.values()) == {ToolName(name=other["name"]), ToolName(name=name, namespace="n")}
    assert all(len(each) <= 64 for each in first)


def test_calls_of_a_namespace_in_the_history_have_the_name_that_the_model_knows() -> None:
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    items = [
        {**call, "name": "close", "namespace": "agents"},
        {**call, "name": "gone", "namespace": "agents", "call_id": "d"},
        {**call, "name": "close", "namespace": None, "call_id": "e"},
    ]
    other = {**CLOSE, "name": "agents__close"}
    translation = translated(other, AGENTS, input=[*items, {"role": "user", "content": "Hi"}])
    message: Any = translation.chat.messages[0]
    calls = message["tool_calls"]
    names = {tool: name for name, tool in translation.names.items()}
    assert [each["function"]["name"] for each in calls] == [
        names[ToolName(name="close", namespace="agents")],
        "agents__gone",
        "close",
    ]


def test_a_tool_choice_names_the_namespace() -> None:
    choice = {"type": "function", "name": "close", "namespace": "agents"}
    wanted = {"type": "function", "function": {"name": "agents__close"}}
    assert translated(CLOSE, AGENTS, tool_choice=choice).chat.tool_choice == wanted
    with pytest.raises(InvalidInput) as caught:
        translated(AGENTS, tool_choice={"type": "function", "name": "close"})
    assert caught.value.param == "tool_choice"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "tools[0].name"),
    ({"tools": {}}, "tools[0].tools"),
    ({"tools": ["f"]}, "tools[0].tools[0]"),
    ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools[0].type"),
    ({"tools": [SPAWN, {"type": "function"}]}, "tools[0].tools[1].name"),
    ({"tools": [SPAWN, {**CLOSE, "parameters": []}]}, "tools[0].tools[1].parameters"),
    ({"tools": [SPAWN, CLOSE, SPAWN, SPAWN]}, "tools[0].tools[2].name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_namespaces_are_refused_by_their_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        translated({**AGENTS, **fields})
    assert caught.value.param == param


def test_many_tools_in_a_namespace_are_many_tools() -> None:
    space = {**AGENTS, "tools": [{**CLOSE, "name": f"f{each}"} for each in range(200)]}
    assert is_long(ResponsesRequest.model_validate({"input": "Hi", "tools": [space]}))


def test_a_regular_expression_binds_the_input_of_a_custom_tool() -> None:
    shape = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|\\d"}
    translation = translated({"type": "custom", "name": "g", "format": shape})
    assert translation.warnings == []
    assert translation.chat.tools is not None
    function = translation.chat.tools[0]["function"]
    assert function["strict"] is True
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+|\\d)$"
    assert "[a-z]+" in function["description"]


@pytest.mark.parametrize("place", ["namespace", "tool"])
def test_names_are_bounded_before_they_are_joined(place: str) -> None:
    long = "\u00e9" * 257
    function = {"type": "function", "name": long if place == "tool" else "f"}
    name = long if place == "namespace" else "n"
    with pytest.raises(InvalidInput, match="more than 256 characters"):
        read_tools([{"type": "namespace", "name": name, "tools": [function]}], {})


def test_only_the_end_of_a_name_is_looked_at() -> None:
    """A call of the history may have any name; a namespace of megabytes held the event loop."""
    name = ToolName("function", name="f", namespace="n" * 4_000_000)
    began_s = time.thread_time()
    assert name.flat_name == "n" * 61 + "__f"
    assert time.thread_time() - began_s < 0.05
