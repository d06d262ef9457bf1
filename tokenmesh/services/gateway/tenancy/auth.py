"""The key that a request brings, and what only an admin's opens."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.requests import HTTPConnection

from tokenmesh.services.gateway.context import context_of
from tokenmesh.shared.errors import Forbidden, InvalidInput

_SCHEME: Final = "bearer "
_PROTOCOL: Final = "openai-insecure-api-key."
_SINGLE: Final = frozenset(
    (
        b"authorization",
        b"x-api-key",
        b"sec-websocket-protocol",
        b"host",
        b"origin",
        b"x-request-id",
        b"content-type",
        b"content-encoding",
        b"content-length",
    )
)
"""Headers that decide something: of two, a proxy may have judged the other one."""


def check_single(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises InvalidInput for a header that decides something and is there twice."""
    counts = Counter(name for name, _ in fields if name in _SINGLE)
    for name, count in counts.items():
        if count > 1:
            raise InvalidInput(f"the header {name.decode()} is there {count} times")


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The key that a request brings; None: none at all, empty: in a form that we do not know.

    OpenAI's clients send Authorization: Bearer, Anthropic's x-api-key, and pages that open a
    websocket, which can set no header, name it as a subprotocol.
    """
    authorization = headers.get(b"authorization")
    if authorization is not None:
        text = authorization.decode("latin-1")
        is_bearer = text[: len(_SCHEME)].lower() == _SCHEME
        return text[len(_SCHEME) :].strip() if is_bearer else ""
    key = headers.get(b"x-api-key")
    if key is not None:
        return key.decode("latin-1").strip()
    for protocol in headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(","):
        if protocol.strip().startswith(_PROTOCOL):
            return protocol.strip()[len(_PROTOCOL) :]
    return None


def require_admin(connection: HTTPConnection) -> None:
    """A route's dependency: it tells of all tenants, or touches all. Raises Forbidden."""
    if not context_of(connection.scope).access.is_admin:
        raise Forbidden(f"{connection.scope['path']} is for admin keys")
