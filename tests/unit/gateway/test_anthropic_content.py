"""Content blocks do not depend on how events are cut, and clients can parse them."""

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tokenmesh.services.gateway.apis.anthropic.writer import (
    BlockEvent,
    ContentBlocks,
    MessagesWriter,
    collect,
    stop_of,
)
from tokenmesh.services.gateway.apis.openai.translation import FieldNames
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Head
from tokenmesh.services.gateway.core.generation.usage import usage_of
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
START = {
    "type": "message_start",
    "message": {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}
TURN: list[Event] = [
    Reasoning("I should look"),
    Content("\n\nLet me see. "),
    CallBegin(0, "look"),
    CallArguments(0, '{"at": "caf\u00e9", "n": [1, 2]}'),
    Content("\n"),
    CallBegin(1, "wait", "wait:1"),
    CallArguments(1, "{}"),
]


def steps_of(events: list[Event], **options: Any) -> list[BlockEvent]:
    blocks = ContentBlocks("msg-1", **options)
    return [*blocks.push(events), *blocks.finish()]


def as_client(steps: list[BlockEvent]) -> list[dict[str, Any]]:
    """The message that the anthropic client accumulates from the events."""
    buffers: dict[int, bytes] = {}
    snapshot = None
    for step in [START, *steps]:
        event = EVENT.validate_python(json.loads(json.dumps(step)), strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return [block.model_dump(exclude_none=True) for block in snapshot.content]


def test_a_turn_with_everything() -> None:
    blocks = collect(steps_of(TURN))
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "I should look"
    assert len(blocks[0]["signature"]) == 64
    assert blocks[1]["text"] == "\n\nLet me see. "
    assert blocks[2]["input"] == {"at": "caf\u00e9", "n": [1, 2]}
    assert blocks[2]["id"].startswith("toolu_")
    assert blocks[3] == {"type": "tool_use", "id": "wait:1", "name": "wait", "input": {}}


def test_ids_of_calls_follow_from_the_message() -> None:
    assert collect(steps_of(TURN)) == collect(steps_of(TURN))
    other = ContentBlocks("msg-2")
    ids = [each["content_block"]["id"] for each in other.push([CallBegin(0, "look")])]
    assert ids != [collect(steps_of(TURN))[2]["id"]]


@pytest.mark.parametrize("text", ["", " ", "\n\n"])
def test_white_space_alone_does_not_begin_a_block(text: str) -> None:
    assert steps_of([Content(text)]) == []
    blocks = collect(steps_of([Reasoning("r"), Content(text), CallBegin(0, "f")]))
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"]


def test_omitted_thinking_has_a_block_without_text() -> None:
    shown, omitted = collect(steps_of(TURN)), collect(steps_of(TURN, shows_thinking=False))
    assert omitted[0] == shown[0] | {"thinking": ""}
    assert omitted[1:] == shown[1:]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "half', {"a": "half"}),
        ("", {}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("{a: 1}", {"INVALID_JSON": "{a: 1}"}),
    ],
)
def test_an_unfinished_call_keeps_its_partial_input(text: str, parsed: dict[str, Any]) -> None:
    events: list[Event] = [CallBegin(0, "f")]
    if text:
        events.append(CallArguments(0, text))
    assert collect(steps_of(events))[0]["input"] == parsed


_TEXTS = st.text(alphabet="ab \n\u00e9", min_size=1, max_size=6)
_PLAIN = st.one_of(st.builds(Content, _TEXTS), st.builds(Reasoning, _TEXTS))


@st.composite
def turns(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = list(draw(st.lists(_PLAIN, max_size=4)))
    for index in range(draw(st.integers(0, 2))):
        arguments = json.dumps(draw(st.dictionaries(_TEXTS, st.integers(), max_size=2)))
        cut = draw(st.integers(0, len(arguments)))
        events.append(CallBegin(index, f"f{index}"))
        parts = (arguments[:cut], arguments[cut:])
        events.extend(CallArguments(index, part) for part in parts if part)
        events.extend(draw(st.lists(_PLAIN, max_size=1)))
    return events


@given(turns(), st.booleans())
def test_clients_see_the_same_streamed_as_whole(events: list[Event], shows: bool) -> None:
    steps = steps_of(events, shows_thinking=shows)
    assert as_client(steps) == collect(steps)
    indexes = [step["index"] for step in steps if step["type"] == "content_block_start"]
    assert indexes == list(range(len(indexes)))
    stopped = [step["index"] for step in steps if step["type"] == "content_block_stop"]
    assert stopped == indexes


@given(turns(), st.data())
def test_the_cuts_between_events_do_not_matter(events: list[Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    blocks = ContentBlocks("msg-1", shows_thinking=True)
    steps = [*blocks.push(events[:cut]), *blocks.push(events[cut:]), *blocks.finish()]
    assert steps == steps_of(events)


@given(turns())
def test_no_text_but_white_space_is_lost(events: list[Event]) -> None:
    reported = "".join(block.get("text", "") for block in collect(steps_of(events)))
    said = "".join(event.text for event in events if isinstance(event, Content))
    assert "".join(reported.split()) == "".join(said.split())


@pytest.mark.parametrize(
    ("finish", "stop", "reported"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("content_filter", None, ("refusal", None)),
        ("repetition", None, ("end_turn", None)),
    ],
)
def test_stop_reasons(
    finish: str, stop: str | int | None, reported: tuple[str, str | None]
) -> None:
    assert stop_of(finish, stop) == reported


@pytest.mark.parametrize("kind", [Content, Reasoning, CallArguments])
def test_a_long_message_is_joined_once(kind: type[Any]) -> None:
    """Joining chunks one by one would copy gigabytes."""
    text = "x" * 100
    event = CallArguments(0, text) if kind is CallArguments else kind(text)
    pieces = [OutputChunk(0, events=[event]) for _ in range(40_000)]
    pieces.insert(0, OutputChunk(0, events=[CallBegin(0, "f")] if kind is CallArguments else []))
    pieces.append(OutputChunk(0, events=[], finish_reason="stop"))
    ask = cast("GenerationRequest", SimpleNamespace(head=Head("msg-1", 1, "m")))
    usage = SimpleNamespace(usage=lambda: usage_of(1, 40_000, None))
    began_s = time.process_time()
    body = MessagesWriter(ask, FieldNames({}, {})).whole(cast("Delivery", usage), pieces)
    assert time.process_time() - began_s < 2.0
    assert len(json.dumps(body.content)) >= 4_000_000
