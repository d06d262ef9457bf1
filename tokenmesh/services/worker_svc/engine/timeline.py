"""Timeline: when things happened to a request, in arrays small enough to keep for every one.

Nothing is recorded per decoded token: each engine step writes one entry into the `StepLog`, and a
request remembers only from when to when it decoded. Spans are built from both after its end.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class Chunk(NamedTuple):
    """One prefill chunk."""

    start_ns: int
    end_ns: int
    num_tokens: int
    num_cached: int
    """Tokens skipped by the prefix hit that this chunk follows; 0 for later chunks."""
    batch_size: int


class TimelineStep(NamedTuple):
    """One engine step."""

    end_ns: int
    batch_size: int
    num_tokens: int
    kv_used: int
    """Blocks in use."""


@dataclass(slots=True)
class Timeline:
    """Times are wall-clock nanoseconds; 0 means that it did not happen."""

    arrived_ns: int = 0
    grammar_ns: int = 0
    """When its grammar was there, where it had to wait for that."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    preempted_ns: list[int] = field(default_factory=list)


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
