"""The placement script on a real Redis, against a model in Python."""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.reserved import amount, reserved
from tokenmesh.services.scheduler_svc.index.placement_index import (
    CandidateLoad,
    CandidateScore,
    PlacementIndex,
)
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index import IndexKeys, name_reservation
from tokenmesh.shared.redis import Redis, open_redis

BLOCK = 64
EPOCH = 7
WEIGHT = 3.0
SCHEDULER = SchedulerSettings(uncached_weight=WEIGHT, tie_s=0.005)


def chain(family: int, length: int) -> list[bytes]:
    """Hashes of a prompt's blocks; a family is a system prompt."""
    return [(family << 32 | index + 1).to_bytes(8, "little") for index in range(length)]


@dataclass
class Rig:
    redis: Redis
    keys: IndexKeys
    index: PlacementIndex
    candidates: list[CandidateLoad] = field(default_factory=list)

    async def add_worker(self, blocks: list[bytes], **facts: Any) -> CandidateLoad:
        load = load_of(f"w{len(self.candidates)}", **facts)
        self.candidates.append(load)
        if blocks:
            await self.redis.call("SADD", self.keys.blocks(load.worker_id, EPOCH), *blocks)
        return load

    async def place(
        self, hashes: list[bytes], num_tokens: int, name: str = "r", **fields: Any
    ) -> tuple[int | None, list[CandidateScore]]:
        request = Place(
            request_id=RequestId("r"),
            model=self.keys.model,
            num_tokens=num_tokens,
            max_tokens=1,
            route_hashes=b"".join(hashes),
            **fields,
        )
        return await self.index.place(request, self.candidates, name)

    async def reserved(self, load: CandidateLoad) -> tuple[int, int]:
        return await reserved(self.redis, self.keys.reserved(load.worker_id, EPOCH)) or (0, 0)


def load_of(name: str, **facts: Any) -> CandidateLoad:
    usual: dict[str, Any] = {
        "prefill_tokens_per_s": 1000.0,
        "queued_tokens": 0,
        "extra_s": 0.0,
        "num_started": 0,
        "num_starting": 0,
        "num_room": 10,
        "is_indexed": True,
    }
    return CandidateLoad(worker_id=WorkerId(name), epoch=EPOCH, **{**usual, **facts})


@pytest.fixture
async def rig(redis_settings: RedisSettings) -> Any:
    redis = open_redis(redis_settings)
    yield make_rig(redis)
    await redis.close()


def make_rig(redis: Redis, ttl_s: float = 60.0) -> Rig:
    keys = IndexKeys(ModelName(f"m-{secrets.token_hex(4)}"))
    return Rig(
        redis, keys, PlacementIndex(redis, BLOCK, SCHEDULER, PrefixIndexSettings(ttl_s=ttl_s))
    )


async def test_the_longest_prefix_wins_and_is_reserved(rig: Rig) -> None:
    await rig.add_worker(chain(1, 2))
    best = await rig.add_worker(chain(1, 9))
    await rig.add_worker([])
    chosen, scores = await rig.place(chain(1, 10), 10 * BLOCK + 5)
    assert chosen == 1
    assert [each.matched_blocks for each in scores] == [2, 9, 0]
    assert await rig.reserved(best) == (BLOCK + 5, 1)


async def test_reservations_of_others_count(rig: Rig) -> None:
    for _ in range(2):
        await rig.add_worker([])
    chosen = [(await rig.place([], 1000, f"r{number}"))[0] for number in range(4)]
    assert sorted(each for each in chosen if each is not None) == [0, 0, 1, 1]


@pytest.mark.parametrize(("queued", "chosen"), [(2900, 0), (3600, 1)])
async def test_a_prompt_waits_for_a_prefix_hit_up_to_the_weighted_time_of_computing_it(
    rig: Rig, queued: int, chosen: int
) -> None:
    await rig.add_worker(chain(1, 17), queued_tokens=queued)
    await rig.add_worker([])
    assert (await rig.place(chain(1, 17), 17 * BLOCK))[0] == chosen


async def test_among_equals_the_worker_with_fewer_streams_is_chosen(rig: Rig) -> None:
    await rig.add_worker(chain(1, 9), num_started=3)
    await rig.add_worker(chain(1, 9), num_started=2)
    assert (await rig.place(chain(1, 9), 9 * BLOCK))[0] == 1


async def test_a_request_that_is_placed_again_releases_its_reservation(rig: Rig) -> None:
    first = await rig.add_worker([])
    chosen, _ = await rig.place([], 1000, "one")
    assert chosen == 0
    second = await rig.add_worker([], prefill_tokens_per_s=1e6)
    chosen, _ = await rig.place(
        [], 1000, "two", reservation=name_reservation("one", first.worker_id, EPOCH)
    )
    assert chosen == 1
    assert await rig.reserved(first) == (0, 0)
    assert await rig.reserved(second) == (1000, 1)


async def test_a_call_that_is_made_twice_reserves_once(rig: Rig) -> None:
    load = await rig.add_worker([])
    for _ in range(2):
        assert (await rig.place([], 1000, "same"))[0] == 0
    assert await rig.reserved(load) == (1000, 1)


