"""Context: what a handler may know and do about the message it handles."""

from tokenmesh.shared.bus.base import Bus, Envelope
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.messages import Queued


class Context:
    """One message's surroundings; valid until its handler returns."""

    __slots__ = ("_bus", "_envelope", "deadline_s")

    def __init__(self, bus: Bus, envelope: Envelope, deadline_s: float) -> None:
        self._bus = bus
        self._envelope = envelope
        self.deadline_s = deadline_s
        """Absolute, wall clock; the handler is cancelled when it passes."""

    @property
    def reply_to(self) -> str | None:
        """Where the answer will go; None when nobody waits."""
        return self._envelope.reply_to

    @property
    def traceparent(self) -> str | None:
        """The sender's span."""
        return self._envelope.headers.traceparent

    @property
    def subject(self) -> str:
        """Where the message arrived."""
        return self._envelope.subject

    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline_s - now_s())

    async def interim(self, message: Queued) -> None:
        """Tell the waiting caller that the answer is still to come."""
        await self._bus.reply(self._envelope, message)
