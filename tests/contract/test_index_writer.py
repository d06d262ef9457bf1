"""IndexWriter on a real Redis: what it holds is what the engine said, whatever happens to Redis."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.fakes.reserved import amount, reserve, reserved
from tests.servers import Server, redis_settings_of
from tokenmesh.engine.kv.route_ledger import RouteChange
from tokenmesh.services.worker_svc.prefix_index.writer import IndexWriter
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.placement import PrefixIndexSettings
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import IndexKeys, name_reservation
from tokenmesh.shared.redis import Redis, open_redis

WORKER, EPOCH = WorkerId("worker-1"), 7
QUICK = PrefixIndexSettings(
    heartbeat_s=0.05, ttl_s=0.6, write_interval_s=0.001, retry_s=0.05, write_batch=3, max_changes=40
)


def route(number: int) -> bytes:
    return number.to_bytes(8, "little")


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def has_type(redis: Redis, name: str, kind: bytes) -> bool:
    return await redis.call("TYPE", name) == kind


async def has_left(redis: Redis, name: str, num_fields: int) -> bool:
    return await redis.call("HLEN", name) == num_fields


async def are_gone(redis: Redis, names: list[str]) -> bool:
    return await redis.call("EXISTS", *names) == 0


class Renewals:
    """Notes whether the time left for a key grows."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._name = name
        self._least_ms = 2**60

    async def were_seen(self) -> bool:
        left_ms = await self._redis.call("PTTL", self._name)
        assert isinstance(left_ms, int)
        was_renewed = left_ms > self._least_ms
        self._least_ms = min(left_ms, self._least_ms)
        return was_renewed


class Desk:
    """A writer that runs, and a look at what Redis has of it."""

    def __init__(self, redis: Redis, settings: PrefixIndexSettings = QUICK) -> None:
        self.redis = redis
        self.keys = IndexKeys(ModelName(f"m-{secrets.token_hex(4)}"))
        self.metrics = Metrics()
        self.blocks = self.keys.blocks(WORKER, EPOCH)
        self.writer = IndexWriter(redis, self.keys.model, WORKER, EPOCH, settings, self.metrics)
        self.expected: set[bytes] = set()

    def note(
        self, added: Iterable[int] = (), gone: Iterable[int] = (), *, cleared: bool = False
    ) -> None:
        there = {route(each): True for each in added} | {route(each): False for each in gone}
        self.writer.note(RouteChange(is_cleared=cleared, is_there=there))
        if cleared:
            self.expected.clear()
        for each, is_there in there.items():
            (self.expected.add if is_there else self.expected.discard)(each)

    async def holds(self) -> set[bytes]:
        reply = await self.redis.call("SMEMBERS", self.blocks)
        assert isinstance(reply, list)
        return {each for each in reply if isinstance(each, bytes)}

    async def is_settled(self) -> bool:
        return self.writer.is_current and await self.holds() == self.expected

    async def is_away(self) -> bool:
        return not self.writer.is_current

    async def settles(self) -> None:
        """Redis comes to hold what it should, and the digest says the same."""
        await until(self.is_settled)
        xor = 0
        for each in self.expected:
            xor ^= int.from_bytes(each, "little")
        digest = await self.redis.call("HMGET", self.keys.digest(WORKER, EPOCH), "n", "xor")
        assert digest == [str(len(self.expected)).encode(), f"{xor:016x}".encode()]


@asynccontextmanager
async def running(redis: Redis, settings: PrefixIndexSettings = QUICK) -> AsyncIterator[Desk]:
    desk = Desk(redis, settings)
    task = asyncio.create_task(desk.writer.run())
    yield desk
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def redis(redis_settings: RedisSettings) -> AsyncIterator[Redis]:
    redis = open_redis(redis_settings)
    yield redis
    await redis.close()


async def test_what_comes_and_goes_is_written(redis: Redis) -> None:
    async with running(redis) as desk:
        desk.note(range(10))
        await desk.settles()
        desk.note([20, 21], gone=[3, 4, 99])
        desk.note([3], gone=[20])
        await desk.settles()
        desk.note(cleared=True)
        await desk.settles()
        desk.note([1], cleared=True)
        await desk.settles()


async def test_more_changes_than_may_wait_are_written_all_the_same(redis: Redis) -> None:
    async with running(redis) as desk:
        desk.note(range(500))
        desk.note(range(500, 600), gone=range(100))
        await desk.settles()


@pytest.mark.parametrize("harm", ["DEL", "SREM", "SADD", "SET"])
async def test_a_set_that_is_not_as_it_should_be_is_written_anew(redis: Redis, harm: str) -> None:
    async with running(redis) as desk:
        desk.note(range(10))
        await desk.settles()
        what: tuple[bytes, ...] = ()
        if harm != "DEL":
            what = {"SREM": (route(2),), "SADD": (route(77),), "SET": (b"garbage",)}[harm]
        await redis.call(harm, desk.blocks, *what)
        await until(partial(has_type, redis, desk.blocks, b"set"))
        await desk.settles()
        desk.note([30])
        await desk.settles()


