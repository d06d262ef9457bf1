"""Large work runs one by one, also when waiting requests are cancelled."""

import asyncio

import pytest

from tokenmesh.services.gateway.core.http.event_loop import OneByOne


async def test_one_runs_at_a_time_in_order_of_arrival() -> None:
    gate, order, running = OneByOne(), list[int](), 0

    async def work(number: int) -> None:
        nonlocal running
        async with gate.turn():
            running += 1
            assert running == 1
            order.append(number)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(work(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("after_turns", [0, 1, 2, 3])
async def test_a_cancelled_waiter_passes_its_turn_on(after_turns: int) -> None:
    gate = OneByOne()
    entered = asyncio.Event()

    async def enter() -> None:
        async with gate.turn():
            entered.set()

    async with gate.turn():
        second, third = asyncio.create_task(enter()), asyncio.create_task(enter())
        await asyncio.sleep(0)
        if not after_turns:
            second.cancel()
    if after_turns == 1:
        second.cancel()
    for _ in range(after_turns):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait_for(third, 15)
    assert entered.is_set()
