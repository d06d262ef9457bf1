"""SharedArena: host memory for images of blocks that other processes can map."""

import mmap
import os
from contextlib import suppress
from typing import Final, NamedTuple

from tokenmesh.shared.errors import ConfigError

_SEALS: Final = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW."""
_ADD_SEALS: Final = 1033
POPULATE_READ: Final = 22
POPULATE_WRITE: Final = 23
"""Advice of madvise, of Linux since 5.14."""
_MAPPED_BYTES: Final = 4 << 20
"""The GIL is held for so much at a time, some 2 ms."""


class SharedArena:
    """Equal slots in a file that is only in memory. Its size never changes, so that no process
    which maps it can lose pages. Memory is taken as slots are first used."""

    def __init__(self, num_slots: int, image_bytes: int) -> None:
        """Raises ConfigError where the system has no such files."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError("KV is exchanged on Linux only", param="worker.kv.role")
        self.num_slots = num_slots
        self.image_bytes = image_bytes
        num_bytes = num_slots * image_bytes
        self.file = os.memfd_create("tokenmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, num_bytes)
        _seal(self.file)
        self.memory = mmap.mmap(self.file, num_bytes)

    def map_pages(self) -> None:
        """Map all of them into this process. Blocks for a quarter of a second a GiB."""
        map_pages(self.memory, POPULATE_WRITE)


class SharedKv(NamedTuple):
    """It holds what a worker that exchanges KV must know of its model."""

    arena: SharedArena
    scope: bytes
    """Images are exchanged with equal ones only, see `models.scope`."""
    token_bytes: int
    """KV of a token."""
    block_size: int


def map_pages(memory: mmap.mmap, advice: int) -> None:
    """Map all pages of shared memory into this process before it copies: page by page, as they are
    first touched, that takes five times as long as the copy. Nothing happens where the kernel
    cannot."""
    with suppress(OSError):
        for start in range(0, len(memory), _MAPPED_BYTES):
            memory.madvise(advice, start, min(_MAPPED_BYTES, len(memory) - start))


def _seal(file: int) -> None:
    import fcntl

    fcntl.fcntl(file, _ADD_SEALS, _SEALS)
