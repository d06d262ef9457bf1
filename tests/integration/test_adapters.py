"""Adapters through a whole mesh of simulated workers: loading, requests, reloading, joining."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.adapters import AdapterSpec, write_tensors
from tests.fakes.key_file import key_entry
from tests.fakes.small_mesh import SmallMesh
from tests.fakes.worker_process import joined, worker_process
from tokenmesh.engine.adapters.adapter import ReadAdapter, SimAdapters
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.operations.commands import AdapterCommands, Answers
from tokenmesh.shared.adapter_registry import AdapterRegistry
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError, Unavailable
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages import Message
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import ModelCard
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
    path = write(tmp_path / "sql")
    status, text = await load(mesh, "sql", path)
    assert (status, text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await models(mesh) == {mesh.model: None, "sql": mesh.model}
    one = (await mesh.client.get("/v1/models/sql")).json()
    assert (one["id"], one["parent"], one["root"]) == ("sql", mesh.model, str(path))
    listed = (await mesh.client.get("/v1/models")).json()["data"]
    assert [each["root"] for each in listed if each["parent"]] == [str(path)]
    assert await text_of(mesh, "sql") != await text_of(mesh, mesh.model)
    removed = await mesh.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert removed.text == "Success: LoRA adapter 'sql' removed successfully."
    assert (await mesh.complete(model="sql")).status_code == 404
    again = await mesh.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert again.status_code == 404


async def test_the_path_of_an_adapter_is_shown_to_admins_and_not_to_tenants(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    path = write(tmp_path / "static")
    keys = tmp_path / "keys.toml"
    entries = [key_entry("boss", "ops"), key_entry("ann", "team")]
    keys.write_text("\n".join(["[tenants.ops]\nadmin = true", "[tenants.team]", *entries]))
    mesh = make_mesh(
        lora={"lora_modules": [f"static={path}"]},
        gateway={"keys_file": str(keys)},
        headers={"authorization": "Bearer boss"},
    )
    async with mesh:
        for key, root in (("boss", str(path)), ("ann", "static")):
            headers = {"authorization": f"Bearer {key}"}
            one = (await mesh.client.get("/v1/models/static", headers=headers)).json()
            assert (one["root"], one["parent"]) == (root, mesh.model)


async def test_sagemakers_routes_load_and_unload_too(mesh: SmallMesh, tmp_path: Path) -> None:
    body = {"name": "team/sql", "src": str(write(tmp_path / "sql"))}
    loaded = await mesh.client.post("/adapters", json=body)
    assert (loaded.status_code, loaded.text) == (200, "Adapter team/sql registered")
    assert await models(mesh) == {mesh.model: None, "team/sql": mesh.model}
    assert (await mesh.client.post("/adapters", json=body)).status_code == 409
    removed = await mesh.client.delete("/adapters/team/sql")
    assert (removed.status_code, removed.text) == (200, "Adapter team/sql unregistered")
    assert await models(mesh) == {mesh.model: None}
    assert (await mesh.client.delete("/adapters/team/sql")).status_code == 404
    assert (await mesh.client.post("/adapters", json={"name": "x"})).status_code == 400


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
    ("a", "{tmp}/inner", 403, "adapter_model.safetensors is a link out of the directories"),
    ("a", "{tmp}/pipe", 400, "adapter_config.json: is not a file"),
    ("a", "{tmp}/large", 400, "adapter_config.json: is larger than 1048576 bytes"),
    ("\n", "{tmp}/rank", 400, "lora_name has 1 to 128 characters"),
    ("{model}", "{tmp}/dora", 409, "is the name of a model"),
)


async def test_what_cannot_be_loaded_is_refused(mesh: SmallMesh, tmp_path: Path) -> None:
    write(tmp_path / "rank", r=99)
    write(tmp_path / "dora", use_dora=True)
    (tmp_path / "link").symlink_to("/etc")
    outside = write(tmp_path / "inner")
    (outside / "adapter_model.safetensors").unlink()
    (outside / "adapter_model.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(write(tmp_path / "pipe") / "x")
    (tmp_path / "pipe" / "adapter_config.json").unlink()
    (tmp_path / "pipe" / "x").rename(tmp_path / "pipe" / "adapter_config.json")
    write(tmp_path / "large", x="y" * (1 << 20))
    for name, path, status, words in REFUSED:
        name, path = name.format(model=mesh.model), path.format(tmp=tmp_path)
        found = await load(mesh, name, path)
        assert found[0] == status, found[1]
        error = json.loads(found[1])["error"]
        assert words in error["message"]
        assert error["param"] in ("lora_path", "lora_name")
    assert set(await models(mesh)) == {mesh.model}
    assert await text_of(mesh, mesh.model)


async def test_an_unknown_model_is_loaded_from_the_directory(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    write(tmp_path / "adapters" / "found")
    write(tmp_path / "adapters" / "dora", use_dora=True)
    async with make_mesh(lora={"lora_dir": str(tmp_path / "adapters")}) as mesh:
        assert await text_of(mesh, "found")
        assert (await models(mesh))["found"] == mesh.model
        for name in ("lost", "../adapters/found", "..", "."):
            assert (await mesh.complete(model=name)).status_code == 404, name
        answer = await mesh.complete(model="dora")
        assert answer.status_code == 400
        assert "adapter_config.json: use_dora is True" in answer.text
        assert str(tmp_path) not in answer.text, "paths are for the operator"


@pytest.mark.parametrize(
    "refusal", [InvalidInput("other layers"), Unavailable("no worker")], ids=["other", "gone"]
)
async def test_an_unknown_model_is_loaded_for_the_model_that_it_fits(
    make_mesh: MakeMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: TokenMeshError,
) -> None:
    write(tmp_path / "adapters" / "found")
    async with make_mesh(lora={"lora_dir": str(tmp_path / "adapters")}) as mesh:
        resolvers_of, send_inner = Catalog.resolvers, AdapterCommands.send

        def resolvers(self: Catalog) -> list[ModelCard]:
            (card,) = resolvers_of(self)
            return [replace(card, name=ModelName("another")), card]

        async def send(self: AdapterCommands, model: ModelName, message: Message) -> Answers:
            if model == "another":
                raise refusal
            return await send_inner(self, model, message)

        monkeypatch.setattr(Catalog, "resolvers", resolvers)
        monkeypatch.setattr(AdapterCommands, "send", send)
        assert await text_of(mesh, "found")
        # where no model has it, the refusal is the answer
        lost = await mesh.complete(model="lost")
        assert (lost.status_code, refusal.message in lost.text) == (refusal.status, True)


async def test_adapters_of_the_settings_are_there_from_the_start(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    path = write(tmp_path / "static")
    async with make_mesh(lora={"lora_modules": [f"static={path}"]}) as mesh:
        assert await text_of(mesh, "static")
        # a refused load takes it from no worker
        assert (await load(mesh, "static", write(tmp_path / "other", seed=1)))[0] == 409
        assert (await load(mesh, "lost", tmp_path / "missing"))[0] == 400
        await asyncio.sleep(0.2)
        assert await text_of(mesh, "static")
        registry = AdapterRegistry(mesh.workers[0].redis, ModelName(mesh.model))
        assert await registry.read() == {}


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
            busy[:] = [each for each in mesh.workers if mesh.load_of(each.instance_id).running]
            return bool(busy)

        await mesh.until(is_running)
        await busy[0].leave()
        assert await running == expected


async def test_what_one_worker_cannot_load_no_worker_keeps(
    make_mesh: MakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_mesh() as mesh:
        path = write(tmp_path / "a")
        read, reads = SimAdapters.read, []

        def fail_once(source: SimAdapters, directory: Path) -> ReadAdapter:
            reads.append(directory)
            if len(reads) == 2:
                time.sleep(0.2)  # until the other worker has recorded what it loaded
                raise Unavailable(f"{directory}: is broken here", param="lora_path")
            return read(source, directory)

        monkeypatch.setattr(SimAdapters, "read", fail_once)
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        status, text = await load(mesh, "a", path)
        assert status == 503
        assert "is broken here (1 of 2 workers failed: worker-" in text
        assert not any(card.adapters for card in cards(mesh))
        await asyncio.sleep(0.2)  # the workers have read the registry again
        assert (await mesh.complete(model="a")).status_code == 404
        assert (await load(mesh, "a", path))[0] == 200
        first = await text_of(mesh, "a")
        reads.clear()
        other = write(tmp_path / "other", seed=1)
        assert (await load(mesh, "a", other, load_inplace=True))[0] == 503
        await asyncio.sleep(0.2)
        assert {each.content_hash for card in cards(mesh) for each in card.adapters} == {
            hash_of(path)
        }
        assert await text_of(mesh, "a") == first


async def test_a_worker_that_listens_no_more_does_not_fail_a_load(
    mesh: SmallMesh, tmp_path: Path
) -> None:
    alive = mesh.gateway.members.get(mesh.workers[0].instance_id)
    assert alive is not None
    ghost = replace(alive.beat, instance_id=InstanceId("worker-ghost"), interval_s=60.0)
    mesh.gateway.members.view.observe(ghost, monotonic_s())
    assert (await load(mesh, "a", write(tmp_path / "a")))[0] == 200
    without = [replace(card, takes_adapters=False) for card in ghost.models]
    late = replace(ghost, models=without, sequence=ghost.sequence + 1)
    mesh.gateway.members.view.observe(late, monotonic_s())
    status, text = await load(mesh, "b", write(tmp_path / "b"))
    assert (status, "worker-ghost serves no adapters" in text) == (400, True)


async def test_a_model_that_pools_serves_adapters(make_mesh: MakeMesh, tmp_path: Path) -> None:
    """Embeddings, usage, traces and metrics name the adapter; another content changes them."""
    write(tmp_path / "adapters" / "found", seed=2)
    lora = {"lora_dir": str(tmp_path / "adapters")}
    async with make_mesh(model={"runner": "pooling"}, lora=lora) as mesh:
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        assert (await load(mesh, "a", write(tmp_path / "one")))[0] == 200
        plain, first = await vector(mesh, mesh.model), await vector(mesh, "a")
        found = await vector(mesh, "found")
        assert (await load(mesh, "a", write(tmp_path / "two", seed=1), load_inplace=True))[0] == 200
        second = await vector(mesh, "a")
        assert len({tuple(each) for each in (plain, first, second, found)}) == 4
        status = await mesh.client.post("/v1/embeddings", json={"model": "lost", "input": "Hi"})
        assert status.status_code == 404
        await until_counted(mesh, "a")
        metrics = "".join(each.metrics.render().decode() for each in mesh.workers)
        assert 'adapter="a"' in metrics
        removed = await mesh.client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert removed.status_code == 200
        gone = await mesh.client.post("/v1/embeddings", json={"model": "a", "input": "Hi"})
        assert gone.status_code == 404


async def until_counted(mesh: SmallMesh, name: str) -> None:
    """Until a tenant's usage has requests of an adapter."""

    async def is_counted() -> bool:
        usage = (await mesh.client.get("/v1/usage")).json()
        return any(each["model"] == name and each["requests"] for each in usage["models"])

    async with asyncio.timeout(15):
        while not await is_counted():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def vector(mesh: SmallMesh, model: str) -> list[float]:
    response = await mesh.client.post("/v1/embeddings", json={"model": model, "input": "Hi" * 20})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == model
    return list(body["data"][0]["embedding"])


