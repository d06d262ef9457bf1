"""Writers and the placement script together, against a model, over any order of events."""

import asyncio
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.fakes.index_world import BLOCK, FAMILIES, LONGEST, WORKERS, World, stroll
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.redis import open_redis

NUMBERS = st.integers(0, WORKERS - 1)
KINDS = st.integers(0, FAMILIES - 1)
DEPTHS = st.integers(0, LONGEST)


def machine_of(url: RedisSettings) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.redis = open_redis(url)
            self.world = World(self.redis)

        @rule(number=NUMBERS, family=KINDS, depth=DEPTHS)
        def store(self, number: int, family: int, depth: int) -> None:
            self.world.store(number, family, depth)

        @rule(number=NUMBERS, family=KINDS, depth=DEPTHS)
        def evict(self, number: int, family: int, depth: int) -> None:
            self.world.evict(number, family, depth)

        @rule(number=NUMBERS)
        def clear(self, number: int) -> None:
            self.world.clear(number)

        @rule(number=NUMBERS)
        def restart(self, number: int) -> None:
            self.world.restart(number)

        @rule(number=NUMBERS)
        def lose(self, number: int) -> None:
            self.loop.run_until_complete(self.world.lose(number))

        @rule(number=NUMBERS, which=st.integers(0, 1), share=st.integers(1, 3))
        def give_back(self, number: int, which: int, share: int) -> None:
            self.loop.run_until_complete(self.world.progress(number, share))
            self.loop.run_until_complete(self.world.flush_releases(number, which))

        @rule(family=KINDS, length=DEPTHS, rest=st.integers(1, BLOCK))
        def place(self, family: int, length: int, rest: int) -> None:
            self.loop.run_until_complete(self.world.place(family, length, rest))

        @invariant()
        def every_family_is_matched_exactly(self) -> None:
            for family in range(FAMILIES):
                self.loop.run_until_complete(self.world.place(family, LONGEST, 1))

        def teardown(self) -> None:
            self.loop.run_until_complete(self.world.end())
            self.loop.run_until_complete(self.redis.close())
            self.loop.close()

    return Machine


def test_nothing_is_matched_that_is_not_there(redis_settings: RedisSettings) -> None:
    run_state_machine_as_test(
        machine_of(redis_settings),
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )


async def test_a_stroll_finds_what_is_there(redis_settings: RedisSettings) -> None:
    redis = open_redis(redis_settings)
    world = World(redis)
    await stroll(world, Random(), 2000)
    await world.end()
    await redis.close()
