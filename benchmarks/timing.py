"""Seconds of one call, on a CPU or a GPU, with caches emptied before each."""

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
        """Events around each call; the flush keeps the device busy while the call is queued."""
        count = int(self._seconds / self.once(call))
        pairs = []
        for _ in range(min(max(count, _MIN_CALLS), _MAX_CALLS)):
            pair = (_event(), _event())
            self._flush.zero_()
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(end) / 1e3 for start, end in pairs))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
