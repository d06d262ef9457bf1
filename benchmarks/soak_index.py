"""The prefix index against a model: a million random operations on a Redis of its own.

`python -m benchmarks.soak_index`. Worlds of a few workers each (tests/fakes/index_world.py) go side
by side, so that Redis always has something to do. Writers store, evict, clear, lose their keys and
start anew; placements compare every worker's match and what is reserved on it with what the model
says. Ends with 1 at the first difference, and prints the seed of its world.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from tests.fakes.index_world import World, stroll
from tests.servers import make_redis, redis_settings_of
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.redis import open_redis


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="soak_index")
    add = parser.add_argument
    add("--operations", type=int, default=1_000_000)
    add("--per-world", type=int, default=10_000)
    add("--side-by-side", type=int, default=16, help="worlds at a time")
    add("--seed", type=int, default=0, help="of the first world; the next has the next")
    return parser.parse_args(arguments)


async def soak(settings: RedisSettings, options: argparse.Namespace) -> dict[str, Any]:
    """What was done. Raises AssertionError with the world's seed as a note."""
    # Only a wrong answer may end it, not a machine that stood still.
    redis = open_redis(settings.model_copy(update={"call_timeout_s": 600.0}))
    seeds = iter(range(options.seed, options.seed + options.operations // options.per_world))
    done = {"worlds": 0, "operations": 0, "matches_compared": 0}

    async def go_through() -> None:
        for seed in seeds:
            world = World(redis)
            try:
                await stroll(world, Random(seed), options.per_world)
            except AssertionError as error:
                error.add_note(f"in the world of seed {seed}")
                raise
            await world.end()
            done["worlds"] += 1
            done["operations"] += options.per_world
            done["matches_compared"] += world.num_matches

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(options.side_by_side):
            group.create_task(go_through())
    await redis.close()
    return {**done, "wrong": 0, "seconds": round(time.monotonic() - began_s, 1)}


def main() -> int:
    """Run, print, write."""
    options = parse()
    # Sets that are lost are part of it.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        server = make_redis(Path(folder))
        server.start()
        try:
            outcome = uvloop.run(soak(redis_settings_of(server), options))
        finally:
            server.stop()
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
