"""Breaker: leaves out a worker that fails streams again and again, and tries it now and then.

What one gateway has seen itself; no I/O. Being left out is a wish: a scheduler without any other
worker still takes it.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import WorkerId

_AT_ONCE: Final = frozenset({"worker gone", "worker hung"})
"""Seen by a ping: no stream has to find out by itself."""
_HARMLESS: Final = frozenset({"draining", "refused"})
"""A worker that hands over or is full does as it should."""


@dataclass(slots=True)
class _Record:
    """`score` is worth half after each half-life."""

    score: float = 0.0
    scored_s: float = 0.0
    pause_s: float = 0.0
    """0: closed."""
    open_until_s: float = 0.0
    probe_s: float = 0.0
    """When the next stream may go there to see: one in every pause, the first when it is over."""


class Breaker:
    """The failures of at most `breaker_workers` workers, those of long ago forgotten first."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = monotonic_s) -> None:
        self._settings = settings
        self._clock = clock
        self._record_by_worker: OrderedDict[WorkerId, _Record] = OrderedDict()

    def __len__(self) -> int:
        """Workers that are left out or on probation."""
        return sum(record.pause_s > 0 for record in self._record_by_worker.values())

    def fail(self, worker_id: WorkerId, kind: str) -> None:
        """A worker has lost a stream; `kind` as in `Session.lost_kind`."""
        if kind in _HARMLESS:
            return
        now, limits = self._clock(), self._settings
        record = self._record_by_worker.setdefault(worker_id, _Record(scored_s=now))
        self._record_by_worker.move_to_end(worker_id)
        age = (now - record.scored_s) / limits.breaker_half_life_s
        score = record.score * 0.5**age + 1.0
        record.score = limits.breaker_failures if kind in _AT_ONCE else score
        record.scored_s = now
        is_probed = record.pause_s > 0
        # Streams that ran there together fail together: that is one failure.
        if now >= record.open_until_s and (is_probed or record.score >= limits.breaker_failures):
            record.pause_s = min(record.pause_s * 2 or limits.breaker_s, limits.breaker_max_s)
            record.open_until_s = record.probe_s = now + record.pause_s
        if len(self._record_by_worker) > limits.breaker_workers:
            self._record_by_worker.popitem(last=False)

    def succeed(self, worker_id: WorkerId) -> None:
        """A stream has ended there as it should: the past counts no more."""
        self._record_by_worker.pop(worker_id, None)

    def left_out(self) -> list[WorkerId]:
        """Whom the next placement should not choose, the last one to fail first.

        A worker missing for once is being probed.
        """
        records = reversed(self._record_by_worker.items())
        return [each for each, record in records if self._is_open(record)]

    def _is_open(self, record: _Record) -> bool:
        now = self._clock()
        if record.pause_s > 0 and now >= record.probe_s:
            record.probe_s = now + record.pause_s
            return False
        return record.pause_s > 0
