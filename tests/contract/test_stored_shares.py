"""The disk for stored responses is shared: a tenant that stores much displaces its own first."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import pytest

from tokenmesh.services.gateway.apis.responses.response_logs import open_journal
from tokenmesh.services.gateway.core.tenancy.redis_state import stored_entries_key, stored_key
from tokenmesh.services.gateway.core.tenancy.stored_shares import StoredShares
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.redis import Redis, open_redis
from tokenmesh.shared.subjects import response_log

SETTINGS = ResponseSettings(max_total_bytes=2**20)
SIZE = 100_000
FIT = 9
"""Entries of that size."""


class Scene:
    def __init__(self, redis: Redis, journal: Journal, settings: ResponseSettings) -> None:
        self.redis = redis
        self.journal = journal
        self.shares = StoredShares(redis, journal, settings)

    async def store(self, tenant: str, num_bytes: int = SIZE) -> str:
        key = response_log(ResponseId(f"resp_{secrets.token_hex(16)}"))
        # What is counted need not be what is stored.
        await self.journal.append(key, b"x", 0)
        await self.shares.count(tenant, key, num_bytes)
        return key

    async def is_stored(self, key: str) -> bool:
        return await self.journal.last(key) is not None

    async def wait_deleted(self, key: str) -> None:
        async with asyncio.timeout(10):
            while await self.is_stored(key):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def forget_all(self) -> None:
        found = await self.redis.call("HKEYS", stored_key())
        names = [each.decode() for each in found if isinstance(each, bytes)] if found else []  # type: ignore[union-attr]
        keys = [f"{stored_key()}:{name}" for name in names]
        await self.redis.call("DEL", stored_key(), stored_entries_key(), *keys)


@pytest.fixture
async def make(
    bus: MessageBus, redis_settings: RedisSettings
) -> AsyncIterator[Callable[..., Scene]]:
    redis = open_redis(redis_settings)
    scenes = []

    def made(settings: ResponseSettings = SETTINGS) -> Scene:
        # The stream is as large as it always is: only the counts are bounded here.
        scenes.append(Scene(redis, open_journal(bus, ResponseSettings()), settings))
        return scenes[-1]

    await made().forget_all()
    yield made
    await scenes[0].forget_all()
    await redis.close()


async def test_a_tenant_that_stores_much_displaces_its_own(make: Callable[..., Scene]) -> None:
    scene = make()
    small = [await scene.store("ann") for _ in range(2)]
    large = [await scene.store("bob") for _ in range(FIT + 3)]
    for key in large[: len(large) + len(small) - FIT]:
        await scene.wait_deleted(key)
    for key in (*small, *large[len(large) + len(small) - FIT :]):
        assert await scene.is_stored(key)


async def test_two_tenants_that_store_much_get_equal_shares(make: Callable[..., Scene]) -> None:
    scene = make()
    first = [await scene.store("ann") for _ in range(FIT)]
    second = [await scene.store("bob") for _ in range(FIT)]
    await scene.wait_deleted(first[FIT // 2 - 1])
    await scene.wait_deleted(second[FIT // 2 - 1])
    for keys in (first, second):
        assert not await scene.is_stored(keys[0])
        assert all([await scene.is_stored(key) for key in keys[-(FIT // 2) :]])


async def test_what_was_deleted_or_has_shrunk_counts_no_longer(make: Callable[..., Scene]) -> None:
    scene = make()
    first, second = [await scene.store("ann", 4 * SIZE) for _ in range(2)]
    await scene.shares.forget(first)
    await scene.shares.count("ann", second, SIZE)
    others = [await scene.store("ann") for _ in range(FIT - 1)]
    assert all([await scene.is_stored(key) for key in (second, *others)])
    await scene.store("ann")
    await scene.wait_deleted(second)
    assert all([await scene.is_stored(key) for key in others])


async def test_what_has_expired_counts_no_longer(make: Callable[..., Scene]) -> None:
    brief = make(SETTINGS.model_copy(update={"retention_s": 0.001}))
    for _ in range(FIT - 1):
        await brief.store("ann")
    scene = make()
    others = [await scene.store("bob") for _ in range(FIT)]
    assert all([await scene.is_stored(key) for key in others])


async def test_a_part_that_redis_has_lost_does_not_count_for_ever(
    make: Callable[..., Scene],
) -> None:
    scene = make()
    for _ in range(FIT):
        await scene.store("ann")
    await scene.redis.call("DEL", stored_entries_key())
    kept = [await scene.store("bob") for _ in range(FIT)]
    assert all([await scene.is_stored(key) for key in kept])
