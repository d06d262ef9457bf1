"""Seconds of one call, on a CPU or a GPU, with caches emptied before each."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import torch

_FLUSH_BYTES: Final = 256 << 20
"""More than any last-level cache here: what a call reads comes from memory, as weights and keys of
a real step do."""
_MAX_CALLS: Final = 200
_MIN_CALLS: Final = 3
_MAX_PASSES: Final = 100
"""Over the memory before one call."""


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._flush = torch.empty(_FLUSH_BYTES // 4, device=device)

    def measure(self, call: Callable[[], object]) -> float:
        """The median call, after one to warm up; as many as fit the time, 3 at least."""
        call()
        if self._device.type == "cuda":
            return self._measure_cuda(call)
        times: list[float] = []
        until_s = time.perf_counter() + self._seconds
        while len(times) < _MIN_CALLS or (
            len(times) < _MAX_CALLS and time.perf_counter() < until_s
        ):
            self._flush.fill_(0.0)
            started_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - started_s)
        return median(times)

    def once(self, call: Callable[[], object]) -> float:
        """One call: for what is slow and only looked at."""
        self._flush.fill_(0.0)
        self._wait()
        started_s = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _measure_cuda(self, call: Callable[[], object]) -> float:
        """Events around each call, which the device finds queued when it comes to it."""
        passes = covering_passes(self._queueing_s(call), self.once(self._read))
        count = int(self._seconds / (self.once(call) + passes * self.once(self._read)))
        pairs = []
        for _ in range(min(max(count, _MIN_CALLS), _MAX_CALLS)):
            pair = (_event(), _event())
            for _ in range(passes):
                self._read()
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(end) / 1e3 for start, end in pairs))

    def _read(self) -> None:
        """Empty the caches by reading: written lines would go to memory while a call is timed."""
        self._flush.amax()

    def _queueing_s(self, call: Callable[[], object]) -> float:
        """Measure how long the host takes to launch a call."""
        times = []
        for _ in range(_MIN_CALLS):
            self._wait()
            started_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - started_s)
        self._wait()
        return median(times)


def covering_passes(queueing_s: float, pass_s: float) -> int:
    """Passes over the memory that keep a device busy while the host queues a call, twice over.

    A decode step in a graph costs the host nothing; outside of one a short kernel ends long before
    the host has launched the next, and the host would be timed.
    """
    return min(max(1, math.ceil(2 * queueing_s / pass_s)), _MAX_PASSES)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
