"""LogWriter: the one who may write to a response's log, until somebody takes it over.

While one entry is on its way the next records gather, so a fast model makes larger entries, not
more of them. Nothing reaches a client before it is durable.
"""

import asyncio
from collections.abc import Callable

from tokenmesh.services.gateway.response_store.records import Ended, Record, encode_records
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import PayloadTooLarge, TokenMeshError
from tokenmesh.shared.journal import Journal


class LogWriter:
    """Appends records in order. An error is final: everything after it raises the same."""

    def __init__(
        self,
        journal: Journal,
        key: str,
        settings: ResponseSettings,
        *,
        after: int = 0,
        num_bytes: int = 0,
        on_durable: Callable[[], None] = lambda: None,
    ) -> None:
        """`after` and `num_bytes`: the last entry and the size of what is there already."""
        self._journal = journal
        self._key = key
        self._settings = settings
        self._after = after
        self._num_bytes = num_bytes
        self._on_durable = on_durable
        self._waiting: list[Record] = []
        self._sending: asyncio.Task[None] | None = None
        self._error: TokenMeshError | None = None

    async def put(self, record: Record) -> None:
        """Add a record; returns when there is room for the next.

        Raises Conflict once another gateway has the log or it was deleted, PayloadTooLarge over
        the limits (the end of a response still fits), and whatever the journal raises.
        """
        self._check()
        self._waiting.append(record)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        elif len(self._waiting) >= self._settings.max_waiting_records:
            await self.settle()

    async def settle(self) -> None:
        """Return when everything is durable. Raises as `put`."""
        while self._sending is not None:
            # A writer that is cancelled still completes what it has begun.
            await asyncio.shield(self._sending)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _send(self) -> None:
        try:
            while self._waiting:
                records, self._waiting = self._waiting, []
                await self._append(records)
        except TokenMeshError as error:
            self._error = error
        finally:
            self._sending = None

    async def _append(self, records: list[Record]) -> None:
        data = encode_records(records)
        limit = self._settings.max_response_bytes
        if self._num_bytes + len(data) > limit and not isinstance(records[-1], Ended):
            raise PayloadTooLarge(f"the response's log is over {limit} bytes")
        self._after = await self._journal.append(self._key, data, self._after)
        self._num_bytes += len(data)
        self._on_durable()
