"""LiveSpan: a span in progress, as plain as OpenTelemetry's interface allows.

The SDK's own has locks, bounded mappings and checks that nobody here needs: 25 us a span against 8.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import Span, SpanContext, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from tokenmesh.shared.clock import now_ns


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a span keeps; more is dropped, longer text is cut off."""

    num_attributes: int
    num_events: int
    attribute_chars: int


class LiveSpan(Span):
    """Records until `end`, which hands it to `finish`."""

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        bounds: Bounds,
        finish: "Callable[[LiveSpan], None]",
    ) -> None:
        self.name = name
        self.parent = parent
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[Event] = []
        self.status = Status(StatusCode.UNSET)
        self.start_ns = now_ns()
        self.end_ns: int | None = None
        self._context = context
        self._bounds = bounds
        self._finish = finish

    def get_span_context(self) -> SpanContext:
        """See `Span`."""
        return self._context

    def is_recording(self) -> bool:
        """See `Span`."""
        return self.end_ns is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See `Span`."""
        if len(self.attributes) < self._bounds.num_attributes or key in self.attributes:
            self.attributes[key] = self._cut(value)

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """See `Span`."""
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
    ) -> None:
        """See `Span`."""
        if len(self.events) < self._bounds.num_events:
            cut = {key: self._cut(value) for key, value in (attributes or {}).items()}
            self.events.append(Event(name, cut, now_ns() if timestamp is None else timestamp))

    def update_name(self, name: str) -> None:
        """See `Span`."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See `Span`."""
        self.status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """See `Span`; without the stack, which belongs into the log."""
        told = {"exception.type": type(exception).__name__, **(attributes or {})}
        self.add_event("exception", told, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """See `Span`."""
        if self.end_ns is None:
            self.end_ns = now_ns() if end_time is None else end_time
            self._finish(self)

    def _cut(self, value: AttributeValue) -> AttributeValue:
        return value[: self._bounds.attribute_chars] if isinstance(value, str) else value
