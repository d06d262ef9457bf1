"""Root paths and HTTP/1.0, and which web pages may use a gateway without API keys.

Any page can make a browser call servers that the browser can reach: it can send a POST without
permission (though not read the response), open a websocket and, once its own name resolves to this
machine, read everything (DNS rebinding). Programs send no Origin and call by address or localhost.
Starlette's TrustedHostMiddleware cannot allow all addresses and local names, so this is our own.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Forbidden


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


class UntilClose:
    """Ends a response with its connection: HTTP/1.0 knows no chunks. `cycle` is uvicorn's."""

    def __init__(self, app: ASGIApp, cycle: Any) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            self._cycle.chunked_encoding = False
            # What it expects is what is left of a length that was announced.
            self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)


_HARMLESS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing and whose responses other origins cannot read."""
_NEVER_PUBLIC: Final = (".localhost", ".local", ".internal")
_SHOWN: Final = 128


def check_page(method: str, headers: Mapping[bytes, bytes], settings: GatewaySettings) -> None:
    """Raises Forbidden for a request that a page of another origin makes a browser send."""
    if settings.is_on_loopback:
        check_host(headers, settings.allowed_hosts)
    if method not in _HARMLESS:
        check_origin(headers, settings.cors_origins)


def check_origin(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Raises Forbidden for another origin. A request without Origin is accepted."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    if not origin or "*" in allowed or origin in allowed or _host_of(origin) == host:
        return
    raise Forbidden(
        f"the origin {origin[:_SHOWN]!r} is not one of --allowed-origins (gateway.cors_origins)"
    )


def check_host(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Raises Forbidden for a name that public DNS may resolve to this machine."""
    name = _name_of(headers.get(b"host", b"").decode("latin-1"))
    if name in allowed or "*" in allowed or not _may_be_public(name):
        return
    raise Forbidden(
        f"the host {name[:_SHOWN]!r} is not one of gateway.allowed_hosts: without keys a gateway "
        "on loopback must be called by address or as localhost"
    )


def _name_of(host: str) -> str:
    """Lower case, without the port and the brackets of an IPv6 address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return host


def _may_be_public(name: str) -> bool:
    if "." not in name or name.endswith(_NEVER_PUBLIC):
        # IPv6 addresses have no dot either.
        return False
    try:
        ip_address(name)
    except ValueError:
        return True
    return False


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
