"""Requests go where their prompt is cached, on a real mesh of simulated workers."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.reserved import reserved
from tests.fakes.small_mesh import SmallMesh
from tests.servers import Server, redis_settings_of
from tokenmesh.shared.config.loader import plain_values
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import open_redis

FAST = {"heartbeat_s": 0.2, "retry_s": 0.1, "ttl_s": 3.0}


def prompt(name: str, num_words: int = 300) -> str:
    return " ".join(f"{name}{number}" for number in range(num_words))[:400]


async def cached_tokens(mesh: SmallMesh, text: str) -> int:
    """Cached tokens of the prompt in the usage."""
    answer = await mesh.complete(prompt=text, max_tokens=2)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def scraped(mesh: SmallMesh, text: str) -> float:
    for line in mesh.scheduler.metrics.render().decode().splitlines():
        if line.startswith(text):
            return float(line.rpartition(" ")[2])
    return 0.0


async def indexed(mesh: SmallMesh, num_blocks: int) -> None:
    """Wait until the workers together have written so many blocks."""
    redis, keys = open_redis(mesh.settings.redis), IndexKeys(mesh.model)
    names = [keys.blocks(each.instance_id, each.epoch) for each in mesh.workers]  # type: ignore[arg-type]
    async with asyncio.timeout(15):
        while True:
            sizes = await redis.call_all([["SCARD", name] for name in names])
            if sum(int(str(size)) for size in sizes) >= num_blocks:
                break
            await asyncio.sleep(0.02)
    await redis.close()


@pytest.fixture
def make_mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> Callable[..., SmallMesh]:
    def make(redis: RedisSettings = redis_settings, **sections: object) -> SmallMesh:
        return SmallMesh(tmp_path, bus_settings, redis, prefix_index=FAST, **sections)  # type: ignore[arg-type]

    return make


async def test_a_prompt_goes_where_it_is_cached(make_mesh: Callable[..., SmallMesh]) -> None:
    # computing a prompt again has to cost more than any worker's lead in measured times
    async with make_mesh(worker={"sim_prefill_tokens_per_s": 1000.0}) as mesh:
        for _ in range(2):
            await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 3)
        names = [f"p{number}" for number in range(6)]
        for name in names:
            assert await cached_tokens(mesh, prompt(name)) == 0
        await indexed(mesh, 6 * len(names))
        assert all([await cached_tokens(mesh, prompt(name)) >= 64 for name in names])
        assert scraped(mesh, "tokenmesh:placement_reasons_total{") > 0
        assert scraped(mesh, "tokenmesh:placement_matched_tokens_total{") >= 64 * len(names)


async def test_a_loaded_worker_is_passed_over_although_it_has_the_prompt(
    make_mesh: Callable[..., SmallMesh],
) -> None:
    slow = {"sim_prefill_tokens_per_s": 300.0, "max_num_batched_tokens": 64}
    async with make_mesh(worker=slow) as mesh:
        await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 2)
        await cached_tokens(mesh, prompt("known"))
        await indexed(mesh, 1)
        await mesh.until(lambda: all(load.is_indexed for load in mesh.loads()))
        # each has the same beginning, and more to compute behind it than the beginning is worth
        texts = [prompt("known")[:350] + f" number {number} " * 5 for number in range(6)]
        answers = await asyncio.gather(*(mesh.complete(prompt=text) for text in texts))
        assert [answer.status_code for answer in answers] == [200] * 6
        reasons = {reason: placed_for(mesh, reason) for reason in ("prefix", "cost", "load")}
        assert reasons["prefix"] >= 1, reasons
        assert reasons["cost"] >= 1, reasons


def placed_for(mesh: SmallMesh, reason: str) -> float:
    labels = f'{{model_name="{mesh.model}",reason="{reason}"}}'
    return scraped(mesh, f"tokenmesh:placement_reasons_total{labels}")


async def test_a_reservation_is_given_back_with_the_first_token(
    make_mesh: Callable[..., SmallMesh],
) -> None:
    async with make_mesh() as mesh:
        answers = await asyncio.gather(*(mesh.complete(n=2, stream=True) for _ in range(8)))
        assert all(answer.status_code == 200 for answer in answers)
        await no_reservation_left(mesh)


async def no_reservation_left(mesh: SmallMesh) -> None:
    redis, keys = open_redis(mesh.settings.redis), IndexKeys(mesh.model)
    names = [keys.reserved(each.instance_id, each.epoch) for each in mesh.workers]  # type: ignore[arg-type]
    async with asyncio.timeout(15):
        while True:
            left = [await redis.call("HLEN", name) for name in names]
            held = [await reserved(redis, name) for name in names]
            if all(each in (0, 1) for each in left) and all(
                each in ((0, 0), None) for each in held
            ):
                break
            await asyncio.sleep(0.02)
    assert any(each == (0, 0) for each in held), "nothing was ever reserved"
    await redis.close()


async def test_without_redis_nothing_fails_and_hits_are_back_after_it(
    make_mesh: Callable[..., SmallMesh], start_redis: Callable[[], Server]
) -> None:
    server = start_redis()
    async with make_mesh(redis_settings_of(server)) as mesh:
        for _ in range(2):
            await mesh.add_worker()
        await mesh.until(lambda: len(mesh.loads()) == 3)
        names = [f"p{number}" for number in range(5)]
        for name in names:
            await cached_tokens(mesh, prompt(name))
        server.stop()
        answers = await asyncio.gather(*(mesh.complete(prompt=f"Hi {n}") for n in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert scraped(mesh, "tokenmesh:prefix_index_away") == 1
        await mesh.until(lambda: not any(load.is_indexed for load in mesh.loads()))
        server.start()
        await mesh.until(lambda: all(load.is_indexed for load in mesh.loads()))
        await asyncio.sleep(0.15)
        assert all([await cached_tokens(mesh, prompt(name)) >= 64 for name in names])
        assert scraped(mesh, "tokenmesh:prefix_index_away") == 0


@pytest.mark.timeout(60)
async def test_a_killed_worker_is_chosen_no_more_and_its_keys_go(
    make_mesh: Callable[..., SmallMesh], tmp_path: Path
) -> None:
    async with make_mesh() as mesh:
        config = tmp_path / "worker.json"
        config.write_text(json.dumps(plain_values(mesh.settings)))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenmesh", "serve", "worker", "--config", str(config)
        )
        try:
            await mesh.until(lambda: len(mesh.loads()) == 2, seconds=30)
            texts = [prompt(f"p{number}") for number in range(12)]
            await asyncio.gather(*(mesh.complete(prompt=text) for text in texts))
            async with asyncio.timeout(15):
                while not await keys_of_strangers(mesh):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            process.kill()
            await process.wait()
        answers = await asyncio.gather(*(mesh.complete(prompt=text) for text in texts))
        assert [answer.status_code for answer in answers] == [200] * len(texts)
        async with asyncio.timeout(FAST["ttl_s"] + 5):
            while await keys_of_strangers(mesh):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await mesh.until(lambda: len(mesh.loads()) == 1)
        assert all([await cached_tokens(mesh, text) >= 64 for text in texts])
        assert await keys_of_strangers(mesh) == []


async def keys_of_strangers(mesh: SmallMesh) -> list[str]:
    """Return the keys of incarnations that are not in this process."""
    redis = open_redis(mesh.settings.redis)
    found = await redis.call("KEYS", f"kvx:{{*{mesh.model}*}}:*")
    await redis.close()
    assert isinstance(found, list)
    names = [each.decode() for each in found if isinstance(each, bytes)]
    ours = [str(each.instance_id) for each in mesh.workers]
    kinds = (":w:", ":s:", ":n:", ":rsv:")
    return [
        name
        for name in names
        if any(kind in name for kind in kinds) and not any(each in name for each in ours)
    ]
