"""Measures the machine's limits: bytes read and bfloat16 products a second."""

import time
from collections.abc import Callable
from typing import Final

import torch

_SECONDS: Final = 1.0
"""Seconds that each kind of read or product is measured."""
_COLUMNS: Final = 1024
_HOST_BYTES: Final = 512 << 20
_SQUARE: Final = {"cpu": 2048, "cuda": 8192}
_CALLS: Final = {"cpu": 1, "cuda": 8}
"""Between two looks at the clock: on a GPU a look costs a launch and a wait."""


def plain_reads(size: int) -> dict[str, Callable[[], object]]:
    """Ways to read `size` bytes of host memory once."""
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
        reads = plain_reads(_HOST_BYTES).values()
        return _HOST_BYTES / min(_best_s(read, device) for read in reads)
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _best_s(lambda: target.copy_(source), device)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square matrix product."""
    size = _SQUARE[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: left @ left, device)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    """The fastest call within `_SECONDS`, after one to warm up."""
    count = _CALLS[device.type]

    def calls() -> None:
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    calls()
    best_s = float("inf")
    until_s = time.perf_counter() + _SECONDS
    while time.perf_counter() < until_s:
        started_s = time.perf_counter()
        calls()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s / count
