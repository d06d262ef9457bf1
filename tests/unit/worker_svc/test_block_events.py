"""Block events: exactly what the prefix cache holds, in events that need no earlier ones."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.block_follower import LoggedSchedule, check_hashes, follow
from tests.rounds import rounds
from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.services.worker_svc.block_events.batches import Batches, ReplayBuffer
from tokenmesh.services.worker_svc.block_events.held import Block, HeldBlocks
from tokenmesh.services.worker_svc.block_events.snapshots import Snapshots
from tokenmesh.shared import codec
from tokenmesh.shared.config.placement import BlockEventSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, Overloaded
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages import BlockEvents
from tokenmesh.shared.messages.blocks import BlockEvent, BlockStored

MAX_BYTES = 1024


def wire(seq: int, events: list[BlockEvent]) -> dict[str, object]:
    """As a subscriber decodes it."""
    batch = BlockEvents(
        worker_id=WorkerId("w"), epoch=7, seq=seq, model=ModelName("m"), ts=0.5, events=events
    )
    decoded: dict[str, object] = msgspec.msgpack.decode(codec.encode(batch))
    return decoded


class ReportedSchedule(LoggedSchedule):
    """Every step's changes reach a subscriber at once."""

    def __init__(self, seed: int, kind: str) -> None:
        kv_cache_dtype = "auto" if seed % 5 else "int8"
        kept = {"has_states": kind == "states", "has_host": kind == "host"}
        super().__init__(seed, kv_cache_dtype=kv_cache_dtype, **kept)
        self.held = HeldBlocks(self.settings.block_size, self.settings.kv_code)
        self.subscriber = follow.Worker(epoch=7)
        self.counts: Counter[str] = Counter()

    def note_blocks(self, changes: list[BlockChange]) -> None:
        batches = Batches(self.settings.block_size, MAX_BYTES)
        for change in changes:
            for step in self.held.apply(change):
                batches.add(step)
        for events in batches.take():
            self.counts.update(type(event).__name__ for event in events)
            self.subscriber.apply(wire(self.subscriber.next_seq, events))
        assert set(self.subscriber.blocks) == self.findable
        assert self.subscriber.digest() == self.held.digest
        assert len(self.held) == len(self.findable)


@pytest.mark.parametrize("kind", ["blocks", "states", "host"])
@rounds("chunk", 1, 6)
def test_events_amount_to_what_can_be_found_after_every_step(chunk: int, kind: str) -> None:
    # chunked prefill, hits, evictions, preemptions, failed steps, adapters, salts, images
    counts: Counter[str] = Counter()
    for seed in range(chunk * 120, chunk * 120 + 120):
        schedule = ReportedSchedule(seed, kind)
        counts += schedule.run()
        check_hashes(schedule.subscriber)
        counts += schedule.counts
        for _, _, extras in schedule.subscriber.blocks.values():
            counts.update(key["kind"] for key in extras)
        schedule.engine.forget_kv()
        schedule.note_blocks(schedule.engine.take_output().blocks)
        assert not schedule.subscriber.blocks
    kinds = ("preempted", "cached", "error", "lora", "salt", "kv_dtype")
    assert min(counts["media"], counts["prompt_embeds"]) > 0
    assert min(counts[kind] for kind in (*kinds, "BlockStored", "BlockRemoved")) > 5


def test_blocks_that_follow_one_another_are_one_event() -> None:
    batches = Batches(2, MAX_BYTES)
    for at in range(1, 6):
        batches.add(Block(bytes([at]) * 16, bytes([at - 1]) * 16, b"12345678", None, []))
    batches.add(Block(b"x" * 16, None, b"12345678", None, []))
    ((run, other),) = batches.take()
    assert isinstance(run, BlockStored)
    assert isinstance(other, BlockStored)
    assert run.block_hashes == [bytes([at]) * 16 for at in range(1, 6)]
    assert (run.parent_block_hash, other.parent_block_hash) == (bytes(16), None)


@given(st.lists(st.integers(0, 300)), st.integers(1, 20), st.integers(1, 900))
def test_a_ring_holds_the_last_and_not_too_much(
    sizes: list[int], max_batches: int, max_bytes: int
) -> None:
    ring = ReplayBuffer(max_batches, max_bytes)
    added: list[bytes] = []
    for seq, size in enumerate(sizes):
        added.append(seq.to_bytes(2, "big") + bytes(size))
        ring.add(added[-1])
        assert len(ring) <= max_batches
        assert ring.num_bytes == sum(map(len, added[ring.oldest_seq :]))
        assert ring.num_bytes <= max_bytes or len(ring) == 1
        assert ring.holds(seq)
    assert ring.next_seq == len(sizes)
    assert ring.holds(ring.next_seq)
    assert not ring.holds(ring.next_seq + 1)
    assert not ring.holds(ring.oldest_seq - 1)
    read: list[bytes] = []
    while page := ring.page(ring.oldest_seq + len(read), max_bytes=500):
        assert len(page) == 1 or sum(map(len, page)) <= 500
        read += page
    assert read == added[ring.oldest_seq :]


def blocks(count: int) -> list[Block]:
    hashes = [at.to_bytes(16, "big") for at in range(count)]
    return [
        Block(each, hashes[at - 1] if at % 7 else None, b"1234", None, [])
        for at, each in enumerate(hashes)
    ]


def test_a_snapshot_is_read_page_by_page_and_stays_as_it_was() -> None:
    snapshots = Snapshots(BlockEventSettings(batch_bytes=1024), epoch=7, block_size=1)
    source = blocks(200)
    page = snapshots.begin(12, lambda: list(source))
    source.clear()
    reader = follow.Worker(epoch=7)
    num_pages = 1
    while True:
        for event in msgspec.to_builtins(page.blocks, builtin_types=(bytes,)):
            reader.store(event)
        if page.next_start is None:
            break
        page = snapshots.read(page.snapshot, page.next_start)
        num_pages += 1
        assert (page.next_seq, page.num_blocks) == (12, 200)
    assert num_pages > 3
    assert list(reader.blocks) == [block.block_hash for block in blocks(200)]
    assert [parent for parent, _, _ in reader.blocks.values()] == [
        block.parent for block in blocks(200)
    ]
    assert len(snapshots) == 0
    with pytest.raises(NotFound):
        snapshots.read(page.snapshot, 0)


def test_snapshots_are_few_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    module = "tokenmesh.services.worker_svc.block_events.snapshots.monotonic_s"
    monkeypatch.setattr(module, lambda: now[0])
    settings = BlockEventSettings(batch_bytes=1024, max_snapshots=2, snapshot_s=5)
    snapshots = Snapshots(settings, epoch=7, block_size=1)
    first = snapshots.begin(0, lambda: blocks(200))
    now[0] += 4
    snapshots.begin(0, lambda: blocks(200))
    with pytest.raises(Overloaded):
        snapshots.begin(0, lambda: blocks(200))
    with pytest.raises(InvalidInput):
        snapshots.read(first.snapshot, 201)
    with pytest.raises(InvalidInput):
        snapshots.read(first.snapshot, -1)
    now[0] += 2
    with pytest.raises(NotFound):
        snapshots.read(first.snapshot, 0)
    assert snapshots.begin(0, lambda: blocks(0)).next_start is None
    assert len(snapshots) == 1
