"""The tracer of this process: the one slot that `start_telemetry` fills and `stop` empties.

OpenTelemetry's own global provider can be set once in a process and never taken back, which no
test could live with. Until the slot is filled spans cost next to nothing and pass the trace on.
"""

from typing import Final

from opentelemetry.trace import NoOpTracer, Tracer

_SILENT: Final = NoOpTracer()


class _Slot:
    tracer: Tracer = _SILENT


def current_tracer() -> Tracer:
    """Never None; records nothing while telemetry is off."""
    return _Slot.tracer


def install_tracer(tracer: Tracer | None) -> None:
    """Fill or, with None, empty the slot."""
    _Slot.tracer = tracer or _SILENT
