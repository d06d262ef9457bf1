"""WakeLeases: one scheduler at a time decides which workers of a group wake and which sleep.

Redis holds who decides, for a time that is renewed with every look. The memory itself is bounded by
the lock files of the workers: two that decide at once wake and put to sleep more than they need to,
and nothing worse. So without Redis each scheduler decides.
"""

import logging
from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

LEASE_S: Final = 3.0
"""A scheduler that has died decides for so long."""
_LOOK_S: Final = 1.0
"""An answer of Redis counts for so long."""

_TAKE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


def lease_key(group: str) -> str:
    """The key in Redis; `rights.py` names its prefix."""
    return f"tm:wake:{group}"


class WakeLeases:
    """The leases of one scheduler, and what it knows of those of others."""

    def __init__(self, redis: Redis, instance_id: InstanceId, epoch: int) -> None:
        self._take = redis.script(_TAKE)
        self._release = redis.script(_RELEASE)
        self.own_id = instance_id
        # The epoch keeps a process that was started again under its old id from a lease of before:
        # it knows nothing of those wakes.
        self._own = f"{instance_id} {epoch}"
        self._seen: dict[str, tuple[InstanceId, float]] = {}
        """By group: who decides, and when Redis was asked."""

    async def holder(self, group: str) -> InstanceId:
        """Return who decides for the group, which is this scheduler where no other does.

        Call it before each decision. It takes as long as a call of Redis may, once a second.
        """
        holder, asked_s = self._seen.get(group, (self.own_id, -_LOOK_S))
        now = monotonic_s()
        if now - asked_s < _LOOK_S:
            return holder
        holder = await self._ask(group)
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < LEASE_S}
        self._seen[group] = holder, now
        return holder

    async def _ask(self, group: str) -> InstanceId:
        try:
            reply = await self._take([lease_key(group)], [self._own, int(LEASE_S * 1000)])
        except TokenMeshError as error:
            logger.warning("deciding alone which workers wake: %s", error.message)
            return self.own_id
        assert isinstance(reply, bytes)
        holder = reply.decode(errors="replace")
        return InstanceId(holder.rpartition(" ")[0])

    async def release(self) -> None:
        """Let others decide at once."""
        groups = [group for group, seen in self._seen.items() if seen[0] == self.own_id]
        self._seen.clear()
        try:
            for group in groups:
                await self._release([lease_key(group)], [self._own])
        except TokenMeshError as error:
            logger.info("leases of wakes are left to expire: %s", error.message)
