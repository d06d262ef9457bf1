"""Pace: how fast a line of waiting requests moves, to tell whom it has no room for when to come."""

from collections import deque
from typing import Final

_REMEMBERED: Final = 128


class Pace:
    """The last departures of one line. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, now: float) -> None:
        """A waiting request was placed."""
        self._times.append(now)

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Until so many have been placed, at the pace since the oldest departure that is
        remembered; 0 while that is not known."""
        if not self._times or now <= self._times[0]:
            return 0.0
        return num_ahead * (now - self._times[0]) / len(self._times)
