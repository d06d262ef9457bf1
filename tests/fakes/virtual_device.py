"""VirtualDevice: the runner's `Device` on a `VirtualGpu`, and all that a test patches for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch

from tests.fakes import reference_layers
from tests.fakes.virtual_gpu import DEVICE, Op, VirtualGpu, plain, poison
from tokenmesh.engine.exec import build
from tokenmesh.engine.exec.cuda import make
from tokenmesh.engine.exec.cuda.launch import CudaLaunch
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.models.native import attention

_KERNELS: Final = (
    "gelu_mul", "grammar_mask", "logit_bias", "logprobs", "penalties", "post_update",
    "quantized_linear", "rms_norm", "rope", "sample", "silu_mul", "staged_writes", "step_inputs",
)  # fmt: skip


class VirtualEvent:
    """Completes when waited for, or when queried often enough."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._last: Callable[[], None] | None = None
        self._questions = 0

    def record(self) -> None:
        self._questions = 2
        self._last = self._gpu.transfers[-1] if self._gpu.transfers else None

    def synchronize(self) -> None:
        self._questions = 0
        transfers = self._gpu.transfers
        if self._last in transfers:
            with torch._C.DisableTorchFunction():
                self._gpu.complete(1 + transfers.index(self._last))

    def query(self) -> bool:
        self._questions = max(0, self._questions - 1)
        if not self._questions:
            self.synchronize()
        return not self._questions


class VirtualGraph:
    """Runs what was recorded, on the tensors of that time."""

    def __init__(self, recorder: "VirtualRecorder", ops: list[Op], output: torch.Tensor) -> None:
        self._recorder = recorder
        self.ops = ops
        self.output = output

    def replay(self) -> None:
        self._recorder.device.num_replays += 1
        with torch._C.DisableTorchFunction():
            for graph in self._recorder.graphs:
                graph.forget()
            for op in self.ops:
                op.run()

    def forget(self) -> None:
        """Another graph computes in the same memory."""
        for op in self.ops:
            for tensor in op.own():
                poison(tensor)


class VirtualRecorder:
    """A `GraphRecorder` whose graphs replay recorded ops."""

    def __init__(self, device: "VirtualDevice") -> None:
        self.device = device
        self.graphs: list[VirtualGraph] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> VirtualGraph:
        gpu = self.device.gpu
        compute()
        ops: list[Op] = []
        gpu.recording = ops
        try:
            output = compute()
        finally:
            gpu.recording = None
        graph = VirtualGraph(self, ops, output)
        self.graphs.append(graph)
        return graph


class VirtualDevice:
    """Implements `Device`."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.device = DEVICE
        self.gpu = gpu
        self.num_replays = 0

    def pinned(self, num_words: int) -> torch.Tensor:
        return self.gpu.pin(torch.full((num_words,), -7, dtype=torch.int32))

    def event(self) -> VirtualEvent:
        return VirtualEvent(self.gpu)

    def recorder(self) -> VirtualRecorder:
        return VirtualRecorder(self)


class _Kernels:
    """Stands for a package's launchers: its own functions, which a CPU tensor sends elsewhere."""

    def __init__(self, package: ModuleType, gpu: VirtualGpu) -> None:
        self._package = package
        self._gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._gpu.kernel(getattr(self._package, name))


@contextmanager
def virtual_gpu() -> Iterator[VirtualDevice]:
    """`build_runner` with device cuda, launches strict, on a GPU that is not there."""
    gpu = VirtualGpu()
    device = VirtualDevice(gpu)
    launch = CudaRunner.launch

    def strict_launch(self: CudaRunner, plan: Any) -> CudaLaunch:
        with gpu.strict():
            return launch(self, plan)

    patches: list[Any] = [
        patch.object(build, "device_of", lambda settings: torch.device(settings.device)),
        patch.object(build, "check_compiler", lambda: None),
        patch.object(build, "gpu_budget", lambda device, settings: None),
        patch.object(make, "TorchDevice", lambda where: device),
        patch.object(CudaRunner, "launch", strict_launch),
        patch.object(attention, "paged_attention", gpu.kernel(reference_layers._attend)),
        patch.object(attention, "qk_norm_rope_kv_write", gpu.kernel(reference_layers._write)),
    ]
    for name in _KERNELS:
        package = import_module(f"tokenmesh.kernels.{name}")
        patches.append(patch.object(package, "triton", _Kernels(package, gpu), create=True))
    for each in patches:
        each.start()
    try:
        with gpu:
            yield device
    finally:
        for each in patches:
            each.stop()


__all__ = ["VirtualDevice", "plain", "virtual_gpu"]
