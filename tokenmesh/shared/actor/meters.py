"""Counts what an actor did, twice: for Prometheus, and as plain numbers for NATS micro."""

from functools import lru_cache

import msgspec

from tokenmesh.shared.messages import Failed, Message
from tokenmesh.shared.metrics import Metrics

_OK = "ok"
_MAX_CHILDREN = 64
"""Message types of one actor, or error codes: both are few and ours."""


class ActorCounts(msgspec.Struct):
    """Since the process started."""

    received: int = 0
    answered: int = 0
    failed: int = 0
    """The answers that were Failed."""
    refused: int = 0
    """The failed requests that found the mailbox full."""
    unsent: int = 0
    """Answers that the bus would not take."""
    busy_s: float = 0.0
    """Time in handlers, summed over all that ran side by side."""
    last_error: str = ""


class ActorMeters:
    """The counts of one actor and its part of the metrics."""

    def __init__(self, actor: str, metrics: Metrics) -> None:
        self.counts = ActorCounts()
        # prometheus_client takes longer to find a child than to use it.
        self._seconds_of = lru_cache(_MAX_CHILDREN)(
            lambda message: metrics.histogram("actor_seconds", actor=actor, message=message)
        )
        self._count_of = lru_cache(_MAX_CHILDREN)(
            lambda outcome: metrics.counter("actor_messages", actor=actor, outcome=outcome)
        )

    def note_handled(self, message: str, seconds: float) -> None:
        """A handler has ended, well or not."""
        self.counts.busy_s += seconds
        self._seconds_of(message).observe(seconds)

    def note_answer(self, answer: Message) -> None:
        """This is what will be sent."""
        outcome = _OK
        if isinstance(answer, Failed):
            outcome = answer.code
            self.counts.failed += 1
            self.counts.last_error = f"{answer.code}: {answer.message}"
        self._count_of(outcome).inc()
