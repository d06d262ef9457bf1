"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}, ...}.

The shape has no field for `param`, so the message names it.
"""

from typing import Final

import msgspec

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.shared.errors import NotFound, TokenMeshError

_TYPE_BY_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ThreadNotFound(NotFound):
    """The thread to be continued is not stored here. Clients then send its whole history."""

    code = "thread_not_found"


class MessagesErrorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inner object of an error."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """The body of a response, and the data of an `error` event."""

    error: MessagesErrorFacts
    request_id: str | None
    type: str = "error"


def status_of(status: int) -> int:
    """Anthropic's status for ours: an overload, after which a retry may succeed, is 529."""
    return 529 if status == 503 else status


def error_body(
    status: int,
    message: str,
    param: str | None = None,
    request_id: str | None = None,
    code: str | None = None,
) -> MessagesErrorBody:
    """The body for one of our statuses."""
    status = status_of(status)
    kind = _TYPE_BY_STATUS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    is_named = param is None or param in message
    # Clients check only this code.
    details = {"error_code": code} if code == ThreadNotFound.code else None
    facts = MessagesErrorFacts(kind, message if is_named else f"{param}: {message}", details)
    return MessagesErrorBody(facts, request_id)


def write_error(error: TokenMeshError, context: RequestContext) -> tuple[MessagesErrorBody, int]:
    """The body of a response and its status."""
    body = error_body(error.status, error.message, error.param, context.request_id, error.code)
    return body, status_of(error.status)
