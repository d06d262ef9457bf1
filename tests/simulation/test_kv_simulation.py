"""KV of other workers by messages that are lost, late and repeated, among processes that die.

Every stream ends with the tokens that it has alone, a lent image does not change, and at rest
nothing is held: leases, pins, loading slots and blocks are given back.
"""

import asyncio
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.kv_world import KvWorld, Trouble
from tests.simulation.virtual_time import VirtualClock, run_virtually, virtual_time
from tests.unit.worker_svc.test_engine_mutants import Mutant, plant
from tokenmesh.engine.kv.host_tier import HostTier
from tokenmesh.services.worker_svc.kv.desk import KvDesk
from tokenmesh.services.worker_svc.kv.fetcher import KvFetcher

SHARES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
FEW = st.integers(0, 2)
TROUBLES = st.builds(
    Trouble,
    seed=st.integers(0, 1 << 32),
    drop=SHARES,
    repeat=SHARES,
    max_delay_s=st.sampled_from([0.001, 0.05, 0.8]),
    wrong=SHARES,
    deaths=FEW,
    freezes=FEW,
    transfer_deaths=FEW,
    transfer_freezes=st.integers(0, 1),
    leaving=SHARES,
    row_trouble=st.sampled_from([0.0, 0.0, 0.01]),
    step_trouble=st.sampled_from([0.0, 0.0, 0.02]),
    recomputes=st.booleans(),
    images=st.sampled_from([2, 6, 20, 60]),
    blocks=st.sampled_from([14, 30, 80]),
    step_tokens=st.sampled_from([5, 16, 40]),
    step_s=st.sampled_from([0.0, 0.0, 0.02, 2.5]),
    slow_s=st.sampled_from([0.0, 0.02, 0.6]),
    lease_s=st.sampled_from([0.4, 2.0, 10.0]),
    streams=st.integers(2, 12),
    is_async=st.booleans(),
)


def prompt_of(dice: Random) -> list[int]:
    """Equal beginnings come again."""
    kind, length = dice.randrange(6), dice.randint(1, 44)
    return [(at * (3 + kind)) % 40 for at in range(length)]


def run(trouble: Trouble) -> dict[str, int]:
    world = KvWorld(trouble)

    async def main(now: VirtualClock) -> None:
        await world.start(3)
        dice = world.dice

        async def client() -> None:
            await asyncio.sleep(4 * dice.random())
            leaves_s = 4 * dice.random() if dice.random() < trouble.leaving else None
            await world.ask(prompt_of(dice), dice.randint(1, 8), leaves_s)

        async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
            group.create_task(world.disturb())
            for _ in range(trouble.streams):
                group.create_task(client())
        await world.at_rest()
        await world.stop()

    with virtual_time() as now:
        run_virtually(main(now), now)
    return world.counts


@pytest.mark.parametrize(
    "number", [25, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.timeout(5400)))]
)
def test_streams_have_their_own_tokens_and_nothing_is_held_whatever_happens(number: int) -> None:
    read: list[int] = []

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(TROUBLES)
    def check(trouble: Trouble) -> None:
        read.append(run(trouble)["read"])

    check()
    # the worlds are worth something only if KV moves in them
    assert sum(count > 0 for count in read) > len(read) / 20


def test_in_a_quiet_world_streams_use_what_other_workers_have() -> None:
    found = run(Trouble(1, streams=30, blocks=80, images=60))
    assert found["read"] > 20
    assert found["attempts"] < 60


MUTANTS = {
    "images of a lease stay pinned": Mutant(
        KvDesk, "_give_back", "engine.exchange.take_back(lent)", "None"
    ),
    "a message's deadline cuts the end of a lease off": Mutant(
        KvDesk, "_end", "asyncio.shield(ending)", "ending"
    ),
    "slots of what did not come are kept": Mutant(KvFetcher, "_load", "if pending:", "if False:"),
    "a wrong image is accepted": Mutant(HostTier, "finish", "if is_good:", "if True:"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_of_the_exchange_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(MUTANTS[name], monkeypatch)
    for seed in range(40):
        trouble = Trouble(
            seed, wrong=0.3, transfer_freezes=1, drop=0.1, slow_s=0.3, lease_s=0.4, freezes=1
        )
        try:
            run(trouble)
        except (AssertionError, ExceptionGroup):
            return
    raise AssertionError("40 worlds did not notice")
