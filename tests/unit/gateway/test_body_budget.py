"""Large bodies share a budget, tenants in turn; waiting bodies are not read."""

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message

from tokenmesh.services.gateway.core.http.body_budget import SHORT_BYTES, Body, BodyBudget
from tokenmesh.shared.config.http import BodySettings
from tokenmesh.shared.errors import Overloaded

BUDGET = 16 * SHORT_BYTES
HALF = BUDGET // 2


def budget_of(wait_s: float = 5.0, max_waiting: int = 100) -> BodyBudget:
    return BodyBudget(
        BodySettings(body_budget_bytes=BUDGET, body_wait_s=wait_s, max_waiting_bodies=max_waiting)
    )


async def until_waiting() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Sender:
    """A body that arrives in parts of equal size."""

    def __init__(self, num_parts: int, part_bytes: int = SHORT_BYTES) -> None:
        self.num_left = num_parts
        self._part = b"x" * part_bytes

    async def receive(self) -> Message:
        self.num_left -= 1
        return {"type": "http.request", "body": self._part, "more_body": self.num_left > 0}


async def read(body: Body) -> None:
    while (await body.receive())["more_body"]:
        pass


async def test_the_budget_is_never_exceeded_and_all_bodies_get_a_share() -> None:
    budget, most, done = budget_of(), 0, 0

    async def hold(number: int) -> None:
        nonlocal most, done
        share = await budget.take(f"tenant {number % 5}", (number % 7 + 1) * SHORT_BYTES)
        most = max(most, budget.num_held)
        await asyncio.sleep(0)
        budget.give_back(share)
        budget.give_back(share)
        done += 1

    await asyncio.gather(*(hold(number) for number in range(60)))
    assert done == 60
    assert budget.num_held == 0
    assert HALF < most <= BUDGET


async def test_a_tenant_holds_at_most_half_of_the_budget() -> None:
    budget = budget_of()
    first = await budget.take("greedy", HALF)
    second = asyncio.create_task(budget.take("greedy", SHORT_BYTES))
    await until_waiting()
    assert not second.done()
    await budget.take("other", HALF)
    budget.give_back(first)
    assert (await second).is_held


async def test_tenants_take_turns() -> None:
    budget, order = budget_of(), []
    held = [await budget.take(name, HALF) for name in ("x", "y")]

    async def wait(tenant: str) -> None:
        budget.give_back(share := await budget.take(tenant, HALF))
        order.append(share.tenant)

    waiting = [asyncio.create_task(wait(name)) for name in ("busy", "busy", "busy", "quiet")]
    await until_waiting()
    for share in held:
        budget.give_back(share)
    await asyncio.gather(*waiting)
    assert order.index("quiet") < 2


async def test_smaller_bodies_do_not_starve_a_large_one() -> None:
    budget = budget_of()
    held = [await budget.take(name, HALF - SHORT_BYTES) for name in ("x", "y")]
    large = asyncio.create_task(budget.take("large", HALF))
    await until_waiting()
    small = asyncio.create_task(budget.take("small", SHORT_BYTES))
    await until_waiting()
    assert not small.done()
    budget.give_back(held[0])
    assert (await large).is_held
    assert (await small).is_held


async def test_a_body_larger_than_the_budget_counts_as_half_of_it() -> None:
    budget = budget_of()
    share = await budget.take("large", 100 * BUDGET)
    assert budget.num_held == HALF
    budget.give_back(share)


@pytest.mark.parametrize("num_first", [0, 1])
async def test_a_cancelled_wait_is_skipped(num_first: int) -> None:
    budget = budget_of()
    held = [await budget.take(name, HALF) for name in ("x", "y")]
    waiting = [asyncio.create_task(budget.take("gone", HALF)) for _ in range(num_first + 1)]
    last = asyncio.create_task(budget.take("last", HALF))
    await until_waiting()
    for task in waiting:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    budget.give_back(held[0])
    assert (await last).is_held
    assert budget.num_held == BUDGET


async def test_waiting_has_a_deadline_and_a_bound() -> None:
    budget = budget_of(wait_s=0.02, max_waiting=2)
    share = await budget.take("one", HALF)
    waiting = [budget.take("one", HALF) for _ in range(5)]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, Overloaded) and each.retry_after_s for each in outcomes)
    assert budget.num_held == HALF
    budget.give_back(share)
    assert (await budget.take("one", HALF)).is_held


async def test_a_waiting_body_is_not_read_and_short_ones_do_not_wait() -> None:
    budget = budget_of()
    held = await budget.take("one", HALF)
    large, small = Sender(4), Sender(1)
    waiting = asyncio.create_task(read(Body(budget, "one", str(4 * SHORT_BYTES), large.receive)))
    await until_waiting()
    assert large.num_left == 4
    await read(Body(budget, "one", str(SHORT_BYTES), small.receive))
    budget.give_back(held)
    await waiting
    assert budget.num_held == 4 * SHORT_BYTES


async def test_a_body_in_chunks_takes_its_share_once_it_is_large() -> None:
    budget, sender = budget_of(), Sender(4)
    body = Body(budget, "one", "", sender.receive)
    await body.receive()
    assert budget.num_held == 0
    await read(body)
    assert budget.num_held == HALF
    body.hand_on()
    body.hand_on()
    assert budget.num_held == 0
