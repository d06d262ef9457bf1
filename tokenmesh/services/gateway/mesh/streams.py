"""Streams: every stream of this gateway by its number, and the way of Tokens to them.

This is the hot path: one call a message, no await, no task a token.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.mesh.cancels import Cancels
from tokenmesh.services.gateway.mesh.liveness import LivenessTracker
from tokenmesh.services.gateway.mesh.session import Session, SessionState
from tokenmesh.services.gateway.mesh.watch_times import WatchTimes
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Overloaded, ProtocolError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Generate, Place, Tokens
from tokenmesh.shared.messages.tokens import Delta


@dataclass(slots=True, eq=False)
class Stream:
    """A session and all that is needed to give it to a worker, again if need be."""

    session: Session
    inbox: Inbox
    choice: int
    """Which choice of the response it is."""
    place: Place
    """What to ask a scheduler; the launcher fills in what changes with each attempt."""
    generate: Generate
    """What to tell a worker; `epoch`, `attempt` and `output_ids` change with each attempt."""
    deadline_s: float
    traceparent: str | None = None
    failed: list[WorkerId] = field(default_factory=list)
    """Workers that this stream has seen fail, the last one first."""
    reservation: str = ""
    """What its last placement reserved."""
    is_driven: bool = False
    """Whether somebody is getting it onto a worker now."""
    driver: "asyncio.Task[None] | None" = None
    """Who does that in the background."""
    acceptance: asyncio.Timeout | None = None
    """Of the wait for a worker's acceptance; ends early when the worker turns out to be gone."""

    @property
    def number(self) -> int:
        """The stream's number within this gateway."""
        return self.generate.stream

    def avoid_worker(self) -> None:
        """Let the next placement leave out the last worker."""
        worker_id = self.session.worker_id
        if worker_id is not None:
            self.failed = list(dict.fromkeys((worker_id, *self.failed)))


class Streams:
    """The open streams. `on_lost` is told of each whose worker broke it off.

    `on_done` is told of each worker that has brought a stream to its end.
    """

    def __init__(
        self,
        times: WatchTimes,
        cancels: Cancels,
        *,
        max_streams: int,
        max_told: int,
    ) -> None:
        self._times = times
        self._cancels = cancels
        self._max_streams = max_streams
        self._max_told = max_told
        self._numbers = count(1)
        self._stream_by_number: dict[int, Stream] = {}
        self._told: OrderedDict[tuple[WorkerId, int], float] = OrderedDict()
        """When a worker was last told to stop a stream."""
        self.pulses: dict[WorkerId, LivenessTracker] = {}
        """Of the workers that have a stream now."""
        self.has_workers = asyncio.Event()
        """Set while there are any."""
        self.on_lost: Callable[[Stream], None] = _ignore
        self.on_done: Callable[[WorkerId], None] = _ignore

    def __len__(self) -> int:
        return len(self._stream_by_number)

    def all(self) -> Iterable[Stream]:
        """Every open stream."""
        return tuple(self._stream_by_number.values())

    def on(self, worker_id: WorkerId) -> list[Stream]:
        """The streams that a worker runs."""
        return [each for each in self._stream_by_number.values() if _runs_on(each, worker_id)]

    def next_number(self) -> int:
        """A number that no stream of this process has had."""
        return next(self._numbers)

    def new_session(self) -> Session:
        """A session with this gateway's times. Raises Overloaded at the limit of streams."""
        if len(self._stream_by_number) >= self._max_streams:
            raise Overloaded(f"{self._max_streams} streams are already open here", retry_after_s=1)
        return Session(self._times)

    def open(self, stream: Stream) -> None:
        """Let tokens reach the stream."""
        self._stream_by_number[stream.number] = stream

    def start(self, stream: Stream, worker_id: WorkerId, epoch: int) -> None:
        """A worker is about to be told to run the stream's current attempt."""
        now = monotonic_s()
        stream.session.start(worker_id, epoch, now)
        if worker_id not in self.pulses:
            self.pulses[worker_id] = LivenessTracker(self._times, now)
            self.has_workers.set()

    def heard(self, worker_id: WorkerId, asked_s: float) -> None:
        """A worker has answered a question put at `asked_s`."""
        pulse = self.pulses.get(worker_id)
        if pulse is not None:
            now = monotonic_s()
            pulse.answered(now, now - asked_s)

    def lose(self, stream: Stream, kind: str, reason: str) -> None:
        """Take a stream from its worker, which is told in case that it still lives."""
        self._cancel(stream)
        stream.session.lose(kind, reason)

    def close(self, stream: Stream) -> None:
        """Forget a stream; a worker that still runs it is told to stop."""
        if self._stream_by_number.pop(stream.number, None) is None:
            return
        if stream.session.state is SessionState.RUNNING:
            self._cancel(stream)
        stream.session.end()
        if stream.driver is not None:
            stream.driver.cancel()

    def forget_idle_workers(self) -> None:
        """Drop the pulses of workers without a stream."""
        busy = {each.session.worker_id for each in self._stream_by_number.values()}
        for worker_id in tuple(self.pulses):
            if worker_id not in busy:
                del self.pulses[worker_id]
        if not self.pulses:
            self.has_workers.clear()

    async def receive(self, envelope: Envelope) -> None:
        """Hand a Tokens message to the streams it is for. Raises ProtocolError for any other."""
        message = envelope.message
        if not isinstance(message, Tokens):
            raise ProtocolError(f"a {type(message).__name__} instead of tokens")
        now = monotonic_s()
        pulse = self.pulses.get(message.worker_id)
        if pulse is not None:
            pulse.hear(now)
        for delta in message.deltas:
            stream = self._stream_by_number.get(delta.stream)
            if stream is None:
                self._cancel_stray(message.worker_id, delta, now)
                continue
            attempt = stream.session.attempt
            output = stream.session.take(delta, now)
            if output is not None:
                stream.inbox.put(stream.choice, output)
                if output.finish is not None and output.error is None:
                    self.on_done(message.worker_id)
            elif stream.session.attempt != attempt:
                self.on_lost(stream)

    def _cancel(self, stream: Stream) -> None:
        session = stream.session
        if session.worker_id is not None:
            self._tell(session.worker_id, stream.number, session.attempt, monotonic_s())

    def _cancel_stray(self, worker_id: WorkerId, delta: Delta, now: float) -> None:
        """Tokens for a stream that is gone: the Cancel was lost, or crossed them on its way."""
        told_s = self._told.get((worker_id, delta.stream), -inf)
        if delta.finish is None and now - told_s >= self._times.stall_s:
            self._tell(worker_id, delta.stream, delta.attempt, now)

    def _tell(self, worker_id: WorkerId, number: int, attempt: int, now: float) -> None:
        self._cancels.put(worker_id, number, attempt)
        self._told[worker_id, number] = now
        self._told.move_to_end((worker_id, number))
        if len(self._told) > self._max_told:
            self._told.popitem(last=False)


def _ignore(_what: object) -> None:
    """Until somebody wants to know."""


def _runs_on(stream: Stream, worker_id: WorkerId) -> bool:
    return stream.session.state is SessionState.RUNNING and stream.session.worker_id == worker_id
