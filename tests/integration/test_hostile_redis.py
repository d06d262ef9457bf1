"""Garbage of every type under the keys of the mesh: requests are served with the same tokens."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.blobs import PREFIX
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import Part, Redis

BIG = "x" * (1 << 20)
GARBAGE: dict[str, tuple[Part, ...]] = {
    "text": ("SET", "{}", "\xff not a number"),
    "huge number": ("SET", "{}", "9" * 18),
    "negative number": ("SET", "{}", "-" + "9" * 18),
    "large text": ("SET", "{}", BIG),
    "hash": (
        "HSET",
        "{}",
        "pf",
        "many",
        "st",
        "none",
        "load",
        "{}",
        "seq",
        "x",
        "n",
        "y",
        "t",
        "z",
    ),
    "huge numbers": ("HSET", "{}", "pf", "9" * 18, "st", "9" * 18, "load", "{}", "n", "9" * 18),
    "list": ("RPUSH", "{}", "a", BIG),
    "set": ("SADD", "{}", "a", "12345678", BIG),
    "sorted set": ("ZADD", "{}", "1", "kvx:absent", "2", "{}", "inf", BIG),
    "stream": ("XADD", "{}", "*", "a", "b"),
}
SHORT = {"ttl_s": 1.0, "heartbeat_s": 0.1, "retry_s": 0.05, "reservation_s": 1.0}
PROMPT = " ".join(f"word{number}" for number in range(60))

Poison = Callable[[str, str], Coroutine[object, object, None]]


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    async with SmallMesh(tmp_path, bus_settings, redis_settings, prefix_index=SHORT) as small:
        yield small


async def put(redis: Redis, key: str, kind: str) -> None:
    """Replace what is there, in one step: the key's owner may write at any time."""
    command = [str(part).replace("{}", key) for part in GARBAGE[kind]]
    await redis.transact([["DEL", key], [*command]])


def keys_of(mesh: SmallMesh) -> list[str]:
    """One of each family of the index."""
    keys, worker = IndexKeys(mesh.model), mesh.workers[0]
    name, epoch = worker.instance_id, worker.epoch
    return [
        keys.blocks(name, epoch),  # type: ignore[arg-type]
        keys.rewrite(name, epoch),  # type: ignore[arg-type]
        keys.digest(name, epoch),  # type: ignore[arg-type]
        keys.reserved(name, epoch),  # type: ignore[arg-type]
    ]


async def texts(mesh: SmallMesh, count: int = 4) -> list[str]:
    answers = await asyncio.gather(*(mesh.complete(prompt=PROMPT) for _ in range(count)))
    assert [each.status_code for each in answers] == [200] * count, answers[0].text
    return [each.json()["choices"][0]["text"] for each in answers]


def num_by_index(mesh: SmallMesh) -> float:
    """Placements that found some of the prompt on a worker."""
    lines = mesh.scheduler.metrics.render().decode().splitlines()
    head = "tokenmesh:placement_reasons_total"
    found = [each for each in lines if each.startswith(head) and 'reason="prefix"' in each]
    return sum(float(each.rsplit(" ", 1)[1]) for each in found)


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_in_the_index_is_ignored_and_repaired(
    mesh: SmallMesh, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (expected, *_) = await texts(mesh, 1)
    caplog.set_level(logging.WARNING)
    redis = mesh.scheduler.redis
    for key in keys_of(mesh):
        await put(redis, key, kind)
        assert await texts(mesh) == [expected] * 4
    # all at once
    for key in keys_of(mesh):
        await put(redis, key, kind)
    assert await texts(mesh) == [expected] * 4
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert all(len(each.getMessage()) < 2000 for each in caplog.records)
    # placement goes by the index again once the worker has repaired it, without help
    by_index = num_by_index(mesh)
    async with asyncio.timeout(15):
        while num_by_index(mesh) == by_index:
            await asyncio.sleep(0.02)
            await texts(mesh, 1)


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_instead_of_a_blob_is_an_error_of_ours_and_a_new_one_is_found(
    mesh: SmallMesh, kind: str
) -> None:
    blobs, redis = mesh.gateway.blobs, mesh.gateway.redis
    key = BlobKey(f"garbage-{secrets.token_hex(4)}")
    await put(redis, PREFIX + key, kind)
    if GARBAGE[kind][0] != "SET":
        with pytest.raises(TokenMeshError):
            await blobs.get(key)
    await blobs.put(b"repaired", key)
    assert await blobs.get(key) == b"repaired"
