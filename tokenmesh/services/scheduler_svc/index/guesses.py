"""Guesses: how many blocks most workers hold of a prompt, by the last one that began like it."""

from collections.abc import Sequence
from typing import Final

_MAX_PROMPTS: Final = 4096
_HASH_BYTES: Final = 8


class Guesses:
    """A wrong guess costs the script two questions, a right one spares it ten."""

    def __init__(self) -> None:
        self._depths: dict[bytes, int] = {}
        """By a prompt's first hash."""

    def of(self, route_hashes: bytes) -> int:
        """Blocks; 0 where nothing is known."""
        return self._depths.get(route_hashes[:_HASH_BYTES], 0)

    def note(self, route_hashes: bytes, depths: Sequence[int]) -> None:
        """What the workers were found to hold."""
        first, depth = route_hashes[:_HASH_BYTES], sorted(depths)[len(depths) // 2]
        if depth:
            if first not in self._depths and len(self._depths) >= _MAX_PROMPTS:
                del self._depths[next(iter(self._depths))]
            self._depths[first] = depth
        else:
            self._depths.pop(first, None)
