"""PoolRun: one request for numbers while it runs, and what it has used."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.files.uploads import Uploads
from tokenmesh.services.gateway.generation.answer import LoadHeaders
from tokenmesh.services.gateway.generation.usage import Meters, Usage, usage_of
from tokenmesh.services.gateway.http.body_budget import SHORT_BYTES, BodyBudget, Share
from tokenmesh.services.gateway.pooling.dispatcher import PoolDispatcher
from tokenmesh.services.gateway.pooling.job import FLOAT_BYTES, PER_TOKEN, PoolBatch, PoolJob
from tokenmesh.services.gateway.pooling.prompts import PoolTokenizer
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, PayloadTooLarge, TokenMeshError
from tokenmesh.shared.messages.pooling import Pooled, PoolItem
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tokens import count_ids


def answer_budget(limits: GatewaySettings, metrics: Metrics) -> BodyBudget:
    """Of the numbers that a gateway holds at a time."""
    budget = BodyBudget(
        limits.model_copy(update={"body_budget_bytes": limits.pool_budget_bytes}),
        "too many large answers are being computed",
    )
    metrics.gauge_of("pool_answer_bytes", lambda: budget.num_held)
    return budget


@dataclass(frozen=True, slots=True)
class PoolServices:
    """What every request for numbers uses."""

    tokenizer: PoolTokenizer
    runner: PoolDispatcher
    budget: BodyBudget
    """Of the numbers that are held at a time."""
    admission: Admission
    meters: Meters
    settings: GatewaySettings
    uploads: Uploads
    load_headers: LoadHeaders


@dataclass(slots=True)
class PoolRun:
    """Computes items; counts tokens for the tenant and the metrics."""

    services: PoolServices
    job: PoolJob
    context: RequestContext
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: Counter[str] = field(default_factory=Counter)
    _done: list[PoolBatch] = field(default_factory=list)
    _share: Share | None = None

    @property
    def usage(self) -> Usage:
        """What has been computed so far."""
        return usage_of(self.prompt_tokens, 0, self.cached_tokens, media_tokens=self.media_tokens)

    async def reserve(self, items: Sequence[PoolItem], extra: int = 0) -> None:
        """Wait until the numbers of these items, and `extra` more, may be held; until `release`.

        The request's body is no longer needed then. Raises PayloadTooLarge, Overloaded.
        """
        self.context.hand_on()
        limit = self.services.settings.max_pool_values
        num_values = self.num_values(items) + extra
        if num_values > limit:
            raise PayloadTooLarge(
                f"the answer has {num_values} numbers, at most {limit}: send fewer prompts at a "
                "time, or ask for fewer dimensions"
            )
        num_bytes = num_values * FLOAT_BYTES
        if num_bytes > SHORT_BYTES:
            self._share = await self.services.budget.take(self.job.tenant.name, num_bytes)

    def release(self) -> None:
        """The numbers are no longer held."""
        if self._share is not None:
            self.services.budget.give_back(self._share)

    def num_values(self, items: Sequence[PoolItem]) -> int:
        """The numbers of the items' answers."""
        rows = len(items)
        if self.job.params.task in PER_TOKEN:
            rows = sum(count_ids(item.prompt_ids) for item in items)
        return rows * self.job.width

    async def batches(
        self, items: Sequence[PoolItem]
    ) -> AsyncGenerator[tuple[list[int], list[Pooled]]]:
        """Numbers of items and what was computed, as batches arrive. Close it to cancel."""
        async with aclosing(self.services.runner.run(self.job, items)) as running:
            async for batch, pooled in running:
                self.prompt_tokens += batch.num_tokens
                self.cached_tokens += batch.cached_tokens
                self.media_tokens.update(batch.media_tokens)
                self._done.append(batch)
                yield batch.indices, pooled

    async def compute(self, items: Sequence[PoolItem]) -> list[Pooled]:
        """The numbers of all items in their order."""
        found: dict[int, Pooled] = {}
        async with aclosing(self.batches(items)) as batches:
            async for indices, pooled in batches:
                found.update(zip(indices, pooled, strict=True))
        return [found[index] for index in range(len(items))]

    def finish(self, error: BaseException | None) -> None:
        """Charge the tenant, and measure what succeeded.

        What failed on our side is not charged; a client that leaves is charged for what is done.
        """
        is_ours = isinstance(error, TokenMeshError) and not isinstance(error, Cancelled)
        if self.prompt_tokens and not is_ours:
            self.services.admission.charge(
                self.job.tenant, self.job.card.requested_name, [self.usage]
            )
        if error is not None or not self._done:
            return
        series = self.services.meters.series(self.job.card.name, self._done[0].worker_id or "")
        series.whole.observe(monotonic_s() - self.context.started_s)
        series.prompt_tokens.observe(self.prompt_tokens)
        series.count_success("stop")
