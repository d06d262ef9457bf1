"""FakeDevice: the GPU of tests. Work is done at once, on CPU tensors, by interpreted kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOST = torch.device("cpu")
_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class FakeEvent:
    """Completes only when waited for, or when queried often enough."""

    def __init__(self) -> None:
        self._questions = 0

    def record(self) -> None:
        self._questions = 2

    def synchronize(self) -> None:
        self._questions = 0

    def query(self) -> bool:
        self._questions = max(0, self._questions - 1)
        return self._questions == 0


class FakeGraph:
    """Calls the recorded function again; its result goes where the first one lies."""

    def __init__(self, device: "FakeDevice", compute: Callable[[], torch.Tensor]) -> None:
        self._device = device
        self._compute = compute
        self.output = compute().clone() if device.warms_up else torch.empty(0)

    def replay(self) -> None:
        self._device.num_replays += 1
        if not len(self.output):
            self.output = self._compute().clone()
            return
        # as where graphs share memory: nothing of an earlier replay is left
        self.output.fill_(-1)
        self.output.copy_(self._compute())


class FakeDevice:
    """Counts what it is asked for. Implements `Device` and `GraphRecorder`."""

    def __init__(self, *, warms_up: bool = False, on: torch.device = HOST) -> None:
        """warms_up: a capture runs what it records, as it must; in the interpreter that is slow.

        on: where tensors are, for a test that has another device than the host.
        """
        self.device = on
        self.warms_up = warms_up
        self.num_replays = 0
        self.num_graphs = 0

    def pinned(self, num_words: int) -> torch.Tensor:
        # not zeros: no code may rely on it
        return torch.full((num_words,), -7, dtype=torch.int32)

    def event(self) -> FakeEvent:
        return FakeEvent()

    def recorder(self) -> "FakeDevice":
        return self

    def record(self, compute: Callable[[], torch.Tensor]) -> FakeGraph:
        self.num_graphs += 1
        with reading_forbidden():
            return FakeGraph(self, compute)


class _ReadingForbidden(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in _READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def reading_forbidden() -> Iterator[None]:
    """Fails on ops that, on a GPU, would wait for a tensor's value."""
    with _ReadingForbidden():  # type: ignore[no-untyped-call]
        yield
