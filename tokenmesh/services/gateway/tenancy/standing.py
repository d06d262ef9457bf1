"""RateLimitStatus: how a tenant stands to its limits. Refusals: what it is told beyond them."""

from dataclasses import dataclass

from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.errors import Overloaded


class RateLimited(Overloaded):
    """Too many requests or tokens a minute, or requests at a time."""

    code = "rate_limit_exceeded"


class QuotaExceeded(Overloaded):
    """The tokens of the month are used up."""

    code = "insufficient_quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitStatus:
    """Told with every answer, as x-ratelimit-* headers."""

    tenant: Tenant
    requests: float
    """Left now; below zero is debt."""
    tokens: float

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the limits that there are."""
        told: list[tuple[bytes, bytes]] = []
        for name, limit, left in (
            ("requests", self.tenant.requests_per_minute, self.requests),
            ("tokens", self.tenant.tokens_per_minute, self.tokens),
        ):
            if limit is not None:
                reset_s = 60.0 * max(0.0, limit - left) / limit
                told += [
                    (f"x-ratelimit-limit-{name}".encode(), str(limit).encode()),
                    (f"x-ratelimit-remaining-{name}".encode(), str(max(0, int(left))).encode()),
                    (f"x-ratelimit-reset-{name}".encode(), f"{reset_s:.3f}s".encode()),
                ]
        return told


def refusal(tenant: Tenant, reason: str, wait_s: float) -> Overloaded:
    """`reason`: the limit that was met, as the scripts call it."""
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
