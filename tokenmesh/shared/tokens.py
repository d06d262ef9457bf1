"""Token ids on the wire: little-endian u32 bytes, four a token, whatever the host's byte order."""

import sys
from array import array
from collections.abc import Iterable
from struct import Struct
from typing import Final

BYTES_PER_ID: Final = 4
_MUST_SWAP: Final = sys.byteorder != "little"
pack_id: Final = Struct("<I").pack
"""It encodes one id as `pack_ids` does."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Encode ids (each in [0, 2**32)) as u32 little-endian bytes."""
    packed = array("I", ids)
    if _MUST_SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Decode what `pack_ids` made. Raises ValueError when the length is not a multiple of four."""
    packed = array("I")
    packed.frombytes(data)
    if _MUST_SWAP:
        packed.byteswap()
    return packed.tolist()


def count_ids(data: bytes) -> int:
    return len(data) // BYTES_PER_ID
