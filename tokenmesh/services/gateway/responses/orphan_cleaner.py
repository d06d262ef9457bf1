"""OrphanCleaner: responses of which the journal may hold something that nobody is to go on with.

An append whose answer was lost may have happened. Its client was told that the response is not
kept, or not made: whoever found it would make it, and charge it, a second time.
"""

import asyncio
import logging

from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import ResponseId

logger = logging.getLogger(__name__)


class OrphanCleaner:
    """Deletes them, one after the other, as soon as the journal lets it."""

    def __init__(self, logs: ResponseLogs) -> None:
        self._logs = logs
        self._ids: set[ResponseId] = set()
        self._deleting: asyncio.Task[None] | None = None
        self._is_stopped = False

    def __contains__(self, response_id: ResponseId) -> bool:
        return response_id in self._ids

    def add(self, response_id: ResponseId) -> None:
        """Delete what there may be. With too many to remember, some may be made again after all."""
        if self._is_stopped or len(self._ids) >= self._logs.settings.max_running:
            return
        self._ids.add(response_id)
        if self._deleting is None or self._deleting.done():
            self._deleting = asyncio.create_task(self._delete())

    async def stop(self) -> None:
        """Leave the rest as it is."""
        self._is_stopped = True
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.gather(self._deleting, return_exceptions=True)

    async def _delete(self) -> None:
        while self._ids:
            response_id = next(iter(self._ids))
            try:
                await self._logs.delete(response_id)
            except TokenMeshError as error:
                logger.debug("%s is not deleted yet: %s", response_id, error.message)
                await asyncio.sleep(self._logs.settings.adopt_interval_s)
            else:
                self._ids.discard(response_id)
