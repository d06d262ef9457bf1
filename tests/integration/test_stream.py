"""Streams of a real gateway, chunk by chunk, with fakes behind it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tokenmesh.shared.config.bus import BusSettings
from tokenmesh.shared.config.redis import RedisSettings

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        yield http


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
