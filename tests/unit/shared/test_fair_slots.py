"""A few slots, in turns over the shares that wait."""

import asyncio
from collections.abc import Callable

import pytest

from tokenmesh.shared.fair_slots import FairSlots, Full


class Rig:
    """Notes in which order shares get their slots."""

    def __init__(self, num_slots: int, max_waiting: int = 100) -> None:
        self.slots = FairSlots(num_slots, max_waiting)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, share: str, count: int = 1) -> None:
        """Wait for that many slots at a time."""
        self.tasks += [asyncio.create_task(self._acquire(share)) for _ in range(count)]
        # once for them, once for those that are refused for them
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _acquire(self, share: str) -> None:
        await self.slots.acquire(share)
        self.order.append(share)

    async def release(self, share: str) -> None:
        """Give one back, and let the next one have it."""
        self.slots.release(share)
        await asyncio.sleep(0)

    def failed(self) -> int:
        """How many were refused."""
        return sum(task.done() and task.exception() is not None for task in self.tasks)


@pytest.fixture
def make() -> Callable[..., Rig]:
    return Rig


async def test_shares_take_turns_however_many_each_has(make: Callable[..., Rig]) -> None:
    rig = make(1)
    await rig.ask("greedy", 5)
    await rig.ask("a", 2)
    await rig.ask("b", 1)
    while len(rig.order) < 8:
        await rig.release(rig.order[-1])
    assert "".join(share[0] for share in rig.order) == "ggabgagg"


async def test_a_named_share_leaves_a_slot_to_others(make: Callable[..., Rig]) -> None:
    rig = make(3)
    await rig.ask("greedy", 9)
    assert rig.order == ["greedy"] * 2
    await rig.ask("other")
    assert rig.order == ["greedy", "greedy", "other"]
    await rig.release("greedy")
    assert rig.order[3:] == ["greedy"]


async def test_without_names_all_slots_are_used(make: Callable[..., Rig]) -> None:
    rig = make(3)
    await rig.ask("", 4)
    assert rig.order == ["", "", ""]


async def test_when_too_many_wait_the_share_with_the_most_is_refused(
    make: Callable[..., Rig],
) -> None:
    rig = make(1, max_waiting=4)
    await rig.ask("greedy", 5)
    await rig.ask("greedy", 1)
    assert rig.failed() == 1
    await rig.ask("a", 1)
    await rig.ask("b", 1)
    assert rig.failed() == 3
    # greedy has 2 waiting, a and b one each: who would have as many as the longest is refused
    await rig.ask("a", 1)
    assert rig.failed() == 4
    with pytest.raises(Full):
        await rig.tasks[-1]
    for _ in range(4):
        await rig.release(rig.order[-1])
    assert "".join(share[0] for share in rig.order) == "ggabg"


async def test_who_stops_waiting_takes_no_slot(make: Callable[..., Rig]) -> None:
    rig = make(1)
    await rig.ask("a", 3)
    rig.tasks[1].cancel()
    await asyncio.sleep(0)
    rig.slots.release("a")
    # granted and cancelled before it could run: the slot is given back
    rig.tasks[2].cancel()
    await asyncio.sleep(0)
    await rig.ask("b")
    assert rig.order == ["a", "b"]
