"""PromptImages: the host tier as requests use it, block by block of their prompts."""

from collections.abc import Iterable

from tokenmesh.engine.kv.block_pool import HASH_BYTES, NULL_BLOCK, BlockPool
from tokenmesh.engine.kv.host_tier import SAVED_BYTES, HostTier
from tokenmesh.engine.kv.keys import BlockKeys
from tokenmesh.engine.request.request import Request


class PromptImages:
    """Images of the blocks of requests, in all groups. Without a host tier there are none."""

    def __init__(
        self, host: HostTier | None, pool: BlockPool, keys: BlockKeys, num_bytes: int
    ) -> None:
        """num_bytes: of one image."""
        self._host = host
        self._pool = pool
        self._size = keys.block_size
        self._marks = (b"", *keys.marks)
        self._loaded: set[bytes] = set()
        """Hashes of images that a load brought and that no report has named."""
        self._most_saves = max(1, SAVED_BYTES // max(1, num_bytes))

    def count(self, request: Request, first: int, most: int) -> int:
        """Return how many of its blocks from `first` on, at most so many, have images in all
        groups; the last known token is in none of them."""
        if self._host is None or request.spec.is_whole or request.computes_all:
            return 0
        end = min((request.num_known - 1) // self._size, first + most)
        count = 0
        for block_hash in request.kv.hashes[first:end]:
            if any(self._host.find(block_hash + mark) is None for mark in self._marks):
                break
            count += 1
        return count

    def fill(self, request: Request, first: int, count: int, step: int) -> list[tuple[int, int]]:
        """Blocks [first, first + count) of the request, and the slots that a step copies into them.

        The images must be there.
        """
        assert self._host is not None
        kv, fills = request.kv, []
        for index in range(first, first + count):
            for mark, table in zip(self._marks, (kv.blocks, *kv.windowed), strict=True):
                fills.append((table[index], self._host.read(kv.hashes[index] + mark, step)))
        return fills

    def note_hits(self, request: Request, num_hits: int) -> None:
        """A request begins with blocks that the pool had: their images stay, or are made."""
        if self._host is None:
            return
        kv = request.kv
        for mark, table in zip(self._marks, (kv.blocks, *kv.windowed), strict=True):
            for block, block_hash in zip(table[:num_hits], kv.hashes, strict=False):
                if block != NULL_BLOCK:
                    self._host.save(block_hash + mark, block)
        self.touch(request, num_hits)

    def touch(self, request: Request, num_blocks: int) -> None:
        """Images of its first blocks were used."""
        if self._host is not None:
            hashes = request.kv.hashes[:num_blocks]
            self._host.touch([each + mark for each in hashes for mark in self._marks])

    def unpin(self, request: Request) -> None:
        """Images that were kept for the request may give way."""
        if request.kv.pins:
            assert self._host is not None
            self._host.unpin(request.kv.pins)
            request.kv.pins = []

    def take_saves(self, step: int, *, all_of_them: bool) -> list[tuple[int, int]]:
        """Blocks that are copied at the end of a step whose plan is complete but for these."""
        if self._host is None:
            return []
        most = self._pool.num_blocks if all_of_them else self._most_saves
        return self._host.take_saves(step, self._pool, most)

    @property
    def has_unsaved(self) -> bool:
        """Return whether blocks wait to be saved."""
        return self._host is not None and self._host.has_wanted

    def landed(self, step: int, *, ok: bool) -> None:
        """A step has ended, and what it did not compute was retracted."""
        if self._host is not None:
            self._host.landed(step, ok=ok)

    def note_loaded(self, keys: Iterable[bytes]) -> None:
        """A load brought images of these keys; they are reported when a request uses them."""
        self._loaded.update(
            key for key in keys if len(key) == HASH_BYTES and self._pool.find(key) is None
        )

    def was_reported(self, block_hash: bytes) -> bool:
        """Return whether a block was reported for its image; one that a load brought was not, and
        counts as reported from now on."""
        if block_hash in self._loaded:
            self._loaded.remove(block_hash)
            return False
        return self._host is not None and self._host.has(block_hash)

    def forget_load(self, key: bytes) -> None:
        """The image of a key is not there any more."""
        self._loaded.discard(key)

    def drop_all(self) -> None:
        """Nothing can be found any more."""
        if self._host is not None:
            self._host.drop_all()
        self._loaded.clear()
