"""Streams: every open stream of this gateway by its number.

`take` is the hot path: one call for each Tokens message, without await and without a task.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Final

from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.cancels import Cancels
from tokenmesh.services.gateway.core.mesh.liveness import Breaker, LivenessTracker
from tokenmesh.services.gateway.core.mesh.session import Session, SessionState
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.calls import LivenessSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Tokens
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.recent_most import RecentMost

logger = logging.getLogger(__name__)

MAX_CANCELS_KNOWN: Final = 4096
"""Cancelled streams remembered, to cancel each only once."""
MAX_STREAMS: Final = 16384
"""Streams of one gateway at a time."""
MAX_CANCEL_QUEUE: Final = 65536
"""Cancel commands that wait to be sent."""


@dataclass(slots=True, eq=False)
class Stream:
    """A session with all that is needed to start it on a worker, again if necessary."""

    number: int
    """Unique within this gateway process."""
    session: Session
    inbox: Inbox
    choice: int
    """Index of its choice in the response."""
    job: PromptJob
    prompt: Prompt
    sampling: SamplingParams
    traceparent: str | None = None
    failed: list[WorkerId] = field(default_factory=list)
    """Workers that have lost this stream, the last one first."""
    reservation: str = ""
    """The reservation of its last placement."""
    kv: KvOrigin | None = None
    """Where its worker gets KV, by the same."""
    is_driven: bool = False
    """It tells whether the launcher is placing it now."""
    driver: "asyncio.Task[None] | None" = None
    """The task that does so in the background."""
    acceptance: asyncio.Timeout | None = None
    """Bounds the wait for a worker's acceptance; expires early if the worker is declared dead."""


