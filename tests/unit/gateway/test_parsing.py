"""Parsers know some facts of the prompt, and where a constraint begins."""

import re
from pathlib import Path

import pytest

import tokenmesh.demo_model
from tests.fakes.tokenizers import OpenVocabulary
from tokenmesh.services.gateway.apis.openai.chat_builder import family_of
from tokenmesh.services.gateway.apis.openai.tools import Mode, ToolUse
from tokenmesh.services.gateway.core.generation.parsing import Parsing, ReasoningBudget
from tokenmesh.services.gateway.parsers.formats import FormatFamily
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.shared.tokens import pack_ids

FAMILY = ParserRegistry().family("deepseek_v3", "hermes")
TOOLS = (ToolSchema(name="f", parameters={"type": "object"}),)
CALLS = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2


@pytest.fixture(scope="module")
def vocabulary() -> OpenVocabulary:
    folder = Path(tokenmesh.demo_model.__file__).parent
    return OpenVocabulary.load((folder / "tokenizer.json").read_text(), [])


def events(parsing: Parsing, prompt: str, answer: str) -> list[Event]:
    assert isinstance(parsing.vocabulary, OpenVocabulary)
    packed = pack_ids(parsing.vocabulary.encode(prompt))
    [parser] = parsing.make_parsers(packed, 1)
    assert parser is not None
    return [*parser.push(answer), *parser.finish()]


def test_a_message_continues_in_the_middle_of_reasoning(vocabulary: OpenVocabulary) -> None:
    parsing = Parsing(family=FAMILY, vocabulary=vocabulary, continues=True)
    long_thought = "<think>\n" + "so it goes on " * 100
    assert events(parsing, long_thought, "and on</think>yes") == [
        Reasoning("and on"),
        Content("yes"),
    ]


def test_reasoning_and_further_calls_can_be_left_out(vocabulary: OpenVocabulary) -> None:
    shown = Parsing(family=FAMILY, vocabulary=vocabulary, tools=TOOLS)
    answer = f"<think>hm</think>yes{CALLS}"
    kinds = [type(event) for event in events(shown, "x", answer)]
    assert (kinds.count(Reasoning), kinds.count(CallBegin)) == (1, 2)
    less = Parsing(
        family=FAMILY,
        vocabulary=vocabulary,
        tools=TOOLS,
        shows_reasoning=False,
        shows_many_calls=False,
    )
    kinds = [type(event) for event in events(less, "x", answer)]
    assert (kinds.count(Reasoning), kinds.count(CallBegin)) == (0, 1)


@pytest.mark.parametrize(
    ("mode", "answer"),
    [("required", '[{"name": "f", "parameters": {}}]'), ("named", "{}")],
)
def test_forced_calls_have_ids_that_the_models_template_accepts(
    vocabulary: OpenVocabulary, mode: Mode, answer: str
) -> None:
    use = ToolUse(mode=mode, schemas=TOOLS)
    for name, pattern in (("mistral", "[A-Za-z0-9]{9}"), ("hermes", "None")):
        family = family_of(ParserRegistry().family("", name), use)
        parsing = Parsing(family=family, vocabulary=vocabulary, tools=TOOLS)
        [begin, arguments] = events(parsing, "x", answer)
        assert isinstance(begin, CallBegin)
        assert re.fullmatch(pattern, str(begin.model_id))
        assert arguments == CallArguments(0, "{}")


def test_special_tokens_are_shown_if_a_marker_is_one(vocabulary: OpenVocabulary) -> None:
    marker = vocabulary.encode("</think>")
    folder = Path(tokenmesh.demo_model.__file__).parent
    special = OpenVocabulary.load((folder / "tokenizer.json").read_text(), marker)
    reasoning = FormatFamily(FAMILY.reasoning)
    assert Parsing(family=reasoning, vocabulary=special).shows_special
    assert not Parsing(family=reasoning, vocabulary=vocabulary).shows_special
    assert Parsing(family=FAMILY, vocabulary=vocabulary, tools=TOOLS).shows_special
    assert not Parsing(family=FAMILY, vocabulary=vocabulary).shows_special
    assert not Parsing(family=FormatFamily(), vocabulary=special).shows_special
    for names in (("openai_gptoss", ""), ("", "openai")):
        harmony = ParserRegistry().family(*names)
        assert Parsing(family=harmony, vocabulary=vocabulary).shows_special


@pytest.mark.parametrize(
    ("prompt", "thinking", "waits"),
    [
        ("x<think>\n", None, True),
        ("x<think>\n\n</think>\n\n", True, False),
        ("x", True, True),
        ("x", None, False),
    ],
)
def test_a_constraint_begins_after_reasoning(
    vocabulary: OpenVocabulary, prompt: str, thinking: bool | None, waits: bool
) -> None:
    parsing = Parsing(family=FAMILY, vocabulary=vocabulary, thinking=thinking)
    ends = parsing.reasoning_ends(pack_ids(vocabulary.encode(prompt)))
    assert ends == ([vocabulary.encode("</think>")] if waits else [])


def test_generated_call_ids_depend_on_the_prompt_and_the_choice(
    vocabulary: OpenVocabulary,
) -> None:
    parsing = Parsing(
        family=ParserRegistry().family("", "mistral"), vocabulary=vocabulary, tools=TOOLS
    )

    def ids(prompt: str) -> list[str]:
        parsers = parsing.make_parsers(pack_ids(vocabulary.encode(prompt)), 2)
        shown = [parser.push("[TOOL_CALLS]f[ARGS]{}") for parser in parsers if parser is not None]
        return [begin.model_id or "" for begin, *_ in shown if isinstance(begin, CallBegin)]

    long = "and the same end of all prompts " * 20
    assert ids("a" + long) == ids("a" + long)
    assert len({*ids("a" + long), *ids("b" + long)}) == 4


def test_a_spent_budget_writes_what_the_operator_has_set(vocabulary: OpenVocabulary) -> None:
    family = ParserRegistry().family("deepseek_v3", "", "Enough.</think>")
    parsing = Parsing(family=family, vocabulary=vocabulary)
    rule = ReasoningBudget(3, parsing).rule(pack_ids(vocabulary.encode("x<think>\n")))
    assert rule.end_ids == vocabulary.encode("Enough.</think>")
    assert vocabulary.encode("</think>") in rule.other_ends
