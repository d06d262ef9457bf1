"""Block pool: reference counts, eviction order and content hashes of KV blocks, and KV groups.

Block 0 is the null block: it receives padded writes and is never allocated.
A free block may still have content: it keeps its hash until it is allocated again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import Final, Self

NULL_BLOCK: Final = 0

HASH_BYTES: Final = 16
"""A collision would show one client another one's text: 128 bits of a cryptographic hash."""

NO_PARENT: Final = bytes(HASH_BYTES)


def digest(content: bytes) -> bytes:
    """The hash of a full block: of its parent's (NO_PARENT for the first), ids and extra keys."""
    return blake2b(content, digest_size=HASH_BYTES).digest()


@lru_cache(maxsize=8)
def block_packer(count: int) -> Callable[..., bytes]:
    """Little-endian u32, as `pack_ids`, but twice as fast for the few ids of a block."""
    return Struct(f"<{count}I").pack


class BlockPool:
    """Reference counts, the free blocks in eviction order, and a map from hash to block.

    Invariant: a block is among the free ones exactly when its count is 0; a hash maps to one block
    and that block carries the hash.
    """

    def __init__(self, num_blocks: int, on_forget: Callable[[bytes], object] | None = None) -> None:
        """on_forget: called with the hash of each block that can no longer be found."""
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing but the null block")
        self.num_blocks = num_blocks
        self._on_forget = on_forget
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        """First evicted first."""

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by hash, held or free."""
        return len(self._block_by_hash)

    def ref_count(self, block: int) -> int:
        """Return how many requests hold the block."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take blocks with a count of 1 each and no content; the caller checks `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        pop, hashes, ref_counts = self._free.popitem, self._hashes, self._ref_counts
        blocks = [pop(last=False)[0] for _ in range(count)]
        for block in blocks:
            if hashes[block] is not None:
                self.forget(block)
            ref_counts[block] = 1
        return blocks

    def allocate_one(self) -> int:
        """Take a block with a count of 1 and no content; there must be a free one."""
        block, _ = self._free.popitem(last=False)
        if self._hashes[block] is not None:
            self.forget(block)
        self._ref_counts[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `find` returned once more, free or not."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold of each block of a table, in table order.

        Tails are evicted before heads, since a prefix is worth more than what follows it; a block
        without content is worth nothing and goes first.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} is freed twice"
            self._ref_counts[block] = count
            if count == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Make a held block findable; False where the content is known already: the older stays."""
        if block_hash in self._block_by_hash or self._hashes[block] is not None:
            return False
        self._block_by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def find(self, block_hash: bytes) -> int | None:
        """The block with that content; held only after `share`."""
        return self._block_by_hash.get(block_hash)

    def forget(self, block: int) -> None:
        """Make the block's content unfindable."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block] = None
            if self._on_forget is not None:
                self._on_forget(block_hash)

    def forget_all(self) -> None:
        """Make all contents unfindable; requests keep their blocks."""
        self._block_by_hash.clear()
        self._hashes = [None] * self.num_blocks


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The block tables that a request has: one for all layers, or one for layers with full
    attention and one more for each group of layers with a window, which free what is behind it.
    All groups take their blocks from one pool: a block is one page in each layer of its group.

    Sizes in tokens, unless their names say blocks."""

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
