"""KeyRing: who may call, and as whom. Only hashes are kept."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from typing import Final

from tokenmesh.services.gateway.tenancy.key_file import KeyFile, read_key_file
from tokenmesh.services.gateway.tenancy.tenant import (
    DEFAULT_ACCESS,
    DEFAULT_TENANT,
    Access,
    Tenant,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError, Unauthorized
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset(("/", "/health", "/livez", "/readyz", "/ping", "/console"))
"""What a load balancer asks without a key, and a page without data (a browser opens it without)."""

_EVERYBODY: Final = Access(DEFAULT_TENANT, is_admin=True)

Stamp = tuple[int, int, int] | None


class KeyRing:
    """The accepted keys; no key and no key file: everybody may call."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        """Raises ConfigError when the key file cannot be used."""
        self._settings = settings
        self._metrics = metrics
        self._seen: Stamp = self._stamp()
        self._file = self._read()

    def __bool__(self) -> bool:
        return bool(self._settings.keys_file or self._settings.api_key_hashes)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """All there are by name, the default one among them."""
        return {DEFAULT_TENANT.name: DEFAULT_TENANT, **self._file.tenants}

    def tenant(self, name: str) -> Tenant:
        """By its name; one that is not there any more has no limits, and is still told apart."""
        return self.tenants.get(name) or Tenant(name=name)

    def access(self, path: str, key: str | None) -> Access:
        """As whom a request comes. Raises Unauthorized where a right key is needed and missing."""
        if not self:
            return _EVERYBODY
        found = None
        if key:
            # A digest tells nothing of the key: how long the look-up takes helps nobody.
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
        """Look for another version of the file, for ever."""
        while self._settings.keys_file is not None:
            await asyncio.sleep(self._settings.keys_refresh_s)
            # beside the event loop: 20,000 keys take half a second to parse
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again when it has changed; one with errors leaves the old in force."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._file = self._read()
        except ConfigError as error:
            logger.error("the old keys stay in force: %s", error.message)
            self._count("refused")
        else:
            logger.info("new keys are in force: %s", self._settings.keys_file)
            self._count("loaded")

    def _count(self, outcome: str) -> None:
        self._metrics.counter("key_file_reloads", outcome=outcome).inc()

    def _read(self) -> KeyFile:
        """The file, and the keys of `--api-key` as those of the tenant that is called default."""
        path, file = self._settings.keys_file, KeyFile()
        if path is not None:
            file = read_key_file(path, self._settings.max_keys_file_bytes)
        # Without a file all keys are the operator's own; with one it says who is an admin.
        is_admin = path is None or DEFAULT_TENANT.name in file.admins
        default = Access(file.tenants.get(DEFAULT_TENANT.name, DEFAULT_TENANT), is_admin)
        fixed = dict.fromkeys(self._settings.api_key_hashes, default)
        return KeyFile(file.tenants, {**fixed, **file.access}, file.admins)

    def _stamp(self) -> Stamp:
        """None for a file that is not there; the number tells a file put in another's place."""
        path = self._settings.keys_file
        if path is None:
            return None
        try:
            stat = path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
