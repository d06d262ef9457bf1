"""Tracing."""

from tokenmesh.shared.telemetry.context import current_traceparent
from tokenmesh.shared.telemetry.span import span

__all__ = ["current_traceparent", "span"]
