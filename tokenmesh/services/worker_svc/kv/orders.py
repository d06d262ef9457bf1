"""Define what a worker and its transfer process say to each other, over the pipes of the latter.

Each is msgpack behind its length in 4 bytes, little-endian.
"""

from typing import BinaryIO, Final

import msgspec
import xxhash

MASTER_PARAM: Final = "worker.kv.mooncake_master"
"""The setting that names the master of a Mooncake store."""
LENGTH_BYTES: Final = 4
SUM_BYTES: Final = 8
"""An image's checksum, xxh3_64, takes so many."""
MOST_SLOTS: Final = 8192
"""One order, and one question to another transfer process, has at most so many."""


class Setup(msgspec.Struct, frozen=True):
    """The argument of the process, as JSON. The arena is the file that it inherits."""

    file: int
    num_slots: int
    image_bytes: int
    transports: tuple[str, ...]
    host: str
    port: int
    scope: bytes = b""
    disk_dir: str | None = None
    disk_bytes: int = 0
    mooncake_master: str = ""
    mooncake_bytes: int = 0


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Let who has the token read these slots too. Answered with Served."""

    job: int
    lease: int
    token: bytes
    slots: list[int]


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """End reads by this lease. Answered with Served."""

    job: int
    lease: int


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy slots of another worker's arena to slots of this one. Answered with Ended."""

    job: int
    addresses: dict[str, bytes]
    """They are those of the other transfer process, by transport."""
    lease: int
    token: bytes
    remote: list[int]
    slots: list[int]
    sums: bytes
    limit_s: float


class Find(msgspec.Struct, frozen=True, tag=True):
    """Ask how many of the first of these keys stores have. Answered with FoundStored."""

    job: int
    keys: list[bytes]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Copy images from stores to slots. Answered with Ended."""

    job: int
    keys: list[bytes]
    slots: list[int]
    limit_s: float


class Put(msgspec.Struct, frozen=True, tag=True):
    """Have stores keep the images in these slots. Answered with Ended."""

    job: int
    keys: list[bytes]
    slots: list[int]
    limit_s: float


class Started(msgspec.Struct, frozen=True, tag=True):
    addresses: dict[str, bytes]
    """By transport."""


class MemoryTaken(msgspec.Struct, frozen=True, tag=True):
    """The arena has all of its memory."""


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    reason: str
    param: str
    """The setting that says so."""


class Served(msgspec.Struct, frozen=True, tag=True):
    job: int
    sums: bytes


class FoundStored(msgspec.Struct, frozen=True, tag=True):
    job: int
    count: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A read is over: it writes no more. Or a Put, which does not read any more."""

    job: int
    are_good: list[bool]
    """It tells of each slot whether it holds what it should."""
    transport: str = ""
    """Or the stores."""
    seconds: float = 0.0
    reason: str = ""
    """Why some are not: timeout, refused, lost, checksum or missing."""
    num_written: int = 0
    """Images that a Put has written."""


Order = Serve | Revoke | Read | Find | Get | Put
Report = Started | MemoryTaken | CannotStart | Served | FoundStored | Ended

_encoder: Final = msgspec.msgpack.Encoder()
decode_order: Final = msgspec.msgpack.Decoder(Order).decode
decode_report: Final = msgspec.msgpack.Decoder(Report).decode


def framed(message: Order | Report) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def read_frame(source: BinaryIO) -> bytes | None:
    """Blocks; None at the end."""
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "little")) if length else None


def checksum(image: memoryview) -> bytes:
    digest: bytes = xxhash.xxh3_64_digest(image)
    return digest
