"""ApiKeys: who may call. Only hashes are kept, and comparing takes the same time for any key."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Scope

from tokenmesh.shared.errors import Unauthorized

OPEN_PATHS: Final = frozenset(("/health", "/livez", "/readyz", "/console"))
"""What a load balancer asks without a key, and a page without data (a browser opens it without)."""

_SCHEME: Final = "bearer "
_PROTOCOL: Final = "openai-insecure-api-key."


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


def scope_of(scope: Scope) -> str:
    """Whose the things are that a request makes or may see: the hash of the key it brings."""
    key = key_of(dict(scope["headers"]))
    return hashlib.sha256((key or "").encode()).hexdigest()


class ApiKeys:
    """The accepted keys; none at all: everybody may call."""

    def __init__(self, hashes: Sequence[str]) -> None:
        self._digests = [bytes.fromhex(each) for each in hashes]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, path: str, key: str | None) -> None:
        """Raises Unauthorized for a path that is not open, without a right key."""
        if not self._digests or path in OPEN_PATHS:
            return
        if key is None:
            raise Unauthorized(
                "the API key is missing: send Authorization: Bearer <key> or x-api-key: <key>"
            )
        digest = hashlib.sha256(key.encode()).digest()
        # Every digest is compared, so that the time does not tell which one was near.
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        if not key or not any(matches):
            raise Unauthorized("the API key is wrong")
