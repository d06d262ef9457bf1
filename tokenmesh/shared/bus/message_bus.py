"""The bus: messages, deadlines and answers on top of a link that carries bytes.

One inbox serves all questions of the process: a subscription for each would double the round trip.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

from tokenmesh.shared import codec
from tokenmesh.shared.bus.answers import Answers
from tokenmesh.shared.bus.base import (
    Bus,
    Envelope,
    Headers,
    RawAnswer,
    RawReceiver,
    Receiver,
    Subscription,
)
from tokenmesh.shared.bus.complaints import RateLimitedLog
from tokenmesh.shared.bus.headers import pack, unpack
from tokenmesh.shared.bus.link import Link, Packet
from tokenmesh.shared.bus.raw_questions import NO_RESPONDERS, STATUS, RawQuestions
from tokenmesh.shared.bus.sender_clocks import SenderClocks, bounded
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.bus import BusSettings
from tokenmesh.shared.errors import (
    BusLost,
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

_HEADER_ROOM_BYTES: Final = 4096
"""The server counts headers into its max_payload."""
_MAX_UNREAD_ANSWERS: Final = 64
"""Of one conversation; only keep-alives can be more than one, and a newer one says it all."""

_Answer = asyncio.Future[bytes | None]


class MessageBus(Bus):
    """A `Bus` over a `Link`."""

    def __init__(self, link: Link, settings: BusSettings, complaints: RateLimitedLog) -> None:
        self._link = link
        self._settings = settings
        self._complaints = complaints
        self._answers: Answers[bytes] = Answers(link.new_inbox(), settings.max_inflight)
        self._clocks = SenderClocks()
        self.raw = RawQuestions(link, settings.max_inflight)
        """For what answers in another protocol than ours: JetStream."""
        self.on_late: Callable[[Message], None] | None = None
        """Told every answer that nobody waits for any more; must be quick and must not raise."""

    async def start(self) -> None:
        """Listen on the inbox; once, after the link is open."""
        await self._link.subscribe(self._answers.subject, self._on_answer, None)
        await self.raw.start()
        await self._link.flush()
        if self.max_message_bytes < self._settings.max_message_bytes:
            logger.warning(
                "messages are limited to %d bytes by the NATS server, below bus.max_message_bytes",
                self.max_message_bytes,
            )

    @property
    def counts(self) -> Mapping[str, int]:
        """What went wrong so far, by kind: undecodable, slow consumer, disconnected, ..."""
        return self._complaints.counts

    def on_complaint(self, told: Callable[[str], None]) -> None:
        """Call `told` with the kind of everything that goes wrong from now on."""
        self._complaints.on_note = told

    @property
    def is_connected(self) -> bool:
        """Whether the server can be talked to right now."""
        return self._link.is_connected

    @property
    def max_message_bytes(self) -> int:
        """The configured limit, or less where the server would refuse earlier."""
        server_bytes = self._link.max_payload_bytes - _HEADER_ROOM_BYTES
        return min(self._settings.max_message_bytes, server_bytes)

    async def wait_lost(self) -> None:
        """Return when the connection has ended for good."""
        await self._link.wait_lost()

    async def request(
        self, subject: str, message: Message, *, deadline_s: float, retries: int = 0
    ) -> Message:
        """See `Bus.request`."""
        data = self._encode(message)
        for retry in range(1, retries + 1):
            try:
                return await self._ask(subject, data, deadline_s)
            except NoResponders:
                pause_s = self._settings.retry_pause_s * retry
                if now_s() + pause_s >= deadline_s:
                    raise
                await asyncio.sleep(pause_s)
        return await self._ask(subject, data, deadline_s)

    async def _ask(self, subject: str, data: bytes, deadline_s: float) -> Message:
        remaining_s = deadline_s - now_s()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"no time left to ask {subject}")
        loop = asyncio.get_running_loop()
        answer: _Answer = loop.create_future()
        reply_to = self._answers.open(partial(_resolve, answer))
        timer = loop.call_later(remaining_s, self._expire, answer, subject)
        try:
            await self._link.send(subject, data, _question_headers(deadline_s), reply_to)
            return self._read_answer(subject, await answer)
        finally:
            timer.cancel()
            self._answers.close(reply_to)

    async def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        """See `Bus.converse`."""
        data = self._encode(message)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD_ANSWERS)
        reply_to = self._answers.open(partial(_put_latest, queue))
        try:
            await self._link.send(subject, data, _question_headers(deadline_s), reply_to)
            while True:
                try:
                    async with asyncio.timeout(min(idle_s, deadline_s - now_s())):
                        received = await queue.get()
                except TimeoutError as error:
                    raise self._silence(subject) from error
                answer = self._read_answer(subject, received)
                yield answer
                if not isinstance(answer, Queued):
                    return
        finally:
            self._answers.close(reply_to)

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        """See `Bus.publish`."""
        packed = None if headers is None else pack(headers)
        await self._link.send(subject, self._encode(message), packed)

    async def publish_raw(self, subject: str, data: bytes) -> None:
        """See `Bus.publish_raw`."""
        await self._link.send(subject, data, None)

    async def reply(self, envelope: Envelope, message: Message) -> None:
        """See `Bus.reply`."""
        if envelope.reply_to is not None:
            await self._link.send(envelope.reply_to, self._encode(message), None)

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Subscription:
        """See `Bus.subscribe`."""

        async def on_packet(packet: Packet) -> None:
            try:
                envelope = self._open_envelope(packet)
            except ProtocolError as error:
                self._complaints.note("undecodable", f"{error} on {packet.subject}")
                if packet.reply:
                    await self._refuse(packet.reply, error)
                return
            try:
                await receiver(envelope)
            except ProtocolError as error:
                self._complaints.note("nonsense", f"{error} on {packet.subject}")

        return await self._link.subscribe(subject, on_packet, queue)

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Subscription:
        """See `Bus.subscribe_raw`."""

        async def on_packet(packet: Packet) -> None:
            try:
                await receiver(packet.subject, packet.data)
            except ProtocolError as error:
                self._complaints.note("nonsense", f"{error} on {packet.subject}")

        return await self._link.subscribe(subject, on_packet, None)

    async def answer_raw(self, subject: str, answer: RawAnswer) -> Subscription:
        """See `Bus.answer_raw`."""

        async def on_packet(packet: Packet) -> None:
            if packet.reply:
                await self._link.send(packet.reply, answer(), None)

        return await self._link.subscribe(subject, on_packet, None)

    async def flush(self) -> None:
        """See `Bus.flush`."""
        await self._link.flush()

    async def close(self) -> None:
        """See `Bus.close`."""
        await self._link.close()

    async def refuse_dropped(self, reply_to: str) -> None:
        """Answer a request that arrived faster than its subscription was read."""
        await self._refuse(reply_to, Overloaded("too many messages wait to be received"))

    async def _refuse(self, reply_to: str, error: TokenMeshError) -> None:
        try:
            await self._link.send(reply_to, self._encode(to_failed(error)), None)
        except TokenMeshError as lost:
            self._complaints.note("unanswered", str(lost))

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
        """The deadline as the sender meant it, though its clock may be minutes off."""
        deadline_s, sent_s = headers.deadline_s, headers.sent_s
        if deadline_s is None:
            return headers
        wall_s = now_s()
        if sent_s is not None and reply_to:
            # a connection has one inbox
            sender = reply_to.rpartition(".")[0]
            offset_s = self._clocks.offset_s(sender, sent_s, wall_s, monotonic_s())
            deadline_s += offset_s
            if abs(offset_s) > self._settings.clock_skew_s and self._clocks.is_news(sender):
                self._complaints.note("clock skew", f"{offset_s:+.1f} s to who asks as {sender}")
        return Headers(bounded(deadline_s, wall_s), headers.traceparent)

    async def _on_answer(self, packet: Packet) -> None:
        headers = packet.headers
        nobody = headers is not None and headers.get(STATUS) == NO_RESPONDERS
        data = None if nobody else packet.data
        if not self._answers.deliver(packet.subject, data) and data is not None:
            self._note_late(packet.subject, data)

    def _note_late(self, subject: str, data: bytes) -> None:
        if self.on_late is None:
            return
        try:
            self.on_late(codec.decode(data, self._settings.max_message_bytes))
        except ProtocolError as error:
            self._complaints.note("undecodable", f"{error} on {subject}")

    def _read_answer(self, subject: str, data: bytes | None) -> Message:
        if data is None:
            raise NoResponders(f"nobody listens on {subject}")
        answer = codec.decode(data, self._settings.max_message_bytes)
        if isinstance(answer, Failed):
            raise from_failed(answer)
        return answer

    def _silence(self, subject: str) -> TokenMeshError:
        if self._link.is_connected:
            return DeadlineExceeded(f"no answer from {subject} in time")
        return BusLost(f"the connection to NATS is down, no answer from {subject}")

    def _expire(self, answer: _Answer, subject: str) -> None:
        if not answer.done():
            answer.set_exception(self._silence(subject))


def _question_headers(deadline_s: float) -> dict[str, str]:
    return pack(Headers(deadline_s, current_traceparent(), now_s()))


def _resolve(answer: _Answer, data: bytes | None) -> None:
    if not answer.done():
        answer.set_result(data)


def _put_latest(queue: asyncio.Queue[bytes | None], data: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(data)
