"""Block events over a real NATS: whatever is lost, a subscriber ends with the worker's cache."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.block_follower import LoggedSchedule, check_hashes, follow
from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.services.worker_svc.block_events.actor import BlockEventsActor
from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorRuntime
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.mesh import BusSettings, ServiceSettings
from tokenmesh.shared.config.placement import BlockEventSettings
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.metrics import Metrics

MODEL = ModelName("m/1.5")
QUIET = {"interval_s": 60.0, "heartbeat_s": 600.0, "batch_bytes": 1024}


class Recorded(LoggedSchedule):
    """Keeps what was logged."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.logged: list[list[BlockChange]] = []

    def note_blocks(self, changes: list[BlockChange]) -> None:
        self.logged.append(changes)


class Rig:
    """A worker's side with a connection, and the guide's subscriber with another one."""

    def __init__(self, bus: MessageBus, other: MessageBus, block_size: int, **limits: Any) -> None:
        self.worker_id = WorkerId(f"worker-{secrets.token_hex(4)}")
        self.bus, self.other = bus, other
        self.metrics = Metrics()
        self.epoch = secrets.randbits(62)
        self.stream = BlockEventStream(
            bus,
            MODEL,
            self.worker_id,
            self.epoch,
            block_size,
            BlockEventSettings.model_validate(QUIET | limits),
            self.metrics,
        )
        self.actor = ActorRuntime(BlockEventsActor(self.stream), bus, ServiceSettings())
        self.follower = follow.Follower(self.ask)
        self.arrived: list[bytes] = []
        self.asked: Counter[str] = Counter()

    async def start(self) -> None:
        await self.actor.listen(subjects.worker_blocks(self.worker_id))
        await self.other.subscribe_raw(subjects.block_events(MODEL, self.worker_id), self._keep)
        await self.other.flush()
        await self.bus.flush()

    async def _keep(self, _subject: str, data: bytes) -> None:
        self.arrived.append(data)

    async def ask(self, worker_id: str, question: dict[str, Any]) -> dict[str, Any]:
        self.asked[question["type"]] += 1
        data = msgspec.msgpack.encode(question)
        subject = subjects.worker_blocks(WorkerId(worker_id))
        reply = await self.other.raw.request(subject, data, deadline_s=now_s() + 10)
        answer: dict[str, Any] = msgspec.msgpack.decode(reply.data)
        assert answer["type"] != "Failed", answer
        return answer

    async def deliver(self, keeps: Callable[[], bool]) -> None:
        """Wait until all that was published has arrived, or is lost."""
        await self.stream.flush()
        await self.bus.flush()
        await self.other.flush()
        arrived, self.arrived = self.arrived, []
        for data in arrived:
            if keeps():
                await self.follower.take(data, monotonic_s())

    @property
    def known(self) -> Any:
        return self.follower.workers[self.worker_id]


async def follow_with_losses(
    seed: int, loss: float, limits: dict[str, Any], bus_settings: BusSettings
) -> tuple[Rig, Recorded]:
    rng = Random(seed)
    schedule = Recorded(seed)
    schedule.run()
    bus, other = await connect(bus_settings, "worker"), await connect(bus_settings, "outside")
    try:
        rig = Rig(bus, other, schedule.settings.block_size, **limits)
        await rig.start()
        for changes in schedule.logged:
            rig.stream.note(changes)
            if rng.random() < 0.4:
                await rig.deliver(lambda: rng.random() >= loss)
        await rig.deliver(lambda: rng.random() >= loss)
        # a heartbeat is lost sometimes, not for ever
        await rig.stream._publish_held()
        await rig.deliver(lambda: True)
        return rig, schedule
    finally:
        await rig.actor.stop(0)
        await bus.close()
        await other.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 5000),
    loss=st.sampled_from([0.0, 0.3, 0.9]),
    replay_batches=st.sampled_from([1, 3, 10_000]),
    max_pending=st.sampled_from([1, 4096]),
)
def test_with_any_losses_the_subscriber_ends_with_the_workers_cache(
    bus_settings: BusSettings, seed: int, loss: float, replay_batches: int, max_pending: int
) -> None:
    limits = {"replay_batches": replay_batches, "max_pending": max_pending}
    rig, schedule = asyncio.run(follow_with_losses(seed, loss, limits, bus_settings))
    assert set(rig.known.blocks) == schedule.findable
    check_hashes(rig.known)
    if loss == 0.0 and replay_batches > 3:
        assert not rig.asked


