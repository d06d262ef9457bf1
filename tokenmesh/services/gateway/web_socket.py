"""WebSocket: uvicorn's protocol, with the last word left to the application."""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class WebSocket(WebSocketsSansIOProtocol):
    """One connection."""

    def shutdown(self) -> None:
        """The server stops: a session says its goodbye itself, when its response is whole."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
