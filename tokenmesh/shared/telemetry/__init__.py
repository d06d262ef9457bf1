"""Tracing: every request is one trace across five processes.

`span` and `record_span` work anywhere and cost little until `start_telemetry` was called.
"""

from tokenmesh.shared.telemetry.context import current_trace_id, current_traceparent, untraced
from tokenmesh.shared.telemetry.provider import Telemetry, start_telemetry
from tokenmesh.shared.telemetry.recorder import TimedEvent
from tokenmesh.shared.telemetry.span import REQUEST_ID, TENANT, record_span, span
from tokenmesh.shared.telemetry.tally import Tally

__all__ = [
    "REQUEST_ID",
    "TENANT",
    "Tally",
    "Telemetry",
    "TimedEvent",
    "current_trace_id",
    "current_traceparent",
    "record_span",
    "span",
    "start_telemetry",
    "untraced",
]
