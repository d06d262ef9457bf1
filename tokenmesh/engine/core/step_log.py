"""The last steps of the engine, from which spans are built after a request's end."""

from collections import deque
from itertools import islice
from typing import NamedTuple


class TimelineStep(NamedTuple):
    end_ns: int
    batch_size: int
    num_tokens: int
    kv_used: int
    """Blocks in use."""


class StepLog:
    """The last `size` engine steps."""

    def __init__(self, size: int) -> None:
        self._steps: deque[TimelineStep] = deque(maxlen=size)

    def add(self, step: TimelineStep) -> None:
        """Remember a step; the oldest one is forgotten."""
        self._steps.append(step)

    def between(self, start_ns: int, end_ns: int, limit: int) -> list[TimelineStep]:
        """At most `limit` steps that ended in [start_ns, end_ns], evenly thinned, oldest first."""
        found = []
        for step in reversed(self._steps):
            if step.end_ns < start_ns:
                break
            if step.end_ns <= end_ns:
                found.append(step)
        found.reverse()
        stride = -(-len(found) // limit) if found else 1
        return list(islice(found, 0, None, stride))
