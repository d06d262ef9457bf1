"""LocalLimits: the limits by one gateway's own counts, used while Redis is down.

The counts are always kept, so that they are right when an outage begins. No I/O, no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmesh.services.gateway.tenancy.limits import RateLimitStatus
from tokenmesh.services.gateway.tenancy.tenant import Tenant


@dataclass(slots=True)
class _State:
    requests: float
    tokens: float
    at: float
    leases: set[str] = field(default_factory=set)
    month: str = ""
    used: int = 0


class LocalLimits:
    """The requests, tokens and sequences of each tenant at this gateway."""

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
        """What is left by this gateway's counts."""
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
