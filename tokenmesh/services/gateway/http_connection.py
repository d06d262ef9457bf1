"""HttpConnection: uvicorn's HTTP/1.1, with the bounds that it lacks.

A header has a size and a time, connections have a number, and what is no HTTP is refused in the
API's own shape and logged seldom. And when a connection breaks, all its requests hear of it:
uvicorn tells the one that it read last, which is not the one that runs where a client pipelines.
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenmesh.services.gateway.openai.errors import status_body
from tokenmesh.services.gateway.sse import encode_json
from tokenmesh.shared.bus.complaints import Complaints
from tokenmesh.shared.config.listener import ListenerSettings


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is closed."""

    kind: str
    """A few words, for logs and metrics."""
    status: HTTPStatus
    message: str

    def encode(self) -> bytes:
        """The whole response."""
        body = encode_json(status_body(self.status.value, self.message))
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json"
            f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


_GARBAGE: Final = Refusal("garbage", HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
_LARGE: Final = Refusal(
    "large header",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "the request's header is larger than this server takes",
)
_SLOW: Final = Refusal(
    "slow header", HTTPStatus.REQUEST_TIMEOUT, "the request's header did not arrive in time"
)
_MANY: Final = Refusal(
    "too many connections",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this server has as many connections as it takes",
)
_UPGRADING: Final = (b"connection", b"upgrade", b"http2-settings")


class _HeaderTooLarge(Exception):
    """Raised in the parser, which wraps it."""


class HttpConnection(HttpToolsProtocol):
    """One connection. Its time for a header runs whenever no request does and bytes have come."""

    def __init__(
        self,
        limits: ListenerSettings,
        max_connections: int,
        complaints: Complaints,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_connections = max_connections
        self._complaints = complaints
        self._is_in_header = True
        self._num_header_bytes = 0
        """Of a header that is not complete, without the first of them."""
        self._is_to_stay = False
        """It asks for a protocol that is not spoken here: `_stay` begins the request anew."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(cast("asyncio.Transport", transport))
        if len(self.connections) > self._max_connections:
            self._refuse(_MANY)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._stop_timer()
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
        rest = data
        # One after the other: a client may ask for other protocols a thousand times in one piece.
        while rest and not self.transport.is_closing():
            rest = self._parse(rest)

    def _parse(self, data: bytes) -> bytes:
        """What is to be parsed after it."""
        was_in_header = self._is_in_header
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                return self._stay(data[error.args[0] :])
        except httptools.HttpParserError as error:
            is_large = isinstance(error.__context__, _HeaderTooLarge)
            self._refuse(_LARGE if is_large else _GARBAGE)
        else:
            self._bound_header(len(data) if was_in_header else 0)
        return b""

    def _stay(self, rest: bytes) -> bytes:
        """What to parse instead to take a request as if it had asked for no other protocol.

        Java's client asks for h2c. The parser takes what follows such a header for the other
        protocol already.
        """
        fields = [(name, value) for name, value in self.headers if name not in _UPGRADING]
        lines = [b"%s: %s\r\n" % field for field in fields]
        head = b"%s %s HTTP/1.1\r\n%s\r\n" % (self.parser.get_method(), self.url, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        return head + rest

    def _bound_header(self, num_bytes: int) -> None:
        if self._is_in_header:
            self._num_header_bytes += num_bytes
            if self._num_header_bytes > self._limits.max_header_bytes:
                self._refuse(_LARGE)
                return
        if self._timer is None and (self._is_in_header or not self._is_answering):
            self._start_timer()

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._is_in_header = True
        self._num_header_bytes = 0

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._is_in_header = False
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            raise _HeaderTooLarge
        self._is_to_stay = self.parser.should_upgrade() and not self._should_upgrade()
        if self._is_to_stay:
            return
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < self._limits.max_pipelined:
            # Nobody hears of a client that leaves while nothing is read.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._is_to_stay:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._refuse, _SLOW)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, refusal: Refusal) -> None:
        """Close the connection; between the bytes of an answer there is no place for another."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._complaints.note(refusal.kind, f"from {self.client}")
        if not self._is_answering:
            self.transport.write(refusal.encode())
        self.transport.close()
