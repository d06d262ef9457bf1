"""Answers that the grammar forces to be calls."""

import json

import pytest

from tests.unit.gateway.parsers.harness import check_chunkings
from tests.unit.gateway.parsers.tool_formats import TYPICAL_CALLS, calls_of, content_of
from tokenmesh.services.gateway.apis.openai.chat_builder import family_of
from tokenmesh.services.gateway.apis.openai.tools import Mode, ToolUse
from tokenmesh.services.gateway.parsers.parser import (
    CallBegin,
    Event,
    ParseContext,
    Parser,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.services.gateway.parsers.tools.json_calls import named_call, required_calls


def required(text: str) -> list[Event]:
    return check_chunkings(required_calls, text, count=200)


def named(text: str) -> list[Event]:
    return check_chunkings(lambda: named_call("now"), text, count=200)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", TYPICAL_CALLS)
def test_required_calls_are_an_array(name: str, indent: int | None) -> None:
    calls = TYPICAL_CALLS[name]
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    events = required(f"\n{json.dumps(objects, indent=indent)}\n")
    got = [(name, json.loads(text)) for name, text in calls_of(events)]
    assert got == [tuple(call) for call in calls]
    assert content_of(events) == ""


@pytest.mark.parametrize("name", ["nested", "unicode", "escapes", "newlines", "empty"])
def test_of_a_named_function_all_is_arguments(name: str) -> None:
    arguments = TYPICAL_CALLS[name][0].arguments
    events = named(f" {json.dumps(arguments, indent=1)}\n")
    assert [(name, json.loads(text)) for name, text in calls_of(events)] == [("now", arguments)]
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('[{"name": "f", "parameters": {"a": 1', [("f", '{"a": 1')], ""),
        ('[{"name": "f", "para', [("f", "")], ""),
        ('[{"name": "f', [], ""),
        ("[", [], ""),
        ('[{"', [], ""),
        ('[{"name": "f", "parameters": {}}, ', [("f", "{}")], ""),
        ('[{"name": "f", "parameters": {}}, {"name', [("f", "{}")], ""),
        ("[]", [], "[]"),
        ("no calls", [], "no calls"),
        ('[{"name": "f", "parameters": {}}] [1]', [("f", "{}")], " [1]"),
        ("", [], ""),
    ],
)
def test_text_that_is_not_a_required_call(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = required(text)
    assert calls_of(events) == calls
    assert content_of(events) == content


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"a": "x', [("now", '{"a": "x')], ""),
        ("{} more", [("now", "{}")], " more"),
        ("no object", [], "no object"),
        (" ", [], ""),
    ],
)
def test_text_that_is_not_a_named_call(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = named(text)
    assert calls_of(events) == calls
    assert content_of(events).strip() == content.strip()


NATIVE = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
BOTH = f"{NATIVE}{FINAL}"
CALL_NOW = '{"name": "now", "parameters": {"a": 2}}'


@pytest.mark.parametrize(
    ("text", "use", "calls"),
    [
        (NATIVE, "required", [("now", '{"a": 1}')]),
        (NATIVE, "named", [("now", '{"a": 1}')]),
        (f"{FINAL}[{CALL_NOW}]", "required", [("now", '{"a": 2}')]),
        (
            f"{BOTH}[{CALL_NOW}, {CALL_NOW}]",
            "required",
            [("now", '{"a": 1}'), ("now", '{"a": 2}'), ("now", '{"a": 2}')],
        ),
        (f'{BOTH}{{"a": 2}}', "named", [("now", '{"a": 1}'), ("now", '{"a": 2}')]),
    ],
)
def test_a_harmony_model_may_call_in_its_own_way_as_well(
    text: str, use: Mode, calls: list[tuple[str, str]]
) -> None:
    tools = ToolUse(mode=use, schemas=(ToolSchema(name="now", parameters={}),))
    family = family_of(ParserRegistry().family("openai_gptoss", "openai"), tools)
    context = ParseContext(prompt_tail="<|start|>assistant", tools=tools.schemas)

    def make() -> Parser:
        parser = family.make(context)
        assert parser is not None
        return parser

    events = check_chunkings(make, text, count=200)
    begun = [event.index for event in events if isinstance(event, CallBegin)]
    assert begun == list(range(len(calls)))
    assert calls_of(events) == calls
    assert content_of(events) == ""
