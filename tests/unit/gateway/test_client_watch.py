"""A client that leaves, or takes no bytes, ends its request."""

import asyncio
from typing import Any

import pytest

from tokenmesh.services.gateway.http.client_watch import ClientWatch
from tokenmesh.shared.errors import Cancelled


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_leaves_ends_the_block() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(Cancelled):
        async with ClientWatch(receive, 10.0):
            await never()


async def test_what_else_a_client_sends_is_no_farewell() -> None:
    messages = [{"type": "http.disconnect"}, {"type": "http.request"}]

    async def receive() -> Any:
        return messages.pop()

    with pytest.raises(Cancelled):
        async with ClientWatch(receive, 10.0):
            await never()
    assert messages == []


async def test_after_the_answer_nobody_looks_any_more() -> None:
    leaving = asyncio.Event()

    async def receive() -> Any:
        await leaving.wait()
        return {"type": "http.disconnect"}

    async with ClientWatch(receive, 10.0) as watch:
        watch.stop()
        leaving.set()
        await asyncio.sleep(0.01)


async def test_a_client_that_takes_no_bytes_has_left() -> None:
    watch = ClientWatch(never, 0.02)
    watch.num_writes = 1
    watch.is_writing = True
    with pytest.raises(Cancelled):
        async with watch:
            await never()


async def test_a_client_that_takes_bytes_slowly_stays() -> None:
    async with ClientWatch(never, 0.02) as watch:
        for _ in range(10):
            watch.num_writes += 1
            watch.is_writing = True
            await asyncio.sleep(0.01)


async def test_a_long_wait_for_tokens_is_not_the_clients_fault() -> None:
    async with ClientWatch(never, 0.01):
        await asyncio.sleep(0.05)


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def block() -> None:
        async with ClientWatch(never, 10.0):
            await never()

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
