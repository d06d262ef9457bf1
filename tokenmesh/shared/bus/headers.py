"""Headers of a message as text, and deadlines of senders whose clocks differ.

The headers are `tm-schema`, `tm-deadline`, `tm-sent`, `tm-alone` and `traceparent`. Answers and
`Tokens` have none, which means the current schema and saves 10 % of a round trip.
"""

from collections import OrderedDict
from collections.abc import Mapping
from math import isfinite
from typing import Final

from tokenmesh.shared.bus.base import Headers
from tokenmesh.shared.codec import SCHEMA
from tokenmesh.shared.errors import ProtocolError

_SCHEMA: Final = "tm-schema"
_DEADLINE: Final = "tm-deadline"
_SENT: Final = "tm-sent"
_TRACEPARENT: Final = "traceparent"
_ALONE: Final = "tm-alone"

_SHOWN_CHARS: Final = 64
_MAX_ALONE_CHARS: Final = 256
_MAX_DEADLINE_S: Final = 7 * 86400.0

_NONE: Final = Headers()


def pack(headers: Headers) -> dict[str, str]:
    packed = {_SCHEMA: SCHEMA}
    if headers.deadline_s is not None:
        packed[_DEADLINE] = repr(headers.deadline_s)
    if headers.sent_s is not None:
        packed[_SENT] = repr(headers.sent_s)
    if headers.traceparent is not None:
        packed[_TRACEPARENT] = headers.traceparent
    if headers.alone is not None:
        packed[_ALONE] = headers.alone
    return packed


def unpack(packed: Mapping[str, str] | None) -> Headers:
    """Read what `pack` made; a message may have no headers. Raises ProtocolError."""
    if not packed:
        return _NONE
    schema = packed.get(_SCHEMA, SCHEMA)
    if schema != SCHEMA:
        raise ProtocolError(f"message of schema {schema}, this process supports {SCHEMA}")
    return Headers(
        deadline_s=_time(packed, _DEADLINE),
        traceparent=packed.get(_TRACEPARENT),
        sent_s=_time(packed, _SENT),
        alone=_turn(packed),
    )


def _turn(packed: Mapping[str, str]) -> str | None:
    name = packed.get(_ALONE)
    if name is not None and len(name) > _MAX_ALONE_CHARS:
        raise ProtocolError(f"{_ALONE} has {len(name)} characters")
    return name


def _time(packed: Mapping[str, str], name: str) -> float | None:
    text = packed.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise ProtocolError(f"{name} {text[:_SHOWN_CHARS]!r} is not a number") from error
    if not isfinite(seconds):
        raise ProtocolError(f"{name} is {seconds}")
    return seconds


class _Sender:
    """The least apparent delay in this window of time and in the last one that had messages."""

    __slots__ = ("began_at", "is_reported", "least", "least_before")

    def __init__(self, delay_s: float, now: float) -> None:
        self.least = self.least_before = delay_s
        self.began_at = now
        self.is_reported = False

    def note(self, delay_s: float, now: float, window_s: float) -> float:
        if now - self.began_at > window_s:
            self.least_before, self.least, self.began_at = self.least, delay_s, now
        self.least = min(self.least, delay_s)
        return min(self.least, self.least_before)


class SenderClocks:
    """The clocks of at most `max_senders` processes, compared with ours.

    A deadline is sent as the sender's wall time, together with the time of sending. The apparent
    delay of a message, by our clock, is the difference of the two clocks plus its time on the way.
    The least delay of a sender is nearly the difference alone; a larger one means that the message
    was held up, and its deadline has come nearer meanwhile.
    """

    def __init__(self, max_senders: int = 4096, window_s: float = 30.0) -> None:
        self._max_senders = max_senders
        self._window_s = window_s
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def offset_s(self, sender: str, sent_s: float, wall_s: float, now: float) -> float:
        """Return what to add to the sender's times; `wall_s` is our wall time, `now` monotonic."""
        delay_s = wall_s - sent_s
        known = self._senders.get(sender)
        if known is None:
            known = self._senders[sender] = _Sender(delay_s, now)
            if len(self._senders) > self._max_senders:
                self._senders.popitem(last=False)
        self._senders.move_to_end(sender)
        return known.note(delay_s, now, self._window_s)

    def is_news(self, sender: str) -> bool:
        """True on the first call for a sender."""
        known = self._senders[sender]
        is_news, known.is_reported = not known.is_reported, True
        return is_news


def bounded(deadline_s: float, wall_s: float) -> float:
    """The deadline, at most a week from now: timers fail with larger numbers."""
    return min(deadline_s, wall_s + _MAX_DEADLINE_S)
