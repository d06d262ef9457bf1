"""<think> blocks: where they begin and end, and what the prompt says about it."""

import pytest

from tests.unit.gateway.parsers.harness import check_chunkings, check_nothing_lost, parse
from tokenmesh.services.gateway.parsers.parser import (
    Content,
    Event,
    ParseContext,
    Parser,
    Reasoning,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import ParserRegistry

REGISTRY = ParserRegistry()


def make(name: str, context: ParseContext | None = None) -> Parser:
    parser = REGISTRY.family(name, "").make(context or ParseContext())
    assert parser is not None
    return parser


def read(name: str, text: str, tail: str = "") -> list[Event]:
    return check_chunkings(lambda: make(name, ParseContext(prompt_tail=tail)), text, 200)


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3", "qwen3"])
def test_a_block_is_reasoning_and_the_rest_is_content_as_it_is(name: str) -> None:
    text = "\n<think>\nLet me <b>see</b> </thin>.\n</think>\n\nIt is </think> 4."
    assert read(name, text) == [
        Reasoning("\nLet me <b>see</b> </thin>.\n"),
        Content("\n\nIt is </think> 4."),
    ]


def test_without_a_start_marker_r1_reasons_and_the_others_answer() -> None:
    text = "I see</think>4"
    assert read("deepseek_r1", text) == [Reasoning("I see"), Content("4")]
    assert read("qwen3", text) == [Content(text)]
    assert read("deepseek_v3", text) == [Content(text)]


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3", "qwen3"])
def test_the_end_of_the_prompt_decides_where_the_model_begins(name: str) -> None:
    assert read(name, "I see</think>4", "assistant\n<think>\n") == [
        Reasoning("I see"),
        Content("4"),
    ]
    assert read(name, "4", "assistant\n<think>\n\n</think>\n\n") == [Content("4")]
    assert read(name, "<think>I see</think>4", "<think>") == [Reasoning("I see"), Content("4")]


def test_a_users_marker_in_the_prompt_does_not_open_a_block() -> None:
    tail = "user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n"
    assert read("qwen3", "It opens", tail) == [Content("It opens")]


def test_a_continued_message_keeps_its_state() -> None:
    inside = ParseContext(prompt_tail="assistant\n<think>\nI was", continues=True)
    assert parse(lambda: make("qwen3", inside), [" here</think>4"]) == [
        Reasoning(" here"),
        Content("4"),
    ]
    after = ParseContext(prompt_tail="assistant\n<think>\nI was</think>It", continues=True)
    assert parse(lambda: make("deepseek_r1", after), [" is 4"]) == [Content(" is 4")]


def test_a_block_that_is_not_ended_is_reasoning() -> None:
    assert read("qwen3", "<think>I see </th") == [Reasoning("I see </th")]
    assert read("deepseek_r1", "<thi") == [Reasoning("<thi")]
    assert read("qwen3", " <thi") == [Content(" <thi")]


def test_a_tool_call_ends_qwens_reasoning_where_there_are_tools() -> None:
    text = "<think>I ask<tool_call>{}</tool_call>"
    context = ParseContext(tools=(ToolSchema(name="f", parameters={}),))
    assert parse(lambda: make("qwen3", context), list(text)) == [
        Reasoning("I ask"),
        Content("<tool_call>{}</tool_call>"),
    ]
    assert read("qwen3", text) == [Reasoning("I ask<tool_call>{}</tool_call>")]
    assert parse(lambda: make("deepseek_r1", context), [text]) == read("deepseek_r1", text)


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3", "qwen3"])
def test_nothing_is_lost_wherever_the_model_stops(name: str) -> None:
    text = " <think> a < b </thin k></think> then <think>x</think>"
    check_nothing_lost(lambda: make(name), text, ["<think>", "</think>"])


@pytest.mark.parametrize("name", ["glm45", "holo2", "kimi_k2"])
def test_models_that_think_by_default_need_no_marker(name: str) -> None:
    def read_as(thinking: bool | None) -> list[Event]:
        return parse(lambda: make(name, ParseContext(thinking=thinking)), ["I see</think>4"])

    assert read_as(None) == read_as(True) == [Reasoning("I see"), Content("4")]
    assert read_as(False) == [Content("I see</think>4")]


def test_before_the_first_marker_the_default_decides_what_is_reasoning() -> None:
    for name, expected in (("deepseek_r1", True), ("qwen3", False)):
        parser = make(name)
        parser.push("<thi")
        assert parser.is_reasoning is expected


def test_is_reasoning_follows_the_last_character() -> None:
    parser = make("qwen3")
    seen = []
    for portion in ("<think>", "hm", "</think>", "4"):
        parser.push(portion)
        seen.append(parser.is_reasoning)
    assert seen == [True, True, False, False]


def test_prompt_and_request_decide_whether_the_model_will_reason() -> None:
    def begins(name: str, tail: str = "", thinking: bool | None = None) -> bool:
        return REGISTRY.family(name, "").begins_reasoning(
            ParseContext(prompt_tail=tail, thinking=thinking)
        )

    assert begins("qwen3")
    assert not begins("qwen3", thinking=False)
    assert not begins("qwen3", "<think>\n\n</think>\n\n")
    assert not begins("deepseek_v3")
    assert begins("deepseek_v3", thinking=True)
    assert begins("deepseek_v3", "<think>")
    assert begins("deepseek_r1", thinking=False)
