"""Inbox: outputs wait for the response in order, and their number is bounded."""

import asyncio

import pytest

from tokenmesh.services.gateway.core.generation.chunk import Output
from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.shared.errors import InvalidInput, Overloaded


async def test_one_wake_up_returns_everything_that_has_arrived() -> None:
    inbox = Inbox(max_tokens=10)
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    first, second = Output([1]), Output([2])
    inbox.put(0, first)
    inbox.put(1, second)
    assert await waiting == [(0, first), (1, second)]


async def test_outputs_that_arrived_before_are_returned_at_once() -> None:
    inbox = Inbox(max_tokens=10)
    inbox.put(0, Output([1]))
    assert len(await inbox.get()) == 1


async def test_a_reader_that_falls_behind_gets_an_error() -> None:
    inbox = Inbox(max_tokens=3)
    inbox.put(0, Output([1, 2]))
    await inbox.get()
    inbox.put(0, Output([1, 2]))
    inbox.put(0, Output([3, 4]))
    with pytest.raises(Overloaded):
        await inbox.get()


async def test_the_first_error_counts() -> None:
    inbox = Inbox(max_tokens=3)
    inbox.put(0, Output(error=InvalidInput("first")))
    inbox.fail(InvalidInput("second"))
    with pytest.raises(InvalidInput, match="first"):
        await inbox.get()


async def test_an_error_wakes_the_reader() -> None:
    inbox = Inbox(max_tokens=3)
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.fail(InvalidInput("broken"))
    with pytest.raises(InvalidInput):
        await waiting


async def test_a_cancelled_reader_can_read_again() -> None:
    inbox = Inbox(max_tokens=3)
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inbox.put(0, Output([1]))
    assert len(await inbox.get()) == 1


def test_closing_a_choice_closes_its_stream_once() -> None:
    inbox, closed = Inbox(max_tokens=3), list[int]()
    inbox.connect(4, lambda: closed.append(4))
    inbox.close(4)
    assert closed == [4]
