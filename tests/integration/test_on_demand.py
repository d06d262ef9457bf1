"""Models on demand: a request wakes one, an idle one sleeps, a bound puts the oldest to sleep."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import FakeTokenizer
from tests.fakes.key_file import key_entry
from tests.fakes.service_mesh import running
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.services.worker_svc.loaded import SimMemory
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared import subjects
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import CheckpointError, Unavailable
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.service import Mesh

MakeMesh = Callable[..., SmallMesh]


class Gate:
    """Holds, counts and fails the wakes of simulated workers; counts when they fall asleep."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.num_wakes = 0
        self.num_sleeps = 0
        self.failures: list[Exception] = []

    def wake(self, memory: SimMemory, tags: Collection[str]) -> None:
        self.num_wakes += 1
        self.opened.wait(10)
        if self.failures:
            # the weights are there, and the KV cache does not fit
            ORIGINAL_WAKE(memory, ["weights"])
            raise self.failures.pop()
        ORIGINAL_WAKE(memory, tags)

    def sleep(self, memory: SimMemory, level: int) -> int:
        self.num_sleeps += 1
        return ORIGINAL_SLEEP(memory, level)


ORIGINAL_WAKE = SimMemory.wake
ORIGINAL_SLEEP = SimMemory.sleep


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(SimMemory, "wake", lambda memory, tags: found.wake(memory, tags))
    monkeypatch.setattr(SimMemory, "sleep", lambda memory, level: found.sleep(memory, level))
    yield found
    found.opened.set()


@pytest.fixture
def make_mesh(tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings) -> MakeMesh:
    def make(**more: Any) -> SmallMesh:
        model = {"on_demand": True, "keep_alive": -1, **more.pop("model", {})}
        return SmallMesh(tmp_path, bus_settings, redis_settings, model=model, **more)

    return make


def level(mesh: SmallMesh) -> int:
    """As the gateway knows it from the last heartbeat."""
    return mesh.loads()[0].sleep_level


async def sleeps(mesh: SmallMesh, gate: Gate, times: int) -> None:
    """Wait until the worker has fallen asleep that often and the gateway knows it.

    The level alone does not show it: it may be that of a heartbeat from before the wake.
    """
    await mesh.until(lambda: gate.num_sleeps == times and level(mesh) == 2)


