"""Refusal: why a connection is closed, and its response."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from tokenmesh.services.gateway.core.http.errors import status_body
from tokenmesh.services.gateway.core.http.sse import encode_json


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of a connection, before there is a request."""

    kind: str
    """The label in logs and metrics."""
    status: HTTPStatus
    message: str

    def encode(self) -> bytes:
        """The response as bytes."""
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
    "the request's header is larger than the limit of this server (gateway.max_header_bytes)",
)
SLOW: Final = Refusal(
    "slow header", HTTPStatus.REQUEST_TIMEOUT, "the request's header did not arrive in time"
)
MANY: Final = Refusal(
    "too many connections",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "this server has reached its limit of connections (gateway.max_connections)",
)
TUNNEL: Final = Refusal(
    "tunnel", HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT: this server is not a proxy"
)
BUSY: Final = Refusal(
    "upgrade of a busy connection",
    HTTPStatus.BAD_REQUEST,
    "a websocket needs a connection without a running request",
)


class ConnectionRefused(Exception):
    """Raised within a callback of the parser, which wraps it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
