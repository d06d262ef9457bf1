"""The only place that reads a clock.

`now_s` may cross processes (deadlines), `wall_s` is for display, `monotonic_s` is for one process.
"""

import time
from typing import Final

_EPOCH_S: Final = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the epoch by the wall clock of this process's start: setting the clock moves
    no deadline. Processes may differ; the bus makes up for that."""
    return _EPOCH_S + time.monotonic()


def wall_s() -> float:
    """Seconds since the epoch, wall clock as it is set now."""
    return time.time()


def now_ns() -> int:
    """Nanoseconds since the epoch, wall clock: the unit of span timestamps."""
    return time.time_ns()


def monotonic_s() -> float:
    """Seconds from an arbitrary start; only differences within one process mean something."""
    return time.monotonic()


def perf_s() -> float:
    """The clock of the highest resolution, for measuring a step or a benchmark."""
    return time.perf_counter()


def thread_cpu_s() -> float:
    """CPU time that this thread has used: not that of a suspended process."""
    return time.thread_time()


def process_cpu_s() -> float:
    """CPU time that all threads of this process have used."""
    return time.process_time()


def sleep_s(seconds: float) -> None:
    """Block the thread; not for an event loop."""
    time.sleep(seconds)
