"""PoolDispatcher: items in batches to workers, and their numbers back.

A batch is one Pool message with one answer. Where the answer does not come, the same batch is
placed again: a worker that dies, hangs, drains or refuses loses only time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls, card_attributes
from tokenmesh.services.gateway.core.mesh.liveness import Breaker
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.services.gateway.core.pooling.job import (
    FLOAT_BYTES,
    PER_TOKEN,
    PoolBatch,
    PoolJob,
    split,
    with_embeddings,
)
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Draining,
    NotFound,
    Overloaded,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import GatewayId, ModelName, WorkerId
from tokenmesh.shared.messages import Message, Place, Placed, Pool, PoolAnswer, Refused
from tokenmesh.shared.messages.pooling import Pooled, PoolItem
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import worker_generate
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import count_ids

POOL_BATCHES: Final = 8
"""Such batches of one request that run at a time."""

_SMALLEST: Final = 8
"""A request is not divided into batches below this part of `pool_batch_tokens`."""
_LONGEST_PAUSE_S: Final = 2.0
"""Before a further placement."""
_DOUBLINGS: Final = 16
"""It bounds the doublings of the pause; more would only overflow."""
_MAX_REFUSALS: Final = 2
"""After further ones the client gets a 429."""
_HUGE: Final = b"\x7f", b"\xff"
"""The last byte of float32 numbers that are infinite, not a number, or above 1.7e38."""


class _DeclaredDead(Unavailable):
    """The worker did not respond; it may be dead or only slow."""


@dataclass(slots=True)
class PoolDispatcher:
    """The workers as requests for numbers use them."""

    gateway: GatewayId
    bus: Bus
    calls: ServiceCalls
    streams: Streams
    breaker: Breaker
    blobs: Blobs
    settings: GatewaySettings
    metrics: Metrics
    count_workers: Callable[[ModelName], int]
    """The live workers of a model."""

    async def run(
        self, job: PoolJob, items: Sequence[PoolItem]
    ) -> AsyncGenerator[tuple[PoolBatch, list[Pooled]]]:
        """Yields each batch with the numbers of its items, in any order, as they arrive.

        Close the iterator to cancel what still runs. Raises the first error of a batch.
        """
        share = sum(count_ids(item.prompt_ids) for item in items)
        share //= max(1, self.count_workers(job.card.name))
        limit = self.settings.pool_batch_tokens
        most = min(max(share + 1, limit // _SMALLEST), limit)
        waiting = split(job, items, most, self.bus.max_message_bytes)
        running = {
            asyncio.create_task(self._compute(job, items, batch))
            for batch in islice(waiting, POOL_BATCHES)
        }
        done: set[asyncio.Task[tuple[PoolBatch, list[Pooled]]]] = set()
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for batch in islice(waiting, len(done)):
                    running.add(asyncio.create_task(self._compute(job, items, batch)))
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *done, return_exceptions=True)

    async def _compute(
        self, job: PoolJob, items: Sequence[PoolItem], batch: PoolBatch
    ) -> tuple[PoolBatch, list[Pooled]]:
        """Place the batch until a worker has answered it."""
        chosen = [items[index] for index in batch.indices]
        chosen = await with_embeddings(self.calls, job, chosen)
        attempts = _Attempts(self.settings, job.deadline_s)
        number, reservation = self.streams.next_number(), ""
        while True:
            place = _place_of(job, batch, attempts, reservation)
            placed = await self.calls.place_traced(place, job.deadline_s)
            reservation = placed.reservation
            pool = self._pool_of(job, chosen, placed, number, attempts.number)
            try:
                answer = await self._pool_on(placed.worker_id, pool, batch, job)
                pooled = await self._read(job, chosen, answer)
            except (Unavailable, DeadlineExceeded, NotFound) as error:
                kind = _kind(error)
                self.breaker.fail(placed.worker_id, kind)
                self.metrics.counter("pool_retries", reason=kind).inc()
                await attempts.next(placed, error)
                # what an encoder has stored may have expired
                chosen = await with_embeddings(self.calls, job, chosen)
                continue
            self.breaker.succeed(placed.worker_id)
            self.metrics.counter("pool_batches", task=job.params.task).inc()
            batch.cached_tokens, batch.worker_id = answer.cached_tokens, placed.worker_id
            return batch, pooled

    def _pool_of(
        self, job: PoolJob, items: list[PoolItem], placed: Placed, number: int, attempt: int
    ) -> Pool:
        adapter = job.card.adapter
        return Pool(
            request_id=job.request_id,
            model=job.card.name,
            gateway=self.gateway,
            stream=number,
            epoch=placed.epoch,
            attempt=attempt,
            items=items,
            params=job.params,
            priority=job.priority,
            cache_salt=job.cache_salt,
            lora=None if adapter is None else adapter.name,
            lora_hash="" if adapter is None else adapter.content_hash,
            reservation=placed.reservation,
            tenant=job.tenant.name,
            weight=job.tenant.weight,
            tenant_priority=job.tenant.priority,
            keep_alive_s=job.keep_alive_s,
        )

    async def _pool_on(
        self, worker_id: WorkerId, pool: Pool, batch: PoolBatch, job: PoolJob
    ) -> PoolAnswer:
        """The worker's answer. Raises Unavailable when it refuses or is declared dead."""
        attributes: dict[str, str | int] = {
            REQUEST_ID: pool.request_id,
            "tokenmesh.worker": worker_id,
            "tokenmesh.task": pool.params.task,
            "tokenmesh.items": len(pool.items),
            "tokenmesh.prompt_tokens": batch.num_tokens,
            "tokenmesh.attempt": pool.attempt,
        }
        attributes |= card_attributes(job.card)
        with span("pool", attributes) as current:
            answer = await self._request(worker_id, pool, job.deadline_s)
            if isinstance(answer, Refused):
                raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
            if not isinstance(answer, PoolAnswer):
                raise ProtocolError(f"the answer to Pool is {type(answer).__name__}")
            current.set_attribute("tokenmesh.cached_tokens", answer.cached_tokens)
        return answer

    async def _request(self, worker_id: WorkerId, pool: Pool, deadline_s: float) -> Message:
        """Cancels the batch on the worker unless the worker has answered."""
        subject = worker_generate(worker_id)
        request = asyncio.create_task(self.bus.request(subject, pool, deadline_s=deadline_s))
        has_answered = False
        try:
            with self.streams.calling(worker_id) as lost:
                await asyncio.wait((request, lost), return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    raise _DeclaredDead(f"worker {worker_id}: {lost.result()}")
            has_answered = not isinstance(request.exception(), DeadlineExceeded)
            return request.result()
        finally:
            request.cancel()
            if not has_answered:
                self.streams.cancels.put(worker_id, pool.stream, pool.attempt)

    async def _read(self, job: PoolJob, items: list[PoolItem], answer: PoolAnswer) -> list[Pooled]:
        """The numbers of an answer, those in blobs included. Raises NotFound, ProtocolError."""
        if len(answer.pooled) != len(items):
            raise ProtocolError(f"{len(answer.pooled)} answers to {len(items)} prompts")
        found = []
        for item, pooled in zip(items, answer.pooled, strict=True):
            whole = await self._with_data(pooled) if pooled.blob else pooled
            _check(job, item, whole)
            found.append(whole)
        return found

    async def _with_data(self, pooled: Pooled) -> Pooled:
        data = await self.blobs.get(pooled.blob)
        # No other answer has the key: what stays until it expires would fill the store.
        await self.blobs.remove(pooled.blob)
        if check_of(data) != pooled.blob_check:
            raise NotFound("the numbers in the blob store were replaced")
        return msgspec.structs.replace(pooled, data=data, blob="")


class _Attempts:
    """The placements of one batch."""

    def __init__(self, settings: CallSettings, deadline_s: float) -> None:
        self._settings = settings
        self._deadline_s = deadline_s
        self._num_counted = 0
        """Placements, without further ones on a worker that did not respond before."""
        self._num_refused = 0
        self._num_failed = 0
        """Placements that neither ended with a refusal nor with a silent worker."""
        self._silent: set[tuple[WorkerId, int]] = set()
        """Workers that did not respond, each with its epoch: one that is only slow counts once."""
        self.number = 0
        self.failed: list[WorkerId] = []
        """The last one first."""

    async def next(self, placed: Placed, error: TokenMeshError) -> None:
        """Return when it is time for another worker. Raises the error if that is useless."""
        settings, life = self._settings, (placed.worker_id, placed.epoch)
        self.number += 1
        self.failed = list(dict.fromkeys((placed.worker_id, *self.failed)))
        is_again = isinstance(error, _DeclaredDead) and life in self._silent
        self._num_counted += not is_again
        if isinstance(error, _DeclaredDead):
            self._silent.add(life)
        elif not isinstance(error, Overloaded | Draining):
            self._num_failed += 1
        self._num_refused += isinstance(error, Overloaded)
        num_lost = self._num_failed + len(self._silent)
        if num_lost >= settings.fruitless_attempts:
            raise Unavailable(
                f"{num_lost} workers in a row have lost the prompts, the last: {error.message}"
            ) from error
        if self._num_refused > _MAX_REFUSALS or self._num_counted >= settings.stream_attempts:
            raise error
        pause_s = settings.retry_pause_s * (2.0 ** min(self.number - 1, _DOUBLINGS) - 1.0)
        pause_s = min(pause_s, _LONGEST_PAUSE_S)
        if now_s() + pause_s >= self._deadline_s:
            raise error
        await asyncio.sleep(pause_s)


def _place_of(job: PoolJob, batch: PoolBatch, attempts: _Attempts, reservation: str) -> Place:
    adapter = job.card.adapter
    return Place(
        request_id=job.request_id,
        model=job.card.name,
        num_tokens=batch.num_tokens,
        max_tokens=0,
        priority=job.priority,
        attempt=attempts.number,
        exclude=attempts.failed,
        reservation=reservation,
        lora=None if adapter is None else adapter.name,
        lora_hash="" if adapter is None else adapter.content_hash,
        tenant=job.tenant.name,
        weight=job.tenant.weight,
        tenant_priority=job.tenant.priority,
    )


def _kind(error: TokenMeshError) -> str:
    """The label of a retry, in the words of `recoveries`."""
    if isinstance(error, Draining):
        return "draining"
    return "refused" if isinstance(error, Overloaded) else "lost"


def _check(job: PoolJob, item: PoolItem, pooled: Pooled) -> None:
    """Raises ProtocolError for numbers that cannot be the answer to an item."""
    is_per_token = job.params.task in PER_TOKEN
    shape = pooled.shape
    if len(shape) != (2 if is_per_token else 1) or not all(size > 0 for size in shape):
        raise ProtocolError(f"numbers of the shape {shape} for the task {job.params.task}")
    if len(pooled.data) != prod(shape) * FLOAT_BYTES:
        raise ProtocolError(f"{len(pooled.data)} bytes for numbers of the shape {shape}")
    if is_per_token and shape[0] > count_ids(item.prompt_ids):
        raise ProtocolError(f"{shape[0]} rows for {count_ids(item.prompt_ids)} tokens")
    dimensions = job.params.dimensions
    if dimensions is not None and shape[-1] != dimensions:
        raise ProtocolError(f"embeddings of {shape[-1]} dimensions instead of {dimensions}")
    last_bytes = pooled.data[3::4]
    if any(byte in last_bytes for byte in _HUGE):
        raise TokenMeshError("the model computed numbers that are not finite")
