"""BlockEventStream: changes of the prefix cache, as numbered batches on the bus.

Fed by the event loop with what the engine logged; one task, `run`, publishes. The engine never
waits for it. A batch that cannot be sent stays available for replay.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from functools import partial
from typing import Final, get_args

from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.services.worker_svc.block_events.batches import Batches, ReplayBuffer
from tokenmesh.services.worker_svc.block_events.held import HeldBlocks
from tokenmesh.services.worker_svc.block_events.snapshots import Snapshots
from tokenmesh.shared import codec, subjects
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.placement import BlockEventSettings
from tokenmesh.shared.errors import BusLost, PayloadTooLarge
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.blocks import (
    BlockEvent,
    BlockEvents,
    BlockEventsReplayed,
    BlocksHeld,
    BlocksRead,
)
from tokenmesh.shared.metrics import Metrics

REPLAY_BYTES: Final = 64 * 1024 * 1024
"""The same bound in bytes."""


class BlockEventMeters:
    """Counters are fed, gauges read the ring and the snapshots."""

    def __init__(
        self,
        metrics: Metrics,
        model: ModelName,
        worker_id: WorkerId,
        ring: ReplayBuffer,
        snapshots: Sized,
        held: Sized,
    ) -> None:
        labels = {"model_name": str(model), "engine": str(worker_id)}
        by_kind = partial(metrics.counter, "block_events", **labels)
        self._events = {kind: by_kind(kind=kind.__name__) for kind in get_args(BlockEvent)}
        by_outcome = partial(metrics.counter, "block_event_batches", **labels)
        self._published, self._dropped = (
            by_outcome(outcome="published"),
            by_outcome(outcome="dropped"),
        )
        by_answer = partial(metrics.counter, "block_event_replays", **labels)
        self._replayed, self._not_held = (
            by_answer(outcome="replayed"),
            by_answer(outcome="not held"),
        )
        metrics.gauge_of("block_event_ring_batches", lambda: len(ring), **labels)
        metrics.gauge_of("block_event_ring_bytes", lambda: ring.num_bytes, **labels)
        metrics.gauge_of("block_event_snapshots", lambda: len(snapshots), **labels)
        metrics.gauge_of("block_event_blocks", lambda: len(held), **labels)

    def note_events(self, events: Sequence[BlockEvent]) -> None:
        """A batch was made."""
        for kind, count in Counter(map(type, events)).items():
            self._events[kind].inc(count)

    def note_batches(self, *, published: int, dropped: int) -> None:
        """The bus took batches, or did not."""
        self._published.inc(published)
        self._dropped.inc(dropped)

    def note_replay(self, *, is_held: bool) -> None:
        """A subscriber has requested what it missed."""
        (self._replayed if is_held else self._not_held).inc()


logger = logging.getLogger(__name__)


class BlockEventStream:
    """One incarnation of one worker."""

    def __init__(
        self,
        bus: Bus,
        model: ModelName,
        worker_id: WorkerId,
        epoch: int,
        block_size: int,
        settings: BlockEventSettings,
        metrics: Metrics,
        kv_code: str = "",
    ) -> None:
        """kv_code: the 8-bit type of the KV cache."""
        self._bus = bus
        self._subject = subjects.block_events(model, worker_id)
        self._model, self._worker_id, self._epoch = model, worker_id, epoch
        self._block_size = block_size
        self._settings = settings
        self._held = HeldBlocks(block_size, kv_code)
        self._ring = ReplayBuffer(settings.replay_batches, REPLAY_BYTES)
        self._snapshots = Snapshots(settings, epoch, block_size)
        self._pending: list[BlockChange] = []
        self._has_news = asyncio.Event()
        self._next_unsent = 0
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._is_publishing = True
        """It tells whether the bus took the last that there was to say."""
        self._meters = BlockEventMeters(
            metrics, model, worker_id, self._ring, self._snapshots, self._held
        )

    def note(self, changes: Iterable[BlockChange]) -> None:
        """The engine's changes of a step, in order."""
        self._pending += changes
        if len(self._pending) > self._settings.max_pending:
            self._gather()
        self._has_news.set()

    async def run(self) -> None:
        """Publish until `close`: events when there are any, what must be known every while."""
        await self._publish_held()
        published_s = monotonic_s()
        while not self._is_closed:
            await self._wait_for_news(published_s + self._settings.heartbeat_s - monotonic_s())
            # several steps of the engine, one batch
            await asyncio.sleep(self._settings.interval_s)
            self._has_news.clear()
            await self.flush()
            if monotonic_s() - published_s >= self._settings.heartbeat_s:
                await self._publish_held()
                published_s = monotonic_s()

    async def close(self) -> None:
        """Publish what is left, and that the worker stops."""
        self._is_closed = True
        await self._publish_held(is_leaving=True)

    async def flush(self) -> None:
        """Publish what was noted so far; it does not raise when the bus takes nothing."""
        async with self._sending:
            await self._send_new()

    def replay(self, epoch: int, from_seq: int) -> BlockEventsReplayed:
        """A page of what was published, or that it is not held."""
        self._gather()
        is_held = epoch == self._epoch and self._ring.holds(from_seq)
        self._meters.note_replay(is_held=is_held)
        return BlockEventsReplayed(
            epoch=self._epoch,
            is_held=is_held,
            oldest_seq=self._ring.oldest_seq,
            next_seq=self._ring.next_seq,
            batches=self._ring.page(from_seq, self._settings.batch_bytes) if is_held else [],
        )

    def read(self, snapshot: str, start: int) -> BlocksRead:
        """A page of all blocks. Raises Overloaded, NotFound, InvalidInput."""
        if snapshot:
            return self._snapshots.read(snapshot, start)
        self._gather()
        return self._snapshots.begin(self._ring.next_seq, self._held.all)

    def _gather(self) -> None:
        """Make batches of what is pending; they are numbered and held from now on."""
        pending, self._pending = self._pending, []
        batches = Batches(self._block_size, self._settings.batch_bytes)
        for change in pending:
            for step in self._held.apply(change):
                batches.add(step)
        for events in batches.take():
            self._ring.add(codec.encode(self._batch(events)))
            self._meters.note_events(events)

    def _batch(self, events: list[BlockEvent]) -> BlockEvents:
        return BlockEvents(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=self._ring.next_seq,
            model=self._model,
            ts=wall_s(),
            events=events,
        )

    async def _send_new(self) -> None:
        self._gather()
        while (unsent := self._ring.next_seq - self._next_unsent) > 0:
            lost = max(0, unsent - len(self._ring))
            (batch,) = self._ring.page(self._next_unsent + lost, max_bytes=0)
            is_sent = await self._send(batch)
            # after a failure nothing is tried again: subscribers see the gap and ask
            done = lost + 1 if is_sent else self._ring.next_seq - self._next_unsent
            self._meters.note_batches(published=int(is_sent), dropped=done - int(is_sent))
            self._next_unsent += done

    async def _publish_held(self, *, is_leaving: bool = False) -> None:
        async with self._sending:
            # all batches that this counts are out
            await self._send_new()
            held = BlocksHeld(
                worker_id=self._worker_id,
                epoch=self._epoch,
                next_seq=self._ring.next_seq,
                model=self._model,
                block_size=self._block_size,
                num_blocks=len(self._held),
                digest=self._held.digest,
                is_leaving=is_leaving,
            )
            await self._send(codec.encode(held))

    async def _send(self, data: bytes) -> bool:
        try:
            async with asyncio.timeout(self._settings.publish_timeout_s):
                await self._bus.publish_raw(self._subject, data)
        except (BusLost, PayloadTooLarge, TimeoutError) as error:
            if self._is_publishing:
                logger.warning("cannot publish block events: %r", error)
            self._is_publishing = False
            return False
        self._is_publishing = True
        return True

    async def _wait_for_news(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return
