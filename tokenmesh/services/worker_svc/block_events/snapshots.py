"""Snapshots: the cache at one moment, read page by page while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.worker_svc.block_events.batches import Batches
from tokenmesh.services.worker_svc.block_events.held import Block
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import BlockEventSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, Overloaded
from tokenmesh.shared.ids import new_snapshot_id
from tokenmesh.shared.messages.blocks import BlocksRead, BlockStored


@dataclass(slots=True)
class _Snapshot:
    next_seq: int
    blocks: list[Block]
    read_s: float
    """When a page was read last, monotonic."""


class Snapshots:
    """A bounded number at a time; one that is not read for a while is dropped."""

    def __init__(self, settings: BlockEventSettings, epoch: int, block_size: int) -> None:
        self._settings = settings
        self._epoch = epoch
        self._block_size = block_size
        self._by_id: dict[str, _Snapshot] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, next_seq: int, take: Callable[[], list[Block]]) -> BlocksRead:
        """The first page of a new one. Raises Overloaded."""
        self._expire()
        if len(self._by_id) >= self._settings.max_snapshots:
            retry_after_s = self._settings.snapshot_s
            raise Overloaded("too many snapshots are being read", retry_after_s=retry_after_s)
        name = new_snapshot_id()
        self._by_id[name] = _Snapshot(next_seq, take(), monotonic_s())
        return self.read(name, 0)

    def read(self, name: str, start: int) -> BlocksRead:
        """A page. Raises NotFound for one that is over, InvalidInput for a wrong `start`."""
        self._expire()
        snapshot = self._by_id.get(name)
        if snapshot is None:
            raise NotFound("no such snapshot, or it was not read for too long", param="snapshot")
        if not 0 <= start <= len(snapshot.blocks):
            raise InvalidInput("start lies outside of the snapshot", param="start")
        snapshot.read_s = monotonic_s()
        stored, end = self._page(snapshot.blocks, start)
        is_last = end == len(snapshot.blocks)
        if is_last:
            del self._by_id[name]
        return BlocksRead(
            epoch=self._epoch,
            next_seq=snapshot.next_seq,
            snapshot=name,
            start=start,
            next_start=None if is_last else end,
            num_blocks=len(snapshot.blocks),
            blocks=stored,
        )

    def _page(self, blocks: list[Block], start: int) -> tuple[list[BlockStored], int]:
        page = Batches(self._block_size, self._settings.batch_bytes)
        end = start
        while end < len(blocks) and not page.has_full:
            page.add(blocks[end])
            end += 1
        events = [event for batch in page.take() for event in batch]
        return [event for event in events if isinstance(event, BlockStored)], end

    def _expire(self) -> None:
        oldest_s = monotonic_s() - self._settings.snapshot_s
        for name in [name for name, each in self._by_id.items() if each.read_s < oldest_s]:
            del self._by_id[name]
