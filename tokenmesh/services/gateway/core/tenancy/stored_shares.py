"""StoredShares: the disk for what is stored for tenants, shared among them.

When it is full, the oldest entry of the tenant that stores most is deleted. Without Redis nothing
is counted, and JetStream deletes the oldest of all.
"""

import asyncio
import logging
from typing import Final

from tokenmesh.services.gateway.core.tenancy.redis_state import (
    ALL_TENANTS,
    Scripts,
    expiry_key,
    stored_entries_key,
    stored_key,
)
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

OVERHEAD_BYTES: Final = 256
"""This is the overhead of an entry in JetStream: its subject, headers and checksum."""
_SHARE: Final = 0.9
"""Tenants may fill this share of `max_total_bytes`: beyond all of it JetStream deletes the oldest
ones of any tenant."""


class StoredShares:
    """An entry is the key of a log in the journal."""

    def __init__(self, redis: Redis | None, journal: Journal, settings: ResponseSettings) -> None:
        self._script = Scripts(redis).stored if redis is not None else None
        self._journal = journal
        self._limit = int(settings.max_total_bytes * _SHARE)
        self._ttl_s = settings.retention_s
        self._victims: dict[str, None] = {}
        self._deleting: asyncio.Task[None] | None = None

    async def count(self, tenant: str, entry: str, num_bytes: int) -> None:
        """Count an entry with that many bytes, in place of its earlier count; 0: it is deleted.

        While Redis cannot be reached nothing is counted.
        """
        if self._script is None:
            return
        keys = (stored_key(), stored_entries_key(), expiry_key(ALL_TENANTS))
        try:
            found = await self._script(keys, (tenant, entry, num_bytes, self._ttl_s, self._limit))
        except TokenMeshError as error:
            logger.debug("cannot count what %s stores: %s", tenant, error.message)
            return
        victims = found if isinstance(found, list) else []
        self._victims.update((each.decode(), None) for each in victims if isinstance(each, bytes))
        if self._victims and (self._deleting is None or self._deleting.done()):
            self._deleting = asyncio.create_task(self._delete())

    async def forget(self, entry: str) -> None:
        """An entry was deleted."""
        await self.count("", entry, 0)

    async def _delete(self) -> None:
        while self._victims:
            entry = next(iter(self._victims))
            try:
                await self._journal.purge(entry)
            except TokenMeshError as error:
                # JetStream deletes it when it needs the room.
                logger.info("cannot delete %s: %s", entry, error.message)
            del self._victims[entry]
