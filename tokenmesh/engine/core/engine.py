"""Engine: one step turns the scheduler's plan into tokens. Start reading at `Engine.step`.

Not thread-safe: everything here happens on the engine thread."""

import logging
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Final, cast

from tokenmesh.engine.core.in_flight import InFlightStep, corrupted_by
from tokenmesh.engine.core.outputs import (
    EndedStream,
    EngineTotals,
    StepOutput,
    add_token_deltas,
    closing_delta,
    each_draw,
    failure_of,
    stats_of,
    token_delta,
)
from tokenmesh.engine.core.proposing import Proposer, check_drafts
from tokenmesh.engine.core.rate_meter import RateMeter
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.core.step_log import StepLog, TimelineStep
from tokenmesh.engine.kv.block_log import BlockLog
from tokenmesh.engine.kv.make_cache import make_cache
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.engine.request.timeline import Chunk
from tokenmesh.engine.runner import Runner, depth_of
from tokenmesh.shared.clock import monotonic_s, now_ns, perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError

logger = logging.getLogger(__name__)

ABORTED: Final = Ending("abort")
POOLED: Final = Ending("stop")
"""Of a request with `pooling`, whose numbers are in its output."""


class EngineBroken(TokenMeshError):
    """Step after step fails: the process must end."""


