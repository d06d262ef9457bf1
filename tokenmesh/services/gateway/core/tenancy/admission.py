"""Admission: decides whether a tenant's request may start, and charges its usage when it ends.

All gateways count together in Redis. During an outage of Redis each gateway enforces the limits by
its own counts: a tenant may then use its full limits at every gateway.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from typing import Final

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.core.tenancy.ledger import (
    Ledger,
    TenantMetrics,
    TokenCounts,
    month_of,
    seconds_left,
)
from tokenmesh.services.gateway.core.tenancy.redis_state import (
    Scripts,
    Sweeper,
    expiry_key,
    open_key,
    state_key,
    usage_key,
)
from tokenmesh.services.gateway.core.tenancy.tenant import (
    Lease,
    LocalLimits,
    RateLimitStatus,
    Tenant,
    refusal,
)
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, TokenMeshError
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Part, Redis

logger = logging.getLogger(__name__)

_LIMITS_TIMEOUT_S: Final = 0.25
"""Redis has so long to decide whether a request may start."""

MAX_METRIC_TENANTS: Final = 256
"""Tenants with metrics of their own."""


class Admission:
    """The limits and the usage of all tenants at this gateway; `run` must be running."""

    def __init__(
        self, gateway: str, redis: Redis | None, settings: TenancySettings, metrics: Metrics
    ) -> None:
        """`redis` None: only this gateway's counts are used, and usage is not stored."""
        self._gateway = gateway
        self._settings = settings
        self._metrics = metrics
        self._tenant_metrics = TenantMetrics(metrics, MAX_METRIC_TENANTS)
        self._local = LocalLimits()
        self._numbers = count(1)
        self._running: dict[str, Tenant] = {}
        """Tenants with a limit of concurrency, by the names of their running sequences."""
        self._retry_redis_s = 0.0
        self._scripts: Scripts | None = None
        self._ledger: Ledger | None = None
        self._sweeper: Sweeper | None = None
        if redis is not None:
            self._scripts = Scripts(redis)
            self._ledger = Ledger(gateway, self._scripts, settings, metrics)
            self._sweeper = Sweeper(redis, self._scripts, settings)

    async def admit(self, exchange: RequestContext) -> Lease:
        """Count a request that starts. Raises RateLimited or QuotaExceeded."""
        tenant = exchange.access.tenant
        lease = Lease(
            tenant,
            f"{self._gateway}:{next(self._numbers)}",
            self._release,
            partial(self._widen, exchange),
        )
        await self._count(exchange, tenant, 1, [lease.name])
        self._tenant_metrics.count_request(tenant.name, "admitted")
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
            await self._count(exchange, tenant, requests - 1, names)
            lease.add(names)

    async def _count(
        self, exchange: RequestContext, tenant: Tenant, requests: int, names: list[str]
    ) -> None:
        """Count requests, and sequences by their names. Raises RateLimited or QuotaExceeded."""
        self._note_tenant(tenant)
        try:
            if tenant.has_limits:
                exchange.standing = await self._decide(tenant, requests, names)
        except Overloaded as error:
            exchange.standing = self._local.status(tenant, monotonic_s(), month_of(wall_s()))
            self._tenant_metrics.count_request(tenant.name, error.code)
            raise
        self._local.admit(tenant, requests, names, monotonic_s(), month_of(wall_s()))
        if tenant.max_concurrent is not None:
            self._running.update(dict.fromkeys(names, tenant))

    def _release(self, tenant: Tenant, names: Sequence[str]) -> None:
        self._local.release(tenant, names)
        held = [name for name in names if self._running.pop(name, None) is not None]
        if held and self._ledger is not None:
            self._ledger.release(tenant, month_of(wall_s()), held)

    def charge(self, tenant: Tenant, model: str, usages: Iterable[Usage], name: str = "") -> None:
        """Count the usage of a response that has ended, as reported to its client.

        `name`: id of a response that another gateway may charge, too; it counts once.
        """
        total, month = TokenCounts(requests=1), month_of(wall_s())
        for usage in usages:
            details = usage.prompt_tokens_details
            counts = TokenCounts(prompt=usage.prompt_tokens, completion=usage.completion_tokens)
            if details is not None:
                counts.cached = details.cached_tokens
                counts.image = details.image_tokens
                counts.audio = details.audio_tokens
                counts.video = details.video_tokens
            total.add(counts)
        self._tenant_metrics.count_tokens(tenant.name, model, total)
        self._local.charge(tenant, total.charged, monotonic_s(), month)
        if self._ledger is not None:
            self._note_tenant(tenant)
            self._ledger.charge(tenant, month, model, total, name)

    async def wait_charged(self, name: str) -> None:
        """Return when the usage charged under a name is in Redis."""
        if self._ledger is not None:
            await self._ledger.wait_written(name)

    def is_charge_pending(self, name: str) -> bool:
        """Return whether the usage charged under a name is not in Redis yet."""
        return self._ledger is not None and self._ledger.is_pending(name)

    async def charge_for_another(
        self, tenant: Tenant, model: str, tokens: TokenCounts, name: str
    ) -> None:
        """Charge a response that another gateway may not have charged; return when it is in Redis.

        Raises Unavailable or ConfigError when it cannot be written now.
        """
        if self._ledger is not None:
            self._note_tenant(tenant)
            self._ledger.charge(tenant, month_of(wall_s()), model, tokens, name)
            await self._ledger.flush()

    async def run(self) -> None:
        """Write usage to Redis and renew leases, until cancelled."""
        if self._scripts is None or self._ledger is None or self._sweeper is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ledger.run())
            group.create_task(self._sweeper.run())
            group.create_task(self._renew_forever(self._scripts))

    async def settle(self) -> None:
        """Write all usage to Redis now. Raises Unavailable or ConfigError."""
        if self._ledger is not None:
            await self._ledger.flush()

    async def stop(self) -> None:
        """Write all usage, trying for `last_usage_s`; what is not written then is lost."""
        give_up_s = monotonic_s() + self._settings.last_usage_s
        pause_s = self._settings.limits_retry_s
        while True:
            try:
                return await self.settle()
            except TokenMeshError as error:
                if monotonic_s() + pause_s >= give_up_s:
                    logger.warning("cannot write usage to Redis, it is lost: %s", error.message)
                    return
            await asyncio.sleep(pause_s)

    def _note_tenant(self, tenant: Tenant) -> None:
        if self._sweeper is not None:
            self._sweeper.note(tenant.name)

    async def _decide(self, tenant: Tenant, requests: int, names: list[str]) -> RateLimitStatus:
        """Raises RateLimited or QuotaExceeded."""
        if self._scripts is None or monotonic_s() < self._retry_redis_s:
            return self._decide_locally(tenant, requests, len(names))
        name = tenant.name
        usage = usage_key(name, month_of(wall_s()))
        keys = (state_key(name), open_key(name), usage, expiry_key(name))
        limits = (
            tenant.requests_per_minute or 0,
            tenant.tokens_per_minute or 0,
            tenant.max_concurrent or 0,
            tenant.monthly_tokens or 0,
        )
        try:
            async with asyncio.timeout(_LIMITS_TIMEOUT_S):
                arguments: list[Part] = [self._settings.lease_s, *limits, requests, *names]
                answer = await self._scripts.admit(keys, arguments)
            reason, wait_s, requests_left, tokens_left = _read(answer)
        except (TokenMeshError, TimeoutError, ValueError) as error:
            logger.warning("enforcing limits by this gateway's own counts: %s", error)
            self._retry_redis_s = monotonic_s() + self._settings.limits_retry_s
            return self._decide_locally(tenant, requests, len(names))
        if reason != "ok":
            raise _refusal(tenant, reason, wait_s)
        return RateLimitStatus(tenant=tenant, requests=requests_left, tokens=tokens_left)

    def _decide_locally(self, tenant: Tenant, requests: int, sequences: int) -> RateLimitStatus:
        self._metrics.counter("limits_kept_alone").inc()
        now, month = monotonic_s(), month_of(wall_s())
        exceeded = self._local.refusal(tenant, requests, sequences, now, month)
        if exceeded is not None:
            raise _refusal(tenant, *exceeded)
        return self._local.status(tenant, now, month)

    async def _renew_forever(self, scripts: Scripts) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            leases: dict[str, list[str]] = {}
            for lease, tenant in self._running.items():
                leases.setdefault(tenant.name, []).append(lease)
            for name, held in leases.items():
                try:
                    keys = (open_key(name), expiry_key(name))
                    await scripts.renew(keys, (self._settings.lease_s, *held))
                except TokenMeshError as error:
                    logger.debug("cannot renew the leases of %s: %s", name, error.message)


def _refusal(tenant: Tenant, reason: str, wait_s: float) -> Overloaded:
    return refusal(tenant, reason, seconds_left(wall_s()) if reason == "budget" else wait_s)


def _read(answer: object) -> tuple[str, float, float, float]:
    """The answer of admit.lua. Raises ValueError."""
    match answer:
        case [bytes() as verdict, bytes() as wait_s, bytes() as requests, bytes() as tokens]:
            return verdict.decode(), float(wait_s), float(requests), float(tokens)
    raise ValueError(f"unexpected answer: {answer!r}")
