"""BatchLogs: the logs of all batches in a JetStream stream, and their writer."""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Container
from copy import copy
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.apis.batches.lines import count, count_usage
from tokenmesh.services.gateway.apis.batches.records import (
    ENDED,
    AnsweredLine,
    BatchBegun,
    BatchEntry,
    BatchState,
    decode_entry,
    encode_entry,
)
from tokenmesh.services.gateway.core.mesh.ownership import OwnerMarks
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.batches import BatchSettings
from tokenmesh.shared.errors import NotFound, Unavailable
from tokenmesh.shared.ids import GatewayId, new_request_id
from tokenmesh.shared.journal import Journal, StoreFull
from tokenmesh.shared.rights import BATCH_STREAM
from tokenmesh.shared.subjects import BATCHES, batch_cancel, batch_log, batch_open

logger = logging.getLogger(__name__)

_TOKEN_CHARS: Final = 8
_TIME_CHARS: Final = 12
_ID: Final = re.compile(r"batch_[0-9a-f]{52}")
_SHOWN_CHARS: Final = 80
_READ_ENTRIES: Final = 4
_DROPPED: Final = 16
"""Old batches that are deleted for a new one at most."""
_ROOM_BYTES: Final = 64 * 1024
"""This is the part of an entry, for all but its lines."""
_FULL_PAUSE_S: Final = 1.0
"""Also how long it counts how full the disk was."""


def open_batch_journal(bus: MessageBus, settings: Settings) -> JetStreamJournal:
    """The journal of batches; its stream is created at first use."""
    limits, journal = settings.batches, settings.responses
    spec = StreamSpec(
        name=BATCH_STREAM,
        subjects=BATCHES,
        max_age_s=limits.retention_s,
        max_bytes=limits.disk_bytes,
        setting="batches.max_total_bytes",
        max_entry_bytes=journal.max_record_bytes,
        replicas=journal.replicas,
        refuses_when_full=True,
    )
    return JetStreamJournal(bus, spec, journal)


