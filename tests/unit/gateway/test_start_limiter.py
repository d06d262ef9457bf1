"""Requests of a burst start in portions and in order; a single one does not wait."""

import asyncio

from tokenmesh.services.gateway.core.http.event_loop import StartLimiter


async def count_turns(turns: list[int]) -> None:
    """Count the turns of the event loop."""
    while True:
        turns[0] += 1
        await asyncio.sleep(0)


async def test_a_burst_starts_in_portions_and_in_order() -> None:
    limiter, turns = StartLimiter(8), [0]
    begun: list[tuple[int, int]] = []

    async def request(number: int) -> None:
        await limiter.enter()
        begun.append((turns[0], number))

    clock = asyncio.create_task(count_turns(turns))
    await asyncio.gather(*(request(number) for number in range(100)))
    clock.cancel()
    assert [number for _, number in begun] == list(range(100))
    by_turn = [turn for turn, _ in begun]
    # A turn of the loop may see the end of one portion and the beginning of the next.
    assert max(map(by_turn.count, by_turn)) <= 16
    assert len(set(by_turn)) >= 100 // 16


async def test_a_single_request_does_not_wait() -> None:
    limiter = StartLimiter(1)
    for _ in range(3):
        entering = limiter.enter()
        try:
            entering.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            continue
        raise AssertionError("it waited")


async def test_a_cancelled_waiter_uses_no_turn() -> None:
    limiter = StartLimiter(1)
    first, second, third = (asyncio.create_task(limiter.enter()) for _ in range(3))
    await first
    second.cancel()
    async with asyncio.timeout(15):
        await third
    assert second.cancelled()


async def test_no_callback_remains_after_a_burst() -> None:
    limiter = StartLimiter(2)
    await asyncio.gather(*(limiter.enter() for _ in range(9)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not limiter._is_counting
    assert not limiter._waiting
