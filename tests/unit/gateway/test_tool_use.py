"""Any tools and tool_choice are accepted, or refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.apis.openai.tools import ToolUse, read_tools
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput

LIMITS = GatewaySettings(max_tools=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FUNCTION = st.fixed_dictionaries(
    {}, optional={"name": st.sampled_from("fgh") | JSON, "parameters": JSON, "description": JSON}
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})
CHOICE = (
    st.sampled_from(["none", "auto", "required", "x"])
    | TOOL
    | st.fixed_dictionaries(
        {
            "type": st.just("allowed_tools"),
            "allowed_tools": st.fixed_dictionaries(
                {}, optional={"mode": JSON, "tools": st.lists(TOOL | JSON, max_size=2) | JSON}
            )
            | JSON,
        }
    )
    | JSON
)


def read(**fields: Any) -> ToolUse:
    messages = [{"role": "user", "content": "x"}]
    return read_tools(ChatRequest.model_validate({"messages": messages, **fields}), LIMITS)


def attempt(tools: list[Any], choice: Any) -> ToolUse | InvalidInput | None:
    """None: the types are wrong already."""
    try:
        return read(tools=tools, tool_choice=choice)
    except InvalidInput as error:
        return error
    except ValidationError:
        return None


@given(tools=st.lists(TOOL, max_size=4), choice=CHOICE)
def test_any_tools_and_tool_choice_are_accepted_or_refused_by_name(
    tools: list[Any], choice: Any
) -> None:
    outcome = attempt(tools, choice)
    if isinstance(outcome, InvalidInput):
        assert outcome.param in ("tools", "tool_choice")
        assert outcome.message.startswith(outcome.param)
        assert len(outcome.message) < 400
    elif outcome is not None:
        assert len(outcome.schemas) <= len(outcome.shown) <= len(tools)
        assert not outcome.is_forced or outcome.schemas


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["f", "g"]),
        ("none", "none", []),
        ("required", "required", ["f", "g"]),
        (function("g"), "named", ["g"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [function("g")]},
            },
            "required",
            ["g"],
        ),
    ],
)
def test_what_may_be_called(choice: Any, mode: str, names: list[str]) -> None:
    use = read(tools=[function("f"), function("g")], tool_choice=choice)
    assert (use.mode, [schema.name for schema in use.schemas]) == (mode, names)


def test_without_tools_there_is_no_tool_use() -> None:
    assert read() == read(tools=[]) == read(tools=[], tool_choice="auto") == ToolUse()


@pytest.mark.parametrize(
    ("given_schema", "understood"),
    [
        (None, {"type": "object", "properties": {}}),
        ({}, {"type": "object"}),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}),
    ],
)
def test_arguments_are_an_object(given_schema: Any, understood: Any) -> None:
    [schema] = read(tools=[function("f", parameters=given_schema)]).schemas
    assert schema.parameters == understood
