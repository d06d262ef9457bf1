"""Tenant: who pays for a request. Access: what a key gives to whoever brings it."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A limit that is None is no limit. Requests and tokens may come a minute's worth at once."""

    name: str
    priority: int = 0
    """Class of its waiting requests; smaller is sooner."""
    weight: float = 1.0
    """Share of the turns in its class."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion, charged when a response ends: a tenant in debt waits."""
    max_concurrent: int | None = None
    monthly_tokens: int | None = None
    max_sessions: int | None = None
    """Realtime sessions at one gateway at a time, idle ones included."""

    max_upload_bytes: int | None = None
    """Of all its uploads together; None: the mesh's default."""

    @property
    def has_limits(self) -> bool:
        """Whether there is anything to ask Redis before a request."""
        limits = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrent,
            self.monthly_tokens,
        )
        return any(limit is not None for limit in limits)


@dataclass(frozen=True, slots=True)
class Access:
    """What a key stands for."""

    tenant: Tenant
    is_admin: bool = False
    """Whether it may see what is of all tenants, and what is the mesh's own."""

    def may_see(self, owner: str) -> bool:
        """Whether it may see, use and delete the things of the tenant of that name."""
        return self.is_admin or owner == self.tenant.name


DEFAULT_TENANT: Final = Tenant(name="default")
"""Of the keys of `--api-key`, and of everybody where no key is needed."""
DEFAULT_ACCESS: Final = Access(DEFAULT_TENANT)
