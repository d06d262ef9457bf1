"""SenderClocks: deadlines by our own clock, whatever the sender's says.

A deadline travels as the sender's wall time, beside the time of sending. What a message seems to
have taken, by our clock, is the difference of the two clocks and its way. The least of what is
seen of a sender is nearly the difference alone; more than that is a message that lay somewhere, and
its deadline has come nearer meanwhile.
"""

from collections import OrderedDict
from typing import Final

_MAX_DEADLINE_S: Final = 7 * 86400.0


class _Sender:
    """The least apparent delay in this window of time and in the last one that had messages."""

    __slots__ = ("began_at", "is_told", "least", "least_before")

    def __init__(self, delay_s: float, now: float) -> None:
        self.least = self.least_before = delay_s
        self.began_at = now
        self.is_told = False

    def note(self, delay_s: float, now: float, window_s: float) -> float:
        if now - self.began_at > window_s:
            self.least_before, self.least, self.began_at = self.least, delay_s, now
        self.least = min(self.least, delay_s)
        return min(self.least, self.least_before)


class SenderClocks:
    """What is known of the clocks of at most `max_senders` processes."""

    def __init__(self, max_senders: int = 4096, window_s: float = 30.0) -> None:
        self._max_senders = max_senders
        self._window_s = window_s
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def offset_s(self, sender: str, sent_s: float, wall_s: float, now: float) -> float:
        """What to add to the sender's times; `wall_s` is our wall time, `now` monotonic."""
        delay_s = wall_s - sent_s
        known = self._senders.get(sender)
        if known is None:
            known = self._senders[sender] = _Sender(delay_s, now)
            if len(self._senders) > self._max_senders:
                self._senders.popitem(last=False)
        self._senders.move_to_end(sender)
        return known.note(delay_s, now, self._window_s)

    def is_news(self, sender: str) -> bool:
        """True the first time that a sender is asked about."""
        known = self._senders[sender]
        is_news, known.is_told = not known.is_told, True
        return is_news


def bounded(deadline_s: float, wall_s: float) -> float:
    """A deadline that no timer chokes on."""
    return min(deadline_s, wall_s + _MAX_DEADLINE_S)
