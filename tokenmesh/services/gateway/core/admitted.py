"""AdmittedRoutes: requests to every route count against limits, except to those that are exempt.

New routes are limited without further code. What an API exempts has wider limits of its own, but
for probes and the console's page.
"""

from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.errors import error_response, log_error
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body_budget import Body
from tokenmesh.services.gateway.core.http.endpoint import Post
from tokenmesh.services.gateway.core.http.event_loop import StartLimiter
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS
from tokenmesh.services.gateway.core.tenancy.reads import Reads
from tokenmesh.shared.errors import TokenMeshError

REQUESTS_PER_TURN: Final = 16
"""Requests of a burst that are begun before the event loop looks around."""
Exempt = Callable[[str, str], bool]
"""It tells whether a request of a method and path does not count against its tenant's limits."""
_READING: Final = ("GET", "DELETE")
"""Methods whose number at a time is bounded; ending something may take long and costs nothing."""


class AdmittedRoutes:
    """ASGI layer inside the edge: admits a request before its body is read, and calls its endpoint.

    The bodies that are read at a time are bounded by `BodyBudget`. A websocket counts as one
    request when it is opened; each of its responses is counted separately.
    """

    def __init__(self, app: ASGIApp, core: Core, is_exempt: Exempt) -> None:
        """`app`: all routes but the gateway's posts."""
        self._app = app
        self._posts = core.posts
        self._is_exempt = is_exempt
        self._admission = core.tenancy.admission
        self._bodies = core.tenancy.bodies
        self._limiter = StartLimiter(REQUESTS_PER_TURN)
        self._reads = Reads(core.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        post = self._posts.get(scope["path"])
        if scope["type"] != "websocket" and self._is_read(scope, post):
            await self._read(scope, receive, send)
            return
        context = context_of(scope)
        if post is not None:
            # Metrics name the path also where the request is refused.
            context.route = scope["path"]
        try:
            context.lease = await self._admission.admit(context)
        except TokenMeshError as error:
            log_error(error)
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            if scope["type"] == "websocket":
                context.release()
                await self._app(scope, receive, send)
                return
            length = context.headers.get(b"content-length", b"").decode("latin-1")
            context.body = Body(self._bodies, context.access.tenant.name, length, receive)
            if post is None or scope["method"] != "POST":
                await self._app(scope, context.body.receive, send)
                return
            await self._limiter.enter()
            response = await post.endpoint(Request(scope, context.body.receive))
            await response(scope, context.body.receive, send)
        except TokenMeshError as error:
            # Other routes answer theirs themselves.
            if post is None or context.status:
                raise
            log_error(error)
            await error_response(error, scope)(scope, receive, send)
        finally:
            context.release()
            context.hand_on()

    def _is_read(self, scope: Scope, post: Post | None) -> bool:
        """Return whether it is exempt; OPTIONS is answered without a route."""
        if scope["type"] != "http":
            return True
        method = scope["method"]
        if post is not None and method == "POST":
            return False
        return method == "OPTIONS" or self._is_exempt(method, scope["path"])

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that counts against no other limit."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        tenant, place = context_of(scope).access.tenant, None
        try:
            self._reads.count(tenant)
            if scope["method"] in _READING:
                place = await self._reads.take(tenant)
        except TokenMeshError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if place is None:
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            # A stream may go on for long.
            self._reads.release(place)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._reads.release(place)
