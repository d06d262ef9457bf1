"""ResponseReader: kept responses by id: read, followed, cancelled, deleted, on any gateway."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tokenmesh.services.gateway.responses.closing import cancelled, response_of
from tokenmesh.services.gateway.responses.event_log import Log
from tokenmesh.services.gateway.responses.follow import follow
from tokenmesh.services.gateway.responses.input_items import input_items
from tokenmesh.services.gateway.responses.logs import ResponseLogs, owner_of
from tokenmesh.services.gateway.responses.records import encode_record, join_records
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import Conflict, InvalidInput, Unavailable
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.subjects import response_cancels, response_log

_FENCE_ATTEMPTS = 20
"""An owner that is alive after all may append between reading its log and ending it."""


class ResponseReader:
    """Every method raises NotFound for a response that is not there for `access`."""

    def __init__(self, logs: ResponseLogs, runs: Runs, bus: Bus) -> None:
        self._logs = logs
        self._runs = runs
        self._bus = bus

    async def get(self, response_id: str, access: Access) -> bytes | dict[str, Any]:
        """The Response object, or its JSON."""
        ends = await self._logs.ends(response_id, access)
        if ends.ended is not None:
            return ends.ended.response
        return response_of(await self._logs.load(response_id, access))

    async def events(
        self, response_id: str, access: Access, first: int
    ) -> AsyncGenerator[bytes, None]:
        """Frames from number `first` on, until the end of the response. See `follow`."""
        ends = await self._logs.ends(response_id, access)
        return follow(self._logs, ends.begun.id, first)

    async def input_items(self, response_id: str, access: Access) -> list[dict[str, Any]]:
        """What was asked."""
        ends = await self._logs.ends(response_id, access)
        return input_items(ends.begun)

    async def delete(self, response_id: str, access: Access) -> None:
        """Forget it; a gateway that still makes it stops."""
        log = await self._logs.load(response_id, access)
        await self._logs.delete(ResponseId(response_id))
        await self._tell_owner(log, ResponseId(response_id))

    async def cancel(self, response_id: str, access: Access) -> bytes | dict[str, Any]:
        """End a background response; what has ended stays as it is. Raises InvalidInput."""
        ends = await self._logs.ends(response_id, access)
        if not ends.begun.is_background:
            raise InvalidInput(
                "Cannot cancel a synchronous response. Only a response created with background "
                "true can be cancelled.",
                param="response_id",
            )
        if ends.ended is None:
            await self._tell_owner(await self._logs.load(response_id, access), ends.begun.id)
            await self._wait_ended(ends.begun.id)
            await self._end(ends.begun.id)
        return await self.get(response_id, access)

    async def _tell_owner(self, log: Log, response_id: ResponseId) -> None:
        self._runs.cancel(response_id)
        owner = owner_of(log)
        if log.ended is None and owner is not None and owner != self._runs.owner:
            await self._bus.publish_raw(response_cancels(owner), response_id.encode())

    async def _wait_ended(self, response_id: ResponseId) -> None:
        try:
            async with asyncio.timeout(self._logs.settings.cancel_wait_s):
                async for _ in follow(self._logs, response_id, 0):
                    continue
        except TimeoutError:
            return

    async def _end(self, response_id: ResponseId) -> None:
        """End it over its owner's head, unless that has done so."""
        for _ in range(_FENCE_ATTEMPTS):
            log = await self._logs.read(response_id)
            if log.ended is not None or log.begun is None:
                return
            data = join_records((encode_record(cancelled(log)),))
            try:
                await self._logs.journal.append(response_log(response_id), data, log.last)
            except Conflict:
                continue
            return
        raise Unavailable(f"response {response_id!r} could not be ended", retry_after_s=1)
