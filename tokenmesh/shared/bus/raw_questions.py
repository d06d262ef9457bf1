"""RawQuestions: requests whose answers are bytes and headers of somebody else's protocol."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.bus.answers import Answers
from tokenmesh.shared.bus.link import Link, Packet
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import BusLost, DeadlineExceeded, NoResponders, TokenMeshError

STATUS: Final = "Status"
NO_RESPONDERS: Final = "503"


@dataclass(frozen=True, slots=True)
class RawReply:
    """One answer."""

    data: bytes
    headers: Mapping[str, str]

    @property
    def status(self) -> str:
        """The server's status code; empty for an answer with content."""
        return self.headers.get(STATUS, "")


class RawQuestions:
    """Questions of one process, over an inbox of their own."""

    def __init__(self, link: Link, limit: int) -> None:
        self._link = link
        self._answers: Answers[RawReply] = Answers(link.new_inbox(), limit)

    async def start(self) -> None:
        """Listen on the inbox; once, after the link is open."""
        await self._link.subscribe(self._answers.subject, self._on_packet, None)

    async def ask(
        self,
        subject: str,
        data: bytes,
        *,
        headers: dict[str, str] | None = None,
        deadline_s: float,
    ) -> RawReply:
        """The one answer. Raises NoResponders, DeadlineExceeded or BusLost."""
        async with self._asked(subject, data, headers, deadline_s) as read:
            return await read()

    async def gather(
        self, subject: str, data: bytes, *, deadline_s: float
    ) -> tuple[list[RawReply], RawReply]:
        """All answers with content, and the status that ended them. Raises as `ask`.

        What waits to be read is bounded by what the question asks for.
        """
        replies: list[RawReply] = []
        async with self._asked(subject, data, None, deadline_s) as read:
            while not (reply := await read()).status:
                replies.append(reply)
        return replies, reply

    @asynccontextmanager
    async def _asked(
        self, subject: str, data: bytes, headers: dict[str, str] | None, deadline_s: float
    ) -> AsyncIterator[Callable[[], Awaitable[RawReply]]]:
        queue: asyncio.Queue[RawReply | None] = asyncio.Queue()
        reply_to = self._answers.open(queue.put_nowait)

        async def read() -> RawReply:
            try:
                async with asyncio.timeout(deadline_s - now_s()):
                    reply = await queue.get()
            except TimeoutError as error:
                raise self._silence(subject) from error
            if reply is None:
                raise NoResponders(f"nobody listens on {subject}")
            return reply

        try:
            await self._link.send(subject, data, headers, reply_to)
            yield read
        finally:
            self._answers.close(reply_to)

    async def _on_packet(self, packet: Packet) -> None:
        headers = packet.headers or {}
        is_nobody = headers.get(STATUS) == NO_RESPONDERS
        reply = None if is_nobody else RawReply(packet.data, headers)
        self._answers.deliver(packet.subject, reply)

    def _silence(self, subject: str) -> TokenMeshError:
        if self._link.is_connected:
            return DeadlineExceeded(f"no answer from {subject} in time")
        return BusLost(f"the connection to NATS is down, no answer from {subject}")
