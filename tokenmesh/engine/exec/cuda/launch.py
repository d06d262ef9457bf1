"""CudaLaunch: an in-flight step on the device."""

import threading
from collections.abc import Callable
from typing import Final, Self

from tokenmesh.engine.exec.compute_thread import Skipped
from tokenmesh.engine.exec.cuda.device import DeviceEvent
from tokenmesh.engine.plan import StepResult
from tokenmesh.shared.clock import monotonic_s

POLL_S: Final = 0.0001
"""Interval between queries of an event, which has no wait with a deadline."""


class CudaLaunch:
    def __init__(
        self, below: Self | None, event: DeviceEvent | None, read: Callable[[], StepResult]
    ) -> None:
        """below is the step before, unless its result was taken; `read` is called once.

        event is None when the step could not be launched; then `read` raises.
        """
        self._below = below
        self._event = event
        self._read: Callable[[], StepResult] | None = read
        self._result: StepResult | None = None
        self._error: Exception | None = None

    @property
    def is_taken(self) -> bool:
        """Return whether `result` was called."""
        return self._read is None

    @property
    def has_failed(self) -> bool:
        """Return whether it is known that `result` raises."""
        return self._event is None or self._error is not None

    def wait(self, timeout_s: float) -> bool:
        if self._event is None or self._read is None:
            return True
        end_s = monotonic_s() + timeout_s
        never = threading.Event()
        while not self._event.query():
            rest_s = end_s - monotonic_s()
            if rest_s <= 0:
                return False
            never.wait(min(POLL_S, rest_s))
        return True

    def result(self) -> StepResult:
        if self._read is not None:
            read, self._read = self._read, None
            below, self._below = self._below, None
            try:
                if self._event is not None:
                    self._event.synchronize()
                # read all the same: it gives the slot back
                self._result = read()
                if below is not None and below.has_failed:
                    raise Skipped("a step below failed")
            # raised below on every call
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
