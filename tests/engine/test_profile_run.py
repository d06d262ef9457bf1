"""The steps that are taken to measure memory, on a real model."""

from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.maker import RunnerMaker
from tokenmesh.engine.exec.memory import GpuBudget, StoreSize
from tokenmesh.engine.exec.profile_run import run_largest_steps
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.shared.config.worker import WorkerSettings

MAX_LEN = 128


def parts_of(driver: EngineDriver) -> tuple[RunnerMaker, Decoder]:
    """Return the maker and the model of a driver's runner."""
    resident: Any = driver.model.resident
    maker, decoder = resident._load.args[0], resident._model
    assert isinstance(maker, RunnerMaker)
    assert isinstance(decoder, Decoder)
    return maker, decoder


class Steps:
    """Every step of the runners that it makes for a driver's model."""

    def __init__(self, driver: EngineDriver, settings: WorkerSettings) -> None:
        self._maker, self._decoder = parts_of(driver)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self._settings = settings

    def make_runner(self, num_blocks: int) -> tuple[TorchRunner, KvStore]:
        runner, store = self._maker.make_runner(self._decoder, StoreSize(num_blocks))
        assert isinstance(runner, TorchRunner)
        carry_out = runner.carry_out

        def spy(plan: StepPlan) -> StepResult:
            self.plans.append(plan)
            self.results.append(carry_out(plan))
            return self.results[-1]

        runner.carry_out = spy  # type: ignore[method-assign]
        return runner, store

    def run(self) -> int:
        with torch.inference_mode():
            return run_largest_steps(self.make_runner, self._settings, MAX_LEN)


@pytest.mark.parametrize(
    ("settings", "rows", "each", "longest"),
    [
        ({"max_num_seqs": 8, "max_num_batched_tokens": 64}, 8, 8, 64),
        # more rows than tokens; a budget beyond the model's length
        ({"max_num_seqs": 64, "max_num_batched_tokens": 20}, 20, 1, 20),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 1000}, 2, 128, 128),
    ],
)
def test_all_rows_sample_once_and_the_longest_chunk_runs_once(
    tiny: Tiny, settings: dict[str, Any], rows: int, each: int, longest: int
) -> None:
    driver = EngineDriver(tiny("llama").directory, max_model_len=MAX_LEN, **settings)
    before = driver.tokens([Job(prompt_of(20), greedy(4))])
    steps = Steps(driver, driver.settings)
    pool_bytes = steps.run()
    assert pool_bytes == (1 + -(-longest // 16)) * 16 * 2 * 2 * 16 * 4 * 3
    shapes = [[(row.num_tokens, row.samples) for row in plan.scheduled] for plan in steps.plans]
    assert shapes == [[(each, True)] * rows, [(longest, True)]]
    assert [len(result.tokens) for result in steps.results] == [rows, 1]
    assert [result.errors for result in steps.results] == [{}, {}]
    assert driver.tokens([Job(prompt_of(20), greedy(4))]) == before


class CountingGpu:
    """A GPU on which one step peaks at 1000 bytes beyond the pool of the profile."""

    def total(self) -> int:
        return 1_000_000

    def free(self) -> int:
        return 1_000_000 - 5_000

    def allocated(self) -> int:
        return 5_000

    def reserved(self) -> int:
        return 5_000

    def peak(self) -> int:
        return 5_000 + 1_000 + self.pool_bytes

    def reset_peak(self) -> None:
        self.pool_bytes = 5 * 16 * 2 * 2 * 16 * 4 * 3

    def release(self) -> None:
        pass


def test_a_gpus_budget_is_measured_with_these_steps(tiny: Tiny) -> None:
    driver = EngineDriver(
        tiny("llama").directory, max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=64
    )
    maker, decoder = parts_of(driver)
    with torch.inference_mode():
        budget = maker.budget_of(decoder, GpuBudget(CountingGpu(), 0.5))
    assert budget.num_bytes == 500_000 - 5_000 - 1_000
