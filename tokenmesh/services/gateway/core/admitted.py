"""AdmittedRoutes: requests to every route count against limits, except to those listed here.

New routes are limited without further code. Those that are listed have wider limits of their own,
but for probes and the console's page.
"""

import re
from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.errors import error_response, log_error
from tokenmesh.services.gateway.core.http.body_budget import Body, BodyBudget
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.event_loop import StartLimiter
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS
from tokenmesh.services.gateway.core.tenancy.reads import Reads
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import TokenMeshError

_PROBES: Final = (
    *("health", "livez", "readyz", "ping"),
    *("load", "version", "metrics", "mesh", "server_info"),
)
_PAGES: Final = ("console", "console/[^/]+", "docs", "docs/[^/]+", "redoc", r"openapi\.json")
_FACTS: Final = (
    "traces",
    "traces/[^/]+",
    "v1/models",
    "v1/models/.+",
    "v1/usage",
    "v1/usage/[^/]+",
)
_KEPT: Final = (
    "v1/files/[^/]+",
    "v1/responses/[^/]+",
    "v1/responses/[^/]+/input_items",
    "v1/batches/[^/]+",
)
"""Objects of a tenant: their creation has been counted, and clients poll them."""
_FOR_ADMINS: Final = (
    "mesh/[^/]+/drain",
    "sleep",
    "wake_up",
    "start_profile",
    "stop_profile",
    "v1/load_lora_adapter",
    "v1/unload_lora_adapter",
    "adapters",
)


def _any_of(*paths: str) -> re.Pattern[str]:
    return re.compile(f"/(?:{'|'.join(paths)})")


_EXEMPT: Final = {
    "GET": _any_of(*_PROBES, *_PAGES, *_FACTS, *_KEPT, "is_sleeping"),
    "DELETE": _any_of(*_KEPT[:2], "adapters/.+"),
    # Cancelling frees capacity for the tenant's other requests.
    "POST": _any_of(
        *_FOR_ADMINS,
        "v1/responses/[^/]+/cancel",
        "v1/batches/[^/]+/cancel",
        "inference/v1/abort_requests",
    ),
    # Answered without a route.
    "OPTIONS": re.compile(".*", re.DOTALL),
}


_READING: Final = ("GET", "DELETE")
"""Methods whose number at a time is bounded; ending something may take long and costs nothing."""


def is_exempt(method: str, path: str) -> bool:
    """Whether a request does not count against its tenant's limits."""
    exempt = _EXEMPT.get(method)
    return exempt is not None and exempt.fullmatch(path) is not None


class AdmittedRoutes:
    """ASGI layer inside the edge: admits a request before its body is read, and calls its endpoint.

    The bodies that are read at a time are bounded by `BodyBudget`. A websocket counts as one
    request when it is opened; each of its responses is counted separately.

    Endpoints that generate are called by path, without FastAPI's routing: this saves about 16 % of
    a request's CPU time in `benchmarks/bench_gateway.py`. FastAPI has the same endpoints and
    describes them in the OpenAPI document.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        admission: Admission,
        bodies: BodyBudget,
        settings: GatewaySettings,
        apis: ApiTable,
    ) -> None:
        """`app`: all other routes."""
        self._apis = apis
        self._app = app
        self._endpoints = endpoints
        self._admission = admission
        self._bodies = bodies
        self._limiter = StartLimiter(settings.requests_per_turn)
        self._reads = Reads(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (
            scope["type"] == "http" and self._is_exempt(scope["method"], scope["path"])
        ):
            await self._read(scope, receive, send)
            return
        context, endpoint = context_of(scope), self._endpoints.get(scope["path"])
        if endpoint is not None:
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
            if endpoint is None or scope["method"] != "POST":
                await self._app(scope, context.body.receive, send)
            else:
                await self._call(endpoint, scope, context, context.body.receive, send)
        finally:
            context.release()
            context.hand_on()

    def _is_exempt(self, method: str, path: str) -> bool:
        return is_exempt(method, path) or self._apis.is_exempt(method, path)

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

    async def _call(
        self,
        endpoint: Endpoint,
        scope: Scope,
        context: RequestContext,
        receive: Receive,
        send: Send,
    ) -> None:
        await self._limiter.enter()
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except TokenMeshError as error:
            if context.status:
                raise
            log_error(error)
            await error_response(error, scope)(scope, receive, send)
