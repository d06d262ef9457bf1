"""Streamed chunks are valid JSON with the right fields, whatever the text and the options."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tokenmesh.services.gateway.apis.openai.chat_writer import ChatStream, call_id
from tokenmesh.services.gateway.apis.openai.completion_writer import CompletionStream
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, Head
from tokenmesh.services.gateway.core.generation.usage import usage_of
from tokenmesh.services.gateway.core.http.sse import error_frames
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import Vocabulary

HEAD = Head('id "7"', 1234, "a/model")


@pytest.fixture(scope="module")
def shapes() -> LogprobShapes:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return LogprobShapes(Vocabulary.load(tokenizer.to_str(), []))


def parse(data: bytes) -> list[Any]:
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


@given(text=st.text())
def test_any_text_survives(text: str) -> None:
    shapes = LogprobShapes(Vocabulary.load(Tokenizer(models.BPE()).to_str(), []))
    chat = ChatStream(HEAD, ChunkOptions(), shapes, 3)
    events = parse(chat.write([OutputChunk(1, text or "x", [5])]))
    assert events[0]["choices"][0]["delta"]["content"] == (text or "x")
    assert (events[0]["id"], events[0]["model"], events[0]["created"]) == (
        HEAD.id,
        HEAD.model,
        1234,
    )
    plain = CompletionStream(HEAD, ChunkOptions(), shapes, [3, 3])
    assert parse(plain.write([OutputChunk(1, text, [5], finish_reason="stop")]))[0]["choices"] == [
        {
            "index": 1,
            "text": text,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_a_chat_chunk_with_everything(shapes: LogprobShapes) -> None:
    options = ChunkOptions(logprobs=True, token_ids=True, usage=True, running_usage=True)
    stream = ChatStream(HEAD, options, shapes, 3)
    entry = TokenLogprobs(0, -0.5, 1, [0, 1], [-0.5, float("-inf")])
    piece = OutputChunk(0, "a", [0], [entry], finish_reason="stop", stop_reason="b")
    begin, text, usage = parse(
        stream.begin(1, "assistant", "", {"prompt_token_ids": [1, 0], "prompt_text": None})
        + stream.write([piece])
        + stream.end(usage_of(3, 1, 2))
    )
    assert begin["prompt_token_ids"] == [1, 0]
    assert text["choices"][0]["token_ids"] == [0]
    assert text["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 4,
        "completion_tokens": 1,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    shown = text["choices"][0]["logprobs"]["content"][0]
    assert (shown["token"], shown["bytes"], len(shown["top_logprobs"])) == ("a", [97], 2)
    assert shown["top_logprobs"][1]["logprob"] == -9999.0
    assert (text["choices"][0]["finish_reason"], text["choices"][0]["stop_reason"]) == ("stop", "b")
    assert (usage["choices"], usage["usage"]["prompt_tokens_details"]) == (
        [],
        {"cached_tokens": 2},
    )


@pytest.mark.parametrize("options", [ChunkOptions(), ChunkOptions(token_ids=True)])
def test_events_at_the_end_of_the_parser_are_sent(
    shapes: LogprobShapes, options: ChunkOptions
) -> None:
    stream = ChatStream(HEAD, options, shapes, 3)
    events: list[Event] = [Content("a"), CallBegin(0, "f"), CallArguments(0, "{}")]
    chunk = OutputChunk(0, finish_reason="tool_calls", events=events)
    shown, last = parse(stream.write([chunk]))
    delta = shown["choices"][0]["delta"]
    assert delta["content"] == "a"
    assert delta["tool_calls"] == [
        {
            "index": 0,
            "id": call_id(HEAD.id, 0, CallBegin(0, "f")),
            "type": "function",
            "function": {"name": "f", "arguments": "{}"},
        }
    ]
    assert shown["choices"][0]["finish_reason"] is None
    # openai's stream helper needs the reason in a chunk without calls
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")


def test_a_call_has_the_models_own_id_or_one_made_of_its_place() -> None:
    begin = CallBegin(0, "f")
    assert call_id("r", 0, CallBegin(0, "f", "own")) == "own"
    places = [("r", 0, 0), ("r", 1, 0), ("r", 0, 1), ("q", 0, 0)]
    ids = {call_id(response, choice, CallBegin(index, "f")) for response, choice, index in places}
    assert len(ids) == len(places)
    assert call_id("r", 0, begin) in ids


def test_text_offsets_continue_over_chunks_and_after_an_echo(shapes: LogprobShapes) -> None:
    stream = CompletionStream(HEAD, ChunkOptions(logprobs=True), shapes, [2])
    entry = TokenLogprobs(0, -0.5, 1, [0], [-0.5])
    echo = stream.echo(0, "ab", shapes.completion([None, entry], [0, 1], 0))
    first, second = (stream.write([OutputChunk(0, "a", [0], [entry])]) for _ in range(2))
    offsets = [
        event["choices"][0]["logprobs"]["text_offset"] for event in parse(echo + first + second)
    ]
    assert offsets == [[0, 1], [2], [3]]


def test_the_chosen_token_is_first_in_top_logprobs_of_completions(
    shapes: LogprobShapes,
) -> None:
    for entry in (
        TokenLogprobs(1, -2.0, 2, [0], [-0.1]),
        TokenLogprobs(1, -2.0, 2, [0, 1], [-0.1, -2.0]),
    ):
        [tops] = shapes.completion([entry], [1], 0).top_logprobs
        assert list((tops or {}).items()) == [("b", -2.0), ("a", -0.1)]


def test_named_tokens_of_a_chat_come_after_the_chosen_one() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    named = LogprobShapes(Vocabulary.load(tokenizer.to_str(), []), has_named=True)
    [shown] = named.chat([TokenLogprobs(1, -2.0, 2, [0], [-0.1])]).content
    assert [(top.token, top.logprob) for top in shown.top_logprobs] == [("b", -2.0), ("a", -0.1)]


def test_tokens_can_be_shown_as_ids() -> None:
    shapes = LogprobShapes(Vocabulary.load(Tokenizer(models.BPE()).to_str(), []), as_ids=True)
    assert shapes.chat([TokenLogprobs(7, -1.0, 3)]).content[0].token == "token_id:7"


def test_prompt_log_probabilities_contain_the_token_and_the_most_likely_ones(
    shapes: LogprobShapes,
) -> None:
    shown = shapes.prompt([None, TokenLogprobs(1, -2.0, 5, [0], [-0.1])])
    assert shown == [
        None,
        {
            "1": {"logprob": -2.0, "rank": 5, "decoded_token": "b"},
            "0": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_a_failed_stream_ends_with_the_error_and_done() -> None:
    data = error_frames(Unavailable("gone", retry_after_s=1.0))
    assert data.endswith(b"data: [DONE]\n\n")
    error = json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))["error"]
    assert error == {
        "message": "gone",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": "unavailable",
    }