def tenant_token(tenant: str) -> str:
    """A part of the ids and keys of a tenant's batches; another tenant may have the same."""
    return hashlib.blake2b(tenant.encode(), digest_size=_TOKEN_CHARS // 2).hexdigest()


def new_batch_id(tenant: str) -> str:
    """Ids sort by their time; the tenant's token in them finds their key."""
    millis = f"{int(wall_s() * 1000):0{_TIME_CHARS}x}"
    return f"batch_{millis}{tenant_token(tenant)}{new_request_id('')[1:]}"


def token_of(batch_id: str) -> str:
    """The token of the tenant that a batch belongs to."""
    start = len("batch_") + _TIME_CHARS
    return batch_id[start : start + _TOKEN_CHARS]


def log_key(batch_id: str) -> str:
    """The key of a batch's log."""
    return batch_log(token_of(batch_id), batch_id)


@dataclass(slots=True)
class KnownBatch:
    """A batch as its log's first and last entries have it."""

    begun: BatchBegun
    state: BatchState
    owner: GatewayId
    last: int
    """Number of the last entry."""

    @property
    def has_ended(self) -> bool:
        return self.state.status in ENDED


class BatchLogs:
    """`journal` None: there are no batches. Methods raise Unavailable without JetStream."""

    def __init__(self, journal: Journal | None, settings: BatchSettings) -> None:
        self._journal = journal
        self.settings = settings
        self._is_full = False
        self._looked_s = -_FULL_PAUSE_S
        self.marks = OwnerMarks(journal, batch_open) if journal is not None else None

    @property
    def journal(self) -> Journal:
        """Raises Unavailable without one."""
        if self._journal is None:
            raise Unavailable("batches cannot be stored here: NATS runs without JetStream")
        return self._journal

    async def find(self, batch_id: str) -> KnownBatch | None:
        """None for a batch that does not exist or has expired."""
        key = log_key(batch_id)
        entries = await self.journal.read(key, 0, 1)
        newest = await self.journal.last(key)
        if not entries or newest is None:
            return None
        last = decode_entry(newest.data)
        begun = last.begun or decode_entry(entries[0].data).begun
        if begun is None:
            return None
        return KnownBatch(begun, last.state, last.owner, newest.sequence)

    async def get(self, given: str, access: Access) -> KnownBatch:
        """Raises NotFound, also for a batch of another tenant."""
        found = await self.find(given) if _ID.fullmatch(given) else None
        if found is None or not access.may_see(found.begun.tenant):
            text = f"No batch found with id {given[:_SHOWN_CHARS]!r}."
            raise NotFound(text, param="batch_id")
        return found

    async def ids(self, tenant: str) -> list[str]:
        """Ids of the batches of a tenant, newest first; another tenant's may be among them."""
        keys = await self.journal.keys(batch_log(tenant_token(tenant), "*"))
        return sorted((key.rsplit(".", 1)[1] for key in keys), reverse=True)

    async def is_full(self) -> bool:
        """Return whether there is no room for answers; asked of the store once a second."""
        if monotonic_s() - self._looked_s >= _FULL_PAUSE_S:
            self._looked_s = monotonic_s()
            self._is_full = await self.journal.num_bytes() >= self.settings.max_total_bytes
        return self._is_full

    async def drop_oldest(self, tenant: str, is_open: Container[str]) -> None:
        """Delete what a tenant has beyond `max_kept_per_tenant`, with room for a new batch."""
        beyond = (await self.ids(tenant))[self.settings.max_kept_per_tenant - 1 :]
        for batch_id in beyond[-_DROPPED:]:
            found = None if batch_id in is_open else await self.find(batch_id)
            if found is not None and found.has_ended and found.begun.tenant == tenant:
                await self.journal.purge(log_key(batch_id))

    async def request_cancel(self, batch_id: str) -> None:
        """Make a cancellation durable: the owner may die before it hears of it."""
        await self.journal.add(batch_cancel(batch_id), b"1")

    async def is_cancelled(self, batch_id: str) -> bool:
        """Return whether a cancellation was requested."""
        return await self.journal.last(batch_cancel(batch_id)) is not None

    async def answered(self, batch_id: str) -> set[int]:
        """Indices of the lines that have an answer."""
        return {line.index async for line in self.lines(batch_id)}

    async def lines(self, batch_id: str) -> AsyncGenerator[AnsweredLine, None]:
        """All answers, in the order of the log. Must be closed."""
        last = count = 0
        key = log_key(batch_id)
        while entries := await self.journal.read(key, last, _READ_ENTRIES, count):
            for entry in entries:
                for line in decode_entry(entry.data).lines:
                    yield line
            last, count = entries[-1].sequence, count + len(entries)

    async def close(self, batch_id: str, owner: GatewayId) -> None:
        """Drop what an ended batch needs no longer: all entries but the last one, and marks."""
        await self.journal.purge(log_key(batch_id), keep=1)
        await self.journal.purge(batch_cancel(batch_id))
        await self.journal.purge(batch_open("*", batch_id))


class BatchLogWriter:
    """Appends to the log of one batch until another gateway takes it over.

    While an append is in flight the next lines are collected. Methods raise Conflict once another
    gateway has appended, and StoreFull.
    """

    def __init__(
        self, logs: BatchLogs, owner: GatewayId, begun: BatchBegun, state: BatchState, last: int
    ) -> None:
        self.logs = logs
        self.owner = owner
        self.begun = begun
        self._last = last
        self._room = logs.journal.max_entry_bytes - _ROOM_BYTES
        self._waiting: list[tuple[AnsweredLine, bytes]] = []
        self._sending: asyncio.Task[None] | None = None
        self.state = state
        """The state of the last entry; replaced, never changed."""

    @property
    def max_line_bytes(self) -> int:
        """Largest line of output."""
        return self._room

    async def save(self, state: BatchState, *, with_begun: bool = False) -> None:
        """Append a new state, after all lines. There is room for it where none is for lines."""
        while self._sending is not None:
            await asyncio.shield(self._sending)
        await self._append(state, [], self.begun if with_begun else None)

    async def put(self, line: AnsweredLine, body: bytes = b"") -> None:
        """Return when the line is durable; `body` is the answer whose usage counts.

        Raises StoreFull where there was no room for `full_wait_s`.
        """
        self._waiting.append((line, body))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        try:
            while self._waiting:
                taken = self._take()
                state = copy(self.state)
                for line, body in taken:
                    count(state, line)
                    if body:
                        count_usage(state, body)
                await self._append_lines(state, [line for line, _ in taken])
        finally:
            self._sending = None

    def _take(self) -> list[tuple[AnsweredLine, bytes]]:
        room, number = self._room, 0
        for line, _ in self._waiting:
            room -= len(line.data) + 32
            if room < 0 and number:
                break
            number += 1
        taken, self._waiting = self._waiting[:number], self._waiting[number:]
        return taken

    async def _append_lines(self, state: BatchState, lines: list[AnsweredLine]) -> None:
        give_up_s = monotonic_s() + self.logs.settings.full_wait_s
        while True:
            try:
                if await self.logs.is_full():
                    raise StoreFull("the disk for batches is full")
                await self._append(state, lines, None)
            except StoreFull as error:
                if monotonic_s() >= give_up_s:
                    raise
                logger.warning("batch %s waits: %s", self.begun.id, error.message)
                await asyncio.sleep(_FULL_PAUSE_S)
            else:
                return

    async def _append(
        self, state: BatchState, lines: list[AnsweredLine], begun: BatchBegun | None
    ) -> None:
        entry = BatchEntry(owner=self.owner, state=state, begun=begun, lines=lines)
        journal, key = self.logs.journal, log_key(self.begun.id)
        self._last = await journal.append(key, encode_entry(entry), self._last)
        self.state = state
