"""Errors as HTTP responses: the body of the request's API, Retry-After, WWW-Authenticate."""

import logging
import math
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from tokenmesh.services.gateway.core.context import find_context
from tokenmesh.services.gateway.core.generation.answer import forget_frames
from tokenmesh.services.gateway.core.http.errors import StatusError, write_error
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.shared.errors import InvalidInput, TokenMeshError

logger = logging.getLogger(__name__)

_PATH_SHOWN: Final = 200
_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(error: TokenMeshError, scope: Scope) -> Response:
    """The response for an error, in the shape and with the field names of the request's API."""
    forget_frames(error)
    context = find_context(scope)
    if context is not None and context.rename_error is not None:
        error = context.rename_error(error)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body, status = (
        write_error(error, None) if context is None else context.write_error(error, context)
    )
    return json_response(body, status, headers)


def _status_response(scope: Scope, status: int, message: str, code: str | None = None) -> Response:
    return error_response(StatusError(message, status=status, code=code), scope)


def log_error(error: TokenMeshError) -> None:
    """Log errors of the server; those of clients are not logged."""
    if error.status >= 500:
        logger.warning("%s: %s", error.code, error.message)


def crash_response(scope: Scope) -> Response:
    """The response to an unexpected exception; the server logs its traceback and disconnects."""
    response = _status_response(scope, 500, "internal error", "internal_error")
    response.headers["Connection"] = "close"
    return response


def install_error_handlers(app: FastAPI, hint: Callable[[str], str | None]) -> None:
    """Give every error of the application the shape of its API.

    `hint`: what to do instead of calling a path that some API has and the gateway does not serve.
    """

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenMeshError)
        log_error(error)
        return error_response(error, request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        response = _status_response(
            request.scope, error.status_code, _message(request, error, hint)
        )
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(app, request.scope))
        return response

    async def on_crash(request: Request, _error: Exception) -> Response:
        return crash_response(request.scope)

    async def on_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        # ("query", name), then the index of one of several values
        name = str(first["loc"][:2][-1])
        invalid = InvalidInput(f"{name}: {first['msg']}", param=name)
        return error_response(invalid, request.scope)

    app.add_exception_handler(TokenMeshError, on_ours)
    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameters)
    # Without it FastAPI answers with plain text.
    app.add_exception_handler(Exception, on_crash)


def _message(
    request: Request, error: StarletteHTTPException, hint: Callable[[str], str | None]
) -> str:
    """FastAPI's message; for a missing route it names method and path."""
    if error.status_code != 404:
        return str(error.detail)
    path = str(request.scope["path"])
    what = f"no route matches {request.method} {request.url.path[:_PATH_SHOWN]}"
    instead = hint(path)
    return what if instead is None else f"{what}, {instead}"


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods of a request's path."""
    return [
        method
        for method in _METHODS
        if _has_route(app, {**scope, "method": "GET" if method == "HEAD" else method})
    ]


def _has_route(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
