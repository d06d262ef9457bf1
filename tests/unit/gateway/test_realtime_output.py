"""A response's server events, and the conversation that its items are part of."""

import asyncio
import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from tokenmesh.services.gateway.apis.realtime.conversation import (
    Item,
    RealtimeConversation,
    read_item,
)
from tokenmesh.services.gateway.apis.realtime.events import Channel
from tokenmesh.services.gateway.apis.realtime.response import ResponseOutput
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, Conflict, InvalidInput, NotFound

EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TEXTS = st.text(alphabet="ab \n\u00e9", min_size=1, max_size=6)
PLAIN = st.one_of(st.builds(Content, TEXTS), st.builds(Reasoning, TEXTS))


@st.composite
def turns(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = list(draw(st.lists(PLAIN, max_size=4)))
    for index in range(draw(st.integers(0, 2))):
        events.append(CallBegin(index, f"f{index}"))
        events.extend(CallArguments(index, part) for part in draw(st.lists(TEXTS, max_size=2)))
        events.extend(draw(st.lists(PLAIN, max_size=1)))
    return events


def reported(
    events: list[Event], status: str, conversation: RealtimeConversation | None
) -> list[Any]:
    """The server events, each as the openai client reads it."""
    output = ResponseOutput("resp-1", conversation)
    made: list[Any] = []
    for event in [*output.push(events), *output.finish(status)]:
        # Encoded as when sent, because items change afterwards.
        data = json.loads(json.dumps({"event_id": "e", **event}))
        made.append(EVENT.validate_python(data, strict=True))
    assert list(output.finish(status)) == []
    return made


@given(turns(), st.sampled_from(["completed", "incomplete"]), st.booleans())
def test_events_of_a_response(events: list[Event], status: str, is_apart: bool) -> None:
    conversation = None if is_apart else RealtimeConversation(GatewaySettings())
    made = reported(events, status, conversation)
    done = [each for each in made if each.type == "response.output_item.done"]
    added = [each for each in made if each.type == "response.output_item.added"]
    assert [each.item.id for each in added] == [each.item.id for each in done]
    assert [each.output_index for each in added] == list(range(len(added)))
    assert {each.item.status for each in added} <= {"in_progress"}
    statuses = [each.item.status for each in done]
    assert statuses[:-1] == ["completed"] * len(statuses[:-1])
    assert statuses[-1:] in ([], [status])
    for each in done:
        deltas = "".join(
            one.delta for one in made if hasattr(one, "delta") and one.item_id == each.item.id
        )
        item = each.item
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    kept = [] if conversation is None else [item.view for item in conversation]
    expected = [] if is_apart else [each.item.id for each in done]
    assert [view["id"] for view in kept] == expected
    assert any(each.type.startswith("conversation.") for each in made) == bool(kept)


@given(turns())
def test_no_text_but_white_space_is_lost(events: list[Event]) -> None:
    made = reported(events, "completed", None)
    shown = "".join(each.text for each in made if each.type == "response.output_text.done")
    said = "".join(event.text for event in events if isinstance(event, Content))
    assert "".join(shown.split()) == "".join(said.split())


def message(item_id: str, text: str = "a") -> Item:
    content = [{"type": "input_text", "text": text}]
    value = {"id": item_id, "type": "message", "role": "user", "content": content}
    return read_item(value, "item")


IDS = st.sampled_from(["a", "b", "c", "d", "e"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDS, st.one_of(st.none(), st.just("root"), IDS)),
        st.tuples(st.just("remove"), IDS, st.none()),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_conversation_is_a_list_with_bounds(steps: list[tuple[str, str, str | None]]) -> None:
    conversation = RealtimeConversation(GatewaySettings(realtime_max_items=3))
    model: list[str] = []
    for kind, item_id, previous in steps:
        if kind == "remove":
            if item_id in model:
                conversation.remove(item_id)
                model.remove(item_id)
            else:
                with pytest.raises(NotFound):
                    conversation.remove(item_id)
            continue
        is_right = len(model) < 3 and item_id not in model
        is_right = is_right and (previous in (None, "root") or previous in model)
        if not is_right:
            with pytest.raises(InvalidInput):
                conversation.add(message(item_id), previous)
            continue
        index = {None: len(model), "root": 0}.get(previous, -1)
        index = model.index(str(previous)) + 1 if index < 0 else index
        before = conversation.add(message(item_id), previous)
        model.insert(index, item_id)
        assert before == (model[index - 1] if index else None)
        assert [item.id for item in conversation] == model


def test_bytes_are_counted_as_they_change() -> None:
    conversation = RealtimeConversation(GatewaySettings(realtime_max_session_bytes=1024))
    item = message("a", "x" * 500)
    conversation.add(item)
    with pytest.raises(InvalidInput):
        conversation.add(message("b", "x" * 500))
    item.change(content=[])
    conversation.add(message("b", "x" * 500))
    with pytest.raises(Conflict):
        conversation.add(message("b"))


class SlowSocket:
    """Accepts some events, then blocks until it is released."""

    def __init__(self, takes: int) -> None:
        self.sent: list[str] = []
        self._takes = takes
        self.released = asyncio.Event()

    async def send_text(self, text: str) -> None:
        if len(self.sent) >= self._takes:
            await self.released.wait()
        self.sent.append(json.loads(text)["type"])


@pytest.mark.parametrize("takes", [0, 1, 2])
async def test_a_cancelled_send_leaves_the_unsent_events(takes: int) -> None:
    socket: Any = SlowSocket(takes)
    channel = Channel(socket, 5.0)
    events = deque([{"type": name} for name in "abc"])
    sending = asyncio.create_task(channel.send_all(events))
    await asyncio.sleep(0.01)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert [each["type"] for each in events] == list("abc")[takes:]
    socket.released.set()
    await channel.send_all(events)
    assert socket.sent == list("abc")


async def test_a_socket_that_blocks_is_cancelled() -> None:
    socket: Any = SlowSocket(0)
    with pytest.raises(Cancelled):
        await Channel(socket, 0.01).send({"type": "a"})
