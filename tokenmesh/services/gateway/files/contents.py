"""FileContents: the bytes of uploads, in numbered chunks of a log in JetStream.

A file has one writer, so its chunks are added without naming the entry before: JetStream would
keep what was written lately in memory to look for it. The number of a chunk finds one that a retry
has stored twice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import NotFound, Unavailable
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.rights import FILE_STREAM
from tokenmesh.shared.subjects import FILES, file_content

CHUNK_BYTES: Final = 128 * 1024
_NUMBER_BYTES: Final = 4
_READ_CHUNKS: Final = 4
"""Read at a time: what a slow download holds in memory."""
_ENTRY_BYTES: Final = CHUNK_BYTES + 4096
_SPARE_S: Final = 600
"""Content outlives its description, which is deleted first."""
PARTS: Final = "0123456789abcdef"
"""First digits of ids: the files of one are listed at a time."""


def open_file_journal(bus: MessageBus, settings: Settings) -> JetStreamJournal:
    """The journal of uploads; its stream is created at first use."""
    limits, journal = settings.gateway, settings.responses
    spec = StreamSpec(
        name=FILE_STREAM,
        subjects=FILES,
        max_age_s=limits.file_ttl_s + _SPARE_S,
        # The quota counts 4 KiB for each file on top of its bytes.
        max_bytes=limits.upload_bytes_total + limits.upload_bytes_total // 8 + (1 << 20),
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
        key, last, expected = _key(file_id), 0, 0
        while num_bytes > 0:
            entries = await self.journal.read(key, last, _READ_CHUNKS)
            if not entries:
                raise _is_lost(file_id)
            last = entries[-1].sequence
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
