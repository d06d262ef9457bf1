"""What goes wrong on a connection: counted always, logged seldom."""

import logging
from collections import Counter
from collections.abc import Callable

from tokenmesh.shared.clock import monotonic_s


class RateLimitedLog:
    """One counter a kind, and at most one log line a kind and interval."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.on_note: Callable[[str], None] | None = None
        """Told every kind as it happens."""

    def note(self, kind: str, detail: str) -> None:
        """Count one of `kind`; log it with `detail` unless that was done a moment ago."""
        self.counts[kind] += 1
        if self.on_note is not None:
            self.on_note(kind)
        now = self._clock()
        last = self._logged_at.get(kind)
        if last is None or now - last >= self._interval_s:
            self._logged_at[kind] = now
            self._logger.warning("%s (%d so far): %s", kind, self.counts[kind], detail)
