"""Errors as HTTP responses: OpenAI's body, Retry-After, WWW-Authenticate."""

import logging
import math
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from tokenmesh.services.gateway.openai.errors import error_body, status_body
from tokenmesh.services.gateway.sse import encode_json
from tokenmesh.shared.errors import InvalidInput, TokenMeshError

logger = logging.getLogger(__name__)

JSON = "application/json"


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body that msgspec encodes."""
    return Response(encode_json(body), status, headers, media_type=JSON)


def error_response(error: TokenMeshError) -> Response:
    """The response for an error of ours."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)


def log_error(error: TokenMeshError) -> None:
    """Ours are told to the operator too; the client's are its own business."""
    if error.status >= 500:
        logger.warning("%s: %s", error.code, error.message)


async def crash_response(_request: Request, _error: Exception) -> Response:
    """The response to a defect: logged with its traceback, never told to clients."""
    return json_response(status_body(500, "internal error", "internal_error"), 500)


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the application, expected or not, have the same shape."""

    async def on_ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenMeshError)
        log_error(error)
        return error_response(error)

    async def on_http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        body = status_body(error.status_code, str(error.detail))
        return json_response(body, error.status_code, dict(error.headers or {}))

    async def on_parameters(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        # ("query", name), and for one of several values its index behind it
        name = str(first["loc"][:2][-1])
        return error_response(InvalidInput(f"{name}: {first['msg']}", param=name))

    app.add_exception_handler(TokenMeshError, on_ours)
    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_parameters)
