"""The bus: messages, deadlines and answers on top of a connection that carries bytes.

One inbox serves all requests of the process: a subscription for each would double the round trip.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

from tokenmesh.shared import codec
from tokenmesh.shared.bus.base import (
    Bus,
    Envelope,
    Headers,
    RateLimitedLog,
    RawAnswer,
    RawReceiver,
    Receiver,
    Subscription,
)
from tokenmesh.shared.bus.headers import SenderClocks, bounded, pack, unpack
from tokenmesh.shared.bus.nats import NatsLink
from tokenmesh.shared.bus.nats_frames import Packet
from tokenmesh.shared.bus.requests import (
    PendingRequests,
    RawRequests,
    has_no_responders,
    silence,
)
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.mesh import BusSettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.messages import Failed, Message, Queued, Tokens
from tokenmesh.shared.messages.failed import from_failed, to_failed
from tokenmesh.shared.telemetry import current_traceparent

logger = logging.getLogger(__name__)

CLOCK_SKEW_S: Final = 1.0
"""Difference to another process's clock that is logged and counted. Deadlines are right whatever it
is."""
LOG_INTERVAL_S: Final = 60.0
"""Repeated problems of one kind are logged this often."""

_HEADER_ROOM_BYTES: Final = 4096
"""The server counts headers into its max_payload."""
_MAX_UNREAD_ANSWERS: Final = 64
"""Answers of one `converse` that may wait; only keep-alives can be more than one, and a newer one
replaces an older."""

_Answer = asyncio.Future[bytes | None]


async def connect(
    settings: BusSettings, name: str, on_problem: Callable[[str], None] = lambda _kind: None
) -> "MessageBus":
    """Open the connection; NATS monitoring shows `name`.

    `on_problem` is called with the kind of everything that goes wrong. Raises BusLost when no
    server answers within `connect_deadline_s`, ConfigError at once when the server refuses the
    credentials.
    """
    bus = MessageBus(settings, name, on_problem)
    await bus.open()
    return bus


class MessageBus(Bus):
    """A `Bus` on one NATS connection."""

    def __init__(self, settings: BusSettings, name: str, on_problem: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = RateLimitedLog(logger, LOG_INTERVAL_S, on_problem=on_problem)
        self._link = NatsLink(settings, name, self._log, self._refuse_dropped)
        inbox = self._link.new_inbox()
        self._pending: PendingRequests[bytes] = PendingRequests(inbox, settings.max_inflight)
        self._clocks = SenderClocks()
        self.raw = RawRequests(self._link, settings.max_inflight)
        """For JetStream, which has its own protocol."""
        self.on_late: Callable[[Message], None] | None = None
        """Called with every answer whose request is closed; must be quick and must not raise."""

    async def open(self) -> None:
        """Connect and listen on the inbox; see `connect` for the errors."""
        await self._link.open()
        await self._link.subscribe(self._pending.subject, self._on_answer, None)
        await self.raw.start()
        await self._link.flush()
        if self.max_message_bytes < self._settings.max_message_bytes:
            logger.warning(
                "messages are limited to %d bytes by the NATS server, below bus.max_message_bytes",
                self.max_message_bytes,
            )

    @property
    def counts(self) -> Mapping[str, int]:
        """Problems so far, by kind: undecodable, slow consumer, disconnected, ..."""
        return self._log.counts

    @property
    def is_connected(self) -> bool:
        """True while the server can be reached."""
        return self._link.is_connected

    @property
    def max_message_bytes(self) -> int:
        """The configured limit, or less where the server would refuse earlier."""
        server_bytes = self._link.max_payload_bytes - _HEADER_ROOM_BYTES
        return min(self._settings.max_message_bytes, server_bytes)

    async def wait_lost(self) -> None:
        """Return when the connection has ended and will not be opened again."""
        await self._link.wait_lost()

    async def request(
        self,
        subject: str,
        message: Message,
        *,
        deadline_s: float,
        retries: int = 0,
        alone: str | None = None,
    ) -> Message:
        data = self._encode(message)
        for retry in range(1, retries + 1):
            try:
                return await self._request_once(subject, data, deadline_s, alone)
            except NoResponders:
                pause_s = self._settings.retry_pause_s * retry
                if now_s() + pause_s >= deadline_s:
                    raise
                await asyncio.sleep(pause_s)
        return await self._request_once(subject, data, deadline_s, alone)

    async def _request_once(
        self, subject: str, data: bytes, deadline_s: float, alone: str | None
    ) -> Message:
        remaining_s = deadline_s - now_s()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no time left for a request on {subject}")
        loop = asyncio.get_running_loop()
        answer: _Answer = loop.create_future()
        reply_to = self._pending.open(partial(_resolve, answer))
        timer = loop.call_later(remaining_s, self._expire, answer, subject)
        try:
            await self._link.send(subject, data, _request_headers(deadline_s, alone), reply_to)
            return self._read_answer(subject, await answer)
        finally:
            timer.cancel()
            self._pending.close(reply_to)

    async def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        data = self._encode(message)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD_ANSWERS)
        reply_to = self._pending.open(partial(_put_latest, queue))
        try:
            await self._link.send(subject, data, _request_headers(deadline_s), reply_to)
            while True:
                try:
                    async with asyncio.timeout(min(idle_s, deadline_s - now_s())):
                        received = await queue.get()
                except TimeoutError as error:
                    raise silence(self._link, subject) from error
                answer = self._read_answer(subject, received)
                yield answer
                if not isinstance(answer, Queued):
                    return
        finally:
            self._pending.close(reply_to)

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        packed = None if headers is None else pack(headers)
        await self._link.send(subject, self._encode(message), packed)

    async def publish_raw(self, subject: str, data: bytes) -> None:
        await self._link.send(subject, data, None)

    async def reply(self, envelope: Envelope, message: Message) -> None:
        if envelope.reply_to is not None:
            await self._link.send(envelope.reply_to, self._encode(message), None)

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Subscription:

        async def on_packet(packet: Packet) -> None:
            try:
                envelope = self._open_envelope(packet)
            except ProtocolError as error:
                self._log.note("undecodable", f"{error} on {packet.subject}")
                if packet.reply:
                    await self._refuse(packet.reply, error)
                return
            try:
                await receiver(envelope)
            except ProtocolError as error:
                self._log.note("nonsense", f"{error} on {packet.subject}")

        return await self._link.subscribe(subject, on_packet, queue)

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Subscription:

        async def on_packet(packet: Packet) -> None:
            try:
                await receiver(packet.subject, packet.data)
            except ProtocolError as error:
                self._log.note("nonsense", f"{error} on {packet.subject}")

        return await self._link.subscribe(subject, on_packet, None)

    async def answer_raw(self, subject: str, answer: RawAnswer) -> Subscription:

        async def on_packet(packet: Packet) -> None:
            if packet.reply:
                await self._link.send(packet.reply, answer(), None)

        return await self._link.subscribe(subject, on_packet, None)

    async def flush(self) -> None:
        await self._link.flush()

    async def close(self) -> None:
        await self._link.close()

    async def _refuse_dropped(self, reply_to: str) -> None:
        """Answer a request that arrived faster than its subscription was read; this is called by
        what reads the connection, which must not wait for a server that does not read."""
        error = Overloaded("too many messages wait to be received")
        if not self._link.offer(reply_to, self._encode(to_failed(error))):
            self._log.note("unanswered", str(error))

    async def _refuse(self, reply_to: str, error: TokenMeshError) -> None:
        try:
            await self._link.send(reply_to, self._encode(to_failed(error)), None)
        except TokenMeshError as lost:
            self._log.note("unanswered", str(lost))

    def _encode(self, message: Message | Tokens) -> bytes:
        return codec.encode(message, self.max_message_bytes)

    def _open_envelope(self, packet: Packet) -> Envelope:
        return Envelope(
            subject=packet.subject,
            message=codec.decode_any(packet.data, self._settings.max_message_bytes),
            headers=self._by_our_clock(unpack(packet.headers), packet.reply),
            reply_to=packet.reply or None,
        )

    def _by_our_clock(self, headers: Headers, reply_to: str) -> Headers:
        """The deadline by our clock; the sender's may be minutes off."""
        deadline_s, sent_s = headers.deadline_s, headers.sent_s
        if deadline_s is None:
            return headers
        wall_s = now_s()
        if sent_s is not None and reply_to:
            # a connection has one inbox
            sender = reply_to.rpartition(".")[0]
            offset_s = self._clocks.offset_s(sender, sent_s, wall_s, monotonic_s())
            deadline_s += offset_s
            if abs(offset_s) > CLOCK_SKEW_S and self._clocks.is_news(sender):
                self._log.note("clock skew", f"{offset_s:+.1f} s to sender {sender}")
        return Headers(bounded(deadline_s, wall_s), headers.traceparent, alone=headers.alone)

    async def _on_answer(self, packet: Packet) -> None:
        data = None if has_no_responders(packet) else packet.data
        if not self._pending.deliver(packet.subject, data) and data is not None:
            self._note_late(packet.subject, data)

    def _note_late(self, subject: str, data: bytes) -> None:
        if self.on_late is None:
            return
        try:
            self.on_late(codec.decode(data, self._settings.max_message_bytes))
        except ProtocolError as error:
            self._log.note("undecodable", f"{error} on {subject}")

    def _read_answer(self, subject: str, data: bytes | None) -> Message:
        if data is None:
            raise NoResponders(f"no process listens on {subject}")
        answer = codec.decode(data, self._settings.max_message_bytes)
        if isinstance(answer, Failed):
            raise from_failed(answer)
        return answer

    def _expire(self, answer: _Answer, subject: str) -> None:
        if not answer.done():
            answer.set_exception(silence(self._link, subject))


def _request_headers(deadline_s: float, alone: str | None = None) -> dict[str, str]:
    return pack(Headers(deadline_s, current_traceparent(), now_s(), alone))


def _resolve(answer: _Answer, data: bytes | None) -> None:
    if not answer.done():
        answer.set_result(data)


def _put_latest(queue: asyncio.Queue[bytes | None], data: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(data)
