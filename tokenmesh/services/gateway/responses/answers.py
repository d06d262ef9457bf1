"""HTTP answers for responses that are made apart from the client's own request."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.http.client_watch import ClientWatch
from tokenmesh.services.gateway.http.response_sender import ResponseSender
from tokenmesh.services.gateway.http.sse import COMMENT
from tokenmesh.services.gateway.responses.feed import Feed
from tokenmesh.services.gateway.responses.frames import frames
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, Conflict, Overloaded, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally

Frames = AsyncGenerator[bytes, None]
Follow = Callable[[int], Frames]
"""The frames of a response from a number on."""


def _nobody() -> None:
    """Nobody wants to know."""


class FramesAnswer(Response):
    """Frames as they come. `on_left` is called when the client leaves before their end."""

    def __init__(
        self,
        told: Frames,
        settings: GatewaySettings,
        on_left: Callable[[], None] = _nobody,
    ) -> None:
        super().__init__()
        self._told = told
        self._settings = settings
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        flushing = Tally("flush")
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                outlet = ResponseSender(send, watch, flushing)
                outlet.keep_alive(self._settings.sse_keep_alive_s, COMMENT)
                try:
                    await self._run(outlet)
                finally:
                    outlet.stop()
                    flushing.record({REQUEST_ID: context_of(scope).request_id})
        except Cancelled:
            context_of(scope).has_client_left = True
            self._on_left()

    async def _run(self, outlet: ResponseSender) -> None:
        try:
            with outlet.until_leaving():
                async with aclosing(self._told) as told:
                    async for data in told:
                        await outlet.write(data)
        except TokenMeshError as error:
            if not outlet.has_begun or isinstance(error, Cancelled):
                raise
            facts = {"code": error.code, "message": error.message, "param": error.param}
            event = {"type": "error", **facts}
            await outlet.end(frames((event,)))
        else:
            await outlet.end(b"")


class WholeAnswer(Response):
    """The Response object when it is complete."""

    def __init__(self, feed: Feed, settings: GatewaySettings, on_left: Callable[[], None]) -> None:
        super().__init__()
        self._feed = feed
        self._settings = settings
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                ended = await self._feed.end()
                if ended is None:
                    raise TokenMeshError("the response was not completed")
                await ResponseSender(send, watch, Tally("flush")).answer(ended.response)
        except Cancelled:
            context_of(scope).has_client_left = True
            self._on_left()


async def feed_then_log(feed: Feed, follow: Follow | None) -> Frames:
    """Frames from the run; from the log where the run is not here any more, or is too fast."""
    try:
        async for data in feed.read():
            yield data
    except Conflict:
        if follow is None:
            raise
    if not feed.is_cut:
        return
    if follow is None:
        raise Overloaded("the client is too far behind")
    async with aclosing(follow(feed.num_read)) as rest:
        async for data in rest:
            yield data
