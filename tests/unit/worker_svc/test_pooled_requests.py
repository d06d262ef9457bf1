"""The engine's rules for requests that pool, with a runner that records its steps."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import (
    SimLaunch,
    SimRunner,
    SimVocabulary,
    sim_pooled,
)
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import (
    RequestSpec,
    StreamKey,
    TenantShare,
)
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.messages.sampling import SamplingParams

SIZE = 4
BUDGET = 32
EMBED = PoolingParams(task="embed")


class Recorder(SimRunner):
    """Keeps nothing between steps, as an encoder does."""

    def __init__(self, settings: WorkerSettings, *, keeps: bool = False) -> None:
        super().__init__(SimVocabulary(500), settings, lambda _seconds: None, SIZE)
        self.has_pages = keeps
        self.plans: list[StepPlan] = []
        self.spoil: Callable[[StepResult], None] = lambda result: None

    def launch(self, plan: StepPlan) -> SimLaunch:
        self.plans.append(plan)
        launch = super().launch(plan)
        self.spoil(launch._result)
        return launch


class Bench:
    def __init__(self, *, keeps: bool = False, **changes: Any) -> None:
        values = {
            "engine": "sim",
            "max_num_batched_tokens": BUDGET,
            "max_num_seqs": 8,
            "sim_time_scale": 0.0,
            "sim_num_blocks": 16,
            **changes,
        }
        settings = WorkerSettings.model_validate(values)
        self.keeps = keeps
        self.runner = Recorder(settings, keeps=keeps)
        self.engine = Engine(self.runner, settings)
        self.ended: list[int] = []
        self._num_added = 0

    def add(self, length: int, tenant: str = "", priority: int = 0) -> Request:
        self._num_added += 1
        spec = RequestSpec(
            key=StreamKey(GatewayId("g"), self._num_added, 0),
            request_id=RequestId("r"),
            num_prompt=length,
            sampling=SamplingParams(seed=0, max_tokens=1),
            owner=TenantShare(tenant),
            priority=priority,
            pooling=EMBED,
            is_whole=not self.keeps,
            reads_all=not self.keeps,
        )
        request = Request(spec, [self._num_added] * length)
        self.engine.add(request)
        return request

    def step(self) -> None:
        self.engine.step()
        self.ended += [each.request.key.stream for each in self.engine.take_output().ended]

    def run(self) -> list[int]:
        """The streams in the order in which they ended."""
        for _ in range(500):
            if not self.engine.has_work:
                return self.ended
            self.step()
        raise AssertionError("the engine hangs")

    def lengths(self) -> list[list[int]]:
        """Return the lengths of the rows of each step that computed something."""
        found = ([each.num_tokens for each in plan.scheduled] for plan in self.runner.plans)
        return [each for each in found if each]


def is_right(request: Request) -> bool:
    return request.output.pooled == sim_pooled(request.token_ids, EMBED, SIZE, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_share_steps_up_to_the_budget_and_are_never_cut(is_async: bool) -> None:
    bench = Bench(async_scheduling=is_async)
    requests = [bench.add(length) for length in (10, 10, 10, 10, 30, 1)]
    assert sorted(bench.run()) == [1, 2, 3, 4, 5, 6]
    assert bench.lengths() == [[10, 10, 10], [10], [30, 1]]
    assert all(map(is_right, requests))
    assert bench.engine.take_output().stats.queued_tokens == 0


def test_a_prompt_above_the_budget_has_a_step_alone() -> None:
    bench = Bench()
    requests = [bench.add(length) for length in (5, 100, 5)]
    bench.run()
    assert bench.lengths() == [[5], [100], [5]]
    assert all(map(is_right, requests))


def test_nothing_is_kept_of_them() -> None:
    bench = Bench(sim_num_blocks=2)
    for _ in range(20):
        bench.add(30)
    while bench.engine.has_work:
        bench.step()
        assert bench.engine.take_output().stats.kv_blocks_used == 0


def test_prompts_of_decoders_are_cut_over_blocks() -> None:
    bench = Bench(keeps=True, long_prefill_token_threshold=0)
    requests = [bench.add(length) for length in (50, 20)]
    bench.run()
    assert bench.lengths() == [[32], [18, 14], [6]]
    assert all(map(is_right, requests))
    assert bench.engine.take_output().stats.kv_blocks_used == 0


def test_an_equal_prompt_of_a_decoder_is_found() -> None:
    bench = Bench(keeps=True)
    first = bench.add(30)
    bench.run()
    again = Request(first.spec, list(first.token_ids))
    bench.engine.add(again)
    bench.run()
    assert again.place.num_cached == 16


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cancelled_request_frees_its_row(is_async: bool) -> None:
    bench = Bench(async_scheduling=is_async)
    requests = [bench.add(20) for _ in range(4)]
    bench.step()
    bench.engine.cancel(requests[0].key)
    bench.engine.cancel(requests[3].key)
    bench.run()
    assert requests[3].output.pooled is None
    assert all(map(is_right, requests[1:3]))
    assert not bench.engine.take_output().deltas


def test_tenants_take_turns() -> None:
    bench = Bench()
    for _ in range(60):
        bench.add(10, "many")
    late = bench.add(10, "one")
    bench.step()
    bench.step()
    assert is_right(late)


def test_smaller_priorities_are_first() -> None:
    bench = Bench()
    for priority in (3, 1, 2):
        bench.add(30, priority=priority)
    assert bench.run() == [2, 3, 1]


def test_a_row_that_fails_ends_alone() -> None:
    bench = Bench(async_scheduling=False)
    requests = [bench.add(10) for _ in range(3)]

    def spoil(result: StepResult) -> None:
        row = requests[1].place.row
        del result.pooled[row]
        result.errors[row] = "its numbers are not finite"
        result.non_retryable.add(row)

    bench.runner.spoil = spoil
    bench.engine.step()
    endings = {each.request.key.stream: each.ending for each in bench.engine.take_output().ended}
    assert [endings[stream].reason for stream in (1, 2, 3)] == ["stop", "error", "stop"]
    error = endings[2].error
    assert error is not None
    assert not error.retryable


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    bench = Bench()
    requests = [bench.add(20) for _ in range(2)]

    def launch(plan: StepPlan) -> Any:
        class Broken:
            def wait(self, timeout_s: float) -> bool:
                return True

            def result(self) -> StepResult:
                raise RuntimeError("out of luck")

        bench.runner._carry_out(plan)
        bench.runner.launch = type(bench.runner).launch.__get__(bench.runner)  # type: ignore[method-assign]
        return Broken()

    bench.runner.launch = launch  # type: ignore[method-assign]
    bench.step()
    bench.run()
    assert requests[0].output.pooled is None
    assert is_right(requests[1])