@pytest.fixture
async def rig(bus: MessageBus, bus_settings: BusSettings) -> AsyncIterator[Rig]:
    other = await connect(bus_settings, "outside")
    rig = Rig(bus, other, 4, replay_batches=3)
    await rig.start()
    yield rig
    await rig.actor.stop(0)
    await other.close()


def logged(size: int = 4) -> Recorded:
    """A schedule whose blocks are of that size, with a few of them left at its end."""
    for seed in range(1000):
        schedule = Recorded(seed)
        if schedule.settings.block_size == size and schedule.settings.enable_prefix_caching:
            schedule.run()
            if len(schedule.findable) > 3 and sum(map(bool, schedule.logged)) > 5:
                return schedule
    raise AssertionError("no such schedule")


async def test_what_is_no_longer_held_is_said_and_read_whole(rig: Rig) -> None:
    schedule = logged()
    for changes in schedule.logged:
        rig.stream.note(changes)
        await rig.stream.flush()
    question = {"type": "ReplayBlockEvents", "epoch": rig.epoch, "from_seq": 0}
    answer = await rig.ask(rig.worker_id, question)
    assert not answer["is_held"]
    assert answer["oldest_seq"] == answer["next_seq"] - 3
    held = await rig.ask(rig.worker_id, question | {"from_seq": answer["oldest_seq"]})
    assert held["is_held"]
    assert [msgspec.msgpack.decode(each)["seq"] for each in held["batches"]] == [
        answer["oldest_seq"] + at for at in range(len(held["batches"]))
    ]
    for wrong in ({"epoch": rig.epoch + 1}, {"from_seq": answer["next_seq"] + 1}, {"from_seq": -1}):
        refused = await rig.ask(rig.worker_id, question | {"from_seq": answer["next_seq"]} | wrong)
        assert not refused["is_held"]
    last = await rig.ask(rig.worker_id, question | {"from_seq": answer["next_seq"]})
    assert last["is_held"]
    assert not last.get("batches")
    rig.arrived = rig.arrived[-1:]
    await rig.deliver(lambda: True)
    assert set(rig.known.blocks) == schedule.findable
    assert rig.asked["ReadBlocks"] >= 1


async def test_a_subscriber_of_an_earlier_incarnation_begins_anew(rig: Rig) -> None:
    schedule = logged()
    rig.follower.workers[rig.worker_id] = stale = follow.Worker(epoch=rig.epoch - 1)
    stale.blocks[bytes(16)] = None, b"", []
    for changes in schedule.logged:
        rig.stream.note(changes)
    await rig.deliver(lambda: True)
    assert set(rig.known.blocks) == schedule.findable


async def test_the_last_word_of_a_worker_is_that_it_leaves(rig: Rig) -> None:
    rig.stream.note([change for changes in logged().logged for change in changes])
    await rig.deliver(lambda: True)
    assert rig.known.blocks
    await rig.actor.stop(1.0)
    await rig.deliver(lambda: True)
    assert rig.worker_id not in rig.follower.workers


async def test_what_the_bus_did_not_take_is_counted_and_replayed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = logged()
    half = len(schedule.logged) // 2

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(rig.bus, "publish_raw", hang)
    hasty = rig.stream._settings.model_copy(update={"publish_timeout_s": 0.02})
    monkeypatch.setattr(rig.stream, "_settings", hasty)
    for changes in schedule.logged[:half]:
        rig.stream.note(changes)
        await rig.stream.flush()
    monkeypatch.undo()
    for changes in schedule.logged[half:]:
        rig.stream.note(changes)
    await rig.stream._publish_held()
    await rig.deliver(lambda: True)
    assert set(rig.known.blocks) == schedule.findable
    text = rig.metrics.render().decode()
    counts = {
        line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("tokenmesh:block_event_batches_total")
    }
    assert counts["dropped"] > 0
    assert counts["published"] > 0
    assert sum("cannot publish" in each.getMessage() for each in caplog.records) == 1
