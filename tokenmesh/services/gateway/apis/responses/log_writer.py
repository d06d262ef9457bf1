"""LogWriter: appends records to a response's log, until another gateway takes the response over.

While one append is in flight the next records are collected, so that a fast model makes larger
entries instead of more. An event is sent to the client only after its record is durable.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from tokenmesh.services.gateway.apis.responses.records import (
    Record,
    ResponseBegun,
    ResponseEnded,
    encode_record,
    join_records,
)
from tokenmesh.services.gateway.core.tenancy.stored_shares import OVERHEAD_BYTES
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import PayloadTooLarge, TokenMeshError
from tokenmesh.shared.journal import Journal

logger = logging.getLogger(__name__)

_ENTRY_ROOM_BYTES: Final = 16
"""Size of an entry without its records."""

Waiting = tuple[Record, bytes]
Count = Callable[[int], Awaitable[None]]
OnDurable = Callable[[Sequence[Record]], None]


class RecordWriter(Protocol):
    """Receives the records of a response."""

    async def put(self, record: Record) -> None:
        """Add a record; waits while too many are not durable. Raises why it cannot be stored."""

    async def settle(self) -> None:
        """Return when all records are durable. Raises as `put`."""


class LogWriter:
    """Appends records in order, in batches. After an error every call raises the same error.

    Raises Conflict once another gateway has appended or the log was deleted, PayloadTooLarge over
    the limits (except for the end of a response), and what the journal raises.
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
        count: Count | None = None,
    ) -> None:
        """`after` and `num_bytes`: number of the last entry, and size of the log.

        `count` is called with the size of the log in the journal when it has doubled or ended.
        """
        self._journal = journal
        self._key = key
        self._settings = settings
        self._on_durable = on_durable
        self._after = after
        self._num_bytes = num_bytes
        self._num_stored_bytes = num_bytes
        self._num_counted_bytes = 0
        self._count = count
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._error: TokenMeshError | None = None

    async def put(self, record: Record) -> None:
        self._check()
        self._waiting.append((record, encode_record(record)))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        elif len(self._waiting) >= self._settings.max_waiting_records:
            await self.settle()

    async def settle(self) -> None:
        while self._sending is not None:
            # A cancelled caller must not cancel the append.
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
        """As many records as fit into one entry, but at least one."""
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
        if self._num_bytes + len(data) > limit and not isinstance(taken[-1][0], ResponseEnded):
            raise PayloadTooLarge(
                f"the log of the response exceeds responses.max_response_bytes = {limit}"
            )
        self._after = await self._journal.append(self._key, data, self._after)
        self._num_bytes += len(data)
        self._num_stored_bytes += len(data) + OVERHEAD_BYTES
        self._on_durable([record for record, _ in taken])
        has_ended = isinstance(taken[-1][0], ResponseEnded)
        has_doubled = self._num_stored_bytes >= 2 * self._num_counted_bytes
        if self._count is not None and (has_ended or has_doubled):
            self._num_counted_bytes = self._num_stored_bytes
            await self._count(self._num_stored_bytes)


class LateWriter:
    """Stores a response when it has ended, for a client that is not streaming.

    If that fails, `on_lost` is called with the error: the client still receives the response.
    """

    def __init__(
        self,
        log: LogWriter,
        begun: ResponseBegun,
        on_record: OnDurable,
        on_lost: Callable[[TokenMeshError], None],
    ) -> None:
        self._log = log
        self._on_record = on_record
        self._on_lost = on_lost
        self._records: list[Record] = [begun]

    async def put(self, record: Record) -> None:
        self._records.append(record)
        self._on_record((record,))

    async def settle(self) -> None:
        if not isinstance(self._records[-1], ResponseEnded):
            return
        try:
            for record in self._records:
                await self._log.put(record)
            await self._log.settle()
        except TokenMeshError as error:
            logger.warning("a response could not be stored: %s", error.message)
            self._on_lost(error)


class NoWriter:
    def __init__(self, on_record: OnDurable) -> None:
        self._on_record = on_record

    async def put(self, record: Record) -> None:
        self._on_record((record,))

    async def settle(self) -> None:
        return
