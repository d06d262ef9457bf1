"""The line of requests that no worker has room for: by priority, then by arrival."""

import asyncio
import bisect
from dataclasses import dataclass, field
from itertools import count

from tokenmesh.shared.messages.place import Place, Placed


@dataclass(order=True, slots=True)
class Ticket:
    """One waiting request. `placed` is filled in by whoever pumps the line."""

    priority: int
    arrival: int
    request: Place = field(compare=False)
    waiting_since: float = field(compare=False)
    placed: Placed | None = field(default=None, compare=False)
    is_waiting: bool = field(default=False, compare=False)
    """It was tried once and found no room."""
    woken: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set when it is placed."""

    def answer(self, placed: Placed) -> None:
        """A worker was found."""
        self.placed = placed
        self.woken.set()


class WaitingLine:
    """Waiting requests of one model in the order in which they will be placed."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._tickets: list[Ticket] = []
        self.lock = asyncio.Lock()
        """Held by whoever places from this line."""

    @property
    def num_waiting(self) -> int:
        """Those that were tried and found no room."""
        return sum(ticket.is_waiting for ticket in self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def in_order(self) -> list[Ticket]:
        """A copy, first to be served first."""
        return list(self._tickets)

    def add(self, request: Place, now: float) -> Ticket:
        """Join the line."""
        ticket = Ticket(request.priority, next(self._arrivals), request, now)
        bisect.insort(self._tickets, ticket)
        return ticket

    def holds(self, ticket: Ticket) -> bool:
        """Whether it has not left."""
        index = bisect.bisect_left(self._tickets, ticket)
        return index < len(self._tickets) and self._tickets[index] is ticket

    def remove(self, ticket: Ticket) -> None:
        """Leave the line; nothing happens when the ticket already left."""
        if self.holds(ticket):
            del self._tickets[bisect.bisect_left(self._tickets, ticket)]

    def position(self, ticket: Ticket) -> int:
        """How many are served before this one."""
        return bisect.bisect_left(self._tickets, ticket)
