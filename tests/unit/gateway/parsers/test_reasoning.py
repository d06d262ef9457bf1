"""Every family's own text: what it writes, what a cut leaves, and the same for any chunking."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounds import counts
from tests.unit.gateway.parsers.harness import (
    check_chunkings,
    check_nothing_lost,
    joined,
    parse,
    texts,
)
from tokenmesh.services.gateway.parsers.parser import (
    Content,
    Event,
    ParseContext,
    Parser,
    Reasoning,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.reasoning import REASONING
from tokenmesh.services.gateway.parsers.registry import ParserRegistry

REGISTRY = ParserRegistry()
NOTHING_KNOWN = ParseContext()
TOOLS = (ToolSchema(name="f", parameters={}),)


@dataclass(frozen=True)
class Sample:
    text: str
    events: list[Event]
    markers: tuple[str, ...]
    context: ParseContext = NOTHING_KNOWN


def think(reasoning: str = "\nI <b>see</b>.\n", content: str = "\n\nIt's 4 < 5.") -> Sample:
    return Sample(
        f"<think>{reasoning}</think>{content}",
        [Reasoning(reasoning), Content(content)],
        ("<think>", "</think>"),
    )


def ends_with_call(marker: str, start: str = "<think>") -> Sample:
    return Sample(
        f"{start}I ask{marker}x",
        [Reasoning("I ask"), Content(f"{marker}x")],
        (start,),
        ParseContext(tools=TOOLS),
    )


def pair(start: str, end: str) -> Sample:
    return Sample(
        f"{start}I see {end[:-1]} it{end} 4",
        [Reasoning(f"I see {end[:-1]} it"), Content(" 4")],
        (start, end),
    )


HARMONY = (
    "<|channel|>analysis<|message|>I see<|end|><|start|>assistant"
    "<|channel|>final<|message|>It's 4<|return|>"
)
HARMONY_MARKERS = (
    "<|channel|>analysis",
    "<|channel|>final",
    "<|start|>assistant",
    *("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|start|>"),
)

SAMPLES: dict[str, list[Sample]] = {
    "cohere_command3": [
        Sample(
            "<|START_THINKING|>I see<|END_THINKING|><|START_RESPONSE|>It's 4<|END_RESPONSE|>",
            [Reasoning("I see"), Content("It's 4")],
            (
                *("<|START_THINKING|>", "<|END_THINKING|>"),
                *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ),
        ),
        ends_with_call("<|START_ACTION|>", "<|START_THINKING|>"),
    ],
    "cohere_command4": [
        Sample(
            "<|START_THINKING|>I see<|END_THINKING|><|START_TEXT|>It's 4<|END_TEXT|>",
            [Reasoning("I see"), Content("It's 4")],
            ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        )
    ],
    "deepseek_r1": [think()],
    "deepseek_v3": [think()],
    "deepseek_v4": [think(), ends_with_call("<\uff5cDSML\uff5ctool_calls>")],
    "deepseek_v41": [think(), ends_with_call("<\uff5cDSML\uff5c calls>")],
    "ernie45": [
        Sample(
            "I see\n</think>\n\n<response>\nIt's 4\n</response>\n",
            [Reasoning("I see\n"), Content("It's 4")],
            ("</think>", "<response>", "</response>"),
        ),
        Sample("I see\n</think>\n4", [Reasoning("I see\n"), Content("4")], ("</think>",)),
    ],
    "gemma4": [
        Sample(
            "<|channel>thought\nI see<channel|>It's 4",
            [Reasoning("I see"), Content("It's 4")],
            ("<|channel>thought\n", "<channel|>"),
        )
    ],
    "glm45": [think(), ends_with_call("<tool_call>")],
    "glm47": [think(), ends_with_call("<tool_call>")],
    "granite": [
        pair("Here is my thought process:", "Here is my response:"),
        pair("Here's my thought process:", "Here's my response:"),
    ],
    "granite_thinking_parser": [
        Sample(
            "<think>\nI see\n</think>\n4",
            [Reasoning("\nI see\n"), Content("4")],
            ("<think>", "</think>"),
        )
    ],
    "holo2": [think()],
    "hunyuan_a13b": [
        Sample(
            "<think>\nI see\n</think>\n<answer>\nIt's </b> 4\n</answer>",
            [Reasoning("I see"), Content("It's </b> 4")],
            ("<think>", "</think>", "<answer>", "</answer>"),
        ),
        Sample("It's 4", [Content("It's 4")], ()),
        Sample(
            "<answer>4</answer> or </answer> 5",
            [Content("4 or </answer> 5")],
            ("<answer>", "</answer>"),
        ),
    ],
    "hy_v3": [think()],
    "k2_horizon": [
        pair("<ifm|think>", "</ifm|think>"),
        pair("<ifm|think_fast>", "</ifm|think_fast>"),
        ends_with_call("<ifm|tool_calls>", "<ifm|think>"),
    ],
    "kimi_k2": [think(), ends_with_call("<|tool_calls_section_begin|>")],
    "ling3": [think()],
    "mimo": [think()],
    "minimax_m2": [think(), ends_with_call("<minimax:tool_call>")],
    "minimax_m2_append_think": [Sample("I see</think>4", [Content("<think>I see</think>4")], ())],
    "minimax_m3": [pair("<mm:think>", "</mm:think>")],
    "mistral": [
        Sample(
            "So:[THINK]I see[1] [/TH[/THINK]4[THINK]or[/THINK]5",
            [
                Content("So:"),
                Reasoning("I see[1] [/TH"),
                Content("4"),
                Reasoning("or"),
                Content("5"),
            ],
            ("[THINK]", "[/THINK]"),
        )
    ],
    "nemotron_v3": [think(), ends_with_call("<tool_call>")],
    "olmo3": [think()],
    "openai_gptoss": [Sample(HARMONY, [Reasoning("I see"), Content("It's 4")], HARMONY_MARKERS)],
    "plamo3": [pair("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")],
    "poolside_v1": [think()],
    "qwen3": [think(), ends_with_call("<tool_call>")],
    "seed_oss": [
        pair("<seed:think>", "</seed:think>"),
        ends_with_call("<seed:tool_call>", "<seed:think>"),
    ],
    "step3": [think()],
    "step3p5": [
        Sample(
            "<think>I\nsee\n</think>\n4",
            [Reasoning("I\nsee"), Content("4")],
            ("<think>", "</think>"),
        ),
        think("I see", "4"),
    ],
}
CASES = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]


def make(name: str, context: ParseContext) -> Parser:
    parser = REGISTRY.family(name, "").make(context)
    assert parser is not None
    return parser


def test_every_family_has_a_sample() -> None:
    assert set(SAMPLES) == set(REASONING)


@counts("chunkings", 10, 1000)
@pytest.mark.parametrize(("name", "sample"), CASES)
def test_the_text_of_a_family_is_split_for_any_chunks(
    name: str, sample: Sample, chunkings: int
) -> None:
    events = check_chunkings(lambda: make(name, sample.context), sample.text, chunkings)
    assert events == sample.events


# These two have tests of their own: one takes off words with a header, the other adds a marker.
OWN_RULES = ("openai_gptoss", "minimax_m2_append_think")


@pytest.mark.parametrize(("name", "sample"), [case for case in CASES if case[0] not in OWN_RULES])
def test_nothing_is_lost_wherever_the_model_stops(name: str, sample: Sample) -> None:
    check_nothing_lost(lambda: make(name, sample.context), sample.text, sample.markers)


FRAGMENTS = sorted(
    {marker for _, sample in CASES for marker in sample.markers}
    | {"<", "/", ">", "\n", " ", "a", "<th", "</think", "<tool_call>", "to=functions.f", "[", "<|"}
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
TAILS = st.sampled_from(["", "<think>\n", "</think>\n\n", "<|start|>assistant", "[THINK]"])


@pytest.mark.parametrize("name", sorted(REASONING))
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_a_model_writes_chunks_do_not_matter(name: str, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    context = ParseContext(
        prompt_tail=data.draw(TAILS),
        continues=data.draw(st.booleans()),
        thinking=data.draw(st.sampled_from([None, True, False])),
        tools=data.draw(st.sampled_from([(), TOOLS])),
    )
    whole = parse(lambda: make(name, context), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    portions = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(lambda: make(name, context), portions) == whole
    assert parse(lambda: make(name, context), list(text)) == whole


def test_the_appended_marker_is_all_that_is_added() -> None:
    for end in range(len("I see</think>4")):
        text = "I see</think>4"[:end]
        events = parse(lambda: make("minimax_m2_append_think", NOTHING_KNOWN), list(text))
        assert events == [Content("<think>" + text)]


@pytest.mark.parametrize("name", sorted(REASONING))
def test_whitespace_without_end_is_not_held_back(name: str) -> None:
    parser = make(name, NOTHING_KNOWN)
    passed = [event for _ in range(2000) for event in parser.push("\n")]
    assert texts(passed).count("\n") >= 1999
    text = "\n" * 1500 + "<think>a</think>b"
    whole = parse(lambda: make(name, NOTHING_KNOWN), [text])
    assert parse(lambda: make(name, NOTHING_KNOWN), list(text)) == whole


@pytest.mark.parametrize("name", sorted(REASONING))
def test_ordinary_text_is_passed_on_at_once(name: str) -> None:
    parser = make(name, ParseContext())
    parser.push("Yes")
    passed = [event for word in (" we", " can", ".") for event in parser.push(word)]
    assert len(joined(passed)) == 1
    assert "".join(event.text for event in passed if not hasattr(event, "name")).endswith(" can.")
