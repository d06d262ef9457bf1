"""KvBytes: what a KV cache takes of the device's memory."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KvBytes:
    """It holds what a KV cache takes of the device's memory."""

    block: int = 0
    """This is the size of one block, of any group."""
    row: int = 0
    """States of one row, whatever its length."""
    is_on_host: bool = False
    """It tells whether it is host memory, which is taken as blocks are first used."""


NO_BYTES: Final = KvBytes()
