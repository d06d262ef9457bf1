"""ASGI layers that change how a request is routed: paths, HEAD, and the fast path."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.errors import error_response, log_error
from tokenmesh.services.gateway.http.event_loop import StartLimiter
from tokenmesh.shared.errors import TokenMeshError

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


class FastPath:
    """Calls the endpoints of generation by path, without FastAPI's routing.

    This saves about 16 % of a request's CPU time in `benchmarks/bench_gateway.py`. FastAPI has the
    same endpoints and describes them in the OpenAPI document.
    """

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[str, Endpoint], limiter: StartLimiter
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        context.route = scope["path"]
        await self._limiter.enter()
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except TokenMeshError as error:
            if context.status:
                raise
            log_error(error)
            await error_response(error, scope)(scope, receive, send)
