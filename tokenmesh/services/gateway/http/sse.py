"""Server-sent events as bytes."""

from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.openai.errors import error_body
from tokenmesh.shared.errors import TokenMeshError

MEDIA_TYPE: Final = b"text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_START: Final = b"data: "
_END: Final = b"\n\n"

encode_json: Final = msgspec.json.Encoder().encode


def frame(body: Any) -> bytes:
    """One event with a JSON body."""
    return _START + encode_json(body) + _END


def error_frames(error: TokenMeshError) -> bytes:
    """The end of a stream that failed."""
    return frame(error_body(error)) + DONE


def event_frame(event: dict[str, Any]) -> bytes:
    """One event under the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
