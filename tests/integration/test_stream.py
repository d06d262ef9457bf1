"""Streams of a real gateway, chunk by chunk, with fakes behind it."""

import json
from typing import Any

import httpx

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"


async def chunks(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> list[dict[str, Any] | str]:
    """Every event of a stream, parsed; the last one is [DONE]."""
    events: list[dict[str, Any] | str] = []
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], **fields}


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in choices
        if choice["index"] == index
    )


async def test_a_chat_stream_has_role_text_end_and_done(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    events: list[Any] = await chunks(client, "/v1/chat/completions", ask(mesh))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == TEXT
    last = events[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", None)
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_usage_comes_last_when_asked_for(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    fields = {"stream_options": {"include_usage": True}, "max_tokens": 5}
    events: list[Any] = await chunks(client, "/v1/chat/completions", ask(mesh, **fields))
    last = events[-2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    created = last["usage"]["prompt_tokens"] // 16 * 16 - 3
    details = {"cached_tokens": 3, "created_cache_tokens": created}
    assert last["usage"]["prompt_tokens_details"] == details
    assert all("usage" not in event for event in events[:-2])


async def test_running_usage_is_in_every_chunk(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    shown = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"stream_options": shown, "max_tokens": 5, "prompt": "Hi"}
    body = {"model": mesh.model, **fields}
    events: list[Any] = await chunks(client, "/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_an_interval_joins_tokens_into_fewer_chunks(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 100, "return_token_ids": True}
    events: list[Any] = await chunks(client, "/v1/completions", {**body, "stream_interval": 4})
    sizes = [len(event["choices"][0]["token_ids"]) for event in events[:-1]]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) <= {4}
    assert text_of(events) == TEXT


async def test_tokens_of_one_message_are_one_chunk(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    mesh = BackEnd(bus_settings, redis_settings)
    mesh.tokens_per_step = 100
    async with mesh, httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
        events: list[Any] = await chunks(client, "/v1/chat/completions", ask(mesh))
        texts = [event["choices"][0]["delta"].get("content") for event in events[:-1]]
        assert texts == ["", TEXT]


async def test_choices_of_a_stream_are_distinguished(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "prompt": ["One", "Two"], "n": 2, "max_tokens": 100, "echo": True}
    events: list[Any] = await chunks(client, "/v1/completions", body)
    texts = [text_of(events, index) for index in range(4)]
    assert texts == ["One" + TEXT, "One" + TEXT, "Two" + TEXT, "Two" + TEXT]
    ends = [
        choice["index"]
        for event in events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_a_stop_string_across_chunks_never_shows(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    fields = {"stop": ["mesh, na\u00efve"]}
    events: list[Any] = await chunks(client, "/v1/chat/completions", ask(mesh, **fields))
    assert text_of(events) == "Hello from the "
    assert events[-2]["choices"][0]["stop_reason"] == "mesh, na\u00efve"


async def test_a_continued_message_is_echoed(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "Well: "}]
    fields = {"messages": messages, "echo": True, "add_generation_prompt": False}
    events: list[Any] = await chunks(client, "/v1/chat/completions", ask(mesh, **fields))
    assert text_of(events) == "Well: " + TEXT


async def test_the_response_names_its_trace(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    body = ask(mesh, stream=True)
    response = await client.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
    assert response.headers["traceparent"].split("-")[1] == "a" * 32


async def test_a_stream_that_waits_is_kept_alive(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    fields: dict[str, Any] = {"sse_keep_alive_s": 0.05}
    async with (
        BackEnd(bus_settings, redis_settings, **fields) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        mesh.workers[0].hold()
        body = {**ask(mesh), "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            mesh.workers[0].release(4)
            rest = [line async for line in lines if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in rest[:-1]]
    assert text_of(events) == TEXT
    assert rest[-1] == "data: [DONE]"


async def test_an_error_after_a_keep_alive_ends_the_stream(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    fields: dict[str, Any] = {"sse_keep_alive_s": 0.05, "request_timeout_s": 0.5}
    async with (
        BackEnd(bus_settings, redis_settings, **fields) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        mesh.workers[0].hold()
        body = {**ask(mesh), "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert "in time" in json.loads(lines[0][6:])["error"]["message"]
    assert lines[1:] == ["data: [DONE]"]
