"""Tally: many short stretches of work as one span, from the first to the last, with their sum."""

from types import TracebackType

from tokenmesh.shared.clock import now_ns, perf_s
from tokenmesh.shared.telemetry.recorder import Attributes
from tokenmesh.shared.telemetry.span import record_span

_NS_PER_S = 1_000_000_000


class Tally:
    """`with tally:` around each stretch, `record` at the end. Stretches do not nest."""

    __slots__ = ("_began_s", "_busy_s", "_count", "_ended_s", "_first_s", "_name", "_start_ns")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_ns = 0
        self._first_s = self._began_s = self._ended_s = self._busy_s = 0.0
        self._count = 0

    def __enter__(self) -> None:
        """A stretch begins."""
        self._began_s = perf_s()
        if not self._count:
            self._start_ns = now_ns()
            self._first_s = self._began_s

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """And ends."""
        self._ended_s = perf_s()
        self._busy_s += self._ended_s - self._began_s
        self._count += 1

    def record(self, attributes: Attributes | None = None, parent: str | None = None) -> None:
        """Make the span; nothing without a stretch. `parent` as in `span`."""
        if not self._count:
            return
        end_ns = self._start_ns + round((self._ended_s - self._first_s) * _NS_PER_S)
        told = {"count": self._count, "busy_ms": round(self._busy_s * 1e3, 3), **(attributes or {})}
        record_span(self._name, self._start_ns, end_ns, parent, told)
