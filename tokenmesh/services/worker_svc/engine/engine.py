"""Engine: one step turns the scheduler's plan into tokens. Start reading at `Engine.step`.

Not thread-safe: everything here happens on the engine thread."""

import logging
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from tokenmesh.services.worker_svc.engine.cache_changes import BlockLog
from tokenmesh.services.worker_svc.engine.in_flight import InFlightStep, corrupted_by
from tokenmesh.services.worker_svc.engine.outputs import (
    EndedStream,
    EngineStats,
    StepOutput,
    closing_delta,
    each_draw,
    failure_of,
    token_delta,
)
from tokenmesh.services.worker_svc.engine.plan import Runner, StepPlan, StepResult, depth_of
from tokenmesh.services.worker_svc.engine.prefix_cache import make_cache
from tokenmesh.services.worker_svc.engine.request import Ending, Request, Status, StreamKey
from tokenmesh.services.worker_svc.engine.scheduler import Scheduler
from tokenmesh.services.worker_svc.engine.speculating import Proposer, check_drafts
from tokenmesh.services.worker_svc.engine.timeline import Chunk, RateMeter, StepLog, TimelineStep
from tokenmesh.shared.clock import monotonic_s, now_ns, perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.tokens import Delta

logger = logging.getLogger(__name__)

