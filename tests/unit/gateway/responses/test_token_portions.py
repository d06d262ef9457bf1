"""From token ids to events: the response does not depend on how tokens arrive."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.back_end import eos_id, fake_tokenizer
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.apis.responses.events import ResponseEvents
from tokenmesh.services.gateway.apis.responses.output_items import Event
from tokenmesh.services.gateway.apis.responses.tools import ToolName
from tokenmesh.services.gateway.core.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk
from tokenmesh.services.gateway.parsers.parser import ParseContext, ToolSchema
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import Vocabulary

CALL = '<tool_call>\n{"name": "%s", "arguments": {"input": "na\u00efve"}}\n</tool_call>'
TEXTS = [
    "<think>\nLet me see.\n</think>\n\nIt is <b>cold</b> in caf\u00e9s.",
    f"<think>\nHm.\n</think>\n\n{CALL % 'weather'}\n{CALL % 'shell'}",
    f"<think>\nHm.\n</think>\n\nLet me look: {CALL % 'search'}",
    "<think>\nHm.\n</think>\n\nIt is cold.",
    f"<think>\nHm.\n</think>\n\n{CALL % 'weather'}"[:-20],
]
NAMES = {"shell": ToolName("custom", name="shell"), "search": ToolName("mcp", "docs", "find")}
START: dict[str, Any] = {"id": f"resp_{'0' * 32}", "created_at": 1, "output": []}
FAMILY = ParserRegistry().family("qwen3", "hermes")
CONTEXT = ParseContext(
    tools=tuple(ToolSchema(name=name, parameters={}) for name in ("weather", "shell", "search"))
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = fake_tokenizer()
    return Vocabulary.load(tokenizer.to_str(), tokenizer.get_added_tokens_decoder())


def outputs_of(text: str, cuts: list[int], finish: Any) -> list[Output]:
    """The text's tokens, cut into outputs."""
    ids = [*fake_tokenizer().encode(text).ids, eos_id()]
    edges = sorted({min(cut, len(ids)) for cut in (0, *cuts, len(ids))})
    portions = [ids[begin:end] for begin, end in pairwise(edges)]
    return [
        Output(
            token_ids=portion,
            logprobs=[TokenLogprobs(token_id=each, logprob=-1.0, rank=1) for each in portion],
            finish=finish if index == len(portions) - 1 else None,
        )
        for index, portion in enumerate(portions)
    ]


def run(vocabulary: Vocabulary, outputs: list[Output]) -> tuple[list[Event], dict[str, Any]]:
    choice = Choice(0, vocabulary, TextOptions(), parser=FAMILY.make(CONTEXT))
    maker = ResponseEvents(START, NAMES, logprobs=LogprobShapes(vocabulary))
    events = maker.begin()
    for output in outputs:
        piece: OutputChunk | None = choice.push(output)
        events += maker.write([piece] if piece is not None else [])
    events += maker.end_turn()
    for call in list(maker.server_calls):
        events += maker.succeed(call, "found")
    return events + maker.complete(None), maker.response


def plain(response: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(response))


CUTS = st.lists(st.integers(1, 120), max_size=12)


@settings(max_examples=100)
@given(st.sampled_from(TEXTS), CUTS, st.sampled_from(["stop", "length"]))
def test_the_response_does_not_depend_on_portions(
    vocabulary: Vocabulary, text: str, cuts: list[int], finish: str
) -> None:
    single = list(range(1, 400))
    _, expected = run(vocabulary, outputs_of(text, single, finish))
    outputs = outputs_of(text, cuts, finish)
    events, response = run(vocabulary, outputs)
    assert plain(response) == plain(expected)
    assert run(vocabulary, outputs) == (events, response)


@settings(max_examples=60)
@given(CUTS)
def test_log_probabilities_spell_the_text(vocabulary: Vocabulary, cuts: list[int]) -> None:
    for text in (TEXTS[0], TEXTS[3]):
        _, response = run(vocabulary, outputs_of(text, cuts, "stop"))
        part = plain(response)["output"][-1]["content"][0]
        spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert spelled.decode() == part["text"]