def hash_of(path: Path) -> str:
    return SimAdapters(LoraSettings()).read(path).content_hash


def cards(mesh: SmallMesh) -> list[ModelCard]:
    return [card for each in mesh.gateway.members.all() for card in each.beat.models]


async def test_usage_is_counted_by_the_name_of_the_adapter(mesh: SmallMesh, tmp_path: Path) -> None:
    assert (await load(mesh, "a", write(tmp_path / "a")))[0] == 200
    await text_of(mesh, "a")
    await until_counted(mesh, "a")
    metrics = (await mesh.client.get("/metrics")).text
    assert "lora_adapters{" in metrics


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_killing_a_worker_that_loads_an_adapter_loses_nothing(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    hold, paths = tmp_path / "hold", {name: write(tmp_path / name) for name in "abc"}
    async with make_mesh(worker={"sim_step_s": 0.02}) as mesh:
        wanted = await text_of(mesh, mesh.model, max_tokens=100)
        async with worker_process(tmp_path, mesh.settings) as process:
            (killed,) = await joined(mesh, ())
            assert (await load(mesh, "a", paths["a"]))[0] == 200
            hold.touch()
            loading = asyncio.create_task(load(mesh, "b", paths["b"]))
            await mesh.until(lambda: process.is_reading)
            streams = [
                asyncio.create_task(text_of(mesh, mesh.model, max_tokens=100)) for _ in range(8)
            ]
            await mesh.until(lambda: mesh.load_of(killed).running > 0)
            process.kill()
        assert await loading == (200, "Success: LoRA adapter 'b' added successfully.")
        assert await asyncio.gather(*streams) == [wanted] * 8
        hold.unlink()
        async with worker_process(tmp_path, mesh.settings) as process:
            (again,) = await joined(mesh, (killed,))
            await mesh.until(lambda: [each.name for each in adapters_of(mesh, again)] == ["a", "b"])
            # the last worker: there is none that the adapter could be loaded on
            await mesh.workers[0].leave()
            hold.touch()
            loading = asyncio.create_task(load(mesh, "c", paths["c"]))
            await mesh.until(lambda: process.is_reading)
            process.kill()
            status, text = await loading
            assert (status, "all workers have died" in text) == (503, True), text


def adapters_of(mesh: SmallMesh, worker: InstanceId) -> list[AdapterCard]:
    member = mesh.gateway.members.get(worker)
    return [] if member is None else [each for card in member.beat.models for each in card.adapters]
