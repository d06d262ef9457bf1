"""What glibc's allocator does with memory that is freed."""

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
