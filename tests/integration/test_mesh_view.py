"""GET /mesh and the drain of a process, over HTTP."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared import subjects
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Heartbeat

KEY = "secret"


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    gateway = {"api_key_hashes": [sha256(KEY.encode()).hexdigest()]}
    headers = {"authorization": f"Bearer {KEY}"}
    async with SmallMesh(
        tmp_path, bus_settings, redis_settings, gateway=gateway, headers=headers
    ) as small:
        yield small


async def test_every_process_is_shown_with_its_load(mesh: SmallMesh) -> None:
    for _ in range(2):
        assert (await mesh.complete(prompt="Hi " * 100, max_tokens=2)).status_code == 200
    await mesh.until(lambda: mesh.loads()[0].cached_tokens > 0)
    state = (await mesh.client.get("/mesh")).json()
    assert state["gateway"] == mesh.gateway.instance_id
    by_id = {each["id"]: each for each in state["processes"]}
    assert [each["service"] for each in state["processes"]] == sorted(
        each["service"] for each in state["processes"]
    )
    worker = by_id[mesh.workers[0].instance_id]
    assert worker["epoch"] == str(mesh.workers[0].epoch)
    assert (worker["service"], worker["models"]) == ("worker", [mesh.model])
    assert (worker["ranks"], worker["stages"]) == (1, 1)
    assert worker["load"]["prefill_tokens"] > 0
    assert worker["load"]["cached_tokens"] > 0
    assert by_id[mesh.gateway.instance_id]["load"] is None
    assert not any(each["draining"] for each in state["processes"])


async def test_a_process_of_another_protocol_is_listed_separately(mesh: SmallMesh) -> None:
    beat = Heartbeat(
        service="worker",
        instance_id=InstanceId("worker-future"),
        epoch=1,
        sequence=1,
        version="2.0",
        protocol=2,
    )
    await mesh.gateway.bus.publish(subjects.beat("worker", beat.instance_id), beat)
    await mesh.until(lambda: bool(mesh.gateway.members.foreign.all(0.0)))
    state = (await mesh.client.get("/mesh")).json()
    assert [each["id"] for each in state["other_protocols"]] == ["worker-future"]
    assert "worker-future" not in {each["id"] for each in state["processes"]}


async def test_a_process_that_loads_its_models_is_listed_separately(mesh: SmallMesh) -> None:
    beat = Heartbeat(
        service="encoder",
        instance_id=InstanceId("encoder-new"),
        epoch=1,
        sequence=1,
        version="0",
        interval_s=30.0,
        starts=[mesh.model],
    )
    await mesh.gateway.bus.publish(subjects.beat("encoder", beat.instance_id), beat)
    await mesh.until(lambda: bool(mesh.gateway.members.starting("encoder")))
    state = (await mesh.client.get("/mesh")).json()
    assert [each["id"] for each in state["starting"]] == ["encoder-new"]
    assert "encoder-new" not in {each["id"] for each in state["processes"]}


async def test_the_mesh_view_needs_an_admin_key(mesh: SmallMesh) -> None:
    answer = await mesh.client.get("/mesh", headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401


async def test_an_unknown_process_gets_the_known_ones(mesh: SmallMesh) -> None:
    known = mesh.workers[0].instance_id
    answer = await mesh.client.post(f"/mesh/{known}x/drain")
    assert answer.status_code == 404
    assert known in answer.json()["error"]["message"]


async def test_no_process_is_drained_without_admin_routes(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    gateway = {"admin_routes": False}
    async with SmallMesh(tmp_path, bus_settings, redis_settings, gateway=gateway) as mesh:
        answer = await mesh.client.post(f"/mesh/{mesh.workers[0].instance_id}/drain")
        assert answer.status_code == 403
        assert "--enable-admin-routes" in answer.json()["error"]["message"]
