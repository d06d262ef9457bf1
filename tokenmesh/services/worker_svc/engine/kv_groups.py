"""KvGroups: which block tables a request has. One for all layers, or one for layers that see
everything and one more for each group of layers that see a window, which free what is behind it.

All groups take their blocks from one pool, since they have the same number of layers: a block is
one page in each layer of its group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Sizes in tokens, unless they say blocks."""

    block_size: int
    max_chunk: int = 1
    """Most tokens that one row computes in a step."""
    window: int = 0
    """Positions a query of the window groups sees, its own included."""
    num_windowed: int = 0
    """Window groups."""

    @classmethod
    def of(cls, windows: Sequence[int | None], block_size: int, max_chunk: int) -> Self:
        """windows: of each group, see `Runner.windows`."""
        window = windows[1] if len(windows) > 1 else None
        return cls(block_size, max_chunk, window or 0, len(windows) - 1)

    @property
    def growth(self) -> int:
        """Blocks that a decoding request takes at a block's end."""
        return 1 + self.num_windowed

    @property
    def most_held(self) -> int:
        """Blocks that a window group ever holds: a chunk, and the window before its first token."""
        return -(-(self.window - 1 + self.max_chunk) // self.block_size) + 1

    @property
    def hit_blocks(self) -> int:
        """Blocks before a position at a block's start that a query there sees."""
        return -(-(self.window - 1) // self.block_size)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens in one group."""
        return -(-num_tokens // self.block_size)

    def needed(self, num_tokens: int) -> int:
        """Blocks that a sequence needs at most, in all groups."""
        whole = self.blocks_of(num_tokens)
        return whole + self.num_windowed * min(whole, self.most_held)

    def longest(self, num_blocks: int) -> int:
        """The longest sequence that so many blocks are enough for."""
        whole = num_blocks // self.growth
        if self.num_windowed and whole >= self.most_held:
            whole = num_blocks - self.num_windowed * self.most_held
        return whole * self.block_size

    def behind(self, start: int) -> int:
        """Leading blocks of a window group that no query from position `start` on sees."""
        return max(0, start - self.window + 1) // self.block_size
