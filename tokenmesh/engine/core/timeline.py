"""Timelines of requests, the log of steps, and the measured speed of steps.

Nothing is recorded per decoded token: each engine step adds one entry to the `StepLog`, and a
request records only when it began and stopped decoding. Spans are built from both after its end.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

_KEPT_TOKENS: Final = 4096.0
"""Prefill tokens over which the rate forgets."""
_KEPT_STEPS: Final = 32.0
"""Decode steps over which the step time forgets."""


class Chunk(NamedTuple):
    start_ns: int
    end_ns: int
    num_tokens: int
    num_cached: int
    """Tokens skipped by the prefix hit that this chunk follows; 0 for later chunks."""
    batch_size: int


class TimelineStep(NamedTuple):
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


class RateMeter:
    """Exponentially forgetting means. Both are 0 before the first measurement."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second of prefill."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def expected_s(self, num_prefill: int, num_decode: int) -> float:
        """How long such a step takes, as far as that is known."""
        prefill_s = num_prefill * self._seconds / self._tokens if self._tokens > 0 else 0.0
        return prefill_s + (self.step_s if num_decode else 0.0)

    def note(self, duration_s: float, num_prefill: int, num_decode: int) -> None:
        """One step with so many prefill tokens and decoding streams."""
        if num_prefill == 0:
            weight = 1.0 / _KEPT_STEPS if self.step_s else 1.0
            self.step_s += weight * (duration_s - self.step_s)
            return
        # the decoding streams of a mixed step cost what they cost alone, as far as that is known
        share = num_prefill / (num_prefill + num_decode)
        prefill_s = max(duration_s - self.step_s, duration_s * share) if num_decode else duration_s
        keep = max(0.0, 1.0 - num_prefill / _KEPT_TOKENS)
        self._tokens = self._tokens * keep + num_prefill
        self._seconds = self._seconds * keep + prefill_s
