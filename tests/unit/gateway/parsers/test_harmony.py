"""Harmony: channels, recipients and messages, whole, cut off and malformed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.parsers.harness import check_chunkings, parse, texts
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

PROMPT = "<|end|><|start|>assistant"
TOOLS = tuple(ToolSchema(name=name, parameters={}) for name in ("get_weather", "python"))
FAMILY = ParserRegistry().family("openai_gptoss", "openai")

ANALYSIS = "<|channel|>analysis<|message|>I need\nthe weather.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Rome"}'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"


def make(tail: str = PROMPT, tools: tuple[ToolSchema, ...] = TOOLS) -> Parser:
    parser = FAMILY.make(ParseContext(prompt_tail=tail, tools=tools))
    assert parser is not None
    return parser


def read(text: str, tail: str = PROMPT, tools: tuple[ToolSchema, ...] = TOOLS) -> list[Event]:
    return check_chunkings(lambda: make(tail, tools), text, 200)


def test_reasoning_and_an_answer() -> None:
    assert read(ANALYSIS + FINAL) == [Reasoning("I need\nthe weather."), Content("Sunny.")]


def test_a_message_to_a_function_is_a_call() -> None:
    expected = [
        Reasoning("I need\nthe weather."),
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Rome"}'),
    ]
    assert read(ANALYSIS + CALL) == expected
    assert read(f"{ANALYSIS}{CALL}<|call|>") == expected


@pytest.mark.parametrize(
    "header",
    [
        "<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>",
        "<|start|>assistant<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_a_recipient_may_stand_anywhere_in_a_header(header: str) -> None:
    assert read(header + "{}<|call|>") == [CallBegin(0, "get_weather"), CallArguments(0, "{}")]
    if header.startswith("<|start|>assistant "):
        assert read(header.removeprefix("<|start|>assistant") + "{}") == read(header + "{}")


def test_messages_of_one_kind_are_joined_by_a_newline() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
    text = ANALYSIS + preamble + CALL + "<|call|>" + "<|start|>assistant" + ANALYSIS + FINAL
    assert read(text) == [
        Reasoning("I need\nthe weather."),
        Content("Let me look."),
        CallBegin(0, "get_weather"),
        CallArguments(0, '{"city": "Rome"}'),
        Reasoning("\nI need\nthe weather."),
        Content("\nSunny."),
    ]


def test_calls_are_numbered() -> None:
    begun = [
        event
        for event in read(f"{CALL}<|call|>{CALL}<|call|>")
        if event == CallBegin(1, "get_weather")
    ]
    assert len(begun) == 1


def test_a_call_without_arguments_is_an_empty_object() -> None:
    header = "<|channel|>commentary to=functions.get_weather<|message|>"
    assert (
        read(header)
        == read(f"{header}<|call|>")
        == [
            CallBegin(0, "get_weather"),
            CallArguments(0, "{}"),
        ]
    )


def test_a_builtin_tool_is_called_only_when_it_was_offered() -> None:
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read(text) == [CallBegin(0, "python"), CallArguments(0, "print(1)")]
    assert read(text.replace("python", "browser.search")) == [Reasoning("print(1)")]


def test_without_tools_text_like_a_call_is_content() -> None:
    assert read(CALL, tools=()) == [Content('{"city": "Rome"}')]


def test_text_without_any_header_is_an_answer() -> None:
    assert read("Sunny, 20 < 25.") == [Content("Sunny, 20 < 25.")]
    assert read(ANALYSIS + "Sunny.") == [Reasoning("I need\nthe weather."), Content("Sunny.")]


def test_a_message_that_was_not_ended_ends_where_the_next_begins() -> None:
    text = "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Sunny."
    assert read(text) == [Reasoning("Hm"), Content("Sunny.")]


def test_a_message_may_go_on_to_another_channel() -> None:
    text = "<|channel|>final<|message|>Sunny.<|channel|>analysis<|message|>Hm"
    assert read(text) == [Content("Sunny."), Reasoning("Hm")]


@pytest.mark.parametrize("end", ["", "<|end|>", "<|start|>assistant<|channel|>analysis"])
def test_words_in_a_header_that_has_no_message_are_content(end: str) -> None:
    assert read(f"<|channel|>final Sunny.{end}") == [Content("Sunny.")]
    assert read(f"<|channel|>final {end}") == []


def test_a_message_to_the_user_is_an_answer() -> None:
    assert read("<|channel|>final to=user<|message|>Sunny.") == [Content("Sunny.")]


def test_an_answer_is_read_once() -> None:
    text = "<|channel|>final<|message|>to=day is sunny"
    assert read(text) == [Content("to=day is sunny")]


def test_the_prompt_may_have_begun_the_message() -> None:
    begun = f"{PROMPT}<|channel|>"
    assert read("analysis<|message|>Hm<|end|>", begun) == [Reasoning("Hm")]
    assert read("Sunny.", f"{PROMPT}<|channel|>final<|message|>It is ") == [Content("Sunny.")]
    call = f"{PROMPT}<|channel|>commentary to=functions.get_weather<|message|>"
    assert read("{}", call) == [CallBegin(0, "get_weather"), CallArguments(0, "{}")]
    family = FAMILY.begins_reasoning
    assert family(ParseContext(prompt_tail=PROMPT))
    assert not family(ParseContext(prompt_tail=f"{PROMPT}<|channel|>final<|message|>"))
    assert family(ParseContext(prompt_tail=f"{PROMPT}<|channel|>final<|message|>Hi<|end|>"))


def test_a_header_that_never_ends_becomes_content() -> None:
    words = "on and on " * 100
    events = read(f"<|channel|>final {words}<|message|>and on<|end|>")
    assert len(events) == 1
    assert texts(events).count("on and on") == 100


@pytest.mark.parametrize("end", range(len(ANALYSIS + CALL + FINAL)))
def test_text_cut_off_anywhere_is_not_lost(end: int) -> None:
    text = (ANALYSIS + CALL + FINAL)[:end]
    events = parse(make, [text])
    bodies = [
        part.split("<|message|>")[1] for part in text.split("<|start|>") if "<|message|>" in part
    ]
    words = "".join(body.split("<|")[0] for body in bodies)
    spoken = "".join(event.text for event in events if not isinstance(event, CallBegin))
    assert spoken.replace("{}", "").startswith(words)


MARKERS = ("start", "channel", "message", "constrain", "end", "call", "return")
WORDS = ("assistant", "analysis", "final", "commentary", "to=", "json", "hello", "{}", "<|")
FRAGMENTS = [*(f"<|{marker}|>" for marker in MARKERS), *WORDS, " to=functions.f", " ", "x" * 300]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.sampled_from(["", PROMPT, "<|start|>"])
)
def test_whatever_a_model_writes_chunks_do_not_matter(parts: list[str], tail: str) -> None:
    text = "".join(parts)
    whole = parse(lambda: make(tail), [text])
    assert parse(lambda: make(tail), parts) == whole
    assert parse(lambda: make(tail), list(text)) == whole
    assert texts(whole).count("hello") >= sum(
        1
        for before, part in zip(["", *parts], parts, strict=False)
        if part == "hello" and before == "<|message|>"
    )


def test_is_reasoning_follows_the_channel() -> None:
    parser = make()
    seen = []
    for portion in ("<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>"):
        parser.push(portion)
        seen.append(parser.is_reasoning)
    assert seen == [False, False, True, True, False, False]
