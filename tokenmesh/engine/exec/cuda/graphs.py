"""Graphs: recorded decode steps of the sizes that batches are padded to, and their memory."""

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tokenmesh.engine.device_memory import DeviceMemory
from tokenmesh.engine.exec.cuda.device import Device, Graph
from tokenmesh.engine.exec.cuda.forward import KINDS, DecodeSteps, Kind
from tokenmesh.shared.clock import monotonic_s, perf_s
from tokenmesh.shared.log_fields import PROGRESS

logger = logging.getLogger(__name__)


class GraphProgress:
    """Logs each time that another tenth of the graphs is there."""

    def __init__(self) -> None:
        self._began_s = monotonic_s()
        self._tenths = -1

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` graphs are recorded."""
        tenths = 10 * done // total
        if tenths > self._tenths:
            self._tenths = tenths
            logger.info(
                "CUDA graphs: %d of %d in %.1f s",
                done,
                total,
                monotonic_s() - self._began_s,
                extra={PROGRESS: done / total},
            )


def graph_bytes(memory: DeviceMemory, record: Callable[[], int], num_graphs: int) -> int:
    """Bytes that `num_graphs` will take, from what those take that `record` makes now.

    `record` returns how many it made, of the largest size. The driver keeps every recorded launch
    in device memory, and all graphs hold the same launches but for their sizes. What recorded
    launches compute in is kept for replays, free though it looks, and serves the smaller ones too.
    """
    memory.release()
    before, idle = memory.free() + memory.reserved(), _idle(memory)
    made = record()
    memory.release()
    driver = before - memory.free() - memory.reserved()
    return max(0, driver) * num_graphs // max(1, made) + max(0, _idle(memory) - idle)


def _idle(memory: DeviceMemory) -> int:
    """Return what the allocator holds unused and does not release."""
    return memory.reserved() - memory.allocated()


Progress = Callable[[int, int], None]
"""Called with (graphs recorded, graphs in all)."""


def silent(_done: int, _total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """It says which graph fits a batch. Without any, every step is eager."""

    sizes: Sequence[int] = ()
    """Ascending."""
    by_kind: Mapping[tuple[Kind, int], Graph] = field(default_factory=dict)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds so many rows; None when there is none."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, kind: Kind, size: int) -> torch.Tensor:
        """Launch one; its output, until the next replay."""
        graph = self.by_kind[kind, size]
        graph.replay()
        return graph.output


def graph_sizes(max_num_seqs: int, largest: int) -> list[int]:
    """1, 2, 4, 8, 16, ... 256, then every 16, up to both bounds, the lower of which is a size."""
    bound = min(max_num_seqs, largest)
    usual = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return sorted({size for size in usual if size <= bound} | ({bound} if bound else set()))


def capture(device: Device, steps: DecodeSteps, sizes: Sequence[int], progress: Progress) -> Graphs:
    """Record all kinds of all sizes, the largest first: the others fit into its memory."""
    began_s, total = perf_s(), len(sizes) * len(KINDS)
    # what is run to warm up writes to the null block and to an unused row
    steps.forward.buffer.rows.fill_(-1)
    by_kind: dict[tuple[Kind, int], Graph] = {}
    recorder = device.recorder()
    with _nothing_collected():
        for size in sorted(sizes, reverse=True):
            for kind in KINDS:
                by_kind[kind, size] = recorder.record(steps.of(kind, size))
                progress(len(by_kind), total)
    if sizes:
        logger.info("recorded %d CUDA graphs in %.1f s", total, perf_s() - began_s)
    return Graphs(sorted(sizes), by_kind)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect no garbage: what the collector frees may call CUDA, and most calls end a recording
    with an error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
