"""Reasoning and tool parsers of one family together, for any chunking."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounds import counts
from tests.unit.gateway.parsers.harness import check_chunkings, parse
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    Parser,
    Reasoning,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import ParserRegistry

REGISTRY = ParserRegistry()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CONTEXT = ParseContext(tools=(ToolSchema(name="weather", parameters=CITY),))

HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM_CALL = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)
HUNYUAN_CALL = '<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>'

FAMILIES = {
    ("qwen3", "hermes"): HERMES_CALL,
    ("qwen3", "qwen3_coder"): XML_CALL,
    ("nemotron_v3", "qwen3_coder"): XML_CALL,
    ("glm45", "glm45"): GLM_CALL,
    ("kimi_k2", "kimi_k2"): KIMI_CALL,
    ("hunyuan_a13b", "hunyuan_a13b"): HUNYUAN_CALL,
}
ENDS_WITH_CALL = [pair for pair in FAMILIES if pair[0] != "hunyuan_a13b"]


def make(reasoning: str, tools: str) -> Parser:
    parser = REGISTRY.family(reasoning, tools).make(CONTEXT)
    assert parser is not None
    return parser


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = [event.name for event in events if isinstance(event, CallBegin)]
    return [
        (
            name,
            "".join(
                event.text
                for event in events
                if isinstance(event, CallArguments) and event.index == index
            ).replace(" ", ""),
        )
        for index, name in enumerate(names)
    ]


def text_of(events: list[Event], kind: type[Reasoning] | type[Content]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind)).strip()


@counts("chunkings", 10, 1000)
@pytest.mark.parametrize("pair", FAMILIES)
def test_a_model_reasons_speaks_and_calls(pair: tuple[str, str], chunkings: int) -> None:
    text = f"<think>\nI ask.\n</think>\nLet me look.\n{FAMILIES[pair]}"
    events = check_chunkings(lambda: make(*pair), text, chunkings)
    assert text_of(events, Reasoning) == "I ask."
    assert text_of(events, Content) == "Let me look."
    assert calls(events) == [("weather", '{"city":"Rome"}')]


@counts("chunkings", 10, 1000)
@pytest.mark.parametrize("pair", ENDS_WITH_CALL)
def test_a_call_may_end_the_reasoning(pair: tuple[str, str], chunkings: int) -> None:
    events = check_chunkings(lambda: make(*pair), f"<think>I ask.{FAMILIES[pair]}", chunkings)
    assert text_of(events, Reasoning) == "I ask."
    assert text_of(events, Content) == ""
    assert calls(events) == [("weather", '{"city":"Rome"}')]


def test_a_call_within_reasoning_is_reasoning_where_only_the_marker_ends_it() -> None:
    text = f"<think>I could {HUNYUAN_CALL}</think>No"
    events = check_chunkings(lambda: make("hunyuan_a13b", "hunyuan_a13b"), text, 50)
    assert events == [Reasoning(f"I could {HUNYUAN_CALL}"), Content("No")]


FRAGMENTS = ["<think>", "</think>", "\n", "I", "<answer>", "</answer>", *FAMILIES.values()]


@pytest.mark.parametrize("pair", FAMILIES)
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_a_model_writes_chunks_do_not_matter(
    pair: tuple[str, str], data: st.DataObject
) -> None:
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=5))
    text = "".join(part[: data.draw(st.integers(1, len(part)))] for part in parts)
    whole = parse(lambda: make(*pair), [text])
    cut = data.draw(st.integers(0, len(text)))
    assert parse(lambda: make(*pair), [text[:cut], text[cut:]]) == whole
    assert parse(lambda: make(*pair), list(text)) == whole
