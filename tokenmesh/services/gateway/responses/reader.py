"""ResponseReader: reads, streams, cancels and deletes stored responses, on any gateway."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.services.gateway.responses.event_log import EventLog
from tokenmesh.services.gateway.responses.items import input_items
from tokenmesh.services.gateway.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import Conflict, InvalidInput, Unavailable
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.subjects import response_cancels

_END_ATTEMPTS: Final = 20
"""An owner that is still alive may append between reading its log and ending it."""


class ResponseReader:
    """Methods raise NotFound for a response that does not exist or that `access` may not see."""

    def __init__(self, logs: ResponseLogs, runs: Runs, bus: Bus) -> None:
        self._logs = logs
        self._runs = runs
        self._bus = bus

    async def get(self, response_id: str, access: Access) -> bytes | Json:
        """The Response object, or its JSON once it has ended."""
        ends = await self._logs.ends(response_id, access)
        if ends.ended is not None:
            return ends.ended.response
        return (await self._logs.load(response_id, access)).response()

    async def events(
        self, response_id: str, access: Access, first: int
    ) -> AsyncGenerator[bytes, None]:
        """Frames from number `first` until the end of the response. Must be closed."""
        ends = await self._logs.ends(response_id, access)
        return self._logs.follow(ends.begun.id, first)

    async def input_items(self, response_id: str, access: Access) -> list[Json]:
        ends = await self._logs.ends(response_id, access)
        return input_items(ends.begun)

    async def delete(self, response_id: str, access: Access) -> None:
        """Delete the response and stop generating it."""
        log = await self._logs.load(response_id, access)
        await self._logs.delete(ResponseId(response_id))
        await self._notify_owner(log, ResponseId(response_id))

    async def cancel(self, response_id: str, access: Access) -> bytes | Json:
        """End a background response, unless it has ended. Raises InvalidInput."""
        ends = await self._logs.ends(response_id, access)
        if not ends.begun.is_background:
            raise InvalidInput(
                "Cannot cancel a synchronous response. Only a response created with background "
                "true can be cancelled.",
                param="response_id",
            )
        if ends.ended is None:
            await self._notify_owner(await self._logs.load(response_id, access), ends.begun.id)
            await self._wait_ended(ends.begun.id)
            await self._end(ends.begun.id)
        return await self.get(response_id, access)

    async def _notify_owner(self, log: EventLog, response_id: ResponseId) -> None:
        self._runs.cancel(response_id)
        owner = log.owner
        if log.ended is None and owner is not None and owner != self._runs.owner:
            await self._bus.publish_raw(response_cancels(owner), response_id.encode())

    async def _wait_ended(self, response_id: ResponseId) -> None:
        try:
            async with asyncio.timeout(self._logs.settings.cancel_wait_s):
                async for _ in self._logs.follow(response_id, 0):
                    continue
        except TimeoutError:
            return

    async def _end(self, response_id: ResponseId) -> None:
        """Append the end, unless the owner has done so."""
        for _ in range(_END_ATTEMPTS):
            log = await self._logs.read(response_id)
            if log.ended is not None or log.begun is None:
                return
            try:
                await self._logs.append(response_id, log.cancelled(), log)
            except Conflict:
                continue
            return
        raise Unavailable(f"response {response_id!r} could not be cancelled", retry_after_s=1)
