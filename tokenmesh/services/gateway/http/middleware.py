"""ASGI layers that change how a request is routed: paths and HEAD."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class RootPath:
    """Removes the path under which a proxy serves the gateway, where the proxy left it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :] or "/"
        await self._app({**scope, "path": path, "root_path": self._prefix}, receive, send)


class HeadAsGet:
    """Answers HEAD wherever GET is served; the server itself omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # a copy: the server reads its own
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
