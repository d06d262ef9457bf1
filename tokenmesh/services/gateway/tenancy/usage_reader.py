"""UsageReader: what tenants have used in a month, from Redis."""

from collections.abc import Iterable
from typing import Final

from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.services.gateway.tenancy.batch import TokenCounts
from tokenmesh.services.gateway.tenancy.key_ring import KeyRing
from tokenmesh.services.gateway.tenancy.keys import usage_key
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.services.gateway.tenancy.usage_shapes import ModelUsage, TenantUsage
from tokenmesh.shared.errors import Unavailable
from tokenmesh.shared.redis import Redis, Reply

_KINDS: Final = frozenset(("requests", "prompt", "cached", "completion"))


class UsageReader:
    """Of one gateway."""

    def __init__(self, redis: Redis | None, keys: KeyRing, admission: Admission) -> None:
        self._redis = redis
        self._keys = keys
        self._admission = admission

    async def all(self, month: str) -> list[TenantUsage]:
        """Of every tenant there is, by name. Raises Unavailable."""
        tenants = self._keys.tenants
        return await self._read([tenants[name] for name in sorted(tenants)], month)

    async def one(self, tenant: Tenant, month: str) -> TenantUsage:
        """Raises Unavailable."""
        return (await self._read([tenant], month))[0]

    async def _read(self, tenants: list[Tenant], month: str) -> list[TenantUsage]:
        if self._redis is None:
            raise Unavailable("usage is kept in Redis, and this gateway has none")
        await self._admission.settle()
        commands = [("HGETALL", usage_key(tenant.name, month)) for tenant in tenants]
        replies = await self._redis.call_all(commands)
        pairs = zip(tenants, replies, strict=True)
        return [_usage(tenant, month, _counts(reply)) for tenant, reply in pairs]


def _counts(reply: Reply) -> dict[str, int]:
    """Garbage among them counts as nothing."""
    flat = reply if isinstance(reply, list) else []
    pairs = zip(flat[::2], flat[1::2], strict=False)
    return {
        name.decode("utf-8", "replace"): int(value)
        for name, value in pairs
        if isinstance(name, bytes) and isinstance(value, bytes) and value.isdigit()
    }


def _usage(tenant: Tenant, month: str, counts: dict[str, int]) -> TenantUsage:
    used, budget = counts.get("tokens", 0), tenant.monthly_tokens
    return TenantUsage(
        tenant=tenant.name,
        month=month,
        total_tokens=used,
        monthly_tokens=budget,
        tokens_left=None if budget is None else max(0, budget - used),
        models=list(_models(counts)),
    )


def _models(counts: dict[str, int]) -> Iterable[ModelUsage]:
    tokens: dict[str, TokenCounts] = {}
    for field, count in counts.items():
        kind, _, model = field.partition(":")
        if model and kind in _KINDS:
            setattr(tokens.setdefault(model, TokenCounts()), kind, count)
    for model, found in sorted(tokens.items()):
        yield ModelUsage(
            model=model,
            requests=found.requests,
            prompt_tokens=found.prompt,
            cached_tokens=found.cached,
            completion_tokens=found.completion,
        )
