"""The prefix index: one placement with reservation, from Python, on a full index.

`python -m benchmarks.bench_index` starts a Redis of its own, fills it with `--workers` sets of
`--blocks` route hashes and places prompts of `--prompt-blocks`: 40 % long hits, 40 % system prompts
only, 20 % misses. Now and then, while the clock stands still, what was reserved is given back, as
workers do. Then once more during `--updates` block updates a second from another process.
Prints microseconds as JSON, with the bare round trip of a script that does nothing. Runs on
uvloop, as the services do. On a busy machine p99 is the CPU scheduler's slice.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.index_results import IndexResult, Microseconds
from benchmarks.options import add_out
from benchmarks.serve.results import environment, write_json
from tests.servers import make_redis, redis_settings_of
from tokenmesh.services.scheduler_svc.index.placement_index import CandidateLoad, PlacementIndex
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.hashing import ROUTE_BLOCK_TOKENS
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index import RELEASE, IndexKeys
from tokenmesh.shared.redis import Part, Redis, open_redis

KEYS = IndexKeys(ModelName("bench"))
EPOCH = 1
SYSTEM_BLOCKS = 64
BATCH = 5000
TIDY_EVERY = 256
WHOLLY = -1


def chain(family: int, length: int) -> list[bytes]:
    """Route hashes of a prompt; the first ones are those of a system prompt that others share."""
    system, dice = random.Random(family % 8), random.Random(family)
    head = [system.randbytes(8) for _ in range(min(length, SYSTEM_BLOCKS))]
    return head + [dice.randbytes(8) for _ in range(length - len(head))]


async def fill(redis: Redis, num_workers: int, num_blocks: int, prompt_blocks: int) -> None:
    """Whole prompts on each worker until it is full."""
    for worker in range(num_workers):
        name = KEYS.blocks(WorkerId(f"w{worker}"), EPOCH)
        for number in range(0, num_blocks, prompt_blocks):
            family = worker * 100_000 + number
            hashes = chain(family, prompt_blocks)
            for first in range(0, len(hashes), BATCH):
                await redis.call("SADD", name, *hashes[first : first + BATCH])


def bids(num_workers: int) -> list[CandidateLoad]:
    """Workers that are all idle."""
    return [
        CandidateLoad(
            worker_id=WorkerId(f"w{number}"),
            epoch=EPOCH,
            prefill_tokens_per_s=8000.0,
            queued_tokens=0,
            extra_s=0.0,
            num_started=0,
            num_starting=0,
            num_room=1 << 30,
            is_indexed=True,
        )
        for number in range(num_workers)
    ]


def question(dice: random.Random, options: argparse.Namespace) -> Place:
    """A prompt of the mix."""
    kind = dice.random()
    family = dice.randrange(options.workers) * 100_000
    family += dice.randrange(options.blocks // options.prompt_blocks) * options.prompt_blocks
    hashes = chain(family, options.prompt_blocks)
    if kind > 0.8:
        hashes = [dice.randbytes(8) for _ in hashes]
    elif kind > 0.4:
        hashes[SYSTEM_BLOCKS:] = [dice.randbytes(8) for _ in hashes[SYSTEM_BLOCKS:]]
    return Place(
        request_id=RequestId("r"),
        model=KEYS.model,
        num_tokens=len(hashes) * ROUTE_BLOCK_TOKENS,
        max_tokens=1,
        route_hashes=b"".join(hashes),
    )


async def measure(redis: Redis, options: argparse.Namespace) -> Microseconds:
    """One placement."""
    index_settings = PrefixIndexSettings(ttl_s=60.0)
    dice = random.Random(1)
    index = PlacementIndex(redis, ROUTE_BLOCK_TOKENS, SchedulerSettings(), index_settings)
    offers, release = bids(options.workers), redis.script(RELEASE)
    prompts = [question(dice, options) for _ in range(options.prompts)]
    held: dict[WorkerId, list[str]] = {offer.worker_id: [] for offer in offers}

    async def place(number: int) -> None:
        request, name = prompts[number % len(prompts)], f"r{number}"
        chosen, _ = await index.place(request, offers, name)
        assert chosen is not None
        held[offers[chosen].worker_id].append(name)

    async def give_back() -> None:
        for worker, names in held.items():
            pairs: list[Part] = [part for name in names for part in (name, WHOLLY)]
            assert await release([KEYS.reserved(worker, EPOCH)], pairs) == len(names)
            names.clear()

    return await _timed(options.rounds, place, give_back)


async def round_trip(redis: Redis, num_bytes: int, rounds: int) -> Microseconds:
    """A script that does nothing with an argument of that size."""
    script, argument = redis.script("return 1"), b"x" * num_bytes

    async def call(_number: int) -> None:
        await script([], [argument])

    return await _timed(rounds, call)


async def _timed(
    rounds: int,
    ask: Callable[[int], Awaitable[None]],
    tidy: Callable[[], Awaitable[None]] | None = None,
) -> Microseconds:
    took = []
    for number in range(rounds):
        began = time.perf_counter()
        await ask(number)
        took.append((time.perf_counter() - began) * 1e6)
        if tidy is not None and (number + 1) % TIDY_EVERY == 0:
            await tidy()
    if tidy is not None:
        await tidy()
    took.sort()
    p50, p90, p99 = (round(took[len(took) * share // 100], 1) for share in (50, 90, 99))
    return Microseconds(p50=p50, p90=p90, p99=p99)


def update(settings: RedisSettings, num_workers: int, rate: int, written: Any) -> None:
    """Add and remove blocks, half and half, `rate` a second, until killed."""
    uvloop.run(_update(settings, num_workers, rate, written))


async def _update(settings: RedisSettings, num_workers: int, rate: int, written: Any) -> None:
    redis, dice = open_redis(settings), random.Random(2)
    began, share = time.monotonic(), 64
    while True:
        name = KEYS.blocks(WorkerId(f"w{dice.randrange(num_workers)}"), EPOCH)
        hashes = [dice.randbytes(8) for _ in range(share)]
        await redis.transact([["SADD", name, *hashes], ["SREM", name, *hashes]])
        written.value += 2 * share
        await asyncio.sleep(max(0.0, began + written.value / rate - time.monotonic()))


async def run(settings: RedisSettings, options: argparse.Namespace) -> IndexResult:
    """Alone, then during updates."""
    redis, began = open_redis(settings), environment()
    await fill(redis, options.workers, options.blocks, options.prompt_blocks)
    bare = await round_trip(redis, 0, options.rounds)
    with_prompt = await round_trip(redis, 8 * options.prompt_blocks, options.rounds)
    alone = await measure(redis, options)
    during, rate = await _during_updates(redis, settings, options)
    await redis.close()
    return IndexResult(
        config={key: value for key, value in vars(options).items() if key != "out"},
        environment=began,
        load_average_end=os.getloadavg()[0],
        round_trip_us=bare,
        round_trip_prompt_us=with_prompt,
        alone_us=alone,
        during_updates_us=during,
        updates_per_s=round(rate),
    )


async def _during_updates(
    redis: Redis, settings: RedisSettings, options: argparse.Namespace
) -> tuple[Microseconds, float]:
    """The same while another process writes, and how many updates a second it made."""
    spawn = multiprocessing.get_context("spawn")
    written = spawn.Value("q", 0)
    writer = spawn.Process(
        target=update, args=(settings, options.workers, options.updates, written)
    )
    writer.start()
    while not written.value:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    before, began = written.value, time.monotonic()
    busy = await measure(redis, options)
    rate = (written.value - before) / (time.monotonic() - began)
    writer.kill()
    writer.join()
    return busy, rate


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--prompt-blocks", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=1024, help="different ones")
    parser.add_argument("--rounds", type=int, default=10_000)
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = make_redis(Path(folder))
        server.start()
        try:
            outcome = uvloop.run(run(redis_settings_of(server), options))
        finally:
            server.stop()
    print(msgspec.json.encode(outcome).decode())
    if options.out is not None:
        write_json(options.out, outcome)


if __name__ == "__main__":
    main()
