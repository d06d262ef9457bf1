"""BlockEventMeters: how many events there were, what became of them, and what is held of them."""

from collections import Counter
from collections.abc import Sequence, Sized
from functools import partial
from typing import get_args

from tokenmesh.services.worker_svc.block_events.ring import Ring
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.blocks import BlockEvent
from tokenmesh.shared.metrics import Metrics


class BlockEventMeters:
    """Counters are fed, gauges read the ring and the snapshots."""

    def __init__(
        self,
        metrics: Metrics,
        model: ModelName,
        worker_id: WorkerId,
        ring: Ring,
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
        """A subscriber has asked for what it missed."""
        (self._replayed if is_held else self._not_held).inc()
