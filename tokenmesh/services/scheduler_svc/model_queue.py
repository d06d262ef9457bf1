"""ModelQueue: the waiting requests of one model; tenants take turns."""

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from tokenmesh.services.scheduler_svc.deficit_round_robin import DeficitRoundRobin, QueueEntry
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.messages.place import Place, Placed
from tokenmesh.shared.tenant_share import bounded_weight

FAIR_QUANTUM_TOKENS: Final = 32
"""Tokens that a waiting tenant of weight 1 may take in a turn."""
FAIR_OUTPUT_TOKENS: Final = 512
"""Output that a turn is charged with at most: max_tokens is seldom used up."""

_MAX_DEPARTURES: Final = 128
"""The rate of a queue is that of its last requests: an older one says nothing about now."""


class Departures:
    """The times (monotonic seconds) at which the last waiting requests of a queue were placed."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_MAX_DEPARTURES)

    def record(self, now: float) -> None:
        """Count a waiting request that was placed."""
        self._times.append(now)

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Estimated seconds until `num_ahead` requests are placed; 0 while the rate is unknown."""
        if not self._times or now <= self._times[0]:
            return 0.0
        return num_ahead * (now - self._times[0]) / len(self._times)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request in a queue, until it is placed or removed."""

    entry: QueueEntry
    request: Place
    since_s: float
    placed: Placed | None = None
    was_tried: bool = False
    """True where no worker had room when it arrived."""
    is_placed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_placed(self, placed: Placed) -> None:
        """Record the placement and wake the handler of the request."""
        self.placed = placed
        self.is_placed.set()


class ModelQueue:
    """Waiting requests of one model in the order in which they will be placed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._arrivals = count()
        self._order = DeficitRoundRobin(FAIR_QUANTUM_TOKENS)
        self._waiting: dict[QueueEntry, WaitingRequest] = {}
        self.departures = Departures()
        self.lock = asyncio.Lock()
        """Held while placing from this queue."""

    @property
    def num_waiting(self) -> int:
        """Requests that were tried and found no room."""
        return sum(waiting.was_tried for waiting in self._waiting.values())

    def num_waiting_of(self, tenant: str) -> int:
        """Those of a tenant."""
        tried = (waiting for waiting in self._waiting.values() if waiting.was_tried)
        return sum(waiting.entry.tenant == tenant for waiting in tried)

    def __len__(self) -> int:
        return len(self._waiting)

    def next(
        self, passed: Collection[WaitingRequest], full: Collection[str]
    ) -> WaitingRequest | None:
        """The next request in turn, except those `passed` and those of the tenants `full`."""
        entry = self._order.next({waiting.entry for waiting in passed}, full)
        return self._waiting[entry] if entry is not None else None

    def add(self, request: Place, now: float) -> WaitingRequest:
        entry = self._entry(request)
        waiting = self._waiting[entry] = WaitingRequest(entry, request, now)
        self._order.add(entry)
        return waiting

    def take(self, waiting: WaitingRequest) -> None:
        """Remove a request that was placed; its tenant pays for the turn."""
        if self._forget(waiting):
            self._order.take(waiting.entry)

    def remove(self, waiting: WaitingRequest) -> None:
        """Remove a request that was not placed; no error if already removed."""
        if self._forget(waiting):
            self._order.remove(waiting.entry)

    def _forget(self, waiting: WaitingRequest) -> bool:
        """Remove it; False where it is in another queue, which may have an equal entry."""
        is_here = self._waiting.get(waiting.entry) is waiting
        if is_here:
            del self._waiting[waiting.entry]
        return is_here

    def position(self, waiting: WaitingRequest) -> int:
        """About how many requests are placed before this one."""
        return self._order.ahead(waiting.entry) if waiting.entry in self._waiting else 0

    def _entry(self, request: Place) -> QueueEntry:
        """Bounds the values of the message: any process on the bus may have sent it."""
        output = min(request.max_tokens, FAIR_OUTPUT_TOKENS)
        return QueueEntry(
            group=request.tenant_priority,
            tenant=request.tenant,
            weight=bounded_weight(request.weight),
            order=(request.priority, next(self._arrivals)),
            cost=max(1, request.num_tokens + output * request.num_streams),
        )
