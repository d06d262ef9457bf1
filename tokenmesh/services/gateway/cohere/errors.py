"""Errors in Cohere's shape: {"message", "id"}; the message names what `param` would."""

from typing import Final

import msgspec

PREFIXES: Final = ("/cohere/", "/v2/chat")
"""Of the paths whose errors have this shape, including errors of the edge."""


class CohereError(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an error."""

    message: str
    id: str | None = None


def error_body(
    message: str, param: str | None = None, request_id: str | None = None
) -> CohereError:
    is_named = param is None or param in message
    return CohereError(message if is_named else f"{param}: {message}", request_id)
