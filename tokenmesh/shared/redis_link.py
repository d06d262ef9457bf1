"""RedisLink: one connection to Redis, kept open, with many calls under way. Only it knows hiredis.

Redis answers the calls of a connection in their order, so a queue of futures matches replies to
calls. For small calls that must be quick: a call after a large one waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final, cast

import hiredis

Part = str | bytes | int | float
Reply = bytes | str | int | float | list["Reply"] | None

_NOT_YET: Final = object()


class RefusedByRedis(Exception):
    """An error that Redis answered with; its first word is the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Where Redis listens, and the credentials. `path`: a unix socket instead of host and port."""

    host: str = ""
    port: int = 0
    path: str = ""
    ssl: SSLContext | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0


class RedisLink:
    """Connects with its first call, and again whenever it has to.

    Calls raise RefusedByRedis, TimeoutError after `call_timeout_s` and OSError when Redis is away.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        connect_timeout_s: float,
        call_timeout_s: float,
        max_calls: int,
    ) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s
        self._max_calls = max_calls
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    async def call(self, *parts: Part) -> Reply:
        """One command; once more when the connection breaks meanwhile, as a restart does."""
        until_s = asyncio.get_running_loop().time() + self._call_timeout_s
        try:
            return await self._call(parts, until_s)
        except ConnectionResetError:
            return await self._call(parts, until_s)

    async def transact(self, commands: Sequence[Sequence[Part]]) -> list[Reply]:
        """The replies to commands that run without others in between (MULTI), sent as one write.

        Raises the first error among them, and retries once, as `call` does.
        """
        until_s = asyncio.get_running_loop().time() + self._call_timeout_s
        try:
            return await self._transact(commands, until_s)
        except ConnectionResetError:
            return await self._transact(commands, until_s)

    async def _call(self, parts: Sequence[Part], until_s: float) -> Reply:
        return await (await self._free_wire(until_s)).call(parts, until_s)

    async def _transact(self, commands: Sequence[Sequence[Part]], until_s: float) -> list[Reply]:
        wire = await self._free_wire(until_s)
        futures = wire.call_all([["MULTI"], *commands, ["EXEC"]], until_s)
        # A command that is refused when it is queued explains why EXEC is.
        replies = await asyncio.gather(*futures, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        results = cast("list[Reply]", replies[-1])
        for result in results:
            if isinstance(result, RefusedByRedis):
                raise result
        return results

    async def _free_wire(self, until_s: float) -> "_Wire":
        """Raises OSError when too many calls are under way."""
        wire = self._wire
        if wire is None or wire.is_lost:
            async with asyncio.timeout_at(until_s):
                wire = await self._connected()
        if wire.num_calls >= self._max_calls:
            raise OSError(f"{self._max_calls} calls are under way already")
        return wire

    async def _connected(self) -> "_Wire":
        """All waiting calls share one attempt to connect."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # No call may be waiting any more when it fails.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> "_Wire":
        loop, address = asyncio.get_running_loop(), self._address
        until_s = loop.time() + self._connect_timeout_s
        async with asyncio.timeout_at(until_s):
            if address.path:
                _, wire = await loop.create_unix_connection(_Wire, address.path)
            else:
                _, wire = await loop.create_connection(
                    _Wire, address.host, address.port, ssl=address.ssl
                )
        try:
            for command in _greeting(address):
                await wire.call(command, until_s)
        except BaseException:
            wire.break_off()
            raise
        self._wire = wire
        return wire

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            self._wire.break_off()
            await self._wire.closed.wait()


def _greeting(address: RedisAddress) -> list[list[Part]]:
    commands: list[list[Part]] = []
    if address.password is not None:
        commands.append(["AUTH", *filter(None, [address.username]), address.password])
    if address.db:
        commands.append(["SELECT", address.db])
    return commands


class _Wire(asyncio.Protocol):
    """A connection and the calls on it that have no answer yet, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=RefusedByRedis, notEnoughData=_NOT_YET)
        self._calls: deque[tuple[float, asyncio.Future[Reply]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.is_lost = False
        """No more calls are accepted."""
        self.closed = asyncio.Event()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def call(self, parts: Sequence[Part], until_s: float) -> asyncio.Future[Reply]:
        """The reply to come; `until_s` is the loop's time."""
        return self.call_all([parts], until_s)[0]

    def call_all(
        self, commands: Sequence[Sequence[Part]], until_s: float
    ) -> list[asyncio.Future[Reply]]:
        """The same for several commands in one write."""
        if self.is_lost or self._transport is None:
            raise ConnectionResetError("the connection is lost")
        futures: list[asyncio.Future[Reply]] = [self._loop.create_future() for _ in commands]
        self._calls.extend((until_s, future) for future in futures)
        if self._timer is None or until_s < self._timer.when():
            self._look_at(until_s)
        packed = [hiredis.pack_command(tuple(parts)) for parts in commands]  # type: ignore[arg-type]
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        return futures

    def break_off(self) -> None:
        """Close at once; what is under way fails."""
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        """One timer for all calls: after a late reply no later one can come."""
        self._timer, now_s = None, self._loop.time()
        for until_s, future in self._calls:
            if until_s <= now_s and not future.done():
                future.set_exception(TimeoutError())
        if not self._calls:
            return
        nearest_s = min(until_s for until_s, _ in self._calls)
        if nearest_s <= now_s:
            self.break_off()
        else:
            self._look_at(nearest_s)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOT_YET:
                self._answer(reply)
        except (hiredis.HiredisError, IndexError):
            # Not the Redis protocol, or more replies than calls.
            self.break_off()

    def _answer(self, reply: object) -> None:
        _, future = self._calls.popleft()
        if future.done():
            return
        if isinstance(reply, RefusedByRedis):
            future.set_exception(reply)
        else:
            future.set_result(reply)  # type: ignore[arg-type]

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._calls:
            if not future.done():
                future.set_exception(ConnectionResetError("the connection was lost"))
        self._calls.clear()
        self.closed.set()
