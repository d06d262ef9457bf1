"""Tenant: the owner of API keys, with its limits. Access: the rights of one key."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Limits that are None do not apply. Requests and tokens may burst up to a minute's worth."""

    name: str
    priority: int = 0
    """Class of its waiting requests; a smaller one is served first."""
    weight: float = 1.0
    """Share of the turns in its class."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion tokens, charged when a response ends: a tenant in debt waits."""
    max_concurrent: int | None = None
    monthly_tokens: int | None = None
    max_sessions: int | None = None
    """Open realtime sessions at one gateway, idle ones included."""
    max_upload_bytes: int | None = None
    """All of its uploads together; None: the setting `upload_bytes_per_tenant`."""

    @property
    def has_limits(self) -> bool:
        """Whether Redis must be queried before a request starts."""
        limits = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrent,
            self.monthly_tokens,
        )
        return any(limit is not None for limit in limits)


@dataclass(frozen=True, slots=True)
class Access:
    """The rights of a key."""

    tenant: Tenant
    is_admin: bool = False
    """Whether it may see the objects of all tenants and manage the mesh."""

    def may_see(self, owner: str) -> bool:
        """Whether it may read, use and delete the objects of the tenant of that name."""
        return self.is_admin or owner == self.tenant.name


DEFAULT_TENANT: Final = Tenant(name="default")
"""Tenant of the keys in `--api-key`, and of all requests where no key is needed."""
DEFAULT_ACCESS: Final = Access(DEFAULT_TENANT)
