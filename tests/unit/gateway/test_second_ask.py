"""Asking again while the first question is still open."""

import asyncio
import time

import pytest

from tokenmesh.services.gateway.mesh.hedging import first_answer, first_outcome
from tokenmesh.shared.errors import InvalidInput, NoResponders, TokenMeshError, Unavailable
from tokenmesh.shared.messages import Done, Message, Ping


class Asked:
    """Answers the n-th question after `delays[n]` seconds with `outcomes[n]`."""

    def __init__(self, delays: list[float], outcomes: list[Message | TokenMeshError]) -> None:
        self.delays = delays
        self.outcomes = outcomes
        self.again: list[bool] = []
        self.num_cancelled = 0

    async def ask(self, is_again: bool) -> Message:
        number = len(self.again)
        self.again.append(is_again)
        try:
            await asyncio.sleep(self.delays[number])
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        outcome = self.outcomes[number]
        if isinstance(outcome, TokenMeshError):
            raise outcome
        return outcome

    async def answer(self, max_asks: int = 3) -> Message:
        return await first_answer(self.ask, patience_s=0.02, max_asks=max_asks)


async def test_a_quick_answer_is_asked_for_once() -> None:
    asked = Asked([0.0], [Done()])
    assert await asked.answer() == Done()
    assert asked.again == [False]


async def test_the_second_answer_counts_when_the_first_stays_away() -> None:
    asked = Asked([9.0, 0.0], [Done(), Ping()])
    assert await asked.answer() == Ping()
    await asyncio.sleep(0)
    assert (asked.again, asked.num_cancelled) == ([False, True], 1)


async def test_a_slow_first_answer_still_counts() -> None:
    asked = Asked([0.04, 9.0], [Done(), Ping()])
    assert await asked.answer() == Done()


async def test_questions_are_bounded_and_each_has_more_patience() -> None:
    asked = Asked([0.3, 9.0, 9.0, 9.0, 9.0], [Done()] * 5)
    began_s = time.perf_counter()
    assert await asked.answer(max_asks=3) == Done()
    assert time.perf_counter() - began_s >= 0.3
    assert asked.again == [False, True, True]


async def test_a_failure_waits_for_the_question_that_is_still_open() -> None:
    asked = Asked([0.06, 0.0], [Done(), Unavailable("busy")])
    assert await asked.answer(max_asks=2) == Done()
    assert asked.again == [False, True]


async def test_who_finds_nobody_asks_on_soon_while_a_question_may_be_lost() -> None:
    outcomes: list[Message | TokenMeshError] = [NoResponders("nobody yet")] * 20
    asked = Asked([60.0] + [0.0] * 21, [Done(), *outcomes, Ping()])
    began_s = time.perf_counter()
    assert await asked.answer(max_asks=3) == Ping()
    assert time.perf_counter() - began_s < 5


async def test_the_last_failure_is_told_at_once() -> None:
    asked = Asked([0.0], [NoResponders("nobody")])
    with pytest.raises(NoResponders):
        await asked.answer()
    assert asked.again == [False]


async def test_a_wrong_request_is_wrong_wherever_it_is_asked() -> None:
    asked = Asked([9.0, 0.0], [Done(), InvalidInput("no")])
    with pytest.raises(InvalidInput):
        await asked.answer()


async def test_who_gives_up_leaves_no_question_behind() -> None:
    asked = Asked([9.0, 9.0], [Done()] * 2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await asked.answer()
    await asyncio.sleep(0)
    assert asked.num_cancelled == len(asked.again)


async def outcome(asked: Asked) -> Message:
    return await first_outcome(lambda: asked.ask(len(asked.again) > 0), patience_s=0.02)


async def test_who_died_with_a_question_is_found_by_the_next_one() -> None:
    asked = Asked([60.0, 0.0], [Done(), NoResponders("nobody listens")])
    began = time.monotonic()
    with pytest.raises(NoResponders):
        await outcome(asked)
    assert time.monotonic() - began < 10
    assert asked.num_cancelled == 1


async def test_a_late_answer_to_the_first_question_still_counts() -> None:
    asked = Asked([0.1, 60.0], [Done(), Ping()])
    assert await outcome(asked) == Done()
    assert asked.again == [False, True]


async def test_an_early_outcome_is_asked_for_once() -> None:
    asked = Asked([0.0], [NoResponders("nobody listens")])
    with pytest.raises(NoResponders):
        await outcome(asked)
    assert asked.again == [False]
