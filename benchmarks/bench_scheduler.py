"""CPU cost of one decode step of the scheduler, without any model.

`python benchmarks/bench_scheduler.py` prints microseconds a step at 256 and 1024 running requests:
what `schedule` and `draw` take, and what the whole engine step takes around a runner that does
nothing. Process CPU time, best of several rounds.
"""

import argparse
import json
from collections.abc import Callable
from time import process_time

from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.engine import Engine
from tokenmesh.services.worker_svc.engine.from_settings import limits_of
from tokenmesh.services.worker_svc.engine.plan import RowResult, StepPlan, StepResult
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.request import Request, StreamKey
from tokenmesh.services.worker_svc.engine.runner import Landed
from tokenmesh.services.worker_svc.engine.scheduler import Scheduler
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

PROMPT_TOKENS = 64
STEPS = 160
ROUNDS = 5
NUM_BLOCKS = 65536
TOKEN = 7


class IdleRunner:
    """Draws the same token for every row at no cost."""

    num_blocks = NUM_BLOCKS
    has_own_device = True

    def launch(self, plan: StepPlan) -> Landed:
        """One token a row."""
        return Landed(StepResult([RowResult(entry.row, TOKEN) for entry in plan.scheduled]))


def settings_for(num_requests: int) -> WorkerSettings:
    """Room for all requests in one step."""
    return WorkerSettings(
        max_num_seqs=num_requests, max_num_batched_tokens=num_requests * PROMPT_TOKENS
    )


def request(stream: int) -> Request:
    """A request that decodes for longer than the benchmark runs; all prompts differ."""
    return Request(
        key=StreamKey(GatewayId("gateway"), stream, 0),
        request_id=RequestId(f"r{stream}"),
        token_ids=[stream + 1] * PROMPT_TOKENS,
        num_prompt=PROMPT_TOKENS,
        sampling=SamplingParams(seed=stream, max_tokens=STEPS * (ROUNDS + 2)),
        eos_ids=frozenset({2}),
    )


def scheduler_step(num_requests: int) -> Callable[[], None]:
    """`schedule` and `draw` of the step before, the runner's result included in neither."""
    pool = BlockPool(NUM_BLOCKS)
    settings = settings_for(num_requests)
    cache = PrefixCache(pool, settings.block_size, enabled=True)
    scheduler = Scheduler(limits_of(settings, NUM_BLOCKS), pool, cache)
    for stream in range(num_requests):
        scheduler.add(request(stream))
    sampled = [RowResult(row, TOKEN) for row in range(num_requests)]

    flight = scheduler.schedule()

    def step() -> None:
        nonlocal flight
        plan, flight = flight, scheduler.schedule()
        scheduler.draw(plan.step, sampled)

    return step


def engine_step(num_requests: int) -> Callable[[], None]:
    """A whole step with deltas for one gateway."""
    engine = Engine(IdleRunner(), settings_for(num_requests))
    for stream in range(num_requests):
        engine.add(request(stream))

    def step() -> None:
        engine.step()
        engine.take_output()

    return step


def microseconds(step: Callable[[], None]) -> float:
    """CPU time of a step in steady decode: the best round's mean."""
    step()
    rounds = []
    for _ in range(ROUNDS):
        started = process_time()
        for _ in range(STEPS):
            step()
        rounds.append((process_time() - started) / STEPS * 1e6)
    return min(rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    measured = {
        num_requests: {
            "scheduler_us": round(microseconds(scheduler_step(num_requests)), 1),
            "engine_us": round(microseconds(engine_step(num_requests)), 1),
        }
        for num_requests in (1, 256, 1024)
    }
    if arguments.json:
        print(json.dumps(measured))
        return
    print(f"{'running':>8}{'schedule+draw':>16}{'engine step':>14}   (us of CPU)")
    for num_requests, row in measured.items():
        print(f"{num_requests:>8}{row['scheduler_us']:>16}{row['engine_us']:>14}")


if __name__ == "__main__":
    main()
