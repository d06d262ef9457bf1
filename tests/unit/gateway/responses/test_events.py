"""Events of a response: numbered, valid for the client's types, the same in a replay."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from tokenmesh.services.gateway.apis.responses.events import ResponseEvents
from tokenmesh.services.gateway.apis.responses.output_items import Event
from tokenmesh.services.gateway.apis.responses.shapes import usage_fields
from tokenmesh.services.gateway.apis.responses.tools import ToolName
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, join_events
from tokenmesh.services.gateway.core.generation.usage import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Reasoning,
)
from tokenmesh.services.gateway.parsers.parser import Event as ParserEvent
from tokenmesh.shared.errors import InvalidInput, Overloaded, Unavailable

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
NAMES = {
    "f": ToolName(name="f"),
    "n__f": ToolName(name="f", namespace="n"),
    "free": ToolName("custom", name="free"),
    "search": ToolName("mcp", "docs", "find"),
}
USAGE = usage_fields([Usage(3, 5, 2)])
START = {
    "id": "resp_1",
    "object": "response",
    "created_at": 7,
    "status": "in_progress",
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "error": None,
    "incomplete_details": None,
    "usage": None,
}


def start() -> ResponseEvents:
    return ResponseEvents(START, NAMES)


def parsed(*events: ParserEvent, finish: str | None = None) -> OutputChunk:
    return OutputChunk(0, events=list(events), finish_reason=finish)


def kinds_of(events: Sequence[Event]) -> list[str]:
    return [each["type"].removeprefix("response.") for each in events]


def run(pieces: Sequence[OutputChunk]) -> tuple[list[Event], dict[str, Any]]:
    """A whole response of one turn with its MCP calls."""
    generator = start()
    events = generator.begin()
    for piece in pieces:
        events += generator.write([piece])
    events += generator.end_turn()
    for call in list(generator.server_calls):
        events += generator.succeed(call, "found")
    events += generator.complete(USAGE)
    check(events)
    return events, generator.response


def check(events: Sequence[Event]) -> None:
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_json(msgspec.json.encode(event))
    Response.model_validate_json(msgspec.json.encode(events[-1]["response"]))


TEXTS = st.text(st.sampled_from('ab {}":\n\u00e9'), min_size=1, max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> list[ParserEvent]:
    """Parser events of one turn."""
    events: list[ParserEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=6)):
        if kind == "content":
            events.append(Content(draw(TEXTS)))
            if num_calls and draw(st.booleans()):
                # The end of an unfinished call.
                events.append(CallArguments(num_calls - 1, draw(TEXTS)))
        elif kind == "reasoning":
            events.append(Reasoning(draw(TEXTS)))
        else:
            model_id = draw(st.sampled_from([None, "x1", "x2"]))
            events.append(
                CallBegin(num_calls, draw(st.sampled_from(["f", "free", "search", "?"])), model_id)
            )
            events += [CallArguments(num_calls, text) for text in draw(st.lists(TEXTS, max_size=2))]
            num_calls += 1
    return events


def split(event: ParserEvent, at: int) -> list[ParserEvent]:
    """Split an event into two."""
    if isinstance(event, CallBegin) or not 0 < at < len(event.text):
        return [event]
    return [saying(event, event.text[:at]), saying(event, event.text[at:])]


def saying(event: ParserEvent, text: str) -> ParserEvent:
    if isinstance(event, CallArguments):
        return CallArguments(event.index, text)
    return Content(text) if isinstance(event, Content) else Reasoning(text)


def portion(draw: st.DrawFn, events: Sequence[ParserEvent], finish: str) -> list[OutputChunk]:
    """The events, split at random."""
    finer = [part for each in events for part in split(each, draw(st.integers(0, 5)))]
    pieces, rest = [], finer
    while rest:
        size = draw(st.integers(1, len(rest)))
        pieces.append(parsed(*join_events(rest[:size])))
        rest = rest[size:]
    return [*pieces, parsed(finish=finish)]


@st.composite
def two_portionings(draw: st.DrawFn) -> tuple[list[OutputChunk], list[OutputChunk]]:
    events, finish = draw(turns()), draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return portion(draw, events, finish), portion(draw, events, finish)


def joined(events: Sequence[Event]) -> list[Any]:
    """The events with adjacent deltas joined, and without numbers."""
    reported: list[dict[str, Any]] = []
    for event in events:
        plain = {name: value for name, value in event.items() if name != "sequence_number"}
        last = reported[-1] if reported else {}
        place = ("type", "item_id", "output_index")
        if "delta" in plain and all(last.get(each) == plain[each] for each in place):
            last["delta"] += plain["delta"]
        else:
            reported.append(plain)
    return reported


@settings(max_examples=60)
@given(two_portionings())
def test_events_do_not_depend_on_portions_and_a_replay_repeats_them(
    portionings: tuple[list[OutputChunk], list[OutputChunk]],
) -> None:
    one, other = portionings
    events, response = run(one)
    assert run(one) == (events, response)
    others, other_response = run(other)
    assert other_response == response
    assert joined(others) == joined(events)


@settings(max_examples=60)
@given(two_portionings())
def test_no_output_of_the_model_is_lost(
    portionings: tuple[list[OutputChunk], list[OutputChunk]],
) -> None:
    events, response = run(portionings[0])
    given = [event for piece in portionings[0] for event in piece.all_events()]
    reported = "".join(each["delta"] for each in events if each["type"].endswith("text.delta"))
    written = "".join(each.text for each in given if isinstance(each, Content | Reasoning))
    assert "".join(reported.split()) == "".join(written.split())
    calls = [each for each in response["output"] if each["type"].endswith("_call")]
    assert len(calls) == sum(isinstance(each, CallBegin) for each in given)
    ids = [each["call_id"] for each in calls if "call_id" in each]
    assert len(set(ids)) == len(ids)
    items = [each["id"] for each in response["output"]]
    assert len(set(items)) == len(items)
    done = {
        each["item"]["id"]: each["item"] for each in events if each["type"].endswith("item.done")
    }
    assert [done[each] for each in items] == response["output"]


def test_text_reasoning_and_a_call_in_full() -> None:
    call: list[ParserEvent] = [CallBegin(0, "f"), CallArguments(0, '{"a":'), CallArguments(0, "1}")]
    pieces = [parsed(Reasoning("hm")), parsed(Content("\n\n")), parsed(Content("Yes"))]
    events, response = run([*pieces, parsed(*call, finish="tool_calls")])
    assert kinds_of(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    reasoning, message, function_call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "\n\nYes"
    assert (function_call["name"], function_call["arguments"]) == ("f", '{"a":1}')
    assert function_call["call_id"].startswith("call_")
    assert {each["status"] for each in response["output"]} == {"completed"}
    assert response["usage"]["total_tokens"] == 5


def test_space_before_a_call_is_not_a_message() -> None:
    _, response = run([parsed(Reasoning("hm")), parsed(Content("\n\n"), CallBegin(0, "f"))])
    assert [each["type"] for each in response["output"]] == ["reasoning", "function_call"]


def test_space_after_reasoning_is_not_a_message() -> None:
    _, response = run([parsed(Reasoning("hm")), parsed(Content("\n"), finish="length")])
    assert [each["type"] for each in response["output"]] == ["reasoning"]


def test_calls_of_one_response_have_different_ids() -> None:
    twice: list[ParserEvent] = [
        CallBegin(0, "f", "functions.f:0"),
        CallBegin(1, "f", "functions.f:0"),
    ]
    _, response = run([parsed(*twice, finish="tool_calls")])
    first, second = (each["call_id"] for each in response["output"])
    assert first == "functions.f:0"
    assert second.startswith("call_")


def test_a_call_that_was_cut_is_not_made() -> None:
    generator = start()
    calls: list[ParserEvent] = [
        CallBegin(0, "search"),
        CallBegin(1, "search"),
        CallArguments(1, '{"q'),
    ]
    events = generator.write([parsed(*calls, finish="length")]) + generator.end_turn()
    assert generator.server_calls == []
    check(events + generator.complete(USAGE))
    assert [each["status"] for each in generator.response["output"]] == ["incomplete"] * 2


def test_space_alone_is_an_answer() -> None:
    _, response = run([parsed(Content(" "), finish="stop")])
    assert response["output"][0]["content"][0]["text"] == " "


def test_without_a_parser_text_is_content() -> None:
    _, response = run([OutputChunk(0, "He"), OutputChunk(0, "llo", finish_reason="stop")])
    assert response["output"][0]["content"][0]["text"] == "Hello"


def test_an_unfinished_call_is_closed_after_text() -> None:
    call: list[ParserEvent] = [CallBegin(0, "f"), CallArguments(0, '{"a":1')]
    events, response = run([parsed(*call), parsed(Content("and")), parsed(CallArguments(0, "}"))])
    assert kinds_of(events)[-6:-4] == ["output_text.done", "content_part.done"]
    function_call, message = response["output"]
    assert function_call["arguments"] == '{"a":1}'
    assert message["content"][0]["text"] == "and"


def test_a_call_of_a_namespace_s_function_is_named_by_both() -> None:
    _, response = run([parsed(CallBegin(0, "n__f"), CallArguments(0, "{}"))])
    (call,) = response["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("n", "f", "{}")


def test_a_custom_tool_gets_its_text() -> None:
    events, response = run([parsed(CallBegin(0, "free"), CallArguments(0, '{"input":"a\\nb"}'))])
    assert response["output"][0]["input"] == "a\nb"
    assert kinds_of(events)[3:5] == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]


@pytest.mark.parametrize("arguments", ['["a"]', '{"input":5}', '{"other":"a"}', "7", ""])
def test_a_custom_call_of_another_form_keeps_its_arguments(arguments: str) -> None:
    _, response = run([parsed(CallBegin(0, "free"), CallArguments(0, arguments))])
    assert response["output"][0]["input"] == arguments


def test_a_custom_call_that_was_cut_keeps_its_partial_input() -> None:
    pieces = [parsed(CallBegin(0, "free"), CallArguments(0, '{"input":"a'), finish="length")]
    _, response = run(pieces)
    assert (response["status"], response["output"][0]["input"]) == ("incomplete", '{"input":"a')


def test_two_turns_with_an_mcp_call_between_them() -> None:
    generator = start()
    events = generator.list_tools("docs", [{"name": "find", "input_schema": {"type": "object"}}])
    assert kinds_of(events)[:2] == ["output_item.added", "mcp_list_tools.in_progress"]
    call: list[ParserEvent] = [CallBegin(0, "search"), CallArguments(0, '{"q":1}')]
    events += generator.write([parsed(*call, finish="tool_calls")]) + generator.end_turn()
    waiting = generator.server_calls[0]
    assert (waiting.name.name, waiting.arguments) == ("find", '{"q":1}')
    assert generator.response["output"][1]["status"] == "calling"
    events += generator.succeed(waiting, "42")
    events += generator.write([parsed(Content("It is 42"), finish="stop")]) + generator.end_turn()
    events += generator.complete(USAGE)
    check(events)
    assert kinds_of(events)[4:] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta"),
        *("mcp_call_arguments.done", "mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    kinds = [each["type"] for each in generator.response["output"]]
    assert kinds == ["mcp_list_tools", "mcp_call", "message"]
    assert generator.response["output"][1]["output"] == "42"


def test_a_failed_mcp_call_is_reported() -> None:
    generator = start()
    events = generator.write([parsed(CallBegin(0, "search"))]) + generator.end_turn()
    error = {"type": "mcp_protocol_error", "code": -32602, "message": "no such tool"}
    events += generator.fail_call(generator.server_calls[0], error)
    events += generator.complete(USAGE)
    check(events)
    assert generator.response["output"][0]["status"] == "failed"
    assert generator.response["output"][0]["error"] == error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("bad", param="input"), "invalid_prompt"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (Unavailable("away"), "server_error"),
    ],
)
def test_a_failure_keeps_the_output_so_far(error: Any, code: str) -> None:
    generator = start()
    events = generator.queue() + generator.begin(is_created=True)
    events += generator.write([parsed(Content("Hel"))]) + generator.fail(error)
    check(events)
    assert kinds_of(events)[:3] == ["created", "queued", "in_progress"]
    assert kinds_of(events)[-3:] == ["output_item.done", "error", "failed"]
    final = events[-1]["response"]
    assert (final["status"], final["error"]["code"]) == ("failed", code)
    assert final["output"][0]["status"] == "incomplete"
    assert final["output"][0]["content"][0]["text"] == "Hel"


def test_cancelling_fails_waiting_calls() -> None:
    generator = start()
    events = (
        generator.begin() + generator.write([parsed(CallBegin(0, "search"))]) + generator.end_turn()
    )
    events += generator.cancel(USAGE)
    check(events)
    assert events[-1]["response"]["status"] == "cancelled"
    assert events[-1]["response"]["output"][0]["status"] == "failed"


def test_events_do_not_change_later() -> None:
    generator = start()
    begun = generator.begin()
    added = generator.write([parsed(Content("a"))])
    before = msgspec.json.encode([begun, added])
    generator.write([parsed(Content("b"))])
    generator.end_turn()
    generator.complete(USAGE)
    assert msgspec.json.encode([begun, added]) == before


def test_the_usage_of_several_turns_is_added_up() -> None:
    one = Usage(10, 15, 5, PromptTokensDetails(4), CompletionTokensDetails(2))
    usage = usage_fields([one, Usage(20, 21, 1), one])
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (40, 11, 51)
    assert usage["input_tokens_details"]["cached_tokens"] == 8
    assert usage["output_tokens_details"]["reasoning_tokens"] == 4
