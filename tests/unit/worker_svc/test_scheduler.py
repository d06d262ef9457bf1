"""Scheduler: who gets how many tokens in a step. Random schedules are in test_engine_schedules."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.shared.config.worker import WorkerSettings

MakeRequest = Callable[..., Request]
SETTINGS = WorkerSettings(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    long_prefill_token_threshold=0,
    block_size=4,
    kv_watermark=0.0,
)
TOKEN = 99


def with_settings(**changed: Any) -> WorkerSettings:
    return SETTINGS.model_copy(update=changed)


class Bench:
    """A scheduler whose steps always succeed."""

    def __init__(
        self, settings: WorkerSettings = SETTINGS, num_blocks: int = 64, caching: bool = False
    ):
        cache = PrefixCache(num_blocks, KvGroups(settings.block_size), enabled=caching)
        self.pool = cache.pool
        self.scheduler = Scheduler(settings, cache)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        """Schedule, and draw TOKEN wherever a token is drawn."""
        plan = self.scheduler.schedule()
        drawing = plan.decodes + [entry.row for entry in plan.scheduled if entry.samples]
        self.scheduler.draw(plan, {row: [TOKEN] for row in drawing})
        return plan

    def starts(self, plan: StepPlan) -> list[int]:
        """Return the positions that the decoding rows of the latest plan compute."""
        holders = [self.scheduler.rows.requests[row] for row in plan.decodes]
        return [holder.num_computed - 1 for holder in holders if holder is not None]


def chunks(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(entry.start, entry.num_tokens, entry.samples) for entry in plan.scheduled]


def test_a_prompt_over_the_budget_is_computed_in_chunks(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.add(make_request(1, list(range(20))))
    first = bench.step()
    assert chunks(first) == [(0, 16, False)]
    assert first.new_rows[0].token_ids == list(range(20))
    assert len(first.scheduled[0].new_blocks) == 5
    assert chunks(bench.step()) == [(16, 4, True)]
    plan = bench.step()
    assert (chunks(plan), bench.starts(plan)) == ([], [20])


def test_decoding_streams_go_before_new_prompts(make_request: MakeRequest) -> None:
    bench = Bench()
    bench.add(make_request(1, [1, 2, 3]))
    bench.step()
    bench.add(make_request(2, list(range(30))))
    plan = bench.step()
    assert (bench.starts(plan), chunks(plan)) == ([3], [(0, 15, False)])


def test_long_prefills_are_cut_only_while_others_wait_or_run(make_request: MakeRequest) -> None:
    bench = Bench(with_settings(long_prefill_token_threshold=5))
    bench.add(make_request(1, list(range(20))))
    assert chunks(bench.step()) == [(0, 16, False)]
    bench.add(make_request(2, list(range(50, 70))))
    assert chunks(bench.step()) == [(16, 4, True), (0, 5, False)]


def test_no_more_streams_run_than_there_are_rows(make_request: MakeRequest) -> None:
    bench = Bench(with_settings(max_num_seqs=2))
    bench.add(*(make_request(stream, [stream]) for stream in range(3)))
    plan = bench.step()
    assert len(plan.scheduled) == 2
    assert bench.scheduler.counts == (2, 1)
    first = bench.scheduler.rows.owner(plan.scheduled[0].row, plan.step)
    assert first is not None
    bench.scheduler.remove(first)
    plan = bench.step()
    assert plan.removed_rows == [plan.new_rows[0].row]


def test_smaller_priority_goes_first_and_is_preempted_last(make_request: MakeRequest) -> None:
    bench = Bench(num_blocks=4)
    low = make_request(1, [1, 2, 3, 4], priority=1)
    high = make_request(2, [5, 6, 7, 8], priority=0)
    bench.add(low, high)
    assert [entry.row for entry in bench.step().scheduled] == [high.place.row, low.place.row]
    plan = bench.step()
    assert plan.rows == [high.place.row]
    assert low.place.status is Status.WAITING
    assert bench.scheduler.notes.preempted == [low]
    assert low.num_computed == 0


def test_a_preempted_stream_comes_back_before_later_ones_and_finds_its_blocks(
    make_request: MakeRequest,
) -> None:
    bench = Bench(num_blocks=5, caching=True)
    first = make_request(1, list(range(8)))
    second = make_request(2, list(range(20, 28)))
    bench.add(first, second)
    bench.step()
    plan = bench.step()
    assert plan.num_rows == 1
    assert second.place.status is Status.WAITING
    later = make_request(3, [50])
    bench.add(later)
    bench.scheduler.remove(first)
    plan = bench.step()
    assert [new.token_ids for new in plan.new_rows] == [second.token_ids[:9], [50]]
    assert plan.scheduled[0].start > 0


def test_no_request_is_admitted_in_a_step_that_preempted(make_request: MakeRequest) -> None:
    bench = Bench(num_blocks=5)
    bench.add(make_request(1, list(range(8))), make_request(2, list(range(8))))
    bench.step()
    bench.add(make_request(3, [1]))
    plan = bench.step()
    assert bench.scheduler.notes.preempted
    assert plan.new_rows == []


def test_an_admission_leaves_the_watermark_to_running_streams(make_request: MakeRequest) -> None:
    bench = Bench(with_settings(kv_watermark=2 / 7), num_blocks=7)
    bench.add(make_request(1, list(range(8))), make_request(2, list(range(12))))
    assert len(bench.step().scheduled) == 1
    alone = Bench(with_settings(kv_watermark=2 / 7), num_blocks=7)
    alone.add(make_request(3, list(range(21))))
    assert len(alone.step().scheduled) == 1


def test_two_equal_prompts_of_one_step_are_computed_once(make_request: MakeRequest) -> None:
    bench = Bench(caching=True)
    first, second = make_request(1, list(range(9))), make_request(2, list(range(9)))
    bench.add(first, second)
    plan = bench.step()
    assert chunks(plan) == [(0, 9, True), (8, 1, True)]
    assert second.kv.blocks[:2] == first.kv.blocks[:2]
    assert second.place.num_cached == 8
    assert [bench.pool.ref_count(block) for block in first.kv.blocks] == [2, 2, 1]


def test_what_is_cached_is_not_queued(make_request: MakeRequest) -> None:
    bench = Bench(caching=True)
    first, second = make_request(1, list(range(9))), make_request(2, list(range(9)))
    bench.add(first)
    bench.step()
    bench.add(second)
    assert bench.scheduler.live.num_queued_tokens == second.backlog == 1
    bench.scheduler.remove(second)
    assert bench.scheduler.live.num_queued_tokens == 0


@pytest.mark.parametrize("count", [1, 4])
def test_queued_tokens_are_those_of_waiting_and_half_computed_prompts(
    make_request: MakeRequest, count: int
) -> None:
    bench = Bench()
    requests = [make_request(stream, list(range(20))) for stream in range(count)]
    bench.add(*requests)
    assert bench.scheduler.live.num_queued_tokens == 20 * count
    bench.step()
    assert bench.scheduler.live.num_queued_tokens == 20 * count - 16
    for request in requests:
        bench.scheduler.remove(request)
    assert bench.scheduler.live.num_queued_tokens == 0
    assert bench.pool.num_used == 0
