"""The recorder of this process: the one slot that `start_telemetry` fills and `stop` empties.

OpenTelemetry's own global provider can be set once in a process and never taken back, which no
test could live with. Until the slot is filled spans cost next to nothing and pass the trace on.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanContext
from opentelemetry.util.types import AttributeValue

Attributes = Mapping[str, AttributeValue]
TimedEvent = tuple[str, int, Attributes | None]
"""Name, wall clock nanoseconds, attributes."""


class Recorder(Protocol):
    """Makes spans."""

    def start(self, name: str, parent: Context | None, attributes: Attributes | None) -> Span:
        """A span that begins now."""

    def record(
        self,
        name: str,
        times_ns: tuple[int, int],
        parent: Context | None,
        attributes: Attributes | None,
        events: Iterable[TimedEvent],
    ) -> SpanContext:
        """A span that is over; its identity, for spans inside it."""


class _Silent(Recorder):
    """Records nothing; every span is its parent again."""

    def __init__(self) -> None:
        self._tracer = NoOpTracer()

    def start(self, name: str, parent: Context | None, attributes: Attributes | None) -> Span:
        """See `Recorder.start`."""
        return self._tracer.start_span(name, parent)

    def record(
        self,
        name: str,
        times_ns: tuple[int, int],
        parent: Context | None,
        attributes: Attributes | None,
        events: Iterable[TimedEvent],
    ) -> SpanContext:
        """See `Recorder.record`."""
        return trace.get_current_span(parent).get_span_context()


_SILENT: Final = _Silent()


class _Slot:
    recorder: Recorder = _SILENT


def current_recorder() -> Recorder:
    """Never None."""
    return _Slot.recorder


def install_recorder(recorder: Recorder | None) -> None:
    """Fill or, with None, empty the slot."""
    _Slot.recorder = recorder or _SILENT
