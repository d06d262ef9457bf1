"""Reads reservations on a worker, as the scripts of the prefix index keep them."""

from tokenmesh.shared.redis import Redis

_STREAMS = 1 << 20


def amount(tokens: int, streams: int) -> int:
    """As one number."""
    return tokens * _STREAMS + streams


async def reserve(redis: Redis, key: str, reservations: dict[str, int]) -> None:
    """As placements do: amounts by field, and their sum."""
    for field, size in reservations.items():
        await redis.call_all([["HSET", key, field, size], ["HINCRBY", key, "", size]])


async def reserved(redis: Redis, key: str) -> tuple[int, int] | None:
    """Tokens and streams; None: nothing ever was."""
    reply = await redis.call("HGET", key, "")
    if reply is None:
        return None
    assert isinstance(reply, bytes)
    streams = (int(reply) + _STREAMS // 2) % _STREAMS - _STREAMS // 2
    return (int(reply) - streams) // _STREAMS, streams
