"""Blocks are shared in the very step that fills them: every operation writes before any row reads.

The reader has one token of its own, so it stands before the writer in the batch. Code that computes
a row's attention before all rows have written their keys and values draws other tokens here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.cuda_driver import CudaDriver
from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.models import FAKES
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.rounds import some
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.plan import StepPlan, StepResult

FEWER = ("qwen3", "olmo3", "llama_odd", "phi3_longrope_short", "ministral3", "qwen2_window")
NUM_TOKENS = 6
WRITER = prompt_of(37, seed=5)
READERS = [[*WRITER[:32], 7], [*WRITER[:16], 8, 9, 10], WRITER]


def check(checkpoint: TinyCheckpoint, outcomes: list[Outcome]) -> None:
    assert [outcome.error for outcome in outcomes] == [None] * 4
    # found in the step that admitted all four
    assert [outcome.num_cached for outcome in outcomes] == [0, 32, 16, 32]
    tokens = [outcome.token_ids for outcome in outcomes]
    assert tokens == checkpoint.greedy([WRITER, *READERS], NUM_TOKENS, tokens)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@some([name for name in FAKES if name != "llama_dynamic"], FEWER)
def test_rows_may_read_what_others_write_in_the_same_step(
    tiny: Tiny, name: str, native: bool
) -> None:
    driver = EngineDriver(tiny(name).directory, native_kernels=native)
    check(
        tiny(name), driver.run([Job(prompt, greedy(NUM_TOKENS)) for prompt in (WRITER, *READERS)])
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "phi3_longrope", "olmo3", "exaone4"])
def test_rows_of_the_device_runner_may_read_what_others_write(tiny: Tiny, name: str) -> None:
    with torch.inference_mode(), reference_layers():
        driver = CudaDriver(tiny(name).directory, max_num_batched_tokens=128)
        jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in (WRITER, *READERS)]
        check(tiny(name), driver.run(jobs))


def row_after_row(whole: Callable[[TorchRunner, StepPlan], StepResult]) -> Any:
    """A runner that computes each row of a step by itself, in the order of the batch."""

    def carry_out(runner: TorchRunner, plan: StepPlan) -> StepResult:
        result = StepResult()
        order = sorted(plan.scheduled, key=lambda entry: (entry.num_tokens > 1, entry.start))
        for entry in order:
            alone = StepPlan(plan.step, plan.removed_rows, plan.new_rows, scheduled=[entry])
            result.tokens.update(whole(runner, alone).tokens)
            plan.removed_rows, plan.new_rows = [], []
        return result if order else whole(runner, plan)

    return carry_out


def test_a_runner_that_computes_row_after_row_is_noticed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchRunner, "carry_out", row_after_row(TorchRunner.carry_out))
    driver = EngineDriver(tiny("llama").directory)
    outcomes = driver.run([Job(prompt, greedy(NUM_TOKENS)) for prompt in (WRITER, *READERS)])
    with pytest.raises(AssertionError, match="At index 1 diff"):
        check(tiny("llama"), outcomes)
