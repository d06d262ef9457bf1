"""The line of requests that no worker has room for: by priority, then by arrival."""

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


class WaitingLine:
    """Waiting requests of one model in the order in which they will be placed."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._tickets: list[Ticket] = []

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

    def remove(self, ticket: Ticket) -> None:
        """Leave the line; nothing happens when the ticket already left."""
        index = bisect.bisect_left(self._tickets, ticket)
        if index < len(self._tickets) and self._tickets[index] is ticket:
            del self._tickets[index]

    def position(self, ticket: Ticket) -> int:
        """How many are served before this one."""
        return bisect.bisect_left(self._tickets, ticket)
