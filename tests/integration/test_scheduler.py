"""The scheduler actor on the real bus: heartbeats in, decisions and keep-alives out."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest

from tokenmesh.services.scheduler_svc.actor import SchedulerActor
from tokenmesh.services.scheduler_svc.main import workers_of
from tokenmesh.services.scheduler_svc.placement import LoadPlacement
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.services.scheduler_svc.wake_leases import WakeLeases
from tokenmesh.services.scheduler_svc.waker import Waker
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorRuntime
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import RedisSettings, ServiceSettings
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Asleep, Overloaded, Unavailable
from tokenmesh.shared.ids import InstanceId, ModelName, RequestId
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat, Message, Place, Placed, Queued
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import open_redis

MODEL = ModelName("tiny/model-1.5")
SETTINGS = SchedulerSettings(max_queued=1, keepalive_s=0.05, worker_wait_s=0.2)


@dataclass
class Scheduler:
    """A running scheduler and the bus that talks to it."""

    bus: MessageBus
    metrics: Metrics
    sequence: int = 0

    async def beat(
        self,
        *,
        running: int,
        name: str = "w1",
        epoch: int = 3,
        sleep_level: int = 0,
        is_starting: bool = False,
    ) -> None:
        self.sequence += 1
        card = ModelCard(name=MODEL, max_model_len=128, vocab_size=10)
        beat = Heartbeat(
            service="worker",
            instance_id=InstanceId(name),
            epoch=epoch,
            sequence=self.sequence,
            version="0",
            interval_s=30.0,
            models=[card],
            load=WorkerLoad(running=running, max_num_seqs=4, sleep_level=sleep_level),
            starts=[MODEL] if is_starting else [],
        )
        await self.bus.publish(subjects.beat("worker", InstanceId(name)), beat)
        await self.bus.flush()

    async def ask(self, seconds: float = 15.0, seen: list[Message] | None = None) -> list[Message]:
        """All answers; `seen` gets each as it arrives."""
        seen = [] if seen is None else seen
        place = Place(request_id=RequestId("r"), model=MODEL, num_tokens=10, max_tokens=5)
        subject, deadline_s = subjects.place(MODEL), now_s() + seconds
        answers = self.bus.converse(subject, place, deadline_s=deadline_s, idle_s=1.0)
        async for answer in answers:
            seen.append(answer)
        return seen

    async def waiting(self) -> asyncio.Task[list[Message]]:
        """A request that has heard twice that it waits."""
        seen: list[Message] = []
        asking = asyncio.create_task(self.ask(seen=seen))
        async with asyncio.timeout(15):
            while len(seen) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return asking


@pytest.fixture
async def scheduler(bus: MessageBus, redis_settings: RedisSettings) -> AsyncIterator[Scheduler]:
    members = Members(MembershipView(missed_beats=4, max_members=16))
    await members.start(bus)
    queue = RequestQueue(
        SETTINGS, lambda model: workers_of(members, model), LoadPlacement(SETTINGS)
    )
    metrics = Metrics()
    redis = open_redis(redis_settings)
    waker = Waker(bus, members, SETTINGS, WakeLeases(redis, InstanceId("s"), 1))
    actor = SchedulerActor(SETTINGS, queue, waker, metrics, partial(members.is_starting, "worker"))
    members.on_beat = actor.on_beat
    runtime = ActorRuntime(actor, bus, ServiceSettings())
    await runtime.listen(subjects.place_any(), "scheduler")
    await bus.flush()
    yield Scheduler(bus, metrics)
    await runtime.stop(grace_s=0.0)
    await members.stop()
    await redis.close()


async def test_placements_are_counted_by_their_outcome(scheduler: Scheduler) -> None:
    await scheduler.beat(running=0)
    await scheduler.ask()
    text = scheduler.metrics.render().decode()
    assert 'tokenmesh:placements_total{outcome="placed"} 1.0' in text
    assert 'tokenmesh:placement_seconds_count{model_name="' in text
    assert "tokenmesh:placement_waiting 0.0" in text


async def test_a_live_worker_with_room_is_chosen_at_once(scheduler: Scheduler) -> None:
    await scheduler.beat(running=0)
    (answer,) = await scheduler.ask()
    assert isinstance(answer, Placed)
    assert (answer.worker_id, answer.epoch) == ("w1", 3)
    assert [candidate.worker_id for candidate in answer.candidates] == ["w1"]


async def test_a_waiting_request_receives_its_position_until_there_is_room(
    scheduler: Scheduler,
) -> None:
    await scheduler.beat(running=5)
    asking = await scheduler.waiting()
    await scheduler.beat(running=1)
    *waits, last = await asking
    assert all(answer == Queued(position=0) for answer in waits)
    assert isinstance(last, Placed)
    assert last.queued_s > 0


async def test_past_the_bound_the_answer_is_overloaded(scheduler: Scheduler) -> None:
    await scheduler.beat(running=5)
    first = await scheduler.waiting()
    with pytest.raises(Overloaded) as refused:
        await scheduler.ask()
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0
    await scheduler.beat(running=0)
    assert isinstance((await first)[-1], Placed)


async def test_requests_are_refused_while_every_worker_sleeps(scheduler: Scheduler) -> None:
    await scheduler.beat(running=5)
    waiting = await scheduler.waiting()
    await scheduler.beat(running=0, sleep_level=1)
    with pytest.raises(Asleep, match=r"every worker of .* sleeps") as refused:
        await waiting
    assert refused.value.retry_after_s == SETTINGS.asleep_retry_after_s
    with pytest.raises(Asleep):
        await scheduler.ask()
    await scheduler.beat(running=0)
    assert isinstance((await scheduler.ask())[-1], Placed)


async def test_without_any_worker_a_request_fails_after_the_wait(scheduler: Scheduler) -> None:
    with pytest.raises(Unavailable, match="no live worker serves"):
        await scheduler.ask()


async def test_a_request_waits_for_longer_while_a_worker_loads_its_model(
    scheduler: Scheduler,
) -> None:
    await scheduler.beat(running=0, is_starting=True)
    asking = asyncio.create_task(scheduler.ask())
    await asyncio.sleep(3 * SETTINGS.worker_wait_s)
    assert not asking.done()
    await scheduler.beat(running=0)
    assert isinstance((await asyncio.wait_for(asking, 15))[-1], Placed)


async def test_a_worker_that_starts_again_and_again_is_not_waited_for(
    scheduler: Scheduler,
) -> None:
    for epoch in range(4):
        await scheduler.beat(running=0, epoch=epoch, is_starting=True)
    with pytest.raises(Unavailable, match="no live worker serves"):
        await scheduler.ask()
    await scheduler.beat(running=0, epoch=3)
    assert isinstance((await scheduler.ask())[-1], Placed)
