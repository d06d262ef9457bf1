"""Device: the few things of CUDA that the runner needs beside tensors, behind an interface.

A test answers it with a device that runs at once, so the whole runner can be tested without a GPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """The point is after everything launched so far."""

    def synchronize(self) -> None:
        """Block until the device has come to the point recorded last."""

    def query(self) -> bool:
        """Whether it has; also when nothing was recorded."""


class Graph(Protocol):
    """Recorded launches."""

    output: torch.Tensor
    """What the recorded function returned; every replay overwrites it."""

    def replay(self) -> None:
        """Launch all of it again, on the same memory."""


class Recorder(Protocol):
    """Makes graphs that share their memory."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Graph:
        """Record what `compute` launches, after running it for real, once or more.

        It may read and write only memory that stays; what it allocates belongs to the graph, and
        all graphs share it: one replay at a time, output copied before the next. Except for the
        output, which nobody else gets while the graph lives: let it be small, or memory that stays.
        """


class Device(Protocol):
    """One GPU; launches take effect in their order."""

    device: torch.device

    def pinned(self, num_words: int) -> torch.Tensor:
        """int32 [num_words] of host memory that a copy can read or write while the host goes on."""

    def event(self) -> Event:
        """A new one, nothing recorded."""

    def recorder(self) -> Recorder:
        """For graphs that come and go together."""
