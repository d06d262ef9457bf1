"""Gateway, scheduler and workers on a network that drops, delays and repeats, by seed.

Each request must end with an answer: all of its tokens, the very ones of an undisturbed run, or an
error. Nothing may be left behind.
"""

import asyncio
import random
from dataclasses import dataclass

from tests.rounds import rounds
from tests.simulation.network import Faults, Network
from tests.simulation.virtual_time import EPOCH_S, VirtualClock, run_virtually, virtual_time
from tests.simulation.world import CARD, VOCABULARY, Outcome, World, disturb
from tokenmesh.engine.core.sim import prompt_key, sim_token
from tokenmesh.services.gateway.core.generation.request import PromptJob
from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.tokens import pack_ids

NUM_REQUESTS = 40
QUIET = Faults()
BAD = Faults(drop=0.02, repeat=0.05, max_delay_s=0.05)
AWFUL = Faults(drop=0.15, repeat=0.15, max_delay_s=0.3)


@dataclass
class Client:
    """One request and when it comes."""

    starts_s: float
    job: PromptJob
    prompt_ids: list[int]
    leaves_after_s: float | None

    def expected(self, choice: int) -> list[int]:
        sampling = SamplingParams(seed=self.job.sampling.seed + choice, max_tokens=1)
        key = prompt_key(self.prompt_ids)
        assert self.job.max_tokens is not None
        return [sim_token(key, sampling, at, VOCABULARY) for at in range(self.job.max_tokens)]


def make_client(number: int, dice: random.Random, *, may_leave: bool) -> Client:
    prompt_ids = [7] * dice.choice([1, 16, 40]) + [
        dice.randrange(3, 1000) for _ in range(dice.randrange(1, 60))
    ]
    job = PromptJob(
        request_id=RequestId(f"r{number}"),
        card=CARD,
        prompt=IdsPrompt(token_ids=pack_ids(prompt_ids)),
        sampling=SamplingParams(seed=1000 + number * 10, max_tokens=0),
        max_tokens=dice.randrange(1, 120),
        n=dice.choice([1, 1, 1, 3]),
        deadline_s=EPOCH_S + 3600,
    )
    leaves = dice.random() * 2 if may_leave and dice.random() < 0.2 else None
    return Client(dice.random() * 5, job, prompt_ids, leaves)


async def attend(world: World, client: Client) -> Outcome | None:
    """The client's life; None when it left before the end."""
    await asyncio.sleep(client.starts_s)
    try:
        async with asyncio.timeout(client.leaves_after_s):
            return await world.ask(client.job)
    except TimeoutError:
        return None


def check(client: Client, outcome: Outcome | None) -> None:
    """Whatever came is right; without an error all of it came."""
    if outcome is None:
        return
    for choice, tokens in outcome.tokens.items():
        assert tokens == client.expected(choice)[: len(tokens)]
    if outcome.error is None:
        assert len(outcome.tokens) == client.job.n
        assert all(len(each) == client.job.max_tokens for each in outcome.tokens.values())


async def settle(world: World) -> None:
    """Everything that the requests held is given back."""
    loads = [worker.actor.load() for worker in world.workers]
    for _ in range(6000):
        if not len(world.gateway.core.mesh.streams) and not any(
            load.running + load.waiting for load in loads
        ):
            break
        await asyncio.sleep(0.1)
        loads = [worker.actor.load() for worker in world.workers]
    assert len(world.gateway.core.mesh.streams) == 0
    assert all(load.running + load.waiting == 0 for load in loads)
    assert all(load.kv_blocks_used == 0 for load in loads)


def settings() -> Settings:
    worker = {
        "engine": "sim",
        "sim_num_blocks": 80,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
    }
    return load_settings(None, {"worker": worker})


@dataclass
class Report:
    """The results of a run."""

    outcomes: list[Outcome | None]
    elapsed_s: float
    counts: dict[str, int]

    @property
    def num_failed(self) -> int:
        return sum(each is not None and each.error is not None for each in self.outcomes)


def simulate(seed: int, faults: Faults, *, num_kills: int = 0, may_leave: bool = True) -> Report:
    """One run of the world."""
    dice = random.Random(seed)
    clients = [make_client(number, dice, may_leave=may_leave) for number in range(NUM_REQUESTS)]
    network = Network(seed, faults)
    outcomes: list[Outcome | None] = []

    async def main(now: VirtualClock) -> None:
        world = World(network, settings())
        await world.start(num_workers=3)
        await asyncio.sleep(3.0)
        kills = [dice.random() * 6 for _ in range(num_kills)]
        killing = asyncio.create_task(disturb(world, dice, kills, rejoin_s=0.5))
        async with asyncio.timeout(3600):
            outcomes.extend(await asyncio.gather(*(attend(world, each) for each in clients)))
        await killing
        await settle(world)
        await world.stop()

    with virtual_time() as now:
        run_virtually(main(now), now)
        elapsed_s = now.elapsed_s
    for client, outcome in zip(clients, outcomes, strict=True):
        check(client, outcome)
    return Report(outcomes, elapsed_s, network.counts)


def test_on_a_quiet_network_every_request_gets_all_its_tokens() -> None:
    report = simulate(1, QUIET, may_leave=False)
    assert report.num_failed == 0


@rounds("seed", 1, 8)
def test_lost_late_and_repeated_messages_change_no_token(seed: int) -> None:
    report = simulate(seed, BAD)
    assert report.counts["dropped"] > 50
    assert report.num_failed <= 2


@rounds("seed", 1, 8)
def test_streams_outlive_their_workers(seed: int) -> None:
    report = simulate(seed, QUIET, num_kills=4, may_leave=False)
    assert report.num_failed == 0


@rounds("seed", 1, 8)
def test_on_an_awful_network_every_request_still_ends_with_an_answer(seed: int) -> None:
    report = simulate(seed, AWFUL, num_kills=3)
    assert len(report.outcomes) == NUM_REQUESTS


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(5, BAD, num_kills=2), simulate(5, BAD, num_kills=2)
    assert first.counts == second.counts
    assert first.elapsed_s == second.elapsed_s
