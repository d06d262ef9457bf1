"""Limits as a request meets them: its lease, the status in response headers, and refusals."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.errors import Overloaded

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
    """What is left of a tenant's limits; sent in every response as x-ratelimit-* headers."""

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
