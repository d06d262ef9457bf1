"""What is reserved on a worker, as the scripts of the prefix index keep it."""

from tokenmesh.shared.redis import Redis

_STREAMS = 1 << 20


def amount(tokens: int, streams: int) -> int:
    """As one number."""
    return tokens * _STREAMS + streams


async def reserved(redis: Redis, load: str) -> tuple[int, int] | None:
    """Tokens and streams; None: no such key."""
    reply = await redis.call("GET", load)
    if reply is None:
        return None
    assert isinstance(reply, bytes)
    streams = (int(reply) + _STREAMS // 2) % _STREAMS - _STREAMS // 2
    return (int(reply) - streams) // _STREAMS, streams
