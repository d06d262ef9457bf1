"""Weights stream into place: what is held beside the model, and that values arrive unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint

MIB = 1 << 20


def make(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in (("a", (7, 5)), ("b", (9, 5)), ("scalar", ()), ("none", (0, 5)))
    }
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("buffer_bytes", [4, 12, 1000])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_values_arrive_through_a_buffer_of_any_size(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, buffer_bytes: int
) -> None:
    tensors = make(tmp_path, stored)
    checkpoint = Checkpoint(tmp_path, buffer_bytes=buffer_bytes)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.take(name, tuple(tensor.shape), wanted), tensor.to(wanted))
    rows = checkpoint.take_rows([("a", 7), ("b", 9)], (5,), wanted)
    assert torch.equal(rows, torch.cat([tensors["a"], tensors["b"]]).to(wanted))
    checkpoint.finish(())


def test_the_bytes_that_count_are_those_that_are_read(tmp_path: Path) -> None:
    tensors = make(tmp_path, torch.bfloat16)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.num_bytes(()) == sum(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.num_bytes(("a", "none")) == tensors["b"].nbytes + 2
    checkpoint.take("b", (9, 5), torch.float32)
    assert checkpoint.bytes_read == tensors["b"].nbytes
    assert checkpoint.read_s > 0


PROBE = """
import json, sys, threading
from pathlib import Path
import torch
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def measure(dtype):
    checkpoint = Checkpoint(Path(sys.argv[1]), buffer_bytes=4 << 20)
    checkpoint.take("warm", (1024,), dtype)
    before, peak, is_over = resident(), 0, threading.Event()
    def watch():
        nonlocal peak
        while not is_over.wait(0.0005):
            peak = max(peak, resident())
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = [checkpoint.take(f"t{i}", (2 << 20,), dtype) for i in range(8)]
    is_over.set()
    watcher.join()
    return {"peak": peak - before, "model": sum(each.nbytes for each in kept)}

print(json.dumps([measure(torch.float32), measure(torch.bfloat16)]))
"""


def test_beside_the_model_no_more_than_a_tensor_is_held(tmp_path: Path) -> None:
    # 64 MiB in eight tensors of 8
    tensors = {f"t{index}": torch.ones(2 * MIB) for index in range(8)}
    save_file({**tensors, "warm": torch.ones(1024)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [each["model"] for each in found] == [64 * MIB, 32 * MIB]
    for each in found:
        assert each["peak"] > each["model"] * 0.9, "the probe saw nothing"
        assert each["peak"] < each["model"] + 10 * MIB
