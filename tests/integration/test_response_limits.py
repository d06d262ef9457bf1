"""Stored responses that exceed a limit end as failed, with the reason."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, saying
from tests.fakes.response_client import ResponseClient, numbers, output_text
from tokenmesh.shared.bus.jetstream import JetStreamJournal
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings


async def failed(client: ResponseClient, response_id: str) -> dict[str, Any]:
    """The response once it has failed; its events report the same."""
    async with asyncio.timeout(15):
        while (response := await client.get(response_id))["status"] != "failed":
            assert response["status"] in ("queued", "in_progress")
            await asyncio.sleep(0.05)
    events = await client.events(response_id)
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"] == response
    return response


async def test_a_log_that_grows_too_large_fails_its_response(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    # Its first two events and the last one, each with the instructions, exceed the limit.
    limits = {"max_response_bytes": 64 * 1024}
    script = saying("so many words " * 60)
    async with (
        BackEnd(bus_settings, redis_settings, script, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as http,
    ):
        client = ResponseClient(http, mesh.model)
        queued = await client.create(background=True, instructions="x" * 31_000, truncation="auto")
        response = await failed(client, queued["id"])
        assert "max_response_bytes" in response["error"]["message"]
        await mesh.until(lambda: not len(mesh.gateway.core.mesh.streams))


async def test_a_background_response_has_a_deadline(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    limits = {"background_timeout_s": 0.6}
    async with (
        BackEnd(bus_settings, redis_settings, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as http,
    ):
        mesh.workers[0].step_s = 0.1
        client = ResponseClient(http, mesh.model)
        response = await failed(client, (await client.create(background=True))["id"])
        assert "in time" in response["error"]["message"]
        # Its partial output is kept.
        assert output_text(response)
        await mesh.until(lambda: len(mesh.workers[0].cancels) == 1)


async def test_a_background_response_that_cannot_begin_fails(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as http,
    ):
        client = ResponseClient(http, mesh.model)
        queued = await client.create(background=True, input="Hi", instructions="broken template")
        response = await failed(client, queued["id"])
        assert "template" in response["error"]["message"]
        body = {"model": mesh.model, "input": "Hi", "instructions": "broken template"}
        for stream in (False, True):
            answer = await http.post("/v1/responses", json={**body, "stream": stream})
            assert answer.status_code == 400, answer.text


async def test_a_slow_journal_is_reported(
    bus_settings: BusSettings, redis_settings: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, is_slow = JetStreamJournal.append, asyncio.Event()

    async def slow_append(self: JetStreamJournal, key: str, data: bytes, after: int) -> int:
        if b"Prompted" in data:
            is_slow.set()
            while mesh.workers[0].num_messages < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        return await append(self, key, data, after)

    monkeypatch.setattr(JetStreamJournal, "append", slow_append)
    limits = {"max_waiting_records": 1}
    async with (
        BackEnd(
            bus_settings,
            redis_settings,
            saying("word " * 60),
            responses=limits,
            max_buffered_tokens=8,
        ) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as http,
    ):
        client = ResponseClient(http, mesh.model)
        response = await failed(client, (await client.create(background=True))["id"])
        assert is_slow.is_set()
        assert "the journal" in response["error"]["message"]
        assert "client" not in response["error"]["message"]
