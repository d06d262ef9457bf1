"""Forgotten: finds reservations on this worker that nobody gave back in their time.

Whoever made them may be dead, or have never told the worker of them. Reservations carry no time of
their own: their age is counted from when the worker first saw them, by its own clock.
"""

from collections.abc import Iterable
from itertools import islice


class Forgotten:
    """Looks at what is reserved, now and then."""

    def __init__(self, lifetime_s: float, max_reservations: int) -> None:
        """Of more than `max_reservations` the rest is looked at later."""
        self._lifetime_s = lifetime_s
        self._max_reservations = max_reservations
        self._seen_s: dict[str, float] = {}

    def look(self, reservations: Iterable[str], now_s: float) -> list[str]:
        """Those of all that there are now which are too old."""
        known = self._seen_s
        there = islice(reservations, self._max_reservations)
        self._seen_s = {each: known.get(each, now_s) for each in there}
        limit_s = now_s - self._lifetime_s
        return [each for each, seen_s in self._seen_s.items() if seen_s <= limit_s]
