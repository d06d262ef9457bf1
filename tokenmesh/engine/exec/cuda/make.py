"""make_cuda_runner: a model and its store on a GPU become a runner, warmed up."""

import logging
from collections.abc import Iterator
from typing import Any, Final

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.exec.cuda.device import TorchDevice
from tokenmesh.engine.exec.cuda.rows import CudaLimits
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.models.api import LanguageModel, ModelFacts
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
)
from tokenmesh.engine.sampling.device_sampler import DeviceSampler
from tokenmesh.kernels.triton_start import CannotCompileError, start_triton
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

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
"""It holds what a sampler launches depends on the sampling parameters of a batch's rows."""


def warm_up(runner: CudaRunner, settings: WorkerSettings, max_model_len: int) -> None:
    """Prefill and decode with all that is drawn with; the first time it compiles for a minute.

    Call it before the first request: it writes to the first blocks of the pool.
    """
    began_s = perf_s()
    for plan in _plans(settings, max_model_len):
        runner.carry_out(plan)
    logger.info("kernels are ready after %.1f s", perf_s() - began_s)


def _plans(settings: WorkerSettings, max_model_len: int) -> Iterator[StepPlan]:
    """For each batch: prefill, one decode step, and the rows' removal."""
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


def check_facts(facts: ModelFacts) -> None:
    """Raises ConfigError for a model that does not run on a GPU."""
    problem = facts.gpu_problem()
    if problem is not None:
        raise ConfigError(
            f"{facts.architecture}: {problem}; set worker.device to cpu", param="worker.device"
        )


def check_compiler() -> None:
    """Raises ConfigError where kernels cannot be compiled."""
    try:
        start_triton()
    except CannotCompileError as error:
        raise ConfigError(str(error), param="worker.device") from error


def make_cuda_runner(
    model: LanguageModel,
    store: KvStore,
    eos_token_ids: frozenset[int],
    settings: WorkerSettings,
    max_model_len: int,
) -> CudaRunner:
    """Without graphs yet: see `CudaRunner.make_graphs`."""
    device = store.device
    sampler = DeviceSampler(
        settings.max_num_seqs,
        model.facts.vocab_size,
        eos_token_ids,
        device,
        settings.grammar_step_s,
    )
    limits = CudaLimits.of(settings, max_model_len)
    return CudaRunner(model, store, sampler, TorchDevice(device), limits)
