"""MooncakeStore: images in a pool of memory of several machines, whose master knows the keys.

The library copies into and out of a part of memory that is not the arena: whatever it does late or
wrongly, an image that does not match its checksum is a miss.
"""

import ctypes
import importlib
import logging
import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import xxhash

from tokenmesh.services.worker_svc.kv.stores.store import SUM_BYTES, CannotOpen
from tokenmesh.services.worker_svc.kv.transports.transport import MappedArena, MissingLibrary
from tokenmesh.shared.clock import monotonic_s

logger = logging.getLogger(__name__)

_BATCH: Final = 64
"""Images that the library moves at a time."""
_NAME_BYTES: Final = 20
_BUFFER_BYTES: Final = 16 << 20
"""It is the size of the library's own buffer."""
_THERE: Final = 1
_CONNECT_S: Final = 2.0


class MooncakeStore:
    """Nothing is deleted here: the master evicts."""

    name = "mooncake"

    def __init__(
        self, arena: MappedArena, scope: bytes, host: str, master: str, lent_bytes: int
    ) -> None:
        """host: where others read what this process lends; master: its address and port."""
        self._arena = arena
        self._scope = scope
        self._host = host
        self._master = master
        self._lent_bytes = lent_bytes
        self._each = arena.image_bytes + SUM_BYTES
        self._memory = mmap.mmap(-1, _BATCH * self._each)
        self._view = memoryview(self._memory)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()
        """Held while that memory is used."""
        self._store: Any = None

    def open(self) -> None:
        """Find the master. Raises CannotOpen, MissingLibrary."""
        store = _library().MooncakeDistributedStore()
        host, _, port = self._master.rpartition(":")
        try:
            # the library itself tries for more than a minute
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            raise CannotOpen(f"no master of Mooncake answers at {self._master}: {error}") from error
        own = self._host, "P2PHANDSHAKE", self._lent_bytes, _BUFFER_BYTES
        if store.setup(*own, "tcp", "", self._master):
            raise CannotOpen(f"the master of Mooncake at {self._master} does not take this worker")
        if store.register_buffer(self._first, len(self._memory)):
            raise CannotOpen("Mooncake does not take memory of this process")
        self._store = store

    def find(self, keys: Sequence[bytes]) -> int:
        there = self._store.batch_is_exist([self._name(key) for key in keys])
        return next((at for at, each in enumerate(there) if each != _THERE), len(keys))

    def get(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> list[bool]:
        are_good: list[bool] = []
        for names, places in self._batches(keys, slots):
            if monotonic_s() > deadline_s:
                break
            with self._lock:
                counts = self._store.batch_get_into(names, *self._pieces(names))
                are_good += [
                    count == self._each and self._take(at, slot)
                    for at, (count, slot) in enumerate(zip(counts, places, strict=True))
                ]
        return are_good + [False] * (len(keys) - len(are_good))

    def put(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> int:
        written = 0
        for names, places in self._batches(keys, slots):
            if monotonic_s() > deadline_s:
                break
            with self._lock:
                for at, slot in enumerate(places):
                    image = self._arena.image(slot)
                    piece = self._piece(at)
                    piece[:-SUM_BYTES] = image
                    piece[-SUM_BYTES:] = xxhash.xxh3_128_digest(image)
                codes = self._store.batch_put_from(names, *self._pieces(names))
            # a pool that is full takes none
            written += sum(code == 0 for code in codes)
        return written

    def _take(self, at: int, slot: int) -> bool:
        """Return whether a piece is whole; then its image is in the slot."""
        piece, image = self._piece(at), self._arena.image(slot)
        image[:] = piece[:-SUM_BYTES]
        # of what is in the slot: the library may still write to the piece
        return bool(xxhash.xxh3_128_digest(image) == piece[-SUM_BYTES:])

    def _batches(
        self, keys: Sequence[bytes], slots: Sequence[int]
    ) -> Iterator[tuple[list[str], Sequence[int]]]:
        for first in range(0, len(keys), _BATCH):
            end = first + _BATCH
            yield [self._name(key) for key in keys[first:end]], slots[first:end]

    def _name(self, key: bytes) -> str:
        return blake2b(self._scope + key, digest_size=_NAME_BYTES).hexdigest()

    def _piece(self, at: int) -> memoryview:
        return self._view[at * self._each : (at + 1) * self._each]

    def _pieces(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the address and the size of the piece of each."""
        places = range(len(names))
        return [self._first + at * self._each for at in places], [self._each] * len(names)


def _library() -> Any:
    """Import Mooncake's store. Raises MissingLibrary."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        what = "mooncake, which is not installed: pip install mooncake-transfer-engine-non-cuda"
        raise MissingLibrary(what) from error
    except ImportError as error:
        what = f"mooncake, which cannot be imported: {error}; Debian's libibverbs1 has libibverbs"
        raise MissingLibrary(what) from error
