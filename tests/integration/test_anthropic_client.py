"""The anthropic Python client, unchanged, against a real gateway with fakes behind it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.fakes.back_end import BackEnd, saying
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, service_wait_s=0.5) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=mesh.url, api_key="none", max_retries=0, timeout=10
    ) as connected:
        yield connected


async def test_a_message(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model=mesh.model, max_tokens=50, messages=MESSAGES)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    assert (message.role, message.type, message.model) == ("assistant", "message", mesh.model)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 1
    assert message._request_id == message.id


def _use_blocking_client(url: str, model: str) -> list[str]:
    requested: Any = {"model": model, "max_tokens": 50, "messages": MESSAGES}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        message = client.messages.create(**requested)
        with client.messages.stream(**requested) as stream:
            streamed = "".join(stream.text_stream)
        count = client.messages.count_tokens(model=model, messages=MESSAGES)
    return [str(message.stop_reason), streamed, str(count.input_tokens > 0)]


async def test_the_blocking_client(mesh: BackEnd) -> None:
    reported = await asyncio.to_thread(_use_blocking_client, mesh.url, mesh.model)
    assert reported == ["end_turn", TEXT, "True"]


async def test_a_stream_of_events(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    stream = await client.messages.create(
        model=mesh.model, max_tokens=50, messages=MESSAGES, stream=True
    )
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    for event in events:
        type(event).model_validate(event.model_dump())


async def test_the_stream_helper(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=mesh.model, max_tokens=50, messages=MESSAGES) as stream:
        parts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(parts) == TEXT == _text(final)
    whole = await client.messages.create(model=mesh.model, max_tokens=50, messages=MESSAGES)
    assert final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason


def _text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_stop_sequence(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(
        model=mesh.model, max_tokens=50, messages=MESSAGES, stop_sequences=["mesh", "caf"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "mesh")
    assert _text(message) == "Hello from the "


async def test_max_tokens(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model=mesh.model, max_tokens=2, messages=MESSAGES)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_fields_reach_the_worker(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(
        model=f"{mesh.model}-alias",
        max_tokens=7,
        messages=MESSAGES,
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.25, "cache_salt": "pepper"},
    )
    (generate,) = mesh.workers[0].generates
    sampling = generate.sampling
    assert (sampling.max_tokens, sampling.temperature) == (7, 0.5)
    assert (sampling.top_k, sampling.top_p) == (3, 0.25)
    assert generate.cache_salt == "pepper"


async def test_count_tokens_matches_the_usage(
    mesh: BackEnd, client: anthropic.AsyncAnthropic
) -> None:
    requested: Any = {
        "model": mesh.model,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": MESSAGES,
    }
    count = await client.messages.count_tokens(**requested)
    message = await client.messages.create(max_tokens=5, **requested)
    read, written = message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens
    assert read
    assert written
    assert count.input_tokens == message.usage.input_tokens + read + written
    shorter = await client.messages.count_tokens(model=mesh.model, messages=MESSAGES)
    assert shorter.input_tokens < count.input_tokens


async def test_tools_are_counted(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    tool: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    await client.messages.count_tokens(model=mesh.model, messages=MESSAGES, tools=[tool])
    prompt: Any = mesh.tokenizer.received[-1].prompt
    assert json.loads(prompt.tools_json) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        }
    ]


@pytest.mark.parametrize(
    ("change", "kind", "reported"),
    [
        ({"model": "absent"}, anthropic.NotFoundError, "absent"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences[0]"),
        ({"temperature": "hot"}, anthropic.BadRequestError, "temperature"),
        ({"top_p": 2}, anthropic.BadRequestError, "top_p"),
    ],
)
async def test_errors_are_raised_as_the_clients_classes(
    mesh: BackEnd, client: anthropic.AsyncAnthropic, change: Any, kind: Any, reported: str
) -> None:
    requested = {"model": mesh.model, "max_tokens": 5, "messages": MESSAGES} | change
    with pytest.raises(kind) as caught:
        await client.post("/v1/messages", body=requested, cast_to=anthropic.types.Message)
    body = caught.value.body
    assert body["type"] == "error"
    assert reported in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


async def test_a_full_mesh(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    mesh.scheduler.is_full = True
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(model=mesh.model, max_tokens=5, messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "3"
    await mesh.stop_scheduler()
    with pytest.raises(anthropic.APIStatusError) as missing:
        await client.messages.create(model=mesh.model, max_tokens=5, messages=MESSAGES)
    assert missing.value.status_code == 529
    body: Any = missing.value.body
    assert body["error"]["type"] == "overloaded_error"


async def test_a_client_that_leaves_cancels(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, saying("word " * 100))
    mesh.step_s = 0.05
    async with mesh, anthropic.AsyncAnthropic(base_url=mesh.url, api_key="x") as client:
        async with client.messages.stream(
            model=mesh.model, max_tokens=200, messages=MESSAGES
        ) as stream:
            async for _ in stream.text_stream:
                break
        await mesh.until(lambda: bool(mesh.workers[0].cancels))


async def test_a_stream_survives_its_worker(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    text = "one two three four five six seven eight nine ten " * 4
    mesh = BackEnd(bus_settings, redis_settings, saying(text))
    mesh.step_s = 0.01
    async with mesh, anthropic.AsyncAnthropic(base_url=mesh.url, api_key="x") as client:
        await mesh.add_worker()
        async with client.messages.stream(
            model=mesh.model, max_tokens=200, messages=MESSAGES
        ) as stream:
            parts: list[str] = []
            async for part in stream.text_stream:
                if not parts:
                    await mesh.workers[0].die()
                parts.append(part)
        assert "".join(parts).strip() == text.strip()


async def test_many_concurrent_messages(mesh: BackEnd, client: anthropic.AsyncAnthropic) -> None:
    async def one(number: int) -> str:
        requested: Any = [{"role": "user", "content": str(number)}]
        async with client.messages.stream(
            model=mesh.model, max_tokens=50, messages=requested
        ) as stream:
            return await stream.get_final_text()

    texts = await asyncio.gather(*(one(number) for number in range(20)))
    assert set(texts) == {TEXT}


async def test_the_edge_refuses_in_the_same_shape(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    digest = hashlib.sha256(b"sk-1").hexdigest()
    mesh = BackEnd(bus_settings, redis_settings, api_key_hashes=(digest,), max_body_bytes=1024)
    requested: Any = {"model": mesh.model, "max_tokens": 5, "messages": MESSAGES}
    async with mesh:
        async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="sk-1") as client:
            await client.messages.create(**requested)
            with pytest.raises(anthropic.APIStatusError) as large:
                await client.messages.create(**requested, system="x" * 2000)
        async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="sk-2") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**requested)
    for caught, status, kind in (
        (large, 413, "request_too_large"),
        (refused, 401, "authentication_error"),
    ):
        body: Any = caught.value.body
        assert caught.value.status_code == status
        assert (body["type"], body["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x"])
async def test_unknown_routes_and_methods_have_the_same_shape(mesh: BackEnd, path: str) -> None:
    async with httpx.AsyncClient(base_url=mesh.url) as plain:
        response = await plain.get(path)
        broken = await plain.post("/v1/messages", content=b"{")
        form = await plain.post("/v1/messages", data={"a": "b"})
    assert response.status_code == (404 if path.endswith("x") else 405)
    for each in (response, broken, form):
        body = each.json()
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"] == each.headers["request-id"]


async def test_unknown_fields_cause_a_warning(mesh: BackEnd) -> None:
    requested = {"model": mesh.model, "max_tokens": 5, "messages": MESSAGES, "n": 2, "novel": 1}
    async with httpx.AsyncClient(base_url=mesh.url) as plain:
        response = await plain.post("/v1/messages", json=requested)
    assert response.status_code == 200
    assert response.headers["x-tokenmesh-warning"] == "unknown fields ignored: n, novel"


async def test_an_error_of_the_tokenizer_names_the_clients_field(mesh: BackEnd) -> None:
    blob = {"type": "image", "source": {"type": "url", "url": "blob:mine"}}
    requested: Any = {
        "model": mesh.model,
        "max_tokens": 5,
        "system": "s",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, blob]}],
    }
    async with httpx.AsyncClient(base_url=mesh.url) as plain:
        response = await plain.post("/v1/messages", json=requested)
        counted = await plain.post("/v1/messages/count_tokens", json=requested)
    assert response.status_code == counted.status_code == 400
    assert "messages[0].content[1]" in response.json()["error"]["message"]
    assert "messages[0].content[1]" in counted.json()["error"]["message"]


async def test_a_stream_pings_while_it_waits(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with BackEnd(bus_settings, redis_settings, sse_keep_alive_s=0.05) as mesh:
        mesh.scheduler.delay_s = 0.4
        requested: Any = {
            "model": mesh.model,
            "max_tokens": 9,
            "messages": MESSAGES,
            "stream": True,
        }
        async with httpx.AsyncClient(base_url=mesh.url) as plain:
            text = (await plain.post("/v1/messages", json=requested)).text
        frames = [frame.partition("\n") for frame in text.strip().split("\n\n")]
        assert frames[0] == ("event: ping", "\n", 'data: {"type":"ping"}')
        assert frames[-1][0] == "event: message_stop"
        async with (
            anthropic.AsyncAnthropic(base_url=mesh.url, api_key="x") as client,
            client.messages.stream(model=mesh.model, max_tokens=50, messages=MESSAGES) as stream,
        ):
            assert await stream.get_final_text() == TEXT


async def test_a_stream_that_cannot_continue_ends_with_an_error(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings, saying("word " * 40), request_timeout_s=0.6)
    mesh.step_s = 0.02
    async with (
        mesh,
        anthropic.AsyncAnthropic(base_url=mesh.url, api_key="x") as client,
        client.messages.stream(model=mesh.model, max_tokens=200, messages=MESSAGES) as stream,
    ):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await stream.get_final_message()
        begun = stream.current_message_snapshot
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "timeout_error")
    assert body["request_id"] == begun.id
    assert _text(begun).startswith("w")
