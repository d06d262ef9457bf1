"""Batches of block events: built from single changes, encoded, and kept for replay."""

from collections import deque
from typing import Final

from tokenmesh.services.worker_svc.block_events.held import Block
from tokenmesh.shared.messages.blocks import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored

_BYTES_PER_HASH: Final = 20
_BYTES_PER_KEY: Final = 40
_BYTES_PER_EVENT: Final = 160


class Batches:
    """Blocks that follow one another become one `BlockStored`, hashes one `BlockRemoved`."""

    def __init__(self, block_size: int, max_bytes: int) -> None:
        """max_bytes: about the size from which on a batch takes nothing more."""
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._done: list[list[BlockEvent]] = []
        self._events: list[BlockEvent] = []
        self._run: list[Block] = []
        self._removed: list[bytes] = []
        self._num_bytes = 0

    @property
    def has_full(self) -> bool:
        """Return whether a batch is full, or more."""
        return bool(self._done)

    def add(self, step: Block | bytes | None) -> None:
        """One item of `HeldBlocks.apply`."""
        if isinstance(step, Block):
            self._add_block(step)
        elif step is None:
            self._end_event()
            self._events.append(AllBlocksCleared())
            self._num_bytes += _BYTES_PER_EVENT
        else:
            if self._run:
                self._end_event()
            self._removed.append(step)
            self._num_bytes += _BYTES_PER_HASH
        if self._num_bytes >= self._max_bytes:
            self._end_batch()

    def take(self) -> list[list[BlockEvent]]:
        """All batches, none of them empty."""
        self._end_batch()
        done, self._done = self._done, []
        return done

    def _add_block(self, block: Block) -> None:
        before = self._run[-1] if self._run else None
        is_next = (
            before is not None and block.parent == before.block_hash and block.lora == before.lora
        )
        if not is_next:
            self._end_event()
        self._run.append(block)
        self._num_bytes += _BYTES_PER_HASH + len(block.token_ids)
        for key in block.extras:
            self._num_bytes += _BYTES_PER_KEY + len(key.value)

    def _end_event(self) -> None:
        if self._run:
            self._events.append(self._stored(self._run))
            self._run = []
        elif self._removed:
            self._events.append(BlockRemoved(block_hashes=self._removed))
            self._removed = []
        self._num_bytes += _BYTES_PER_EVENT

    def _stored(self, run: list[Block]) -> BlockStored:
        has_extras = any(block.extras for block in run)
        return BlockStored(
            block_hashes=[block.block_hash for block in run],
            parent_block_hash=run[0].parent,
            token_ids=b"".join(block.token_ids for block in run),
            block_size=self._block_size,
            lora_name=run[0].lora,
            extra_keys=[block.extras for block in run] if has_extras else [],
        )

    def _end_batch(self) -> None:
        self._end_event()
        if self._events:
            self._done.append(self._events)
        self._events = []
        self._num_bytes = 0


class ReplayBuffer:
    """Bounded in batches and in bytes; the newest is always there."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()
        self.num_bytes = 0
        self.next_seq = 0
        """This is the number of the batch to come."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest_seq(self) -> int:
        """Return the number of the first batch that is held; `next_seq` while there is none."""
        return self.next_seq - len(self._batches)

    def add(self, batch: bytes) -> None:
        """Hold a batch, which has the number `next_seq`; the oldest may have to go."""
        self._batches.append(batch)
        self.num_bytes += len(batch)
        self.next_seq += 1
        while len(self._batches) > 1 and self._is_over():
            self.num_bytes -= len(self._batches.popleft())

    def _is_over(self) -> bool:
        return len(self._batches) > self._max_batches or self.num_bytes > self._max_bytes

    def holds(self, seq: int) -> bool:
        """Return whether all from `seq` on are there; so they are when `seq` is the next one."""
        return self.oldest_seq <= seq <= self.next_seq

    def page(self, seq: int, max_bytes: int) -> list[bytes]:
        """Batches from a held `seq` on, up to about `max_bytes`, at least one if there is any."""
        found: list[bytes] = []
        num_bytes = 0
        # a deque finds its n-th entry from the nearer end
        for at in range(seq - self.oldest_seq, len(self._batches)):
            batch = self._batches[at]
            num_bytes += len(batch)
            if found and num_bytes > max_bytes:
                break
            found.append(batch)
        return found
