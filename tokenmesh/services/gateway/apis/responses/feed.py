"""Feed: the events of a running response for its connected client, and their HTTP responses."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.apis.responses.records import Record, ResponseEnded, frames_of
from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.http.response_sender import ClientWatch, ResponseSender
from tokenmesh.services.gateway.core.http.sse import COMMENT, event_frame
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, Conflict, Overloaded, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally

Frames = AsyncGenerator[bytes, None]
Follow = Callable[[int], Frames]
"""Reads the frames of a response from its log, from a number on."""


class Feed:
    """Frames in order for one reader. If it falls too far behind, it has to read from the log."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._is_full = False
        self._is_closed = False
        self._error: TokenMeshError | None = None
        self._news = asyncio.Event()
        self.num_read = 0
        """Frames that were read."""
        self.ended: ResponseEnded | None = None

    def push(self, records: Sequence[Record]) -> None:
        """Add the frames of new records."""
        for record in records:
            if isinstance(record, ResponseEnded):
                self.ended = record
            frames = frames_of(record)
            self._num_bytes += sum(map(len, frames))
            self._is_full = self._is_full or self._num_bytes > self._max_bytes
            if not self._is_full:
                self._frames.extend(frames)
        self._news.set()

    @property
    def is_cut(self) -> bool:
        """Return whether the feed does not have all frames of the response."""
        return self._is_full or self.ended is None

    def leave(self) -> None:
        """The reader has left: keep only the end."""
        self._is_full = True
        self._frames = []
        self._news.set()

    def close(self, error: TokenMeshError | None = None) -> None:
        """The run is over."""
        self._is_closed = True
        self._error = error
        self._news.set()

    async def read(self) -> AsyncIterator[bytes]:
        """New frames, joined as they come, until the feed has no more.

        Raises the error of `close`, unless the end of the response was read.
        """
        while True:
            if not self._frames and not self._is_over:
                await self._news.wait()
            self._news.clear()
            frames, self._frames = self._frames, []
            if not self._is_full:
                self._num_bytes = 0
            if frames:
                self.num_read += len(frames)
                yield b"".join(frames)
            elif self._error is not None and self.ended is None:
                raise self._error
            elif self._is_over:
                return

    async def end(self) -> ResponseEnded | None:
        """The last record, once the run is over. Raises the error of `close`."""
        while not self._is_closed:
            await self._news.wait()
            self._news.clear()
        if self._error is not None:
            raise self._error
        return self.ended

    @property
    def _is_over(self) -> bool:
        return self._is_full or self._is_closed or self.ended is not None


async def feed_then_log(feed: Feed, follow: Follow | None) -> Frames:
    """Frames of the feed, then of the log if the feed is cut. `follow` None: there is no log."""
    try:
        async for data in feed.read():
            yield data
    except Conflict:
        if follow is None:
            raise
    if not feed.is_cut:
        return
    if follow is None:
        raise Overloaded("the client reads too slowly")
    async with aclosing(follow(feed.num_read)) as rest:
        async for data in rest:
            yield data


class FramesResponse(Response):
    """Sends frames as they come. `on_left` is called if the client disconnects before the end."""

    def __init__(
        self,
        frames: Frames,
        settings: GatewaySettings,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._frames = frames
        self._settings = settings
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        flushing = Tally("flush")
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                sender = ResponseSender(send, watch, flushing)
                sender.keep_alive(self._settings.sse_keep_alive_s, COMMENT)
                try:
                    await self._send(sender)
                finally:
                    sender.stop()
                    flushing.record({REQUEST_ID: context_of(scope).request_id})
        except Cancelled:
            context_of(scope).has_client_left = True
            if self._on_left is not None:
                self._on_left()

    async def _send(self, sender: ResponseSender) -> None:
        try:
            with sender.until_draining():
                async with aclosing(self._frames) as frames:
                    async for data in frames:
                        await sender.write(data)
        except TokenMeshError as error:
            if not sender.has_begun or isinstance(error, Cancelled):
                raise
            fields = {"code": error.code, "message": error.message, "param": error.param}
            await sender.end(event_frame({"type": "error", **fields}))
        else:
            await sender.end(b"")


class WholeResponse(Response):
    """Sends the Response object when it is complete."""

    def __init__(self, feed: Feed, settings: GatewaySettings, on_left: Callable[[], None]) -> None:
        super().__init__()
        self._feed = feed
        self._settings = settings
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                ended = await self._feed.end()
                if ended is None:
                    raise TokenMeshError("the response was not completed")
                await ResponseSender(send, watch, Tally("flush")).answer(ended.response)
        except Cancelled:
            context_of(scope).has_client_left = True
            self._on_left()
