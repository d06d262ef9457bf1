"""LocalCalls: requests that a gateway sends to its own routes, without a connection."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger(__name__)

_LEAVE_S: Final = 5.0
"""Time for a route to end after its client has left."""
_INTERNAL: Final = b'{"error": {"message": "internal error", "type": "server_error", '
_CRASHED: Final = _INTERNAL + b'"param": null, "code": "internal_error"}}'


@dataclass(frozen=True, slots=True)
class LocalResponse:
    status: int
    body: bytes
    retry_after_s: float | None = None


class LocalCalls:
    """POSTs JSON to an application inside the edge: admission, limits and routes are the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: bytes, attach: Callable[[Scope], None]) -> LocalResponse:
        """`attach` gives the request its context. Cancelled, it ends as if a client left."""
        call = _Call(body)
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
        attach(scope)
        task = asyncio.create_task(self._run(scope, call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.has_left.set()
            await asyncio.wait([task], timeout=_LEAVE_S)
            task.cancel()
            raise

    async def _run(self, scope: Scope, call: "_Call") -> LocalResponse:
        try:
            await self._app(scope, call.receive, call.send)
        except Exception:
            # The same that the server does for a client: its request fails, and no other.
            logger.exception("a local request to %s crashed", scope["path"])
            return LocalResponse(500, _CRASHED)
        return LocalResponse(call.status, b"".join(call.parts), call.retry_after_s)


class _Call:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.has_left = asyncio.Event()
        self.status = 500
        self.parts: list[bytes] = []
        self.retry_after_s: float | None = None

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message["headers"]:
                if name.lower() == b"retry-after" and value.isdigit():
                    self.retry_after_s = float(value)
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
