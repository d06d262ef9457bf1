"""Tensors on large pages are tensors like any other."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmesh.kernels import huge_pages


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20,), (7, 1 << 20), (3, 999_999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_they_have_their_own_shape_dtype_and_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, second = huge_pages.empty(shape, dtype), huge_pages.empty(shape, dtype)
    first.fill_(1)
    second.fill_(2)
    assert first.shape == shape
    assert first.dtype == dtype
    assert first.is_contiguous()
    assert bool((first == 1).all())
    assert bool((second == 2).all())


def test_large_ones_begin_on_a_large_page() -> None:
    tensor = huge_pages.empty((huge_pages.HUGE_PAGE_BYTES,), torch.uint8)
    assert tensor.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_given_back_with_the_last_view() -> None:
    size = 64 << 20
    before = resident_bytes()
    for _ in range(8):
        tensor = huge_pages.empty((size,), torch.uint8).fill_(1)
        view = tensor[5:]
        del tensor
        assert bool(view[-1] == 1)
        del view
    assert resident_bytes() - before < 2 * size


def test_large_pages_are_used_where_the_system_has_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no transparent large pages")
    tensor = huge_pages.empty((16 << 20,), torch.uint8).fill_(1)
    maps = Path("/proc/self/smaps").read_text().split("AnonHugePages:")[1:]
    assert sum(int(entry.split()[0]) for entry in maps) << 10 >= len(tensor) // 2


def test_parts_that_are_filled_from_their_start_take_little_more_than_that() -> None:
    """The first blocks of a KV pool, which has a part for the keys of each layer."""
    parts, size = 24, 8 << 20
    tensor = huge_pages.empty((parts, size), torch.uint8, parts)
    before = resident_bytes()
    tensor[:, : 64 << 10] = 1
    # on large pages alone it would be 48 MiB
    assert resident_bytes() - before < 16 << 20
    tensor[:, size // 2] = 1
    tensor[:, -1] = 1
    assert np.count_nonzero(tensor.numpy()) == parts * ((64 << 10) + 2)


def test_parts_take_large_pages_once_they_hold_more() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no transparent large pages")
    tensor = huge_pages.empty((2, 16 << 20), torch.uint8, 2)
    flags = _flags_of(tensor.data_ptr() + (4 << 20))
    assert "hg" in flags
    assert "hg" not in _flags_of(tensor.data_ptr())


def _flags_of(address: int) -> list[str]:
    """Return the system's flags of the memory around an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return rest.split()
    return []
