"""Admission: whether a tenant's request may begin, and what it is charged for in the end.

All gateways count together in Redis. While Redis is away each keeps the limits by itself: a tenant
may then have as much at every gateway.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.usage import Usage
from tokenmesh.services.gateway.tenancy.batch import TokenCounts
from tokenmesh.services.gateway.tenancy.buckets import Buckets
from tokenmesh.services.gateway.tenancy.keys import expiry_key, open_key, state_key, usage_key
from tokenmesh.services.gateway.tenancy.lease import Lease
from tokenmesh.services.gateway.tenancy.ledger import Ledger
from tokenmesh.services.gateway.tenancy.month import month_of, seconds_left
from tokenmesh.services.gateway.tenancy.scripts import Scripts
from tokenmesh.services.gateway.tenancy.standing import RateLimitStatus, refusal
from tokenmesh.services.gateway.tenancy.sweeper import Sweeper
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.services.gateway.tenancy.tenant_meters import TenantMeters
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, TokenMeshError
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Part, Redis

logger = logging.getLogger(__name__)


class Admission:
    """Of one gateway. `run` must be running."""

    def __init__(
        self, gateway: str, redis: Redis | None, settings: TenancySettings, metrics: Metrics
    ) -> None:
        """`redis` None: this gateway is always alone, and usage is not kept."""
        self._gateway = gateway
        self._settings = settings
        self._metrics = metrics
        self._meters = TenantMeters(metrics, settings.max_metric_tenants)
        self._scripts = Scripts(redis) if redis is not None else None
        self._buckets = Buckets()
        self._numbers = count(1)
        self._running: dict[str, Tenant] = {}
        """Tenants with a bound on what runs, by the name of each sequence."""
        self._alone_until_s = 0.0
        self._ledger: Ledger | None = None
        self._sweeper: Sweeper | None = None
        if redis is not None and self._scripts is not None:
            self._ledger = Ledger(gateway, self._scripts, settings, metrics)
            self._sweeper = Sweeper(redis, self._scripts, settings)

    @asynccontextmanager
    async def admitted(self, exchange: RequestContext) -> AsyncIterator[None]:
        """A request runs inside the block, with `exchange.lease` unless it is taken over.

        Raises RateLimited or QuotaExceeded before it.
        """
        exchange.lease = await self.admit(exchange)
        try:
            yield
        finally:
            exchange.release()

    async def admit(self, exchange: RequestContext) -> Lease:
        """Raises RateLimited or QuotaExceeded."""
        tenant = exchange.access.tenant
        lease = Lease(
            tenant,
            f"{self._gateway}:{next(self._numbers)}",
            self._release,
            partial(self._widen, exchange),
        )
        await self._take(exchange, tenant, 1, [lease.name])
        self._meters.count_request(tenant.name, "admitted")
        return lease

    async def _widen(
        self, exchange: RequestContext, lease: Lease, requests: int, sequences: int
    ) -> None:
        tenant = lease.tenant
        for wanted, limit, what in (
            (requests, tenant.requests_per_minute, "prompts, more than its requests a minute"),
            (sequences, tenant.max_concurrent, "sequences, more than it may have at a time"),
        ):
            if limit is not None and wanted > limit:
                raise InvalidInput(
                    f"the request holds {wanted} {what}: the limit of the tenant {tenant.name} "
                    f"is {limit}"
                )
        names = [f"{lease.name}/{index}" for index in range(1, sequences)]
        if requests > 1 or names:
            await self._take(exchange, tenant, requests - 1, names)
            lease.add(names)

    async def _take(
        self, exchange: RequestContext, tenant: Tenant, requests: int, names: list[str]
    ) -> None:
        """Count requests, and sequences by their names. Raises RateLimited or QuotaExceeded."""
        self._note(tenant)
        try:
            if tenant.has_limits:
                exchange.standing = await self._ask(tenant, requests, names)
        except Overloaded as error:
            exchange.standing = self._buckets.standing(tenant, monotonic_s(), month_of(wall_s()))
            self._meters.count_request(tenant.name, error.code)
            raise
        self._buckets.admit(tenant, requests, names, monotonic_s(), month_of(wall_s()))
        if tenant.max_concurrent is not None:
            self._running.update(dict.fromkeys(names, tenant))

    def _release(self, tenant: Tenant, names: Sequence[str]) -> None:
        self._buckets.release(tenant, names)
        held = [name for name in names if self._running.pop(name, None) is not None]
        if held and self._ledger is not None:
            self._ledger.release(tenant, month_of(wall_s()), held)

    def charge(self, tenant: Tenant, model: str, usages: Iterable[Usage], name: str = "") -> None:
        """A response has ended: the very usage that its client is told, or would have been.

        `name`: of a response that another gateway may charge, too: it counts once.
        """
        total, month = TokenCounts(requests=1), month_of(wall_s())
        for usage in usages:
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            total.add(TokenCounts(0, usage.prompt_tokens, cached, usage.completion_tokens))
        self._meters.count_tokens(tenant.name, total)
        self._buckets.charge(tenant, total.charged, monotonic_s(), month)
        if self._ledger is not None:
            self._note(tenant)
            self._ledger.charge(tenant, month, model, total, name)

    async def told(self, name: str) -> None:
        """Return when Redis knows what was charged under a name."""
        if self._ledger is not None:
            await self._ledger.told(name)

    def waits(self, name: str) -> bool:
        """Whether Redis is still to be told of it."""
        return self._ledger is not None and self._ledger.waits(name)

    async def charge_for_another(
        self, tenant: Tenant, model: str, tokens: TokenCounts, name: str
    ) -> None:
        """Count what another gateway may not have told; return when Redis knows.

        Raises Unavailable or ConfigError when it cannot be told now.
        """
        if self._ledger is not None:
            self._note(tenant)
            self._ledger.charge(tenant, month_of(wall_s()), model, tokens, name)
            await self._ledger.flush()

    async def run(self) -> None:
        """Tell Redis what has ended and what goes on, for ever."""
        if self._ledger is None or self._sweeper is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ledger.run())
            group.create_task(self._sweeper.run())
            group.create_task(self._renew_forever())

    async def settle(self) -> None:
        """Tell Redis everything now. Raises Unavailable or ConfigError."""
        if self._ledger is not None:
            await self._ledger.flush()

    async def stop(self) -> None:
        """The same when there is no later; what Redis does not take in `last_usage_s` is lost."""
        give_up_s = monotonic_s() + self._settings.last_usage_s
        pause_s = self._settings.limits_retry_s
        while True:
            try:
                return await self.settle()
            except TokenMeshError as error:
                if monotonic_s() + pause_s >= give_up_s:
                    logger.warning("usage is lost: %s", error.message)
                    return
            await asyncio.sleep(pause_s)

    def _note(self, tenant: Tenant) -> None:
        if self._sweeper is not None:
            self._sweeper.note(tenant.name)

    async def _ask(self, tenant: Tenant, requests: int, names: list[str]) -> RateLimitStatus:
        """Raises RateLimited or QuotaExceeded."""
        if self._scripts is None or monotonic_s() < self._alone_until_s:
            return self._decide_alone(tenant, requests, len(names))
        month = month_of(wall_s())
        name = tenant.name
        keys = (state_key(name), open_key(name), usage_key(name, month), expiry_key(name))
        limits = (
            tenant.requests_per_minute or 0,
            tenant.tokens_per_minute or 0,
            tenant.max_concurrent or 0,
            tenant.monthly_tokens or 0,
        )
        try:
            async with asyncio.timeout(self._settings.limits_timeout_s):
                arguments: list[Part] = [self._settings.lease_s, *limits, requests, *names]
                answer = await self._scripts.admit(keys, arguments)
            reason, wait_s, requests_left, tokens_left = _read(answer)
        except (TokenMeshError, TimeoutError, ValueError) as error:
            logger.warning("this gateway keeps the limits alone: %s", error)
            self._alone_until_s = monotonic_s() + self._settings.limits_retry_s
            return self._decide_alone(tenant, requests, len(names))
        if reason != "ok":
            raise _refusal(tenant, reason, wait_s)
        return RateLimitStatus(tenant=tenant, requests=requests_left, tokens=tokens_left)

    def _decide_alone(self, tenant: Tenant, requests: int, sequences: int) -> RateLimitStatus:
        self._metrics.counter("limits_kept_alone").inc()
        now, month = monotonic_s(), month_of(wall_s())
        met = self._buckets.refusal(tenant, requests, sequences, now, month)
        if met is not None:
            raise _refusal(tenant, *met)
        return self._buckets.standing(tenant, now, month)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            leases: dict[str, list[str]] = {}
            for lease, tenant in self._running.items():
                leases.setdefault(tenant.name, []).append(lease)
            for name, held in leases.items():
                await self._renew(name, held)

    async def _renew(self, name: str, leases: list[str]) -> None:
        assert self._scripts is not None, "only a gateway with Redis renews"
        try:
            keys = (open_key(name), expiry_key(name))
            await self._scripts.renew(keys, (self._settings.lease_s, *leases))
        except TokenMeshError as error:
            logger.debug("leases are not renewed: %s", error.message)


def _refusal(tenant: Tenant, reason: str, wait_s: float) -> Overloaded:
    return refusal(tenant, reason, seconds_left(wall_s()) if reason == "budget" else wait_s)


def _read(answer: object) -> tuple[str, float, float, float]:
    """What admit.lua answers. Raises ValueError."""
    match answer:
        case [bytes() as verdict, bytes() as wait_s, bytes() as requests, bytes() as tokens]:
            return verdict.decode(), float(wait_s), float(requests), float(tokens)
    raise ValueError(f"unexpected answer: {answer!r}")
