"""A client leaves before its request is placed: the reservation is released at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.reserved import reserved
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Message, Placed
from tokenmesh.shared.prefix_index import IndexKeys


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    async with SmallMesh(tmp_path, bus_settings, redis_settings) as small:
        yield small


async def held(mesh: SmallMesh) -> tuple[int, int] | None:
    """Reserved tokens and streams of the worker."""
    worker = mesh.workers[0]
    name = IndexKeys(mesh.model).reserved(WorkerId(worker.instance_id), worker.epoch)
    return await reserved(mesh.scheduler.redis, name)


async def test_a_client_that_leaves_during_placement_keeps_no_reservation(
    mesh: SmallMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the index knows the worker from its first beat that says so
    await mesh.until(lambda: all(load.is_indexed for load in mesh.loads()))
    has_placed, may_answer = asyncio.Event(), asyncio.Event()
    reply = mesh.scheduler.bus.reply

    async def late(envelope: Envelope, message: Message) -> None:
        if isinstance(message, Placed):
            has_placed.set()
            await may_answer.wait()
        await reply(envelope, message)

    monkeypatch.setattr(mesh.scheduler.bus, "reply", late)
    asking = asyncio.create_task(mesh.complete())
    async with asyncio.timeout(15):
        await has_placed.wait()
    assert (await held(mesh) or (0, 0))[1] == 1
    asking.cancel()
    await mesh.until(lambda: not mesh.gateway.bus._pending._sink_by_token)
    may_answer.set()
    async with asyncio.timeout(15):
        while (await held(mesh) or (0, 0)) != (0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    text = mesh.gateway.metrics.render().decode()
    assert "tokenmesh:placements_unused_total 1.0" in text
    assert (await mesh.complete()).status_code == 200


async def test_a_served_request_is_not_an_unused_placement(mesh: SmallMesh) -> None:
    for _ in range(3):
        assert (await mesh.complete()).status_code == 200
    text = mesh.gateway.metrics.render().decode()
    assert "tokenmesh:placements_unused_total 0.0" in text
