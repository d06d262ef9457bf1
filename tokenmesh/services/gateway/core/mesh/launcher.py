"""Launcher: starts a stream on a worker, and on another one when that fails.

The first start and every migration are the same loop. The next worker gets the tokens that were
already delivered and continues after them.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

import msgspec

from tokenmesh.services.gateway.core.generation.chunk import Output
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls, place_of
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.services.gateway.core.mesh.streams import Stream, Streams
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.calls import CallSettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import (
    Accepted,
    Encode,
    Generate,
    Message,
    Placed,
    Refused,
)
from tokenmesh.shared.messages.media import EMBEDS
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import worker_generate
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import pack_ids

logger = logging.getLogger(__name__)


_Work = Callable[[], Coroutine[object, object, None]]


class Launcher:
    """Drives streams to workers; one driver for each stream at a time."""

    def __init__(
        self,
        gateway: GatewayId,
        bus: Bus,
        calls: ServiceCalls,
        streams: Streams,
        settings: CallSettings,
        metrics: Metrics,
    ) -> None:
        self._gateway = gateway
        self._bus = bus
        self._calls = calls
        self._streams = streams
        self._settings = settings
        self._metrics = metrics

    async def launch(self, stream: Stream, placed: Placed) -> None:
        """Return when a worker has accepted the stream. Raises if none does."""
        stream.is_driven = True
        try:
            await self._drive(stream, placed)
        finally:
            stream.is_driven = False

    def launch_soon(self, stream: Stream, placed: Placed) -> None:
        """`launch` in the background; its error fails the stream's inbox."""
        self._start(stream, lambda: self._drive(stream, placed))

    def recover(self, stream: Stream) -> None:
        """Migrate a stream that its worker has lost, in the background."""
        if stream.acceptance is not None and not stream.acceptance.expired():
            stream.acceptance.reschedule(0.0)
        if not stream.is_driven:
            self._start(stream, lambda: self._recover(stream))

    def _start(self, stream: Stream, work: _Work) -> None:
        stream.is_driven = True
        stream.driver = asyncio.create_task(self._run(stream, work))

    async def _run(self, stream: Stream, work: _Work) -> None:
        try:
            await work()
        except TokenMeshError as error:
            stream.inbox.fail(error)
        # A bug must not leave a client waiting.
        except Exception:
            logger.exception("the driver of stream %d crashed", stream.number)
            stream.inbox.fail(TokenMeshError("internal error"))
        finally:
            stream.is_driven = False

    async def _recover(self, stream: Stream) -> None:
        session, request_id = stream.session, stream.job.request_id
        reason = session.lost_because
        attributes: dict[str, str | int] = {
            REQUEST_ID: request_id,
            "tokenmesh.reason": reason,
            "tokenmesh.worker": str(session.worker_id),
            "tokenmesh.delivered": len(session.token_ids),
        }
        self._metrics.counter("recoveries", reason=session.lost_kind).inc()
        logger.info("migrating stream %d of request %s: %s", stream.number, request_id, reason)
        with span("recover", attributes, parent=stream.traceparent):
            await self._pause_if_fruitless(stream)
            await self._drive(stream, None)

    async def _pause_if_fruitless(self, stream: Stream) -> None:
        """Limits how fast a request that crashes every worker reaches the next one."""
        self._raise_if_fruitless(stream)
        if stream.session.num_fruitless > 1:
            await asyncio.sleep(self._pause_s(stream.session.num_fruitless))

    def _raise_if_fruitless(self, stream: Stream) -> None:
        """Limits the workers that a request which crashes each of them can reach."""
        num, reason = stream.session.num_fruitless, stream.session.lost_because
        if num >= self._settings.fruitless_attempts:
            raise Unavailable(f"{num} attempts in a row have lost the stream, the last: {reason}")

    def _pause_s(self, failures: int) -> float:
        """0 after the first failure, then growing exponentially."""
        return self._settings.retry_pause_s * (2.0 ** (failures - 1) - 1.0)

    async def _drive(self, stream: Stream, placed: Placed | None) -> None:
        session = stream.session
        failures = 0
        while session.state is not SessionState.ENDED:
            if len(session.token_ids) >= stream.sampling.max_tokens:
                # All tokens have arrived, only the finish reason was lost.
                session.end()
                stream.inbox.put(stream.choice, Output(finish="length"))
                return
            try:
                if placed is None:
                    await self._renew_media(stream)
                    placed = await self._place(stream)
                await self._start_on(stream, placed)
            except (Unavailable, DeadlineExceeded) as error:
                failures += 1
                # a worker may lose the stream before its answer has been read
                self._raise_if_fruitless(stream)
                await self._pause_or_raise(stream, error, failures)
            if session.state is SessionState.RUNNING:
                return
            placed = None

    async def _renew_media(self, stream: Stream) -> None:
        """Encode media again: the first embeddings may have expired or be corrupted."""
        job, media = stream.job, stream.prompt.media
        encoded = [item for item in media if item.kind != EMBEDS]
        if not encoded:
            return
        try:
            message = Encode(request_id=job.request_id, model=job.card.name, items=encoded)
            limit_s = min(job.deadline_s, now_s() + self._settings.encode_timeout_s)
            answer = await self._calls.encode(message, limit_s)
        except TokenMeshError as error:
            # A worker may still have them in its cache.
            logger.info("cannot renew the media of %s: %s", job.request_id, error.message)
            return
        others = [item for item in media if item.kind == EMBEDS]
        stream.prompt = replace(stream.prompt, media=(*answer.items, *others))

    async def _place(self, stream: Stream) -> Placed:
        session, job = stream.session, stream.job
        place = msgspec.structs.replace(
            place_of(job, stream.prompt, len(session.token_ids)),
            num_streams=1,
            attempt=session.attempt,
            exclude=list(stream.failed),
            reservation=stream.reservation,
        )
        return await self._calls.place_traced(place, job.deadline_s)

    async def _start_on(self, stream: Stream, placed: Placed) -> None:
        """Send Generate to the worker; its answer, or silence, ends in the session's state."""
        session, worker_id = stream.session, placed.worker_id
        self._streams.start(stream, worker_id, placed.epoch)
        stream.reservation, stream.kv = placed.reservation, placed.kv
        attempt, num_delivered = session.attempt, len(session.token_ids)
        sent_s = monotonic_s()
        try:
            answer = await self._send(stream, worker_id, self._generate_of(stream))
            _check_accepted(answer)
            self._streams.on_answer(worker_id, sent_s)
            if session.state is SessionState.PLACING:
                raise Unavailable(f"accepted and lost: {session.lost_because}")
        except TokenMeshError as error:
            if not error.retryable:
                raise
            is_working = (
                session.state is SessionState.ENDED or len(session.token_ids) > num_delivered
            )
            if session.attempt == attempt and not is_working:
                kind = "refused" if isinstance(error, Overloaded | Draining) else "not accepted"
                self._streams.lose(stream, kind, error.message)
            if session.state is SessionState.PLACING:
                raise

    def _generate_of(self, stream: Stream) -> Generate:
        job, prompt, session = stream.job, stream.prompt, stream.session
        adapter = job.card.adapter
        return Generate(
            request_id=job.request_id,
            model=job.card.name,
            gateway=self._gateway,
            stream=stream.number,
            epoch=session.epoch,
            attempt=session.attempt,
            prompt_ids=prompt.packed_ids,
            output_ids=pack_ids(session.token_ids),
            sampling=stream.sampling,
            media=list(prompt.media),
            priority=job.priority,
            tenant=job.tenant.name,
            weight=job.tenant.weight,
            tenant_priority=job.tenant.priority,
            cache_salt=job.cache_salt,
            route_head=prompt.route_head,
            reservation=stream.reservation,
            lora=None if adapter is None else adapter.name,
            lora_hash="" if adapter is None else adapter.content_hash,
            keep_alive_s=job.keep_alive_s,
            prediction_ids=prompt.prediction_ids,
            kv=stream.kv,
        )

    async def _send(self, stream: Stream, worker_id: WorkerId, generate: Generate) -> Message:
        """The worker's answer. Raises Unavailable as soon as the worker has lost the stream."""
        limit_s = min(stream.job.deadline_s, now_s() + self._settings.accept_timeout_s)
        try:
            async with asyncio.timeout(None) as stream.acceptance:
                return await self._bus.request(
                    worker_generate(worker_id), generate, deadline_s=limit_s
                )
        except TimeoutError:
            raise Unavailable(stream.session.lost_because) from None
        finally:
            stream.acceptance = None

    async def _pause_or_raise(self, stream: Stream, error: TokenMeshError, failures: int) -> None:
        """A stream that has begun is retried for longer than one that can still be refused."""
        is_refused = isinstance(error, Overloaded) and not stream.session.token_ids
        if failures >= self._settings.stream_attempts or (is_refused and failures > 1):
            raise error
        pause_s = self._pause_s(failures)
        if now_s() + pause_s >= stream.job.deadline_s:
            raise error
        await asyncio.sleep(pause_s)


def _check_accepted(answer: object) -> None:
    if isinstance(answer, Refused):
        raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
    if not isinstance(answer, Accepted):
        raise ProtocolError(f"the answer to Generate is {type(answer).__name__}")
