"""HeadAsGet: what can be fetched answers to HEAD too, as probes and proxies expect of it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware: the server itself leaves the body of such an answer out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # a copy: the server reads its own
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
