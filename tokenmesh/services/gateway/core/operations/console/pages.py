"""The page of the console with its files, and ConsolePages: the open pages and what each is sent.

The files are built by vite from the folder `console/`. They hold no data: the page reads it from
the API with the key that its user types.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.response_sender import ClientWatch, ResponseSender
from tokenmesh.services.gateway.core.operations.console.state import StateReader
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.http import ConsoleSettings
from tokenmesh.shared.errors import Cancelled, NotFound, Overloaded
from tokenmesh.shared.telemetry import Tally

_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PAGE: Final = "index.html"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class _Asset:
    def __init__(self, name: str) -> None:
        self.data = files(__package__).joinpath("built", name).read_bytes()
        tag = f'"{sha256(self.data).hexdigest()[:32]}"'
        self.headers = {**HEADERS, "Content-Type": _TYPES[name], "ETag": tag}


_ASSETS: Final = {name: _Asset(name) for name in _TYPES}


def asset_response(name: str, request: Request) -> Response:
    """A file, or 304 where the browser has it already. Raises NotFound."""
    asset = _ASSETS.get(name)
    if asset is None:
        raise NotFound(f"the console has no file {name[:80]!r}")
    if request.headers.get("if-none-match") == asset.headers["ETag"]:
        return Response(status_code=304, headers=asset.headers)
    return Response(asset.data, headers=asset.headers)


_MAX_STREAM_S: Final = 300.0
"""Then the page connects again, so that a key that was removed does not see the mesh for ever."""
_RETRY_S: Final = 5.0


class Page:
    """One open page. It holds the newest message only: a slow page skips the others."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._newest = b""
        self._read = b""
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Replace the message that waits. An unchanged state is not sent again."""
        self._newest = message
        if message != self._read:
            self._news.set()

    def close(self) -> None:
        """End the stream of messages."""
        self._is_closed = True
        self._news.set()

    async def next(self, wait_s: float) -> bytes | None:
        """The newest message that was not read; None at the end, or after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return None
        self._news.clear()
        self._read = self._newest
        return None if self._is_closed else self._newest


@dataclass(slots=True)
class ConsolePages:
    """Reads the state once per interval while a page is open, once for all admins."""

    reader: StateReader
    settings: ConsoleSettings
    draining: asyncio.Event
    _pages: dict[Page, None] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._pages)

    async def messages(
        self, access: Access, limit: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one page. Raises Overloaded while too many are open."""
        page = self._open(access)
        until_s, num_sent = monotonic_s() + _MAX_STREAM_S, 0
        try:
            while num_sent != limit:
                message = await page.next(until_s - monotonic_s())
                if message is None:
                    break
                num_sent += 1
                yield message
        finally:
            self._pages.pop(page, None)

    def _open(self, access: Access) -> Page:
        limits, tenant = self.settings, access.tenant.name
        own = sum(each.access.tenant.name == tenant for each in self._pages)
        if own >= limits.max_console_pages_per_tenant or (
            len(self._pages) >= limits.max_console_pages
        ):
            raise Overloaded(
                f"{len(self._pages)} pages of the console are open, {own} of them this tenant's",
                retry_after_s=_RETRY_S,
            )
        page = Page(access)
        self._pages[page] = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return page

    async def _run(self) -> None:
        """Until the last page is closed."""
        try:
            while self._pages and not self.draining.is_set():
                await self._send()
                await asyncio.sleep(self.settings.console_interval_s)
        finally:
            self._task = None
            for page in self._pages:
                page.close()

    async def _send(self) -> None:
        await self.reader.sample()
        message_by_viewer: dict[str | None, bytes] = {}
        for page in list(self._pages):
            viewer = None if page.access.is_admin else page.access.tenant.name
            if viewer not in message_by_viewer:
                state = await self.reader.read(page.access)
                message_by_viewer[viewer] = sse.frame(state)
            page.put(message_by_viewer[viewer])


class PageResponse(Response):
    """Sends messages until the client disconnects, or they end."""

    def __init__(
        self,
        messages: Callable[[], AsyncGenerator[bytes, None]],
        settings: GatewaySettings,
    ) -> None:
        super().__init__()
        self._messages = messages
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                sender = ResponseSender(send, watch, Tally("flush"))
                sender.keep_alive(self._settings.sse_keep_alive_s, sse.COMMENT)
                try:
                    with sender.until_draining():
                        await self._send_all(sender)
                finally:
                    sender.stop()
        except Cancelled:
            context_of(scope).has_client_left = True

    async def _send_all(self, sender: ResponseSender) -> None:
        async with aclosing(self._messages()) as messages:
            async for message in messages:
                await sender.write(message)
        await sender.end(b"")
