"""KvExchange: which images a request lacks, and which ones others may read. Engine thread only.

A key is a block's hash, or with a mark that of a window group. The keys of a request are those of
its whole blocks before its last known token, in order, and in each block those of its groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.request.request import Request


class Wanted(NamedTuple):
    """It holds what a request lacks."""

    num_blocks: int
    last_key: bytes
    hashes: bytes
    """All hashes, of a prompt with embeddings of a client: others do not know them; else empty."""
    num_hits: int
    """Blocks that the pool has."""
    first: int
    """The number of the first of `keys` among all keys of the request."""
    keys: Sequence[bytes]
    """The next ones that are to be loaded or are here already."""
    slots: Sequence[int | None]
    """Reserved for the load of each; None: it is here."""
    is_awaited: bool
    """The image of the next key is on its way for another request."""


class Lacking(NamedTuple):
    """Images that neither pool nor host tier has."""

    keys: Sequence[bytes]
    """The next ones of a request, as many as may be loaded at a time."""
    is_awaited: bool
    """The image behind them is on its way for another request."""


class KvExchange:
    def __init__(self, cache: PrefixCache, block_size: int) -> None:
        self._cache = cache
        self._size = block_size

    @property
    def _num_groups(self) -> int:
        return 1 + len(self._cache.keys.marks)

    def keys_of(
        self, request: Request, num_blocks: int, known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the keys of its first blocks. known: their hashes; none: they are found here."""
        # a request of another worker was not seen here before
        self._cache.keys.choose_side(request)
        if known:
            request.kv.hashes = list(known)
        self._cache.keys.hash_up_to(request, num_blocks)
        marks = (b"", *self._cache.keys.marks)
        return [each + mark for each in request.kv.hashes[:num_blocks] for mark in marks]

    def lacks(self, request: Request) -> Lacking:
        """Find what a load could bring now."""
        host = self._cache.host
        num_hits = len(self._cache.find(request)[0])
        num_blocks = (request.num_known - 1) // self._size
        if host is None or num_hits == num_blocks or not self._cache.may_skip(request):
            return Lacking((), is_awaited=False)
        found: list[bytes] = []
        for key in self.keys_of(request, num_blocks)[num_hits * self._num_groups :]:
            if host.find(key) is not None:
                continue
            if host.is_coming(key):
                return Lacking(found, is_awaited=True)
            if len(found) == host.most_loading:
                break
            found.append(key)
        return Lacking(found, is_awaited=False)

    def expect(self, request: Request, most: int | None = None) -> Wanted:
        """Reserve slots for what neither pool nor host tier has, at most so many; the rest is kept
        for the request until `let_go`. Fewer are reserved where there is no room."""
        host, size = self._cache.host, self._size
        num_hits = len(self._cache.find(request)[0])
        num_blocks = (request.num_known - 1) // size
        keys = self.keys_of(request, num_blocks)
        if host is None or num_hits == num_blocks or not self._cache.may_skip(request):
            return Wanted(num_blocks, b"", b"", num_hits, 0, (), (), is_awaited=False)
        hashes = request.kv.hashes[:num_blocks]
        names = hashes[-1], b"".join(hashes) if request.prepared.embeds_keys else b""
        first = num_hits * self._num_groups
        kept = len(request.kv.pins)
        slots = host.reserve(keys[first:], most)
        request.kv.pins += [
            key for key, slot in zip(keys[first:], slots, strict=False) if slot is None
        ]
        # what an earlier call kept is kept once
        host.unpin(request.kv.pins[:kept])
        del request.kv.pins[:kept]
        end = first + len(slots)
        is_awaited = end < len(keys) and host.is_coming(keys[end])
        return Wanted(
            num_blocks, *names, num_hits, first, keys[first:end], slots, is_awaited=is_awaited
        )

    def arrived(
        self,
        request: Request,
        keys: Sequence[bytes],
        are_good: Sequence[bool],
        *,
        is_stored: bool = False,
    ) -> None:
        """A load is over. Good images are kept for the request until `let_go`. is_stored: they come
        from a store."""
        host = self._cache.host
        assert host is not None
        host.finish(keys, are_good, is_stored=is_stored)
        good = [key for key, is_good in zip(keys, are_good, strict=True) if is_good]
        self._cache.images.note_loaded(good)
        request.kv.pins += host.pin(good)

    def let_go(self, request: Request) -> None:
        """The request does without the images that are kept for it."""
        self._cache.images.unpin(request)

    def lend(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of those of the keys that are here, up to the first one that is not: pinned."""
        host = self._cache.host
        assert host is not None
        slots: list[int] = []
        for key in keys:
            slot = host.find(key)
            if slot is None:
                break
            slots.append(slot)
        host.pin(keys[: len(slots)])
        return slots

    def lend_unstored(self, most: int) -> tuple[list[bytes], list[int]]:
        """Keys and slots of images that no store was given; pinned until `take_back`."""
        host = self._cache.host
        assert host is not None
        # the others stay free to give way
        keys = host.take_unstored(min(most, max(1, host.num_slots // 4)))
        return keys, self.lend(keys)

    def take_back(self, keys: Sequence[bytes]) -> None:
        """Lent slots are read no more."""
        host = self._cache.host
        assert host is not None
        host.unpin(keys)

    def slots_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of images that are lent."""
        host = self._cache.host
        assert host is not None
        found = [host.find(key) for key in keys]
        return [slot for slot in found if slot is not None]
