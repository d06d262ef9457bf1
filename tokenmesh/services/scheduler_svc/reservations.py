"""Reservations: what was placed on a worker since the beat that we judge it by."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.ids import WorkerId

_GONE_S: Final = 60.0
"""A worker that has not told of a placement for so long will not: beats come at least as often."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One placement that the worker's next beat will account for."""

    placed_at: float
    tokens: int
    streams: int
    tenant: str = ""


class Reservations:
    """A short queue for each worker. Times are monotonic seconds."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._by_worker: dict[WorkerId, deque[Reservation]] = {}

    def add(self, worker: WorkerId, reservation: Reservation) -> None:
        """Note a placement."""
        if worker not in self._by_worker:
            self._forget_gone(reservation.placed_at - _GONE_S)
            self._by_worker[worker] = deque()
        self._by_worker[worker].append(reservation)

    def settle(self, worker: WorkerId, beat_at: float) -> None:
        """Drop what a beat received at `beat_at` already counts."""
        pending = self._by_worker.get(worker)
        while pending and pending[0].placed_at + self._settle_s <= beat_at:
            pending.popleft()
        if not pending:
            self._by_worker.pop(worker, None)

    def tokens(self, worker: WorkerId) -> int:
        """Prompt tokens placed and not yet in a beat."""
        return sum(entry.tokens for entry in self._by_worker.get(worker, ()))

    def streams(self, worker: WorkerId) -> int:
        """Streams placed and not yet in a beat."""
        return sum(entry.streams for entry in self._by_worker.get(worker, ()))

    def streams_of(self, worker: WorkerId, tenant: str) -> int:
        """Of these, a tenant's."""
        entries = self._by_worker.get(worker, ())
        return sum(entry.streams for entry in entries if entry.tenant == tenant)

    def _forget_gone(self, before: float) -> None:
        gone = [name for name, all_of in self._by_worker.items() if all_of[-1].placed_at < before]
        for worker in gone:
            del self._by_worker[worker]
