"""Launcher: gets a stream onto a worker, and onto another one when that fails.

The first start and every recovery are the same loop. A worker that takes over gets the tokens
that were already delivered, and goes on after them.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial

import msgspec

from tokenmesh.services.gateway.mesh.breaker import Breaker
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.placement_trace import trace_placement
from tokenmesh.services.gateway.mesh.session import Output, SessionState
from tokenmesh.services.gateway.mesh.streams import Stream, Streams
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import (
    Accepted,
    Encode,
    Encoded,
    Generate,
    Message,
    Placed,
    Refused,
)
from tokenmesh.shared.messages.media import IMAGE
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import encode, worker_generate
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import pack_ids

logger = logging.getLogger(__name__)

_Work = Callable[[], Coroutine[object, object, None]]


class Launcher:
    """Drives streams to workers; one driver a stream at a time."""

    def __init__(
        self,
        bus: Bus,
        calls: ServiceCalls,
        streams: Streams,
        settings: GatewaySettings,
        metrics: Metrics,
        breaker: Breaker,
    ) -> None:
        self._bus = bus
        self._breaker = breaker
        self._calls = calls
        self._streams = streams
        self._settings = settings
        self._metrics = metrics
        streams.on_lost = self.recover

    async def launch(self, stream: Stream, placed: Placed) -> None:
        """Return when a worker has accepted the stream. Raises when none will have it."""
        stream.is_driven = True
        try:
            await self._drive(stream, placed)
        finally:
            stream.is_driven = False

    def launch_soon(self, stream: Stream, placed: Placed) -> None:
        """The same in the background; what `launch` would raise fails the stream's inbox."""
        self._start(stream, lambda: self._drive(stream, placed))

    def recover(self, stream: Stream) -> None:
        """Find another worker for a stream that was lost, in the background."""
        self._leave_worker(stream)
        if stream.acceptance is not None and not stream.acceptance.expired():
            stream.acceptance.reschedule(0.0)
        if not stream.is_driven:
            self._start(stream, lambda: self._recover(stream))

    def _start(self, stream: Stream, work: _Work) -> None:
        stream.is_driven = True
        stream.driver = asyncio.create_task(self._run(stream, work))
        stream.driver.add_done_callback(partial(_fail_if_crashed, stream))

    async def _run(self, stream: Stream, work: _Work) -> None:
        try:
            await work()
        except TokenMeshError as error:
            stream.inbox.fail(error)
        finally:
            stream.is_driven = False

    def _leave_worker(self, stream: Stream) -> None:
        stream.avoid_worker()
        session = stream.session
        if session.worker_id is not None:
            self._breaker.fail(session.worker_id, session.lost_kind)

    async def _recover(self, stream: Stream) -> None:
        session = stream.session
        reason = session.lost_because
        attributes: dict[str, str | int] = {
            REQUEST_ID: stream.generate.request_id,
            "tokenmesh.reason": reason,
            "tokenmesh.worker": str(session.worker_id),
            "tokenmesh.delivered": len(session.token_ids),
        }
        self._metrics.counter("recoveries", reason=session.lost_kind).inc()
        logger.info("stream %d of %s: %s", stream.number, stream.generate.request_id, reason)
        with span("recover", attributes, parent=stream.traceparent):
            await self._pause_if_fruitless(stream)
            await self._drive(stream, None)

    async def _pause_if_fruitless(self, stream: Stream) -> None:
        """A request that breaks every worker must not go through all of them, nor in a hurry."""
        num, reason = stream.session.num_fruitless, stream.session.lost_because
        if num >= self._settings.fruitless_attempts:
            raise Unavailable(f"{num} workers in a row have lost the stream, the last: {reason}")
        if num > 1:
            await asyncio.sleep(self._pause_s(num))

    def _pause_s(self, failures: int) -> float:
        """None after the first failure, then more and more."""
        return self._settings.retry_pause_s * (2.0 ** (failures - 1) - 1.0)

    async def _drive(self, stream: Stream, placed: Placed | None) -> None:
        session = stream.session
        failures = 0
        while session.state is not SessionState.ENDED:
            if len(session.token_ids) >= stream.generate.sampling.max_tokens:
                # Only the word that it is the end was lost.
                session.end()
                stream.inbox.put(stream.choice, Output(finish="length"))
                return
            try:
                if placed is None:
                    await self._renew_media(stream)
                    placed = await self._place(stream)
                await self._give(stream, placed)
            except (Unavailable, DeadlineExceeded) as error:
                failures += 1
                await self._pause_or_raise(stream, error, failures)
            if session.state is SessionState.RUNNING:
                return
            placed = None

    async def _renew_media(self, stream: Stream) -> None:
        """What an encoder has made may be gone or spoiled by now; it knows, and makes it again."""
        generate = stream.generate
        images = [item for item in generate.media if item.kind == IMAGE]
        if not images:
            return
        try:
            answer = await self._calls.ask(
                encode(generate.model),
                Encode(request_id=generate.request_id, model=generate.model, items=images),
                Encoded,
                timeout_s=self._settings.encode_timeout_s,
                deadline_s=min(stream.deadline_s, now_s() + self._settings.encode_timeout_s),
                patience_s=self._settings.second_encode_s,
            )
        except TokenMeshError as error:
            # A worker may still have them in its cache.
            logger.info("media of %s are not renewed: %s", generate.request_id, error.message)
            return
        others = [item for item in generate.media if item.kind != IMAGE]
        stream.generate = msgspec.structs.replace(generate, media=[*answer.items, *others])

    async def _place(self, stream: Stream) -> Placed:
        session = stream.session
        place = msgspec.structs.replace(
            stream.place,
            num_tokens=stream.place.num_tokens + len(session.token_ids),
            num_streams=1,
            attempt=session.attempt,
            exclude=list(stream.failed),
            reservation=stream.reservation,
        )
        with span("place", {REQUEST_ID: stream.generate.request_id}) as current:
            placed = await self._calls.place(place, stream.deadline_s)
            trace_placement(current, placed)
        return placed

    async def _give(self, stream: Stream, placed: Placed) -> None:
        """Tell the worker; what it says or does not say ends in the session's state."""
        session = stream.session
        self._streams.start(stream, placed.worker_id, placed.epoch)
        stream.reservation = placed.reservation
        attempt, num_delivered = session.attempt, len(session.token_ids)
        generate = msgspec.structs.replace(
            stream.generate,
            epoch=placed.epoch,
            attempt=attempt,
            output_ids=pack_ids(session.token_ids),
            reservation=placed.reservation,
        )
        asked_s = monotonic_s()
        limit_s = min(stream.deadline_s, now_s() + self._settings.accept_timeout_s)
        try:
            _check_accepted(await self._ask(stream, placed.worker_id, generate, limit_s))
            self._streams.heard(placed.worker_id, asked_s)
            if session.state is SessionState.PLACING:
                raise Unavailable(f"accepted and lost: {session.lost_because}")
        except TokenMeshError as error:
            if not error.retryable:
                raise
            is_at_work = (
                session.state is SessionState.ENDED or len(session.token_ids) > num_delivered
            )
            if session.attempt == attempt and not is_at_work:
                kind = "refused" if isinstance(error, Overloaded | Draining) else "not accepted"
                self._streams.lose(stream, kind, error.message)
                self._leave_worker(stream)
            if session.state is SessionState.PLACING:
                raise

    async def _ask(
        self, stream: Stream, worker_id: WorkerId, generate: Generate, limit_s: float
    ) -> Message:
        """The worker's answer. Raises Unavailable as soon as the stream is taken from it."""
        subject = worker_generate(worker_id)
        try:
            async with asyncio.timeout(None) as stream.acceptance:
                return await self._bus.request(subject, generate, deadline_s=limit_s)
        except TimeoutError:
            raise Unavailable(stream.session.lost_because) from None
        finally:
            stream.acceptance = None

    async def _pause_or_raise(self, stream: Stream, error: TokenMeshError, failures: int) -> None:
        """A stream that has begun is worth more patience than one that can still be refused."""
        is_refused = isinstance(error, Overloaded) and not stream.session.token_ids
        if failures >= self._settings.stream_attempts or (is_refused and failures > 1):
            raise error
        pause_s = self._pause_s(failures)
        if now_s() + pause_s >= stream.deadline_s:
            raise error
        await asyncio.sleep(pause_s)


def _fail_if_crashed(stream: Stream, driver: "asyncio.Task[None]") -> None:
    """A defect of ours must not leave a client waiting."""
    if not driver.cancelled() and (error := driver.exception()) is not None:
        logger.error("the driver of stream %d crashed", stream.number, exc_info=error)
        stream.inbox.fail(TokenMeshError("internal error"))


def _check_accepted(answer: object) -> None:
    if isinstance(answer, Refused):
        raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
    if not isinstance(answer, Accepted):
        raise ProtocolError(f"the answer to Generate is {type(answer).__name__}")
