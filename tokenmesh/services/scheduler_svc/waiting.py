"""The line of requests of one model that no worker has room for, each tenant in its turn."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

from tokenmesh.services.scheduler_svc.fair_queue import Claim, FairQueue
from tokenmesh.services.scheduler_svc.pace import Pace
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.messages.place import Place, Placed
from tokenmesh.shared.tenant_share import bounded_weight


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `placed` is filled in by whoever pumps the line."""

    claim: Claim
    request: Place
    waiting_since: float
    placed: Placed | None = None
    is_waiting: bool = False
    """It was tried once and found no room."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is placed."""

    def answer(self, placed: Placed) -> None:
        """A worker was found."""
        self.placed = placed
        self.woken.set()


class WaitingLine:
    """Waiting requests of one model in the order in which they will be placed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._arrivals = count()
        self._queue = FairQueue(settings.fair_quantum_tokens)
        self._tickets: dict[Claim, Ticket] = {}
        self.pace = Pace()
        """Of those that had to wait."""
        self.lock = asyncio.Lock()
        """Held by whoever places from this line."""

    @property
    def num_waiting(self) -> int:
        """Those that were tried and found no room."""
        return sum(ticket.is_waiting for ticket in self._tickets.values())

    def num_waiting_of(self, tenant: str) -> int:
        """Of these, a tenant's."""
        waiting = (ticket for ticket in self._tickets.values() if ticket.is_waiting)
        return sum(ticket.claim.tenant == tenant for ticket in waiting)

    def __len__(self) -> int:
        return len(self._tickets)

    def next(self, passed: Collection[Ticket], full: Collection[str]) -> Ticket | None:
        """Whose turn it is, but for those that were passed, and for tenants without room."""
        claim = self._queue.next({ticket.claim for ticket in passed}, full)
        return self._tickets[claim] if claim is not None else None

    def add(self, request: Place, now: float) -> Ticket:
        """Join the line."""
        claim = self._claim(request)
        ticket = self._tickets[claim] = Ticket(claim, request, now)
        self._queue.add(claim)
        return ticket

    def take(self, ticket: Ticket) -> None:
        """It was its turn; nothing happens when the ticket already left."""
        if self._leave(ticket):
            self._queue.take(ticket.claim)

    def remove(self, ticket: Ticket) -> None:
        """Leave the line; nothing happens when the ticket already left."""
        if self._leave(ticket):
            self._queue.remove(ticket.claim)

    def _leave(self, ticket: Ticket) -> bool:
        """Whether it was here: a ticket of an earlier line may have an equal claim."""
        is_here = self._tickets.get(ticket.claim) is ticket
        if is_here:
            del self._tickets[ticket.claim]
        return is_here

    def position(self, ticket: Ticket) -> int:
        """About how many are served before this one."""
        return self._queue.ahead(ticket.claim) if ticket.claim in self._tickets else 0

    def _claim(self, request: Place) -> Claim:
        """What a message says is bounded here: it may come from anywhere on the bus."""
        output = min(request.max_tokens, self._settings.fair_output_tokens)
        return Claim(
            group=request.tenant_priority,
            tenant=request.tenant,
            weight=bounded_weight(request.weight),
            order=(request.priority, next(self._arrivals)),
            cost=max(1, request.num_tokens + output * request.num_streams),
        )
