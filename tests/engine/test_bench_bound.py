"""benchmarks.bound: decode steps and plain reads take turns."""

from benchmarks.bound import measure_bound
from benchmarks.limits import plain_reads
from tests.fakes.tiny import Tiny


def test_steps_and_reads_take_turns(tiny: Tiny) -> None:
    bound = measure_bound("tiny", tiny("llama").directory, threads=1, num_steps=10)
    assert bound.model == "tiny"
    assert bound.step_ms > 0 < bound.read_ms
    assert bound.read in plain_reads(1 << 20)
