"""TorchDevice and what is said of a GPU, on a torch without one."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch

from tests.fakes.family_configs import SIZES
from tokenmesh.engine.exec.cuda import device as torch_device
from tokenmesh.engine.exec.cuda.device import Device
from tokenmesh.engine.exec.cuda.forward import DecodeSteps
from tokenmesh.engine.exec.cuda.graphs import capture, graph_bytes, silent
from tokenmesh.engine.exec.cuda.make import check_compiler, check_facts
from tokenmesh.engine.exec.device import device_of
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

CUDA = torch.device("cuda", 0)


class FakeCuda:
    """torch.cuda's part in a recording; notes what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[Any] = []
        self.streams = 0
        self._pools = 0
        # the arguments are checked against those of the installed torch
        self.graph = create_autospec(torch.cuda.graph, side_effect=self._graph)
        for name, value in {
            "CUDAGraph": lambda: "graph",
            "Stream": self._new_stream,
            "current_stream": lambda device: "default",
            "graph": self.graph,
            "graph_pool_handle": self._new_pool,
            "stream": self._on,
            "synchronize": lambda device: self.notes.append("synchronize"),
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, value)
        torch_device._side_stream.cache_clear()

    def _new_stream(self, device: torch.device) -> Any:
        self.streams += 1
        return SimpleNamespace(
            wait_stream=lambda other: self.notes.append(f"wait for {other}"), name="side"
        )

    def _new_pool(self) -> tuple[int, int]:
        self._pools += 1
        return (0, self._pools)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self.notes.append(f"on {stream.name}")
        yield
        self.notes.append("back")

    @contextmanager
    def _graph(self, graph: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        self.notes.append(("record", pool, stream.name))
        yield
        self.notes.append("recorded")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield FakeCuda(monkeypatch)
    torch_device._side_stream.cache_clear()


def test_a_step_runs_on_the_recording_stream_before_it_is_recorded(cuda: FakeCuda) -> None:
    recorder = torch_device.TorchDevice(CUDA).recorder()
    output = torch.ones(2)

    def compute() -> torch.Tensor:
        cuda.notes.append("compute")
        return output

    graph = recorder.record(compute)
    assert graph.output is output
    assert cuda.notes == [
        "wait for default",
        "on side",
        "compute",
        "back",
        "synchronize",
        ("record", (0, 1), "side"),
        "compute",
        "recorded",
    ]


def test_graphs_of_one_set_share_a_pool_that_no_later_set_gets(cuda: FakeCuda) -> None:
    device = torch_device.TorchDevice(CUDA)
    for recorder in (device.recorder(), device.recorder()):
        for _ in range(2):
            recorder.record(lambda: torch.ones(1))
    pools = [note[1] for note in cuda.notes if note[0] == "record"]
    assert pools == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert cuda.streams == 1, "cuBLAS has a workspace for each stream"


def test_nothing_is_collected_while_graphs_are_recorded() -> None:
    enabled = []

    class Recorder:
        def record(self, compute: Callable[[], torch.Tensor]) -> Any:
            enabled.append(gc.isenabled())
            if len(enabled) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return SimpleNamespace(output=torch.ones(1))

    buffer = SimpleNamespace(rows=torch.zeros(2))
    steps = SimpleNamespace(
        forward=SimpleNamespace(buffer=buffer), of=lambda kind, size: lambda: torch.ones(1)
    )
    device = cast(Device, SimpleNamespace(recorder=Recorder))
    with pytest.raises(torch.OutOfMemoryError):
        capture(device, cast(DecodeSteps, steps), [1, 2], silent)
    assert enabled == [False] * 4
    assert gc.isenabled()


class Memory:
    """A device's memory; graphs keep `idle` bytes, the driver takes `each` for one."""

    def __init__(self, idle: int, each: int) -> None:
        self.idle, self.each = idle, each
        self.graphs = 0
        self.kept = 700
        """By the allocator, without an owner: it goes with `release`."""

    def total(self) -> int:
        return 10_000

    def free(self) -> int:
        return 9000 - self.each * self.graphs - self.reserved()

    def allocated(self) -> int:
        return 100 + 5 * self.graphs

    def reserved(self) -> int:
        return self.allocated() + 20 + self.kept + (self.idle if self.graphs else 0)

    def peak(self) -> int:
        raise AssertionError

    def reset_peak(self) -> None:
        raise AssertionError

    def release(self) -> None:
        self.kept = 0

    def record(self) -> int:
        self.graphs, self.kept = 3, 900
        return 3


def test_graphs_cost_what_the_driver_takes_for_each_and_what_they_compute_in() -> None:
    memory = Memory(idle=300, each=7)
    assert graph_bytes(memory, memory.record, num_graphs=30) == 30 * 7 + 300
    assert graph_bytes(Memory(0, 0), lambda: 0, num_graphs=0) == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of some capability, or one that fails."""

    def make(capability: tuple[int, int] = (9, 0), error: str | None = None) -> None:
        def current_device() -> int:
            if error is not None:
                raise RuntimeError(error)
            return 1

        for name, value in {
            "is_available": lambda: True,
            "current_device": current_device,
            "get_device_name": lambda device: "NVIDIA T4",
            "get_device_capability": lambda device: capability,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    return make


def test_a_gpu_is_taken_unless_the_cpu_is_asked_for(gpu: Callable[..., None]) -> None:
    gpu()
    assert device_of(WorkerSettings()) == torch.device("cuda", 1)
    assert device_of(WorkerSettings(device="cpu")).type == "cpu"


def test_a_gpu_that_is_too_old_or_taken_is_refused_by_name(gpu: Callable[..., None]) -> None:
    gpu(capability=(7, 5))
    with pytest.raises(ConfigError, match=r"NVIDIA T4 cannot run .* 8\.0 and above") as caught:
        device_of(WorkerSettings())
    assert caught.value.param == "worker.device"
    gpu(error="CUDA error: all CUDA-capable devices are busy or unavailable")
    with pytest.raises(ConfigError, match="the GPU cannot be used: CUDA error: all"):
        device_of(WorkerSettings(device="cuda"))


def test_a_gpu_that_torch_does_not_find_is_refused_or_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ConfigError, match=r"finds no GPU: torch .* is built without CUDA"
    ) as caught:
        device_of(WorkerSettings(device="cuda"))
    assert caught.value.param == "worker.device"
    assert device_of(WorkerSettings(), tmp_path / "none").type == "cpu"
    assert caplog.messages == []
    assert device_of(WorkerSettings(), tmp_path).type == "cpu"
    assert "the model runs on the CPU: torch" in caplog.messages[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"for CUDA 13\.0 finds no driver"):
        device_of(WorkerSettings(device="cuda"))


def test_what_does_not_run_on_a_gpu_is_refused_before_weights_are_read() -> None:
    raw = RawConfig({**SIZES, "architectures": ["LlamaForCausalLM"]}, "config.json")
    facts = read_facts(raw)
    check_facts(facts)
    narrow = read_facts(RawConfig({**raw.values, "head_dim": 24}, "config.json"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM: heads of 24 features do not run"):
        check_facts(narrow)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler."),
        CalledProcessError(1, "gcc"),
        AssertionError("libcuda.so cannot found!"),
        PermissionError("read-only"),
        ImportError("failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_triton_that_cannot_compile_is_reported_before_weights_are_read(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise error

    runtime = ModuleType("triton.runtime")
    runtime.driver = Driver()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    with pytest.raises(ConfigError, match=r"cannot compile .* TRITON_CACHE_DIR") as caught:
        check_compiler()
    assert str(error) in caught.value.message
