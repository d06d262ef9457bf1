"""A parser's events as a chat shows them: fields of a delta, or a whole message."""

from typing import Any

import msgspec

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.openai.call_ids import call_id
from tokenmesh.services.gateway.openai.shapes import ChatMessageOut, FunctionOut, ToolCallOut
from tokenmesh.services.gateway.parsers.events import CallBegin, Content, Event, Reasoning


def delta_of(events: list[Event], choice: int, response_id: str) -> dict[str, Any]:
    """Events of a choice as one delta; empty when there is nothing to show."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            delta["reasoning"] = delta.get("reasoning", "") + event.text
        elif isinstance(event, CallBegin):
            calls[event.index] = {
                "index": event.index,
                "id": call_id(response_id, choice, event),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        else:
            call = calls.setdefault(
                event.index, {"index": event.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def message_of(piece: OutputChunk, response_id: str, role: str, echo: str) -> ChatMessageOut:
    """All of a choice; `echo` is text that its content begins with."""
    events = piece.all_events()
    calls: dict[int, ToolCallOut] = {}
    for event in events:
        if isinstance(event, CallBegin):
            function = FunctionOut(event.name)
            calls[event.index] = ToolCallOut(call_id(response_id, piece.choice, event), function)
        elif not isinstance(event, Content | Reasoning):
            calls[event.index].function.arguments += event.text
    content = echo + _text_of(events, Content)
    reasoning = _text_of(events, Reasoning) or None
    has_more = bool(calls) or reasoning is not None
    return ChatMessageOut(
        content=None if has_more and not content else content,
        role=role,
        tool_calls=list(calls.values()) or msgspec.UNSET,
        reasoning=reasoning,
    )


def _text_of(events: list[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])
