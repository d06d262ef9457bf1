"""Errors of a session as events contain them: their codes are OpenAI's, on which clients branch."""

from typing import Any, Final

from tokenmesh.services.gateway.core.http.errors import (
    MissingField,
    NotSupported,
    UnknownField,
    WrongType,
)
from tokenmesh.services.gateway.core.tenancy.tenant import QuotaExceeded
from tokenmesh.shared.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    PromptTooLong,
    TokenMeshError,
    Unauthorized,
    UnknownModel,
)


class InvalidJson(InvalidInput):
    """A message that is not a JSON object, or is one over the bounds of JSON."""


class BinaryEvent(InvalidInput):
    """Events are sent as text messages."""


class EmptyBuffer(InvalidInput):
    """A commit without audio."""


class UntruncatableItem(InvalidInput):
    """An item or part that the model did not write."""


class UnknownCall(NotFound):
    """The output of a call that the conversation does not hold."""


class DuplicateItem(Conflict):
    """The conversation has an item with this id."""


class UnknownPreviousItem(NotFound):
    """The place of a new item does not exist."""


class UnknownRetrievedItem(NotFound):
    """There is no such item to retrieve."""


class UnknownDeletedItem(NotFound):
    """There is no such item to delete."""


class UnknownTruncatedItem(NotFound):
    """There is no such item to truncate."""


class ResponseActive(Conflict):
    """The conversation has a response that has not ended."""


class NoActiveResponse(Conflict):
    """Nothing runs that could be cancelled, or something else does."""


class SessionOver(TokenMeshError):
    """The session has reached its time limit."""

    status = 400


CODES: Final[dict[type[TokenMeshError], str]] = {
    # what was sent
    InvalidJson: "invalid_json",
    BinaryEvent: "invalid_event",
    MissingField: "missing_required_parameter",
    UnknownField: "unknown_parameter",
    WrongType: "invalid_type",
    NotSupported: "unsupported_value",
    InvalidInput: "invalid_value",
    # items and audio
    UnknownRetrievedItem: "item_retrieve_invalid_item_id",
    UnknownDeletedItem: "item_delete_invalid_item_id",
    UnknownTruncatedItem: "item_truncate_invalid_item_id",
    UnknownPreviousItem: "item_create_invalid_previous_item_id",
    DuplicateItem: "item_create_duplicate_item_id",
    UntruncatableItem: "unsupported_content_type",
    UnknownCall: "invalid_tool_call_id",
    EmptyBuffer: "input_audio_buffer_commit_empty",
    # responses
    ResponseActive: "conversation_already_has_active_response",
    NoActiveResponse: "response_cancel_not_active",
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    # the session and its tenant
    Unauthorized: "invalid_api_key",
    Forbidden: "insufficient_permissions",
    QuotaExceeded: "insufficient_quota",
    Overloaded: "rate_limit_exceeded",
    SessionOver: "session_expired",
    TokenMeshError: "server_error",
}
"""An error has the code of its nearest class here."""


def code_of(error: TokenMeshError) -> str:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def error_view(error: TokenMeshError) -> dict[str, Any]:
    """An error as events contain it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"type": kind, "code": code_of(error), "message": error.message}
