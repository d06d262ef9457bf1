"""Authentication: the API key that a request sends, the keys that are valid, and their rights.

Only hashes of keys are kept.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.requests import HTTPConnection

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.tenancy.key_file import KeyFile, read_key_file
from tokenmesh.services.gateway.tenancy.tenant import (
    DEFAULT_ACCESS,
    DEFAULT_TENANT,
    Access,
    Tenant,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError, Forbidden, InvalidInput, Unauthorized
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset(("/", "/health", "/livez", "/readyz", "/ping", "/console"))
"""Paths that need no key: probes of load balancers, and the console's page, which has no data."""

_ADMIN: Final = Access(DEFAULT_TENANT, is_admin=True)
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
"""Headers that decisions are based on: if there are two, a proxy may have checked the other one."""

Stamp = tuple[int, int, int] | None


def check_single(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises InvalidInput when a header that decisions are based on is sent twice."""
    counts = Counter(name for name, _ in fields if name in _SINGLE)
    for name, count in counts.items():
        if count > 1:
            raise InvalidInput(f"the header {name.decode()} is sent {count} times")


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The key that a request sends; None: it sends none; empty: its scheme is not known.

    OpenAI's clients send Authorization: Bearer, Anthropic's x-api-key. Pages that open a websocket
    cannot set headers, and send the key as a subprotocol.
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
    """Dependency of routes that show or change all tenants' state. Raises Forbidden."""
    if not context_of(connection.scope).access.is_admin:
        raise Forbidden(f"{connection.scope['path']} is for admin keys")


class KeyRing:
    """The valid keys. Without keys and without a key file every request is an admin's."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        """Raises ConfigError when the key file is invalid."""
        self._settings = settings
        self._metrics = metrics
        self._seen: Stamp = self._stamp()
        self._file = self._read()

    def __bool__(self) -> bool:
        return bool(self._settings.keys_file or self._settings.api_key_hashes)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """All tenants by name, the default one included."""
        return {DEFAULT_TENANT.name: DEFAULT_TENANT, **self._file.tenants}

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name; one that was removed from the file has no limits."""
        return self.tenants.get(name) or Tenant(name=name)

    def access(self, path: str, key: str | None) -> Access:
        """The rights of a request. Raises Unauthorized when it needs a key and has no valid one."""
        if not self:
            return _ADMIN
        found = None
        if key:
            # The time of the look-up depends on a digest, which does not reveal the key.
            found = self._file.access.get(hashlib.sha256(key.encode()).hexdigest())
        if found is not None:
            return found
        if path in OPEN_PATHS:
            return DEFAULT_ACCESS
        if key is None:
            raise Unauthorized(
                "the API key is missing: send Authorization: Bearer <key> or x-api-key: <key>"
            )
        raise Unauthorized("the API key is wrong")

    async def refresh(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        while self._settings.keys_file is not None:
            await asyncio.sleep(self._settings.keys_refresh_s)
            # in a thread: 20,000 keys take half a second to parse
            await asyncio.to_thread(self.reload_if_changed)

    def reload_if_changed(self) -> None:
        """Read a changed file; if it is invalid, the old keys stay valid."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._file = self._read()
        except ConfigError as error:
            logger.error("the key file is invalid, the old keys stay in force: %s", error.message)
            self._count("refused")
        else:
            logger.info("loaded new keys from %s", self._settings.keys_file)
            self._count("loaded")

    def _count(self, outcome: str) -> None:
        self._metrics.counter("key_file_reloads", outcome=outcome).inc()

    def _read(self) -> KeyFile:
        """The file, plus the keys of `--api-key`, which belong to the tenant `default`."""
        path, file = self._settings.keys_file, KeyFile()
        if path is not None:
            file = read_key_file(path, self._settings.max_keys_file_bytes)
        # Without a file all keys are the operator's; with one the file names the admins.
        is_admin = path is None or DEFAULT_TENANT.name in file.admins
        default = Access(file.tenants.get(DEFAULT_TENANT.name, DEFAULT_TENANT), is_admin)
        fixed = dict.fromkeys(self._settings.api_key_hashes, default)
        return KeyFile(file.tenants, {**fixed, **file.access}, file.admins)

    def _stamp(self) -> Stamp:
        """Changes when the file is written or replaced (by its inode); None if it is missing."""
        path = self._settings.keys_file
        if path is None:
            return None
        try:
            stat = path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
