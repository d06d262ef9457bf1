"""Outbox: what leaves the engine, from one call of `Engine.take_output` to the next."""

from collections.abc import Iterator

from tokenmesh.engine.core.outputs import EndedStream, StepOutput, closing_delta
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.core.step_log import StepLog, TimelineStep
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.shared.clock import now_ns
from tokenmesh.shared.config.worker import WorkerSettings


class Outbox:
    """Knows every request that has not ended, and ends each exactly once."""

    def __init__(self, scheduler: Scheduler, settings: WorkerSettings) -> None:
        self._scheduler = scheduler
        self._requests: dict[StreamKey, Request] = {}
        self._max_steps = settings.trace_step_events
        self.log = StepLog(settings.trace_steps)
        self.output = StepOutput(step=0)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Those that have not ended; any may end meanwhile."""
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        """A request whose ending is to come."""
        self._requests[request.key] = request

    def find(self, key: StreamKey) -> Request | None:
        """The request, if it has not ended."""
        return self._requests.get(key)

    def close(self, request: Request, ending: Ending) -> None:
        """End a stream without a further token."""
        if request.spec.pooling is None and not request.spec.computes_only:
            self.output.deltas[request.key.gateway].append(closing_delta(request, ending))
        self.end(request, ending)

    def end(self, request: Request, ending: Ending) -> None:
        """The request's last delta is there: its row and blocks are free when this returns."""
        self._scheduler.remove(request)
        self._requests.pop(request.key, None)
        timeline = request.timeline
        timeline.ended_ns = now_ns()
        steps: list[TimelineStep] = []
        if request.spec.traceparent is not None and timeline.first_token_ns:
            steps = self.log.between(timeline.first_token_ns, timeline.ended_ns, self._max_steps)
        self.output.ended.append(EndedStream(request, ending, steps))

    def take(self) -> StepOutput:
        """Return what has come since the last call; what comes later goes into another."""
        output, self.output = self.output, StepOutput(step=self.output.step + 1)
        return output
