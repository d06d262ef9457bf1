"""HttpConnection: uvicorn's HTTP/1.1, with the bounds that it lacks.

A header has a size and a time, connections have a number, and what is no HTTP is refused in the
API's own shape and logged seldom. And when a connection breaks, all its requests hear of it:
uvicorn tells the one that it read last, which is not the one that runs where a client pipelines.

What arrives is parsed in small portions: pipelined requests beyond the bound stay bytes, and one
connection holds the event loop for no more than a turn.
"""

import asyncio
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenmesh.services.gateway.http.flow import Flow
from tokenmesh.services.gateway.http.refusal import (
    BUSY,
    GARBAGE,
    LARGE,
    MANY,
    SLOW,
    TUNNEL,
    Refusal,
    Refused,
)
from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.http import ListenerSettings

_UPGRADING: Final = (b"connection", b"upgrade", b"http2-settings")
_PORTION_BYTES: Final = 4096
"""Parsed at once: some 200 of the shortest requests."""
_TURN_S: Final = 0.002


class _Answer:
    """The part of a transport that an answer uses; `close` is the connection's."""

    def __init__(self, transport: asyncio.Transport, connection: "HttpConnection") -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = connection.close_read


class HttpConnection(HttpToolsProtocol):
    """One connection. Its time for a header runs whenever no request does and bytes have come."""

    def __init__(
        self,
        limits: ListenerSettings,
        max_connections: int,
        complaints: RateLimitedLog,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_connections = max_connections
        self._complaints = complaints
        self._unparsed = bytearray()
        self._is_turn_over = False
        """The rest is parsed in the event loop's next turn."""
        self._is_in_header = True
        self._num_header_bytes = 0
        """Of a header that is not complete, without the first of them."""
        self._is_to_stay = False
        """It asks for a protocol that is not spoken here: `_stay` parses the request again."""
        self._has_stayed = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._is_lingering = False
        self._num_lingered_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._flow = self.flow = Flow(self.transport)
        if len(self.connections) > self._max_connections:
            self._refuse(MANY)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._stop_timer()
        # uvicorn leaves it running after a reset, and with it all that the connection refers to.
        self._unset_keepalive_if_required()
        self._unparsed.clear()
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        # A request refers to its connection: without the way back its body is freed with it.
        self._running = None
        self.cycle = cast("RequestResponseCycle", None)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.transport.is_closing():
            return
        if self._is_lingering:
            self._num_lingered_bytes += len(data)
            if self._num_lingered_bytes > self._limits.linger_bytes:
                self.transport.close()
            return
        self._unparsed += data
        if not self._is_turn_over:
            self._parse_on()

    def _parse_on(self) -> None:
        """Parse what has come, until requests wait enough or the turn is over."""
        self._is_turn_over = False
        end_s = monotonic_s() + _TURN_S
        self._unset_keepalive_if_required()
        while self._unparsed and not self._is_done and not self._is_full:
            if monotonic_s() > end_s:
                self._is_turn_over = True
                self.loop.call_soon(self._parse_on)
                break
            portion = bytes(self._unparsed[:_PORTION_BYTES])
            del self._unparsed[: len(portion)]
            self._parse(portion)
        if self._unparsed and self._is_full:
            # Its header, if it is in one, cannot arrive meanwhile.
            self._stop_timer()
        if not self._is_done:
            self._flow.hold(bool(self._unparsed))

    @property
    def _is_done(self) -> bool:
        """No further request is read."""
        return self._is_lingering or self.transport.is_closing() or self.parser is None

    @property
    def _is_full(self) -> bool:
        return len(self.pipeline) >= max(1, self._limits.max_pipelined)

    def _parse(self, data: bytes) -> None:
        was_in_header = self._is_in_header
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._upgrade(data[error.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.refusal if isinstance(cause, Refused) else GARBAGE)
            # its traceback leads to this frame
            del cause
        else:
            self._bound_header(len(data) if was_in_header else 0)

    def _upgrade(self, rest: bytes) -> None:
        """`rest`: what came after the header."""
        if not self._should_upgrade():
            self._stay(rest)
        elif self._is_answering or self.pipeline:
            self._refuse(BUSY)
        else:
            self._unparsed.clear()
            self.handle_websocket_upgrade()

    def _stay(self, rest: bytes) -> None:
        """Parse a request again as if it had asked for no other protocol.

        Java's client asks for h2c. The parser takes what follows such a header for the other
        protocol already.
        """
        if self._has_stayed:
            self._refuse(GARBAGE)
            return
        self._has_stayed = True
        fields = [(name, value) for name, value in self.headers if name not in _UPGRADING]
        lines = [b"%s: %s\r\n" % field for field in fields]
        start = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (*start, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self._unparsed[:0] = head + rest

    def _bound_header(self, num_bytes: int) -> None:
        if self._is_in_header:
            self._num_header_bytes += num_bytes
            if self._num_header_bytes > self._limits.max_header_bytes:
                self._refuse(LARGE)
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
            raise Refused(LARGE)
        if self.parser.get_method() == b"CONNECT":
            # The parser switches protocols after it, regardless of its headers.
            raise Refused(TUNNEL)
        self._is_to_stay = self.parser.should_upgrade() and not self._should_upgrade()
        if self._is_to_stay:
            return
        self._has_stayed = False
        super().on_headers_complete()
        if self.pipeline and not self._is_full:
            # Nobody hears of a client that leaves while nothing is read.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._is_to_stay:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called when an answer is written."""
        if self._is_lingering:
            return
        super().on_response_complete()
        if self._unparsed and not self._is_turn_over and not self._is_done:
            self._is_turn_over = True
            self.loop.call_soon(self._parse_on)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        cycle.transport = cast("asyncio.Transport", _Answer(self.transport, self))
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._refuse, SLOW)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, refusal: Refusal) -> None:
        """Close the connection; between the bytes of an answer there is no place for another."""
        if self._is_done:
            return
        self._complaints.note(refusal.kind, f"from {self.client}")
        if not self._is_answering:
            self.transport.write(refusal.encode())
        if refusal in (MANY, SLOW):
            self._stop_timer()
            self.transport.close()
        else:
            self._linger()

    def close_read(self) -> None:
        """Close once the request's body, of which an answer may not wait for the end, is read."""
        is_sending = self._running is not None and self._running.more_body
        if is_sending or self._unparsed:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Say that nothing more is written, and drop what comes for a while.

        Closing with bytes unread resets the connection: the client would see no answer.
        """
        if self._is_done:
            return
        self._is_lingering = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._unparsed.clear()
        self._timer = self.loop.call_later(self._limits.linger_s, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._flow.hold(False)
        self._flow.resume_reading()
