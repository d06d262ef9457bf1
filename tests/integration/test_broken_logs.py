"""Adoption of orphaned responses: a log that cannot be read does not delay the others."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.response_client import ResponseClient, output_text
from tokenmesh.services.gateway.apis.responses.records import (
    Flushed,
    Record,
    ResponseBegun,
    encode_record,
    join_records,
)
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import GatewayId, ResponseId
from tokenmesh.shared.subjects import response_log

DEAD = GatewayId("gateway-dead")
ABSENT = hashlib.sha256(b"").hexdigest()
LIMIT = 64 * 1024


@pytest.fixture
async def mesh(bus_settings: BusSettings, redis_settings: RedisSettings) -> AsyncIterator[BackEnd]:
    service = {"beat_interval_s": 0.1, "missed_beats": 4}
    responses = {"adopt_interval_s": 0.05, "max_response_bytes": LIMIT}
    async with BackEnd(
        bus_settings, redis_settings, service=service, responses=responses
    ) as back_end:
        yield back_end


def begun(mesh: BackEnd, name: str, **fields: Any) -> ResponseBegun:
    body = {"model": mesh.model, "input": "Hi", "background": True, "store": True, **fields}
    return ResponseBegun(
        id=ResponseId(f"resp_{name}"),
        owner=DEAD,
        scope=ABSENT,
        model=mesh.model,
        body=msgspec.json.encode(body),
        created_s=now_s(),
        deadline_s=now_s() + 60,
        seed=1,
        is_background=True,
    )


async def leave(mesh: BackEnd, name: str, data: bytes) -> None:
    """A log whose owner is dead."""
    journal = open_journal(mesh.bus, mesh.settings.responses)
    logs = ResponseLogs(journal, mesh.settings.responses)
    response_id = ResponseId(f"resp_{name}")
    await journal.append(response_log(response_id), data, 0)
    await logs.marks.set(DEAD, response_id)


def entry(*records: Record) -> bytes:
    return join_records([encode_record(each) for each in records])


async def ended(client: ResponseClient, name: str) -> dict[str, Any]:
    async with asyncio.timeout(15):
        while True:
            response = await client.get(f"resp_{name}")
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.05)


async def test_other_responses_are_adopted(mesh: BackEnd) -> None:
    # They are found in the order of their names.
    await leave(mesh, "0unreadable", b"\xc1 of a version to come")
    await leave(mesh, "1unknown", entry(begun(mesh, "1unknown", input=5)))
    await leave(
        mesh, "2chained", entry(begun(mesh, "2chained", previous_response_id="resp_1unknown"))
    )
    large = Flushed(frames=[b'event: x\ndata: {"type":"x"}\n\n' + b" " * LIMIT])
    await leave(mesh, "3large", entry(begun(mesh, "3large"), large))
    await leave(mesh, "4good", entry(begun(mesh, "4good")))
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        client = ResponseClient(http, mesh.model)
        assert output_text(await ended(client, "4good")).startswith("Hello")
        failed = await ended(client, "3large")
        assert failed["status"] == "failed"
        assert "max_response_bytes" in failed["error"]["message"]
        assert (await ended(client, "1unknown"))["status"] == "failed"
        unreadable = await http.get("/v1/responses/resp_0unreadable")
        assert unreadable.json()["error"]["code"] == "protocol_error"