async def test_redis_is_put_back_to_an_earlier_state_of_the_same_size(redis: Redis) -> None:
    async with running(redis) as desk:
        desk.note(range(10))
        await desk.settles()
        names = (desk.blocks, desk.keys.digest(WORKER, EPOCH))
        earlier = await redis.call_all([["DUMP", name] for name in names])
        desk.note([30], gone=[3])
        await desk.settles()
        for name, state in zip(names, earlier, strict=True):
            assert isinstance(state, bytes)
            await redis.call("RESTORE", name, 5000, state, "REPLACE")
        await desk.settles()


async def test_redis_comes_back_empty(start_redis: Callable[[], Server]) -> None:
    server = start_redis()
    redis = open_redis(redis_settings_of(server))
    async with running(redis) as desk:
        desk.note(range(30))
        await desk.settles()
        server.stop()
        desk.note([40], gone=[2])
        desk.writer.release("lost")
        await until(desk.is_away)
        server.start()
        await desk.settles()
        desk.note([41])
        await desk.settles()
    await redis.close()


async def test_the_keys_of_a_dead_worker_are_gone_after_their_time(redis: Redis) -> None:
    async with running(redis, QUICK.model_copy(update={"ttl_s": 2.0})) as desk:
        names = [desk.blocks, desk.keys.digest(WORKER, EPOCH), desk.keys.reserved(WORKER, EPOCH)]
        desk.note(range(9))
        await reserve(redis, names[2], {"r": amount(3, 1)})
        await desk.settles()
        for name in names:
            await until(Renewals(redis, name).were_seen)
    assert await redis.call("EXISTS", *names) == 3
    await until(partial(are_gone, redis, names))


async def test_a_worker_that_leaves_takes_its_keys_along(redis: Redis) -> None:
    async with running(redis) as desk:
        desk.note(range(9))
        await desk.settles()
        await reserve(redis, desk.keys.reserved(WORKER, EPOCH), {"r": amount(3, 1)})
        await desk.writer.close()
        desk.note([50])
        await asyncio.sleep(0.1)
        assert await redis.call("KEYS", f"kvx:{{{desk.keys.model}}}:*") == []


async def test_what_is_computed_of_a_reservation_is_given_back_at_once(redis: Redis) -> None:
    desk = Desk(redis)
    name = desk.keys.reserved(WORKER, EPOCH)
    await reserve(redis, name, {"r": amount(300, 1), "other": amount(200, 1)})
    for left, expected in ((400, 500), (250, 450), (260, 450), (10, 210)):
        desk.writer.note_progress({"r": left, "unknown": 7})
        assert await desk.writer.flush()
        assert await reserved(redis, name) == (expected, 2)
    desk.writer.release(name_reservation("r", WORKER, EPOCH))
    desk.writer.note_progress({"r": 5})
    assert await desk.writer.flush()
    assert await reserved(redis, name) == (200, 1)
    assert await redis.call("HMGET", name, "r", "unknown") == [None, None]


async def test_reservations_are_given_back_once_and_in_batches(redis: Redis) -> None:
    desk = Desk(redis)
    name = desk.keys.reserved(WORKER, EPOCH)
    await reserve(redis, name, {f"r{number}": amount(10, 1) for number in range(600)})
    for number in range(600):
        desk.writer.release(f"r{number}")
    task = asyncio.create_task(desk.writer.run())
    await until(partial(has_left, redis, name, 1))
    for number in range(600):
        desk.writer.release(f"r{number}")
    await asyncio.sleep(0.05)
    assert await reserved(redis, name) == (0, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reservation_past_its_time_is_released_by_the_worker(redis: Redis) -> None:
    settings = QUICK.model_copy(update={"reservation_s": 2.0})
    async with running(redis, settings) as desk:
        name = desk.keys.reserved(WORKER, EPOCH)
        await reserve(redis, name, {"lost": amount(500, 2), "kept": amount(70, 1)})
        desk.writer.release("kept")
        await until(partial(has_left, redis, name, 2))
        assert await reserved(redis, name) == (500, 2)
        await until(partial(has_left, redis, name, 1))
        assert await reserved(redis, name) == (0, 0)


@pytest.mark.parametrize("harm", ["SET", "SADD"])
async def test_garbage_instead_of_reservations_is_deleted(redis: Redis, harm: str) -> None:
    async with running(redis) as desk:
        name = desk.keys.reserved(WORKER, EPOCH)
        await redis.call(harm, name, "garbage")
        desk.writer.release("r")
        await until(partial(has_type, redis, name, b"none"))
        desk.note(range(4))
        await desk.settles()


async def test_a_forged_reservation_does_not_take_off_what_it_never_added(redis: Redis) -> None:
    desk = Desk(redis)
    name = desk.keys.reserved(WORKER, EPOCH)
    await reserve(redis, name, {"r": amount(5, 1)})
    await redis.call("HSET", name, "huge", "9" * 18, "text", "many")
    for each in ("huge", "text", "", "r"):
        desk.writer.release(each)
    assert await desk.writer.flush()
    assert await reserved(redis, name) in ((0, 0), None)
