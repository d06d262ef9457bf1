"""StreamRecovery: pings silent workers, requests lost tokens again, migrates streams of dead ones.

`LivenessTracker` and `Session` decide when; this does the I/O. `Launcher.recover` migrates one.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from math import inf
from typing import Final

from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.services.gateway.core.mesh.liveness import LivenessTracker
from tokenmesh.services.gateway.core.mesh.retries import repeated_request
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.services.gateway.core.mesh.streams import Stream, Streams
from tokenmesh.shared.bus.base import Bus, Envelope
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    BusLost,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Message, Ping, Resend, StreamUnknown, Tokens
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.recent_most import RecentMost
from tokenmesh.shared.subjects import worker_control

logger = logging.getLogger(__name__)

PING_AGAIN_S: Final = 0.015
"""After so long without an answer a worker is pinged once more meanwhile: one that has died with
the first ping unanswered is found at once."""

_MAX_LAG = 20
"""Intervals of delay after which silence counts as this process's own fault."""
_LATE_S = 1.0
"""A worker that answers within it was slow, not hung: the next time it has longer."""
_IDLE_S = 0.25
"""Interval of checking the bus while no worker runs a stream."""
_TIMER_S = 0.001
"""It says how early a timer may fire; a check would find nothing then."""
_STREAM_INTERVALS = 4
"""Intervals between checks of the streams: there are many of them, and it is less urgent."""


