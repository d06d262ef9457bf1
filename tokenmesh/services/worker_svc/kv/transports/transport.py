"""Define what transports have in common."""

import contextlib
import ctypes
import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.orders import LENGTH_BYTES, MOST_SLOTS
from tokenmesh.shared.clock import monotonic_s

logger = logging.getLogger(__name__)

MOST_PEERS: Final = 64
"""Connections that are served at a time; further ones are closed."""
STUCK: Final = 75
"""Exit code of a process that ends for a read which does not."""
_CONNECT_S: Final = 1.0
_BACKLOG: Final = 64
YES: Final = b"\x01"
NO: Final = b"\x00"
_ASK_BYTES: Final = 128 + 5 * MOST_SLOTS
_PATIENCE_S: Final = 10.0
"""A peer that neither asks nor takes anything for so long is left."""
_TIMEVAL: Final = struct.pack("@ll", int(_PATIENCE_S), 0)


class Unreachable(Exception):
    """Nothing was read by this transport: another one may be tried."""


class ReadRefused(Exception):
    """The source does not let these slots be read."""


class MissingLibrary(Exception):
    """A transport needs what is not there; says what, and how to install it."""


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The arena in this process."""

    file: int
    view: memoryview
    num_slots: int
    image_bytes: int

    def address(self) -> int:
        """Return where it begins. It stays there as long as this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def image(self, slot: int) -> memoryview:
        return self.view[slot * self.image_bytes : (slot + 1) * self.image_bytes]


class SlotsAsked(msgspec.Struct, frozen=True, array_like=True):
    """The question: slots of a lease."""

    lease: int
    token: bytes
    slots: list[int]
    image_bytes: int


class Transport(Protocol):
    """One way to other arenas."""

    def listen(self) -> bytes:
        """Serve from now on, in threads; the address. Raises OSError, MissingLibrary."""

    def read(
        self,
        address: bytes,
        ask: SlotsAsked,
        slots: Sequence[int],
        deadline_s: float,
        landed: Callable[[int], None],
    ) -> None:
        """Copy the slots of `ask` to `slots`; `landed` is called with the number of each that is
        there. Blocks. Raises Unreachable, ReadRefused, TimeoutError, OSError."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(SlotsAsked).decode


def send_question(connection: socket.socket, ask: SlotsAsked, deadline_s: float) -> None:
    """SlotsAsked, and return when the answer is yes. Raises ReadRefused, TimeoutError, OSError."""
    data = _encode(ask)
    limit(connection, deadline_s)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def limit(connection: socket.socket, deadline_s: float) -> None:
    """Raises TimeoutError when the deadline is over."""
    rest_s = deadline_s - monotonic_s()
    if rest_s <= 0:
        raise TimeoutError
    connection.settimeout(rest_s)


def receive(connection: socket.socket, target: memoryview, deadline_s: float) -> None:
    """Fill `target`. Raises TimeoutError, OSError."""
    while target:
        limit(connection, deadline_s)
        count = connection.recv_into(target)
        if not count:
            raise ConnectionError("the source has closed the connection")
        target = target[count:]


class Listener:
    """Answers the questions of peers, a thread each."""

    def __init__(
        self,
        server: socket.socket,
        arena: MappedArena,
        leases: ServedLeases,
        is_welcome: Callable[[socket.socket], bool],
        send: Callable[[socket.socket, SlotsAsked], None],
    ) -> None:
        """send: the answer to a question that is allowed."""
        self._server = server
        self._arena = arena
        self._leases = leases
        self._is_welcome = is_welcome
        self._send = send
        self._places = threading.BoundedSemaphore(MOST_PEERS)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="kv accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                # of one peer, or of too many open files: others go on
                logger.warning("a reader of KV was not accepted: %s", error)
                threading.Event().wait(0.05)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, msgspec.DecodeError):
                # the kernel's own limits: sendfile knows no other
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
                if not self._is_welcome(connection):
                    return
                while (ask := _next_question(connection)) is not None:
                    if not self.allows(ask):
                        connection.sendall(NO)
                        return
                    self._send(connection, ask)
        finally:
            self._places.release()

    def allows(self, ask: SlotsAsked) -> bool:
        fits = ask.image_bytes == self._arena.image_bytes
        return fits and self._leases.allows(ask.lease, ask.token, ask.slots)


def _next_question(connection: socket.socket) -> SlotsAsked | None:
    header = _receive_exactly(connection, LENGTH_BYTES)
    if header is None:
        return None
    length = int.from_bytes(header, "little")
    data = _receive_exactly(connection, length) if length <= _ASK_BYTES else None
    return None if data is None else _decode(data)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


def listen_for_questions(host: str, arena: MappedArena, leases: ServedLeases) -> int:
    """Answer, at the port, whether a library that knows no leases may read. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    Listener(server, arena, leases, lambda _: True, _allow).start()
    port: int = server.getsockname()[1]
    return port


def _allow(connection: socket.socket, _: SlotsAsked) -> None:
    connection.sendall(YES)


def ask_for(host: str, port: int, ask: SlotsAsked, deadline_s: float) -> None:
    """Ask such a listener. Raises Unreachable, ReadRefused, TimeoutError, OSError."""
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    except OSError as error:
        raise Unreachable(str(error)) from error
    with connection:
        send_question(connection, ask, deadline_s)
        limit(connection, deadline_s)
        if connection.recv(1) != YES:
            raise ReadRefused
