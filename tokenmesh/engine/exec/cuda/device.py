"""Device: the parts of CUDA that the runner needs other than tensors, behind an interface.

Tests implement it with a device that runs immediately, to test the runner without a GPU.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """The point is after everything launched so far."""

    def synchronize(self) -> None:
        """Block until the device has come to the point recorded last."""

    def query(self) -> bool:
        """Return whether it has; also when nothing was recorded."""


class Graph(Protocol):
    output: torch.Tensor
    """It holds what the recorded function returned; every replay overwrites it."""

    def replay(self) -> None:
        """Launch all of it again, on the same memory."""


class GraphRecorder(Protocol):
    """Makes graphs that share their memory."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Graph:
        """Record what `compute` launches, after running it for real, once or more.

        It may read and write only memory that stays; what it allocates belongs to the graph, and
        all graphs share it: one replay at a time, output copied before the next. Except for the
        output, which is not reused while the graph lives: keep it small, or pass persistent memory.
        """


class Device(Protocol):
    """One GPU; launches take effect in their order."""

    device: torch.device

    def pinned(self, num_words: int) -> torch.Tensor:
        """int32 [num_words] of host memory that a copy can read or write while the host goes on."""

    def event(self) -> DeviceEvent:
        """A new event with nothing recorded."""

    def recorder(self) -> GraphRecorder:
        """A recorder of graphs that are discarded together."""


class TorchGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class TorchRecorder:
    """A `GraphRecorder` with its own pool.

    torch refuses to use a pool again whose graphs are gone while any of its memory is still held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> TorchGraph:
        """See `GraphRecorder.record`. Kernels cannot be compiled or loaded while recording.

        The run before is on the same stream, since cuBLAS has a workspace for each: it must not
        come from the graphs' memory, which it would hold for ever.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()
        return TorchGraph(graph, output)


class TorchDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def event(self) -> DeviceEvent:
        """See `Device.event`; a waiting thread sleeps, since the engine has other threads."""
        event: DeviceEvent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def recorder(self) -> TorchRecorder:
        return TorchRecorder(self.device)


@lru_cache(maxsize=1)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded, which cannot be the default stream; the same for all of them."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
