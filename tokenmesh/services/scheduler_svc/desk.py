"""The desk: places a request now, lets it wait, or refuses it. No I/O, no clock.

One line for each model. A request never overtakes an earlier one of its priority, except past one
that only waits because of its own n.
"""

from collections.abc import Callable

from tokenmesh.services.scheduler_svc.placement import Decision, Placement, Worker
from tokenmesh.services.scheduler_svc.waiting import Ticket, WaitingLine
from tokenmesh.shared.config.scheduler import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.place import Place, Placed

WorkersOf = Callable[[ModelName], list[Worker]]


class Desk:
    """All requests that this scheduler has not placed yet."""

    def __init__(self, settings: SchedulerSettings, workers_of: WorkersOf) -> None:
        self._settings = settings
        self._workers_of = workers_of
        self._placement = Placement(settings)
        self._lines: dict[ModelName, WaitingLine] = {}

    @property
    def num_waiting(self) -> int:
        """Requests in line, all models together."""
        return sum(len(line) for line in self._lines.values())

    def arrive(self, request: Place, now: float) -> Ticket:
        """A new request: its ticket, placed at once if it can be. Raises Overloaded."""
        line = self._lines.setdefault(request.model, WaitingLine())
        ticket = line.add(request, now)
        self._pump_line(request.model, line, now)
        if ticket.placed is None and self.num_waiting > self._settings.max_queued:
            self.leave(ticket)
            workers = self._workers_of(request.model)
            raise Overloaded(
                f"{self._settings.max_queued} requests already wait for a worker",
                retry_after_s=self._placement.retry_after_s(request, workers),
            )
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request is answered or its client is gone."""
        line = self._lines.get(ticket.request.model)
        if line is not None:
            line.remove(ticket)
            if not len(line):
                del self._lines[ticket.request.model]

    def position(self, ticket: Ticket) -> int:
        """How many requests are served before this one."""
        line = self._lines.get(ticket.request.model)
        return line.position(ticket) if line is not None else 0

    def has_workers(self, model: ModelName) -> bool:
        """Whether any live worker that takes streams serves the model."""
        return any(worker.takes_streams for worker in self._workers_of(model))

    def is_asleep(self, model: ModelName) -> bool:
        """Whether every worker of the model that is to stay sleeps."""
        staying = [worker for worker in self._workers_of(model) if not worker.draining]
        return bool(staying) and not any(worker.takes_streams for worker in staying)

    def pump(self, now: float) -> list[Ticket]:
        """Place whatever can be placed by now; their tickets have `placed` set."""
        return [
            ticket
            for model, line in list(self._lines.items())
            for ticket in self._pump_line(model, line, now)
        ]

    def _pump_line(self, model: ModelName, line: WaitingLine, now: float) -> list[Ticket]:
        placed: list[Ticket] = []
        workers = self._workers_of(model)
        for ticket in line.in_order():
            decision = self._placement.place(ticket.request, workers, now)
            if decision.worker is not None:
                ticket.placed = _placed(decision, decision.worker, now - ticket.waiting_since)
                line.remove(ticket)
                placed.append(ticket)
            elif ticket.request.num_streams == 1:
                break
        if not len(line):
            self._lines.pop(model, None)
        return placed


def _placed(decision: Decision, worker: Worker, queued_s: float) -> Placed:
    return Placed(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        queued_s=queued_s,
        candidates=decision.candidates,
    )
