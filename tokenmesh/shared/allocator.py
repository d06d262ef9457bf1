"""Makes glibc's allocator return freed memory to the system, and mapped files their pages."""

import ctypes
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 128 * 1024
"""glibc's own threshold at the start, before it raises it to what was freed, 32 MiB at most."""


def give_back_freed_memory() -> None:
    """Return large blocks to the system when they are freed, also after larger ones.

    By default each large block that is freed moves the next ones of its size into the heap, which
    shrinks from its end only: a few bodies would stay resident for the life of the process.
    Other C libraries have no such setting and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def trim_heap() -> None:
    """Return the pages of the heap that hold nothing, also those between blocks that are in use.

    While weights are packed, each small block may lie where a large one was, so that the next
    large one finds no room and the heap grows. Other C libraries than glibc are left as they are.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def give_back_after_loading() -> None:
    """Return what loading a model leaves: garbage, holes in the heap, pages of its files."""
    gc.collect()
    trim_heap()
    give_back_mapped_pages(".safetensors")


def give_back_mapped_pages(suffix: str) -> int:
    """Return the pages of mapped files whose names end so; the number of such mappings.

    What reads them again finds them in the page cache. A mapping that was written to is left as it
    is: its pages are nowhere else. Systems without /proc are left as they are.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    maps = Path("/proc/self/smaps")
    if madvise is None or not maps.exists():
        return 0
    found = [*_unwritten(maps.read_text(errors="replace").splitlines(), suffix)]
    for start, end in found:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
    return len(found)


def _unwritten(lines: list[str], suffix: str) -> Iterator[tuple[int, int]]:
    """Where mappings without pages of their own begin and end."""
    place: tuple[int, int] | None = None
    for line in lines:
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            place = (int(start, 16), int(end, 16)) if rest.endswith(suffix) else None
        elif first == "Anonymous:" and place is not None and rest.split()[0] == "0":
            yield place
