"""Errors as HTTP responses: OpenAI's body or Anthropic's, Retry-After, WWW-Authenticate."""

import logging
import math
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from tokenmesh.services.gateway.anthropic import errors as anthropic_errors
from tokenmesh.services.gateway.context import context_of, find_context
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.errors import error_body, status_body
from tokenmesh.shared.errors import InvalidInput, TokenMeshError

logger = logging.getLogger(__name__)

JSON = "application/json"
_PATH_SHOWN: Final = 200
_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body that msgspec encodes."""
    return Response(encode_json(body), status, headers, media_type=JSON)


def error_response(error: TokenMeshError, scope: Scope) -> Response:
    """The response for an error of ours, in the shape of the API that was asked."""
    forget_frames(error)
    context = find_context(scope)
    if context is not None and context.rename_error is not None:
        error = context.rename_error(error)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if _is_anthropic(scope):
        body = anthropic_errors.error_body(
            error.status, error.message, error.param, context_of(scope).request_id, error.code
        )
        return json_response(body, anthropic_errors.status_of(error.status), headers)
    return json_response(error_body(error), error.status, headers)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is answered, and of those behind it.

    Their frames hold the request's body, and a frame that holds its own error would keep it until
    the collector comes round.
    """
    behind: BaseException | None = error
    while behind is not None and behind.__traceback__ is not None:
        behind.__traceback__ = None
        behind = behind.__cause__ or behind.__context__


def _is_anthropic(scope: Scope) -> bool:
    return str(scope["path"]).startswith(anthropic_errors.PREFIX)


def _plain_response(scope: Scope, status: int, message: str, code: str | None = None) -> Response:
    """For a status that no error of ours stands for."""
    if _is_anthropic(scope):
        request_id = context_of(scope).request_id
        told = anthropic_errors.error_body(status, message, request_id=request_id)
        return json_response(told, status)
    return json_response(status_body(status, message, code), status)


def log_error(error: TokenMeshError) -> None:
    """Ours are told to the operator too; the client's are its own business."""
    if error.status >= 500:
        logger.warning("%s: %s", error.code, error.message)


async def crash_response(request: Request, _error: Exception) -> Response:
    """The response to a defect: logged with its traceback, never told to clients."""
    return _plain_response(request.scope, 500, "internal error", "internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the application, expected or not, have the same shape."""

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenMeshError)
        log_error(error)
        return error_response(error, request.scope)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        response = _plain_response(request.scope, error.status_code, _told(request, error))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(app, request.scope))
        return response

    async def on_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        # ("query", name), and for one of several values its index behind it
        name = str(first["loc"][:2][-1])
        invalid = InvalidInput(f"{name}: {first['msg']}", param=name)
        return error_response(invalid, request.scope)

    app.add_exception_handler(TokenMeshError, on_ours)
    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameters)


def _told(request: Request, error: StarletteHTTPException) -> str:
    """What the application says, and which route is not there."""
    if error.status_code != 404:
        return str(error.detail)
    return f"there is no {request.method} {request.url.path[:_PATH_SHOWN]} here"


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """What the path of a request can be asked."""
    return [
        method
        for method in _METHODS
        if _fits(app, {**scope, "method": "GET" if method == "HEAD" else method})
    ]


def _fits(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