ABORTED: Final = Ending("abort")


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
        """Since when the oldest step in flight goes on, `monotonic_s`; any thread may look."""
        self._requests: dict[StreamKey, Request] = {}
        self._depth = depth_of(runner, settings.async_scheduling)
        self._flights: deque[InFlightStep] = deque()
        """Steps launched and not landed, oldest first; between two calls at most `_depth`."""
        self._output = StepOutput(step=0)
        self._rates = RateMeter()
        self._log = StepLog(settings.trace_steps)
        self._num_added = 0
        self._num_failures = 0
        self._num_preemptions = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._flights)

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
        """End a stream; its blocks are free when this returns. Unknown ones are ignored.

        A step in flight may still write to them: whoever gets them next writes after it.
        """
        request = self._requests.get(key)
        if request is not None:
            self._close(request, ending)

    def cancel_all(self, ending: Ending) -> None:
        """End every stream."""
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
        if len(self._flights) > self._depth:
            self._land()

    def settle(self) -> None:
        """Hand out the tokens of all steps in flight; nothing is launched. Blocks."""
        while self._flights:
            self._land()

    def linger(self) -> None:
        """Let requests arrive for the next step: blocks until the one in flight is nearly over.

        The next step cannot begin before, and what it is launched with it cannot take in later.
        """
        if self._flights:
            flight = self._flights[-1]
            expected_s = self._rates.expected_s(flight.num_prefill, flight.num_decode)
            rest_s = flight.started_s + expected_s - perf_s()
            flight.launch.wait(max(0.0, rest_s - self._settings.launch_ahead_s))

    def forget_kv(self) -> None:
        """Nothing that was computed can be found again. No request may be here."""
        self.settle()
        assert not self._requests, "requests hold KV"
        self._cache.forget_all()

    def take_output(self) -> StepOutput:
        """What has happened since the last call."""
        output, self._output = self._output, StepOutput(step=self._output.step + 1)
        output.routes = self._cache.take_route_change()
        output.blocks = self._cache.take_block_changes()
        output.stats = EngineStats(
            num_added=self._num_added,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            kv_blocks_used=self._pool.num_used,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            step_s=self._rates.step_s,
            num_preemptions=self._num_preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            tenant_levels=self._scheduler.recent.levels,
        )
        return output

    def _launch(self, plan: StepPlan) -> None:
        notes = self._scheduler.notes
        started_ns, started_s = now_ns(), perf_s()
        num_prefill = 0
        for request, num_tokens, _ in notes.prefills:
            num_prefill += num_tokens
            timeline = request.timeline
            timeline.first_scheduled_ns = timeline.first_scheduled_ns or started_ns
        if not self._flights:
            self.busy_since_s = monotonic_s()
        launch = self._runner.launch(plan)
        self._flights.append(InFlightStep(plan, notes, launch, started_ns, started_s, num_prefill))

    def _land(self) -> None:
        flight = self._flights.popleft()
        try:
            result = flight.launch.result()
        # whatever a model may throw, the other requests go on
        except Exception as error:
            self._fail(flight, error)
        else:
            self._num_failures = 0
            ended_ns = self._note_end(flight)
            self._publish(flight, result, ended_ns)
        self.busy_since_s = monotonic_s() if self._flights else None

    def _publish(self, flight: InFlightStep, result: StepResult, ended_ns: int) -> None:
        """Hand out the tokens of a step and end the requests that reached their end."""
        if result.errors:
            lost: list[tuple[InFlightStep, Collection[int]]] = [(flight, result.errors)]
            lost += [(each, ()) for each in self._flights]
            self._drop_rows(lost, result.errors, result.hopeless)
        for row, entries in result.prompt_logprobs.items():
            owner = self._scheduler.rows.owner(row, flight.plan.step)
            if owner is not None:
                owner.prompt_logprobs += entries
        owners, ends, ids = self._scheduler.draw(flight.plan.step, result.tokens)
        special = ends | result.logprobs.keys()
        by_gateway = self._output.deltas
        for row, request, (packed,) in each_draw(result, owners, ids):
            if request is None:
                continue
            gateway, stream, attempt = request.key
            if request.has_reported and row not in special:
                offset = len(request.token_ids) - 1 - request.num_prompt
                by_gateway[gateway].append(Delta(stream, attempt, offset, packed))
                continue
            if not request.has_reported:
                request.timeline.first_token_ns = ended_ns
            logprobs = result.logprobs.get(row)
            ending = request.ending() if row in ends else None
            by_gateway[gateway].append(token_delta(request, packed, logprobs, ending))
            if ending is not None:
                self._end(request, ending)

    def _drop_rows(
        self,
        lost: list[tuple[InFlightStep, Collection[int]]],
        errors: dict[int, str],
        hopeless: Collection[int] = (),
    ) -> None:
        """End failed rows; send whoever read what they did not write back to start over."""
        failed, misled = corrupted_by(lost, self._scheduler.rows, self._cache)
        self._scheduler.rows.expect_no_late()
        for request in failed:
            failure = failure_of(errors[request.row], is_hopeless=request.row in hopeless)
            self._close(request, Ending("error", error=failure))
        for request in misled:
            self._scheduler.preempt(request)

    def _fail(self, flight: InFlightStep, error: Exception) -> None:
        """Nothing of the step can be trusted: its requests end, the others go on.

        Neither can the steps that were launched on top of it: who was in those starts over.
        """
        self._num_failures += 1
        logger.error("step %d failed: %s", flight.plan.step, error, exc_info=error)
        lost = [flight, *self._flights]
        self._flights.clear()
        for each in lost[1:]:
            with suppress(Exception):
                each.launch.result()
        errors = dict.fromkeys(flight.rows, f"{type(error).__name__}: {error}")
        self._drop_rows([(each, each.rows) for each in lost], errors)
        for each in lost:
            self._scheduler.rows.remove_again(each.plan.removed_rows)
        if self._num_failures >= self._settings.max_step_failures:
            raise EngineBroken(f"{self._num_failures} steps in a row failed, last: {error}")

    def _close(self, request: Request, ending: Ending) -> None:
        self._output.deltas[request.key.gateway].append(closing_delta(request, ending))
        self._end(request, ending)

    def _end(self, request: Request, ending: Ending) -> None:
        self._scheduler.remove(request)
        self._requests.pop(request.key, None)
        timeline = request.timeline
        timeline.ended_ns = now_ns()
        steps: list[TimelineStep] = []
        if request.traceparent is not None and timeline.first_token_ns:
            limit = self._settings.trace_step_events
            steps = self._log.between(timeline.first_token_ns, timeline.ended_ns, limit)
        self._output.ended.append(EndedStream(request, ending, steps))

    def _note_preempted(self) -> None:
        for request in self._scheduler.notes.preempted:
            self._num_preemptions += 1
            request.timeline.preempted_ns.append(now_ns())

    def _note_end(self, flight: InFlightStep) -> int:
        """Write timelines, step log and rates; when the step ended, wall clock."""
        ended_ns, ended_s = now_ns(), perf_s()
        for later in self._flights:
            later.started_ns, later.started_s = ended_ns, ended_s
        batch_size = flight.plan.num_rows
        for request, num_tokens, num_cached in flight.notes.prefills:
            # whoever ended meanwhile belongs to the event loop's side
            if request.status is not Status.ENDED:
                chunk = Chunk(flight.started_ns, ended_ns, num_tokens, num_cached, batch_size)
                request.timeline.chunks.append(chunk)
                if request.is_prefilling and request.reservation:
                    self._output.prefilling[request.reservation] = request.backlog
        duration_s = self._output.duration_s = ended_s - flight.started_s
        num_tokens = self._output.num_tokens = flight.plan.num_tokens
        num_decode = num_tokens - flight.num_prefill
        self._prefill_tokens += flight.num_prefill
        self._decode_tokens += num_decode
        self._rates.note(duration_s, flight.num_prefill, num_decode)
        self._log.add(TimelineStep(ended_ns, batch_size, num_tokens, self._pool.num_used))
        return ended_ns
