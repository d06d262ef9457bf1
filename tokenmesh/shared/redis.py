"""Redis with a bound on every call and our errors. The only file that knows redis-py.

Replies are what Redis sends (bytes, integers, lists): the callers decode. Commands take a
connection of a pool, since they may be large; scripts and transactions, which are wanted quickly,
share another one.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

from tokenmesh.shared.cancellation import keeps_cancellation
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import ConfigError, TokenMeshError, Unavailable
from tokenmesh.shared.lean_import import without
from tokenmesh.shared.redis_link import Part, RedisAddress, RedisLink, RefusedByRedis, Reply

# For its own metrics, which nothing here reads, it would import OpenTelemetry's: 2 MB and 60 ms of
# CPU time in every process.
with without("opentelemetry.metrics", "opentelemetry.sdk.metrics"):
    from redis.asyncio import BlockingConnectionPool
    from redis.asyncio import Redis as Client
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )

__all__ = ["Part", "Redis", "Reply", "Script", "open_redis"]

_BUSY: Final = re.compile(
    r"(?:^|-)(?:LOADING|BUSY|READONLY|MASTERDOWN|OOM|MAXMEMORY|TRYAGAIN|MISCONF|NOREPLICAS)\b"
)
"""Refusals that pass; a script that met one wraps it in an error of its own."""
_NO_ENTRY: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH", "ERR invalid password")
"""First words of refusals of the credentials."""


def open_redis(settings: RedisSettings) -> "Redis":
    """A client that connects with its first call, and again whenever it has to."""
    pool = BlockingConnectionPool.from_url(
        settings.url,
        **({"username": settings.user} if settings.user else {}),
        **({"password": settings.password.get_secret_value()} if settings.password else {}),
        max_connections=settings.pool_size,
        timeout=settings.call_timeout_s,
        socket_connect_timeout=settings.connect_timeout_s,
        socket_timeout=settings.call_timeout_s,
        protocol=2,
        # One more attempt replaces a pooled connection that a restart of Redis has cut.
        retry=Retry(NoBackoff(), 1),
    )
    client = Client(connection_pool=pool)
    # redis-py would turn some replies into other types, depending on the command.
    client.response_callbacks.clear()
    return Redis(client, settings, _link(pool, settings))


def _link(pool: BlockingConnectionPool, settings: RedisSettings) -> RedisLink:
    """To the same address: redis-py reads the URL and its TLS options."""
    way = pool.connection_class(**pool.connection_kwargs)
    tls = getattr(way, "ssl_context", None)
    address = RedisAddress(
        host=getattr(way, "host", ""),
        port=int(getattr(way, "port", 0)),
        path=getattr(way, "path", ""),
        ssl=tls.get() if tls is not None else None,
        username=way.username,
        password=way.password,
        db=int(way.db),
    )
    return RedisLink(
        address,
        connect_timeout_s=settings.connect_timeout_s,
        call_timeout_s=settings.call_timeout_s,
        max_calls=settings.max_script_calls,
    )


class Redis:
    """A pool of connections, and one for scripts and transactions.

    Every call ends within `call_timeout_s`.

    Calls raise Unavailable when Redis is away or busy, ConfigError when it refuses the user,
    TokenMeshError for a command that it calls wrong.
    """

    def __init__(self, client: Client, settings: RedisSettings, link: RedisLink) -> None:
        self._client = client
        self._link = link
        self._settings = settings
        self._running: set[asyncio.Timeout] = set()
        self._is_closed = False

    async def call(self, *parts: Part) -> Reply:
        """One command, such as `call("GET", key)`."""
        async with self._bounded():
            return await self._execute(*parts)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """The time of a call, its errors as ours, and no cancellation lost.

        redis-py closes and retries behind a caller's back, and may swallow a cancellation there.
        """
        if self._is_closed:
            raise Unavailable("Redis connection is closed")
        timeout = asyncio.timeout(self._settings.call_timeout_s)
        self._running.add(timeout)
        with keeps_cancellation():
            try:
                async with timeout:
                    yield
            except (RedisError, OSError) as error:
                raise self._translate(error) from error
            finally:
                self._running.discard(timeout)

    async def _execute(self, *parts: Part) -> Reply:
        return cast("Reply", await self._client.execute_command(*parts))  # type: ignore[no-untyped-call]

    async def call_all(self, commands: Sequence[Sequence[Part]]) -> list[Reply]:
        """Several commands in one round trip, not atomic; raises the first error among them."""
        async with self._bounded(), self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return cast("list[Reply]", await pipeline.execute())

    async def transact(self, commands: Sequence[Sequence[Part]]) -> list[Reply]:
        """Several commands without others in between (MULTI); raises the first error among them.

        An error does not undo the others.
        """
        if self._is_closed:
            raise Unavailable("Redis connection is closed")
        try:
            return await self._link.transact(commands)
        except (RefusedByRedis, OSError) as error:
            raise self._translate(error) from error

    def script(self, source: str) -> "Script":
        """A Lua script that Redis keeps by its hash."""
        return Script(self, source)

    async def run_script(
        self, sha: str, source: str, keys: Sequence[Part], arguments: Sequence[Part]
    ) -> Reply:
        """EVALSHA, or EVAL where Redis does not know the script (any more)."""
        if self._is_closed:
            # The link would connect again, and never be closed.
            raise Unavailable("Redis connection is closed")
        try:
            return await self._link.call("EVALSHA", sha, len(keys), *keys, *arguments)
        except (RefusedByRedis, OSError) as error:
            if not str(error).startswith("NOSCRIPT"):
                raise self._translate(error) from error
        try:
            return await self._link.call("EVAL", source, len(keys), *keys, *arguments)
        except (RefusedByRedis, OSError) as error:
            raise self._translate(error) from error

    async def close(self) -> None:
        """Close every connection; running calls raise Unavailable.

        They end first: redis-py connects again for a call whose connection is closed, and may
        swallow the cancellation of one that connects.
        """
        self._is_closed = True
        await self._link.close()
        await self._client.aclose()
        while True:
            for timeout in self._running:
                if not timeout.expired():
                    timeout.reschedule(0)
            await self._client.connection_pool.disconnect()
            if not self._running:
                break
            await asyncio.sleep(0.001)

    def _translate(self, error: RedisError | RefusedByRedis | OSError) -> TokenMeshError:
        # OSError covers TimeoutError.
        reason = str(error) or f"no answer within {self._settings.call_timeout_s} s"
        is_unknown = isinstance(error, AuthenticationError | NoPermissionError)
        if is_unknown or reason.startswith(_NO_ENTRY):
            return ConfigError(f"Redis refuses this user: {reason}", param="redis.password")
        is_refused = isinstance(error, ResponseError | RefusedByRedis)
        is_busy = isinstance(error, OutOfMemoryError | ReadOnlyError) or _BUSY.search(reason)
        if is_refused and not is_busy:
            return TokenMeshError(f"Redis refuses a command: {reason}")
        return Unavailable(f"Redis is unavailable: {reason}")


class Script:
    """A Lua script; made by `Redis.script`."""

    def __init__(self, redis: Redis, source: str) -> None:
        self._redis = redis
        self._source = source
        self._sha = _sha1(source)

    async def __call__(self, keys: Sequence[Part], arguments: Sequence[Part]) -> Reply:
        """Run it; see `Redis` for what it raises."""
        return await self._redis.run_script(self._sha, self._source, keys, arguments)


def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
