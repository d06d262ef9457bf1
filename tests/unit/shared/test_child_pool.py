"""Processes for work that may never end: started ahead, ended late, kept through their forks."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes.pool_child import TIME_S
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.errors import Overloaded

MakePool = Callable[..., ChildPool]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakePool]:
    # children run with -P, which keeps the folder of the tests out of their path
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pools: list[ChildPool] = []

    def pool(
        mode: str = "forks", processes: int = 1, queue: int = 9, most_each: int | None = None
    ) -> ChildPool:
        limits = ChildLimits(processes, queue, TIME_S, most_each=most_each)
        pools.append(ChildPool("tests", "tests.fakes.pool_child", (mode,), limits, b"hello"))
        return pools[-1]

    yield pool
    for each in pools:
        await each.stop()


async def test_start_has_processes_ready_before_the_first_job(make: MakePool) -> None:
    pool = make(processes=2)
    await pool.start()
    first = {child.pid for child in pool.processes}
    assert {int(await pool.ask(b"pid"))} == first
    # the other one is on its way
    both = first
    while len(both) < 2:
        both = {int(pid) for pid in await asyncio.gather(pool.ask(b"pid"), pool.ask(b"pid"))}
    assert first < both


@pytest.mark.parametrize(("job", "error"), [(b"spin", ChildLate), (b"die", ChildDied)])
async def test_a_job_that_is_ended_leaves_a_forking_process_as_it_was(
    make: MakePool, job: bytes, error: type[Exception]
) -> None:
    pool = make()
    before = await pool.ask(b"pid")
    with pytest.raises(error):
        await pool.ask(job)
    assert await pool.ask(b"pid") == before


@pytest.mark.parametrize(("job", "error"), [(b"spin", ChildLate), (b"die", ChildDied)])
async def test_without_forks_the_process_is_replaced(
    make: MakePool, job: bytes, error: type[Exception]
) -> None:
    pool = make("plain")
    before = await pool.ask(b"pid")
    with pytest.raises(error):
        await pool.ask(job)
    assert await pool.ask(b"pid") != before


async def test_another_share_does_not_wait_for_a_full_queue(make: MakePool) -> None:
    pool = make(processes=2, queue=4)
    await asyncio.gather(pool.ask(b"pid"), pool.ask(b"pid"))
    greedy = [asyncio.create_task(pool.ask(b"spin", "greedy")) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.ask(b"pid", "greedy")
    await pool.ask(b"pid", "other")
    # one of the greedy share's jobs runs, one has made room, the others wait
    assert sum(task.done() for task in greedy) <= 1
    await asyncio.gather(*greedy, return_exceptions=True)


@pytest.mark.parametrize(("most_each", "expected"), [(None, 1), (2, 2)])
async def test_a_share_has_as_many_processes_as_it_may(
    make: MakePool, most_each: int | None, expected: int
) -> None:
    pool = make(processes=2, most_each=most_each)
    pids = await asyncio.gather(pool.ask(b"pid", "one"), pool.ask(b"pid", "one"))
    assert len({*pids}) == expected


async def test_stopping_ends_a_fork_in_the_middle_of_its_job(make: MakePool) -> None:
    pool = make()
    await pool.start()
    job = asyncio.create_task(pool.ask(b"spin"))
    await asyncio.sleep(TIME_S / 2)
    await pool.stop()
    with pytest.raises(ChildDied):
        await job


OWNER = """
import asyncio, sys
from tokenmesh.shared.child_pool import ChildLimits, ChildPool

async def main(mode):
    pool = ChildPool("tests", "tests.fakes.pool_child", (mode, "60"), ChildLimits(1, 9, 60), b"hi")
    work = asyncio.create_task(pool.ask(b"spin"))
    while not pool.processes:
        await asyncio.sleep(0.01)
    print(pool.processes[0].pid, flush=True)
    await work

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize(("mode", "count"), [("late", 1), ("forks", 2)])
def test_nothing_goes_on_for_an_owner_that_was_killed(
    make: MakePool, mode: str, count: int
) -> None:
    command = (sys.executable, "-c", OWNER, mode)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        until_s = time.monotonic() + 15
        while len(busy := [child, *child.children()]) < count and time.monotonic() < until_s:
            time.sleep(0.02)
        assert len(busy) == count
        owner.kill()
    gone, alive = psutil.wait_procs(busy, timeout=5)
    for each in alive:
        each.kill()
    assert not alive
    assert len(gone) == count
