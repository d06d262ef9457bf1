"""Bodies of responses: JSON and server-sent events as bytes."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from tokenmesh.services.gateway.core.http.errors import error_body
from tokenmesh.shared.errors import TokenMeshError

JSON: Final = "application/json"
MEDIA_TYPE: Final = b"text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_START: Final = b"data: "
_END: Final = b"\n\n"

encode_json: Final = msgspec.json.Encoder().encode


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response whose body msgspec encodes."""
    return Response(encode_json(body), status, headers, media_type=JSON)


def frame(body: Any) -> bytes:
    """One event with a JSON body."""
    return _START + encode_json(body) + _END


def error_frames(error: TokenMeshError) -> bytes:
    """The end of a stream that failed."""
    return frame(error_body(error)) + DONE


def event_frame(event: dict[str, Any]) -> bytes:
    """One event under the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
