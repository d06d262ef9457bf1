"""LoopLag: how late the event loop of this process is, measured by the loop itself.

A timer that goes off every so often observes by how much it was late: what holds the loop, or keeps
the process from running, shows there.
"""

import asyncio

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics


class LoopLag:
    """Measures from its creation, in a running loop, until `stop`."""

    def __init__(self, metrics: Metrics, interval_s: float) -> None:
        self._observe = metrics.histogram("event_loop_lag_seconds").observe
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._start()

    def stop(self) -> None:
        """Measure no more."""
        self._timer.cancel()

    def _start(self) -> None:
        self._due_s = monotonic_s() + self._interval_s
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        self._observe(max(0.0, monotonic_s() - self._due_s))
        self._start()
