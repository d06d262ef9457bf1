"""TorchDevice: `Device` through torch.cuda. All work is on the current stream of the caller."""

from collections.abc import Callable
from functools import lru_cache

import torch

from tokenmesh.services.worker_svc.runner.cuda.device import Event


class TorchGraph:
    """See `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._graph.replay()


class TorchRecorder:
    """See `Recorder`. It has a pool of its own: one whose graphs are gone is not to be used again.

    torch refuses that while any memory of the old pool is still held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> TorchGraph:
        """See `Recorder.record`. Kernels cannot be compiled or loaded while recording.

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
    """See `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, num_words: int) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def event(self) -> Event:
        """See `Device.event`; whoever waits sleeps, since the engine has other threads."""
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def recorder(self) -> TorchRecorder:
        """See `Device.recorder`."""
        return TorchRecorder(self.device)


@lru_cache(maxsize=1)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded, which cannot be the default stream; the same for all of them."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
