"""PrefixCache: equal beginnings share blocks.

A block's hash covers its parent's hash, its token ids and its extras, so it stands for everything
up to its end. Blocks are registered when they are SCHEDULED and all of their tokens are known:
within a step every row's KV is written before any row attends, layer by layer, so a request
admitted in the same step may already use them. Blocks that were not computed must be retracted.

Where rows keep states, blocks are worth nothing without the state behind the last of them: a hit
ends at a saved state, and only blocks before one are reported. A model that keeps nothing but
states needs no blocks for a hit.

Blocks that the pool has lost may still be in the host tier. They are copied back into blocks that
the request has, as its prefill comes to them. A block can be found while either place has it.
"""

from collections.abc import Iterable

import msgspec

from tokenmesh.engine.kv.block_log import BlockLog
from tokenmesh.engine.kv.block_pool import HASH_BYTES, BlockPool, KvGroups
from tokenmesh.engine.kv.host_tier import HostTier
from tokenmesh.engine.kv.keys import BlockKeys
from tokenmesh.engine.kv.lookup import PrefixLookup
from tokenmesh.engine.kv.prompt_images import PromptImages
from tokenmesh.engine.kv.reports import CacheReports
from tokenmesh.engine.kv.route_ledger import RouteLedger
from tokenmesh.engine.kv.saved_states import SavedStates
from tokenmesh.engine.plan import SavedState
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import NO_IMAGES, HostImages


class Registered(msgspec.Struct, frozen=True, gc=False):
    """A block that can be found although the step that fills it has not ended."""

    row: int
    """The row that fills it in that step."""
    block: int
    key: bytes
    """Its hash, and its group's number if that is not the first."""


