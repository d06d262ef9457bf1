"""Channel: sends and receives events over a websocket, with a deadline for each write."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.shared.errors import Cancelled, InvalidInput, TokenMeshError


class Channel:
    """One accepted websocket. Every method raises Cancelled when the client has disconnected."""

    def __init__(self, websocket: WebSocket, write_timeout_s: float) -> None:
        self._websocket = websocket
        self._write_timeout_s = write_timeout_s
        self._num_events = 0

    async def receive(self, timeout_s: float) -> str:
        """The next message. Raises TimeoutError, and InvalidInput for a binary message."""
        async with asyncio.timeout(timeout_s):
            message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Cancelled("the client left")
        text = message.get("text")
        if text is None:
            raise InvalidInput("send events as text messages, not as binary ones")
        return str(text)

    async def send(self, *events: dict[str, Any]) -> None:
        """Send events in order. A client that blocks longer than the deadline is disconnected."""
        await self.send_all(deque(events))

    async def send_all(self, events: deque[dict[str, Any]]) -> None:
        """As `send`; removes each event once sent, so that a cancelled caller keeps the rest."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                while events:
                    self._num_events += 1
                    data = encode_json({"event_id": f"event_{self._num_events}", **events[0]})
                    await self._websocket.send_text(data.decode())
                    events.popleft()
        except (TimeoutError, WebSocketDisconnect) as error:
            raise Cancelled("the client does not read its events") from error

    async def send_error(self, error: TokenMeshError, event_id: str | None = None) -> None:
        """Report an error of the client's event `event_id`; the session continues."""
        fields = {**error_view(error), "param": error.param, "event_id": event_id}
        await self.send({"type": "error", "error": fields})

    async def close(self, code: int) -> None:
        """Close the websocket if the client is still connected."""
        with suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(self._write_timeout_s):
                await self._websocket.close(code)


def error_view(error: TokenMeshError) -> dict[str, Any]:
    """An error as events contain it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"type": kind, "code": error.code, "message": error.message}
