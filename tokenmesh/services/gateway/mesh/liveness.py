"""LivenessTracker: whether one worker lives, from what it sends and how it answers pings.

No I/O. A worker in use is never silent for long: it sends Tokens or answers a Ping. How long is
long follows from its own habits, within bounds: a ping costs little, and a slow worker answers it.
"""

from typing import Final

from tokenmesh.services.gateway.mesh.watch_times import WatchTimes

_SMOOTHING: Final = 0.2
_FADING: Final = 0.9
"""Share of the slowest answer that is remembered after a faster one."""


class LivenessTracker:
    """The pulse of one worker that has streams of this gateway."""

    __slots__ = ("_answer_s", "_heard_s", "_interval_s", "_is_pinged", "_times")

    def __init__(self, times: WatchTimes, now: float) -> None:
        self._times = times
        self._heard_s = now
        self._interval_s = 0.0
        self._answer_s = 0.0
        self._is_pinged = False

    def patience_s(self, lag_s: float) -> float:
        """How long a ping may stay unanswered.

        `lag_s` is how late this process itself has run of late: on a machine that is short of
        CPU everybody is slow and nobody dead.
        """
        usual_s = max(self._answer_s * self._times.ping_factor, lag_s * self._times.lag_factor)
        return min(max(self._times.ping_timeout_s, usual_s), self._times.ping_timeout_max_s)

    def hear(self, now: float) -> None:
        """Tokens came. A ping that is on its way says no more about the silence after them."""
        self._interval_s += _SMOOTHING * (now - self._heard_s - self._interval_s)
        self._heard_s = now
        self._is_pinged = False

    def has_been_heard(self, since_s: float) -> bool:
        """Whether there was a sign of life after a time."""
        return self._heard_s > since_s

    @property
    def is_pinged(self) -> bool:
        """Whether it has been silent for too long, and has not been heard since."""
        return self._is_pinged

    @property
    def due_s(self) -> float:
        """When its silence will have been too long."""
        patience_s = max(self._times.silence_s, self._times.silence_factor * self._interval_s)
        return self._heard_s + min(patience_s, self._times.silence_max_s)

    def wants_ping(self, now: float) -> bool:
        """Whether it has been silent for too long; True once a silence, `excuse` begins another."""
        if self._is_pinged:
            return False
        self._is_pinged = now >= self.due_s
        return self._is_pinged

    def answered(self, now: float, took_s: float) -> None:
        """A ping or another question was answered."""
        self._answer_s = max(took_s, self._answer_s * _FADING)
        self._is_pinged = False
        self._heard_s = now

    def excuse(self, until_s: float) -> None:
        """The silence until then was not its fault (this process or the bus stood still)."""
        self._is_pinged = False
        self._heard_s = max(self._heard_s, until_s)
