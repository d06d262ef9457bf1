"""Requests that wait for answers: one inbox for the process, one token for each request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, TypeVar

from tokenmesh.shared.bus.nats import NatsLink
from tokenmesh.shared.bus.nats_frames import Packet
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import (
    BusLost,
    DeadlineExceeded,
    NoResponders,
    Overloaded,
    TokenMeshError,
)

AnswerT = TypeVar("AnswerT")

_STATUS: Final = "Status"
_NO_RESPONDERS: Final = "503"


class PendingRequests(Generic[AnswerT]):
    """Open requests by token. An answer to a request that was closed is dropped.

    A request's sink receives each answer, or None when the server reports that nothing is
    subscribed.
    """

    def __init__(self, prefix: str, limit: int) -> None:
        self._prefix: Final = prefix + "."
        self._limit: Final = limit
        self._sink_by_token: dict[str, Callable[[AnswerT | None], None]] = {}
        self._numbers = count()

    @property
    def subject(self) -> str:
        """The wildcard that covers every token."""
        return self._prefix + "*"

    def open(self, sink: Callable[[AnswerT | None], None]) -> str:
        """The reply subject of a new request. Raises Overloaded at the limit."""
        if len(self._sink_by_token) >= self._limit:
            raise Overloaded(f"{self._limit} requests of this process already wait for an answer")
        token = str(next(self._numbers))
        self._sink_by_token[token] = sink
        return self._prefix + token

    def close(self, reply_to: str) -> None:
        self._sink_by_token.pop(reply_to[len(self._prefix) :], None)

    def deliver(self, reply_to: str, answer: AnswerT | None) -> bool:
        """Hand an answer to its request; False when that is closed."""
        sink = self._sink_by_token.get(reply_to[len(self._prefix) :])
        if sink is not None:
            sink(answer)
        return sink is not None


def has_no_responders(packet: Packet) -> bool:
    """Return whether the server reports that nothing is subscribed to the request's subject."""
    return packet.headers is not None and packet.headers.get(_STATUS) == _NO_RESPONDERS


def silence(link: NatsLink, subject: str) -> TokenMeshError:
    """The error of a request that was not answered in time."""
    if link.is_connected:
        return DeadlineExceeded(f"no answer from {subject} in time")
    return BusLost(f"the connection to NATS is down, no answer from {subject}")


@dataclass(frozen=True, slots=True)
class RawReply:
    data: bytes
    headers: Mapping[str, str]

    @property
    def status(self) -> str:
        """The server's status code; empty for an answer with content."""
        return self.headers.get(_STATUS, "")


class RawRequests:
    """Requests in another protocol than ours, such as JetStream's: bytes and headers."""

    def __init__(self, link: NatsLink, limit: int) -> None:
        self._link = link
        self._pending: PendingRequests[RawReply] = PendingRequests(link.new_inbox(), limit)

    async def start(self) -> None:
        """Listen on the inbox; once, after the link is open."""
        await self._link.subscribe(self._pending.subject, self._on_packet, None)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        deadline_s: float,
    ) -> RawReply:
        """The one answer. Raises NoResponders, DeadlineExceeded or BusLost."""
        async with self._sent(subject, data, headers, deadline_s) as read:
            return await read()

    async def gather(
        self, subject: str, data: bytes, *, deadline_s: float
    ) -> tuple[list[RawReply], RawReply]:
        """All answers with content, and the status that ended them. Raises as `request`.

        The request itself must bound the number of its answers.
        """
        replies: list[RawReply] = []
        async with self._sent(subject, data, None, deadline_s) as read:
            while not (reply := await read()).status:
                replies.append(reply)
        return replies, reply

    @asynccontextmanager
    async def _sent(
        self, subject: str, data: bytes, headers: dict[str, str] | None, deadline_s: float
    ) -> AsyncIterator[Callable[[], Awaitable[RawReply]]]:
        queue: asyncio.Queue[RawReply | None] = asyncio.Queue()
        reply_to = self._pending.open(queue.put_nowait)

        async def read() -> RawReply:
            try:
                async with asyncio.timeout(deadline_s - now_s()):
                    reply = await queue.get()
            except TimeoutError as error:
                raise silence(self._link, subject) from error
            if reply is None:
                raise NoResponders(f"no process listens on {subject}")
            return reply

        try:
            await self._link.send(subject, data, headers, reply_to)
            yield read
        finally:
            self._pending.close(reply_to)

    async def _on_packet(self, packet: Packet) -> None:
        reply = None if has_no_responders(packet) else RawReply(packet.data, packet.headers or {})
        self._pending.deliver(packet.subject, reply)
