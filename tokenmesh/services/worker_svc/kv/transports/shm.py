"""ShmTransport: a source on the same machine, of the same user, lends its arena to be mapped.

It is lent for reading only. What is asked for is still asked: a lease that has ended is refused.
"""

import mmap
import os
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tokenmesh.engine.kv.shared_arena import POPULATE_READ, map_pages
from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.transports.transport import (
    YES,
    Listener,
    MappedArena,
    ReadRefused,
    SlotsAsked,
    Unreachable,
    limit,
    send_question,
)
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.ids import new_token

_MOST_MAPPED: Final = 16
"""Arenas of others that stay mapped."""
_BACKLOG: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")

Place = tuple[str, int, bytes]
"""It tells which boot of which machine, whose, and the name of the socket."""
_decode: Final = msgspec.msgpack.Decoder(Place).decode


class ShmTransport:
    def __init__(self, arena: MappedArena, leases: ServedLeases) -> None:
        self._arena = arena
        self._leases = leases
        self._file = -1
        self._lock = threading.Lock()
        self._mapped: OrderedDict[bytes, memoryview] = OrderedDict()

    def listen(self) -> bytes:
        # opened again: the one that is here may be written to
        self._file = os.open(f"/proc/self/fd/{self._arena.file}", os.O_RDONLY)
        name = b"\0tokenmesh-kv-" + new_token().hex().encode()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(name)
        server.listen(_BACKLOG)
        Listener(server, self._arena, self._leases, _is_own, self._send).start()
        return msgspec.msgpack.encode((_boot(), os.getuid(), name))

    def read(
        self,
        address: bytes,
        ask: SlotsAsked,
        slots: Sequence[int],
        deadline_s: float,
        landed: Callable[[int], None],
    ) -> None:
        source = self._map(address, ask, deadline_s)
        size = ask.image_bytes
        for number, (there, here) in enumerate(zip(ask.slots, slots, strict=True)):
            if monotonic_s() > deadline_s:
                raise TimeoutError
            self._arena.image(here)[:] = source[there * size : (there + 1) * size]
            landed(number)

    def _map(self, address: bytes, ask: SlotsAsked, deadline_s: float) -> memoryview:
        """The arena of the source, which allows what is asked."""
        try:
            boot, user, name = _decode(address)
        except msgspec.DecodeError as error:
            raise Unreachable(str(error)) from error
        if (boot, user) != (_boot(), os.getuid()):
            raise Unreachable("it is elsewhere")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            limit(connection, deadline_s)
            try:
                connection.connect(name)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                with self._lock:
                    self._mapped.pop(address, None)
                raise Unreachable(str(error)) from error
            send_question(connection, ask, deadline_s)
            limit(connection, deadline_s)
            answer, files, _, _ = socket.recv_fds(connection, 1, 1)
        try:
            if answer != YES or not files:
                raise ReadRefused
            with self._lock:
                if address not in self._mapped:
                    length = os.fstat(files[0]).st_size
                    mapped = mmap.mmap(files[0], length, prot=mmap.PROT_READ)
                    self._mapped[address] = memoryview(mapped)
                    pages = mapped, POPULATE_READ
                    threading.Thread(target=map_pages, args=pages, daemon=True).start()
                    if len(self._mapped) > _MOST_MAPPED:
                        self._mapped.popitem(last=False)
                self._mapped.move_to_end(address)
                return self._mapped[address]
        finally:
            for file in files:
                os.close(file)

    def _send(self, connection: socket.socket, _: SlotsAsked) -> None:
        socket.send_fds(connection, [YES], [self._file])


def _is_own(connection: socket.socket) -> bool:
    """Return whether the peer is a process of the same user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user == os.getuid()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
