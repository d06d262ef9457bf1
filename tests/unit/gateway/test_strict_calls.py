"""Calls of strict functions: which are constrained, and that their parser reads them."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import tokenmesh.demo_model
from tests.fakes.tokenizers import OpenVocabulary
from tests.unit.gateway.parsers.harness import parse
from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.apis.openai.structured_limits import check_structured
from tokenmesh.services.gateway.apis.openai.tools import (
    Mode,
    ToolUse,
    add_calls,
    call_constraint,
    read_tools,
    strict_calls,
)
from tokenmesh.services.gateway.parsers.formats import FormatFamily
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    ParseContext,
    Parser,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import TOOLS
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}
STRICT = ToolSchema(name="weather", parameters=SCHEMA, strict=True)
LOOSE = ToolSchema(name="time", parameters=SCHEMA)
LIMITS = GatewaySettings()


def constraint(parser: str, *tools: ToolSchema, special: str = "x", **limits: Any) -> Any:
    """The structural tag of a model with that parser; None for none."""
    folder = Path(tokenmesh.demo_model.__file__).parent
    vocabulary = OpenVocabulary.load((folder / "tokenizer.json").read_text(), [])
    shown = SimpleNamespace(
        marker_ids=vocabulary.encode, special_ids=frozenset(vocabulary.encode(special))
    )
    text: Any = SimpleNamespace(family=FormatFamily(tools=TOOLS.get(parser)), vocabulary=shown)
    use = ToolUse(mode="auto", schemas=tools)
    found = strict_calls(use, text)
    if found is not None:
        check_structured(found, LIMITS.model_copy(update=limits))
    return None if found is None else json.loads(found.text)


@pytest.mark.parametrize("parser", ["hermes", "granite4", "longcat", "deepseek_v3", "deepseek_v31"])
def test_the_parser_reads_the_constrained_calls(parser: str) -> None:
    tag = constraint(parser, LOOSE, STRICT)
    loose, strict = tag["structures"]
    assert (loose["schema"], strict["schema"]) == ({"type": "object"}, SCHEMA)
    assert all(each["begin"].startswith(tag["triggers"][0]) for each in (loose, strict))
    tools = TOOLS[parser]

    def make() -> Parser:
        return tools.make(ParseContext(tools=(LOOSE, STRICT)))

    arguments = '{"city": "Rome"}'
    text = "".join(f"{each['begin']}{arguments}{each['end']}" for each in (loose, strict))
    events = parse(make, ["Well. ", text])
    assert events == [
        Content("Well."),
        CallBegin(0, "time"),
        CallArguments(0, arguments),
        CallBegin(1, "weather"),
        CallArguments(1, arguments),
    ]


@pytest.mark.parametrize("parser", ["", "llama3_json", "qwen3_coder", "openai"])
def test_some_formats_cannot_be_constrained(parser: str) -> None:
    assert constraint(parser, STRICT) is None


@pytest.mark.parametrize(("special", "wanted"), [("<tool_call>", True), ("</tool_call>", None)])
def test_calls_that_begin_with_a_special_token_are_constrained_as_tokens(
    special: str, wanted: bool | None
) -> None:
    ids = {special: 1}
    shown = SimpleNamespace(
        marker_ids=lambda mark: [ids.get(mark[: mark.find(">") + 1].strip("}\n"), 0)],
        special_ids=frozenset({1}),
    )
    text: Any = SimpleNamespace(family=FormatFamily(tools=TOOLS["hermes"]), vocabulary=shown)
    found = strict_calls(ToolUse(mode="auto", schemas=(STRICT,)), text)
    assert (None if found is None else json.loads(found.text)["has_special_tokens"]) is wanted


def bound(parser: str, answer: Structured | None) -> tuple[Structured | None, str]:
    """Return the constraint of calls of a custom tool with a grammar, and the warnings."""
    tool = {"type": "function", "function": {"name": "patch", "strict": True}}
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    )
    vocabulary = SimpleNamespace(marker_ids=lambda _mark: [0], special_ids=frozenset[int]())
    text: Any = SimpleNamespace(family=FormatFamily(tools=TOOLS[parser]), vocabulary=vocabulary)
    use, context = read_tools(body, LIMITS), Mock(warnings=[])
    if answer is not None:
        return add_calls(answer, use, text, context), "".join(context.warnings)
    return call_constraint(body, use, text, context), "".join(context.warnings)


@pytest.mark.parametrize("parser", sorted(TOOLS))
def test_a_custom_tool_with_a_grammar_is_bound_or_named_in_a_warning(parser: str) -> None:
    not_enforced = "grammars have no effect"
    has_frame = TOOLS[parser].frame is not None
    found, warnings = bound(parser, None)
    assert (found is not None) is has_frame
    assert (not_enforced in warnings) is not has_frame
    with suppress(InvalidInput):  # a format whose beginning is not known
        found, warnings = bound(parser, Structured(kind="regex", text="a"))
        assert found is not None
        assert (not_enforced in warnings) is not has_frame
    assert not_enforced in bound(parser, Structured(kind="structural_tag", text="{}"))[1]


@pytest.mark.parametrize(
    ("mode", "tools", "wanted"),
    [
        ("auto", (LOOSE, STRICT), True),
        ("auto", (LOOSE,), False),
        ("required", (STRICT,), False),
        ("none", (), False),
    ],
)
def test_only_strict_functions_that_may_be_called_are_constrained(
    mode: Mode, tools: tuple[ToolSchema, ...], wanted: bool
) -> None:
    assert ToolUse(mode=mode, schemas=tools).has_strict is wanted


def test_schemas_are_bounded() -> None:
    with pytest.raises(InvalidInput) as caught:
        constraint("hermes", STRICT, max_grammar_bytes=64)
    assert caught.value.param == "tools"
