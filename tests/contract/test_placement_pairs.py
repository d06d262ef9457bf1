"""Pairs in the placement script: where KV comes from, on a real Redis, by costs in Python."""

import secrets
from random import Random
from typing import Any

import pytest

from tests.fakes.reserved import reserved
from tests.rounds import rounds
from tokenmesh.services.scheduler_svc.index.placement_index import (
    COMPUTES,
    HOLDS,
    LEAST_GAIN_S,
    TAKES,
    TAKES_AND_HOLDS,
    CandidateLoad,
    CandidateScore,
    PlacementIndex,
)
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import Redis, open_redis

BLOCK, EPOCH, WEIGHT = 64, 7, 3.0
SCHEDULER = SchedulerSettings(uncached_weight=WEIGHT, tie_s=0.005)
HASHES = [(index + 1).to_bytes(8, "little") for index in range(64)]
PREFILL = {"use": COMPUTES, "kv_number": 1}
DECODE = {"use": TAKES_AND_HOLDS, "kv_number": 1, "kv_tokens_per_s": 50_000.0, "weight": WEIGHT}
BOTH = {**DECODE, "weight": 0.0}


def load(name: str, facts: dict[str, Any]) -> CandidateLoad:
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


class Script:
    """The script and its workers: (blocks that they hold, facts)."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    async def __call__(
        self, tokens: int, *workers: tuple[int, dict[str, Any]]
    ) -> tuple[int | None, list[CandidateScore], list[tuple[int, int]]]:
        keys = IndexKeys(ModelName(f"m-{secrets.token_hex(6)}"))
        index = PlacementIndex(self.redis, BLOCK, SCHEDULER, PrefixIndexSettings())
        loads = []
        for number, (depth, facts) in enumerate(workers):
            loads.append(load(f"w{number}", facts))
            if depth:
                name = keys.blocks(loads[-1].worker_id, EPOCH)
                await self.redis.call("SADD", name, *HASHES[:depth])
        request = Place(
            request_id=RequestId("r"),
            model=keys.model,
            num_tokens=tokens,
            max_tokens=1,
            route_hashes=b"".join(HASHES[: tokens // BLOCK]),
        )
        chosen, scores = await index.place(request, loads, "r")
        held = [await reserved(self.redis, keys.reserved(each.worker_id, EPOCH)) for each in loads]
        return chosen, scores, [each or (0, 0) for each in held]


@pytest.fixture
async def script(redis_settings: RedisSettings) -> Any:
    redis = open_redis(redis_settings)
    yield Script(redis)
    await redis.close()


async def test_a_long_prompt_is_computed_by_a_prefill_worker_and_a_short_one_is_not(
    script: Script,
) -> None:
    chosen, scores, held = await script(2000, (0, PREFILL), (0, DECODE))
    assert (chosen, scores[1].source) == (1, -1)
    # its tokens count where they are computed
    assert held == [(0, 0), (1, 1)]
    assert scores[1].estimated_ttft_s == pytest.approx(2.0 + 2000 / 50_000)
    chosen, scores, held = await script(2, (0, PREFILL), (0, DECODE))
    assert (chosen, scores[1].source) == (1, 0)
    assert held[1] == (2, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "depth"),
    [
        ({"queued_tokens": 20_000}, {}, 0),
        ({}, {"kv_tokens_per_s": 300.0}, 0),
        ({}, {"kv_tokens_per_s": 0.0}, 0),
        ({"kv_number": 2}, {}, 0),
        ({"use": HOLDS}, {}, 0),
        ({}, {}, 31),
    ],
)
async def test_it_is_computed_where_it_is_decoded_when_that_is_sooner(
    script: Script, prefill: dict[str, Any], decode: dict[str, Any], depth: int
) -> None:
    chosen, scores, _ = await script(
        31 * BLOCK + 1, (0, {**PREFILL, **prefill}), (depth, {**DECODE, **decode})
    )
    assert (chosen, scores[1].source) == (1, 0)


async def test_what_a_full_or_leaving_worker_has_is_read_by_another_one(script: Script) -> None:
    for use in (HOLDS, TAKES_AND_HOLDS):
        full = {**BOTH, "use": use, "num_room": 1, "num_started": 5}
        chosen, scores, held = await script(2000, (31, full), (0, BOTH))
        assert (chosen, scores[1].source) == (1, 1)
        assert held[1] == (2000 - 31 * BLOCK, 1)


def model(tokens: int, loads: list[CandidateLoad], depths: list[int]) -> list[tuple[float, int]]:
    """Cost and source of each worker that takes streams and has room."""
    uncached = [max(1, tokens - depth * BLOCK) for depth in depths]
    waits = [each.queued_tokens / each.prefill_tokens_per_s + each.extra_s for each in loads]
    alone = [
        wait + todo / each.prefill_tokens_per_s
        for wait, todo, each in zip(waits, uncached, loads, strict=True)
    ]
    takes = [
        each.use in (TAKES, TAKES_AND_HOLDS)
        and (each.num_started == 0 or each.num_started + 1 <= each.num_room)
        for each in loads
    ]
    fewest = min((todo for todo, is_one in zip(uncached, takes, strict=True) if is_one), default=0)
    found = []
    for number, each in enumerate(loads):
        rate = each.prefill_tokens_per_s

        def weighed(todo: int, weight: float = each.weight, rate: float = rate) -> float:
            if weight:
                return (weight - 1) * todo / rate
            return (WEIGHT - 1) * max(0, todo - fewest) / rate

        options = [(alone[number] + weighed(uncached[number]), 0)]
        others = [
            other
            for other in range(len(loads))
            if other != number and loads[other].kv_number == each.kv_number != 0
        ]
        if each.kv_tokens_per_s:
            for other in others:
                seconds = (tokens - depths[number] * BLOCK) / each.kv_tokens_per_s
                if loads[other].use == COMPUTES:
                    whole = max(waits[number], alone[other]) + seconds + each.extra_s
                    options.append((whole + LEAST_GAIN_S, -1 - other))
                if loads[other].use > TAKES and depths[other] > depths[number]:
                    rest = max(1, tokens - depths[other] * BLOCK)
                    moved = (depths[other] - depths[number]) * BLOCK / each.kv_tokens_per_s
                    whole = waits[number] + moved + rest / rate + weighed(rest)
                    options.append((whole + LEAST_GAIN_S, 1 + other))
        cost, source = min(options)
        found.append((cost - LEAST_GAIN_S * (source != 0), source))
    return found


@rounds("seed", 2, 60)
async def test_costs_are_the_least_of_all_ways_in_random_meshes(script: Script, seed: int) -> None:
    rng = Random(seed)
    num_pairs = 0
    for _ in range(40):
        tokens = rng.choice((10, 100, 700, 3000))
        workers = []
        for _ in range(rng.randint(2, 5)):
            kinds = (PREFILL, DECODE, BOTH, {"use": TAKES}, {**BOTH, "use": HOLDS})
            facts: dict[str, Any] = dict(rng.choice(kinds))
            facts["queued_tokens"] = rng.choice((0, 0, 500, 5000))
            facts["prefill_tokens_per_s"] = rng.choice((500.0, 2000.0))
            facts["extra_s"] = rng.choice((0.0, 0.01))
            if "kv_number" in facts and rng.random() < 0.3:
                facts["kv_number"] = 2
            workers.append((rng.randint(0, tokens // BLOCK), facts))
        chosen, scores, _ = await script(tokens, *workers)
        loads = [load("w", facts) for _, facts in workers]
        found = model(tokens, loads, [depth for depth, _ in workers])
        takers = [at for at, each in enumerate(loads) if each.use in (TAKES, TAKES_AND_HOLDS)]
        if not takers:
            assert chosen is None
            continue
        for at in takers:
            assert scores[at].cost_s == pytest.approx(found[at][0], abs=1e-9)
            num_pairs += scores[at].source != 0
        assert chosen in takers
        best = min(scores[at].cost_s for at in takers)
        assert scores[chosen].cost_s <= best * 1.1 + 0.005 + 1e-9
    assert num_pairs
