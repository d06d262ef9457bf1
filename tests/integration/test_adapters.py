"""Adapters through a whole mesh of simulated workers: loading, requests, reloading, joining."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes.adapters import AdapterSpec, write_tensors
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.services.worker_svc.adapters.adapter import ReadAdapter, SimAdapters
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.service import Mesh

MakeMesh = Callable[..., SmallMesh]


def write(directory: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter that a simulated engine can read."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.layer.lora_{side}.weight": torch.randn(2, 2, generator=generator)
        for side in "AB"
    }
    return write_tensors(directory, tensors, AdapterSpec(rank=2, config=config))


@pytest.fixture
def make_mesh(tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings) -> MakeMesh:
    def make(**more: Any) -> SmallMesh:
        lora = {"enable_lora": True, "sync_interval_s": 0.05, "allowed_dirs": [str(tmp_path)]}
        return SmallMesh(
            tmp_path,
            bus_settings,
            redis_settings,
            worker={"lora": {**lora, **more.pop("lora", {})}, **more.pop("worker", {})},
            **more,
        )

    return make


@pytest.fixture
async def mesh(make_mesh: MakeMesh) -> AsyncIterator[SmallMesh]:
    async with make_mesh() as mesh:
        yield mesh


async def load(mesh: SmallMesh, name: str, path: Path | str, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = await mesh.client.post("/v1/load_lora_adapter", json=body)
    return response.status_code, response.text


async def text_of(mesh: SmallMesh, model: str, **fields: Any) -> str:
    response = await mesh.complete(model=model, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == model
    return str(body["choices"][0]["text"])


async def models(mesh: SmallMesh) -> dict[str, str | None]:
    """Names with their parents."""
    data = (await mesh.client.get("/v1/models")).json()["data"]
    return {each["id"]: each["parent"] for each in data}


async def test_an_adapter_is_loaded_listed_requested_and_unloaded(
    mesh: SmallMesh, tmp_path: Path
) -> None:
    await mesh.add_worker()
    await mesh.until(lambda: len(mesh.loads()) == 2)
    status, text = await load(mesh, "sql", write(tmp_path / "sql"))
    assert (status, text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await models(mesh) == {mesh.model: None, "sql": mesh.model}
    one = (await mesh.client.get("/v1/models/sql")).json()
    assert (one["id"], one["parent"], one["root"]) == ("sql", mesh.model, mesh.model)
    assert await text_of(mesh, "sql") != await text_of(mesh, mesh.model)
    removed = await mesh.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
    assert (await mesh.complete(model="sql")).status_code == 404
    again = await mesh.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert again.status_code == 404


async def test_another_content_under_the_same_name_needs_in_place(
    mesh: SmallMesh, tmp_path: Path
) -> None:
    assert (await load(mesh, "a", write(tmp_path / "one")))[0] == 200
    first = await text_of(mesh, "a", prompt="Hi" * 40)
    status, text = await load(mesh, "a", write(tmp_path / "two", seed=1))
    assert status == 409
    assert "load_inplace" in text
    assert await text_of(mesh, "a", prompt="Hi" * 40) == first
    assert (await load(mesh, "a", tmp_path / "two", load_inplace=True))[0] == 200
    assert await text_of(mesh, "a", prompt="Hi" * 40) != first


async def test_a_worker_that_joins_later_gets_the_adapters(mesh: SmallMesh, tmp_path: Path) -> None:
    assert (await load(mesh, "a", write(tmp_path / "a")))[0] == 200
    joined = await mesh.add_worker()

    def has_it() -> bool:
        member = mesh.gateway.members.get(joined.instance_id)
        return member is not None and any(card.adapters for card in member.beat.models)

    await mesh.until(has_it)


REFUSED = (
    ("a", "/etc", 403, "outside of the directories"),
    ("a", "../..", 403, "outside of the directories"),
    ("a", "{tmp}/link", 403, "outside of the directories"),
    ("a", "{tmp}/missing", 400, "not a directory"),
    ("a", "{tmp}/rank", 400, "r is 99; max_lora_rank allows 16"),
    ("a", "{tmp}/dora", 400, "use_dora is True: DoRA is not served"),
    ("\n", "{tmp}/rank", 400, "lora_name has 1 to 128 characters"),
    ("{model}", "{tmp}/dora", 409, "is the name of a model"),
)


async def test_what_cannot_be_loaded_is_refused(mesh: SmallMesh, tmp_path: Path) -> None:
    write(tmp_path / "rank", r=99)
    write(tmp_path / "dora", use_dora=True)
    (tmp_path / "link").symlink_to("/etc")
    for name, path, status, words in REFUSED:
        name, path = name.format(model=mesh.model), path.format(tmp=tmp_path)
        found = await load(mesh, name, path)
        assert found[0] == status, found[1]
        assert words in found[1]
    assert set(await models(mesh)) == {mesh.model}
    assert await text_of(mesh, mesh.model)


async def test_an_unknown_model_is_loaded_from_the_directory(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    write(tmp_path / "adapters" / "found")
    async with make_mesh(lora={"lora_dir": str(tmp_path / "adapters")}) as mesh:
        assert await text_of(mesh, "found")
        assert (await models(mesh))["found"] == mesh.model
        for name in ("lost", "../adapters/found", "..", "."):
            assert (await mesh.complete(model=name)).status_code == 404, name


async def test_adapters_of_the_settings_are_there_from_the_start(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    path = write(tmp_path / "static")
    async with make_mesh(lora={"lora_modules": [f"static={path}"]}) as mesh:
        assert await text_of(mesh, "static")


async def test_a_stream_goes_on_with_its_adapter_on_another_worker(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    async with make_mesh(worker={"sim_step_s": 0.02}) as mesh:
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        assert (await load(mesh, "a", write(tmp_path / "a")))[0] == 200
        expected = await text_of(mesh, "a", max_tokens=40)
        running = asyncio.create_task(text_of(mesh, "a", max_tokens=40))
        busy: list[Mesh] = []

        def is_running() -> bool:
            busy[:] = [each for each in mesh.workers if load_of(mesh, each).running]
            return bool(busy)

        await mesh.until(is_running)
        await busy[0].leave()
        assert await running == expected


def load_of(mesh: SmallMesh, worker: Mesh) -> WorkerLoad:
    """As the gateway sees it."""
    member = mesh.gateway.members.get(worker.instance_id)
    assert member is not None
    assert member.beat.load is not None
    return member.beat.load


async def test_what_one_worker_cannot_load_no_worker_keeps(
    make_mesh: MakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_mesh() as mesh:
        path = write(tmp_path / "a")
        read, reads = SimAdapters.read, []

        def fail_once(source: SimAdapters, directory: Path) -> ReadAdapter:
            reads.append(directory)
            if len(reads) == 2:
                raise InvalidInput(f"{directory}: is broken here", param="lora_path")
            return read(source, directory)

        monkeypatch.setattr(SimAdapters, "read", fail_once)
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        status, text = await load(mesh, "a", path)
        assert status == 400
        assert "is broken here (1 of 2 workers failed: worker-" in text
        await mesh.until(lambda: not any(card.adapters for card in cards(mesh)))
        assert (await mesh.complete(model="a")).status_code == 404
        assert (await load(mesh, "a", path))[0] == 200
        assert await text_of(mesh, "a")


def cards(mesh: SmallMesh) -> list[ModelCard]:
    return [card for each in mesh.gateway.members.all() for card in each.beat.models]


async def test_usage_is_counted_by_the_name_of_the_adapter(mesh: SmallMesh, tmp_path: Path) -> None:
    assert (await load(mesh, "a", write(tmp_path / "a")))[0] == 200
    await text_of(mesh, "a")

    async def is_counted() -> bool:
        usage = (await mesh.client.get("/v1/usage")).json()
        return any(each["model"] == "a" and each["requests"] for each in usage["models"])

    async with asyncio.timeout(8):
        while not await is_counted():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    metrics = (await mesh.client.get("/metrics")).text
    assert "lora_adapters{" in metrics


async def test_a_worker_that_dies_while_it_loads_gets_the_adapter_when_it_is_back(
    make_mesh: MakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_mesh() as mesh:
        path, read, reads = write(tmp_path / "a"), SimAdapters.read, []
        is_dead = threading.Event()

        def hang_once(source: SimAdapters, directory: Path) -> ReadAdapter:
            reads.append(directory)
            if len(reads) == 1:
                is_dead.wait(8)
            return read(source, directory)

        monkeypatch.setattr(SimAdapters, "read", hang_once)
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        loading = asyncio.create_task(load(mesh, "a", path))
        await mesh.until(lambda: len(reads) == 2)
        # which of both hangs is known from the other's heartbeat
        await mesh.until(lambda: any(card.adapters for card in cards(mesh)))
        (hung,) = [each for each in mesh.workers if not adapters_of(mesh, each)]
        say_goodbye(mesh, hung)
        status, _ = await loading
        is_dead.set()
        assert status == 200
        assert await text_of(mesh, "a")
        await mesh.until(lambda: all(adapters_of(mesh, each) for each in mesh.workers))


def say_goodbye(mesh: SmallMesh, worker: Mesh) -> None:
    """To the gateway: a last heartbeat of a worker."""
    view = mesh.gateway.members.view
    member = view.get(worker.instance_id)
    assert member is not None
    last = msgspec.structs.replace(member.beat, sequence=member.beat.sequence + 1, leaving=True)
    view.observe(last, monotonic_s())


def adapters_of(mesh: SmallMesh, worker: Mesh) -> list[AdapterCard]:
    member = mesh.gateway.members.get(worker.instance_id)
    return [] if member is None else [each for card in member.beat.models for each in card.adapters]
