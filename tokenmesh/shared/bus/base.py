"""The interface of the message bus that services use; `bus/message_bus.py` implements it.

Code above the bus sees decoded messages and `Headers`. Bytes, the syntax of subjects and
reconnects stay below.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.messages import Message, Tokens


@dataclass(frozen=True, slots=True)
class Headers:
    """Metadata that is sent with every message."""

    deadline_s: float | None = None
    """Absolute, wall clock (`clock.now_s`); in a received message by the receiver's clock."""
    traceparent: str | None = None
    sent_s: float | None = None
    """When it was sent, by the sender's clock; None in a received message."""
    alone: str | None = None
    """The name of a turn in which the receiver works on nothing else; None: it may."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message, its headers, and the subject of its answer (None: no answer expected)."""

    subject: str
    message: Message | Tokens
    headers: Headers
    reply_to: str | None = None


Receiver = Callable[[Envelope], Awaitable[None]]
RawReceiver = Callable[[str, bytes], Awaitable[None]]
RawAnswer = Callable[[], bytes]


class Subscription(Protocol):
    async def stop(self) -> None:
        """Receive nothing new; messages that were already received are still handed over."""


class Bus(Protocol):
    """A connection to the mesh. Every method raises BusLost when the server stays unreachable."""

    @property
    def max_message_bytes(self) -> int:
        """The largest encoded message; a larger one is refused before it is sent."""

    async def request(
        self,
        subject: str,
        message: Message,
        *,
        deadline_s: float,
        retries: int = 0,
        alone: str | None = None,
    ) -> Message:
        """Send, again up to `retries` times after NoResponders, and await the one final answer.

        `alone`: as in `Headers`. Raises NoResponders, DeadlineExceeded, the error of a `Failed`
        answer, ProtocolError for undecodable bytes, PayloadTooLarge before sending.
        """

    def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        """Send and yield every answer up to and including the first that is not `Queued`.

        Raises DeadlineExceeded also when nothing arrives for `idle_s` seconds.
        """

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        """Send without an answer."""

    async def publish_raw(self, subject: str, data: bytes) -> None:
        """Send bytes that are not a Message (finished spans)."""

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Subscription:
        """Hand each message to `receiver`, one at a time in order of arrival.

        A receiver must return quickly (put into a mailbox). Undecodable messages are counted,
        logged once a minute, answered with Failed(protocol_error) and not handed over. When a
        receiver raises ProtocolError, the message is counted and logged in the same way.
        """

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Subscription:
        """Hand over undecoded bytes; a receiver that raises ProtocolError as in `subscribe`."""

    async def answer_raw(self, subject: str, answer: RawAnswer) -> Subscription:
        """Answer every request on `subject` with bytes that are not a Message (NATS micro)."""

    async def reply(self, envelope: Envelope, message: Message) -> None:
        """Answer a received message; does nothing when no answer is expected."""

    async def flush(self) -> None:
        """Return when the server has received everything that was sent so far."""

    async def close(self) -> None:
        """Drain subscriptions and disconnect."""


class RateLimitedLog:
    """Counts problems by kind; logs each kind at most once an interval."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float,
        clock: Callable[[], float] = monotonic_s,
        on_problem: Callable[[str], None] = lambda _kind: None,
    ) -> None:
        """`on_problem` is called with the kind of every problem."""
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._on_problem = on_problem
        self._logged_at: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, detail: str) -> None:
        """Count a problem of `kind`; log it with `detail` unless one was logged recently."""
        self.counts[kind] += 1
        self._on_problem(kind)
        now = self._clock()
        last = self._logged_at.get(kind)
        if last is None or now - last >= self._interval_s:
            self._logged_at[kind] = now
            self._logger.warning("%s (%d so far): %s", kind, self.counts[kind], detail)
