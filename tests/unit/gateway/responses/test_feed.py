"""Feed: frames are read in order, until the end."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.gateway.apis.responses.feed import Feed
from tokenmesh.services.gateway.apis.responses.records import Flushed, ResponseEnded
from tokenmesh.shared.errors import Conflict

ENDED = ResponseEnded(status="completed", response=b"{}", frames=[b"end"])


async def read(feed: Feed) -> bytes:
    return b"".join([data async for data in feed.read()])


@given(st.lists(st.lists(st.binary(min_size=1, max_size=3), max_size=4), max_size=20))
def test_frames_are_read_once_and_in_order(pushed: list[list[bytes]]) -> None:
    async def scenario() -> None:
        feed = Feed(1000)
        reading = asyncio.create_task(read(feed))
        for number, frames in enumerate(pushed):
            feed.push([Flushed(frames=frames)])
            if number % 3 == 0:
                await asyncio.sleep(0)
        feed.push([ENDED])
        assert await reading == b"".join(map(b"".join, pushed)) + b"end"
        assert feed.num_read == sum(map(len, pushed)) + 1

    asyncio.run(scenario())


async def test_a_reader_that_is_too_far_behind_is_cut_off() -> None:
    feed = Feed(10)
    feed.push([Flushed(frames=[b"12345678", b"9"])])
    feed.push([Flushed(frames=[b"too much"])])
    feed.push([Flushed(frames=[b"x"])])
    assert await read(feed) == b"123456789"
    assert (feed.num_read, feed.ended) == (2, None)
    feed.push([ENDED])
    feed.close()
    assert await feed.end() == ENDED
    assert feed.is_cut


async def test_only_the_end_is_kept_for_a_reader_that_left() -> None:
    feed = Feed(10)
    feed.push([Flushed(frames=[b"1"])])
    feed.leave()
    feed.push([Flushed(frames=[b"2"]), ENDED])
    feed.close()
    assert await read(feed) == b""
    assert await feed.end() == ENDED


async def test_an_error_comes_after_all_frames() -> None:
    feed = Feed(10)
    feed.push([Flushed(frames=[b"1"])])
    feed.close(Conflict("taken over"))
    reading = feed.read()
    assert await anext(reading) == b"1"
    with pytest.raises(Conflict):
        await anext(reading)


async def test_a_recorded_end_is_not_an_error_for_a_reader() -> None:
    feed = Feed(10)
    feed.push([ENDED])
    feed.close(Conflict("failed"))
    assert await read(feed) == b"end"
    with pytest.raises(Conflict):
        await feed.end()
