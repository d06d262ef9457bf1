"""ResponseSender: writes one response, a stream or one body. ClientWatch: notices a disconnect."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from starlette.types import Receive, Send

from tokenmesh.services.gateway.core.http import sse
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Cancelled, Draining
from tokenmesh.shared.telemetry import Tally

_DISCONNECT: Final = "http.disconnect"


class ClientWatch:
    """Cancels its block when the client disconnects; the block then raises Cancelled.

    A client that reads no bytes for `patience_s` (at most twice as long) counts as disconnected.
    One timer checks that: a timer for each write would cost as much as the write.
    """

    def __init__(self, receive: Receive, patience_s: float) -> None:
        self._receive = receive
        self._patience_s = patience_s
        self.has_left = False
        """It tells whether the block was cancelled for this reason."""
        self.is_writing = False
        """Set by the writer during each write."""
        self.num_writes = 0
        """Set by the writer."""
        self._num_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        self._check_later()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        is_ours = self.has_left and kind is asyncio.CancelledError
        if is_ours and self._task is not None and self._task.uncancel() == 0:
            raise Cancelled("the client left") from None

    def stop(self) -> None:
        """The response is complete: ignore what the client does from now on."""
        # Break a reference cycle over the task's traceback.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()

    def give_up(self) -> None:
        """Treat the client as disconnected."""
        if self._task is not None and not self.has_left:
            self.has_left = True
            self._task.cancel()

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience_s, self._check)

    def _check(self) -> None:
        if self.is_writing and self.num_writes == self._num_seen:
            self.give_up()
            return
        self._num_seen = self.num_writes
        self._check_later()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            continue
        self.give_up()


Headers = list[tuple[bytes, bytes]]

EVENTS_HEADERS: Final[Headers] = [
    (b"content-type", sse.MEDIA_TYPE),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx would buffer the chunks.
    (b"x-accel-buffering", b"no"),
]


def draining() -> Draining:
    """The error of a request that the stopping server cancels."""
    return Draining("this gateway is stopping", retry_after_s=1.0)


class KeepAlive:
    """Calls `write` whenever nothing was written for `interval_s`.

    Proxies and clients cut connections that stay silent: during a long prompt, in a queue.
    """

    def __init__(self, interval_s: float, write: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._write = write
        # Most streams end earlier: a timer costs less than a task.
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._begin)
        self._task: asyncio.Task[None] | None = None
        self.last_write_s = monotonic_s()
        """Monotonic; set by the writer."""

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            silent_s = monotonic_s() - self.last_write_s
            if silent_s >= self._interval_s:
                await self._write()
                continue
            await asyncio.sleep(self._interval_s - silent_s)


class ResponseSender:
    """Sends the status with the first bytes, and reports each write to `watch`."""

    def __init__(
        self,
        send: Send,
        watch: ClientWatch,
        flushing: Tally,
        more_headers: Callable[[], Headers] = list,
        stream_headers: Headers = EVENTS_HEADERS,
    ) -> None:
        """`flushing` measures the time of writes; `more_headers` is called with the status;
        `stream_headers` are those of a response in parts."""
        self._stream_headers = stream_headers
        self._more_headers = more_headers
        self._send = send
        self._watch = watch
        self._flushing = flushing
        self._keep_alive: KeepAlive | None = None
        self._is_whole = False
        self.has_begun = False
        """It tells whether the status was sent."""

    @contextmanager
    def until_draining(self) -> Iterator[None]:
        """Raises Draining when the server cancels the block.

        Not after a whole body has begun, which no error can replace.
        """
        try:
            yield
        except asyncio.CancelledError:
            if self._watch.has_left or self._is_whole:
                raise
            raise draining() from None

    def keep_alive(self, interval_s: float, data: bytes) -> None:
        """From now on write `data` to the stream after each `interval_s` of silence; 0: never."""
        if interval_s:
            self._keep_alive = KeepAlive(interval_s, lambda: self.write(data))

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Write a part of a stream; `more`: it is not the last one."""
        if not self.has_begun:
            await self._begin(self._stream_headers)
        watch = self._watch
        watch.num_writes += 1
        watch.is_writing = True
        with self._flushing:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        watch.is_writing = False
        if self._keep_alive is not None:
            self._keep_alive.last_write_s = monotonic_s()

    async def end(self, data: bytes) -> None:
        """Write the last bytes of a stream.

        The server reports a disconnect after these, which the watch must not see.
        """
        self.stop()
        await self.write(data, more=False)

    async def answer(self, data: bytes, media_type: bytes = b"application/json") -> None:
        """Send a whole body."""
        self.stop()
        self._is_whole = True
        length = str(len(data)).encode()
        await self._begin([(b"content-type", media_type), (b"content-length", length)])
        await self.write(data, more=False)

    async def send_parts(
        self, headers: list[tuple[bytes, bytes]], parts: AsyncIterator[bytes]
    ) -> None:
        """Send a body whose parts are made while it is sent. They must not fail."""
        self._is_whole = True
        await self._begin(headers)
        async for part in parts:
            await self.write(part)
        self.stop()
        await self.write(b"", more=False)

    def stop(self) -> None:
        """Stop the keep-alive and the watch."""
        self._watch.stop()
        if self._keep_alive is not None:
            self._keep_alive.stop()

    async def _begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        headers = [*headers, *self._more_headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
