"""Channel: a websocket as a way for events, with a deadline for each write."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.shared.errors import Cancelled, InvalidInput, TokenMeshError


class Channel:
    """One accepted websocket. Every way in which it can be gone is a Cancelled."""

    def __init__(self, websocket: WebSocket, write_timeout_s: float) -> None:
        self._websocket = websocket
        self._write_timeout_s = write_timeout_s
        self._num_events = 0

    async def receive(self, timeout_s: float) -> str:
        """The next message. Raises TimeoutError, Cancelled, InvalidInput for a binary one."""
        async with asyncio.timeout(timeout_s):
            message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Cancelled("the client left")
        text = message.get("text")
        if text is None:
            raise InvalidInput("send events as text messages, not as binary ones")
        return str(text)

    async def send(self, *events: dict[str, Any]) -> None:
        """In this order. A client that does not take them for too long is given up."""
        await self.send_all(deque(events))

    async def send_all(self, events: deque[dict[str, Any]]) -> None:
        """The same; what is sent is taken out, so that a cancelled caller knows what is not."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                while events:
                    self._num_events += 1
                    data = encode_json({"event_id": f"event_{self._num_events}", **events[0]})
                    await self._websocket.send_text(data.decode())
                    events.popleft()
        except (TimeoutError, WebSocketDisconnect) as error:
            raise Cancelled("the client takes no events") from error

    async def send_error(self, error: TokenMeshError, event_id: str | None = None) -> None:
        """What is wrong with the client's event of that id; the session goes on."""
        is_theirs = error.status < 500
        await self.send(
            {
                "type": "error",
                "error": {
                    "type": "invalid_request_error" if is_theirs else "server_error",
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                    "event_id": event_id,
                },
            }
        )

    async def close(self, code: int) -> None:
        """Say goodbye, to whoever still listens."""
        with suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(self._write_timeout_s):
                await self._websocket.close(code)
