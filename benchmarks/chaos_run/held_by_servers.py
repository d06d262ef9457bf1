"""Finds what the mesh keeps in Redis and NATS for requests that run, and must give back."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from benchmarks.chaos_run.cluster import Cluster
from tokenmesh.cli.bench.client import Target
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.redis import Redis, open_redis

_PAGE = 500
_INDEX = "kvx:*"
_TENANTS = "tm:tenant:"
_FOREVER = -1
OWN_NAME = "chaos"
"""On the bus."""


async def reserved(redis: Redis) -> list[str]:
    """Reservations and what they add up to; keys of the index that would stay for ever."""
    held = []
    async for key in _keys(redis, _INDEX):
        if key.split(":")[2] == "rsv":
            held += await _reserved_on(redis, key)
        if await redis.call("PTTL", key) == _FOREVER:
            held.append(f"{key} has no end")
    return held


async def _reserved_on(redis: Redis, key: str) -> list[str]:
    """List the reservations of one worker: a field is one, the one without a name is their sum."""
    answer = await redis.call("HGETALL", key)
    assert isinstance(answer, list)
    parts = [_text(each) for each in answer]
    amounts = dict(zip(parts[::2], parts[1::2], strict=True))
    return [
        f"{key}: {name or 'sum'} {amount}"
        for name, amount in amounts.items()
        if name or int(amount)
    ]


async def _keys(redis: Redis, pattern: str) -> AsyncIterator[str]:
    cursor = "0"
    while True:
        answer = await redis.call("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
        assert isinstance(answer, list)
        cursor = _text(answer[0])
        assert isinstance(answer[1], list)
        for key in answer[1]:
            yield _text(key)
        if cursor == "0":
            return


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or 0)


async def forget(settings: RedisSettings) -> None:
    """Redis loses everything but what tenants have used, unless the next fault comes first."""
    redis = open_redis(settings)
    try:
        async for key in _keys(redis, "*"):
            if not key.startswith(_TENANTS):
                await redis.call("DEL", key)
    except Unavailable:
        return
    finally:
        await redis.close()


async def open_marks(bus: MessageBus, settings: ResponseSettings) -> list[str]:
    """Responses that a gateway still claims to work on."""
    marks = await ResponseLogs(open_journal(bus, settings), settings).marks.all()
    return [f"{response} is marked as {owner}'s" for owner, response in marks]


async def most_subscriptions(cluster: Cluster) -> dict[str, list[str]]:
    """Return the subjects of that process of each service which has the most at the NATS server.

    This process is not one of the services.
    """
    monitor = Target(cluster.nats_monitor, None)
    answer = await monitor.fetch("GET", f"/connz?subs=1&limit={_PAGE}")
    found: dict[str, list[str]] = defaultdict(list)
    for each in msgspec.json.decode(answer, type=dict[str, Any])["connections"]:
        service, subjects = each.get("name", "").partition("-")[0], each["subscriptions_list"]
        if service != OWN_NAME and len(subjects) > len(found[service]):
            found[service] = sorted(subjects)
    return dict(found)
