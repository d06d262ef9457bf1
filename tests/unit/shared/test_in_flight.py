"""Work that several requests wait for at the same time is done once."""

import asyncio
from functools import partial

import pytest

from tokenmesh.shared.in_flight import InFlight


async def test_callers_of_a_key_share_one_job_and_later_ones_start_another() -> None:
    jobs: InFlight[str, int] = InFlight()
    started: list[str] = []
    release = asyncio.Event()

    async def work(key: str) -> int:
        started.append(key)
        await release.wait()
        return len(started)

    callers = [asyncio.create_task(jobs.run(key, partial(work, key))) for key in "aaba"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (started, len(jobs)) == (["a", "b"], 2)
    release.set()
    assert await asyncio.gather(*callers) == [(2, True), (2, False), (2, True), (2, False)]
    assert len(jobs) == 0
    assert await jobs.run("a", partial(work, "a")) == (3, True)


async def test_an_error_reaches_every_caller() -> None:
    jobs: InFlight[str, int] = InFlight()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    found = await asyncio.gather(*(jobs.run("a", fail) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [ValueError] * 3


async def test_a_job_ends_with_its_last_caller_and_not_before() -> None:
    jobs: InFlight[str, int] = InFlight()
    was_cancelled = asyncio.Event()

    async def work() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            was_cancelled.set()
        return 1

    first, second = (asyncio.create_task(jobs.run("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not was_cancelled.is_set()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(jobs) == 0
    await asyncio.wait_for(was_cancelled.wait(), 15)
