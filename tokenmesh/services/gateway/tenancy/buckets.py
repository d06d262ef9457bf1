"""Buckets: the limits as one gateway keeps them by itself, while Redis is away. No I/O, no clock.

They follow what is admitted and charged at all times, so that a gateway that is left alone goes on
from where it was.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmesh.services.gateway.tenancy.standing import RateLimitStatus
from tokenmesh.services.gateway.tenancy.tenant import Tenant


@dataclass(slots=True)
class _State:
    requests: float
    tokens: float
    at: float
    leases: set[str] = field(default_factory=set)
    month: str = ""
    used: int = 0


class Buckets:
    """Of one gateway; as many as there are tenants in its key file."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def leases(self, tenant: Tenant) -> set[str]:
        """Sequences of the tenant that run here, by name."""
        state = self._states.get(tenant.name)
        return state.leases if state is not None else set()

    def refusal(
        self, tenant: Tenant, requests: int, sequences: int, now: float, month: str
    ) -> tuple[str, float] | None:
        """The limit that they would meet and the seconds to wait, if they would meet one."""
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
        """Requests and sequences have begun, admitted here or by Redis."""
        state = self._refilled(tenant, now, month)
        state.requests -= requests
        state.leases.update(names)

    def charge(self, tenant: Tenant, tokens: int, now: float, month: str) -> None:
        """A response has ended."""
        state = self._refilled(tenant, now, month)
        state.tokens -= tokens
        state.used += tokens

    def release(self, tenant: Tenant, names: Iterable[str]) -> None:
        """Sequences are over."""
        self.leases(tenant).difference_update(names)

    def standing(self, tenant: Tenant, now: float, month: str) -> RateLimitStatus:
        """How it is by this gateway's counts."""
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
