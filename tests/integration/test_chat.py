"""Chat completions through a real gateway, with fakes behind it, over HTTP."""

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


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    return {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_a_chat_is_answered(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=ask(mesh))
    assert response.status_code == 200, response.text
    body = response.json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert body["id"] == response.headers["x-request-id"]
