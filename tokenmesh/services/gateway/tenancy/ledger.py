"""Ledger: tells Redis what has ended, each batch exactly once, however often it has to ask.

Batches are numbered for each tenant, and a script that has seen a number does nothing: a call whose
answer was lost can be made again. While Redis is away the sums grow here, one for each tenant,
month and model. A gateway that is killed takes with it what it has not told yet, but for what has a
name: kept responses, whose logs others read.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tokenmesh.services.gateway.tenancy.batch import TokenCounts, UsageBatch
from tokenmesh.services.gateway.tenancy.keys import (
    counted_key,
    expiry_key,
    open_key,
    sequence_key,
    state_key,
    usage_key,
)
from tokenmesh.services.gateway.tenancy.scripts import Scripts
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import ConfigError, TokenMeshError, Unavailable
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)

_DAY_S: Final = 24 * 3600
_MAX_NAMED: Final = 1024
"""Of one batch; what is more waits without its name."""


class Ledger:
    """Of one gateway. `run` must be running."""

    def __init__(
        self, writer: str, scripts: Scripts, settings: TenancySettings, metrics: Metrics
    ) -> None:
        """`writer`: a name that no other process ever had or will have."""
        self._writer = writer
        self._scripts = scripts
        self._settings = settings
        self._metrics = metrics
        self._open: OrderedDict[tuple[str, str], UsageBatch] = OrderedDict()
        self._number = 0
        self._sending: tuple[int, UsageBatch] | None = None
        self._news = asyncio.Event()
        self._told = asyncio.Condition()
        self._lock = asyncio.Lock()
        self._is_waiting = False
        """For a Redis that takes it: said once."""
        metrics.gauge_of("usage_untold_tokens", lambda: self.untold)

    @property
    def untold(self) -> int:
        """Tokens that Redis does not know of yet."""
        return sum(batch.charged for batch in self._batches())

    def _batches(self) -> list[UsageBatch]:
        return [*self._open.values(), *([self._sending[1]] if self._sending else [])]

    def charge(
        self, tenant: Tenant, month: str, model: str, tokens: TokenCounts, name: str = ""
    ) -> None:
        """To be told soon. With a name it counts once, whichever gateways charge it."""
        batch = self._batch(tenant, month)
        if name and len(batch.named) < _MAX_NAMED:
            batch.named[name] = model, tokens
        else:
            batch.models.setdefault(model, TokenCounts()).add(tokens)
        self._news.set()

    def waits(self, name: str) -> bool:
        """Whether what was charged under a name is still to be told."""
        return any(name in batch.named for batch in self._batches())

    async def told(self, name: str) -> None:
        """Return when it is told."""
        async with self._told:
            await self._told.wait_for(lambda: not self.waits(name))

    def release(self, tenant: Tenant, month: str, names: Sequence[str]) -> None:
        """To be told soon."""
        batch = self._batch(tenant, month)
        batch.leases.extend(names)
        # What is not told in time is forgotten by Redis of its own.
        del batch.leases[: -self._settings.max_untold_leases]
        self._news.set()

    def _batch(self, tenant: Tenant, month: str) -> UsageBatch:
        batch = self._open.setdefault((tenant.name, month), UsageBatch(tenant, month))
        batch.tenant = tenant
        return batch

    async def run(self) -> None:
        """Tell Redis whenever there is something, for ever."""
        while True:
            await self._news.wait()
            try:
                await self.flush()
            except (Unavailable, ConfigError) as error:
                if not self._is_waiting:
                    logger.warning("usage has to wait: %s", error.message)
                self._is_waiting = True
                await asyncio.sleep(self._settings.limits_retry_s)

    async def flush(self) -> None:
        """Tell everything now. Raises Unavailable or ConfigError, and keeps what is not told."""
        async with self._lock:
            self._news.clear()
            try:
                while self._sending is not None or self._open:
                    await self._send_next()
            except BaseException:
                self._news.set()
                raise

    async def _send_next(self) -> None:
        if self._sending is None:
            _, batch = self._open.popitem(last=False)
            self._number += 1
            self._sending = self._number, batch
        number, batch = self._sending
        name, limits = batch.tenant.name, self._settings
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
            limits.max_usage_models,
            limits.usage_kept_days * _DAY_S,
            limits.counted_responses_s,
        )
        try:
            await self._scripts.settle(keys, list(arguments))
        except (Unavailable, ConfigError):
            # A password or a right is mended some day, too.
            raise
        except TokenMeshError as error:
            # Asking again would bring the same.
            logger.error("usage of %s is lost: %s", name, error.message)
            self._metrics.counter("usage_batches_lost").inc()
        self._sending = None
        self._is_waiting = False
        async with self._told:
            self._told.notify_all()
