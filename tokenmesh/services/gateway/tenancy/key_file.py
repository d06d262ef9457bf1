"""The key file: tenants and the hashes of their keys, as TOML."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tokenmesh.services.gateway.http.errors import field_path
from tokenmesh.services.gateway.tenancy.tenant import Access, Tenant
from tokenmesh.shared.errors import ConfigError

PARAM: Final = "gateway.keys_file"

_MAX: Final = 10**15
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Hash = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True, strip_whitespace=True)
]
_Limit = Annotated[int, Field(ge=1, le=_MAX)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


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
