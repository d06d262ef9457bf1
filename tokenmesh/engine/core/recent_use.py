"""Tell how much each tenant has had lately: tenants that had much less may take more for a
moment.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from tokenmesh.engine.request.spec import TenantShare
from tokenmesh.shared.tenant_share import MUCH_LESS

_STEPS: Final = 512
"""It says how far back the moving average looks, about."""

_NOTHING: Final = 1e-4
"""Below it a tenant is forgotten."""


class RecentUse:
    """Moving averages of rows and prefill tokens, as shares of what a step has, by tenant."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._uses: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    @property
    def levels(self) -> dict[str, float]:
        return {tenant: use / self._weights[tenant] for tenant, use in self._uses.items()}

    def note(self, rows: Mapping[str, int], prefills: Iterable[tuple[TenantShare, int]]) -> None:
        """A step: rows that tenants hold, and tokens of prefill."""
        shares: dict[str, float] = {}
        for owner, num_tokens in prefills:
            self._meet(owner)
            share = shares.get(owner.tenant, rows.get(owner.tenant, 0) / self._max_rows)
            shares[owner.tenant] = share + num_tokens / self._max_tokens
        for tenant, use in list(self._uses.items()):
            share = shares.get(tenant, rows.get(tenant, 0) / self._max_rows)
            self._uses[tenant] = use = use + (share - use) / _STEPS
            if use < _NOTHING and tenant not in rows:
                del self._uses[tenant], self._weights[tenant]

    def is_lighter(self, owner: TenantShare, other: TenantShare) -> bool:
        """Return whether it has had much less than the other, by weight."""
        if owner.tenant not in self._uses or other.tenant not in self._uses:
            return False
        return self._level(owner) < MUCH_LESS * self._level(other)

    def is_light(self, owner: TenantShare) -> bool:
        """Return whether it has had much less than the heaviest."""
        most = max(self.levels.values(), default=0.0)
        return owner.tenant in self._uses and self._level(owner) < MUCH_LESS * most

    def _level(self, owner: TenantShare) -> float:
        return self._uses[owner.tenant] / owner.weight

    def _meet(self, owner: TenantShare) -> None:
        """A newcomer begins as the heaviest: it has to earn its credit."""
        if owner.tenant not in self._uses:
            most = max(self.levels.values(), default=0.0)
            self._uses[owner.tenant] = most * owner.weight
        self._weights[owner.tenant] = owner.weight
