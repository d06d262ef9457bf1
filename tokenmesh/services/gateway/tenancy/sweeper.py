"""Sweeper: deletes tenants' keys when their time has passed, in place of EXPIRE.

A key with an EXPIRE is evicted by volatile-lru when Redis is full, and with it a tenant's usage.
"""

import asyncio
import logging
from typing import Final

from tokenmesh.services.gateway.tenancy.keys import ALL_TENANTS, TENANTS_KEY, expiry_key
from tokenmesh.services.gateway.tenancy.scripts import Scripts
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.redis import Redis, Reply

logger = logging.getLogger(__name__)

_MOST_KEYS: Final = 1000
"""Of one tenant in one sweep; further ones wait for the next."""


class Sweeper:
    """Of one gateway. `run` must be running."""

    def __init__(self, redis: Redis, scripts: Scripts, settings: TenancySettings) -> None:
        self._redis = redis
        self._scripts = scripts
        self._settings = settings
        self._listed: set[str] = set()
        self._unlisted: set[str] = set()
        self._news = asyncio.Event()

    def note(self, tenant: str) -> None:
        """A tenant has keys, or is about to."""
        if tenant not in self._listed and tenant not in self._unlisted:
            self._unlisted.add(tenant)
            self._news.set()

    async def run(self) -> None:
        """List new tenants at once, and sweep every `tenant_sweep_s` until cancelled."""
        next_s = monotonic_s()
        while True:
            try:
                await self._list()
                if monotonic_s() >= next_s:
                    await self.sweep()
                    next_s = monotonic_s() + self._settings.tenant_sweep_s
                pause_s = next_s - monotonic_s()
            except TokenMeshError as error:
                logger.debug("tenants' keys are not swept: %s", error.message)
                pause_s = self._settings.limits_retry_s
                await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def sweep(self) -> None:
        """Delete what is due, of all tenants. Raises TokenMeshError."""
        await self._check_policy()
        for tenant in (ALL_TENANTS, *_texts(await self._redis.call("SMEMBERS", TENANTS_KEY))):
            key, until = expiry_key(tenant), wall_s()
            due = _texts(
                await self._redis.call("ZRANGEBYSCORE", key, "-inf", until, "LIMIT", 0, _MOST_KEYS)
            )
            if due:
                await self._scripts.forget([key, *due], [])

    async def _list(self) -> None:
        self._news.clear()
        names = sorted(self._unlisted)
        if names:
            await self._redis.call("SADD", TENANTS_KEY, *names)
            self._listed.update(names)
            self._unlisted.difference_update(names)

    async def _check_policy(self) -> None:
        """A policy that evicts any key would evict usage as well: only the operator can help."""
        facts = await self._redis.call("INFO", "memory")
        if isinstance(facts, bytes) and b"maxmemory_policy:allkeys" in facts:
            logger.error(
                "Redis may evict tenants' usage: set its maxmemory-policy to volatile-lru or "
                "noeviction"
            )


def _texts(reply: Reply) -> list[str]:
    found = reply if isinstance(reply, list) else []
    return [each.decode("utf-8", "replace") for each in found if isinstance(each, bytes)]
