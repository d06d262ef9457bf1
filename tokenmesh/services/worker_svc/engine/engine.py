"""Engine: one step turns the scheduler's plan into tokens. Start reading at `Engine.step`.

Not thread-safe: everything here happens on the engine thread.
"""

import logging
from typing import Final, Generic

from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.outputs import (
    Ended,
    EngineStats,
    StepOutput,
    closing_delta,
    plain_delta,
    token_delta,
)
from tokenmesh.services.worker_svc.engine.plan import StepPlan, StepResult
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.rates import RateMeter
from tokenmesh.services.worker_svc.engine.request import Ending, Request, StreamKey
from tokenmesh.services.worker_svc.engine.retraction import spoiled_by
from tokenmesh.services.worker_svc.engine.runner import Inputs, Logits, Runner
from tokenmesh.services.worker_svc.engine.scheduler import Limits, Scheduler
from tokenmesh.services.worker_svc.engine.timeline import Chunk, Step, StepLog
from tokenmesh.shared.clock import now_ns, perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.failed import Failed

logger = logging.getLogger(__name__)

ABORTED: Final = Ending("abort")


class EngineBroken(TokenMeshError):
    """Step after step fails: the process must end."""


class Engine(Generic[Inputs, Logits]):
    """The scheduler, the blocks and a runner. Every request added ends exactly once."""

    def __init__(self, runner: Runner[Inputs, Logits], settings: WorkerSettings) -> None:
        self._runner = runner
        self._settings = settings
        self._pool = BlockPool(runner.num_blocks)
        self._cache = PrefixCache(
            self._pool, settings.block_size, enabled=settings.enable_prefix_caching
        )
        self._scheduler = Scheduler(limits_of(settings, runner.num_blocks), self._pool, self._cache)
        self._requests: dict[StreamKey, Request] = {}
        self._output = StepOutput(step=0)
        self._rates = RateMeter()
        self._log = StepLog(settings.trace_steps)
        self._num_added = 0
        self._num_failures = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Take a request; one that already reached its end gets its ending with the next output."""
        self._num_added += 1
        request.timeline.arrived_ns = request.timeline.arrived_ns or now_ns()
        ending = request.ending()
        if ending is not None:
            self._close(request, ending)
            return
        self._requests[request.key] = request
        self._scheduler.add(request)

    def cancel(self, key: StreamKey, ending: Ending = ABORTED) -> None:
        """End a stream; its blocks are free when this returns. Unknown ones are ignored."""
        request = self._requests.get(key)
        if request is not None:
            self._close(request, ending)

    def cancel_all(self, ending: Ending) -> None:
        """End every stream."""
        for request in list(self._requests.values()):
            self._close(request, ending)

    def step(self) -> None:
        """One iteration for all requests. Raises EngineBroken when the runner keeps failing."""
        started_ns, started_s = now_ns(), perf_s()
        plan = self._scheduler.schedule()
        try:
            inputs = self._runner.prepare(plan)
            logits = self._runner.forward(inputs)
            result = self._runner.sample(inputs, logits)
        # whatever a model may throw, the other requests go on
        except Exception as error:
            self._fail(plan, error)
            return
        self._num_failures = 0
        ended_ns = now_ns()
        num_prefill, num_decode = self._note_step(plan, started_ns, ended_ns)
        self._output.duration_s = perf_s() - started_s
        self._output.num_tokens = num_prefill + num_decode
        self._rates.note(self._output.duration_s, num_prefill, num_decode)
        self._publish(plan, result, ended_ns)

    def take_output(self) -> StepOutput:
        """What has happened since the last call."""
        output, self._output = self._output, StepOutput(step=self._output.step + 1)
        output.stats = EngineStats(
            num_added=self._num_added,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            kv_blocks_used=self._pool.num_used,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            step_s=self._rates.step_s,
            num_preemptions=self._num_preemptions,
        )
        return output

    def _publish(self, plan: StepPlan, result: StepResult, ended_ns: int) -> None:
        """Hand out the tokens of a step and end the requests that reached their end."""
        sampled = result.sampled
        if result.errors:
            unusable = self._drop_rows(plan, result.errors)
            sampled = [row for row in sampled if row.row not in unusable]
        for row, entries in result.prompt_logprobs.items():
            owner = self._scheduler.request_at(row)
            if owner is not None:
                owner.prompt_logprobs += entries
        drawn, may_end = self._scheduler.draw(sampled)
        by_gateway = self._output.deltas
        for request, result_row in zip(drawn, sampled, strict=True):
            gateway = request.key.gateway
            if gateway not in by_gateway:
                by_gateway[gateway] = []
            is_last = result_row.row in may_end
            if request.has_reported and not is_last and result_row.logprobs is None:
                by_gateway[gateway].append(plain_delta(request, result_row.token_id))
                continue
            if not request.has_reported:
                request.timeline.first_token_ns = ended_ns
            ending = request.ending() if is_last else None
            by_gateway[gateway].append(token_delta(request, result_row, ending))
            if ending is not None:
                self._end(request, ending)

    def _drop_rows(self, plan: StepPlan, errors: dict[int, str]) -> set[int]:
        """End failed rows; send whoever read what they did not write back to start over."""
        failed, misled = spoiled_by(plan, errors, self._scheduler, self._cache)
        unusable = {request.row for request in (*failed, *misled)}
        for request in failed:
            error = Failed(code="internal_error", message=errors[request.row], retryable=True)
            self._close(request, Ending("error", error=error))
        for request in misled:
            self._scheduler.preempt(request)
        return unusable

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Nothing of the step can be trusted: its requests end, the others go on."""
        self._num_failures += 1
        logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        errors = dict.fromkeys(
            (entry.row for entry in plan.scheduled), f"{type(error).__name__}: {error}"
        )
        self._drop_rows(plan, errors)
        self._scheduler.remove_rows_again(plan.removed_rows)
        if self._num_failures >= self._settings.max_step_failures:
            raise EngineBroken(f"{self._num_failures} steps in a row failed, last: {error}")

    def _close(self, request: Request, ending: Ending) -> None:
        deltas = self._output.deltas.setdefault(request.key.gateway, [])
        deltas.append(closing_delta(request, ending))
        self._end(request, ending)

    def _end(self, request: Request, ending: Ending) -> None:
        self._scheduler.remove(request)
        self._requests.pop(request.key, None)
        timeline = request.timeline
        timeline.ended_ns = now_ns()
        steps: list[Step] = []
        if request.traceparent is not None and timeline.first_token_ns:
            steps = self._log.between(
                timeline.first_token_ns, timeline.ended_ns, self._settings.trace_step_events
            )
        self._output.ended.append(Ended(request, ending, steps))

    def _note_step(self, plan: StepPlan, started_ns: int, ended_ns: int) -> tuple[int, int]:
        """Write timelines and step log; the step's prefill tokens and decoding streams."""
        notes = self._scheduler.notes
        batch_size = len(plan.scheduled)
        num_prefill = 0
        for request, num_tokens, num_cached in notes.prefills:
            num_prefill += num_tokens
            timeline = request.timeline
            timeline.first_scheduled_ns = timeline.first_scheduled_ns or started_ns
            timeline.chunks.append(Chunk(started_ns, ended_ns, num_tokens, num_cached, batch_size))
        self._num_preemptions += len(notes.preempted)
        for request in notes.preempted:
            request.timeline.preempted_ns.append(started_ns)
        num_decode = batch_size - len(notes.prefills)
        self._log.add(Step(ended_ns, batch_size, num_prefill + num_decode, self._pool.num_used))
        return num_prefill, num_decode


def limits_of(settings: WorkerSettings, num_blocks: int) -> Limits:
    """The scheduler's limits for a pool of that size."""
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        block_size=settings.block_size,
        watermark_blocks=int(settings.kv_watermark * num_blocks),
    )
