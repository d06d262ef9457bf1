"""Answer: a generation as an HTTP response, streamed or whole.

Nothing is sent before the first tokens are there, so that an error until then has its status.
"""

from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway import sse
from tokenmesh.services.gateway.ask import Ask
from tokenmesh.services.gateway.client_watch import ClientWatch
from tokenmesh.services.gateway.delivery import Delivery, deliver
from tokenmesh.services.gateway.exchange import exchange_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.piece import Piece
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally

_STREAM_HEADERS: Final = [
    (b"content-type", sse.MEDIA_TYPE),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx would hold the chunks back.
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """The shape of a route's answer."""

    def begin(self, delivery: Delivery) -> bytes:
        """What a stream starts with."""

    def write(self, delivery: Delivery, pieces: list[Piece]) -> bytes:
        """The chunks of a flush; may be empty."""

    def end(self, delivery: Delivery) -> bytes:
        """What a stream ends with."""

    def fail(self, error: TokenMeshError) -> bytes:
        """The end of a stream that has begun and cannot be completed."""

    def whole(self, delivery: Delivery, pieces: list[Piece]) -> Any:
        """The body of an answer that is not streamed, from all its pieces."""


class Answer(Response):
    """Runs an Ask when it is called."""

    def __init__(self, ask: Ask, gateway: Gateway, writer: Writer, started_s: float) -> None:
        """`started_s`: when the request arrived (monotonic)."""
        super().__init__()
        self._ask = ask
        self._pipeline = gateway.pipeline
        self._settings = gateway.settings
        self._writer = writer
        self._meter = gateway.meters.start(ask.head.model, started_s)
        self._has_begun = False
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                await self._run(send, watch)
        except Cancelled:
            exchange_of(scope).has_client_left = True

    async def _run(self, send: Send, watch: ClientWatch) -> None:
        ask, limit = self._ask, self._settings.max_buffered_tokens
        try:
            async with deliver(self._pipeline, ask.jobs, ask.make_choices, limit) as delivery:
                if ask.is_stream:
                    await self._stream(delivery, send, watch)
                else:
                    await self._collect(delivery, send, watch)
                self._meter.finish(delivery, ask.jobs[0].n)
        except TokenMeshError as error:
            if not self._has_begun or isinstance(error, Cancelled):
                raise
            await self._send_last(self._writer.fail(error), send, watch)
        finally:
            self._flushing.record({REQUEST_ID: ask.jobs[0].request_id})

    async def _stream(self, delivery: Delivery, send: Send, watch: ClientWatch) -> None:
        writer = self._writer
        async for pieces in delivery.pieces():
            self._meter.flush(delivery)
            data = writer.write(delivery, pieces)
            if not self._has_begun:
                await self._begin(send, 200, _STREAM_HEADERS)
                data = writer.begin(delivery) + data
            if delivery.is_complete:
                await self._send_last(data + writer.end(delivery), send, watch)
            elif data:
                await self._send(data, send, watch, more=True)

    async def _collect(self, delivery: Delivery, send: Send, watch: ClientWatch) -> None:
        collected: list[Piece] = []
        async for pieces in delivery.pieces():
            self._meter.flush(delivery)
            collected.extend(pieces)
        data = sse.encode_json(self._writer.whole(delivery, collected))
        length = str(len(data)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._begin(send, 200, headers)
        await self._send_last(data, send, watch)

    async def _begin(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_last(self, data: bytes, send: Send, watch: ClientWatch) -> None:
        """After its last byte a server reports the client as gone, which is no news then."""
        watch.stop()
        await self._send(data, send, watch, more=False)

    async def _send(self, data: bytes, send: Send, watch: ClientWatch, *, more: bool) -> None:
        watch.num_writes += 1
        watch.is_writing = True
        with self._flushing:
            await send({"type": "http.response.body", "body": data, "more_body": more})
        watch.is_writing = False
