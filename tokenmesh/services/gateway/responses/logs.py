"""ResponseLogs: the logs of all responses, for those who may see them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.responses.event_log import Log, read_log
from tokenmesh.services.gateway.responses.records import (
    Adopted,
    Begun,
    Ended,
    decode_records,
)
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.bus.base import Subscription
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, NotFound
from tokenmesh.shared.ids import GatewayId, ResponseId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.subjects import response_log, response_open

_ID: Final = re.compile(r"resp_[A-Za-z0-9]{1,64}")
_SHOWN_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Ends:
    """The first and the last record of a log: mostly all that one wants to know."""

    begun: Begun
    ended: Ended | None


class ResponseLogs:
    """Reads, opens and deletes."""

    def __init__(self, journal: Journal, settings: ResponseSettings) -> None:
        self.journal = journal
        self.settings = settings

    async def ends(self, given: str, access: Access, param: str = "response_id") -> Ends:
        """Raises NotFound for what does not exist, has expired, or is somebody else's."""
        response_id = _checked(given, param)
        key = response_log(response_id)
        entries = await self.journal.read(key, 0, 1)
        first = decode_records(entries[0].data)[0] if entries else None
        if not isinstance(first, Begun) or not access.may_see(first.tenant):
            raise _unknown(given, param)
        newest = await self.journal.last(key)
        if newest is None:
            raise _unknown(given, param)
        last = decode_records(newest.data)[-1]
        return Ends(first, last if isinstance(last, Ended) else None)

    async def load(self, given: str, access: Access) -> Log:
        """All of it. Raises NotFound as `ends`."""
        log = await self.read(_checked(given, "response_id"))
        if log.begun is None or not access.may_see(log.begun.tenant):
            raise _unknown(given, "response_id")
        return log

    async def read(self, response_id: ResponseId) -> Log:
        """All of it, for the mesh's own purposes; empty when there is none."""
        return await read_log(self.journal, response_log(response_id), self.settings.read_batch)

    async def watch(self, response_id: ResponseId, on_append: Callable[[], None]) -> Subscription:
        """See `Journal.watch`."""
        return await self.journal.watch(response_log(response_id), on_append)

    async def mark(self, owner: GatewayId, response_id: ResponseId) -> None:
        """Say who works on a response, before doing so: a mark without work does no harm."""
        try:
            await self.journal.append(response_open(owner, response_id), b"", 0)
        except Conflict:
            return

    async def unmark(self, owner: GatewayId, response_id: ResponseId) -> None:
        """Nobody has to look after it for this owner any more."""
        await self.journal.purge(response_open(owner, response_id))

    async def marks(self) -> list[tuple[GatewayId, ResponseId]]:
        """Who says that he works on what."""
        keys = await self.journal.keys(response_open("*", "*"))
        parts = [key.rsplit(".", 2) for key in keys]
        return [(GatewayId(owner), ResponseId(response)) for _, owner, response in parts]

    async def delete(self, response_id: ResponseId) -> None:
        """Forget a response. Whoever still works on it cannot add to it any more."""
        await self.journal.purge(response_log(response_id))
        await self.journal.purge(response_open("*", response_id))


def owner_of(log: Log) -> GatewayId | None:
    """Who may write to a log."""
    owners = (each.owner for each in reversed(log.records) if isinstance(each, Begun | Adopted))
    return next(owners, None)


def _checked(given: str, param: str) -> ResponseId:
    if _ID.fullmatch(given) is None:
        raise _unknown(given, param)
    return ResponseId(given)


def _unknown(given: str, param: str) -> NotFound:
    return NotFound(f"Response with id {given[:_SHOWN_CHARS]!r} not found.", param=param)
