"""RecentMost: how long something took at most lately, by which one decides how long to wait."""

from typing import Final

_HALF_LIFE_S: Final = 5.0
"""Long enough to remember a stall of a busy machine, short enough to forget one that is over."""


class RecentMost:
    """The largest of recent values; one counts half after each half-life. Times are monotonic."""

    __slots__ = ("_noted_s", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._noted_s = 0.0

    def note(self, now: float, value: float) -> None:
        """Count a value from now on."""
        self._value, self._noted_s = max(value, self.at(now)), now

    def at(self, now: float) -> float:
        """0 before the first value."""
        return float(self._value * 0.5 ** ((now - self._noted_s) / _HALF_LIFE_S))
