"""Frames between the leader and a follower: length, kind, payload."""

import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import msgspec

_HEADER: Final = struct.Struct("<IB")
_CHUNK: Final = 1 << 20
MAX_HELLO_BYTES: Final = 1 << 16
"""The bound of a frame whose sender is not known yet."""


class FrameKind(IntEnum):
    HELLO = 0
    """Up, first: who it is."""
    START = 1
    """Down: what is to be loaded."""
    PLAN = 2
    DRAWN = 3
    """Down: the tokens of a step."""
    COMMAND = 4
    DONE = 5
    """Up: a command, or the load, is carried out."""
    BEAT = 6
    """Both ways: the process runs."""
    FAILED = 7
    """Both ways, last: why the sender ends."""
    ADAPTER = 8
    """Up: an adapter is read, or cannot be."""
    READ_BY_HEAD = 9
    """Down: what a head on the leader reads of the model."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The second half of the oldest step that has begun; nothing answers it."""


class Hello(msgspec.Struct, frozen=True):
    token: str
    rank: int
    versions: dict[str, str]


class Start(msgspec.Struct, frozen=True):
    """The settings of the leader, as JSON; a follower has none of its own."""

    model: bytes
    worker: bytes
    local_world: int
    """Ranks of this host, which share its cores and its memory."""


class SleepRanks(msgspec.Struct, frozen=True, tag=True):
    level: int


class WakeRanks(msgspec.Struct, frozen=True, tag=True):
    tags: list[str]


class TakeAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read this rank's part of an adapter; plans will name it by its number."""

    number: int
    directory: str


class DropAdapters(msgspec.Struct, frozen=True, tag=True):
    """No later plan names these; nothing answers it."""

    numbers: list[int]


class MoveExpert(msgspec.Struct, frozen=True, tag=True):
    """Bring bytes [first, end) of an expert to another slot; nothing answers it."""

    layer: int
    source: int
    target: int
    swaps: bool
    first: int
    end: int


Command = SleepRanks | WakeRanks | Finish | TakeAdapter | DropAdapters | MoveExpert


class HeadRead(msgspec.Struct, frozen=True):
    """A head on the leader needs the embeddings of these tokens, or the logits of so many states,
    which the leader gives all ranks; neither: it has drafted."""

    token_ids: list[int] = []
    num_states: int = 0


class AdapterRead(msgspec.Struct, frozen=True):
    number: int
    content_hash: str = ""
    error: str = ""


class RankDone(msgspec.Struct, frozen=True):
    fingerprint: str = ""
    """It is the checkpoint's, after the load."""


class Beat(msgspec.Struct, frozen=True):
    step: int = 0
    """The last one that has ended."""
    sum_s: float = 0.0
    """Seconds in sums so far."""
    wait_s: float = 0.0
    """Seconds so far of waiting for another stage."""


class Failure(msgspec.Struct, frozen=True):
    message: str
    is_config: bool
    """It tells whether it would fail again with these settings."""


def pack_frame(kind: FrameKind, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), kind) + payload


class RankFrames:
    """Reads a connection's frames, however its bytes arrive."""

    def __init__(self, connection: socket.socket, most: int | None = None) -> None:
        """most: bytes of the largest payload that is accepted; None: any."""
        self._connection = connection
        self._most = most
        self._data = bytearray()

    def read(self) -> list[tuple[FrameKind, bytes]]:
        """Receive once; the frames that are complete. Raises EOFError at the end, OSError, and
        ValueError for bytes that are no frame."""
        received = self._connection.recv(_CHUNK)
        if not received:
            raise EOFError
        self._data += received
        return list(self._complete())

    def _complete(self) -> Iterator[tuple[FrameKind, bytes]]:
        first, data = 0, self._data
        while len(data) - first >= _HEADER.size:
            length, kind = _HEADER.unpack_from(data, first)
            if self._most is not None and length > self._most:
                raise ValueError(f"a frame of {length} bytes")
            end = first + _HEADER.size + length
            if len(data) < end:
                break
            yield FrameKind(kind), bytes(memoryview(data)[first + _HEADER.size : end])
            first = end
        del data[:first]
