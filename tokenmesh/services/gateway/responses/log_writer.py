"""LogWriter: the one who may write to a response's log, until somebody takes it over.

While one entry is on its way the next records gather, so a fast model makes larger entries, not
more of them. Nothing reaches a client before it is durable.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tokenmesh.services.gateway.responses.records import (
    Begun,
    Ended,
    Record,
    encode_record,
    join_records,
)
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import PayloadTooLarge, TokenMeshError
from tokenmesh.shared.journal import Journal

logger = logging.getLogger(__name__)

_ENTRY_ROOM_BYTES: Final = 16
"""What an entry holds besides its records."""

Waiting = tuple[Record, bytes]
OnDurable = Callable[[Sequence[Record]], None]


class RecordWriter(Protocol):
    """Where the records of a response go."""

    async def put(self, record: Record) -> None:
        """Add a record; returns when there is room for the next. Raises what keeps it from that."""

    async def settle(self) -> None:
        """Return when everything is kept. Raises as `put`."""


class LogWriter:
    """Appends records in order, in batches. An error is final: all after it raises the same.

    It raises Conflict once another gateway has the log or it was deleted, PayloadTooLarge over the
    limits (the end of a response still fits), and whatever the journal raises.
    """

    def __init__(
        self,
        journal: Journal,
        key: str,
        settings: ResponseSettings,
        on_durable: OnDurable,
        *,
        after: int = 0,
        num_bytes: int = 0,
    ) -> None:
        """`after` and `num_bytes`: the last entry and the size of what is there already."""
        self._journal = journal
        self._key = key
        self._settings = settings
        self._on_durable = on_durable
        self._after = after
        self._num_bytes = num_bytes
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._error: TokenMeshError | None = None

    async def put(self, record: Record) -> None:
        """See `RecordWriter.put`."""
        self._check()
        self._waiting.append((record, encode_record(record)))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        elif len(self._waiting) >= self._settings.max_waiting_records:
            await self.settle()

    async def settle(self) -> None:
        """See `RecordWriter.settle`."""
        while self._sending is not None:
            # Who is cancelled here leaves what is on its way alone.
            await asyncio.shield(self._sending)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self._append(self._take())
        except TokenMeshError as error:
            self._error = error
        finally:
            self._sending = None

    def _take(self) -> list[Waiting]:
        """As many records as fit into one entry, at least one."""
        room = self._journal.max_entry_bytes - _ENTRY_ROOM_BYTES
        count = 0
        for _, data in self._waiting:
            room -= len(data)
            if room < 0 and count:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _append(self, taken: list[Waiting]) -> None:
        data = join_records([encoded for _, encoded in taken])
        limit = self._settings.max_response_bytes
        if self._num_bytes + len(data) > limit and not isinstance(taken[-1][0], Ended):
            raise PayloadTooLarge(f"the response is over responses.max_response_bytes = {limit}")
        self._after = await self._journal.append(self._key, data, self._after)
        self._num_bytes += len(data)
        self._on_durable([record for record, _ in taken])


class LateWriter:
    """Keeps a response whole when it has ended, for a client that waits for the whole.

    When that fails `on_lost` is told why: the response was made, and its client shall have it.
    """

    def __init__(
        self,
        log: LogWriter,
        begun: Begun,
        on_record: OnDurable,
        on_lost: Callable[[TokenMeshError], None],
    ) -> None:
        self._log = log
        self._on_record = on_record
        self._on_lost = on_lost
        self._records: list[Record] = [begun]

    async def put(self, record: Record) -> None:
        """See `RecordWriter.put`."""
        self._records.append(record)
        self._on_record((record,))

    async def settle(self) -> None:
        """See `RecordWriter.settle`."""
        if not isinstance(self._records[-1], Ended):
            return
        try:
            for record in self._records:
                await self._log.put(record)
            await self._log.settle()
        except TokenMeshError as error:
            logger.warning("a response could not be kept: %s", error.message)
            self._on_lost(error)


class NoWriter:
    """Keeps nothing."""

    def __init__(self, on_record: OnDurable) -> None:
        self._on_record = on_record

    async def put(self, record: Record) -> None:
        """See `RecordWriter.put`."""
        self._on_record((record,))

    async def settle(self) -> None:
        """See `RecordWriter.settle`."""
