"""ApiKeys: who may call. Only hashes are kept, and comparing takes the same time for any key."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from tokenmesh.shared.errors import Unauthorized

OPEN_PATHS: Final = frozenset(("/health", "/livez", "/readyz", "/console"))
"""What a load balancer asks without a key, and a page without data (a browser opens it without)."""

_SCHEME: Final = "bearer "


class ApiKeys:
    """The accepted keys; none at all: everybody may call."""

    def __init__(self, hashes: Sequence[str]) -> None:
        self._digests = [bytes.fromhex(each) for each in hashes]

    def check(self, path: str, authorization: str | None) -> None:
        """Raises Unauthorized for a path that is not open, without a right key."""
        if not self._digests or path in OPEN_PATHS:
            return
        if authorization is None:
            raise Unauthorized("the API key is missing: send Authorization: Bearer <key>")
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        key = authorization[len(_SCHEME) :].strip() if is_bearer else ""
        digest = hashlib.sha256(key.encode()).digest()
        # Every digest is compared, so that the time does not tell which one was near.
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        if not is_bearer or not any(matches):
            raise Unauthorized("the API key is wrong")
