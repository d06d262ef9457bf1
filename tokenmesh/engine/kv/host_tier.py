"""HostTier: which slot of host memory holds the image of which block.

An image is a block's bytes of all layers, under the key that the pool finds the block by. A slot is

free      it holds nothing;
saving    a step in flight copies a block into it; ready when that step has landed;
loading   the load that it was reserved for writes it, and no other until that load is over;
ready     its image can be found. It gives way to another one, the least recently used first,
          unless it is pinned or a step in flight reads it.

A slot that a step in flight reads or writes is never given away, since loads do not wait for steps.
Ints and dicts only: the copies are entries of a step's plan. Engine thread only.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tokenmesh.engine.kv.block_pool import BlockPool

SAVED_BYTES: Final = 16 << 20
"""A step saves at most so much, or one image: the blocks of a long prompt are copied bit by bit."""
LOAD_SHARE: Final = 0.5
"""At most this share of the slots is loading: the others serve what is computed here."""


class HostStats(msgspec.Struct, frozen=True, gc=False):
    """It holds what a host tier holds and has done."""

    slots: Mapping[str, int]
    """By state."""
    saved: int
    """Images, since the start."""
    filled: int
    """Blocks, likewise."""


class HostTier:
    """Every slot is in one state; a key has at most one slot, or waits to be saved."""

    def __init__(
        self,
        num_slots: int,
        on_forget: Callable[[bytes], object] = lambda key: None,
        *,
        has_store: bool = False,
    ) -> None:
        """on_forget: called with each key that `has` was true of, and is no longer. has_store:
        whether `take_unstored` is called."""
        self.num_slots = num_slots
        self._on_forget = on_forget
        self._most_loading = int(LOAD_SHARE * num_slots)
        self._free = list(range(num_slots - 1, -1, -1))
        self._ready: dict[bytes, int] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        """Keys of ready slots that may give way, the first one first."""
        self._holds: Counter[bytes] = Counter()
        """By key of a ready slot that may not: pins, and steps in flight that read it."""
        self._wanted: OrderedDict[bytes, int] = OrderedDict()
        """Blocks to be saved, by key, oldest first."""
        self._saving: dict[bytes, int] = {}
        self._writes: defaultdict[int, list[tuple[bytes, int]]] = defaultdict(list)
        """By step in flight: keys and slots that it saves."""
        self._reads: defaultdict[int, list[bytes]] = defaultdict(list)
        """By step in flight: keys that it reads."""
        self._loading: dict[bytes, int] = {}
        self._has_store = has_store
        self._unstored: OrderedDict[bytes, None] = OrderedDict()
        """Keys of ready images that no store was given, oldest first."""
        self._num_saved = self._num_filled = 0

    def has(self, key: bytes) -> bool:
        """Return whether its image is here, or is being saved."""
        return key in self._ready or key in self._saving

    def is_coming(self, key: bytes) -> bool:
        """Return whether its image is being saved or loaded."""
        return key in self._saving or key in self._loading

    @property
    def stats(self) -> HostStats:
        return HostStats(self.states, self._num_saved, self._num_filled)

    @property
    def states(self) -> dict[str, int]:
        """Return how many slots are in each state."""
        num_saving = sum(map(len, self._writes.values()))
        counts = {"saving": num_saving, "loading": len(self._loading), "ready": len(self._ready)}
        return {"free": len(self._free), **counts}

    def find(self, key: bytes) -> int | None:
        """The slot of a ready image. It stays there while `read` or `pin` holds it."""
        return self._ready.get(key)

    def read(self, key: bytes, step: int) -> int:
        """The slot of a ready image that a step reads: it is kept until that step has landed."""
        self._hold(key)
        self._num_filled += 1
        self._reads[step].append(key)
        return self._ready[key]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Images of one prompt were used, in its order: tails give way before heads."""
        for key in reversed(keys):
            if key in self._evictable:
                self._evictable.move_to_end(key)

    def save(self, key: bytes, block: int) -> None:
        """Save a block when `take_saves` comes to it; nothing happens where its image is here."""
        if self.has(key) or key in self._loading:
            return
        self._wanted.pop(key, None)
        self._wanted[key] = block
        if len(self._wanted) > self.num_slots:
            # the oldest would give way to the others anyway
            self._wanted.popitem(last=False)

    def take_saves(self, step: int, pool: BlockPool, most: int) -> list[tuple[int, int]]:
        """(block, slot) of at most so many blocks, to be copied at the end of the step.

        To be called when the step's blocks are allocated: one that it gives away is not saved.
        """
        saves: list[tuple[int, int]] = []
        while self._wanted and len(saves) < most:
            key, block = next(iter(self._wanted.items()))
            if pool.find(key) == block:
                slot = self._take_slot()
                if slot is None:
                    break
                self._saving[key] = slot
                self._writes[step].append((key, slot))
                saves.append((block, slot))
            del self._wanted[key]
        return saves

    @property
    def has_wanted(self) -> bool:
        """Return whether blocks wait to be saved."""
        return bool(self._wanted)

    def give_up_saves(self) -> None:
        """Blocks that wait to be saved are not, unless they are used again."""
        self._wanted.clear()

    def landed(self, step: int, *, ok: bool = True) -> list[bytes]:
        """A step has ended, and what it did not compute was discarded; keys that are ready now.

        ok: whether it did what was planned; if not, nothing that it saved is worth anything.
        """
        ready = []
        for key in reversed(self._reads.pop(step, ())):
            self._let_go(key)
        for key, slot in reversed(self._writes.pop(step, ())):
            # one that was discarded may be saved anew by a later step
            is_wanted = self._saving.get(key) == slot
            if is_wanted:
                del self._saving[key]
            if ok and is_wanted:
                self._ready[key] = slot
                self._evictable[key] = None
                ready.append(key)
                self._num_saved += 1
                if self._has_store:
                    self._unstored[key] = None
                continue
            self._free.append(slot)
            if is_wanted:
                self._on_forget(key)
        return ready

    def discard(self, key: bytes) -> None:
        """The block under this key was not computed after all: its image is worth nothing.

        An image that is ready was saved by a step that has landed, or loaded: it is good. A block
        that waits to be saved is looked for in the pool first, and not found.
        """
        if self._saving.pop(key, None) is not None:
            self._on_forget(key)

    def take_unstored(self, most: int) -> list[bytes]:
        """Keys of at most so many images that no store was given; one that fails is not named
        again."""
        count = min(most, len(self._unstored))
        return [self._unstored.popitem(last=False)[0] for _ in range(count)]

    @property
    def most_loading(self) -> int:
        return self._most_loading

    def reserve(self, keys: Sequence[bytes], most: int | None = None) -> list[int | None]:
        """Slots for a load of these images, in order; None for one that is here, and pinned now.

        Fewer where there are not enough slots, where one is on its way already, or where more than
        `most` would be loaded.
        """
        slots: list[int | None] = []
        rest = len(keys) if most is None else most
        for key in keys:
            if key in self._ready:
                self._hold(key)
                slots.append(None)
                continue
            if key in self._saving or key in self._loading or not rest:
                break
            slot = self._take_slot() if len(self._loading) < self._most_loading else None
            if slot is None:
                break
            self._wanted.pop(key, None)
            self._loading[key] = slot
            slots.append(slot)
            rest -= 1
        return slots

    def finish(
        self, keys: Sequence[bytes], are_good: Sequence[bool], *, is_stored: bool = False
    ) -> None:
        """A load is over and writes these slots no more. Good images can be found now.
        is_stored: they come from a store."""
        for key, is_good in reversed(list(zip(keys, are_good, strict=True))):
            slot = self._loading.pop(key)
            if is_good:
                self._ready[key] = slot
                self._evictable[key] = None
                if self._has_store and not is_stored:
                    self._unstored[key] = None
            else:
                self._free.append(slot)

    def pin(self, keys: Iterable[bytes]) -> list[bytes]:
        """Keep images until `unpin`; those of the keys that are ready."""
        pinned = [key for key in keys if key in self._ready]
        for key in pinned:
            self._hold(key)
        return pinned

    def unpin(self, keys: Collection[bytes]) -> None:
        """Give up one pin of each."""
        for key in reversed(list(keys)):
            self._let_go(key)

    def drop_all(self) -> None:
        """No image can be found any more. There must be no step in flight, load or pin."""
        assert not self._writes, "a step is saving"
        assert not self._loading, "a load is running"
        assert not self._holds, "an image is held"
        self._free += self._ready.values()
        self._ready.clear()
        self._evictable.clear()
        self._wanted.clear()
        self._unstored.clear()

    def _hold(self, key: bytes) -> None:
        self._holds[key] += 1
        self._evictable.pop(key, None)

    def _let_go(self, key: bytes) -> None:
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
            self._evictable[key] = None

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._evictable:
            return None
        key, _ = self._evictable.popitem(last=False)
        slot = self._ready.pop(key)
        self._unstored.pop(key, None)
        self._on_forget(key)
        return slot
