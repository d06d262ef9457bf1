"""Ledger: writes usage to Redis; each batch counts exactly once, however often it is sent.

Batches are numbered for each tenant, and the script ignores a number that it has seen, so a call
whose answer was lost can be repeated. During an outage of Redis the sums grow here, one for each
tenant, month and model. When a gateway is killed, its unwritten usage is lost, except that of
stored responses: other gateways read their logs and charge them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from tokenmesh.services.gateway.core.tenancy.redis_state import (
    Scripts,
    counted_key,
    expiry_key,
    open_key,
    sequence_key,
    state_key,
    usage_key,
)
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import ConfigError, TokenMeshError, Unavailable
from tokenmesh.shared.metrics import Metrics

_USAGE_KEPT_DAYS: Final = 400
"""The usage of a month stays for so many days after its last request."""

MAX_UNTOLD_LEASES: Final = 65536
"""Ended requests of a tenant that wait for Redis at most."""
COUNTED_RESPONSES_S: Final = 3600.0
"""It says how long Redis knows which kept responses are counted: a dead gateway's response that is
found later is counted again."""

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
    image: int = 0
    """Prompt tokens that stand for images; `prompt` includes them, and the next two."""
    audio: int = 0
    video: int = 0

    @property
    def charged(self) -> int:
        """Tokens that count against limits."""
        return self.prompt + self.completion

    def add(self, other: "TokenCounts") -> None:
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion
        self.image += other.image
        self.audio += other.audio
        self.video += other.video


@dataclass(slots=True)
class UsageBatch:
    """It holds what has ended for one tenant in one month since the last batch was written to
    Redis.
    """

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
            yield from (tokens.image, tokens.audio, tokens.video)


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

    def count_tokens(self, tenant: str, model: str, tokens: TokenCounts) -> None:
        """Count the tokens of a response that has ended."""
        label = self._label(tenant)
        for kind, number in (
            ("prompt", tokens.prompt),
            ("cached", tokens.cached),
            ("completion", tokens.completion),
        ):
            self._metrics.counter("tenant_tokens", tenant=label, kind=kind).inc(number)
        for kind, number in (
            ("image", tokens.image),
            ("audio", tokens.audio),
            ("video", tokens.video),
        ):
            if number:  # text-only tenants and models have no such series
                self._metrics.counter("tenant_tokens", tenant=label, kind=kind).inc(number)
                self._metrics.counter("media_tokens", model_name=model, modality=kind).inc(number)

    def _label(self, tenant: str) -> str:
        if tenant in self._names or len(self._names) < self._max_tenants:
            self._names.add(tenant)
            return tenant
        return _OTHER


logger = logging.getLogger(__name__)

_DAY_S: Final = 24 * 3600
_GATHER_S: Final = 0.02
"""It says how long usage of tenants without limits is gathered before it is written."""
_MAX_NAMED: Final = 1024
"""Responses in one batch that are counted by their ids; further ones are counted without."""


class Ledger:
    """The usage that this gateway has not written to Redis; `run` must be running."""

    def __init__(
        self, writer: str, scripts: Scripts, settings: TenancySettings, metrics: Metrics
    ) -> None:
        """`writer`: a name that no other process ever has."""
        self._writer = writer
        self._scripts = scripts
        self._settings = settings
        self._metrics = metrics
        self._open: OrderedDict[tuple[str, str], UsageBatch] = OrderedDict()
        self._number = 0
        self._sending: tuple[int, UsageBatch] | None = None
        self._has_entries = asyncio.Event()
        self._is_urgent = asyncio.Event()
        """Set when a limit or a reader waits for an entry."""
        self._written = asyncio.Condition()
        self._lock = asyncio.Lock()
        self._has_warned = False
        metrics.gauge_of("usage_untold_tokens", lambda: self.unwritten)

    @property
    def unwritten(self) -> int:
        """Tokens that are not in Redis yet."""
        return sum(batch.charged for batch in self._batches())

    def _batches(self) -> list[UsageBatch]:
        return [*self._open.values(), *([self._sending[1]] if self._sending else [])]

    def charge(
        self, tenant: Tenant, month: str, model: str, tokens: TokenCounts, name: str = ""
    ) -> None:
        """Count usage. With a name it counts once, even if several gateways charge it."""
        batch = self._batch(tenant, month)
        if name and len(batch.named) < _MAX_NAMED:
            batch.named[name] = model, tokens
        else:
            batch.models.setdefault(model, TokenCounts()).add(tokens)
        self._note(is_urgent=bool(name) or tenant.has_limits)

    def is_pending(self, name: str) -> bool:
        """Return whether what was charged under a name is not written yet."""
        return any(name in batch.named for batch in self._batches())

    async def wait_written(self, name: str) -> None:
        """Return when what was charged under a name is written."""
        async with self._written:
            await self._written.wait_for(lambda: not self.is_pending(name))

    def release(self, tenant: Tenant, month: str, names: Sequence[str]) -> None:
        batch = self._batch(tenant, month)
        batch.leases.extend(names)
        # Leases beyond the bound expire in Redis.
        del batch.leases[:-MAX_UNTOLD_LEASES]
        self._note(is_urgent=tenant.has_limits)

    def _note(self, *, is_urgent: bool) -> None:
        self._has_entries.set()
        if is_urgent:
            self._is_urgent.set()

    def _batch(self, tenant: Tenant, month: str) -> UsageBatch:
        batch = self._open.setdefault((tenant.name, month), UsageBatch(tenant, month))
        batch.tenant = tenant
        return batch

    async def run(self) -> None:
        """Write entries as they come, until cancelled."""
        while True:
            await self._has_entries.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._is_urgent.wait()
            try:
                await self.flush()
            except (Unavailable, ConfigError) as error:
                if not self._has_warned:
                    logger.warning("cannot write usage to Redis, will retry: %s", error.message)
                self._has_warned = True
                await asyncio.sleep(self._settings.limits_retry_s)

    async def flush(self) -> None:
        """Write everything now. Raises Unavailable or ConfigError, and keeps the rest."""
        async with self._lock:
            self._has_entries.clear()
            self._is_urgent.clear()
            try:
                while self._sending is not None or self._open:
                    await self._send_next()
            except BaseException:
                self._has_entries.set()
                raise

    async def _send_next(self) -> None:
        if self._sending is None:
            _, batch = self._open.popitem(last=False)
            self._number += 1
            self._sending = self._number, batch
        number, batch = self._sending
        name, settings = batch.tenant.name, self._settings
        keys = (
            state_key(name),
            open_key(name),
            usage_key(name, batch.month),
            sequence_key(name, self._writer),
            counted_key(name),
            expiry_key(name),
        )
        arguments = batch.arguments(
            number,
            settings.max_usage_models,
            _USAGE_KEPT_DAYS * _DAY_S,
            COUNTED_RESPONSES_S,
        )
        try:
            await self._scripts.settle(keys, list(arguments))
        except (Unavailable, ConfigError):
            # A wrong password or a missing permission can be corrected, like an outage.
            raise
        except TokenMeshError as error:
            # A repetition would fail in the same way.
            logger.error("usage of the tenant %s is lost: %s", name, error.message)
            self._metrics.counter("usage_batches_lost").inc()
        self._sending = None
        self._has_warned = False
        async with self._written:
            self._written.notify_all()
