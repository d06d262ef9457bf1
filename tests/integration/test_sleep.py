"""POST /sleep and /wake_up through a whole mesh: who runs, who comes, who asks wrongly."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.services.worker_svc.loaded import SimMemory
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import CheckpointError

MakeMesh = Callable[..., SmallMesh]
SLOW = {"sim_step_s": 0.02}


@pytest.fixture
def make_mesh(tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings) -> MakeMesh:
    return lambda **more: SmallMesh(tmp_path, bus_settings, redis_settings, **more)


@pytest.fixture
async def mesh(make_mesh: MakeMesh) -> AsyncIterator[SmallMesh]:
    async with make_mesh() as mesh:
        yield mesh


async def text_of(mesh: SmallMesh) -> str:
    response = await mesh.complete()
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def is_sleeping(mesh: SmallMesh) -> bool:
    return bool((await mesh.client.get("/is_sleeping")).json()["is_sleeping"])


async def test_asleep_every_request_learns_when_to_retry(mesh: SmallMesh) -> None:
    before = await text_of(mesh)
    assert not await is_sleeping(mesh)
    (slept,) = (await mesh.client.post("/sleep")).json()["workers"]
    assert (slept["worker_id"], slept["level"]) == (mesh.workers[0].instance_id, 1)
    assert await is_sleeping(mesh)
    refused = await mesh.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
    assert refused.json()["error"]["code"] == "asleep"
    ready = await mesh.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"ready": False, "asleep": True})
    assert (await mesh.client.get("/livez")).status_code == 200
    assert [each["id"] for each in (await mesh.client.get("/v1/models")).json()["data"]] == [
        mesh.model
    ]
    (woken,) = (await mesh.client.post("/wake_up")).json()["workers"]
    assert woken["level"] == 0
    assert not await is_sleeping(mesh)
    assert (await mesh.client.get("/readyz")).status_code == 200
    assert await text_of(mesh) == before


async def events(mesh: SmallMesh, num_tokens: int) -> list[Any]:
    body = {"model": mesh.model, "prompt": "Hi", "max_tokens": num_tokens, "stream": True}
    async with mesh.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_running_streams_are_ended_with_an_error(make_mesh: MakeMesh) -> None:
    async with make_mesh(worker=SLOW) as mesh:
        streaming = asyncio.create_task(events(mesh, 400))
        await mesh.until(lambda: mesh.loads()[0].running == 1)
        assert (await mesh.client.post("/sleep?level=2")).status_code == 200
        seen = await asyncio.wait_for(streaming, 15)
        assert seen[-1]["error"]["code"] == "asleep"
        assert 0 < len(seen) < 200
        load = mesh.loads()[0]
        assert (load.running, load.kv_blocks_used, load.sleep_level) == (0, 0, 2)


async def test_running_streams_are_waited_for_when_asked(make_mesh: MakeMesh) -> None:
    async with make_mesh(worker=SLOW) as mesh:
        streaming = asyncio.create_task(events(mesh, 100))
        await mesh.until(lambda: mesh.loads()[0].running == 1)
        sleeping = asyncio.create_task(mesh.client.post("/sleep?mode=wait"))
        while (late := await mesh.complete()).status_code == 200:
            pass  # the worker has yet to hear of it
        assert (late.status_code, late.json()["error"]["code"]) == (503, "asleep")
        assert not sleeping.done()
        assert (await sleeping).status_code == 200
        assert streaming.done()
        seen = await streaming
        assert "error" not in seen[-1]
        assert seen[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_wait_has_an_end_and_the_worker_stays_awake(make_mesh: MakeMesh) -> None:
    async with make_mesh(worker=SLOW, gateway={"admin_timeout_s": 0.4}) as mesh:
        streaming = asyncio.create_task(events(mesh, 100))
        await mesh.until(lambda: mesh.loads()[0].running == 1)
        refused = await mesh.client.post("/sleep?mode=wait")
        assert refused.status_code == 503
        assert "1 streams are still running" in refused.json()["error"]["message"]
        await mesh.until(lambda: mesh.loads()[0].sleep_level == 0)
        assert "error" not in (await streaming)[-1]
        await text_of(mesh)


async def test_every_worker_of_the_model_sleeps_and_the_weights_can_come_first(
    make_mesh: MakeMesh,
) -> None:
    mesh = make_mesh()
    await mesh.add_worker()
    async with mesh:
        assert len((await mesh.client.post("/sleep?level=2")).json()["workers"]) == 2
        woken = (await mesh.client.post("/wake_up?tags=weights")).json()["workers"]
        assert [each["level"] for each in woken] == [1, 1]
        assert (await mesh.complete()).status_code == 503
        woken = (await mesh.client.post("/wake_up?tags=kv_cache&tags=weights")).json()["workers"]
        assert [each["level"] for each in woken] == [0, 0]
        await text_of(mesh)


async def test_with_one_worker_awake_the_model_is_awake(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh()
    await mesh.add_worker()
    async with mesh:
        await mesh.client.post("/sleep")
        failing = iter([None, CheckpointError("model.safetensors is gone")])
        real = SimMemory.wake

        def wake(self: SimMemory, tags: list[str]) -> None:
            if (error := next(failing)) is not None:
                raise error
            real(self, tags)

        monkeypatch.setattr(SimMemory, "wake", wake)
        failed = await mesh.client.post("/wake_up")
        message = failed.json()["error"]["message"]
        assert failed.status_code == 500
        assert "model.safetensors is gone (1 of 2 workers succeeded)" in message
        assert any(message.startswith(f"{each.instance_id}: ") for each in mesh.workers)
        await mesh.until(lambda: sorted(each.sleep_level for each in mesh.loads()) == [0, 1])
        assert not await is_sleeping(mesh)
        await text_of(mesh)
        monkeypatch.undo()
        assert (await mesh.client.post("/wake_up")).status_code == 200


async def test_commands_may_be_repeated(mesh: SmallMesh) -> None:
    async def levels(path: str) -> list[int]:
        response = await mesh.client.post(path)
        assert response.status_code == 200, response.text
        return [each["level"] for each in response.json()["workers"]]

    assert await levels("/wake_up") == [0], "it was awake"
    assert await levels("/sleep") == [1]
    assert await levels("/sleep") == [1]
    assert await levels("/sleep?level=2") == [2]
    assert await levels("/sleep?level=1") == [2], "a deeper sleep is not undone"
    assert await levels("/wake_up?tags=kv_cache") == [2]
    assert await levels("/wake_up?tags=weights") == [0]
    await text_of(mesh)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=deep", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=kv", "tags"),
        ("/wake_up?tags=weights&tags=", "tags"),
    ],
)
async def test_a_wrong_parameter_is_named(mesh: SmallMesh, path: str, field: str) -> None:
    response = await mesh.client.post(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)
    assert not await is_sleeping(mesh)


async def test_a_model_that_is_not_served_is_not_found(mesh: SmallMesh) -> None:
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        response = await mesh.client.request(method, f"{path}?model=absent")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    named = await mesh.client.get(f"/is_sleeping?model={mesh.model}")
    assert named.status_code == 200


async def test_the_load_of_workers_is_in_the_gateways_metrics(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(gateway={"max_metric_workers": 1})
    await mesh.add_worker()
    async with mesh:
        for _ in range(4):
            await text_of(mesh)
        await mesh.until(lambda: sum(each.decode_tokens for each in mesh.loads()) == 4 * 7)
        first = min(each.instance_id for each in mesh.workers)
        labels = f'{{engine="{first}",model_name="{mesh.model}"}}'
        await mesh.client.post("/sleep")
        text = (await mesh.client.get("/metrics")).text
        lines = [each for each in text.splitlines() if each.startswith("tokenmesh:worker_")]
        assert f"tokenmesh:worker_sleep_level{labels} 1.0" in lines
        assert f"tokenmesh:worker_preemptions_total{labels} 0.0" in lines
        assert f"tokenmesh:worker_kv_cache_usage_perc{labels} 0.0" in lines
        assert all(labels in each for each in lines), "one worker, as the bound says"
        assert len(lines) == 7


async def test_without_the_setting_there_are_no_such_routes(make_mesh: MakeMesh) -> None:
    async with make_mesh(gateway={"admin_routes": False}) as mesh:
        for path in ("/sleep", "/wake_up", "/start_profile", "/stop_profile"):
            assert (await mesh.client.post(path)).status_code == 404
        assert (await mesh.client.get("/is_sleeping")).status_code == 404


async def test_a_key_guards_them_like_all_routes(make_mesh: MakeMesh) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    async with make_mesh(gateway={"api_key_hashes": (digest,)}) as mesh:
        assert (await mesh.client.post("/sleep")).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        asked = await mesh.client.get("/is_sleeping", headers=headers)
        assert asked.json()["is_sleeping"] is False
        assert (await mesh.client.post("/sleep", headers=headers)).status_code == 200


async def test_a_simulated_worker_has_no_profile(mesh: SmallMesh) -> None:
    refused = await mesh.client.post("/start_profile")
    assert refused.status_code == 400
    assert "--profiler-dir" in refused.json()["error"]["message"]


async def test_stopping_a_profile_that_was_not_started_is_a_conflict(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    async with make_mesh(worker={"profiler_dir": str(tmp_path)}) as mesh:
        refused = await mesh.client.post("/start_profile")
        assert refused.status_code == 400
        assert "simulated" in refused.json()["error"]["message"]
        refused = await mesh.client.post("/stop_profile")
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "ConflictError")
