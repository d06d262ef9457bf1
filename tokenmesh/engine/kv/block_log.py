"""The block log: which blocks can be found, as changes for subscribers outside of the mesh."""

from dataclasses import dataclass

from tokenmesh.engine.request.request import Request


@dataclass(slots=True, eq=False)
class StoredBlocks:
    """Blocks [first, end) of a request can be found."""

    request: Request
    hashes: list[bytes]
    """The request's when this was written; they may be others by now."""
    salt: str | None
    first: int
    end: int


@dataclass(slots=True, eq=False)
class RemovedBlocks:
    """Blocks can no longer be found."""

    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class ClearedBlocks:
    """Nothing can be found any more."""


BlockChange = StoredBlocks | RemovedBlocks | ClearedBlocks


class BlockLog:
    """Changes since the last `take`."""

    def __init__(self) -> None:
        self._changes: list[BlockChange] = []

    def stored(self, request: Request, index: int) -> None:
        """A block of the request can be found from now on."""
        last = self._changes[-1] if self._changes else None
        is_next = (
            isinstance(last, StoredBlocks)
            and last.hashes is request.kv.hashes
            and last.end == index
        )
        if isinstance(last, StoredBlocks) and is_next:
            last.end += 1
        else:
            stored = StoredBlocks(request, request.kv.hashes, request.block_salt, index, index + 1)
            self._changes.append(stored)

    def removed(self, block_hash: bytes) -> None:
        """A block can no longer be found."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, RemovedBlocks):
            last.hashes.append(block_hash)
        else:
            self._changes.append(RemovedBlocks([block_hash]))

    def cleared(self) -> None:
        """Nothing can be found any more; earlier changes are dropped."""
        self._changes = [ClearedBlocks()]

    def take(self) -> list[BlockChange]:
        """Hand the changes over; what comes later goes into others."""
        changes, self._changes = self._changes, []
        return changes
