"""RootPath: the path under which a proxy shows this server, left on requests or taken off."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware, outside of all that look at paths."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :] or "/"
        await self._app({**scope, "path": path, "root_path": self._prefix}, receive, send)
