"""The desk: places a request now, lets it wait, or refuses it. No clock.

One line for each model, in which tenants take turns. A request never overtakes an earlier one of
its tenant and priority, except past one that only waits because of its own n. Where there is no
room for a tenant, there may be for one below its share. A line is worked through by one at a time,
since a placement takes a question to the index.
"""

from collections.abc import Callable
from typing import Final

from tokenmesh.services.scheduler_svc.placement import Decision, Placer, Worker
from tokenmesh.services.scheduler_svc.waiting import Ticket, WaitingLine
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.place import Place, Placed

WorkersOf = Callable[[ModelName], list[Worker]]

UNBOUND_TENANTS: Final = ("", "default")
"""Where nobody is told apart the bound of the whole line is enough."""


class Desk:
    """All requests that this scheduler has not placed yet."""

    def __init__(
        self, settings: SchedulerSettings, workers_of: WorkersOf, placement: Placer
    ) -> None:
        self._settings = settings
        self._workers_of = workers_of
        self._placement = placement
        self._lines: dict[ModelName, WaitingLine] = {}

    @property
    def num_waiting(self) -> int:
        """Requests in line, all models together; those not tried yet are not among them."""
        return sum(line.num_waiting for line in self._lines.values())

    async def arrive(self, request: Place, now: float) -> Ticket:
        """A new request: its ticket, placed at once if it can be. Raises Overloaded."""
        line = self._lines.setdefault(request.model, WaitingLine(self._settings))
        ticket = line.add(request, now)
        try:
            await self._pump_line(line, now, until=ticket)
        except BaseException:
            self.leave(ticket)
            raise
        if ticket.placed is None:
            self._check_bounds(line, ticket, now)
        ticket.is_waiting = ticket.placed is None
        return ticket

    def _check_bounds(self, line: WaitingLine, ticket: Ticket, now: float) -> None:
        """Raises Overloaded, and the ticket leaves, when there are too many before it.

        It is told to come back when they are gone: until then they keep the workers busy.
        """
        tenant, limits = ticket.request.tenant, self._settings
        of_tenant = sum(line.num_waiting_of(tenant) for line in self._lines.values())
        if self.num_waiting >= limits.max_queued:
            what = f"{limits.max_queued} requests already wait for a worker"
        elif tenant not in UNBOUND_TENANTS and of_tenant >= limits.max_queued_per_tenant:
            what = f"{limits.max_queued_per_tenant} requests of the tenant {tenant} already wait"
        else:
            return
        line_s = min(limits.max_retry_after_s, line.pace.wait_s(line.position(ticket), now))
        self.leave(ticket)
        worker_s = self._placement.retry_after_s(
            ticket.request, self._workers_of(ticket.request.model)
        )
        raise Overloaded(what, retry_after_s=max(line_s, worker_s))

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

    async def pump(self, now: float) -> None:
        """Place whatever can be placed by now; their tickets have `placed` set."""
        for line in list(self._lines.values()):
            await self._pump_line(line, now)

    async def _pump_line(self, line: WaitingLine, now: float, until: Ticket | None = None) -> None:
        """Nothing is left to do once `until` has been placed by whoever came before."""
        async with line.lock:
            if until is None or until.placed is None:
                await self._place_in_order(line, now)

    async def _place_in_order(self, line: WaitingLine, now: float) -> None:
        passed: set[Ticket] = set()
        full: set[str] = set()
        last_group = None
        while (ticket := line.next(passed, full)) is not None:
            if last_group is not None and ticket.claim.group > last_group:
                break
            workers = self._workers_of(ticket.request.model)
            decision = await self._placement.place(ticket.request, workers, now)
            if decision.worker is not None:
                waited_s = max(0.0, now - ticket.waiting_since)
                ticket.answer(_placed(decision, decision.worker, waited_s))
                line.take(ticket)
                self.leave(ticket)
                if ticket.is_waiting:
                    line.pace.note(now)
            elif ticket.request.num_streams == 1:
                full.add(ticket.claim.tenant)
                last_group = ticket.claim.group
            else:
                passed.add(ticket)


def _placed(decision: Decision, worker: Worker, queued_s: float) -> Placed:
    return Placed(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        queued_s=queued_s,
        candidates=decision.candidates,
        reason=decision.reason,
        reservation=decision.reservation,
    )
