"""Edge: what happens to every HTTP request before and after its route.

One plain ASGI layer: request id, the root span, API key, response headers, counters. It adds one
function call to a chunk, nothing else.
"""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmesh.services.gateway.context import RequestContext, attach, check_request_id
from tokenmesh.services.gateway.errors import error_response
from tokenmesh.services.gateway.http.meters import HttpMeters
from tokenmesh.services.gateway.http.origin import check_page
from tokenmesh.services.gateway.http.response_sender import leaving
from tokenmesh.services.gateway.tenancy.auth import check_single, key_of
from tokenmesh.services.gateway.tenancy.key_ring import KeyRing
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import RequestId, new_request_id
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT, Span, current_traceparent, span

_PREFIX_BY_PATH: Final = {
    "/v1/chat/completions": "chatcmpl",
    "/v1/chat/completions/batch": "chatcmpl",
    "/v1/completions": "cmpl",
    "/v1/messages": "msg",
    "/v1/responses": "resp",
    "/v1/chat/completions/render": "chatcmpl",
    "/v1/completions/render": "cmpl",
    "/v1/messages/render": "msg",
    "/v1/responses/render": "resp",
    "/inference/v1/generate": "generate-tokens",
}
_MAX_WARNINGS: Final = 16
_MAX_WARNING_CHARS: Final = 2048
_CLIENT_LEFT: Final = 499
_UNANSWERED: Final = 500


class Edge:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, settings: GatewaySettings, meters: HttpMeters
    ) -> None:
        self._app = app
        self._keys = keys
        self._settings = settings
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await self._upgrade(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            check_single(scope["headers"])
            self._check_page(scope["method"], headers)
            exchange, refusal = self._open(scope["path"], headers), None
        except TokenMeshError as error:
            # Its traceback leads to this frame, which would keep what has come of the body.
            exchange, refusal = self._unnamed(scope["path"]), error.with_traceback(None)
        attach(scope, exchange)
        if scope["method"] != "POST":
            # Scrapes, probes and listings would only push the traces of requests out.
            await self._answer(scope, receive, send, exchange, refusal)
            return
        attributes = {"http.request.method": "POST", "url.path": scope["path"]}
        parent = headers.get(b"traceparent", b"").decode("latin-1") or None
        with span("http", attributes, parent=parent) as current:
            await self._answer(scope, receive, send, exchange, refusal)
            _complete(current, exchange)
            if refusal is None:
                # What was refused is nobody's: not the default tenant's to see.
                current.set_attribute(TENANT, exchange.access.tenant.name)

    async def _upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A websocket: refused with a status of HTTP before it is one."""
        headers = dict(scope["headers"])
        try:
            check_single(scope["headers"])
            self._check_page("", headers)
            access = self._keys.access(scope["path"], key_of(headers))
        except TokenMeshError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        exchange = self._unnamed(scope["path"])
        exchange.access = access
        attach(scope, exchange)
        await self._app(scope, receive, send)

    def _check_page(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Where keys are needed no page has one that its reader did not give it."""
        if not self._keys:
            check_page(method, headers, self._settings)

    def _open(self, path: str, headers: dict[bytes, bytes]) -> RequestContext:
        """The exchange of a request that may pass. Raises Unauthorized or InvalidInput."""
        access = self._keys.access(path, key_of(headers))
        given = headers.get(b"x-request-id")
        if given is None:
            exchange = self._unnamed(path)
            exchange.access = access
            return exchange
        text = given.decode("latin-1")
        check_request_id(text, "X-Request-Id", self._settings)
        return RequestContext(RequestId(text), True, monotonic_s(), access)

    def _unnamed(self, path: str) -> RequestContext:
        prefix = _PREFIX_BY_PATH.get(path, "req")
        return RequestContext(new_request_id(prefix), False, monotonic_s())

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: RequestContext,
        refusal: TokenMeshError | None,
    ) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *_headers(exchange)]
            else:
                exchange.response_bytes += len(message.get("body", b""))
            await send(message)

        self._meters.begin()
        try:
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            # By the server, which leaves: nobody else cancels a request. It closes the connection
            # of an answer that has begun, and would log a traceback for what it has done itself.
            if not exchange.status:
                await error_response(leaving(), scope)(scope, receive, send_on)
        finally:
            self._count(scope, exchange)

    def _count(self, scope: Scope, exchange: RequestContext) -> None:
        if exchange.has_client_left:
            exchange.status = _CLIENT_LEFT
        self._meters.end(
            getattr(scope.get("route"), "path", exchange.route),
            scope["method"],
            exchange.status or _UNANSWERED,
            exchange.started_s,
            (_told_length(scope), exchange.response_bytes),
            has_client_left=exchange.has_client_left,
        )


def _told_length(scope: Scope) -> int:
    """Bytes of the request's body as its header says; 0 where it says nothing."""
    told = dict(scope["headers"]).get(b"content-length", b"")
    return int(told) if told.isdigit() else 0


def _headers(exchange: RequestContext) -> list[tuple[bytes, bytes]]:
    request_id = exchange.request_id.encode("latin-1", "replace")
    # The second is where Anthropic's clients look for it.
    headers = [(b"x-request-id", request_id), (b"request-id", request_id)]
    traceparent = current_traceparent()
    if traceparent is not None:
        headers.append((b"traceparent", traceparent.encode()))
    if exchange.standing is not None:
        headers.extend(exchange.standing.headers())
    warnings = exchange.warnings[:_MAX_WARNINGS]
    headers.extend((b"x-tokenmesh-warning", _header_text(each)) for each in warnings)
    return headers


def _header_text(text: str) -> bytes:
    """Clients choose parts of it: nothing that could end the header line."""
    text = text[:_MAX_WARNING_CHARS]
    return "".join(char if char.isprintable() else "?" for char in text).encode("ascii", "replace")


def _complete(current: Span, exchange: RequestContext) -> None:
    current.set_attribute(REQUEST_ID, exchange.request_id)
    current.set_attribute("http.response.status_code", exchange.status)
    if exchange.model is not None:
        current.set_attribute("tokenmesh.model", exchange.model)
    if exchange.asked_model not in (None, exchange.model):
        current.set_attribute("tokenmesh.asked_model", str(exchange.asked_model))
    if exchange.session_id is not None:
        current.set_attribute("session.id", exchange.session_id)
    if exchange.has_client_left:
        current.add_event("client left")
