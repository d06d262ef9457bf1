"""A stopping gateway sends errors for the requests that it cancels, and logs no traceback."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.service_mesh import running
from tests.servers import free_port
from tokenmesh.services.gateway.main import build
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.service import Mesh

TALK = [{"role": "user", "content": "Hi"}]
STREAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": TALK}, '"code":"draining"'),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 64}, '"code":"draining"'),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 64}, '"code":"draining"'),
    ("/v1/messages", {"messages": TALK, "max_tokens": 64}, "overloaded_error"),
    ("/v1/responses", {"input": "Hi", "store": False}, "response.failed"),
    ("/v1/responses", {"input": "Hi", "store": True}, '"code":"draining"'),
]


@pytest.fixture
async def back_end(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[BackEnd]:
    async with BackEnd(bus_settings, redis_settings, saying("so many words " * 40)) as found:
        found.workers[0].step_s = 0.05
        yield found


@pytest.fixture
async def mesh(back_end: BackEnd) -> AsyncIterator[Mesh]:
    """The gateway that stops."""
    gateway = GatewaySettings(port=free_port())
    settings = Settings(bus=back_end.settings.bus, redis=back_end.settings.redis, gateway=gateway)
    async with running("gateway", settings, build) as found:
        await back_end.until(lambda: bool(found.members.workers(back_end.model)))
        yield found


def url_of(mesh: Mesh, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{mesh.settings.gateway.port}"


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("path", "fields", "expected"), STREAMS)
async def test_a_stream_that_has_begun_ends_with_an_error(
    back_end: BackEnd,
    mesh: Mesh,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
    expected: str,
) -> None:
    body = {"model": back_end.model, "stream": True, **fields}
    text = ""
    async with (
        httpx.AsyncClient(base_url=url_of(mesh), timeout=10) as client,
        client.stream("POST", path, json=body) as response,
    ):
        assert response.status_code == 200
        async for part in response.aiter_text():
            text += part
            if text.count("data: ") > 8 and not mesh.draining:
                back_end.workers[0].hold()
                await mesh.drain(1.0)
    assert expected in text
    assert "this gateway is stopping" in text
    assert tracebacks(caplog) == []
    back_end.workers[0].release(8)


async def test_followers_of_a_stored_response_get_a_retryable_error(
    back_end: BackEnd, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    back_end.workers[0].hold()
    async with httpx.AsyncClient(base_url=url_of(mesh), timeout=10) as client:
        body = {"model": back_end.model, "input": "Hi", "background": True}
        made = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{made['id']}?stream=true"
        lines = []
        async with client.stream("GET", path) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if line == "event: response.queued":
                    leaving = asyncio.create_task(mesh.drain(1.0))
        await leaving
    events = [json.loads(each.removeprefix("data: ")) for each in lines if each[:5] == "data:"]
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "draining")
    assert tracebacks(caplog) == []
    back_end.workers[0].release(8)


async def test_a_realtime_session_is_closed_for_a_restart(
    back_end: BackEnd, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    back_end.workers[0].hold()
    address = f"{url_of(mesh, 'ws')}/v1/realtime?model={back_end.model}"
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    async with connect(address) as client:
        await client.recv()
        for event in (
            {"type": "conversation.item.create", "item": item},
            {"type": "response.create"},
        ):
            await client.send(json.dumps(event))
        await back_end.until(lambda: len(back_end.workers[0].runs) == 1)
        await mesh.drain(1.0)
        with suppress(ConnectionClosedError):
            async with asyncio.timeout(10):
                async for _ in client:
                    continue
        assert client.close_code == 1012
    assert tracebacks(caplog) == []
    back_end.workers[0].release(8)
