"""CPU cost of one decode step of the scheduler, without any model.

`python benchmarks/bench_scheduler.py` prints microseconds a step at 256 and 1024 running requests:
what `schedule` and `draw` take, what the whole engine step takes around a runner that does
nothing, the same with drafts that are off, since too many streams run, the same while it logs its
blocks, and what the event loop then takes to make events of them. Process CPU time, best of several
rounds.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from time import process_time

import msgspec

from benchmarks.engine_results import SchedulerLine, SchedulerResult
from benchmarks.serve.results import environment, write_json
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.kv.block_log import BlockChange, BlockLog
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.engine.runner import NO_IMAGES, FinishedLaunch
from tokenmesh.engine.speculate.lookup import LookupProposer
from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.shared.config.placement import BlockEventSettings
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.metrics import Metrics

PROMPT_TOKENS = 64
STEPS = 160
ROUNDS = 5
NUM_BLOCKS = 65536
TOKENS = [7]


class NoBus:
    """Is never asked: batches are only made."""

    async def publish_raw(self, subject: str, data: bytes) -> None:
        """Not here."""
        raise AssertionError(subject)


class IdleRunner:
    """Draws the same token for every row at no cost."""

    num_blocks = NUM_BLOCKS
    windows: tuple[int | None, ...] = (None,)
    has_states = False
    has_pages = True
    num_saved_states = 0
    takes_drafts = True
    max_proposed = 0
    images = NO_IMAGES
    has_own_device = True
    num_lanes = 1

    def launch(self, plan: StepPlan) -> FinishedLaunch:
        """One token a row."""
        return FinishedLaunch(StepResult(dict.fromkeys(plan.rows, TOKENS)))


def settings_for(num_requests: int) -> WorkerSettings:
    """Room for all requests in one step."""
    return WorkerSettings(
        max_num_seqs=num_requests, max_num_batched_tokens=num_requests * PROMPT_TOKENS
    )


def request(stream: int) -> Request:
    """A request that decodes for longer than the benchmark runs; all prompts differ."""
    return Request(
        RequestSpec(
            key=StreamKey(GatewayId("gateway"), stream, 0),
            request_id=RequestId(f"r{stream}"),
            num_prompt=PROMPT_TOKENS,
            sampling=SamplingParams(seed=stream, max_tokens=STEPS * (ROUNDS + 2)),
            eos_ids=frozenset({2}),
        ),
        [stream + 1] * PROMPT_TOKENS,
    )


def scheduler_step(num_requests: int) -> Callable[[], None]:
    """`schedule` and `draw` of the step before, the runner's result included in neither."""
    settings = settings_for(num_requests)
    groups = KvGroups(settings.block_size)
    cache = PrefixCache(NUM_BLOCKS, groups, enabled=True)
    scheduler = Scheduler(settings, cache)
    for stream in range(num_requests):
        scheduler.add(request(stream))
    tokens = dict.fromkeys(range(num_requests), TOKENS)

    flight = scheduler.schedule()

    def step() -> None:
        nonlocal flight
        plan, flight = flight, scheduler.schedule()
        scheduler.draw(plan, tokens)

    return step


def engine_step(
    num_requests: int,
    log: BlockLog | None = None,
    kept: list[list[BlockChange]] | None = None,
    proposer: Proposer | None = None,
) -> Callable[[], None]:
    """A whole step with deltas for one gateway; what it logs of its blocks goes to `kept`."""
    engine = Engine(IdleRunner(), settings_for(num_requests), log=log, proposer=proposer)
    for stream in range(num_requests):
        engine.add(request(stream))

    def step() -> None:
        engine.step()
        output = engine.take_output()
        if kept is not None:
            kept.append(output.blocks)

    return step


def events_step(changes: list[list[BlockChange]]) -> Callable[[], None]:
    """Batches of events from one step's changes after the other, encoded and held for replay."""
    limits, size = BlockEventSettings(), settings_for(1).block_size
    worker = WorkerId("worker"), 0, size, limits, Metrics()
    stream = BlockEventStream(NoBus(), ModelName("model"), *worker)  # type: ignore[arg-type]
    steps = iter(changes)

    def step() -> None:
        stream.note(next(steps))
        stream.replay(epoch=0, from_seq=-1)

    return step


def microseconds(*steps: Callable[[], None]) -> list[float]:
    """CPU time of steps in steady decode, measured in turns: the best round's mean of each."""
    for step in steps:
        step()
    rounds: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, means in zip(steps, rounds, strict=True):
            started = process_time()
            for _ in range(STEPS):
                step()
            means.append((process_time() - started) / STEPS * 1e6)
    return [round(min(means), 1) for means in rounds]


def measure(num_requests: int) -> dict[str, float]:
    """All columns of one row."""
    changes: list[list[BlockChange]] = []
    off = LookupProposer(SpeculativeConfig(method="ngram"), max_rows=0)
    (scheduler,) = microseconds(scheduler_step(num_requests))
    engine, drafts_off = microseconds(
        engine_step(num_requests), engine_step(num_requests, proposer=off)
    )
    (logged,) = microseconds(engine_step(num_requests, BlockLog(), changes))
    (events,) = microseconds(events_step(changes))
    return {
        "scheduler_us": scheduler,
        "engine_us": engine,
        "drafts_off_us": drafts_off,
        "logged_us": logged,
        "events_us": events,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the numbers")
    arguments = parser.parse_args()
    measured = {num_requests: measure(num_requests) for num_requests in (1, 256, 1024)}
    if arguments.out is not None:
        lines = {count: msgspec.convert(row, SchedulerLine) for count, row in measured.items()}
        write_json(arguments.out, SchedulerResult(environment(), os.getloadavg()[0], lines))
    heads = ("running", "schedule+draw", "engine step", "drafts off", "with a log", "events")
    print("".join(f"{head:>14}" for head in heads), "  (us of CPU)")
    for num_requests, row in measured.items():
        print(f"{num_requests:>14}" + "".join(f"{value:>14}" for value in row.values()))


if __name__ == "__main__":
    main()
