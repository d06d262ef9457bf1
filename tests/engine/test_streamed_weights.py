"""Weights stream into place: what is held besides the model, and that values arrive unchanged."""

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenmesh.engine.models.checkpoint import Checkpoint

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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_over(load: Callable[[], list[torch.Tensor]]) -> tuple[int, int]:
    """Bytes that were resident at most since before `load`, and bytes of what it returns."""
    # What earlier tests have left must not go meanwhile.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, seen, is_over = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0005):
            seen.append(resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kept = load()
        seen.append(resident_bytes() - before)
    finally:
        is_over.set()
        watcher.join()
    return max(seen), sum(each.nbytes for each in kept)


def test_beside_the_model_no_more_than_a_tensor_is_held(tmp_path: Path) -> None:
    # each beyond what malloc ever takes from memory that was freed before
    names = [f"t{index}" for index in range(3)]
    save_file({name: torch.ones(9 * MIB) for name in names}, tmp_path / "model.safetensors")
    buffer_bytes = 4 * MIB

    def load(dtype: torch.dtype) -> list[torch.Tensor]:
        checkpoint = Checkpoint(tmp_path, buffer_bytes=buffer_bytes)
        return [checkpoint.take(name, (9 * MIB,), dtype) for name in names]

    peak, model = peak_over(lambda: load(torch.float32))
    assert model == 108 * MIB
    assert peak > 0.9 * model, "the probe saw nothing"
    assert peak < model + 8 * MIB
    peak, model = peak_over(lambda: load(torch.bfloat16))
    assert model == 54 * MIB
    assert peak < model + buffer_bytes + 8 * MIB