class Engine:
    """The scheduler, the blocks and a runner. Every request added ends exactly once."""

    def __init__(
        self,
        runner: Runner,
        settings: WorkerSettings,
        route_tokens: int = 0,
        log: BlockLog | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`route_tokens`: of a route block; 0: no prefix index. `log`: of changes of the prefix
        cache. `proposer`: of drafts. Raises ConfigError where the model takes none.
        """
        check_drafts(runner, proposer)
        self._runner = runner
        self._settings = settings
        self._cache = make_cache(settings, runner, route_tokens, log)
        self._pool = self._cache.pool
        self._scheduler = Scheduler(settings, self._cache, proposer)
        self.busy_since_s: float | None = None
        """When the oldest in-flight step began, `monotonic_s`; read by any thread."""
        self._requests: dict[StreamKey, Request] = {}
        self._depth = depth_of(runner, settings.async_scheduling)
        self._in_flight: deque[InFlightStep] = deque()
        """Steps that were launched and not landed, oldest first; at most `_depth` between calls."""
        self._output = StepOutput(step=0)
        self._rates = RateMeter()
        self._log = StepLog(settings.trace_steps)
        self._totals = EngineTotals()
        self._num_failures = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Accept a request; one that has already ended gets its ending with the next output."""
        self._totals.added += 1
        request.timeline.arrived_ns = request.timeline.arrived_ns or now_ns()
        ending = request.ending()
        if ending is not None:
            self._close(request, ending)
            return
        self._requests[request.key] = request
        self._scheduler.add(request)

    def cancel(self, key: StreamKey, ending: Ending = ABORTED) -> None:
        """End a stream; its blocks are free when this returns. Unknown ones are ignored.

        An in-flight step may still write to them: their next holder writes after it.
        """
        request = self._requests.get(key)
        if request is not None:
            self._close(request, ending)

    def cancel_all(self, ending: Ending) -> None:
        for request in list(self._requests.values()):
            self._close(request, ending)

    def step(self) -> None:
        """One iteration for all requests: launch a step, hand out the tokens of the one before it.

        Without async scheduling nothing stays in flight, so it is the same step. Blocks until the
        step to hand out has ended. Raises EngineBroken when the runner keeps failing.
        """
        plan = self._scheduler.schedule()
        self._note_preempted()
        if not plan.num_rows:
            self.settle()
            return
        self._launch(plan)
        if len(self._in_flight) > self._depth:
            self._land()

    def settle(self) -> None:
        """Hand out the tokens of all steps in flight; nothing is launched. Blocks."""
        while self._in_flight:
            self._land()

    def wait_for_launch_window(self) -> None:
        """Block until the step in flight is nearly over, so that later requests join the next step.

        The next step cannot begin before, and accepts no request after its launch.
        """
        if self._in_flight:
            step = self._in_flight[-1]
            expected_s = self._rates.expected_s(step.num_prefill, step.num_decode)
            rest_s = step.started_s + expected_s - perf_s()
            step.launch.wait(max(0.0, rest_s - self._settings.launch_ahead_s))

    def forget_kv(self) -> None:
        """Drop all cached KV. There must be no request."""
        self.settle()
        assert not self._requests, "requests hold KV"
        self._cache.forget_all()

    def take_output(self) -> StepOutput:
        """What has happened since the last call."""
        output, self._output = self._output, StepOutput(step=self._output.step + 1)
        output.routes = self._cache.take_route_change()
        output.blocks = self._cache.take_block_changes()
        output.stats = stats_of(self._scheduler, self._pool, self._rates, self._totals)
        return output

    def _launch(self, plan: StepPlan) -> None:
        notes = self._scheduler.notes
        started_ns, started_s = now_ns(), perf_s()
        num_prefill = 0
        for request, num_tokens, _ in notes.prefills:
            num_prefill += num_tokens
            timeline = request.timeline
            timeline.first_scheduled_ns = timeline.first_scheduled_ns or started_ns
        if not self._in_flight:
            self.busy_since_s = monotonic_s()
        launch = self._runner.launch(plan)
        num_decode = plan.num_tokens - num_prefill
        self._in_flight.append(
            InFlightStep(plan, notes, launch, started_ns, started_s, num_prefill, num_decode)
        )

    def _land(self) -> None:
        step = self._in_flight.popleft()
        try:
            result = step.launch.result()
        # any error of a model: the other requests go on
        except Exception as error:
            self._fail(step, error)
        else:
            self._num_failures = 0
            ended_ns = self._note_end(step)
            self._publish(step, result, ended_ns)
        self.busy_since_s = monotonic_s() if self._in_flight else None

    def _publish(self, step: InFlightStep, result: StepResult, ended_ns: int) -> None:
        """Hand out the tokens of a step and end the requests that reached their end."""
        if result.errors:
            lost: list[tuple[InFlightStep, Collection[int]]] = [(step, result.errors)]
            lost += [(each, ()) for each in self._in_flight]
            self._drop_rows(lost, result.errors, result.non_retryable)
        starts = {entry.row: entry.start for entry in step.plan.scheduled}
        for row, entries in result.prompt_logprobs.items():
            owner = self._scheduler.rows.owner(row, step.plan.step)
            if owner is not None:
                if starts.get(row) == 0:
                    owner.output.prompt_logprobs = []  # computed again after a preemption
                owner.output.prompt_logprobs += entries
        for row, states in result.alignments.items():
            if (owner := self._scheduler.rows.owner(row, step.plan.step)) is not None:
                owner.output.alignment = states
        owners, ends, ids = self._scheduler.draw(step.plan, result.tokens)
        if result.drafts:
            self._scheduler.note_drafts(step.plan.step, result.drafts)
        self._publish_pooled(step.plan.step, result, ended_ns)
        # a request draws its first token in the step that computes the last of its prompt
        special = {*ends, *result.logprobs, *starts}
        by_gateway = self._output.deltas
        if ids is not None and not special and None not in owners:
            add_token_deltas(by_gateway, cast("list[Request]", owners), ids)
            return
        for row, request, packed in each_draw(result, owners):
            if request is None:
                continue
            gateway = request.key.gateway
            if not request.output.has_reported:
                request.timeline.first_token_ns = ended_ns
            logprobs = result.logprobs.get(row)
            ending = request.ending() if row in ends else None
            by_gateway[gateway].append(token_delta(request, packed, logprobs, ending))
            if ending is not None:
                self._end(request, ending)

    def _publish_pooled(self, step: int, result: StepResult, ended_ns: int) -> None:
        """End the requests whose numbers are there."""
        for row, pooled in result.pooled.items():
            request = self._scheduler.rows.owner(row, step)
            if request is not None:
                request.timeline.first_token_ns = ended_ns
                request.output.pooled = pooled
                self._end(request, POOLED)

    def _drop_rows(
        self,
        lost: list[tuple[InFlightStep, Collection[int]]],
        errors: dict[int, str],
        non_retryable: Collection[int] = (),
    ) -> None:
        """End failed rows; preempt requests that read what these did not write."""
        failed, corrupted = corrupted_by(lost, self._scheduler.rows, self._cache)
        self._scheduler.rows.expect_no_late()
        for request in failed:
            row = request.place.row
            failure = failure_of(errors[row], is_retryable=row not in non_retryable)
            self._close(request, Ending("error", error=failure))
        for request in corrupted:
            self._scheduler.preempt(request)

    def _fail(self, step: InFlightStep, error: Exception) -> None:
        """Nothing of the step can be trusted: its requests end, the others go on.

        Nor the steps launched on top of it: requests in those are computed again.
        """
        self._num_failures += 1
        logger.error("step %d failed: %s", step.plan.step, error, exc_info=error)
        lost = [step, *self._in_flight]
        self._in_flight.clear()
        for each in lost[1:]:
            with suppress(Exception):
                each.launch.result()
        errors = dict.fromkeys(step.rows, f"{type(error).__name__}: {error}")
        self._drop_rows([(each, each.rows) for each in lost], errors)
        for each in lost:
            self._scheduler.rows.remove_again(each.plan.removed_rows)
        if self._num_failures >= self._settings.max_step_failures:
            raise EngineBroken(f"{self._num_failures} steps in a row failed, last: {error}")

    def _close(self, request: Request, ending: Ending) -> None:
        if request.spec.pooling is None:
            self._output.deltas[request.key.gateway].append(closing_delta(request, ending))
        self._end(request, ending)

    def _end(self, request: Request, ending: Ending) -> None:
        self._scheduler.remove(request)
        self._requests.pop(request.key, None)
        timeline = request.timeline
        timeline.ended_ns = now_ns()
        steps: list[TimelineStep] = []
        if request.spec.traceparent is not None and timeline.first_token_ns:
            limit = self._settings.trace_step_events
            steps = self._log.between(timeline.first_token_ns, timeline.ended_ns, limit)
        self._output.ended.append(EndedStream(request, ending, steps))

    def _note_preempted(self) -> None:
        for request in self._scheduler.notes.preempted:
            self._totals.preemptions += 1
            request.timeline.preempted_ns.append(now_ns())

    def _note_end(self, step: InFlightStep) -> int:
        """Write timelines, step log and rates; when the step ended, wall clock."""
        ended_ns, ended_s = now_ns(), perf_s()
        for later in self._in_flight:
            later.started_ns, later.started_s = ended_ns, ended_s
        batch_size = step.plan.num_rows
        for request, num_tokens, num_cached in step.notes.prefills:
            # an ended request belongs to the event loop
            if request.place.status is not Status.ENDED:
                chunk = Chunk(step.started_ns, ended_ns, num_tokens, num_cached, batch_size)
                request.timeline.chunks.append(chunk)
                if request.decode.is_prefilling and request.spec.reservation:
                    self._output.prefilling[request.spec.reservation] = request.backlog
        duration_s = self._output.duration_s = ended_s - step.started_s
        num_tokens = self._output.num_tokens = step.num_prefill + step.num_decode
        self._totals.prefill_tokens += step.num_prefill
        self._totals.decode_tokens += step.num_decode
        self._rates.note(duration_s, step.num_prefill, step.num_decode)
        if not step.num_prefill:
            self._scheduler.speculating.note_step(step.plan, duration_s)
        self._log.add(TimelineStep(ended_ns, batch_size, num_tokens, self._pool.num_used))
        return ended_ns
