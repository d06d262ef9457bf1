"""Errors as Anthropic's clients know them: {"type": "error", "error": {"type", "message"}, ...}.

The envelope has no place for a field's name: the message says it.
"""

from typing import Final

import msgspec

from tokenmesh.shared.errors import NotFound

PREFIX: Final = "/v1/messages"
"""Paths with this shape of errors, those of the edge included."""

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
    """A thread is to be continued: none is kept here. Clients then send its whole history."""

    code = "thread_not_found"


class MessagesErrorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inner object."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """The body of a response, and the data of an `error` event."""

    error: MessagesErrorFacts
    request_id: str | None
    type: str = "error"


def status_of(status: int) -> int:
    """Anthropic's status for ours: what asking again may help against is 529 there."""
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
    # The one code that clients look for.
    details = {"error_code": code} if code == ThreadNotFound.code else None
    facts = MessagesErrorFacts(kind, message if is_named else f"{param}: {message}", details)
    return MessagesErrorBody(facts, request_id)
