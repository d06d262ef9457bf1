"""Clocks that are minutes off, and garbage on the bus: logged once, counted, harmless."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.gateway_process import gateway_process
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import GatewayId, InstanceId, WorkerId
from tokenmesh.shared.messages import Heartbeat, Ping, Tokens
from tokenmesh.shared.messages.tokens import Delta


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    async with SmallMesh(tmp_path, bus_settings, redis_settings) as small:
        yield small


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
async def test_a_gateway_whose_clock_is_minutes_off_serves_like_any_other(
    mesh: SmallMesh, tmp_path: Path, ahead_s: float
) -> None:
    expected = (await mesh.complete()).json()["choices"][0]["text"]
    settings = mesh.settings
    async with gateway_process(tmp_path, settings, mesh.model, clock_ahead_s=ahead_s) as other:
        for _ in range(3):
            body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 8, "seed": 1}
            answer = await other.client.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
    assert mesh.workers[0].bus.counts["clock skew"] == 1


async def test_a_gateway_whose_clock_is_set_back_while_it_runs_serves_on(
    mesh: SmallMesh, tmp_path: Path
) -> None:
    is_set = tmp_path / "set"
    async with gateway_process(
        tmp_path, mesh.settings, mesh.model, clock_ahead_s=-300.0, clock_set_by=is_set
    ) as other:
        for _ in range(2):
            body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 8}
            answer = await other.client.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            is_set.touch()
        assert abs(answer.json()["created"] + 300 - time.time()) < 60


async def test_well_formed_nonsense_has_no_effect(mesh: SmallMesh, bus: MessageBus) -> None:
    expected = (await mesh.complete()).json()
    gateway = GatewayId(mesh.gateway.instance_id)
    answering = asyncio.create_task(mesh.complete(max_tokens=64))
    for stream in range(200):
        deltas = [Delta(stream, attempt, 0, b"\x01\x00\x00\x00") for attempt in range(3)]
        forged = Tokens(WorkerId("worker-forged"), 7, 1, deltas)
        await bus.publish(subjects.gateway_tokens(gateway), forged)
        await bus.publish(subjects.gateway_tokens(gateway), Ping())
    forged_beat = Heartbeat(
        service="worker",
        instance_id=InstanceId(mesh.workers[0].instance_id),
        epoch=mesh.workers[0].epoch,
        sequence=2**62,
        version="9",
        leaving=True,
    )
    # on a subject that is not its own: it must not make the worker leave
    await bus.publish(subjects.beat("worker", InstanceId("worker-other")), forged_beat)
    await bus.flush()
    assert (await answering).status_code == 200
    assert (await mesh.complete()).json()["choices"] == expected["choices"]
    await mesh.until(lambda: mesh.gateway.bus.counts.get("nonsense", 0) > 0)
    assert len(mesh.loads()) == 1
