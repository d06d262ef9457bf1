"""The only place that reads a clock.

`now_s` is wall time and may cross processes (deadlines, timestamps); `monotonic_s` never may.
"""

import time


def now_s() -> float:
    """Seconds since the epoch, wall clock."""
    return time.time()


def now_ns() -> int:
    """Nanoseconds since the epoch, wall clock: the unit of span timestamps."""
    return time.time_ns()


def monotonic_s() -> float:
    """Seconds from an arbitrary start; only differences within one process mean something."""
    return time.monotonic()


def perf_s() -> float:
    """The finest clock there is, for measuring a step or a benchmark."""
    return time.perf_counter()


def thread_cpu_s() -> float:
    """CPU time that this thread has used: not that of a process which stands still."""
    return time.thread_time()


def sleep_s(seconds: float) -> None:
    """Block the thread; nothing for an event loop."""
    time.sleep(seconds)
