"""TorchDevice: `Device` through torch.cuda. All work is on the current stream of the caller."""

from collections.abc import Callable
from typing import Any

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


class TorchDevice:
    """See `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        """The memory that all graphs share; a handle."""

    def pinned(self, num_words: int) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def event(self) -> Event:
        """See `Device.event`; whoever waits sleeps, since the engine has other threads."""
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def capture(self, compute: Callable[[], torch.Tensor]) -> TorchGraph:
        """See `Device.capture`. Kernels cannot be compiled or loaded while recording."""
        compute()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return TorchGraph(graph, output)
