"""Counts of tokens: of a response, of a batch for Redis, and as metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.metrics import Metrics

_OTHER: Final = "other"
_HOUR_S: Final = 3600


def month_of(seconds: float) -> str:
    """The month that usage is counted in, in UTC: such as 2026-11."""
    return _month_at(int(seconds // _HOUR_S))


@lru_cache(8)
def _month_at(hour: int) -> str:
    return f"{datetime.fromtimestamp(hour * _HOUR_S, UTC):%Y-%m}"


def seconds_left(seconds: float) -> float:
    """Seconds until the next month begins."""
    now = datetime.fromtimestamp(seconds, UTC)
    years, month = divmod(now.month, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC).timestamp() - seconds


@dataclass(slots=True)
class TokenCounts:
    """Requests and tokens of one model."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    """Prompt tokens found in a prefix cache; `prompt` includes them."""
    completion: int = 0

    @property
    def charged(self) -> int:
        """Tokens that count against limits."""
        return self.prompt + self.completion

    def add(self, other: "TokenCounts") -> None:
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


@dataclass(slots=True)
class UsageBatch:
    """What has ended for one tenant in one month since the last batch was written to Redis."""

    tenant: Tenant
    month: str
    leases: list[str] = field(default_factory=list)
    models: dict[str, TokenCounts] = field(default_factory=dict)
    named: dict[str, tuple[str, TokenCounts]] = field(default_factory=dict)
    """By response id: model and tokens of responses that another gateway may count as well."""

    @property
    def charged(self) -> int:
        """Tokens of all models and responses."""
        of_names = (tokens.charged for _, tokens in self.named.values())
        return sum(tokens.charged for tokens in self.models.values()) + sum(of_names)

    def arguments(
        self, number: int, max_models: int, kept_s: int, names_s: float
    ) -> Iterator[str | int | float]:
        """The arguments of settle.lua."""
        yield from (number, self.tenant.requests_per_minute or 0)
        yield from (self.tenant.tokens_per_minute or 0, max_models, kept_s, names_s)
        yield len(self.leases)
        yield from self.leases
        entries = [("", *each) for each in self.models.items()]
        entries += [(name, *each) for name, each in self.named.items()]
        for name, model, tokens in entries:
            yield from (name, model, tokens.requests)
            yield from (tokens.prompt, tokens.cached, tokens.completion)


class TenantMetrics:
    """Metrics by tenant: the first `max_tenants` have their own series, the others share one."""

    def __init__(self, metrics: Metrics, max_tenants: int) -> None:
        self._metrics = metrics
        self._max_tenants = max_tenants
        self._names: set[str] = set()

    def count_request(self, tenant: str, outcome: str) -> None:
        """`outcome`: admitted, or the error code of the refusal."""
        label = self._label(tenant)
        self._metrics.counter("tenant_requests", tenant=label, outcome=outcome).inc()

    def count_tokens(self, tenant: str, tokens: TokenCounts) -> None:
        """Count the tokens of a response that has ended."""
        label = self._label(tenant)
        for kind, number in (
            ("prompt", tokens.prompt),
            ("cached", tokens.cached),
            ("completion", tokens.completion),
        ):
            self._metrics.counter("tenant_tokens", tenant=label, kind=kind).inc(number)

    def _label(self, tenant: str) -> str:
        if tenant in self._names or len(self._names) < self._max_tenants:
            self._names.add(tenant)
            return tenant
        return _OTHER