async def test_no_worker_has_room(rig: Rig) -> None:
    load = await rig.add_worker([], num_started=10)
    chosen, scores = await rig.place([], 10)
    assert (chosen, scores[0].has_room) == (None, False)
    assert await rig.reserved(load) == (0, 0)


async def test_an_idle_worker_takes_more_streams_than_it_holds(rig: Rig) -> None:
    await rig.add_worker([])
    assert (await rig.place([], 10, num_streams=99))[0] == 0
    assert (await rig.place([], 10, "other"))[0] is None


async def test_reservations_on_a_dead_worker_expire(rig: Rig) -> None:
    load = await rig.add_worker([])
    name = rig.keys.reserved(load.worker_id, EPOCH)
    await rig.place([], 500, "lost")
    await rig.place([], 20, "next")
    assert await rig.reserved(load) == (520, 2)
    left_ms = await rig.redis.call("PTTL", name)
    assert isinstance(left_ms, int)
    assert 0 < left_ms <= 60_000
    await rig.redis.call("PEXPIRE", name, 1)
    await asyncio.sleep(0.01)
    await rig.place([], 7, "new")
    assert await rig.reserved(load) == (7, 1)
    assert await rig.redis.call("HLEN", name) == 2
    assert await rig.redis.call("HMGET", name, "lost", "next") == [None, None]


async def test_the_sum_is_that_of_the_reservations(rig: Rig) -> None:
    load = await rig.add_worker([], num_room=99)
    for number in range(5):
        await rig.place([], 100 + number, f"r{number}", num_streams=1 + number)
    held = await rig.redis.call("HGETALL", rig.keys.reserved(load.worker_id, EPOCH))
    assert isinstance(held, list)
    names, sizes = held[::2], [int(str(each, "ascii")) for each in held[1::2]]  # type: ignore[arg-type]
    assert sizes[names.index(b"")] == sum(sizes) / 2 == amount(510, 15)
    assert set(names) == {b"", b"r0", b"r1", b"r2", b"r3", b"r4"}


async def test_reservations_on_a_worker_without_index_do_not_count(rig: Rig) -> None:
    load = await rig.add_worker([], is_indexed=False)
    for number in range(2):
        _, scores = await rig.place([], 500, f"r{number}")
        assert (scores[0].reserved_tokens, scores[0].estimated_ttft_s) == (0, 0.5)
    assert await rig.reserved(load) == (1000, 2)


async def test_a_prompt_that_began_like_another_is_found_with_fewer_queries(rig: Rig) -> None:
    for _ in range(5):
        await rig.add_worker(chain(1, 37))

    async def num_queries() -> int:
        await rig.redis.call("CONFIG", "RESETSTAT")
        await rig.place(chain(1, 60), 60 * BLOCK, secrets.token_hex(4))
        stats = await rig.redis.call("INFO", "commandstats")
        assert isinstance(stats, bytes)
        return int(stats.partition(b"cmdstat_sismember:calls=")[2].partition(b",")[0])

    first = await num_queries()
    assert await num_queries() == 10 < first


Depths = st.lists(st.integers(0, 70), min_size=1, max_size=6)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    depths=Depths,
    others=st.lists(st.integers(0, 40), max_size=6),
    length=st.integers(0, 70),
    rates=st.lists(st.floats(10, 1e5), min_size=6, max_size=6),
    queued=st.lists(st.integers(0, 5000), min_size=6, max_size=6),
)
async def test_every_depth_is_found_and_the_cheapest_is_chosen(
    redis_settings: RedisSettings,
    depths: list[int],
    others: list[int],
    length: int,
    rates: list[float],
    queued: list[int],
) -> None:
    redis = open_redis(redis_settings)
    rig = make_rig(redis)
    for worker, depth in enumerate(depths):
        blocks = chain(1, depth)
        if worker < len(others):
            blocks += chain(2, others[worker])
        await rig.add_worker(
            blocks, prefill_tokens_per_s=rates[worker], queued_tokens=queued[worker]
        )
    num_tokens = length * BLOCK + 3
    chosen, scores = await rig.place(chain(1, length), num_tokens)
    expected = [min(depth, length) for depth in depths]
    assert [each.matched_blocks for each in scores] == expected
    uncached = [max(1, num_tokens - matched * BLOCK) for matched in expected]
    estimates = [
        (ahead + tokens) / rate
        for ahead, tokens, rate in zip(queued, uncached, rates, strict=False)
    ]
    assert [each.estimated_ttft_s for each in scores] == pytest.approx(estimates, abs=2e-6)
    costs = [
        estimate + (WEIGHT - 1) * (tokens - min(uncached)) / rate
        for estimate, tokens, rate in zip(estimates, uncached, rates, strict=False)
    ]
    assert [each.cost_s for each in scores] == pytest.approx(costs, abs=2e-6)
    assert chosen is not None
    equals = [each for each, cost in enumerate(costs) if cost <= min(costs) * 1.1 + 0.005 - 1e-9]
    assert costs[chosen] <= min(costs) * 1.1 + 0.005 + 1e-9
    assert uncached[chosen] <= min(uncached[each] for each in equals)
    await redis.close()
