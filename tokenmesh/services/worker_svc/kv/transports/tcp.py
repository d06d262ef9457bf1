"""TcpTransport: images over TCP. The source sends pages of its arena, which it never copies."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.transports.transport import (
    YES,
    Listener,
    MappedArena,
    ReadRefused,
    SlotsAsked,
    Unreachable,
    limit,
    receive,
    send_question,
)

_CONNECT_S: Final = 1.0
_BACKLOG: Final = 64
_RUN_BYTES: Final = 8 << 20
"""Sent at a time; a lease that ends in between ends the answer."""

Place = tuple[str, int]
_decode: Final = msgspec.msgpack.Decoder(Place).decode


class TcpTransport:
    def __init__(self, arena: MappedArena, leases: ServedLeases, host: str, port: int) -> None:
        self._arena = arena
        self._leases = leases
        self._place = host, port

    def listen(self) -> bytes:
        family = socket.AF_INET6 if ":" in self._place[0] else socket.AF_INET
        server = socket.create_server(self._place, family=family, backlog=_BACKLOG)
        Listener(server, self._arena, self._leases, lambda _: True, self._send).start()
        return msgspec.msgpack.encode((self._place[0], server.getsockname()[1]))

    def read(
        self,
        address: bytes,
        ask: SlotsAsked,
        slots: Sequence[int],
        deadline_s: float,
        landed: Callable[[int], None],
    ) -> None:
        try:
            connection = socket.create_connection(_decode(address), timeout=_CONNECT_S)
        except (OSError, msgspec.DecodeError) as error:
            raise Unreachable(str(error)) from error
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_question(connection, ask, deadline_s)
            limit(connection, deadline_s)
            if connection.recv(1) != YES:
                raise ReadRefused
            for number, slot in enumerate(slots):
                receive(connection, self._arena.image(slot), deadline_s)
                landed(number)

    def _send(self, connection: socket.socket, ask: SlotsAsked) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # blocking: the timeouts of the socket are the kernel's
        connection.setblocking(True)
        connection.sendall(YES)
        size = self._arena.image_bytes
        for first, count in _runs(ask.slots, max(1, _RUN_BYTES // size)):
            if not self._leases.allows(ask.lease, ask.token, ask.slots):
                raise ConnectionError("the lease has ended")
            start, end = first * size, (first + count) * size
            while start < end:
                start += os.sendfile(connection.fileno(), self._arena.file, start, end - start)


def _runs(slots: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Neighbours: the first slot and how many."""
    first, count = slots[0] if slots else 0, 0
    for slot in slots:
        if slot == first + count and count < most:
            count += 1
            continue
        yield first, count
        first, count = slot, 1
    if count:
        yield first, count
