"""SdkRecorder: spans straight to the SDK's processors, past the SDK's own tracer.

A worker makes a span with a hundred events for each stream; the tracer's bookkeeping would make
that 20x dearer.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags

import tokenmesh
from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.telemetry.live_span import Bounds, LiveSpan
from tokenmesh.shared.telemetry.recorder import Attributes, Recorder, TimedEvent

_SCOPE: Final = InstrumentationScope("tokenmesh", tokenmesh.__version__)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)


class SdkRecorder(Recorder):
    """Hands finished, sampled spans to `processors`."""

    def __init__(
        self, settings: TelemetrySettings, resource: Resource, processors: Sequence[SpanProcessor]
    ) -> None:
        self._sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
        self._ids = RandomIdGenerator()
        self._bounds = Bounds(
            settings.max_span_attributes, settings.max_span_events, settings.max_attribute_chars
        )
        self._resource = resource
        self._processors = processors

    def start(self, name: str, parent: Context | None, attributes: Attributes | None) -> Span:
        """See `Recorder.start`."""
        above = trace.get_current_span(parent).get_span_context()
        context = self._identity(name, parent, above)
        if not context.trace_flags.sampled:
            return NonRecordingSpan(context)
        above_or_none = above if above.is_valid else None
        begun = LiveSpan(name, context, above_or_none, self._bounds, self._finish)
        if attributes:
            begun.set_attributes(attributes)
        return begun

    def record(
        self,
        name: str,
        times_ns: tuple[int, int],
        parent: Context | None,
        attributes: Attributes | None,
        events: Iterable[TimedEvent],
    ) -> SpanContext:
        """See `Recorder.record`."""
        above = trace.get_current_span(parent).get_span_context()
        context = self._identity(name, parent, above)
        if not context.trace_flags.sampled:
            return context
        past = ReadableSpan(
            name,
            context=context,
            parent=above if above.is_valid else None,
            resource=self._resource,
            attributes=attributes,
            events=[
                Event(event, details, at_ns)
                for event, at_ns, details in islice(events, self._bounds.num_events)
            ],
            instrumentation_scope=_SCOPE,
            start_time=times_ns[0],
            end_time=times_ns[1],
        )
        self._hand_on(past)
        return context

    def shutdown(self) -> None:
        """Shut the processors down; may block on the network."""
        for processor in self._processors:
            processor.shutdown()

    def _finish(self, ended: LiveSpan) -> None:
        self._hand_on(
            ReadableSpan(
                ended.name,
                context=ended.get_span_context(),
                parent=ended.parent,
                resource=self._resource,
                attributes=ended.attributes,
                events=ended.events,
                instrumentation_scope=_SCOPE,
                status=ended.status,
                start_time=ended.start_ns,
                end_time=ended.end_ns,
            )
        )

    def _hand_on(self, ended: ReadableSpan) -> None:
        for processor in self._processors:
            processor.on_end(ended)

    def _identity(self, name: str, parent: Context | None, above: SpanContext) -> SpanContext:
        if above.is_valid:
            trace_id, flags = above.trace_id, above.trace_flags
        else:
            trace_id = self._ids.generate_trace_id()
            decision = self._sampler.should_sample(parent, trace_id, name).decision
            flags = _SAMPLED if decision is Decision.RECORD_AND_SAMPLE else _UNSAMPLED
        return SpanContext(trace_id, self._ids.generate_span_id(), False, flags)
