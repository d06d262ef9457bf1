"""Schedulers wake models on demand: one decides for workers that share memory, others take over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.service_mesh import running
from tests.integration.test_on_demand import (
    Gate,
    MakeMesh,
    TwoModels,
    gate,
    make_mesh,
    slots,
    text_of,
    two,
)
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.scheduler_svc.wake_leases import LEASE_S, WakeLeases, lease_key
from tokenmesh.shared import subjects
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.errors import Asleep
from tokenmesh.shared.ids import InstanceId, ModelName, RequestId
from tokenmesh.shared.messages import Awake, Message, Wake
from tokenmesh.shared.redis import Redis, open_redis
from tokenmesh.shared.service import Mesh

__all__ = ["gate", "make_mesh", "slots", "two"]


@pytest.fixture
async def redis(redis_settings: RedisSettings) -> AsyncIterator[Redis]:
    found = open_redis(redis_settings)
    yield found
    await found.close()


@pytest.fixture
async def second(two: TwoModels) -> AsyncIterator[Mesh]:
    """A further scheduler, which knows all workers."""
    async with running("scheduler", two.mesh.settings, build_scheduler) as found:
        await two.mesh.until(lambda: len(found.members.service("worker")) == 2)
        await two.mesh.until(lambda: len(two.mesh.gateway.members.service("scheduler")) == 2)
        yield found


async def wake(mesh: Mesh, scheduler: Mesh, model: ModelName, seconds: float = 15.0) -> Message:
    """The last answer of one scheduler to a gateway."""
    subject = subjects.replica(subjects.place(model), scheduler.instance_id)
    message = Wake(request_id=RequestId("r"), model=model)
    answers = mesh.bus.converse(subject, message, deadline_s=now_s() + seconds, idle_s=3.0)
    return [each async for each in answers][-1]


async def holder_of(redis: Redis, slots: Path) -> str:
    """Who decides for the workers that share the slots; empty: no scheduler."""
    keys = await redis.call("KEYS", lease_key(f"*{slots}"))
    assert isinstance(keys, list)
    names = [each for each in keys if isinstance(each, bytes)]
    values = [await redis.call("GET", each) for each in names]
    return "".join(each.decode().split()[0] for each in values if isinstance(each, bytes))


async def test_two_schedulers_that_are_asked_at_once_decide_once(
    two: TwoModels, gate: Gate, second: Mesh
) -> None:
    await text_of(two.mesh)
    await two.mesh.until(lambda: two.levels() == (0, 2))
    num_sleeps, num_wakes = gate.num_sleeps, gate.num_wakes
    asked = [wake(two.mesh.gateway, each, two.second) for each in (two.mesh.scheduler, second)]
    answers = await asyncio.gather(*asked)
    assert all(isinstance(each, Awake) for each in answers)
    await two.mesh.until(lambda: two.levels() == (2, 0))
    assert (gate.num_sleeps, gate.num_wakes) == (num_sleeps + 1, num_wakes + 1)


async def test_another_scheduler_goes_on_when_the_one_that_decides_dies(
    two: TwoModels, gate: Gate, second: Mesh, redis: Redis, slots: Path
) -> None:
    long = asyncio.create_task(text_of(two.mesh, max_tokens=400, ignore_eos=True))
    await two.mesh.until(lambda: two.levels() == (0, 2))
    waiting = asyncio.create_task(text_of(two.mesh, model=two.second))
    async with asyncio.timeout(10):
        while not (holder := await holder_of(redis, slots)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    first = two.mesh.scheduler
    dead = first if first.instance_id == holder else second
    assert dead.instance_id == holder
    # Its heartbeats stop, and so do the Queued that the gateway waits for.
    await dead.bus.close()
    await waiting
    await long
    assert two.levels() == (2, 0)
    assert await holder_of(redis, slots) not in ("", holder)


async def test_a_wake_ends_at_its_deadline_and_leaves_nothing(
    two: TwoModels, gate: Gate, second: Mesh
) -> None:
    long = asyncio.create_task(text_of(two.mesh, max_tokens=200, ignore_eos=True))
    await two.mesh.until(lambda: two.levels() == (0, 2))
    asked = (two.mesh.scheduler, second)
    began_s = monotonic_s()
    outcomes = await asyncio.gather(
        *(wake(two.mesh.gateway, each, two.second, 0.5) for each in asked), return_exceptions=True
    )
    assert all(isinstance(each, Exception) for each in outcomes)
    assert monotonic_s() - began_s < 2.0
    async with asyncio.timeout(5):
        while any(task.get_name().startswith("wake ") for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await long
    assert two.levels() == (0, 2)


async def test_a_model_that_no_worker_serves_is_not_awaited_until_the_deadline(
    make_mesh: MakeMesh,
) -> None:
    async with make_mesh(scheduler={"worker_wait_s": 0.2}) as mesh:
        with pytest.raises(Asleep, match="no live worker serves"):
            await wake(mesh.gateway, mesh.scheduler, ModelName(f"{mesh.model}-gone"))


async def test_one_scheduler_at_a_time_holds_a_lease(redis: Redis, tmp_path: Path) -> None:
    one, other, again = (
        WakeLeases(redis, InstanceId(name), epoch)
        for name, epoch in (("s1", 1), ("s2", 1), ("s1", 2))
    )
    group = str(tmp_path)
    assert await one.holder(group) == "s1"
    assert await other.holder(group) == "s1"
    assert await again.holder(f"{group}-2") == "s1"
    await one.release()
    async with asyncio.timeout(2 * LEASE_S):
        while await other.holder(group) != "s2":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await one.holder(group) == "s2"


async def test_without_redis_each_scheduler_decides(
    redis: Redis, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    assert await WakeLeases(redis, InstanceId("s1"), 1).holder(str(tmp_path)) == "s1"
    closed = open_redis(redis_settings)
    await closed.close()
    assert await WakeLeases(closed, InstanceId("s2"), 1).holder(str(tmp_path)) == "s2"