class Streams:
    """The open streams, and the liveness of the workers that run them."""

    def __init__(
        self, gateway: GatewayId, bus: Bus, settings: LivenessSettings, breaker: Breaker
    ) -> None:
        """`breaker` is notified of each stream that a worker completes or loses."""
        self.cancels = Cancels(bus, gateway, MAX_CANCEL_QUEUE)
        self._settings = settings
        self._breaker = breaker
        self._numbers = count(1)
        self._stream_by_number: dict[int, Stream] = {}
        self._cancelled_s: OrderedDict[tuple[WorkerId, int], float] = OrderedDict()
        """When a stream was last cancelled on a worker."""
        self._calls: dict[WorkerId, set[asyncio.Future[str]]] = {}
        """Open calls of workers; each gets the reason when its worker is declared dead."""
        self._answers: OrderedDict[WorkerId, RecentMost] = OrderedDict()
        """Times of answers, also of workers that are idle; the oldest go first."""
        self.trackers: dict[WorkerId, LivenessTracker] = {}
        """These are the trackers of workers that run a stream or an open call."""
        self.has_workers = asyncio.Event()
        """Set while `trackers` is not empty."""

    def __len__(self) -> int:
        return len(self._stream_by_number)

    def all(self) -> Iterable[Stream]:
        return tuple(self._stream_by_number.values())

    def on(self, worker_id: WorkerId) -> list[Stream]:
        """The streams that a worker runs."""
        return [each for each in self._stream_by_number.values() if _runs_on(each, worker_id)]

    def next_number(self) -> int:
        """A number that this process has not used before."""
        return next(self._numbers)

    def new_session(self) -> Session:
        """Raises Overloaded at the limit of open streams."""
        limit = MAX_STREAMS
        if len(self._stream_by_number) >= limit:
            raise Overloaded(f"{limit} streams are already open here", retry_after_s=1)
        return Session(self._settings)

    def open(self, stream: Stream) -> None:
        """Accept tokens for the stream."""
        self._stream_by_number[stream.number] = stream

    def start(self, stream: Stream, worker_id: WorkerId, epoch: int) -> None:
        """The stream's current attempt is about to be sent to a worker."""
        now = monotonic_s()
        stream.session.start(worker_id, epoch, now)
        self._watch(worker_id, now)

    def _watch(self, worker_id: WorkerId, now: float) -> None:
        if worker_id not in self.trackers:
            answers = self._answers.get(worker_id)
            if answers is None:
                answers = self._answers[worker_id] = RecentMost()
                answers.note(now, self._settings.first_answer_s)
            self._answers.move_to_end(worker_id)
            if len(self._answers) > self._settings.breaker_workers:
                self._answers.popitem(last=False)
            self.trackers[worker_id] = LivenessTracker(self._settings, now, answers)
            self.has_workers.set()

    @contextmanager
    def calling(self, worker_id: WorkerId) -> Iterator[asyncio.Future[str]]:
        """Watch a worker during a call that is answered when its work is done.

        The future gets the reason if the worker is declared dead within the block.
        """
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls.setdefault(worker_id, set()).add(lost)
        self._watch(worker_id, monotonic_s())
        try:
            yield lost
        finally:
            calls = self._calls[worker_id]
            calls.discard(lost)
            if not calls:
                del self._calls[worker_id]

    def end_calls(self, worker_id: WorkerId, reason: str) -> None:
        """A worker is dead: report it to its open calls."""
        for lost in self._calls.get(worker_id, ()):
            if not lost.done():
                lost.set_result(reason)

    def on_answer(self, worker_id: WorkerId, sent_s: float) -> None:
        """A worker has answered a request that was sent at `sent_s`."""
        tracker = self.trackers.get(worker_id)
        if tracker is not None:
            now = monotonic_s()
            tracker.on_answer(now, now - sent_s)

    def lose(self, stream: Stream, kind: str, reason: str) -> None:
        """Take a stream from its worker; a Cancel is sent in case the worker still runs it."""
        self._cancel(stream)
        stream.session.lose(kind, reason)
        self._avoid_worker(stream)

    def close(self, stream: Stream) -> None:
        """Forget a stream, and cancel it on the worker that still runs it."""
        if self._stream_by_number.pop(stream.number, None) is None:
            return
        if stream.session.state is SessionState.RUNNING:
            self._cancel(stream)
        stream.session.end()
        if stream.driver is not None:
            stream.driver.cancel()

    def forget_idle_workers(self) -> None:
        """Drop the trackers of workers without a stream or call."""
        busy = {each.session.worker_id for each in self._stream_by_number.values()}
        busy.update(self._calls)
        for worker_id in tuple(self.trackers):
            if worker_id not in busy:
                del self.trackers[worker_id]
        if not self.trackers:
            self.has_workers.clear()

    def take(self, message: Tokens) -> list[Stream]:
        """Put tokens into the inboxes of their streams. Returns streams that the worker aborted."""
        now = monotonic_s()
        tracker = self.trackers.get(message.worker_id)
        if tracker is not None:
            tracker.on_tokens(now)
        lost: list[Stream] = []
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
                    self._breaker.succeed(message.worker_id)
            elif stream.session.attempt != attempt:
                self._avoid_worker(stream)
                lost.append(stream)
        return lost

    def _avoid_worker(self, stream: Stream) -> None:
        """Exclude the stream's last worker from its next placement, or what it got KV from."""
        if stream.session.lost_source:
            source = WorkerId(stream.session.lost_source)
            stream.failed = list(dict.fromkeys((source, *stream.failed)))
            return
        worker_id = stream.session.worker_id
        if worker_id is not None:
            stream.failed = list(dict.fromkeys((worker_id, *stream.failed)))
            self._breaker.fail(worker_id, stream.session.lost_kind)

    def _cancel(self, stream: Stream) -> None:
        session = stream.session
        if session.worker_id is not None:
            self._send_cancel(session.worker_id, stream.number, session.attempt, monotonic_s())

    def _cancel_stray(self, worker_id: WorkerId, delta: Delta, now: float) -> None:
        """Tokens of a closed stream: its Cancel was lost, or is still on its way."""
        cancelled_s = self._cancelled_s.get((worker_id, delta.stream), -inf)
        if delta.finish is None and now - cancelled_s >= self._settings.stall_s:
            self._send_cancel(worker_id, delta.stream, delta.attempt, now)

    def _send_cancel(self, worker_id: WorkerId, number: int, attempt: int, now: float) -> None:
        self.cancels.put(worker_id, number, attempt)
        self._cancelled_s[worker_id, number] = now
        self._cancelled_s.move_to_end((worker_id, number))
        if len(self._cancelled_s) > MAX_CANCELS_KNOWN:
            self._cancelled_s.popitem(last=False)


def _runs_on(stream: Stream, worker_id: WorkerId) -> bool:
    return stream.session.state is SessionState.RUNNING and stream.session.worker_id == worker_id
