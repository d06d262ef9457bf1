"""Tenant: the owner of API keys, with its limits, their local counts and refusals.

LocalLimits are kept always, so that they are right when an outage of Redis begins.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.shared.errors import Overloaded

_NO_LIMITS: Final = (None, None, None, None)


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
        """Return whether Redis must be queried before a request starts."""
        limits = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrent,
            self.monthly_tokens,
        )
        return limits != _NO_LIMITS


@dataclass(frozen=True, slots=True)
class Access:
    """The rights of a key."""

    tenant: Tenant
    is_admin: bool = False
    """It tells whether it may see the objects of all tenants and manage the mesh."""

    def may_see(self, owner: str) -> bool:
        """Return whether it may read, use and delete the objects of the tenant of that name."""
        return self.is_admin or owner == self.tenant.name


DEFAULT_TENANT: Final = Tenant(name="default")
"""Tenant of the keys in `--api-key`, and of all requests where no key is needed."""
DEFAULT_ACCESS: Final = Access(DEFAULT_TENANT)


Release = Callable[[Tenant, Sequence[str]], None]
Widen = Callable[["Lease", int, int], Awaitable[None]]


class RateLimited(Overloaded):
    """Too many requests or tokens a minute, or too many concurrent requests."""

    code = "rate_limit_exceeded"


class QuotaExceeded(Overloaded):
    """The tokens of the month are used up."""

    code = "insufficient_quota"


def refusal(tenant: Tenant, reason: str, wait_s: float) -> Overloaded:
    """The error for a limit that is exceeded; `reason` is the limit's name in the scripts."""
    whose = f"the tenant {tenant.name}"
    if reason == "budget":
        limit = tenant.monthly_tokens
        message = f"{whose} has used up its {limit} tokens of this month"
        return QuotaExceeded(message, retry_after_s=wait_s)
    limits = {
        "requests": f"{tenant.requests_per_minute} requests a minute",
        "tokens": f"{tenant.tokens_per_minute} tokens a minute",
        "concurrency": f"{tenant.max_concurrent} requests at a time",
        "sessions": f"{tenant.max_sessions} realtime sessions at a gateway",
    }
    return RateLimited(f"{whose} is over its limit of {limits[reason]}", retry_after_s=wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitStatus:
    """It holds what is left of a tenant's limits; sent in every response as x-ratelimit-*
    headers.
    """

    tenant: Tenant
    requests: float
    """Below zero is debt; so are tokens."""
    tokens: float

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the limits that the tenant has."""
        headers: list[tuple[bytes, bytes]] = []
        for name, limit, left in (
            ("requests", self.tenant.requests_per_minute, self.requests),
            ("tokens", self.tenant.tokens_per_minute, self.tokens),
        ):
            if limit is not None:
                reset_s = 60.0 * max(0.0, limit - left) / limit
                headers += [
                    (f"x-ratelimit-limit-{name}".encode(), str(limit).encode()),
                    (f"x-ratelimit-remaining-{name}".encode(), str(max(0, int(left))).encode()),
                    (f"x-ratelimit-reset-{name}".encode(), f"{reset_s:.3f}s".encode()),
                ]
        return headers


class Lease:
    """The requests and sequences that count against a tenant's limits until they are released.

    Made by Admission. A request counts once and as one sequence unless it is widened.
    """

    def __init__(self, tenant: Tenant, name: str, release: Release, widen: Widen) -> None:
        self.tenant = tenant
        self.name = name
        self._names: list[str] = [name]
        self._release = release
        self._widen = widen

    def add(self, names: Sequence[str]) -> None:
        """Add sequences, which are released together with the first one."""
        self._names.extend(names)

    async def widen(self, requests: int, sequences: int) -> None:
        """Count as that many requests and sequences. Raises Overloaded or InvalidInput."""
        await self._widen(self, requests, sequences)

    def release(self) -> None:
        """End the lease; further calls do nothing."""
        names, self._names = self._names, []
        if names:
            self._release(self.tenant, names)


@dataclass(slots=True)
class _State:
    requests: float
    tokens: float
    at: float
    leases: set[str] = field(default_factory=set)
    month: str = ""
    used: int = 0


class LocalLimits:
    """The requests, tokens and sequences of each tenant at this gateway. No I/O, no clock."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def refusal(
        self, tenant: Tenant, requests: int, sequences: int, now: float, month: str
    ) -> tuple[str, float] | None:
        """The limit that they would exceed and the seconds to wait; None if they may start."""
        state = self._refilled(tenant, now, month)
        rpm, tpm = tenant.requests_per_minute, tenant.tokens_per_minute
        most, monthly = tenant.max_concurrent, tenant.monthly_tokens
        if monthly is not None and state.used >= monthly:
            return "budget", 0.0
        if most is not None and len(state.leases) + sequences > most:
            return "concurrency", 1.0
        if rpm is not None and requests and state.requests < requests:
            return "requests", (requests - state.requests) * 60 / rpm
        if tpm is not None and state.tokens <= 0:
            return "tokens", (1 - state.tokens) * 60 / tpm
        return None

    def admit(
        self, tenant: Tenant, requests: int, names: Iterable[str], now: float, month: str
    ) -> None:
        """Count requests and sequences that start, admitted here or by Redis."""
        state = self._refilled(tenant, now, month)
        state.requests -= requests
        state.leases.update(names)

    def charge(self, tenant: Tenant, tokens: int, now: float, month: str) -> None:
        """Count the tokens of a response that has ended."""
        state = self._refilled(tenant, now, month)
        state.tokens -= tokens
        state.used += tokens

    def release(self, tenant: Tenant, names: Iterable[str]) -> None:
        """Remove sequences that have ended."""
        state = self._states.get(tenant.name)
        if state is not None:
            state.leases.difference_update(names)

    def status(self, tenant: Tenant, now: float, month: str) -> RateLimitStatus:
        """Return what is left by this gateway's counts."""
        state = self._refilled(tenant, now, month)
        return RateLimitStatus(tenant=tenant, requests=state.requests, tokens=state.tokens)

    def _refilled(self, tenant: Tenant, now: float, month: str) -> _State:
        rpm, tpm = tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0
        state = self._states.get(tenant.name)
        if state is None:
            state = self._states[tenant.name] = _State(rpm, tpm, now)
        minutes = max(0.0, now - state.at) / 60
        state.requests = min(rpm, state.requests + minutes * rpm)
        state.tokens = min(tpm, state.tokens + minutes * tpm)
        state.at = now
        if state.month != month:
            state.month, state.used = month, 0
        return state
