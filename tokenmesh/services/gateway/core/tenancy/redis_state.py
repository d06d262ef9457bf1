"""The state of tenants in Redis: its keys, the Lua scripts that change it, and its expiry.

The keys of a tenant have no EXPIRE: volatile-lru evicts keys that have one when Redis is full, and
with them a tenant's usage. `Sweeper` deletes them instead.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.redis import Redis, Reply, Script

logger = logging.getLogger(__name__)

TENANTS_KEY: Final = "tm:tenants"
"""SET: names of all tenants that ever had a key here."""
ALL_TENANTS: Final = "*"
"""Stands for all tenants together in a key; invalid as a tenant's name."""

_MAX_KEYS: Final = 1000
"""Keys of one tenant that one sweep deletes; the rest follows in the next one."""


def state_key(tenant: str) -> str:
    """HASH: the levels of its buckets, and the time of these levels."""
    # The braces keep all keys of a tenant on one node of a cluster.
    return f"tm:tenant:{{{tenant}}}:state"


def open_key(tenant: str) -> str:
    """ZSET: its running sequences, by the time at which they expire unless renewed."""
    return f"tm:tenant:{{{tenant}}}:open"


def usage_key(tenant: str, month: str) -> str:
    """HASH: `tokens`, and `<kind>:<model>` for each kind and model."""
    return f"tm:tenant:{{{tenant}}}:usage:{month}"


def counted_key(tenant: str) -> str:
    """ZSET: responses that are in the counts, by the time at which they were added."""
    return f"tm:tenant:{{{tenant}}}:counted"


def expiry_key(tenant: str) -> str:
    """ZSET: all of its keys, by the time after which they may be deleted."""
    return f"tm:tenant:{{{tenant}}}:expiry"


def uploads_key(tenant: str) -> str:
    """ZSET: its uploads, by the time at which they expire."""
    return f"tm:tenant:{{{tenant}}}:uploads"


def upload_bytes_key(tenant: str) -> str:
    """HASH: bytes of each upload, and their sum under the empty name."""
    return f"tm:tenant:{{{tenant}}}:upload-bytes"


def stored_key() -> str:
    """HASH: bytes of stored responses by tenant. With a tenant's name behind it a ZSET."""
    return f"tm:tenant:{{{ALL_TENANTS}}}:stored"


def stored_entries_key() -> str:
    """HASH: bytes and tenant of each stored response."""
    return f"tm:tenant:{{{ALL_TENANTS}}}:stored-entries"


def sequence_key(tenant: str, writer: str) -> str:
    """STRING: number of the last batch of a gateway that is in the counts."""
    return f"tm:tenant:{{{tenant}}}:seq:{writer}"


class Scripts:
    """The Lua scripts of this folder; each reads and changes the state in one atomic step."""

    def __init__(self, redis: Redis) -> None:
        self.admit = _script(redis, "admit")
        self.settle = _script(redis, "settle")
        self.renew = _script(redis, "renew")
        self.uploads = _script(redis, "uploads")
        self.stored = _script(redis, "stored")
        self.forget = _script(redis, "forget")


def _script(redis: Redis, name: str) -> Script:
    folder = files(__package__)
    sources = (folder.joinpath(f"{each}.lua").read_text("utf-8") for each in ("common", name))
    return redis.script("".join(sources))


@dataclass(slots=True)
class Sweeper:
    """Deletes tenants' keys after their time; `run` must be running."""

    redis: Redis
    scripts: Scripts
    settings: TenancySettings
    _listed: set[str] = field(default_factory=set)
    _unlisted: set[str] = field(default_factory=set)
    _has_unlisted: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, tenant: str) -> None:
        """Record that a tenant has keys, or will have some."""
        if tenant not in self._listed and tenant not in self._unlisted:
            self._unlisted.add(tenant)
            self._has_unlisted.set()

    async def run(self) -> None:
        """List new tenants at once, and sweep every `tenant_sweep_s` until cancelled."""
        next_s = monotonic_s()
        while True:
            try:
                await self._list()
                if monotonic_s() >= next_s:
                    await self._sweep()
                    next_s = monotonic_s() + self.settings.tenant_sweep_s
                pause_s = next_s - monotonic_s()
            except TokenMeshError as error:
                logger.debug("cannot delete expired keys of tenants: %s", error.message)
                pause_s = self.settings.limits_retry_s
                await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._has_unlisted.wait()
            except TimeoutError:
                pass

    async def _sweep(self) -> None:
        await self._check_policy()
        for tenant in (ALL_TENANTS, *_texts(await self.redis.call("SMEMBERS", TENANTS_KEY))):
            key, until = expiry_key(tenant), wall_s()
            due = _texts(
                await self.redis.call("ZRANGEBYSCORE", key, "-inf", until, "LIMIT", 0, _MAX_KEYS)
            )
            if due:
                await self.scripts.forget([key, *due], [])

    async def _list(self) -> None:
        self._has_unlisted.clear()
        names = sorted(self._unlisted)
        if names:
            await self.redis.call("SADD", TENANTS_KEY, *names)
            self._listed.update(names)
            self._unlisted.difference_update(names)

    async def _check_policy(self) -> None:
        """Log an error for a policy that evicts keys without EXPIRE: it would evict usage."""
        facts = await self.redis.call("INFO", "memory")
        if isinstance(facts, bytes) and b"maxmemory_policy:allkeys" in facts:
            logger.error(
                "Redis may evict tenants' usage: set its maxmemory-policy to volatile-lru or "
                "noeviction"
            )


def _texts(reply: Reply) -> list[str]:
    found = reply if isinstance(reply, list) else []
    return [each.decode("utf-8", "replace") for each in found if isinstance(each, bytes)]
