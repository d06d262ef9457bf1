"""Tracing: every request is one trace across five processes.

`span` and `record_span` work anywhere and cost little until `start_telemetry` was called.
"""

from tokenmesh.shared.telemetry.export import Telemetry, start_telemetry
from tokenmesh.shared.telemetry.recorder import Event, Span
from tokenmesh.shared.telemetry.span import (
    REQUEST_ID,
    TENANT,
    Tally,
    current_trace_id,
    current_traceparent,
    record_span,
    sampled_trace_id,
    span,
    untraced,
)

__all__ = [
    "REQUEST_ID",
    "TENANT",
    "Event",
    "Span",
    "Tally",
    "Telemetry",
    "current_trace_id",
    "current_traceparent",
    "record_span",
    "sampled_trace_id",
    "span",
    "start_telemetry",
    "untraced",
]
