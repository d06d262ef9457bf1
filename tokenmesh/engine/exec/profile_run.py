"""The largest steps that a worker will ever take, taken once, so that their memory is measured."""

from collections.abc import Callable
from typing import Final

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
)
from tokenmesh.shared.config.worker import WorkerSettings

AnyRunner = TorchRunner | CudaRunner

MakeRunner = Callable[[int], tuple[AnyRunner, KvStore]]
"""A runner on a store of so many blocks, and that store."""

_SAMPLING: Final = SamplingParams(seed=0, max_tokens=1, temperature=1.0, top_p=0.9, top_k=50)
"""Takes the way through the sampler that needs most memory."""


def run_largest_steps(make_runner: MakeRunner, settings: WorkerSettings, max_model_len: int) -> int:
    """A step with all rows sampling and one with the longest chunk, on a store just large enough.

    Returns the bytes of that store, which belong to no step.
    """
    longest = min(settings.max_num_batched_tokens, max_model_len)
    num_rows = settings.num_rows
    each = min(settings.max_num_batched_tokens // num_rows, max_model_len)
    # all rows share the same blocks: what is computed is never read
    runner, store = make_runner(1 + -(-longest // settings.block_size))
    blocks = list(range(1, store.num_blocks))
    runner.carry_out(_plan(0, range(num_rows), each, blocks[: -(-each // settings.block_size)]))
    alone = _plan(1, range(1), longest, blocks)
    alone.removed_rows = list(range(num_rows))
    runner.carry_out(alone)
    return store.nbytes


def _plan(step: int, rows: range, num_tokens: int, blocks: list[int]) -> StepPlan:
    plan = StepPlan(step=step)
    for row in rows:
        plan.new_rows.append(
            NewRow(
                row=row,
                token_ids=[0] * num_tokens,
                num_prompt=num_tokens,
                sampling=_SAMPLING,
                media=[],
                wants_prompt_logprobs=False,
            )
        )
        plan.scheduled.append(ScheduledRow(row, 0, num_tokens, list(blocks), True))
    return plan