async def text_of(mesh: SmallMesh, **fields: Any) -> str:
    response = await mesh.complete(**fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def opens(mesh: SmallMesh, num_requests: int) -> None:
    """Wait until the gateway has that many open requests."""
    async with asyncio.timeout(15):
        while (await mesh.client.get("/load")).json()["server_load"] != num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_first_request_wakes_the_model_once_for_all_that_wait(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh() as mesh:
        assert level(mesh) == 2
        assert (await mesh.client.get("/readyz")).status_code == 200
        listed = (await mesh.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == [mesh.model]
        gate.opened.clear()
        waiting = [asyncio.create_task(text_of(mesh)) for _ in range(4)]
        await mesh.until(lambda: gate.num_wakes == 1)
        gate.opened.set()
        assert len(set(await asyncio.gather(*waiting))) == 1
        await text_of(mesh)
        assert gate.num_wakes == 1
        await mesh.until(lambda: level(mesh) == 0)


@pytest.mark.parametrize("keep_alive", [0, "20ms"])
async def test_an_idle_model_sleeps_and_wakes_again(
    make_mesh: MakeMesh, gate: Gate, keep_alive: str | int
) -> None:
    async with make_mesh(model={"keep_alive": keep_alive}) as mesh:
        before = gate.num_sleeps
        first = await text_of(mesh)
        await sleeps(mesh, gate, before + 1)
        assert await text_of(mesh) == first
        await sleeps(mesh, gate, before + 2)
        assert gate.num_wakes == 2


async def test_a_running_stream_keeps_the_model_awake(make_mesh: MakeMesh, gate: Gate) -> None:
    async with make_mesh(model={"keep_alive": 0}, worker={"sim_step_s": 0.01}) as mesh:
        before = gate.num_sleeps
        assert await text_of(mesh, max_tokens=60, ignore_eos=True)
        await sleeps(mesh, gate, before + 1)
        assert gate.num_wakes == 1


async def test_a_client_that_leaves_does_not_end_the_wake_of_others(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh() as mesh:
        gate.opened.clear()
        leaving = asyncio.create_task(text_of(mesh))
        await mesh.until(lambda: gate.num_wakes == 1)
        staying = asyncio.create_task(text_of(mesh))
        await opens(mesh, 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.opened.set()
        assert await staying
        assert gate.num_wakes == 1


async def test_a_wake_that_fails_is_the_answer_for_a_moment(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh(scheduler={"wake_failure_s": 60}) as mesh:
        gate.failures = [CheckpointError("model.safetensors is missing")]
        for _ in range(2):
            refused = await mesh.complete()
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "asleep"
            assert "model.safetensors is missing" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert gate.num_wakes == 1


async def test_a_wake_that_takes_too_long_is_a_503(make_mesh: MakeMesh, gate: Gate) -> None:
    async with make_mesh(gateway={"wake_timeout_s": 1.0}, scheduler={"wake_failure_s": 0}) as mesh:
        gate.opened.clear()
        refused = await mesh.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "asleep"
        gate.opened.set()
        await mesh.until(lambda: level(mesh) == 0)
        assert await text_of(mesh)


async def test_a_worker_that_dies_while_it_wakes_is_woken_again(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh() as mesh:
        gate.opened.clear()
        waiting = asyncio.create_task(text_of(mesh))
        await mesh.until(lambda: gate.num_wakes == 1)
        # its heartbeats stop, and the answer to WakeUp never comes
        await mesh.workers[0].bus.close()
        await mesh.add_worker()
        gate.opened.set()
        assert await waiting


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    folder = tmp_path / "awake"
    folder.mkdir()
    return folder


class TwoModels:
    """A second model on demand in addition to that of a mesh, whose worker shares the slots."""

    def __init__(self, mesh: SmallMesh) -> None:
        self.mesh = mesh
        self.first = mesh.model
        self.second = ModelName(f"{mesh.model}-2")

    async def start(self, stack: AsyncExitStack) -> None:
        model = {**self.mesh.settings.models[0].model_dump(), "served_model_name": [self.second]}
        settings = changed(self.mesh.settings, {"models": [model]})

        async def tokenize(mesh: Mesh) -> None:
            await mesh.listen(FakeTokenizer(), subjects.tokenize(self.second))

        await stack.enter_async_context(running("tokenizer", settings, tokenize))
        await stack.enter_async_context(running("worker", settings, build_worker))
        await self.mesh.until(lambda: self.level(self.second) == 2)

    def level(self, model: ModelName) -> int:
        """-1: it has no worker."""
        members = self.mesh.gateway.members.workers(model)
        return next((each.beat.load.sleep_level for each in members if each.beat.load), -1)

    def levels(self) -> tuple[int, int]:
        return self.level(self.first), self.level(self.second)


@pytest.fixture
async def two(make_mesh: MakeMesh, slots: Path) -> AsyncIterator[TwoModels]:
    worker = {"on_demand": {"slots_dir": str(slots)}, "sim_step_s": 0.01}
    async with make_mesh(worker=worker) as mesh, AsyncExitStack() as stack:
        found = TwoModels(mesh)
        await found.start(stack)
        yield found


async def test_an_idle_model_makes_room_for_another_one(two: TwoModels) -> None:
    for model in (two.first, two.second, two.first):
        await text_of(two.mesh, model=model)
        expected = (0, 2) if model == two.first else (2, 0)
        await two.mesh.until(lambda: two.levels() == expected)  # noqa: B023


async def test_a_busy_model_is_not_put_to_sleep_and_others_wait_for_it(
    two: TwoModels, gate: Gate
) -> None:
    long = asyncio.create_task(text_of(two.mesh, max_tokens=80, ignore_eos=True))
    await two.mesh.until(lambda: two.levels() == (0, 2))
    await text_of(two.mesh, model=two.second)
    assert await long
    await two.mesh.until(lambda: two.levels() == (2, 0))
    assert gate.num_wakes == 2


async def test_requests_for_more_models_than_fit_are_all_answered(two: TwoModels) -> None:
    models = [two.first, two.second] * 4
    await asyncio.gather(*(text_of(two.mesh, model=each) for each in models))


async def test_what_a_failed_wake_has_loaded_is_freed(two: TwoModels, gate: Gate) -> None:
    gate.failures = [Unavailable("not enough memory to wake up")]
    assert (await two.mesh.complete()).status_code == 503
    await two.mesh.until(lambda: two.levels() == (2, 2))
    assert await text_of(two.mesh, model=two.second)


async def test_a_model_at_level_1_makes_room_too(two: TwoModels) -> None:
    await text_of(two.mesh)
    query = f"level=1&model={two.first}"
    assert (await two.mesh.client.post(f"/sleep?{query}")).status_code == 200
    assert two.levels() == (1, 2)
    await text_of(two.mesh, model=two.second)
    await two.mesh.until(lambda: two.levels() == (2, 0))


async def test_ollamas_keep_alive_loads_changes_and_unloads_a_model(make_mesh: MakeMesh) -> None:
    async with make_mesh() as mesh:

        async def load(keep_alive: Any) -> str:
            body = {"model": mesh.model, "keep_alive": keep_alive}
            response = await mesh.client.post("/api/generate", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["done_reason"])

        async def expires_at() -> str:
            (model,) = (await mesh.client.get("/api/ps")).json()["models"]
            return str(model["expires_at"])

        assert (await mesh.client.get("/api/ps")).json()["models"] == []
        assert await load("1h") == "load"
        await mesh.until(lambda: 3000 < (mesh.loads()[0].sleeps_in_s or 0) <= 3600)
        assert not (await expires_at()).startswith("2318")
        assert await load(-1) == "load"
        await mesh.until(lambda: mesh.loads()[0].sleeps_in_s is None)
        assert (await expires_at()).startswith("2318")
        assert await load(0) == "unload"
        await mesh.until(lambda: level(mesh) == 2)
        wrong = await mesh.client.post(
            "/api/generate", json={"model": mesh.model, "keep_alive": "soon"}
        )
        assert wrong.status_code == 400
        assert "keep_alive" in wrong.json()["error"]


async def test_keep_alive_is_for_admin_keys_where_there_are_tenants(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    entries = [key_entry("sk-boss", "boss"), key_entry("sk-shop", "shop")]
    keys.write_text("\n".join(["[tenants.boss]\nadmin = true", "[tenants.shop]", *entries]))
    async with make_mesh(gateway={"keys_file": keys}) as mesh:

        async def load(tenant: str, keep_alive: int) -> httpx.Response:
            body = {"model": mesh.model, "keep_alive": keep_alive}
            headers = {"authorization": f"Bearer sk-{tenant}"}
            response = await mesh.client.post("/api/generate", json=body, headers=headers)
            assert response.status_code == 200, response.text
            return response

        refused = await load("shop", 0)
        assert "admin keys" in refused.headers["x-tokenmesh-warning"]
        assert (level(mesh), refused.json()["done_reason"]) == (2, "load")
        await load("shop", 60)
        await mesh.until(lambda: level(mesh) == 0)
        await load("shop", 0)
        assert mesh.loads()[0].sleeps_in_s is None
        assert (await load("boss", 0)).json()["done_reason"] == "unload"
        await mesh.until(lambda: level(mesh) == 2)


async def test_ollamas_keep_alive_of_a_request_counts_from_its_end(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh() as mesh:
        before = gate.num_sleeps
        options = {"num_predict": 4}
        body = {"model": mesh.model, "prompt": "Hi", "raw": True, "stream": False}
        response = await mesh.client.post(
            "/api/generate", json={**body, "keep_alive": 0, "options": options}
        )
        assert response.json()["done"] is True
        await sleeps(mesh, gate, before + 1)


async def test_wakes_and_sleeps_are_measured(make_mesh: MakeMesh, gate: Gate) -> None:
    async with make_mesh(model={"keep_alive": 0}) as mesh:
        before = gate.num_sleeps
        await text_of(mesh)
        await sleeps(mesh, gate, before + 1)
        text = (await mesh.client.get("/metrics")).text
        assert f'wakes_total{{model_name="{mesh.model}",outcome="awake"}} 1.0' in text
        assert f'wake_seconds_count{{model_name="{mesh.model}"}} 1.0' in text
        slept = [line for line in text.splitlines() if "on_demand_sleeps_total{" in line]
        assert [line.split()[-1] for line in slept if mesh.model in line] == ["1.0"]


async def test_a_worker_that_starts_gets_the_slot_of_an_idle_one(
    make_mesh: MakeMesh, slots: Path
) -> None:
    async with (
        make_mesh(worker={"on_demand": {"slots_dir": str(slots)}}) as mesh,
        AsyncExitStack() as stack,
    ):
        await text_of(mesh)
        await mesh.until(lambda: level(mesh) == 0)
        two = TwoModels(mesh)
        await two.start(stack)
        await mesh.until(lambda: two.levels() == (2, 2))


async def test_a_stream_for_a_model_that_cannot_be_woken_is_a_503(
    make_mesh: MakeMesh, gate: Gate
) -> None:
    async with make_mesh() as mesh:
        gate.failures = [Unavailable("not enough memory to wake up")]
        refused = await mesh.complete(stream=True)
        assert refused.status_code == 503
        assert "not enough memory" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_request_that_waits_counts_in_its_tenants_limit(
    make_mesh: MakeMesh, gate: Gate, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f"[tenants.acme]\nmax_concurrent = 1\nadmin = true\n{key_entry('k', 'acme')}\n")
    headers = {"authorization": "Bearer k"}
    async with make_mesh(gateway={"keys_file": str(keys)}, headers=headers) as mesh:
        gate.opened.clear()
        waiting = asyncio.create_task(text_of(mesh))
        await mesh.until(lambda: gate.num_wakes == 1)
        assert (await mesh.complete()).status_code == 429
        gate.opened.set()
        assert await waiting


async def test_a_model_that_an_operator_put_to_sleep_is_woken_too(make_mesh: MakeMesh) -> None:
    async with make_mesh() as mesh:
        before = await text_of(mesh)
        for number in (1, 2):
            assert (await mesh.client.post(f"/sleep?level={number}")).status_code == 200
            assert await text_of(mesh) == before


async def test_embeddings_wake_a_model_and_carry_a_keep_alive(make_mesh: MakeMesh) -> None:
    async with make_mesh(model={"runner": "pooling", "convert": "embed"}) as mesh:
        body = {"model": mesh.model, "input": ["One", "two"]}
        response = await mesh.client.post("/v1/embeddings", json=body)
        assert response.status_code == 200, response.text
        assert len(response.json()["data"]) == 2
        await mesh.until(lambda: level(mesh) == 0)
        response = await mesh.client.post("/api/embed", json={**body, "keep_alive": "0s"})
        assert response.status_code == 200, response.text
        await mesh.until(lambda: level(mesh) == 2)
