"""What the machine can do at most, measured: bytes read and bfloat16 products a second.

    python -m benchmarks.limits 988000000 2

prints the GB/s (1e9 bytes) of several plain reads of so many bytes on that many threads, as JSON.
The fastest is what a decode step on weights of that size cannot beat.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Final

import torch

_SECONDS: Final = 1.0
"""Of each kind of read or product."""
_COLUMNS: Final = 1024
_SQUARE: Final = {"cpu": 2048, "cuda": 8192}


def read_speeds(size: int) -> dict[str, float]:
    """GB/s of each way to read `size` bytes of host memory once."""
    return {name: size / _best_s(read) / 1e9 for name, read in _reads(size).items()}


def _reads(size: int) -> dict[str, Callable[[], object]]:
    rows = torch.ones(size // 4 // _COLUMNS, _COLUMNS)
    flat = rows.view(-1)
    first, second = flat[: len(flat) // 2], flat[-(len(flat) // 2) :]
    whole = flat.view(torch.int32)
    vector = torch.ones(_COLUMNS)
    return {
        "sum of float32": flat.sum,
        "largest of float32": flat.amax,
        "sum of int32": lambda: whole.sum(dtype=torch.int32),
        "dot of two halves": lambda: first.dot(second),
        "matrix times vector": lambda: rows.mv(vector),
    }


def memory_speed(device: torch.device) -> float:
    """Bytes a second: the fastest read on a CPU, a copy (read and write) on a GPU."""
    if device.type == "cpu":
        return max(read_speeds(512 << 20).values()) * 1e9
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _best_s(lambda: _wait(target.copy_(source)))


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square matrix product."""
    size = _SQUARE[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: _wait(left @ left))


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return tensor


def _best_s(call: Callable[[], object]) -> float:
    """The fastest call within `_SECONDS`, after one to warm up."""
    call()
    best_s = float("inf")
    until_s = time.perf_counter() + _SECONDS
    while time.perf_counter() < until_s:
        started_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def main(size: str, threads: str) -> None:
    """Measure reads and print."""
    torch.set_num_threads(int(threads))
    json.dump({name: round(speed, 2) for name, speed in read_speeds(int(size)).items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
