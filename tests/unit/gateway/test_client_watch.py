"""A client that disconnects or reads nothing ends its request."""

import asyncio
from typing import Any

import pytest

from tokenmesh.services.gateway.core.http.response_sender import ClientWatch
from tokenmesh.shared.errors import Cancelled


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_disconnect_cancels_the_block() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(Cancelled):
        async with ClientWatch(receive, 10.0):
            await never()


async def test_other_messages_are_not_a_disconnect() -> None:
    messages = [{"type": "http.disconnect"}, {"type": "http.request"}]

    async def receive() -> Any:
        return messages.pop()

    with pytest.raises(Cancelled):
        async with ClientWatch(receive, 10.0):
            await never()
    assert messages == []


async def test_a_disconnect_after_the_response_is_ignored() -> None:
    leaving = asyncio.Event()

    async def receive() -> Any:
        await leaving.wait()
        return {"type": "http.disconnect"}

    async with ClientWatch(receive, 10.0) as watch:
        watch.stop()
        leaving.set()
        await asyncio.sleep(0.01)


async def test_a_client_that_reads_nothing_counts_as_disconnected() -> None:
    watch = ClientWatch(never, 0.02)
    watch.num_writes = 1
    watch.is_writing = True
    with pytest.raises(Cancelled):
        async with watch:
            await never()


async def test_a_slow_reader_is_not_disconnected() -> None:
    async with ClientWatch(never, 60.0) as watch:
        watch.is_writing = True
        for _ in range(10):
            watch.num_writes += 1
            watch._check()
            await asyncio.sleep(0)
        assert not watch.has_left


async def test_a_long_wait_for_tokens_is_not_a_disconnect() -> None:
    async with ClientWatch(never, 0.01):
        await asyncio.sleep(0.05)


async def test_another_cancellation_is_not_replaced() -> None:
    async def block() -> None:
        async with ClientWatch(never, 10.0):
            await never()

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
