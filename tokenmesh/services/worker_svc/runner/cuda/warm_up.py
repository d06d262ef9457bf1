"""warm_up: steps that nobody waits for, so that no request waits for a kernel to be compiled."""

import logging
from collections.abc import Iterator
from typing import Any, Final

from tokenmesh.services.worker_svc.engine.plan import NewRow, ScheduledRow, StepPlan
from tokenmesh.services.worker_svc.runner.cuda.runner import CudaRunner
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.sampling import SamplingParams

logger = logging.getLogger(__name__)

_TOKENS: Final = 32
_FILTERS: Final[dict[str, Any]] = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.01}
_LIMITS: Final[dict[str, Any]] = {
    "temperature": 0.0,
    "min_tokens": 2,
    "stop_token_ids": [0],
    "logit_bias": {0: 1.0},
    "bad_words_ids": [[0, 0]],
    "presence_penalty": 0.5,
    "logprobs": 5,
    "prompt_logprobs": 1,
}
_BATCHES: Final[tuple[tuple[dict[str, Any], ...], ...]] = (
    ({"temperature": 0.0},),
    (_FILTERS,),
    (_LIMITS,),
    (_LIMITS, _FILTERS),
)
"""What a sampler launches depends on what the rows of a batch ask for."""


def warm_up(runner: CudaRunner, settings: WorkerSettings, max_model_len: int) -> None:
    """Prefill and decode with all that is drawn with; the first time it compiles for a minute.

    Call it before the first request: it writes to the first blocks of the pool.
    """
    began_s = perf_s()
    for plan in _plans(settings, max_model_len):
        runner.carry_out(plan)
    logger.info("kernels are ready after %.1f s", perf_s() - began_s)


def _plans(settings: WorkerSettings, max_model_len: int) -> Iterator[StepPlan]:
    """For each batch: a prompt, one token more, and good-bye."""
    step = 0
    for batch in _BATCHES:
        rows = batch[: settings.max_num_seqs]
        room = settings.max_num_batched_tokens // len(rows)
        num_tokens = min(_TOKENS, room, max_model_len - 1)
        if num_tokens < 1:
            continue
        blocks = list(range(1, 2 + num_tokens // settings.block_size))
        begin, more, end = (StepPlan(step=step + place) for place in range(3))
        for row, fields in enumerate(rows):
            sampling = SamplingParams(seed=0, max_tokens=2, **fields)
            wants = sampling.prompt_logprobs is not None
            begin.new_rows.append(NewRow(row, [0] * num_tokens, num_tokens, sampling, [], wants))
            begin.scheduled.append(ScheduledRow(row, 0, num_tokens, blocks, True))
            more.decodes.append(row)
            end.removed_rows.append(row)
        yield from (begin, more, end)
        step += 3
