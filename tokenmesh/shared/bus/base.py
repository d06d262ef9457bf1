"""What the mesh needs from a message bus. `bus/nats.py` is the implementation.

Everything above the bus sees decoded messages and `Headers`; bytes, subjects' syntax and
reconnects stay below.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tokenmesh.shared.messages import Message, Tokens


@dataclass(frozen=True, slots=True)
class Headers:
    """What travels beside every message."""

    deadline_s: float | None = None
    """Absolute, wall clock (`clock.now_s`): the receiver's own in a received message."""
    traceparent: str | None = None
    sent_s: float | None = None
    """When it was sent, by the clock that the deadline is of; not in a received message."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message, its headers, and where an answer goes (None: nobody waits)."""

    subject: str
    message: Message | Tokens
    headers: Headers
    reply_to: str | None = None


Receiver = Callable[[Envelope], Awaitable[None]]
RawReceiver = Callable[[str, bytes], Awaitable[None]]
RawAnswer = Callable[[], bytes]


class Subscription(Protocol):
    """A live subscription."""

    async def stop(self) -> None:
        """Take nothing new; what was already received is still handed over."""


class Bus(Protocol):
    """A connection to the mesh. Every method raises BusLost when the server stays away."""

    @property
    def max_message_bytes(self) -> int:
        """Of an encoded message; a larger one is refused before it is sent."""

    async def request(
        self, subject: str, message: Message, *, deadline_s: float, retries: int = 0
    ) -> Message:
        """Send and await the one final answer.

        Asks again up to `retries` times after NoResponders, all within the deadline. Raises
        NoResponders at once when nobody listens, DeadlineExceeded, the error of a `Failed`
        answer, ProtocolError for undecodable bytes, PayloadTooLarge before sending.
        """

    def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        """Send and yield every answer up to and including the first that is not `Queued`.

        Raises DeadlineExceeded also when nothing comes for `idle_s` seconds.
        """

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        """Send without an answer."""

    async def publish_raw(self, subject: str, data: bytes) -> None:
        """Send bytes that are no Message (finished spans)."""

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Subscription:
        """Hand each message to `receiver`, one at a time in order of arrival.

        A receiver must return quickly (put into a mailbox). Undecodable messages are counted,
        logged once a minute, answered with Failed(protocol_error) and never reach it. A receiver
        that raises ProtocolError has the message counted and logged in the same way.
        """

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Subscription:
        """Hand over undecoded bytes; a receiver that raises ProtocolError as in `subscribe`."""

    async def answer_raw(self, subject: str, answer: RawAnswer) -> Subscription:
        """Answer every request on `subject` with bytes that are no Message (NATS micro)."""

    async def reply(self, envelope: Envelope, message: Message) -> None:
        """Answer a received message; does nothing when nobody waits."""

    async def flush(self) -> None:
        """Return when the server has everything that was sent so far."""

    async def close(self) -> None:
        """Drain subscriptions and disconnect."""
