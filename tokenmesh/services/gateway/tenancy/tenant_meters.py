"""TenantMeters: what each tenant takes, for Prometheus."""

from typing import Final

from tokenmesh.services.gateway.tenancy.batch import TokenCounts
from tokenmesh.shared.metrics import Metrics

_OTHER: Final = "other"


class TenantMeters:
    """Of one gateway. The first `most` tenants have series of their own, the others share one."""

    def __init__(self, metrics: Metrics, most: int) -> None:
        self._metrics = metrics
        self._most = most
        self._names: set[str] = set()

    def count_request(self, tenant: str, outcome: str) -> None:
        """`outcome`: admitted, or the code of the refusal."""
        label = self._label(tenant)
        self._metrics.counter("tenant_requests", tenant=label, outcome=outcome).inc()

    def count_tokens(self, tenant: str, tokens: TokenCounts) -> None:
        """A response has ended."""
        label = self._label(tenant)
        for kind, number in (
            ("prompt", tokens.prompt),
            ("cached", tokens.cached),
            ("completion", tokens.completion),
        ):
            self._metrics.counter("tenant_tokens", tenant=label, kind=kind).inc(number)

    def _label(self, tenant: str) -> str:
        if tenant in self._names or len(self._names) < self._most:
            self._names.add(tenant)
            return tenant
        return _OTHER
