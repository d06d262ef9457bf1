"""Engine: one step turns the scheduler's plan into tokens. Start reading at `Engine.step`.

Not thread-safe: everything here happens on the engine thread."""

import logging
from collections import deque
from contextlib import suppress
from typing import Final

from tokenmesh.engine.core.idle_saves import save_rest
from tokenmesh.engine.core.in_flight import InFlightStep, StepNotes
from tokenmesh.engine.core.landing import Landing
from tokenmesh.engine.core.outbox import Outbox
from tokenmesh.engine.core.outputs import EngineTotals, StepOutput, stats_of
from tokenmesh.engine.core.proposing import Proposer, check_drafts
from tokenmesh.engine.core.rate_meter import RateMeter
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.kv.block_log import BlockLog
from tokenmesh.engine.kv.exchange import KvExchange
from tokenmesh.engine.kv.make_cache import make_cache
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.engine.runner import Runner, depth_of
from tokenmesh.shared.clock import monotonic_s, now_ns, perf_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError

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
        self.exchange: Final = KvExchange(self._cache, settings.block_size)
        self._num_lanes = runner.num_lanes
        self._lane = 0
        """The next step is planned for this lane."""
        self._scheduler = Scheduler(settings, self._cache, proposer, runner.num_lanes)
        self.busy_since_s: float | None = None
        """When the oldest in-flight step began, `monotonic_s`; read by any thread."""
        self._depth = depth_of(runner, settings.async_scheduling)
        self._in_flight: deque[InFlightStep] = deque()
        """Steps that were launched and not landed, oldest first; at most `_depth` between calls."""
        self._rates = RateMeter()
        self._totals = EngineTotals()
        self._outbox = Outbox(self._scheduler, settings)
        self._landing = Landing(
            self._scheduler, self._cache, self._outbox, self._rates, self._totals
        )
        self._num_failures = 0

    @property
    def has_work(self) -> bool:
        """A step would do nothing where this is false."""
        return bool(len(self._outbox) or self._in_flight or self._cache.images.has_unsaved)

    def add(self, request: Request) -> None:
        """Accept a request; one that has already ended gets its ending with the next output."""
        self._totals.added += 1
        request.timeline.arrived_ns = request.timeline.arrived_ns or now_ns()
        ending = request.ending()
        if ending is not None:
            self._outbox.close(request, ending)
            return
        self._outbox.add(request)
        self._scheduler.add(request)

    def cancel(self, key: StreamKey, ending: Ending = ABORTED) -> None:
        """End a stream; its blocks are free when this returns. Unknown ones are ignored.

        An in-flight step may still write to them: their next holder writes after it.
        """
        request = self._outbox.find(key)
        if request is not None:
            self._outbox.close(request, ending)

    def cancel_all(self, ending: Ending) -> None:
        for request in self._outbox:
            self._outbox.close(request, ending)

    def step(self) -> None:
        """One iteration for all requests: launch a step, hand out the tokens of the one before it.

        Without async scheduling nothing stays in flight, so it is the same step. Blocks until the
        step to hand out has ended. Raises EngineBroken when the runner keeps failing.

        Lanes take turns; the tokens of a lane's last step are known before its next one is planned.
        """
        if not (len(self._outbox) or self._in_flight):
            save_rest(self._runner, self._cache, self._scheduler.plan_saves())
            return
        while self._num_lanes > 1 and any(each.lane == self._lane for each in self._in_flight):
            self._land()
        if self._num_lanes == 1 and self._scheduler.speculating.awaits_landing:
            self.settle()
        plan = self._scheduler.schedule(self._lane)
        notes = self._scheduler.notes
        if notes.preempted:
            self._note_preempted(notes.preempted)
        if plan.num_rows:
            self._launch(plan, notes)
        elif self._num_lanes == 1:
            self.settle()
        elif self._in_flight:
            # nothing else of this lane can be planned before that
            self._land()
        self._lane = (self._lane + 1) % self._num_lanes
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
        # a pipeline's next step begins in the first stage, which the ones in flight have left
        if self._in_flight and self._num_lanes == 1:
            step = self._in_flight[-1]
            expected_s = self._rates.expected_s(step.num_prefill, step.num_decode)
            rest_s = step.started_s + expected_s - perf_s()
            step.launch.wait(max(0.0, rest_s - self._settings.launch_ahead_s))

    def forget_kv(self) -> None:
        """Drop all cached KV. There must be no request."""
        self.settle()
        assert not len(self._outbox), "requests hold KV"
        self._cache.forget_all()

    def take_output(self) -> StepOutput:
        """Return the outputs and ends since the last call."""
        output = self._outbox.take()
        output.routes = self._cache.reports.take_route_change()
        output.blocks = self._cache.reports.take_block_changes()
        output.stats = stats_of(self._scheduler, self._cache, self._rates, self._totals)
        return output

    def _launch(self, plan: StepPlan, notes: StepNotes) -> None:
        started_ns, started_s = now_ns(), perf_s()
        num_prefill = 0
        for chunk in notes.prefills:
            num_prefill += chunk.num_tokens
            timeline = chunk.request.timeline
            timeline.first_scheduled_ns = timeline.first_scheduled_ns or started_ns
        if not self._in_flight:
            self.busy_since_s = monotonic_s()
        launch = self._runner.launch(plan)
        num_decode = plan.num_tokens - num_prefill
        self._in_flight.append(
            InFlightStep(
                plan, notes, launch, started_ns, started_s, num_prefill, num_decode, self._lane
            )
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
            self._landing.land(step, result, self._in_flight)
            if self._cache.host is not None:
                self._cache.images.landed(step.plan.step, ok=True)
        self.busy_since_s = monotonic_s() if self._in_flight else None

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
        self._landing.drop_rows([(each, each.rows) for each in lost], errors)
        for each in lost:
            self._scheduler.rows.remove_again(each.plan.removed_rows)
            self._cache.images.landed(each.plan.step, ok=False)
        if self._num_failures >= self._settings.max_step_failures:
            raise EngineBroken(f"{self._num_failures} steps in a row failed, last: {error}")

    def _note_preempted(self, preempted: list[Request]) -> None:
        for request in preempted:
            self._totals.preemptions += 1
            request.timeline.preempted_ns.append(now_ns())
