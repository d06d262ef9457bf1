"""One line of a sweep: an op on a batch, the reference and torch, against the limits."""

from benchmarks.ops.gate import MAX_REFERENCE_WORK
from benchmarks.ops.results import Limits, Line
from benchmarks.ops.work import Work
from benchmarks.timing import Stopwatch


def measure(op: str, batch: str, work: Work, limits: Limits, watch: Stopwatch) -> Line:
    """Time the op and what stands next to it."""
    seconds = watch.measure(work.run)
    is_affordable = work.num_flops <= MAX_REFERENCE_WORK
    reference_s = watch.once(work.reference) if is_affordable else None
    torch_s = watch.measure(work.torch_way) if work.torch_way is not None else None
    return Line(
        op=op,
        batch=batch,
        us=_microseconds(seconds),
        reference_us=None if reference_s is None else _microseconds(reference_s),
        torch_us=None if torch_s is None else _microseconds(torch_s),
        gb_per_s=round(work.num_bytes / seconds / 1e9, 2),
        tflop_per_s=round(work.num_flops / seconds / 1e12, 3),
        share=round(limits.shortest_s(work.num_bytes, work.num_flops) / seconds, 3),
    )


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
