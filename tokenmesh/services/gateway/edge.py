"""Edge: the outer ASGI layer of every request: id, span, API key, response headers, metrics.

It adds one function call per chunk of a response.
"""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmesh.services.gateway.core.api_table import OTHER_KIND, ApiTable
from tokenmesh.services.gateway.core.context import RequestContext, attach, check_request_id
from tokenmesh.services.gateway.core.errors import crash_response, error_response
from tokenmesh.services.gateway.core.http.middleware import check_page
from tokenmesh.services.gateway.core.http.response_sender import draining
from tokenmesh.services.gateway.core.operations.open_requests import OpenRequests
from tokenmesh.services.gateway.core.tenancy.auth import KeyRing, check_single, key_of
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import RequestId, new_request_id
from tokenmesh.shared.telemetry import REQUEST_ID, TENANT, Span, current_traceparent, span

_MAX_WARNINGS: Final = 16
_MAX_WARNING_CHARS: Final = 2048
_CLIENT_CLOSED_REQUEST: Final = 499
_NO_RESPONSE: Final = 500


@dataclass(slots=True)
class Edge:
    """Gives each request its context, or refuses it."""

    app: ASGIApp
    apis: ApiTable
    keys: KeyRing
    settings: GatewaySettings
    requests: OpenRequests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._upgrade(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answered wherever GET is. The server omits the body; it reads its own scope.
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        try:
            check_single(scope["headers"])
            self._check_page(scope["method"], headers)
            context, refusal = self._open(scope, headers), None
        except TokenMeshError as error:
            # Its traceback refers to this frame, which would keep the body in memory.
            context, refusal = self._new_context(scope, headers), error.with_traceback(None)
        attach(scope, context)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message["headers"], *_headers(context)]
            else:
                context.response_bytes += len(message.get("body", b""))
            await send(message)

        with _span_of(scope, headers) as current:
            self.requests.begin(context)
            try:
                if refusal is not None:
                    await error_response(refusal, scope)(scope, receive, send_on)
                else:
                    await self.app(scope, receive, send_on)
            except Exception:
                # A bug: the server logs the traceback.
                if not context.status:
                    await crash_response(scope)(scope, receive, send)
                raise
            except asyncio.CancelledError:
                # Only the stopping server cancels a request. It closes the connection of a response
                # that has begun, and would log a traceback for its own cancellation.
                if not context.status:
                    await error_response(draining(), scope)(scope, receive, send_on)
            finally:
                self._count(scope, context)
            if current is not None:
                self._set_attributes(current, context, is_refused=refusal is not None)

    async def _upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a websocket's handshake; refuse it with an HTTP status."""
        headers = dict(scope["headers"])
        context = self._new_context(scope, headers)
        attach(scope, context)
        try:
            check_single(scope["headers"])
            self._check_page("", headers)
            context.access = self.keys.access(scope["path"], key_of(headers))
        except TokenMeshError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_page(self, method: str, headers: dict[bytes, bytes]) -> None:
        """With API keys no check is needed: a page has no key of its user."""
        if not self.keys:
            check_page(method, headers, self.settings)

    def _open(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestContext:
        """The context of an accepted request. Raises Unauthorized or InvalidInput."""
        access = self.keys.access(scope["path"], key_of(headers))
        given = headers.get(b"x-request-id")
        context = self._new_context(scope, headers)
        context.access = access
        if given is not None:
            text = given.decode("latin-1")
            check_request_id(text, "X-Request-Id")
            context.request_id, context.is_own_id = RequestId(text), True
        return context

    def _new_context(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestContext:
        path = scope["path"]
        kind = self.apis.kinds.get(path, OTHER_KIND).id_prefix
        return RequestContext(
            new_request_id(kind),
            False,
            monotonic_s(),
            method=scope.get("method", ""),
            path=path,
            kind=kind,
            write_error=self.apis.write_error,
            headers=headers,
        )

    def _count(self, scope: Scope, context: RequestContext) -> None:
        if context.has_client_left:
            context.status = _CLIENT_CLOSED_REQUEST
        context.status = context.status or _NO_RESPONSE
        context.route = getattr(scope.get("route"), "path", context.route)
        self.requests.end(context)

    def _set_attributes(self, current: Span, context: RequestContext, *, is_refused: bool) -> None:
        if not is_refused:
            # A refused request belongs to no tenant, not even to the default one.
            current.set_attribute(TENANT, context.access.tenant.name)
        current.set_attribute(REQUEST_ID, context.request_id)
        current.set_attribute("http.response.status_code", context.status)
        if context.model is not None:
            current.set_attribute("tokenmesh.model", context.model)
        if context.asked_model not in (None, context.model):
            current.set_attribute("tokenmesh.asked_model", str(context.asked_model))
        operation = self.apis.kinds.get(context.path, OTHER_KIND).operation
        if operation is not None and context.model is not None:
            current.set_attribute("gen_ai.operation.name", operation)
            current.set_attribute("gen_ai.provider.name", "tokenmesh")
            current.set_attribute("gen_ai.request.model", str(context.asked_model or context.model))
            current.set_attribute("gen_ai.response.model", context.model)
            current.set_attribute("gen_ai.response.id", context.request_id)
        if context.finish_reasons:
            current.set_attribute("gen_ai.request.max_tokens", context.max_tokens)
            current.set_attribute("gen_ai.response.finish_reasons", context.finish_reasons)
            current.set_attribute("gen_ai.usage.input_tokens", context.input_tokens)
            current.set_attribute("gen_ai.usage.output_tokens", context.output_tokens)
        if context.session_id is not None:
            current.set_attribute("session.id", context.session_id)
        if context.has_client_left:
            current.add_event("client left")


def _span_of(scope: Scope, headers: dict[bytes, bytes]) -> AbstractContextManager[Span | None]:
    """Spans of scrapes, probes and listings would displace those of generation."""
    if scope["method"] != "POST":
        return nullcontext()
    attributes = {"http.request.method": "POST", "url.path": scope["path"]}
    parent = headers.get(b"traceparent", b"").decode("latin-1") or None
    return span("http", attributes, parent=parent)


def _headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    request_id = context.request_id.encode("latin-1", "replace")
    # Clients of one API read the second one.
    headers = [(b"x-request-id", request_id), (b"request-id", request_id)]
    traceparent = current_traceparent()
    if traceparent is not None:
        headers.append((b"traceparent", traceparent.encode()))
    if context.standing is not None:
        headers.extend(context.standing.headers())
    warnings = context.warnings[:_MAX_WARNINGS]
    headers.extend((b"x-tokenmesh-warning", _header_text(each)) for each in warnings)
    return headers


def _header_text(text: str) -> bytes:
    """Parts of the text are a client's: characters that could end the header are replaced."""
    text = text[:_MAX_WARNING_CHARS]
    return "".join(char if char.isprintable() else "?" for char in text).encode("ascii", "replace")
