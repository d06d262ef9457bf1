"""Reservations: what was placed on a worker since the beat that we judge it by."""

from collections import deque
from dataclasses import dataclass

from tokenmesh.shared.ids import WorkerId


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
        self._by_worker.setdefault(worker, deque()).append(reservation)

    def settle(self, worker: WorkerId, beat_at: float) -> None:
        """Drop what a beat received at `beat_at` already counts."""
        pending = self._by_worker.get(worker)
        while pending and pending[0].placed_at + self._settle_s <= beat_at:
            pending.popleft()
        if not pending:
            self._by_worker.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
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
