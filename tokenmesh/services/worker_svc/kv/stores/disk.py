"""DiskStore: images in a folder, which outlive the worker.

One file of equal slots, and one with an entry of 64 bytes for each: key, checksum of the image and
of the entry itself. The image is written first. Nothing is synchronized to the device: whatever a
crash leaves is a pair that does not match, and is a miss.
"""

import errno
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from tokenmesh.services.worker_svc.kv.stores.folder import make_room, take_folder
from tokenmesh.services.worker_svc.kv.stores.store import MOST_KEY_BYTES, CannotOpen
from tokenmesh.services.worker_svc.kv.transports.transport import MappedArena
from tokenmesh.shared.clock import monotonic_s

logger = logging.getLogger(__name__)

_ENTRY: Final = struct.Struct(f"<B{MOST_KEY_BYTES}s16sQ")
"""Length of the key, key, checksum of the image, number in the order of writing; then comes the
checksum of these."""
_ENTRY_BYTES: Final = 64
_HEADER: Final = b"tokenmesh kv 1 "
"""An index begins with it and with the bytes of an image."""
_MOST_SLOTS: Final = 1 << 20
"""Each takes some memory as well."""
_MOST_FAILURES: Final = 8
"""Writes in a row; then nothing more is written."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Place(NamedTuple):
    slot: int
    checksum: bytes


class DiskStore:
    """The least recently used image gives way to another one."""

    name = "disk"

    def __init__(self, arena: MappedArena, directory: str, scope: bytes, num_bytes: int) -> None:
        self._arena = arena
        self._root = Path(directory)
        self._scope = scope
        self._size = arena.image_bytes
        self._num_bytes = num_bytes
        self._num_slots = min(num_bytes // (self._size + _ENTRY_BYTES), _MOST_SLOTS)
        self._images = self._index = -1
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Place] = OrderedDict()
        """Least recently used first."""
        self._writing: set[bytes] = set()
        self._free: list[int] = []
        self._end = 0
        """Slots from here on were never used."""
        self._written = 0
        self._failures = 0

    def open(self) -> None:
        if not self._num_slots:
            raise CannotOpen(f"{self._num_bytes} bytes hold no image of {self._size}")
        try:
            folder = take_folder(self._root, self._scope)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._images = os.open(folder / "images", flags, 0o600)
            self._index = os.open(folder / "index", flags, 0o600)
            self._read_index(folder)
            there = os.fstat(self._images).st_blocks * 512
            make_room(self._root, folder, self._num_bytes - there)
        except OSError as error:
            raise CannotOpen(str(error)) from error

    def find(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._known), len(keys))

    def get(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> list[bool]:
        return [
            monotonic_s() < deadline_s and self._get(key, self._arena.image(slot))
            for key, slot in zip(keys, slots, strict=True)
        ]

    def put(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> int:
        written = 0
        for key, slot in zip(keys, slots, strict=True):
            if monotonic_s() < deadline_s and self._failures < _MOST_FAILURES:
                written += self._put(key, self._arena.image(slot))
        return written

    def _get(self, key: bytes, image: memoryview) -> bool:
        with self._lock:
            place = self._known.get(key)
            if place is None:
                return False
            self._known.move_to_end(key)
        try:
            count = os.preadv(self._images, [image], place.slot * self._size)
        except OSError as error:
            logger.warning("KV on disk cannot be read: %s", error)
            count = 0
        # another image may be written there meanwhile: then it does not match either
        if count == self._size and xxhash.xxh3_128_digest(image) == place.checksum:
            return True
        with self._lock:
            if self._known.get(key) == place:
                del self._known[key]
                self._free.append(place.slot)
        return False

    def _put(self, key: bytes, image: memoryview) -> bool:
        with self._lock:
            if key in self._known or key in self._writing:
                return False
            slot = self._take_slot()
            if slot is None:
                return False
            self._writing.add(key)
            self._written += 1
            number = self._written
        checksum = xxhash.xxh3_128_digest(image)
        entry = _ENTRY.pack(len(key), key, checksum, number)
        try:
            _write(self._images, image, slot * self._size)
            _write(self._index, entry + xxhash.xxh3_128_digest(entry), _at(slot))
        except OSError as error:
            self._cannot_write(slot, error)
            return False
        else:
            self._failures = 0
            with self._lock:
                self._known[key] = _Place(slot, checksum)
            return True
        finally:
            with self._lock:
                self._writing.discard(key)

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._end < self._num_slots:
            self._end += 1
            return self._end - 1
        if not self._known:
            return None
        _, place = self._known.popitem(last=False)
        return place.slot

    def _cannot_write(self, slot: int, error: OSError) -> None:
        """Where there is no more room, the slots that are there are used again."""
        with self._lock:
            self._failures += 1
            is_first = self._failures == 1
            if error.errno in _NO_ROOM:
                is_first = self._num_slots > self._end
                self._num_slots = self._end
            else:
                # the last one to be tried again
                self._free.insert(0, slot)
            is_over = self._failures == _MOST_FAILURES
        if is_first:
            logger.warning("KV is not written to disk, %d slots in use: %s", self._end, error)
        if is_over:
            logger.warning("no more KV is written to disk: %d writes failed", _MOST_FAILURES)

    def _read_index(self, folder: Path) -> None:
        """Find what an earlier process has left, as far as it fits this one."""
        header = (_HEADER + str(self._size).encode()).ljust(_ENTRY_BYTES, b"\0")
        found = os.pread(self._index, _ENTRY_BYTES, 0)
        if found != header:
            if found:
                logger.warning("%s is of another format: it is written anew", folder)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._images, 0)
            _write(self._index, header, 0)
            return
        there = min(os.fstat(self._images).st_size // self._size, self._num_slots)
        ordered = sorted(self._entries(there), reverse=True)
        for number, key, place in ordered:
            self._written = max(self._written, number)
            self._known.setdefault(key, place)
        self._known = OrderedDict(reversed(self._known.items()))
        self._end = there
        used = {place.slot for place in self._known.values()}
        self._free = [slot for slot in range(there - 1, -1, -1) if slot not in used]
        os.ftruncate(self._images, there * self._size)

    def _entries(self, most: int) -> list[tuple[int, bytes, _Place]]:
        """Return number, key and place of those of the first slots that are whole."""
        found = []
        for slot in range(most):
            entry = os.pread(self._index, _ENTRY_BYTES, _at(slot))
            if len(entry) < _ENTRY_BYTES:
                break
            if xxhash.xxh3_128_digest(entry[: _ENTRY.size]) != entry[_ENTRY.size :]:
                continue
            length, key, checksum, number = _ENTRY.unpack(entry[: _ENTRY.size])
            found.append((number, key[:length], _Place(slot, checksum)))
        return found


def _at(slot: int) -> int:
    return (slot + 1) * _ENTRY_BYTES


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at the offset. Raises OSError."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        offset, rest = offset + count, rest[count:]
