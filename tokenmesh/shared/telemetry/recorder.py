"""Spans as plain data, and the recorder that makes them.

Ids are hexadecimal text, times wall clock nanoseconds. A request has about 15 spans, and the
classes of OpenTelemetry's SDK take several times as long.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from tokenmesh.shared.clock import now_ns
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.ids import new_span_id, new_trace_id

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

_SAMPLED_DIGITS: Final = frozenset("13579bdf")
"""Last digits of the flags of a traceparent whose lowest bit, `sampled`, is set."""
_RATIO_BITS: Final = 64
"""OpenTelemetry samples by the lower half of a trace's id."""


class Event:
    """Something that happened at one moment. Several spans may share one, which is encoded once."""

    __slots__ = ("attributes", "encoded", "name", "time_ns")

    def __init__(self, name: str, time_ns: int, attributes: Attributes | None = None) -> None:
        self.name = name
        self.time_ns = time_ns
        self.attributes = attributes
        self.encoded: bytes | None = None
        """As `otlp.py` writes it; None until then."""


class Span:
    """The identity of a span. This base class stands for spans that are not recorded."""

    __slots__ = ("flags", "span_id", "trace_id")

    def __init__(self, trace_id: str, span_id: str, flags: str) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags
        """Two digits, as in a traceparent."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def is_sampled(self) -> bool:
        return self.flags[-1] in _SAMPLED_DIGITS

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add or replace an attribute; does nothing on a span that is not recorded."""

    def add_event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event at this moment; does nothing on a span that is not recorded."""

    def fail(self, message: str) -> None:
        """Mark the span as failed; does nothing on a span that is not recorded."""


class RecordedSpan(Span):
    """A span with its content. Beyond the bounds attributes and events are dropped, text is cut."""

    __slots__ = (
        "_settings",
        "attributes",
        "end_ns",
        "error",
        "events",
        "name",
        "parent_id",
        "start_ns",
    )

    def __init__(
        self,
        name: str,
        identity: tuple[str, str, str],
        parent_id: str | None,
        start_ns: int,
        settings: TelemetrySettings,
    ) -> None:
        """`identity`: trace id, span id, flags."""
        self.trace_id, self.span_id, self.flags = identity
        self.name = name
        self.parent_id = parent_id
        self.start_ns = start_ns
        self.end_ns = 0
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[Event] = []
        self.error: str | None = None
        self._settings = settings

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add or replace an attribute."""
        settings = self._settings
        if len(self.attributes) < settings.max_span_attributes or key in self.attributes:
            if type(value) is str:
                value = value[: settings.max_attribute_chars]
            self.attributes[key] = value

    def add_event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event at this moment."""
        if len(self.events) < self._settings.max_span_events:
            limit = self._settings.max_attribute_chars
            kept = {
                key: value[:limit] if type(value) is str else value
                for key, value in (attributes or {}).items()
            }
            self.events.append(Event(name, now_ns(), kept))

    def fail(self, message: str) -> None:
        """Mark the span as failed."""
        self.error = message


class Recorder:
    """Makes the spans of a process; `finish` takes each sampled one at its end, on any thread."""

    def __init__(self, settings: TelemetrySettings, finish: Callable[[RecordedSpan], None]) -> None:
        self.finish = finish
        self._settings = settings
        self._sampled_below = round(settings.sample_ratio * (1 << _RATIO_BITS))

    def start(self, name: str, above: Span | None, attributes: Attributes | None) -> Span:
        """A span that begins now, inside `above`."""
        identity = self._identity(above)
        if identity[2][-1] not in _SAMPLED_DIGITS:
            return Span(*identity)
        parent_id = above.span_id if above is not None else None
        begun = RecordedSpan(name, identity, parent_id, now_ns(), self._settings)
        if attributes:
            for key, value in attributes.items():
                begun.set_attribute(key, value)
        return begun

    def record(
        self,
        name: str,
        times_ns: tuple[int, int],
        above: Span | None,
        attributes: Attributes | None,
        events: Iterable[Event],
    ) -> Span:
        """A span that is over; its identity, for spans inside it."""
        identity = self._identity(above)
        if identity[2][-1] not in _SAMPLED_DIGITS:
            return Span(*identity)
        parent_id = above.span_id if above is not None else None
        past = RecordedSpan(name, identity, parent_id, times_ns[0], self._settings)
        past.end_ns = times_ns[1]
        if attributes:
            past.attributes.update(attributes)
        past.events.extend(islice(events, self._settings.max_span_events))
        self.finish(past)
        return past

    def _identity(self, above: Span | None) -> tuple[str, str, str]:
        span_id = f"{new_span_id():016x}"
        if above is not None:
            return above.trace_id, span_id, above.flags
        trace_id = new_trace_id()
        is_sampled = trace_id & ((1 << _RATIO_BITS) - 1) < self._sampled_below
        return f"{trace_id:032x}", span_id, "01" if is_sampled else "00"


class _Process:
    recorder: Recorder | None = None


def current_recorder() -> Recorder | None:
    """The recorder of this process; None while telemetry is off."""
    return _Process.recorder


def install_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of this process."""
    _Process.recorder = recorder
