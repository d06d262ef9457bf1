"""ResponseSender: sends one response: headers once, bytes in order; it notices a lost client."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from starlette.types import Send

from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.http.client_watch import ClientWatch
from tokenmesh.services.gateway.http.keep_alive import KeepAlive
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Draining
from tokenmesh.shared.telemetry import Tally

_STREAM_HEADERS: Final = [
    (b"content-type", sse.MEDIA_TYPE),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx would hold the chunks back.
    (b"x-accel-buffering", b"no"),
]


def leaving() -> Draining:
    """What the client of a request is told that the server cancels."""
    return Draining("this gateway is about to leave", retry_after_s=1.0)


class ResponseSender:
    """Of a stream of events or of one JSON body."""

    def __init__(
        self,
        send: Send,
        watch: ClientWatch,
        flushing: Tally,
        more_headers: Callable[[], list[tuple[bytes, bytes]]] = list,
    ) -> None:
        """`flushing` receives the time that writes take; `more_headers` is called at the status."""
        self._more_headers = more_headers
        self._send = send
        self._watch = watch
        self._flushing = flushing
        self._keep_alive: KeepAlive | None = None
        self._is_whole = False
        self.has_begun = False
        """Whether the status is out."""

    @contextmanager
    def until_leaving(self) -> Iterator[None]:
        """Raises Draining where the server cancels the block; nobody else does but the watch.

        What is left of a whole body cannot be replaced by an error any more.
        """
        try:
            yield
        except asyncio.CancelledError:
            if self._watch.has_left or self._is_whole:
                raise
            raise leaving() from None

    def keep_alive(self, interval_s: float, data: bytes) -> None:
        """From now on send `data` of a stream whenever nothing was sent for so long; 0: never."""
        if interval_s:
            self._keep_alive = KeepAlive(interval_s, lambda: self.write(data))

    async def write(self, data: bytes) -> None:
        """Some bytes of a stream."""
        if not self.has_begun:
            await self._begin(_STREAM_HEADERS)
        await self._write(data, more=True)

    async def end(self, data: bytes) -> None:
        """The last bytes of a stream.

        After these a server reports the client as gone, which is no news then.
        """
        self.stop()
        if not self.has_begun:
            await self._begin(_STREAM_HEADERS)
        await self._write(data, more=False)

    async def answer(self, data: bytes) -> None:
        """A whole JSON body."""
        self.stop()
        self._is_whole = True
        length = str(len(data)).encode()
        await self._begin([(b"content-type", b"application/json"), (b"content-length", length)])
        await self._write(data, more=False)

    def stop(self) -> None:
        """Keep nothing alive and watch nobody any more."""
        self._watch.stop()
        if self._keep_alive is not None:
            self._keep_alive.stop()

    async def _begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        headers = [*headers, *self._more_headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, data: bytes, *, more: bool) -> None:
        watch = self._watch
        watch.num_writes += 1
        watch.is_writing = True
        with self._flushing:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        watch.is_writing = False
        if self._keep_alive is not None:
            self._keep_alive.last_write_s = monotonic_s()
