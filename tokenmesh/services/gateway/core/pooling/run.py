"""PoolRun: one request for numbers while it runs, and what it has used.

PoolingResponse runs it as an HTTP response. A large answer is written in portions while it is sent:
neither its text is held as a whole nor the event loop.
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.files.uploads import Uploads
from tokenmesh.services.gateway.core.generation.answer import GenerationServices
from tokenmesh.services.gateway.core.generation.usage import Usage, usage_of
from tokenmesh.services.gateway.core.http.body_budget import SHORT_BYTES, BodyBudget, Share
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.http.response_sender import ClientWatch, ResponseSender
from tokenmesh.services.gateway.core.pooling.dispatcher import PoolDispatcher
from tokenmesh.services.gateway.core.pooling.job import FLOAT_BYTES, PER_TOKEN, PoolBatch, PoolJob
from tokenmesh.services.gateway.core.pooling.prompts import PoolTokenizer
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, PayloadTooLarge, TokenMeshError
from tokenmesh.shared.messages.pooling import Pooled, PoolItem
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import REQUEST_ID, Tally
from tokenmesh.shared.tokens import BYTES_PER_ID, count_ids

INLINE_POOL_VALUES: Final = 16_384
"""Numbers up to which an answer is written on the event loop."""


def answer_budget(limits: GatewaySettings, metrics: Metrics) -> BodyBudget:
    """Return the budget of the numbers that a gateway holds at a time."""
    budget = BodyBudget(
        limits.model_copy(update={"body_budget_bytes": limits.pool_budget_bytes}),
        "too many large answers are being computed",
    )
    metrics.gauge_of("pool_answer_bytes", lambda: budget.num_held)
    return budget


@dataclass(frozen=True, slots=True)
class PoolServices:
    """It holds what every request for numbers uses."""

    tokenizer: PoolTokenizer
    runner: PoolDispatcher
    budget: BodyBudget
    """This is the budget of the numbers that are held at a time."""
    uploads: Uploads
    generation: GenerationServices

    @property
    def settings(self) -> GatewaySettings:
        """Those of the gateway."""
        return self.generation.settings


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
        """Return what has been computed so far."""
        return usage_of(self.prompt_tokens, 0, self.cached_tokens, media_tokens=self.media_tokens)

    async def reserve(self, items: Sequence[PoolItem]) -> None:
        """Wait until the numbers of these items may be held; until `release`.

        The request's body is no longer needed then. Raises PayloadTooLarge, Overloaded.
        """
        self.context.hand_on()
        limit = self.services.settings.max_pool_values
        num_values = self.num_values(list(pieces_of(self.job, items)))
        if num_values > limit:
            raise PayloadTooLarge(
                f"the answer has {num_values} numbers, at most {limit} "
                "(gateway.max_pool_values): send fewer prompts at a "
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
        pieces = list(pieces_of(self.job, items))
        found: dict[int, Pooled] = {}
        async with aclosing(self.batches(pieces)) as batches:
            async for indices, pooled in batches:
                found.update(zip(indices, pooled, strict=True))
        numbers = [found[index] for index in range(len(pieces))]
        if len(pieces) == len(items):
            return numbers
        return await off_loop(True, _joined_pieces, self.job, items, pieces, numbers)

    def finish(self, error: BaseException | None) -> None:
        """Charge the tenant, and measure what succeeded.

        What failed on our side is not charged; a client that leaves is charged for what is done.
        """
        is_ours = isinstance(error, TokenMeshError) and not isinstance(error, Cancelled)
        if self.prompt_tokens and not is_ours:
            self.services.generation.admission.charge(
                self.job.tenant, self.job.card.requested_name, [self.usage]
            )
        if error is not None or not self._done:
            return
        series = self.services.generation.meters.series(
            self.job.card.name, self._done[0].worker_id or ""
        )
        series.whole.observe(monotonic_s() - self.context.started_s)
        series.prompt_tokens.observe(self.prompt_tokens)
        series.count_success("stop")


def pieces_of(job: PoolJob, items: Sequence[PoolItem]) -> Iterator[PoolItem]:
    """The items, those that are longer than `job.chunk_tokens` in parts."""
    for item in items:
        num_tokens = count_ids(item.prompt_ids)
        size = job.chunk_tokens or num_tokens
        if num_tokens <= size:
            yield item
            continue
        for start in range(0, num_tokens, size):
            ids = item.prompt_ids[start * BYTES_PER_ID : (start + size) * BYTES_PER_ID]
            yield PoolItem(prompt_ids=ids, type_ids=item.type_ids[start : start + size])


def _joined_pieces(
    job: PoolJob, items: Sequence[PoolItem], pieces: Sequence[PoolItem], numbers: list[Pooled]
) -> list[Pooled]:
    """The embedding of each item: the mean of its parts', weighted by their tokens."""
    # numpy is imported when it is first needed, in this thread.
    from tokenmesh.services.gateway.core.pooling import arrays

    found, start = [], 0
    for item in items:
        end, num_left = start, count_ids(item.prompt_ids)
        while num_left > 0:
            num_left -= count_ids(pieces[end].prompt_ids)
            end += 1
        weights = [count_ids(piece.prompt_ids) for piece in pieces[start:end]]
        normalizes = job.params.use_activation is not False
        found.append(arrays.mean(numbers[start:end], weights, normalizes=normalizes))
        start = end
    return found


