"""Silences of streams, by the fault that was on when they began or ended."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from benchmarks.chaos_run.faults import Fault
from benchmarks.chaos_run.received import ReceivedResponse

_SLOW_START_S = 0.3
CONSTRAINED: Final = ("guided", "tools")
"""Kinds of requests whose tokens a grammar restricts."""
MAX_GUIDED_RATIO: Final = 1.5
"""The bound of `guided_ratio`."""
_ENOUGH = 100
"""Choices of a kind, so that a p99 means something."""
_SHORTEST_MS = 50.0
"""Gaps below it are not recorded."""


class Spread(TypedDict):
    """The distribution of silences, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def spread(seconds: Sequence[float]) -> Spread:
    """Nearest-rank percentiles; zeros for nothing."""
    ordered = sorted(seconds) or [0.0]
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 1.0)]
    p50, p99, most = (round(1000 * each, 1) for each in at)
    return Spread(count=len(seconds), p50_ms=p50, p99_ms=p99, max_ms=most)


def by_fault(received: Iterable[ReceivedResponse], faults: Sequence[Fault]) -> dict[str, Spread]:
    """Gaps in mid-stream and, as `... (start)`, waits for a first token.

    A silence counts for the fault that was on; where several were, for "several at once".
    """
    found: dict[str, list[float]] = {fault.label: [] for fault in faults}
    for each in received:
        if each.first_s is not None and each.first_s - each.began_s > _SLOW_START_S:
            label = f"{_cause(each.began_s, each.first_s, faults)} (start)"
            found.setdefault(label, []).append(each.first_s - each.began_s)
        for shown in each.choices:
            for gap in shown.gaps:
                label = _cause(gap.start_s, gap.end_s, faults)
                found.setdefault(label, []).append(gap.end_s - gap.start_s)
    return {label: spread(gaps) for label, gaps in sorted(found.items())}


def by_kind(received: Iterable[ReceivedResponse]) -> dict[str, Spread]:
    """Each choice's longest gap in mid-stream, by kind of request; 0 for one without a gap."""
    found: dict[str, list[float]] = {}
    for each in received:
        longest = [
            max((gap.end_s - gap.start_s for gap in choice.gaps), default=0.0)
            for choice in each.choices
        ]
        found.setdefault(each.kind, []).extend(longest)
    return {kind: spread(gaps) for kind, gaps in sorted(found.items())}


def guided_ratio(gaps: Mapping[str, Spread]) -> float | None:
    """p99 of the worst constrained kind over that of plain streams; None: too few to compare."""
    plain = gaps.get("plain")
    guided = [gaps[kind] for kind in CONSTRAINED if kind in gaps]
    if plain is None or not guided or min(each["count"] for each in (plain, *guided)) < _ENOUGH:
        return None
    return max(each["p99_ms"] for each in guided) / max(plain["p99_ms"], _SHORTEST_MS)


def _cause(start_s: float, end_s: float, faults: Sequence[Fault]) -> str:
    fitting = [each for each in faults if each.began_s <= end_s and each.healed_s >= start_s]
    real = [each.label for each in fitting if each.kind != "nothing"]
    if len(real) > 1:
        return "several at once"
    return next(iter(real or [each.label for each in fitting]), "no fault")
