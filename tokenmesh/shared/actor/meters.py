"""What an actor did, counted twice: for Prometheus, and as plain numbers for NATS micro."""

import msgspec

from tokenmesh.shared.messages import Failed, Message
from tokenmesh.shared.metrics import Metrics

_OK = "ok"


class ActorCounts(msgspec.Struct):
    """Since the process started."""

    received: int = 0
    answered: int = 0
    failed: int = 0
    """Of the answers: Failed."""
    refused: int = 0
    """Of the failed: because the mailbox was full."""
    unsent: int = 0
    """Answers that the bus would not take."""
    busy_s: float = 0.0
    """Time in handlers, summed over all that ran side by side."""
    last_error: str = ""


class ActorMeters:
    """The counts of one actor and its part of the metrics."""

    def __init__(self, actor: str, metrics: Metrics) -> None:
        self.counts = ActorCounts()
        self._actor = actor
        self._metrics = metrics

    def note_handled(self, message: str, seconds: float) -> None:
        """A handler has ended, well or not."""
        self.counts.busy_s += seconds
        self._metrics.histogram("actor_seconds", actor=self._actor, message=message).observe(
            seconds
        )

    def note_answer(self, answer: Message) -> None:
        """This is what will be sent."""
        outcome = _OK
        if isinstance(answer, Failed):
            outcome = answer.code
            self.counts.failed += 1
            self.counts.last_error = f"{answer.code}: {answer.message}"
        self._metrics.counter("actor_messages", actor=self._actor, outcome=outcome).inc()
