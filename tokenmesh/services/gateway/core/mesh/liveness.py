"""Define what this gateway has observed of workers: LivenessTracker whether one responds, Breaker
which ones fail streams repeatedly. No I/O.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.calls import LivenessSettings
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.recent_most import RecentMost

_SMOOTHING: Final = 0.2
_AT_ONCE: Final = frozenset({"worker gone", "worker hung"})
"""Kinds of loss that a ping found: the worker is left out after one of them."""
_HARMLESS: Final = frozenset({"draining", "refused"})
"""Kinds of loss that are a worker's correct behavior."""


class LivenessTracker:
    """When one worker that runs streams of this gateway has been silent for too long.

    Such a worker sends Tokens or answers pings. The bounds follow from its usual intervals and
    answer times: a ping costs little, and a slow worker answers it too.
    """

    __slots__ = ("_heard_s", "_interval_s", "_is_pinged", "_settings", "answers")

    def __init__(self, settings: LivenessSettings, now: float, answers: RecentMost) -> None:
        """`answers`: the times of the worker's answers, also of those before it was idle."""
        self.answers = answers
        self._settings = settings
        self._heard_s = now
        self._interval_s = 0.0
        self._is_pinged = False

    def ping_timeout_s(self, now: float, lag_s: float) -> float:
        """Return how long a ping may stay unanswered.

        `lag_s`: how late this process's own timers were recently. On a machine short of CPU all
        workers are slow and none is dead.
        """
        settings = self._settings
        usual_s = max(self.answers.at(now) * settings.ping_factor, lag_s * settings.lag_factor)
        return min(max(settings.ping_timeout_s, usual_s), settings.ping_timeout_max_s)

    def on_tokens(self, now: float) -> None:
        """Tokens arrived. An open ping does not count for the silence after them."""
        self._interval_s += _SMOOTHING * (now - self._heard_s - self._interval_s)
        self._heard_s = now
        self._is_pinged = False

    def on_answer(self, now: float, took_s: float) -> None:
        """A ping or another request was answered after `took_s`."""
        self.answers.note(now, took_s)
        self._is_pinged = False
        self._heard_s = now

    def reset_silence(self, until_s: float) -> None:
        """Ignore the silence until then: this process or the bus caused it."""
        self._is_pinged = False
        self._heard_s = max(self._heard_s, until_s)

    def was_heard_after(self, time_s: float) -> bool:
        """Return whether the worker has responded after that time."""
        return self._heard_s > time_s

    @property
    def is_pinged(self) -> bool:
        """Return whether it was silent for too long and has not responded since."""
        return self._is_pinged

    @property
    def due_s(self) -> float:
        """When its silence will be too long."""
        settings = self._settings
        usual_s = max(settings.silence_s, settings.silence_factor * self._interval_s)
        return self._heard_s + min(usual_s, settings.silence_max_s)

    def needs_ping(self, now: float) -> bool:
        """Return whether it is silent for too long. True once for each silence."""
        if self._is_pinged:
            return False
        self._is_pinged = now >= self.due_s
        return self._is_pinged


@dataclass(slots=True)
class _Record:
    score: float = 0.0
    """Lost streams; each counts half after each half-life."""
    scored_s: float = 0.0
    pause_s: float = 0.0
    """0: closed."""
    open_until_s: float = 0.0
    probe_s: float = 0.0
    """When the next stream may probe the worker: once a pause, first at the end of the first."""


class Breaker:
    """Leaves out workers that fail streams repeatedly, and probes them from time to time.

    It knows what this gateway has seen, of at most `breaker_workers` workers. A scheduler without
    any other worker still places streams on one that is left out.
    """

    def __init__(
        self, settings: LivenessSettings, clock: Callable[[], float] = monotonic_s
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._record_by_worker: OrderedDict[WorkerId, _Record] = OrderedDict()

    def __len__(self) -> int:
        """Workers that are left out or probed."""
        return sum(record.pause_s > 0 for record in self._record_by_worker.values())

    def fail(self, worker_id: WorkerId, kind: str) -> None:
        """A worker has lost a stream; `kind` as in `Session.lost_kind`."""
        if kind in _HARMLESS:
            return
        now, settings = self._clock(), self._settings
        record = self._record_by_worker.setdefault(worker_id, _Record(scored_s=now))
        self._record_by_worker.move_to_end(worker_id)
        age = (now - record.scored_s) / settings.breaker_half_life_s
        score = record.score * 0.5**age + 1.0
        record.score = settings.breaker_failures if kind in _AT_ONCE else score
        record.scored_s = now
        is_probed = record.pause_s > 0
        # Streams that ran together on a worker fail together: they count as one failure.
        if now >= record.open_until_s and (is_probed or record.score >= settings.breaker_failures):
            record.pause_s = min(record.pause_s * 2 or settings.breaker_s, settings.breaker_max_s)
            record.open_until_s = record.probe_s = now + record.pause_s
        if len(self._record_by_worker) > settings.breaker_workers:
            self._record_by_worker.popitem(last=False)

    def succeed(self, worker_id: WorkerId) -> None:
        """A stream has ended there without an error: earlier failures are forgotten."""
        self._record_by_worker.pop(worker_id, None)

    def left_out(self) -> list[WorkerId]:
        """Workers that the next placement should not choose, the last one to fail first.

        A worker that is due for a probe is missing from one such list.
        """
        records = reversed(self._record_by_worker.items())
        return [each for each, record in records if self._is_open(record)]

    def _is_open(self, record: _Record) -> bool:
        now = self._clock()
        if record.pause_s > 0 and now >= record.probe_s:
            record.probe_s = now + record.pause_s
            return False
        return record.pause_s > 0
