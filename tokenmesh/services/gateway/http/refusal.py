"""Refusal: why a connection is closed, and the whole response that says so."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.errors import status_body


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is closed."""

    kind: str
    """A few words, for logs and metrics."""
    status: HTTPStatus
    message: str

    def encode(self) -> bytes:
        """The whole response."""
        body = encode_json(status_body(self.status.value, self.message))
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json"
            f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


GARBAGE: Final = Refusal("garbage", HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
LARGE: Final = Refusal(
    "large header",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "the request's header is larger than this server takes",
)
SLOW: Final = Refusal(
    "slow header", HTTPStatus.REQUEST_TIMEOUT, "the request's header did not arrive in time"
)
MANY: Final = Refusal(
    "too many connections",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this server has as many connections as it takes",
)
TUNNEL: Final = Refusal(
    "tunnel", HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT: this server is not a proxy"
)
BUSY: Final = Refusal(
    "upgrade of a busy connection",
    HTTPStatus.BAD_REQUEST,
    "a websocket needs a connection on which no request is being answered",
)


class Refused(Exception):
    """Raised in a callback of the parser, which wraps it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