_PORTION_VALUES: Final = 32 * 1024
"""Numbers that are written at once."""
CHARS_PER_VALUE: Final = 8
"""Characters of text that are written in the time of one number."""
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class NumbersBody:
    """A body in parts, which are made when they are sent."""

    parts: list[tuple[int, Callable[[], bytes]]] = field(default_factory=list)
    """The numbers that a part writes, and what makes its bytes."""
    headers: Sequence[tuple[bytes, bytes]] = JSON_HEADERS
    needs_numpy: bool = False
    """It tells whether the parts are made in a thread, however few numbers there are: numpy is
    imported when it is first needed."""

    def add(self, data: bytes) -> None:
        """Append bytes as they are."""
        self.parts.append((0, lambda: data))

    def add_rows(
        self, num_values: int, rows: Sequence[Callable[[], bytes]], between: bytes
    ) -> None:
        """Append rows of `num_values` numbers each."""
        for index, row in enumerate(rows):
            if index:
                self.add(between)
            self.parts.append((num_values, row))

    def portions(self) -> Iterator[list[Callable[[], bytes]]]:
        portion: list[Callable[[], bytes]] = []
        num_values = 0
        for size, part in self.parts:
            if portion and num_values + size > _PORTION_VALUES:
                yield portion
                portion, num_values = [], 0
            portion.append(part)
            num_values += size
        yield portion


Compute = Callable[[PoolRun, NumbersBody], Awaitable[object]]
"""Computes the numbers and fills the body; runs while the client is connected."""


class PoolingResponse(Response):
    """Runs a request for numbers when it is called."""

    def __init__(self, job: PoolJob, compute: Compute, services: PoolServices) -> None:
        super().__init__()
        self._job = job
        self._compute = compute
        self._services = services
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        run = PoolRun(self._services, self._job, context)
        try:
            async with ClientWatch(receive, self._services.settings.write_timeout_s) as watch:
                headers = partial(
                    self._services.generation.load_headers, context, self._job.card.name
                )
                sender = ResponseSender(send, watch, self._flushing, headers)
                with sender.until_draining():
                    await self._run(run, sender)
        except Cancelled:
            context.has_client_left = True
        finally:
            run.release()
            self._flushing.record({REQUEST_ID: self._job.request_id})

    async def _run(self, run: PoolRun, sender: ResponseSender) -> None:
        body = NumbersBody()
        failure: BaseException | None = None
        try:
            await self._compute(run, body)
        except BaseException as error:
            failure = error
            raise
        finally:
            run.finish(failure)
            # A traceback refers to this frame.
            failure = None
        num_values = sum(size for size, _ in body.parts)
        is_large = num_values > INLINE_POOL_VALUES
        if is_large or body.headers is not JSON_HEADERS:
            await sender.send_parts(list(body.headers), _written(body))
        else:
            parts = [part for _, part in body.parts]
            await sender.answer(await off_loop(body.needs_numpy, _joined, parts))


async def _written(body: NumbersBody) -> AsyncIterator[bytes]:
    for portion in body.portions():
        yield await off_loop(True, _joined, portion)


def _joined(parts: Sequence[Callable[[], bytes]]) -> bytes:
    return b"".join([part() for part in parts])
