"""HttpConnection: uvicorn's HTTP/1.1 with further bounds.

Headers are limited in size and time, connections in number. Bytes that are not HTTP get an error in
the API's shape, and a log line at most once in an interval. When a connection breaks, all its
requests are cancelled; uvicorn cancels only the last one that it read.

Input is parsed in small portions: pipelined requests beyond the limit stay bytes, and one
connection occupies the event loop for at most a turn.
"""

import asyncio
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tokenmesh.services.gateway.core.http import refusal
from tokenmesh.services.gateway.core.http.middleware import UntilClose
from tokenmesh.services.gateway.core.http.refusal import ConnectionRefused, Refusal
from tokenmesh.shared.bus.base import RateLimitedLog
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.http import ListenerSettings

_UPGRADING: Final = (b"connection", b"upgrade", b"http2-settings")
_PORTION_BYTES: Final = 4096
"""Parsed at once: about 200 of the shortest requests."""
_TURN_S: Final = 0.002


class Flow(FlowControl):
    """uvicorn's flow control, which also pauses while bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._is_full = False

    def pause_reading(self) -> None:
        self._is_full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_full = False
        self._resume()

    def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        if is_held:
            super().pause_reading()
        else:
            self._resume()

    def _resume(self) -> None:
        if not self._is_held and not self._is_full:
            super().resume_reading()


class _ResponseTransport:
    """The part of a transport that a response uses; `close` is the connection's."""

    def __init__(self, transport: asyncio.Transport, connection: "HttpConnection") -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = connection.close_read


class HttpConnection(HttpToolsProtocol):
    """One connection. The time limit of a header applies while no request is running."""

    def __init__(
        self,
        limits: ListenerSettings,
        max_connections: int,
        refusals: RateLimitedLog,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_connections = max_connections
        self._refusals = refusals
        self._unparsed = bytearray()
        self._is_turn_over = False
        """The rest is parsed in the next turn of the event loop."""
        self._is_in_header = True
        self._num_header_bytes = 0
        """This is the size of an incomplete header, except its first portion."""
        self._ignores_upgrade = False
        """The request names an unknown protocol: `_parse_again` reads it without the upgrade."""
        self._was_parsed_again = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._is_lingering = False
        self._num_lingered_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._flow = self.flow = Flow(self.transport)
        if len(self.connections) > self._max_connections:
            self._refuse(refusal.MANY)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        # After a reset uvicorn leaves this timer running, which refers to the connection.
        self._unset_keepalive_if_required()
        self._unparsed.clear()
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        # Break the reference cycle, so that a request's body is freed with the request.
        self._running = None
        self.cycle = cast("RequestResponseCycle", None)

    def data_received(self, data: bytes) -> None:
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
        """Parse until enough requests wait or the turn is over."""
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
            # A header cannot arrive while nothing is read.
            self._stop_timer()
        if not self._is_done:
            self._flow.hold(bool(self._unparsed))

    @property
    def _is_done(self) -> bool:
        """Return whether no further request is read."""
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
            self._refuse(cause.refusal if isinstance(cause, ConnectionRefused) else refusal.GARBAGE)
            # Its traceback refers to this frame.
            del cause
        else:
            self._bound_header(len(data) if was_in_header else 0)

    def _upgrade(self, rest: bytes) -> None:
        """`rest`: the bytes after the header."""
        if not self._should_upgrade():
            self._parse_again(rest)
        elif self._is_answering or self.pipeline:
            self._refuse(refusal.BUSY)
        else:
            self._unparsed.clear()
            self.handle_websocket_upgrade()

    def _parse_again(self, rest: bytes) -> None:
        """Parse a request again without its upgrade header.

        Java's client requests h2c. After such a header the parser expects the other protocol.
        """
        if self._was_parsed_again:
            self._refuse(refusal.GARBAGE)
            return
        self._was_parsed_again = True
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
                self._refuse(refusal.LARGE)
                return
        if self._timer is None and (self._is_in_header or not self._is_answering):
            self._start_timer()

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_header = True
        self._num_header_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        self._stop_timer()
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self._limits.max_header_bytes:
            raise ConnectionRefused(refusal.LARGE)
        if self.parser.get_method() == b"CONNECT":
            # The parser switches protocols after it, whatever its headers are.
            raise ConnectionRefused(refusal.TUNNEL)
        self._ignores_upgrade = self.parser.should_upgrade() and not self._should_upgrade()
        if self._ignores_upgrade:
            return
        self._was_parsed_again = False
        super().on_headers_complete()
        if self.pipeline and not self._is_full:
            # A disconnect is noticed only while the connection is read.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if not self._ignores_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._is_lingering:
            return
        super().on_response_complete()
        if self._unparsed and not self._is_turn_over and not self._is_done:
            self._is_turn_over = True
            self.loop.call_soon(self._parse_on)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        cycle.transport = cast("asyncio.Transport", _ResponseTransport(self.transport, self))
        app = UntilClose(app, cycle) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(
            self._limits.header_timeout_s, self._refuse, refusal.SLOW
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, why: Refusal) -> None:
        """Close the connection, with an error response unless another response is being written."""
        if self._is_done:
            return
        self._refusals.note(why.kind, f"from {self.client}")
        if not self._is_answering:
            self.transport.write(why.encode())
        if why in (refusal.MANY, refusal.SLOW):
            self._stop_timer()
            self.transport.close()
        else:
            self._linger()

    def close_read(self) -> None:
        """Close when the request's body is read, which a response need not wait for."""
        is_sending = self._running is not None and self._running.more_body
        if is_sending or self._unparsed:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Send the end of the stream and discard input for a while.

        Closing with unread bytes resets the connection: the client would see no response.
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
