"""Makes glibc's allocator return freed memory to the system."""

import ctypes
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
