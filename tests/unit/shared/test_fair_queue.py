"""Tenants are served in turn, regardless of how much each sends."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.fair_queue import FairQueue, FairSlots


def order(queue: FairQueue[str]) -> list[str]:
    found = []
    while (item := queue.pop()) is not None:
        found.append(item)
    return found


def test_one_who_comes_late_does_not_wait_for_all_of_another() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for index in range(5):
        queue.push("b", f"b{index}")
    assert [queue.pop(), queue.pop()] == ["b0", "b1"]
    queue.push("a", "a0")
    assert order(queue)[:2] == ["a0", "b2"]


def test_cost_is_what_is_shared() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for index in range(3):
        queue.push("b", f"b{index}", cost=100)
        for _ in range(3):
            queue.push("a", "a", cost=10)
    assert order(queue) == ["b0", *["a"] * 9, "b1", "b2"]


def test_a_full_queue_refuses_the_newest_of_the_tenant_with_the_most() -> None:
    queue: FairQueue[str] = FairQueue(3)
    assert [queue.push("b", f"b{index}") for index in range(4)] == [None, None, None, "b3"]
    assert queue.push("a", "a0") == "b2"
    assert len(queue) == 3
    assert order(queue) == ["b0", "a0", "b1"]
    empty: FairQueue[str] = FairQueue(0)
    assert empty.push("a", "a") == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 9)), max_size=40))
def test_everything_is_served_once_and_each_tenant_in_its_order(
    pushes: list[tuple[str, float]],
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    for index, (tenant, cost) in enumerate(pushes):
        queue.push(tenant, (tenant, index), cost)
    served = []
    while (item := queue.pop()) is not None:
        served.append(item)
    assert sorted(served, key=lambda each: each[1]) == [
        (tenant, index) for index, (tenant, _) in enumerate(pushes)
    ]
    for tenant in "abc":
        own = [index for name, index in served if name == tenant]
        assert own == sorted(own)


async def test_slots_are_given_in_turn_and_never_to_more_than_there_are() -> None:
    slots, running, served, most = FairSlots("tests", 2, 100), 0, [], 0

    async def work(tenant: str) -> None:
        nonlocal running, most
        async with slots.slot(tenant):
            running += 1
            most = max(most, running)
            served.append(tenant)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(work("b") for _ in range(10)), work("a"))
    assert most == 2
    assert served.index("a") <= 4


async def test_long_work_leaves_a_slot_to_short_work() -> None:
    slots = FairSlots("tests", 2, 100, costly=50)
    held = await slots.take("b", 100)
    waiting = asyncio.create_task(slots.take("b", 100))
    await asyncio.sleep(0)
    short = await slots.take("a", 1)
    slots.release(short)
    slots.release(await slots.take("b", 1))
    assert not waiting.done()
    slots.release(held)
    slots.release(await waiting)


async def test_a_tenant_has_no_more_slots_than_it_may() -> None:
    slots = FairSlots("tests", 4, 100, most_each=2)
    held = [await slots.take("b") for _ in range(2)]
    third = asyncio.create_task(slots.take("b"))
    await asyncio.sleep(0)
    others = [await slots.take("a") for _ in range(2)]
    assert not third.done()
    for grant in (*held, *others):
        slots.release(grant)
    slots.release(await third)


async def test_work_without_a_tenant_may_have_all_slots() -> None:
    slots = FairSlots("tests", 3, 100, most_each=2)
    async with asyncio.timeout(15):
        held = [await slots.take("") for _ in range(3)]
    fourth = asyncio.create_task(slots.take(""))
    await asyncio.sleep(0)
    assert not fourth.done()
    slots.release(held[0])
    slots.release(await fourth)


async def test_a_slot_that_was_given_to_a_cancelled_wait_is_given_on() -> None:
    slots = FairSlots("tests", 1, 100)
    held = await slots.take("a")
    first, second = (asyncio.create_task(slots.take(tenant)) for tenant in "ab")
    await asyncio.sleep(0)
    slots.release(held)
    # it has the slot and has not run since
    first.cancel()
    async with asyncio.timeout(15):
        slots.release(await second)
    assert first.cancelled()


async def test_a_full_line_is_overloaded_and_a_wait_can_be_given_up() -> None:
    slots = FairSlots("tests", 1, 2)
    held = await slots.take("b")
    waiting = [asyncio.create_task(slots.take("b")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many tests wait"):
        await waiting[2]
    other = asyncio.create_task(slots.take("a"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await waiting[1]
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    slots.release(held)
    slots.release(await other)
    async with slots.slot("c"):
        pass
