"""How near a decode step of one stream comes to a plain read of as many bytes as the weights have.

    python -m benchmarks.bound DIRECTORY 2

Steps and reads alternate in one process, so both see the same memory bus: on a shared machine it is
often twice as fast a second later. Every kind of read takes its turn; the fastest by its median
counts. Prints JSON.
"""

import itertools
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import torch

from benchmarks.engine_loop import EngineLoop
from benchmarks.limits import plain_reads
from tokenmesh.shared.config.worker import WorkerSettings

_PROMPT: Final = 128
_STEPS: Final = 128
_WARM_STEPS: Final = 8


class Bound(msgspec.Struct):
    """Median times of one run."""

    step_s: float
    read_s: float
    """Of the fastest kind of read."""
    read: str
    """Which kind that is."""

    @property
    def share(self) -> float:
        """1 would be a step that does nothing but read the weights once."""
        return self.read_s / self.step_s


def measure_bound(directory: Path, threads: int, num_steps: int = _STEPS) -> Bound:
    """Decode `num_steps` tokens of one stream, a read after each."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    loop = EngineLoop(directory, WorkerSettings(cpu_threads=threads, enable_prefix_caching=False))
    torch.set_num_threads(threads)
    reads = plain_reads(size)
    names = itertools.cycle(reads)
    steps: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in reads}
    began_s = time.perf_counter()
    for _ in loop.steps([(list(range(_PROMPT)), _WARM_STEPS + num_steps)]):
        steps.append(time.perf_counter() - began_s)
        name = next(names)
        began_s = time.perf_counter()
        reads[name]()
        times[name].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
    fastest = min(times, key=lambda name: median(times[name]))
    return Bound(median(steps[_WARM_STEPS:]), median(times[fastest]), fastest)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure_bound(Path(sys.argv[1]), int(sys.argv[2]))))
