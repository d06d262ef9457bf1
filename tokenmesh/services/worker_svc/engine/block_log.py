"""BlockLog: what came into the prefix cache and what left it, in order, for subscribers outside.

On the engine's path it only appends; the event loop makes messages of it. It may read a request
that the engine still works on: ids and hashes of blocks that were registered never change.
"""

from dataclasses import dataclass

from tokenmesh.services.worker_svc.engine.request import Request


@dataclass(slots=True, eq=False)
class Stored:
    """Blocks [first, end) of a request can be found."""

    request: Request
    hashes: list[bytes]
    """The request's when this was written; they may be others by now."""
    salt: str | None
    first: int
    end: int


@dataclass(slots=True, eq=False)
class Removed:
    """Blocks can no longer be found."""

    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class Cleared:
    """Nothing can be found any more."""


BlockChange = Stored | Removed | Cleared


class BlockLog:
    """Changes since the last `take`."""

    def __init__(self) -> None:
        self._changes: list[BlockChange] = []

    def stored(self, request: Request, index: int) -> None:
        """A block of the request can be found from now on."""
        last = self._changes[-1] if self._changes else None
        is_next = isinstance(last, Stored) and last.hashes is request.hashes and last.end == index
        if isinstance(last, Stored) and is_next:
            last.end += 1
        else:
            stored = Stored(request, request.hashes, request.block_salt, index, index + 1)
            self._changes.append(stored)

    def removed(self, block_hash: bytes) -> None:
        """A block can no longer be found."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, Removed):
            last.hashes.append(block_hash)
        else:
            self._changes.append(Removed([block_hash]))

    def cleared(self) -> None:
        """Nothing can be found any more; what was stored before is not worth a word."""
        self._changes = [Cleared()]

    def take(self) -> list[BlockChange]:
        """Hand the changes over; what comes later goes into others."""
        changes, self._changes = self._changes, []
        return changes
