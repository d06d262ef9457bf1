"""ResponseLogs: the event logs of all responses, in one JetStream stream of the mesh.

A mark says which gateway generates a response; gateways adopt the responses of dead ones by it.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.apis.responses.conversations import Conversations
from tokenmesh.services.gateway.apis.responses.event_log import EventLog, read_log
from tokenmesh.services.gateway.apis.responses.records import (
    Record,
    ResponseBegun,
    ResponseEnded,
    decode_records,
    encode_record,
    frames_of,
    join_records,
)
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.mesh.ownership import OwnerMarks
from tokenmesh.services.gateway.core.tenancy.stored_shares import StoredShares
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.redis import Redis
from tokenmesh.shared.rights import RESPONSE_STREAM
from tokenmesh.shared.subjects import RESPONSES, response_log, response_open

_READ_BATCH: Final = 256
"""So many records are read from a log at a time."""

_ID: Final = re.compile(r"resp_[A-Za-z0-9]{1,64}")
_SHOWN_CHARS: Final = 80
_STORING_S: Final = 0.01
"""A watcher is notified of an entry slightly before it can be read."""


def open_journal(bus: MessageBus, settings: ResponseSettings) -> JetStreamJournal:
    """The journal of responses; its stream is created at first use."""
    spec = StreamSpec(
        name=RESPONSE_STREAM,
        subjects=RESPONSES,
        max_age_s=settings.retention_s,
        max_bytes=settings.max_total_bytes,
        setting="responses.max_total_bytes",
        max_entry_bytes=settings.max_record_bytes,
        replicas=settings.replicas,
    )
    return JetStreamJournal(bus, spec, settings)


@dataclass(frozen=True, slots=True)
class Ends:
    """The first record of a log, and the last one if the response has ended."""

    begun: ResponseBegun
    ended: ResponseEnded | None


class ResponseLogs:
    """Reads and deletes logs."""

    def __init__(
        self, journal: Journal, settings: ResponseSettings, redis: Redis | None = None
    ) -> None:
        """`redis` None: the disk is not shared among tenants."""
        self.journal = journal
        self.settings = settings
        self.shares = StoredShares(redis, journal, settings)
        self.conversations = Conversations(journal, settings, self.shares)
        self.marks = OwnerMarks(journal, response_open)
        """It says which gateway generates which response."""

    async def ends(self, given: str, access: Access, param: str = "response_id") -> Ends:
        """Raises NotFound if it does not exist, has expired, or belongs to another tenant."""
        key = response_log(_checked(given, param))
        entries = await self.journal.read(key, 0, 1)
        first = decode_records(entries[0].data)[0] if entries else None
        if not isinstance(first, ResponseBegun) or not access.may_see(first.tenant):
            raise not_found(given, param)
        newest = await self.journal.last(key)
        if newest is None:
            raise not_found(given, param)
        last = decode_records(newest.data)[-1]
        return Ends(first, last if isinstance(last, ResponseEnded) else None)

    async def load(self, given: str, access: Access) -> EventLog:
        """The whole log. Raises NotFound as `ends`."""
        log = await self.read(_checked(given, "response_id"))
        if log.begun is None or not access.may_see(log.begun.tenant):
            raise not_found(given)
        return log

    async def read(self, response_id: ResponseId) -> EventLog:
        """The whole log, without a check of access; empty if there is none."""
        return await read_log(self.journal, response_log(response_id), _READ_BATCH)

    async def append(self, response_id: ResponseId, record: Record, log: EventLog) -> None:
        """Append one record to a log as it was read. Raises Conflict if it has changed."""
        data = join_records((encode_record(record),))
        await self.journal.append(response_log(response_id), data, log.last)

    async def follow(self, response_id: ResponseId, first: int) -> AsyncGenerator[bytes, None]:
        """Frames from number `first` until the end, joined as they come. Must be closed.

        Raises NotFound once the response is deleted.
        """
        news = asyncio.Event()
        key, settings, turns = response_log(response_id), self.settings, Turns()
        subscription = await self.journal.watch(key, news.set)
        last = number = 0
        try:
            while True:
                news.clear()
                entries = await self.journal.read(key, last, _READ_BATCH)
                for entry in entries:
                    records = decode_records(entry.data)
                    frames = [frame for record in records for frame in frames_of(record)]
                    if wanted := frames[max(0, first - number) :]:
                        yield b"".join(wanted)
                    number += len(frames)
                    last = entry.sequence
                    if isinstance(records[-1], ResponseEnded):
                        return
                    await turns.rest()
                if not entries:
                    if await self.journal.last(key) is None:
                        text = f"response {response_id!r} was deleted"
                        raise NotFound(text, param="response_id")
                    await _wait(news, settings.poll_s)
        finally:
            await subscription.stop()

    async def delete(self, response_id: ResponseId) -> None:
        """Delete a response. A gateway that still generates it cannot append any more."""
        await self.journal.purge(response_log(response_id))
        await self.marks.remove("*", response_id)
        await self.shares.forget(response_log(response_id))


def not_found(given: str, param: str = "response_id") -> NotFound:
    """The error for a response that is not stored."""
    return NotFound(f"Response with id {given[:_SHOWN_CHARS]!r} not found.", param=param)


def _checked(given: str, param: str) -> ResponseId:
    if _ID.fullmatch(given) is None:
        raise not_found(given, param)
    return ResponseId(given)


async def _wait(news: asyncio.Event, poll_s: float) -> None:
    """Wait until an entry may have been appended."""
    try:
        async with asyncio.timeout(poll_s):
            await news.wait()
    except TimeoutError:
        return
    await asyncio.sleep(_STORING_S)
