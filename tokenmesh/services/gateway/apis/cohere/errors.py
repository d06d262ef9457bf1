"""Errors in Cohere's shape: {"message", "id"}; the message names what `param` would."""

import msgspec

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.http.errors import StatusError
from tokenmesh.shared.errors import TokenMeshError


class CohereError(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an error."""

    message: str
    id: str | None = None


def error_body(
    message: str, param: str | None = None, request_id: str | None = None
) -> CohereError:
    is_named = param is None or param in message
    return CohereError(message if is_named else f"{param}: {message}", request_id)


def write_error(error: TokenMeshError, context: RequestContext) -> tuple[CohereError, int]:
    """The body of a response and its status."""
    request_id = None if isinstance(error, StatusError) else context.request_id
    return error_body(error.message, error.param, request_id), error.status
