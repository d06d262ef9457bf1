"""Hedged requests: a second one is sent while the first is open."""

import asyncio
import time
from typing import Any, cast

import pytest

from tokenmesh.services.gateway.core.mesh.retries import hedged_request, repeated_request
from tokenmesh.shared.errors import InvalidInput, NoResponders, TokenMeshError, Unavailable
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.messages import Done, Message, Ping


class Turns:
    """Sole turns that are due after so many requests."""

    def __init__(self, num_shared: int) -> None:
        self.num_shared = 0
        self._most = num_shared

    @property
    def are_due(self) -> bool:
        return self.num_shared >= self._most


class Service:
    """Answers the n-th request after `delays[n]` seconds with `outcomes[n]`."""

    def __init__(self, delays: list[float], outcomes: list[Message | TokenMeshError]) -> None:
        self.delays = delays
        self.outcomes = outcomes
        self.is_hedge: list[bool] = []
        self.num_cancelled = 0
        self.returns: list[asyncio.Future[InstanceId]] = []
        self.num_alone = 0

    def next_return(self) -> asyncio.Future[InstanceId]:
        self.returns.append(asyncio.get_running_loop().create_future())
        return self.returns[-1]

    async def come_back(self) -> None:
        """A process comes; returns when the request was sent again, if it is."""
        self.returns[-1].set_result(InstanceId("t"))
        for _ in range(5):
            await asyncio.sleep(0)

    async def send(self, is_hedge: bool) -> Message:
        number = len(self.is_hedge)
        self.is_hedge.append(is_hedge)
        try:
            await asyncio.sleep(self.delays[number])
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        outcome = self.outcomes[number]
        if isinstance(outcome, TokenMeshError):
            raise outcome
        return outcome

    async def ask_alone(self) -> Message:
        self.num_alone += 1
        return await self.send(True)

    async def answer(
        self, max_requests: int = 3, hedge_after_s: float = 0.02, num_shared: int = 100
    ) -> Message:
        return await hedged_request(
            self.send,
            hedge_after_s=hedge_after_s,
            max_requests=max_requests,
            next_return=self.next_return,
            turns=cast("Any", Turns(num_shared)),
            ask_alone=self.ask_alone,
        )


async def test_a_fast_answer_needs_one_request() -> None:
    service = Service([0.0], [Done()])
    assert await service.answer() == Done()
    assert service.is_hedge == [False]


async def test_the_second_answer_counts_when_the_first_is_missing() -> None:
    service = Service([9.0, 0.0], [Done(), Ping()])
    assert await service.answer() == Ping()
    await asyncio.sleep(0)
    assert (service.is_hedge, service.num_cancelled) == ([False, True], 1)


async def test_a_slow_first_answer_still_counts() -> None:
    service = Service([0.04, 9.0], [Done(), Ping()])
    assert await service.answer() == Done()


async def test_requests_are_bounded_and_their_intervals_grow() -> None:
    service = Service([0.3, 9.0, 9.0, 9.0, 9.0], [Done()] * 5)
    began_s = time.perf_counter()
    assert await service.answer(max_requests=3) == Done()
    assert time.perf_counter() - began_s >= 0.3
    assert service.is_hedge == [False, True, True]


async def test_lost_requests_are_repeated_seldom_though_enough_were_sent() -> None:
    outcomes: list[Message | TokenMeshError] = [*[Done()] * 4, Ping()]
    service = Service([60.0] * 4 + [0.0], outcomes)
    began_s = time.perf_counter()
    async with asyncio.timeout(15):
        assert await service.answer(max_requests=3, hedge_after_s=0.01) == Ping()
    assert time.perf_counter() - began_s >= 2 * 16 * 0.01


async def test_a_process_that_has_come_back_is_asked_at_once() -> None:
    service = Service([60.0, 0.0], [Done(), Ping()])
    asking = asyncio.create_task(service.answer(hedge_after_s=60.0))
    await asyncio.sleep(0)
    await service.come_back()
    assert await asyncio.wait_for(asking, 15) == Ping()
    assert service.is_hedge == [False, True]


async def test_a_request_that_ends_each_process_meets_few_of_them() -> None:
    service = Service([60.0] * 20, [Done()] * 20)
    asking = asyncio.create_task(service.answer(max_requests=3, hedge_after_s=60.0))
    await asyncio.sleep(0)
    for _ in range(3):
        await service.come_back()
    last = service.returns[-1]
    last.set_result(InstanceId("t"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(service.is_hedge) == 4
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert all(each.done() for each in service.returns)


async def test_once_sole_turns_are_due_one_request_is_open_for_them() -> None:
    service = Service([60.0, 60.0, 0.2], [Done(), Done(), Ping()])
    asking = asyncio.create_task(service.answer(hedge_after_s=0.01, num_shared=2))
    async with asyncio.timeout(15):
        while service.num_alone == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await service.come_back()
    assert await asyncio.wait_for(asking, 15) == Ping()
    assert (service.num_alone, len(service.is_hedge)) == (1, 3)


async def test_what_comes_of_sole_turns_counts_though_other_requests_are_open() -> None:
    service = Service([60.0, 0.0], [Done(), Unavailable("lost too often")])
    with pytest.raises(Unavailable):
        await asyncio.wait_for(service.answer(num_shared=1), 15)


async def test_a_failure_waits_for_the_open_request() -> None:
    service = Service([0.2, 0.0], [Done(), Unavailable("busy")])
    assert await service.answer(max_requests=2) == Done()
    assert service.is_hedge == [False, True]


async def test_unreachable_requests_are_repeated_soon_while_one_may_be_lost() -> None:
    outcomes: list[Message | TokenMeshError] = [NoResponders("not yet")] * 20
    service = Service([60.0] + [0.0] * 21, [Done(), *outcomes, Ping()])
    async with asyncio.timeout(15):
        assert await service.answer(max_requests=3) == Ping()


async def test_the_last_failure_is_raised_at_once() -> None:
    service = Service([0.0], [NoResponders("none")])
    with pytest.raises(NoResponders):
        await service.answer()
    assert service.is_hedge == [False]


async def test_an_error_that_is_not_retryable_counts_at_once() -> None:
    service = Service([9.0, 0.0], [Done(), InvalidInput("no")])
    with pytest.raises(InvalidInput):
        await service.answer()


async def test_a_cancelled_request_leaves_no_open_one() -> None:
    service = Service([9.0, 9.0], [Done()] * 2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await service.answer()
    await asyncio.sleep(0)
    assert service.num_cancelled == len(service.is_hedge)


async def outcome(service: Service) -> Message:
    return await repeated_request(
        lambda: service.send(len(service.is_hedge) > 0), repeat_after_s=0.02
    )


async def test_a_process_that_died_with_a_request_is_found_by_the_next_one() -> None:
    service = Service([60.0, 0.0], [Done(), NoResponders("no subscriber")])
    async with asyncio.timeout(15):
        with pytest.raises(NoResponders):
            await outcome(service)
    assert service.num_cancelled == 1


async def test_a_late_answer_to_the_first_request_counts() -> None:
    service = Service([0.1, 60.0], [Done(), Ping()])
    assert await outcome(service) == Done()
    assert service.is_hedge == [False, True]


async def test_a_fast_outcome_needs_one_request() -> None:
    service = Service([0.0], [NoResponders("no subscriber")])
    with pytest.raises(NoResponders):
        await outcome(service)
    assert service.is_hedge == [False]
