"""/v1/realtime with the openai client, unchanged, against a real gateway with fakes behind it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from starlette.websockets import WebSocket

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
ROUND = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


class Talk:
    """A connection that checks every event against the client's types."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection
        self.ids: set[str] = set()

    async def next(self) -> Any:
        data = await self.connection.recv_bytes()
        event = EVENT.validate_json(data)
        assert event.event_id not in self.ids
        self.ids.add(event.event_id)
        return event

    async def until(self, kind: str) -> list[Any]:
        events = [await self.next()]
        while events[-1].type != kind:
            assert events[-1].type != "error", events[-1]
            events.append(await self.next())
        return events

    async def say(self, text: str) -> None:
        await self.connection.conversation.item.create(
            item={
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
        )
        await self.until("conversation.item.done")

    async def answer(self, **fields: Any) -> list[Any]:
        requested: Any = fields
        await self.connection.response.create(response=requested)
        return await self.until("response.done")

    async def refused(self, event: dict[str, Any]) -> Any:
        await self.connection.send({"event_id": "mine", **event})  # type: ignore[arg-type]
        error = await self.next()
        assert (error.type, error.error.event_id) == ("error", "mine")
        return error.error


@asynccontextmanager
async def talking(mesh: BackEnd | SmallMesh, **query: Any) -> AsyncIterator[Talk]:
    """A session after session.created."""
    client = openai.AsyncOpenAI(
        base_url="http://unused", api_key="sk-1", websocket_base_url=mesh.url + "/v1"
    )
    async with client, client.realtime.connect(model=mesh.model, **query) as connection:
        talk = Talk(connection)
        created = await talk.next()
        assert created.type == "session.created"
        assert created.session.model == mesh.model
        yield talk


async def test_a_round(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.say("Hi")
        events = await talk.answer()
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == ROUND
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    response = events[-1].response
    assert (response.status, response.status_details.type) == ("completed", "completed")
    assert response.output[0].content[0].text == TEXT
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens > 1
    assert usage.input_token_details.cached_tokens == 3


async def test_the_model_sees_the_conversation(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.connection.session.update(
            session={"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 40}
        )
        updated = await talk.next()
        assert (updated.type, updated.session.instructions) == ("session.updated", "Be brief.")
        await talk.say("Hi")
        await talk.answer()
        await talk.say("And now?")
        await talk.answer(instructions="Be long.", max_output_tokens=2, metadata={"a": "b"})
    first, second = (_prompt(each) for each in mesh.tokenizer.received)
    assert [(each["role"], each["content"]) for each in first] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert [(each["role"], each["content"]) for each in second] == [
        ("system", "Be long."),
        ("user", "Hi"),
        ("assistant", TEXT),
        ("user", "And now?"),
    ]
    sizes = [each.sampling.max_tokens for each in mesh.workers[0].generates]
    assert sizes == [40, 2]


def _prompt(question: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(question.prompt.messages_json)
    return messages


async def test_max_output_tokens_make_a_response_incomplete(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.say("Hi")
        response = (await talk.answer(max_output_tokens=2))[-1].response
    assert (response.status, response.status_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 2


async def test_items_are_added_shown_and_deleted(mesh: BackEnd) -> None:
    def message(item_id: str) -> Any:
        content = [{"type": "input_text", "text": item_id}]
        return {"id": item_id, "type": "message", "role": "user", "content": content}

    async with talking(mesh) as talk:
        items = talk.connection.conversation.item
        for item_id, previous in (("b", None), ("d", None), ("a", "root"), ("c", "b")):
            extra = {} if previous is None else {"previous_item_id": previous}
            await items.create(item=message(item_id), **extra)
            added, done = await talk.next(), await talk.next()
            assert (added.type, done.type) == ("conversation.item.added", "conversation.item.done")
            assert added.previous_item_id == {"b": None, "d": "b", "a": None, "c": "b"}[item_id]
        await items.retrieve(item_id="c")
        shown = await talk.next()
        assert (shown.type, shown.item.id) == ("conversation.item.retrieved", "c")
        await items.delete(item_id="b")
        assert (await talk.next()).item_id == "b"
        await talk.answer()
    assert [each["content"] for each in _prompt(mesh.tokenizer.received[-1])] == ["a", "c", "d"]


async def test_a_response_outside_the_conversation_does_not_change_it(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.say("Hi")
        content = [{"type": "input_text", "text": "Apart?"}]
        item = {"type": "message", "role": "user", "content": content}
        events = await talk.answer(conversation="none", input=[item], metadata={"topic": "x"})
        assert not any(event.type.startswith("conversation.") for event in events)
        assert events[-1].response.metadata == {"topic": "x"}
        await talk.answer()
    first, second = (_prompt(each) for each in mesh.tokenizer.received)
    assert [each["content"] for each in first] == ["Apart?"]
    assert [each["content"] for each in second] == ["Hi"]


async def test_the_output_of_a_call_goes_back_to_the_model(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        items = talk.connection.conversation.item
        await talk.say("Weather?")
        call: Any = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"}
        await items.create(item=call)
        await talk.until("conversation.item.done")
        output: Any = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
        await items.create(item=output)
        await talk.until("conversation.item.done")
        await talk.answer()
    function = {"name": "look", "arguments": "{}"}
    assert _prompt(mesh.tokenizer.received[-1])[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "look"},
    ]


async def test_text_of_the_model_is_truncated(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.say("Hi")
        item_id = (await talk.answer())[-1].response.output[0].id
        spoken = {"type": "conversation.item.truncate", "item_id": item_id}
        for index, end_ms, param in ((1, 0, "content_index"), (0, 5, "audio_end_ms")):
            refused = {**spoken, "content_index": index, "audio_end_ms": end_ms}
            error = await talk.refused(refused)
            assert (error.code, error.param) == ("invalid_value", param)
        await talk.connection.conversation.item.truncate(
            item_id=item_id, content_index=0, audio_end_ms=0
        )
        assert (await talk.next()).type == "conversation.item.truncated"
        await talk.connection.conversation.item.retrieve(item_id=item_id)
        assert (await talk.next()).item.content[0].text == ""


async def slow_mesh(bus: BusSettings, redis: RedisSettings, **limits: Any) -> BackEnd:
    mesh = BackEnd(bus, redis, saying("word " * 40), **limits)
    mesh.step_s = 0.02
    return mesh


async def test_cancelling(bus_settings: BusSettings, redis_settings: RedisSettings) -> None:
    async with await slow_mesh(bus_settings, redis_settings) as mesh, talking(mesh) as talk:
        await talk.say("Hi")
        await talk.connection.response.create()
        await talk.until("response.output_text.delta")
        error = await _second_response(talk)
        assert error.code == "conversation_already_has_active_response"
        await talk.connection.response.cancel()
        done = (await talk.until("response.done"))[-1].response
        assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
        assert done.output[0].status == "incomplete"
        assert done.output[0].content[0].text.startswith("w")
        await mesh.until(lambda: bool(mesh.workers[0].cancels))
        refused = await talk.refused({"type": "response.cancel"})
        assert refused.code == "response_cancel_not_active"
        # The partial output stays in the conversation.
        await talk.answer(max_output_tokens=1)
        assert _prompt(mesh.tokenizer.received[-1])[-1]["content"].startswith("w")


async def _second_response(talk: Talk) -> Any:
    await talk.connection.send({"type": "response.create", "event_id": "mine"})
    while (event := await talk.next()).type != "error":
        continue
    assert event.error.event_id == "mine"
    return event.error


async def test_cancelling_immediately(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with await slow_mesh(bus_settings, redis_settings) as mesh, talking(mesh) as talk:
        await talk.say("Hi")
        mesh.scheduler.delay_s = 1.0
        for _ in range(5):
            await talk.connection.response.create()
            await talk.connection.response.cancel()
            done = (await talk.until("response.done"))[-1].response
            assert (done.status, done.output, done.usage) == ("cancelled", [], None)


async def test_a_client_that_leaves_cancels(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with await slow_mesh(bus_settings, redis_settings) as mesh:
        async with talking(mesh) as talk:
            await talk.say("Hi")
            await talk.connection.response.create()
            await talk.until("response.output_text.delta")
        await mesh.until(lambda: bool(mesh.workers[0].cancels))
        await mesh.until(lambda: "websocket_connections_active 0.0" in _metrics(mesh))
        assert "websocket_connections_total 1.0" in _metrics(mesh)
        assert "websocket_connection_duration_seconds_count 1.0" in _metrics(mesh)


def _metrics(mesh: BackEnd) -> str:
    return mesh.metrics.render().decode()


async def test_a_response_survives_its_worker(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with await slow_mesh(bus_settings, redis_settings) as mesh, talking(mesh) as talk:
        await mesh.add_worker()
        await talk.say("Hi")
        await talk.connection.response.create()
        await talk.until("response.output_text.delta")
        await mesh.workers[0].die()
        done = (await talk.until("response.done"))[-1].response
    assert done.status == "completed"
    assert done.output[0].content[0].text.strip() == ("word " * 40).strip()


async def test_a_failed_response_leaves_the_session_open(mesh: BackEnd) -> None:
    async with talking(mesh) as talk:
        await talk.say("Hi")
        mesh.scheduler.is_full = True
        failed = (await talk.answer())[-1].response
        assert (failed.status, failed.status_details.error.code) == (
            "failed",
            "rate_limit_exceeded",
        )
        mesh.scheduler.is_full = False
        assert (await talk.answer())[-1].response.status == "completed"


async def test_many_sessions_at_once(mesh: BackEnd) -> None:
    async def one(number: int) -> str:
        async with talking(mesh) as talk:
            await talk.say(f"I am {number}")
            response = (await talk.answer())[-1].response
            return str(response.output[0].content[0].text)

    texts = await asyncio.gather(*(one(number) for number in range(20)))
    assert set(texts) == {TEXT}
    said = {_prompt(each)[0]["content"] for each in mesh.tokenizer.received}
    assert said == {f"I am {number}" for number in range(20)}


async def test_the_model_calls_a_function(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    call = '<tool_call>{"name":"f","arguments":{"at":"sky"}}</tool_call>'
    text = f"<think>Hm.</think>\n\nLook.\n{call}{call}"
    async with BackEnd(bus_settings, redis_settings, saying(text)) as mesh, talking(mesh) as talk:
        mesh.tokenizer.reasoning_parser = "qwen3"
        mesh.tokenizer.tool_call_parser = "hermes"
        await talk.say("Hi")
        tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        await talk.connection.session.update(session={"type": "realtime", "tools": [tool]})
        assert (await talk.next()).session.tools[0].name == "f"
        events = await talk.answer()
        message, *calls = events[-1].response.output
        assert message.content[0].text.strip() == "Look."
        done = [each for each in events if each.type == "response.function_call_arguments.done"]
        deltas = [each for each in events if each.type == "response.function_call_arguments.delta"]
        for output_index, item in enumerate(calls, start=1):
            assert (item.type, item.name, item.status) == ("function_call", "f", "completed")
            assert json.loads(item.arguments) == {"at": "sky"}
            own = [each.delta for each in deltas if each.call_id == item.call_id]
            assert "".join(own) == item.arguments == done[output_index - 1].arguments
            output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
            await talk.connection.conversation.item.create(item=output)
            await talk.until("conversation.item.done")
        assert len({item.call_id for item in calls}) == 2
        await talk.answer(max_output_tokens=1)
        kinds = [each["role"] for each in _prompt(mesh.tokenizer.received[-1])]
        assert kinds == ["user", "assistant", "tool", "tool"]


async def test_each_response_of_a_session_is_charged_its_reported_usage(
    mesh: BackEnd,
) -> None:
    async with talking(mesh) as talk:
        reported = []
        for text in ("Hi", "And then?"):
            await talk.say(text)
            reported.append((await talk.answer())[-1].response.usage)
    # It is charged after the last event.
    async with httpx.AsyncClient(base_url=mesh.url) as client, asyncio.timeout(15):
        counted: dict[str, int] = {}
        while counted.get("requests", 0) < 2:
            counted = await charged(client, mesh.model)
    assert counted["requests"] == 2
    assert counted["prompt_tokens"] == sum(usage.input_tokens for usage in reported)
    assert counted["completion_tokens"] == sum(usage.output_tokens for usage in reported)


async def charged(client: httpx.AsyncClient, model: str) -> dict[str, int]:
    models = (await client.get("/v1/usage")).json()["models"]
    return next((each for each in models if each["model"] == model), {})


async def chat(mesh: BackEnd | SmallMesh, messages: Any, **fields: Any) -> tuple[str, Any]:
    """The same model's uninterrupted answer, and its usage in the shape of a realtime response."""
    body = {"model": mesh.model, "messages": messages, **fields}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    usage = answer["usage"]
    num_input, num_output = usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"] or "", {
        "total_tokens": usage["total_tokens"],
        "input_tokens": num_input,
        "output_tokens": num_output,
        "input_token_details": {
            "text_tokens": num_input,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
        },
        "output_token_details": {"text_tokens": num_output, "audio_tokens": 0},
    }


def usage_of(response: Any) -> Any:
    return response.usage.model_dump(exclude_none=True)


def text_of(response: Any) -> str:
    return "".join(part.text for item in response.output for part in item.content)


async def cancelled(talk: Talk, mesh: BackEnd) -> list[Any]:
    """The events of a response that is cancelled while it runs."""
    await talk.connection.response.create()
    events = []
    for _ in range(2):
        # More than one token arrives while the first is written.
        events += await talk.until("response.output_text.delta")
    mesh.workers[0].hold()
    await talk.connection.response.cancel()
    events += await talk.until("response.done")
    mesh.workers[0].release(1)
    return events


@pytest.fixture(params=[0.0, 0.02], ids=["fast client", "slow client"])
def writing_takes_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a slow client: each write waits."""
    send_text = WebSocket.send_text

    async def send_later(socket: WebSocket, data: str) -> None:
        await asyncio.sleep(request.param)
        await send_text(socket, data)

    monkeypatch.setattr(WebSocket, "send_text", send_later)


@pytest.mark.usefixtures("writing_takes_time")
async def test_usage_matches_the_same_chat_and_the_events(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    text = "<think>Hm.</think>" + "".join(f" {number}" for number in range(10))
    async with BackEnd(bus_settings, redis_settings, saying(text)) as mesh:
        mesh.tokenizer.reasoning_parser = "qwen3"
        mesh.workers[0].step_s = 0.004
        rounds = []
        async with talking(mesh) as talk:
            await talk.say("So?")
            rounds.append(await talk.answer())
            rounds.append(await cancelled(talk, mesh))
            rounds.append(await cancelled(talk, mesh))
            rounds.append(await talk.answer(max_output_tokens=25))
        states = [events[-1].response.status for events in rounds]
        assert states == ["completed", "cancelled", "cancelled", "incomplete"]
        for events, question in zip(rounds, list(mesh.tokenizer.received), strict=True):
            response = events[-1].response
            deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
            assert "".join(deltas) == text_of(response)
            # Cut, or complete.
            is_whole = response.status == "completed"
            cut = {} if is_whole else {"max_tokens": response.usage.output_tokens}
            said, usage = await chat(mesh, _prompt(question), **cut)
            assert usage_of(response) == usage
            assert text_of(response).strip() == said.strip()


async def test_usage_reports_cached_tokens_of_a_session(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    """The same chats in sequence, with separate blocks, have the same prefix hits."""
    messages: list[dict[str, str]] = []
    rounds = []
    worker = {"sim_step_s": 0.02}
    async with SmallMesh(tmp_path, bus_settings, redis_settings, worker=worker) as mesh:
        async with talking(mesh) as talk:
            for number in range(4):
                messages.append({"role": "user", "content": f"Tell me of the number {number}."})
                await talk.say(messages[-1]["content"])
                size = 250 if number == 1 else 12
                await talk.connection.response.create(response={"max_output_tokens": size})
                if number == 1:
                    await talk.until("response.output_text.delta")
                    await talk.connection.response.cancel()
                response = (await talk.until("response.done"))[-1].response
                rounds.append((list(messages), response))
                messages.append({"role": "assistant", "content": text_of(response)})
        assert [each.status for _, each in rounds].count("cancelled") == 1
        cached = [each.usage.input_token_details.cached_tokens for _, each in rounds]
        assert cached[0] == 0 < cached[1] < cached[2] < cached[3]
        for requested, response in rounds:
            size = response.usage.output_tokens
            _, usage = await chat(mesh, requested, max_tokens=size, cache_salt="another")
            assert usage_of(response) == usage