class StreamRecovery:
    """Checks a worker when its silence may be too long, and all streams from time to time.

    While no worker runs a stream it hardly wakes up: a useless check takes CPU time from others.
    """

    def __init__(
        self,
        gateway: GatewayId,
        bus: Bus,
        streams: Streams,
        launcher: Launcher,
        settings: GatewaySettings,
        metrics: Metrics,
        *,
        count_losses: Callable[[], int] = lambda: 0,
        last_beat_s: Callable[[WorkerId], float] = lambda _worker: -inf,
    ) -> None:
        """`count_losses`: how often the bus connection was lost so far.

        `last_beat_s`: when a worker's last heartbeat arrived (monotonic).
        """
        self._gateway = gateway
        self._bus = bus
        self._streams = streams
        self._launcher = launcher
        self._settings = settings
        self._resends = metrics.counter("resends")
        self._count_losses = count_losses
        self._last_beat_s = last_beat_s
        self._num_losses = 0
        self._lag = RecentMost()
        self._grace_until_s = 0.0
        self._requests: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[bool] | None = None

    async def receive(self, envelope: Envelope) -> None:
        """Handle a Tokens message. Raises ProtocolError for any other."""
        message = envelope.message
        if not isinstance(message, Tokens):
            raise ProtocolError(f"expected Tokens, got {type(message).__name__}")
        for stream in self._streams.take(message):
            self._launcher.recover(stream)

    async def run(self) -> None:
        """Check workers and streams until cancelled."""
        checked_streams_s = -inf
        while True:
            await self._wait_for_workers()
            now = await self._sleep()
            self._check_workers(now)
            if now - checked_streams_s >= _STREAM_INTERVALS * self._settings.watch_interval_s:
                checked_streams_s = now
                self._check_streams(now)

    async def _wait_for_workers(self) -> None:
        """Until a worker runs a stream. Losses of the bus are counted meanwhile, so that an old one
        does not extend the grace period."""
        while not self._streams.has_workers.is_set():
            began_s = monotonic_s()
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._streams.has_workers.wait()
            except TimeoutError:
                now = monotonic_s()
                self._lag.note(now, now - began_s - _IDLE_S)
                self._note_losses(now)

    async def _sleep(self) -> float:
        """Sleep until a worker's silence may be too long; returns the time then.

        Tokens that arrive meanwhile do not end the sleep: the next silence is found after it.
        """
        interval_s = self._settings.watch_interval_s
        began_s = monotonic_s()
        pause_s = max(interval_s, self._due_s(began_s) - began_s + _TIMER_S)
        await asyncio.sleep(pause_s)
        now = monotonic_s()
        lag_s = now - began_s - pause_s
        self._lag.note(now, lag_s)
        if lag_s > _MAX_LAG * interval_s:
            for tracker in self._streams.trackers.values():
                tracker.reset_silence(now)
        return now

    def _due_s(self, now: float) -> float:
        """When the next check is useful. A worker with an open ping may be due again soon."""
        settings = self._settings
        due_s = now + settings.silence_max_s
        for tracker in self._streams.trackers.values():
            due_s = min(due_s, now + settings.silence_s if tracker.is_pinged else tracker.due_s)
        return due_s

    def _check_workers(self, now: float) -> None:
        self._note_losses(now)
        for worker_id, tracker in self._streams.trackers.items():
            if tracker.needs_ping(now):
                self._start(self._ping(worker_id, tracker))

    def _check_streams(self, now: float) -> None:
        for stream in self._streams.all():
            if stream.session.needs_resend(now):
                self._start(self._request_resend(stream))
        self._streams.forget_idle_workers()

    def _start(self, request: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _ping(self, worker_id: WorkerId, tracker: LivenessTracker) -> None:
        started_s = monotonic_s()
        # Probed at the same time: NATS may hang now and answer just before the ping's deadline.
        bus_answered = self._probe_bus(self._patience_s(tracker))
        limit_s = now_s() + self._settings.ping_timeout_max_s
        asking = asyncio.create_task(
            repeated_request(
                lambda: self._bus.request(worker_control(worker_id), Ping(), deadline_s=limit_s),
                repeat_after_s=PING_AGAIN_S,
            )
        )
        try:
            if timeout_s := await self._wait(asking, tracker, started_s):
                await self._judge(worker_id, tracker, started_s, timeout_s, bus_answered)
                await asyncio.wait((asking,), timeout=started_s + _LATE_S - monotonic_s())
                if asking.done() and asking.exception() is None:
                    tracker.answers.note(now := monotonic_s(), now - started_s)
            else:
                asking.result()
                now = monotonic_s()
                tracker.on_answer(now, now - started_s)
        except NoResponders:
            if self._is_in_grace():
                tracker.reset_silence(monotonic_s())
            else:
                self._mark_dead(worker_id, "worker gone", "it does not listen any more")
        except DeadlineExceeded:
            timeout_s = monotonic_s() - started_s
            await self._judge(worker_id, tracker, started_s, timeout_s, bus_answered)
        except TokenMeshError as error:
            logger.warning("cannot ping %s: %s", worker_id, error)
            now = monotonic_s()
            tracker.reset_silence(now)
            if isinstance(error, BusLost):
                # Workers may reconnect later than this process.
                self._grace_until_s = now + self._settings.bus_grace_s
        finally:
            if not asking.cancel() and not asking.cancelled():
                asking.exception()

    def _patience_s(self, tracker: LivenessTracker) -> float:
        now = monotonic_s()
        return tracker.ping_timeout_s(now, self._lag.at(now))

    async def _wait(
        self, asking: asyncio.Task[Message], tracker: LivenessTracker, started_s: float
    ) -> float:
        """Wait for the answer to a ping; 0, or after how long without one it is overdue.

        A machine that has become slow meanwhile leaves it more time.
        """
        timeout_s = 0.0
        while not asking.done() and timeout_s < (patience_s := self._patience_s(tracker)):
            timeout_s = patience_s
            await asyncio.wait((asking,), timeout=started_s + timeout_s - monotonic_s())
        return 0.0 if asking.done() else timeout_s

    async def _judge(
        self,
        worker_id: WorkerId,
        tracker: LivenessTracker,
        started_s: float,
        timeout_s: float,
        bus_answered: asyncio.Future[bool],
    ) -> None:
        """A ping was not answered: the worker hangs, unless something else explains it."""
        did_bus_answer = await bus_answered and await self._probe_bus(timeout_s)
        beat_s = self._last_beat_s(worker_id)
        if tracker.was_heard_after(started_s) or beat_s > started_s:
            tracker.reset_silence(beat_s)
        elif not did_bus_answer or self._is_in_grace():
            tracker.reset_silence(monotonic_s())
        else:
            self._mark_dead(worker_id, "worker hung", f"no response for {timeout_s:.2f} s")

    async def _request_resend(self, stream: Stream) -> None:
        session = stream.session
        worker_id, attempt = session.worker_id, session.attempt
        assert worker_id is not None
        resend = Resend(
            gateway=self._gateway,
            stream=stream.number,
            attempt=attempt,
            offset=len(session.token_ids),
        )
        self._resends.inc()
        limit_s = now_s() + self._settings.ping_timeout_max_s
        try:
            answer = await self._bus.request(worker_control(worker_id), resend, deadline_s=limit_s)
        except TokenMeshError as error:
            # Whether the worker is alive is found by pings.
            logger.info("no answer to a Resend from %s: %s", worker_id, error)
            return
        if isinstance(answer, StreamUnknown):
            # The end of the stream may still be on its way on the other subscription.
            await asyncio.sleep(self._settings.retry_pause_s)
            if session.attempt == attempt and session.state is SessionState.RUNNING:
                self._migrate(stream, "stream unknown", f"{worker_id} does not know the stream")

    def _mark_dead(self, worker_id: WorkerId, kind: str, reason: str) -> None:
        """`kind`: a label of the metric `recoveries`."""
        streams = self._streams.on(worker_id)
        self._streams.trackers.pop(worker_id, None)
        self._streams.end_calls(worker_id, reason)
        if streams:
            logger.warning(
                "worker %s declared dead (%s); migrating %d streams",
                worker_id,
                reason,
                len(streams),
            )
        for stream in streams:
            self._migrate(stream, kind, f"{kind}: {worker_id}")

    def _migrate(self, stream: Stream, kind: str, reason: str) -> None:
        self._streams.lose(stream, kind, reason)
        self._launcher.recover(stream)

    def _probe_bus(self, timeout_s: float) -> asyncio.Future[bool]:
        """Return whether NATS answers, within half of a ping's timeout; all pings share one probe.

        A server that hangs makes every worker look hung. The other half is left for the worker.
        """
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(timeout_s / 2))
        return asyncio.shield(self._probing)

    async def _probe(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._bus.flush()
        except (TimeoutError, TokenMeshError):
            return False
        return True

    def _is_in_grace(self) -> bool:
        """Return whether the bus was lost recently, so that missing answers do not prove
        anything.
        """
        now = monotonic_s()
        self._note_losses(now)
        return now < self._grace_until_s

    def _note_losses(self, now: float) -> None:
        losses = self._count_losses()
        if losses != self._num_losses:
            self._num_losses = losses
            self._grace_until_s = now + self._settings.bus_grace_s
