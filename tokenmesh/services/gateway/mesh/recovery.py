"""StreamRecovery: pings silent workers, asks for lost tokens, takes streams from the dead.

`LivenessTracker` and `Session` decide, this does the I/O.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from math import inf

from tokenmesh.services.gateway.mesh.hedging import first_outcome
from tokenmesh.services.gateway.mesh.launcher import Launcher
from tokenmesh.services.gateway.mesh.liveness import LivenessTracker
from tokenmesh.services.gateway.mesh.session import SessionState
from tokenmesh.services.gateway.mesh.streams import Stream, Streams
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import BusLost, DeadlineExceeded, NoResponders, TokenMeshError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Ping, Resend, StreamUnknown
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import worker_control

logger = logging.getLogger(__name__)

_MAX_LAG = 20
"""Intervals by which it may be late before silence is taken for this process's own fault."""
_LAG_FADING = 0.9975
"""A lag is remembered for some seconds: about a third is left after four hundred intervals."""
_IDLE_S = 0.25
"""Between two looks at the bus while no worker has a stream."""
_TIMER_S = 0.001
"""By which a timer may be early; the look would be in vain."""
_STREAM_INTERVALS = 4
"""Between two looks at the streams at least: there are far more of them, and less hurry."""


class StreamRecovery:
    """Looks at workers when the silence of one may be too long, and at all streams now and then.

    While no worker has a stream there is little to look at, and each look in vain takes a core from
    whoever computes.

    `count_losses` says how often the bus connection was lost so far, `last_beat_s` when a worker
    last published its beat (monotonic).
    """

    def __init__(
        self,
        bus: Bus,
        streams: Streams,
        launcher: Launcher,
        settings: GatewaySettings,
        metrics: Metrics,
        *,
        count_losses: Callable[[], int] = lambda: 0,
        last_beat_s: Callable[[WorkerId], float] = lambda _worker: -inf,
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._launcher = launcher
        self._settings = settings
        self._resends = metrics.counter("resends")
        self._count_losses = count_losses
        self._last_beat_s = last_beat_s
        self._num_losses = 0
        self._lag_s = 0.0
        self._looked_s = 0.0
        self._grace_until_s = 0.0
        self._questions: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Look for ever."""
        looked_at_streams_s = -inf
        while True:
            await self._until_needed()
            now = await self._sleep()
            self._look_at_workers(now)
            if now - looked_at_streams_s >= _STREAM_INTERVALS * self._settings.watch_interval_s:
                looked_at_streams_s = now
                self._look_at_streams(now)

    async def _until_needed(self) -> None:
        """Until a worker has a stream. What the bus lost long before excuses nobody then."""
        while not self._streams.has_workers.is_set():
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._streams.has_workers.wait()
            except TimeoutError:
                self._note_losses(monotonic_s())

    async def _sleep(self) -> float:
        """Until a worker's silence may be too long, at most as long as any may last; the time then.

        What a worker says meanwhile wakes nobody: its next silence is found at the end.
        """
        interval_s = self._settings.watch_interval_s
        began_s = monotonic_s()
        pause_s = max(interval_s, self._due_s(began_s) - began_s + _TIMER_S)
        await asyncio.sleep(pause_s)
        now = monotonic_s()
        lag_s = now - began_s - pause_s
        self._lag_s = max(lag_s, self._lag_s * _LAG_FADING ** ((now - self._looked_s) / interval_s))
        self._looked_s = now
        if lag_s > _MAX_LAG * interval_s:
            self._excuse_all(now)
        return now

    def _due_s(self, now: float) -> float:
        """When the next look is worth it. A worker with a ping open may be due soon again."""
        settings = self._settings
        due_s = now + settings.silence_max_s
        for pulse in self._streams.pulses.values():
            due_s = min(due_s, now + settings.silence_s if pulse.is_pinged else pulse.due_s)
        return due_s

    def _look_at_workers(self, now: float) -> None:
        self._note_losses(now)
        for worker_id, pulse in self._streams.pulses.items():
            if pulse.wants_ping(now):
                self._start(self._ping(worker_id, pulse))

    def _look_at_streams(self, now: float) -> None:
        for stream in self._streams.all():
            if stream.session.wants_resend(now):
                self._start(self._ask_resend(stream))
        self._streams.forget_idle_workers()

    def _start(self, question: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(question)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _ping(self, worker_id: WorkerId, pulse: LivenessTracker) -> None:
        started_s = monotonic_s()
        # Asked at the same time: a NATS that wakes just before the ping's deadline answers then.
        patience_s = pulse.patience_s(self._lag_s)
        did_bus_answer = self._probe_bus(patience_s)
        try:
            limit_s = now_s() + patience_s
            await first_outcome(
                lambda: self._bus.request(worker_control(worker_id), Ping(), deadline_s=limit_s),
                patience_s=self._settings.ping_again_s,
            )
        except (NoResponders, DeadlineExceeded) as error:
            is_gone = isinstance(error, NoResponders)
            is_silent_bus = not is_gone and not (
                await did_bus_answer and await self._probe_bus(patience_s)
            )
            beat_s = self._last_beat_s(worker_id)
            if not is_gone and (pulse.has_been_heard(started_s) or beat_s > started_s):
                pulse.excuse(beat_s)
            elif is_silent_bus or self._is_bus_to_blame():
                pulse.excuse(monotonic_s())
            else:
                self._bury(worker_id, "worker gone" if is_gone else "worker hung")
        except TokenMeshError as error:
            logger.warning("cannot ping %s: %s", worker_id, error)
            now = monotonic_s()
            pulse.excuse(now)
            if isinstance(error, BusLost):
                # Workers may be back later than this process.
                self._grace_until_s = now + self._settings.bus_grace_s
        else:
            now = monotonic_s()
            pulse.answered(now, now - started_s)

    async def _ask_resend(self, stream: Stream) -> None:
        session = stream.session
        worker_id, attempt = session.worker_id, session.attempt
        assert worker_id is not None
        resend = Resend(
            gateway=stream.generate.gateway,
            stream=stream.number,
            attempt=attempt,
            offset=len(session.token_ids),
        )
        self._resends.inc()
        limit_s = now_s() + self._settings.ping_timeout_max_s
        try:
            answer = await self._bus.request(worker_control(worker_id), resend, deadline_s=limit_s)
        except TokenMeshError as error:
            # Whether the worker lives is the pings' business.
            logger.info("no answer to a Resend from %s: %s", worker_id, error)
            return
        if isinstance(answer, StreamUnknown):
            # The end of the stream may still be on its way on the other subscription.
            await asyncio.sleep(self._settings.retry_pause_s)
            if session.attempt == attempt and session.state is SessionState.RUNNING:
                self._lose(stream, "stream unknown", f"{worker_id} does not know the stream")

    def _bury(self, worker_id: WorkerId, kind: str) -> None:
        streams = self._streams.on(worker_id)
        self._streams.pulses.pop(worker_id, None)
        if streams:
            logger.warning("%s: %s, %d streams move", worker_id, kind, len(streams))
        for stream in streams:
            self._lose(stream, kind, f"{kind}: {worker_id}")

    def _lose(self, stream: Stream, kind: str, reason: str) -> None:
        self._streams.lose(stream, kind, reason)
        self._launcher.recover(stream)

    def _probe_bus(self, patience_s: float) -> asyncio.Future[bool]:
        """Whether NATS itself answers, and soon; one question for all who want to know.

        A server that stands still makes every worker look hung. A worker has `patience_s` to answer
        a ping: half of it must be left when NATS has answered.
        """
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe(patience_s / 2))
        return asyncio.shield(self._probing)

    async def _probe(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._bus.flush()
        except (TimeoutError, TokenMeshError):
            return False
        return True

    def _is_bus_to_blame(self) -> bool:
        now = monotonic_s()
        self._note_losses(now)
        return now < self._grace_until_s

    def _note_losses(self, now: float) -> None:
        losses = self._count_losses()
        if losses != self._num_losses:
            self._num_losses = losses
            self._grace_until_s = now + self._settings.bus_grace_s

    def _excuse_all(self, now: float) -> None:
        for pulse in self._streams.pulses.values():
            pulse.excuse(now)