class PrefixCache:
    """Finds and registers the blocks of requests. When disabled it finds nothing."""

    def __init__(
        self,
        num_blocks: int,
        groups: KvGroups,
        *,
        enabled: bool,
        route_tokens: int = 0,
        log: BlockLog | None = None,
        states: SavedStates | None = None,
        kv_code: str = "",
        images: HostImages = NO_IMAGES,
        has_store: bool = False,
    ) -> None:
        """num_blocks: with the null block. route_tokens: of a route block; 0: there is no index.
        log: of changes. states: None where rows keep none; then there may be window groups and a
        host tier. kv_code: the 8-bit type of the KV cache. images: room of the host tier.
        has_store: of its images."""
        assert states is None or not (groups.num_windowed or images.slots)
        self._enabled = enabled
        self._states = states if enabled else None
        has_routes, has_log = enabled and route_tokens > 0, enabled and log is not None
        is_followed = has_routes or has_log or self._states is not None
        self.pool = BlockPool(num_blocks, self._note_forgotten if is_followed else None)
        self.groups = groups
        """It says which tables requests have."""
        self._block_size = size = groups.block_size
        self.keys = BlockKeys(size, groups.num_windowed, kv_code)
        self._marks = self.keys.marks
        self._lookup = PrefixLookup(self.pool, groups, self._marks, self._states)
        has_host = enabled and images.slots > 0
        self.host = None
        if has_host:
            self.host = HostTier(images.slots, self._note_no_image, has_store=has_store)
        self.images = PromptImages(self.host, self.pool, self.keys, images.num_bytes)
        is_there = self._is_there if states is None else states.reaches
        routes = RouteLedger(is_there, size, route_tokens) if has_routes else None
        self.reports = CacheReports(routes, log if has_log else None)

    def find(self, request: Request) -> list[list[int]]:
        """The longest run of known blocks from the start, of each group; not yet held by the
        request. A window group needs the last of them only; before those stands the null block.
        Where rows keep states, the run ends at a saved one.

        The last known token is never among them, since it must be computed to draw the next one.
        A request that still owes prompt logprobs needs every position computed.
        """
        # blocks found before a preemption may be evicted
        request.kv.num_routed = request.kv.num_matched = 0
        self.keys.choose_side(request)
        if not self.may_skip(request):
            return [[], *([] for _ in self._marks)]
        num_blocks = (request.num_known - 1) // self._block_size
        self.keys.hash_up_to(request, num_blocks)
        hashes = request.kv.hashes[:num_blocks]
        found = self._lookup.known(hashes)
        if self._states is not None:
            request.kv.num_matched = len(found) * self._block_size
        return self._lookup.usable(hashes, found)

    def may_skip(self, request: Request) -> bool:
        """Return whether it may use what others have computed."""
        return self._enabled and not request.computes_all

    def register(
        self, request: Request, start: int, end: int, *, in_step: bool = True
    ) -> list[Registered]:
        """Positions [start, end) are being computed: the blocks they fill can be found.

        All tokens before `end` must be known. Where the content is known already, the older
        block stays and nothing is registered. `in_step` False: they were computed by a step that
        has landed, so the state behind them is not there any more.
        """
        first, last = start // self._block_size, end // self._block_size
        if not self._enabled or first == last or request.spec.is_whole:
            return []
        assert end <= len(request.token_ids), "a block is published before its tokens are known"
        self.keys.hash_up_to(request, last)
        registered = []
        row, kv = request.place.row, request.kv
        for index in range(first, last):
            block, block_hash = kv.blocks[index], kv.hashes[index]
            if self.pool.register(block, block_hash):
                registered.append(Registered(row, block, block_hash))
                if self._states is None and not self.images.was_reported(block_hash):
                    self.reports.stored(request, index)
            if not self._marks:
                continue
            for mark, table in zip(self._marks, kv.windowed, strict=True):
                if self.pool.register(table[index], block_hash + mark):
                    registered.append(Registered(row, table[index], block_hash + mark))
        if self.host is not None:
            for each in registered:
                self.host.save(each.key, each.block)
        if self._states is not None:
            if in_step:
                self._save_state(self._states, request, start, end)
        else:
            self.reports.note_routes(request, end)
        return registered

    def take_saved(self) -> list[SavedState]:
        """States to be saved when the step at hand ends. They can be found now."""
        return self._states.take_saved() if self._states is not None else []

    def cut(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next known tokens one chunk computes, so that it ends at a
        border."""
        if self._states is None:
            return num_tokens
        start, known, matched = request.num_computed, request.num_known, request.kv.num_matched
        return self._states.borders.cut(num_tokens, start, known, matched)

    def take_state(self, request: Request, num_hits: int) -> SavedState | None:
        """The state that the request's row begins with after a hit; None: with none."""
        if self._states is None or not num_hits:
            return None
        saved = self._states.find(request.kv.hashes[num_hits - 1])
        assert saved is not None, "a hit ends at a saved state"
        self._states.use(saved)
        return saved

    def _save_state(self, states: SavedStates, request: Request, start: int, end: int) -> None:
        """Have the state behind position `end` saved where it is worth it and could be found."""
        if states.borders.after(start, request.num_known, request.kv.num_matched) != end:
            return
        hashes = request.kv.hashes[: end // self._block_size]
        if states.knows(hashes[-1]):
            return
        if states.needs_blocks and None in map(self.pool.find, hashes):
            return
        gained, lost = states.save(request.place.row, hashes)
        self.reports.hide(lost)
        for index in gained:
            self.reports.stored(request, index)
        # an earlier state of the request may be evicted
        request.kv.num_routed = 0
        self.reports.note_routes(request, end)

    def retract_states(self, saved: Iterable[SavedState], row: int) -> None:
        """A row's positions were not computed after all, and its states not saved."""
        for each in saved:
            if each.row == row and self._states is not None:
                self.reports.hide(self._states.drop(each))

    def forget_all(self) -> None:
        """Nothing can be found any more."""
        self.pool.forget_all()
        self.images.drop_all()
        if self._states is not None:
            self._states.drop_all()
        self.reports.clear()

    def retract(self, registered: Iterable[Registered], row: int) -> list[int]:
        """A row's positions were not computed after all; its blocks that others may have read."""
        blocks = [each.block for each in registered if each.row == row]
        for each in registered:
            # the block may have been given away since, and have other content
            if each.row == row and self.pool.find(each.key) == each.block:
                self.pool.forget(each.block)
            if each.row == row and self.host is not None:
                self.host.discard(each.key)
        return blocks

    def _is_there(self, key: bytes) -> bool:
        """Return whether the pool or the host tier has a block, so that a request need not compute
        it."""
        return self.pool.find(key) is not None or (self.host is not None and self.host.has(key))

    def _note_forgotten(self, block_hash: bytes) -> None:
        if len(block_hash) > HASH_BYTES:
            return  # of a window group: without it a hit is shorter than the index expects
        if self._states is None:
            if not self._is_there(block_hash):
                self.reports.hide((block_hash,))
        elif self._states.needs_blocks:
            self.reports.hide(self._states.forget_block(block_hash))

    def _note_no_image(self, key: bytes) -> None:
        self.images.forget_load(key)
        if len(key) == HASH_BYTES and not self._is_there(key):
            self.reports.hide((key,))
