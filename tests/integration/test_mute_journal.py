"""A journal that does not acknowledge appends: responses are served without delay."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.response_client import ResponseClient
from tests.servers import Server, bus_settings_of
from tokenmesh.services.gateway.apis.responses.response_logs import open_journal
from tokenmesh.shared.bus.jetstream import JetStreamJournal
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.journal import StoreFull

LIMITS = {"journal_timeout_s": 0.1, "journal_mute_s": 0.3, "adopt_interval_s": 0.05}


@pytest.fixture
async def mesh(
    start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> AsyncIterator[BackEnd]:
    service = {"beat_interval_s": 0.1, "missed_beats": 2}
    bus = bus_settings_of(start_nats())
    async with BackEnd(bus, redis_settings, responses=LIMITS, service=service) as back_end:
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[ResponseClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as http:
        yield ResponseClient(http, mesh.model)


async def set_acks(mesh: BackEnd, *, is_mute: bool) -> None:
    journal = open_journal(mesh.bus, mesh.settings.responses)
    config = msgspec.json.encode({**journal.spec.config(), "no_ack": is_mute})
    subject = f"$JS.API.STREAM.UPDATE.{journal.spec.name}"
    reply = await mesh.bus.raw.request(subject, config, deadline_s=2e9)
    assert b"error" not in reply.data


async def kept(mesh: BackEnd) -> list[str]:
    return await open_journal(mesh.bus, mesh.settings.responses).keys("tm.response.>")


async def test_a_response_that_cannot_be_stored_is_served_with_a_warning(
    mesh: BackEnd, client: ResponseClient
) -> None:
    first = await client.create()
    await set_acks(mesh, is_mute=True)
    body: dict[str, Any] = {"model": mesh.model, "input": "Hi"}
    for fields in ({}, {"stream": True}, {"store": True}):
        answer = await client.http.post("/v1/responses", json=body | fields)
        assert answer.status_code == 200, answer.text
        assert "no entry stored" in answer.headers["x-tokenmesh-warning"]
    for fields in ({"store": True, "stream": True}, {"background": True}):
        answer = await client.http.post("/v1/responses", json=body | fields)
        assert answer.status_code == 503, answer.text
    # The journal may have stored them, so they are deleted: no gateway may adopt them.
    async with asyncio.timeout(10):
        while any(first["id"] not in key for key in await kept(mesh)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await set_acks(mesh, is_mute=False)
    await asyncio.sleep(0.5)
    assert len(mesh.workers[0].generates) == 4
    assert await client.get(first["id"]) == first
    await client.create(stream=False)
    assert len(mesh.workers[0].generates) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_journal_refuses_only_requests_with_store(
    mesh: BackEnd, client: ResponseClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def append(self: JetStreamJournal, key: str, data: bytes, after: int) -> int:
        raise StoreFull("no room")

    monkeypatch.setattr(JetStreamJournal, "append", append)
    body = {"model": mesh.model, "input": "Hi", "stream": stream}
    answer = await client.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "no room" in answer.headers["x-tokenmesh-warning"]


async def test_a_response_stored_without_acknowledgement_is_generated_once(
    mesh: BackEnd, client: ResponseClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = JetStreamJournal.append

    async def lose(self: JetStreamJournal, key: str, data: bytes, after: int) -> int:
        number = await append(self, key, data, after)
        if data and after == 0:
            raise Unavailable("the answer was lost")
        return number

    await client.create()
    monkeypatch.setattr(JetStreamJournal, "append", lose)
    body = {"model": mesh.model, "input": "Hi", "stream": True}
    answer = await client.http.post("/v1/responses", json=body)
    assert "the answer was lost" in answer.headers["x-tokenmesh-warning"]
    answer = await client.http.post("/v1/responses", json=body | {"store": True})
    assert answer.status_code == 503
    monkeypatch.undo()
    await asyncio.sleep(1.0)
    assert len(mesh.workers[0].generates) == 2
