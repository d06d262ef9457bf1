"""Authentication: the API key of a request, the key file with its tenants, and rights of keys.

Only hashes of keys are kept.
"""

import asyncio
import hashlib
import logging
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.requests import HTTPConnection

from tokenmesh.services.gateway.core.context import access_of
from tokenmesh.services.gateway.core.http.errors import field_path
from tokenmesh.services.gateway.core.tenancy.tenant import (
    DEFAULT_ACCESS,
    DEFAULT_TENANT,
    Access,
    Tenant,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError, Forbidden, InvalidInput, Unauthorized
from tokenmesh.shared.metrics import Metrics

PARAM: Final = "gateway.keys_file"

_MAX: Final = 10**15
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Hash = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True, strip_whitespace=True)
]
_Limit = Annotated[int, Field(ge=1, le=_MAX)]


class _Entry(BaseModel, extra="forbid", hide_input_in_errors=True):
    """Errors never show a value, which may be a key."""


class _Tenant(_Entry):
    priority: int = Field(default=0, ge=-1000, le=1000)
    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent: _Limit | None = None
    monthly_tokens: _Limit | None = None
    max_sessions: _Limit | None = None
    max_upload_bytes: _Limit | None = None
    admin: bool = False


class _Key(_Entry):
    sha256: _Hash
    tenant: str
    admin: bool = False
    note: str = ""
    """A comment for readers of the file."""


class _File(_Entry):
    tenants: dict[_Name, _Tenant] = {}
    keys: list[_Key] = []


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The contents of a key file."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """By name."""
    access: Mapping[str, Access] = field(default_factory=dict)
    """By the hash of the key."""
    admins: frozenset[str] = frozenset()
    """Tenants whose keys are all admin keys."""


def read_key_file(path: Path, max_bytes: int) -> KeyFile:
    """Read and check the file. Raises ConfigError, whose text never shows a key."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise _wrong(path, f"it is larger than {max_bytes} bytes")
        parsed = _File.model_validate(tomllib.loads(data.decode()))
    except OSError as error:
        raise _wrong(path, error.strerror or "it cannot be read") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        # The text of such an error may show the line, and with it a key.
        raise _wrong(path, f"it is not TOML{_where(error)}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise _wrong(path, f"{field_path(first['loc'])}: {first['msg']}") from None
    return _key_file(path, parsed)


def _key_file(path: Path, parsed: _File) -> KeyFile:
    tenants = {
        name: Tenant(name=name, **entry.model_dump(exclude={"admin"}))
        for name, entry in parsed.tenants.items()
    }
    admins = frozenset(name for name, entry in parsed.tenants.items() if entry.admin)
    found: dict[str, Access] = {}
    for index, key in enumerate(parsed.keys):
        tenant = tenants.get(key.tenant)
        if tenant is None:
            raise _wrong(path, f"keys[{index}].tenant: unknown tenant {key.tenant!r}")
        if key.sha256 in found:
            raise _wrong(path, f"keys[{index}].sha256: the key is listed twice")
        found[key.sha256] = Access(tenant, key.admin or key.tenant in admins)
    return KeyFile(tenants, found, admins)


def _wrong(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {reason}", param=PARAM)


def _where(error: Exception) -> str:
    """The `(at line 3, column 7)` of a TOML error, without the text at that place."""
    text = str(error)
    place = text[text.rfind("(at ") :] if text.endswith(")") and "(at " in text else ""
    return f" {place}" if place else ""


logger = logging.getLogger(__name__)

_PAGE: Final = ("/", "/console", "/console/app.js", "/console/app.css", "/console/icon.svg")
OPEN_PATHS: Final = frozenset(("/health", "/livez", "/readyz", "/ping", *_PAGE))
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
    if not access_of(connection).is_admin:
        raise Forbidden(f"{connection.scope['path']} requires an admin key")


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
