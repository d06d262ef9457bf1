"""FileContents: the bytes of uploads, in numbered chunks of a log in JetStream.

A file has one writer, so its chunks are added without naming the entry before: JetStream would
keep what was written lately in memory to look for it. The number of a chunk finds one that a retry
has stored twice. ContentResponse sends them to a client.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.http.response_sender import ClientWatch
from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import Cancelled, NotFound, TokenMeshError, Unavailable
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.rights import FILE_STREAM
from tokenmesh.shared.subjects import FILES, file_content

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 128 * 1024
_NUMBER_BYTES: Final = 4
_READ_CHUNKS: Final = 4
"""Read at a time: what a slow download holds in memory."""
_ENTRY_BYTES: Final = CHUNK_BYTES + 4096
_SPARE_S: Final = 600
"""Content outlives its description, which is deleted first."""
PARTS: Final = "0123456789abcdef"
"""First digits of ids: the files of one are listed at a time."""

JOURNAL: Final = "files"
"""The name of the journal among those of a gateway."""


def open_file_journal(bus: MessageBus, settings: Settings) -> JetStreamJournal:
    """The journal of uploads; its stream is created at first use."""
    limits, journal = settings.gateway, settings.responses
    spec = StreamSpec(
        name=FILE_STREAM,
        subjects=FILES,
        max_age_s=limits.file_ttl_s + _SPARE_S,
        max_bytes=limits.upload_disk_bytes,
        setting="gateway.upload_bytes_total",
        max_entry_bytes=_ENTRY_BYTES,
        replicas=journal.replicas,
        refuses_when_full=True,
    )
    return JetStreamJournal(bus, spec, journal)


class FileContents:
    """`journal` None: nothing can be stored. Methods raise Unavailable while JetStream is away."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal

    @property
    def journal(self) -> Journal:
        """Raises Unavailable without one."""
        if self._journal is None:
            raise Unavailable("files cannot be stored here: NATS runs without JetStream")
        return self._journal

    async def write(self, file_id: str, parts: AsyncIterator[bytes]) -> int:
        """Store the bytes of `parts`, of any size, and return their number.

        Raises StoreFull. After an error the caller removes the file.
        """
        key, rest, number, num_bytes = _key(file_id), bytearray(), 0, 0
        async for part in parts:
            num_bytes += len(part)
            rest += part
            while len(rest) >= CHUNK_BYTES:
                await self._add(key, number, rest[:CHUNK_BYTES])
                del rest[:CHUNK_BYTES]
                number += 1
        if rest:
            await self._add(key, number, rest)
        return num_bytes

    async def _add(self, key: str, number: int, data: bytearray) -> None:
        await self.journal.add(key, number.to_bytes(_NUMBER_BYTES, "big") + data)

    async def read(self, file_id: str, num_bytes: int) -> AsyncGenerator[bytes, None]:
        """The chunks of a file of that size. Raises NotFound for one whose content is not whole."""
        key, last, expected, count = _key(file_id), 0, 0, 0
        while num_bytes > 0:
            entries = await self.journal.read(key, last, _READ_CHUNKS, count)
            if not entries:
                raise _is_lost(file_id)
            last, count = entries[-1].sequence, count + len(entries)
            for entry in entries:
                number = int.from_bytes(entry.data[:_NUMBER_BYTES], "big")
                if number > expected:
                    raise _is_lost(file_id)
                if number == expected:
                    expected += 1
                    num_bytes -= len(entry.data) - _NUMBER_BYTES
                    yield entry.data[_NUMBER_BYTES:]

    async def remove(self, file_id: str) -> None:
        """Delete the content of a file; nothing happens when there is none."""
        await self.journal.purge(_key(file_id))

    async def ids(self, part: str) -> Sequence[str]:
        """Ids of all files with content whose first digit is `part`."""
        return [key.rsplit(".", 1)[1] for key in await self.journal.keys(file_content(part, "*"))]


def _key(file_id: str) -> str:
    digit = file_id.rpartition("-")[2][:1]
    return file_content(digit if digit in PARTS else PARTS[0], file_id)


def _is_lost(file_id: str) -> NotFound:
    return NotFound(f"the content of the file {file_id!r} is lost", param="file_id")


_HEADERS: Final = [
    (b"content-type", b"application/octet-stream"),
    # Browsers must not render it: the content is not trusted.
    (b"content-disposition", b"attachment"),
    (b"x-content-type-options", b"nosniff"),
]


class ContentResponse(Response):
    """The status is sent with the first chunk, so a file without content is a 404."""

    def __init__(
        self,
        file_id: str,
        num_bytes: int,
        chunks: AsyncGenerator[bytes, None],
        write_timeout_s: float,
    ) -> None:
        super().__init__()
        self._file_id = file_id
        self._num_bytes = num_bytes
        self._chunks = chunks
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            async with (
                aclosing(self._chunks) as chunks,
                ClientWatch(receive, self._write_timeout_s) as watch,
            ):
                await self._send(chunks, watch, send)
        except Cancelled:
            context.has_client_left = True
        except TokenMeshError as error:
            if not context.status:
                raise
            # The server closes the connection of a body that is not complete.
            logger.warning("the download of %s broke off: %s", self._file_id, error.message)

    async def _send(
        self, chunks: AsyncGenerator[bytes, None], watch: ClientWatch, send: Send
    ) -> None:
        num_left = self._num_bytes
        async for chunk in chunks:
            if num_left == self._num_bytes:
                await send({"type": "http.response.start", "status": 200, "headers": self._head()})
            num_left -= len(chunk)
            if num_left <= 0:
                watch.stop()
            watch.is_writing = True
            await send({"type": "http.response.body", "body": chunk, "more_body": num_left > 0})
            watch.is_writing = False
            watch.num_writes += 1

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [*_HEADERS, (b"content-length", str(self._num_bytes).encode())]
