"""EngineDriver: the real scheduler and the torch runner in one thread, prompts in, tokens out."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.grammar.matcher import Grammar
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey, TenantShare
from tokenmesh.shared.config.model import Dtype, ModelImpl, ModelSettings, QuantizationName
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tensor_blob import TensorBlob

MAX_STEPS: Final = 5000
"""A schedule that takes longer than this hangs."""


def greedy(max_tokens: int) -> SamplingParams:
    """Argmax, stopping only at `max_tokens`."""
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: Sequence[int]
    sampling: SamplingParams
    output: Sequence[int] = ()
    """Tokens of an earlier attempt."""
    media: Sequence[MediaItem] = ()
    embeddings: Mapping[str, TensorBlob] = field(default_factory=dict)
    grammar: Grammar | None = None
    adapter: ReadAdapter | None = None
    prediction: Sequence[int] = ()


@dataclass(slots=True)
class Outcome:
    """The result of a job."""

    token_ids: list[int]
    reason: str
    error: str | None
    code: str | None
    """The code of the error."""
    num_preemptions: int
    num_cached: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def load(
    directory: Path,
    *,
    dtype: Dtype = "float32",
    max_model_len: int | Literal["auto"] | None = None,
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
    quantization: QuantizationName | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[RunnableModel, WorkerSettings]:
    """Load a checkpoint, with a small KV pool unless `settings` say otherwise."""
    worker = WorkerSettings.model_validate(
        {"device": "cpu", "num_gpu_blocks_override": 256, "async_scheduling": True, **settings}
    )
    model = ModelSettings(
        model=str(directory),
        dtype=dtype,
        max_model_len=max_model_len,
        model_impl=model_impl,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        speculative_config=SpeculativeConfig.model_validate(speculative_config or {}),
    )
    return build_runner(model, worker, lambda done, total: None), worker


class EngineDriver:
    """An engine on a loaded checkpoint; its prefix cache lives from one `run` to the next."""

    owner = ""
    """The tenant of the requests to come."""
    salt: str | None = None
    """Their cache salt."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: Dtype = "float32",
        max_model_len: int | Literal["auto"] | None = None,
        model_impl: ModelImpl = "auto",
        quantization: QuantizationName | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.settings = load(
            directory,
            dtype=dtype,
            max_model_len=max_model_len,
            model_impl=model_impl,
            quantization=quantization,
            speculative_config=speculative_config,
            **settings,
        )
        self._engine = Engine(self.model.runner, self.settings)
        self._num_streams = 0
        self.drafts = DraftTotals()
        """The totals of the engine."""

    def on_output(self, output: StepOutput) -> None:
        """Called with that of each step; a test may put another in its place."""

    def again(
        self,
        *,
        num_blocks: int | None = None,
        proposer: Proposer | None = None,
        **settings: Any,
    ) -> "EngineDriver":
        """A new engine with an empty prefix cache over the same runner, of this one's settings and
        `settings`. It has the first num_blocks blocks of the pool; None: all."""
        other = copy(self)
        values = {**self.settings.model_dump(), **settings}
        other.settings = WorkerSettings.model_validate(values)
        runner = self.model.runner
        all_blocks, runner.num_blocks = runner.num_blocks, num_blocks or runner.num_blocks
        other._engine = Engine(runner, other.settings, proposer=proposer)
        runner.num_blocks = all_blocks
        return other

    def run(self, jobs: Sequence[Job], *, steps_between: int = 0) -> list[Outcome]:
        """Run jobs together; each enters the engine `steps_between` steps after the one before."""
        waiting = [self._request(job) for job in jobs]
        requests = list(waiting)
        outcomes: dict[StreamKey, Outcome] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompts: dict[int, list[TokenLogprobs | None]] = {}
        for step in range(MAX_STEPS):
            while waiting and (steps_between == 0 or step % steps_between == 0):
                self._engine.add(waiting.pop(0))
                if steps_between:
                    break
            self._engine.step()
            output = self._engine.take_output()
            self.drafts = output.stats.drafts
            self.on_output(output)
            for delta in (delta for deltas in output.deltas.values() for delta in deltas):
                logprobs.setdefault(delta.stream, []).extend(delta.logprobs or [])
                if delta.prompt_logprobs is not None:
                    prompts[delta.stream] = delta.prompt_logprobs
            for ended in output.ended:
                request, error = ended.request, ended.ending.error
                outcomes[request.key] = Outcome(
                    token_ids=request.token_ids[request.num_prompt :],
                    reason=ended.ending.reason,
                    error=None if error is None else error.message,
                    code=None if error is None else error.code,
                    num_preemptions=request.place.num_preemptions,
                    num_cached=request.place.num_cached or 0,
                    logprobs=logprobs.get(request.key.stream, []),
                    prompt_logprobs=prompts.get(request.key.stream),
                )
            if len(outcomes) == len(requests):
                return [outcomes[request.key] for request in requests]
        raise AssertionError(f"not done after {MAX_STEPS} steps")

    def sleep(self, level: int) -> int:
        """Between two runs; bytes freed."""
        self._engine.forget_kv()
        return self.model.resident.sleep(level)

    def tokens(self, jobs: Sequence[Job], *, steps_between: int = 0) -> list[list[int]]:
        """The tokens of each job, none of which may fail."""
        outcomes = self.run(jobs, steps_between=steps_between)
        assert [outcome.error for outcome in outcomes] == [None] * len(jobs)
        return [outcome.token_ids for outcome in outcomes]

    def _request(self, job: Job) -> Request:
        self._num_streams += 1
        adapter = job.adapter
        request = Request(
            RequestSpec(
                key=StreamKey(GatewayId("gateway"), self._num_streams, 0),
                request_id=RequestId(f"request-{self._num_streams}"),
                num_prompt=len(job.prompt),
                sampling=job.sampling,
                eos_ids=self.model.eos_token_ids,
                cache_salt=self.model.cache_salt(self.salt, len(job.prompt)),
                owner=TenantShare(self.owner),
                rope_boundary=self.model.rope_boundary,
                prediction=list(job.prediction),
                media=list(job.media),
                whole_runs=self.model.media.whole_runs(job.media),
                lora=None if adapter is None else Adapter("adapter", adapter.content_hash),
            ),
            [*job.prompt, *job.output],
        )
        request.prepared.embeddings, request.prepared.grammar = dict(job.embeddings), job.grammar
        request.prepared.adapter = None if adapter is None else adapter.matrices
        return request
