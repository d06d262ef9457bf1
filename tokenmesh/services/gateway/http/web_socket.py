"""WebSocket: uvicorn's protocol with the bounds that it lacks, and the last word left to the
application."""

from typing import Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

_MAX_FRAGMENTS: Final = 4096
"""Of one message: empty ones cost memory, too, and do not count towards its size."""
_MAX_UNREAD_BYTES: Final = 1024 * 1024
"""Answers to pings that a client does not take."""
_TOO_BIG: Final = 1009


class WebSocket(WebSocketsSansIOProtocol):
    """One connection."""

    def handle_ping(self) -> None:
        """Answer, unless nobody reads the answers."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        """Another part of a message."""
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.conn.fail(_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def shutdown(self) -> None:
        """The server stops: a session says its goodbye itself, when its response is whole."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
