"""follow: the events of a response from any number on, until its end, wherever it is made."""

import asyncio
from collections.abc import AsyncGenerator

from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.responses.records import Ended, decode_records, frames_of
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.subjects import response_log

_STORING_S = 0.01
"""A watcher hears of an entry a little before it can be read."""


async def follow(
    logs: ResponseLogs, response_id: ResponseId, first: int
) -> AsyncGenerator[bytes, None]:
    """Frames from number `first` on, joined as they come; close it when it is not read to its end.

    Raises NotFound once the response is deleted.
    """
    news = asyncio.Event()
    subscription = await logs.watch(response_id, news.set)
    key, settings = response_log(response_id), logs.settings
    last = number = 0
    try:
        while True:
            news.clear()
            entries = await logs.journal.read(key, last, settings.read_batch)
            for entry in entries:
                records = decode_records(entry.data)
                frames = [frame for record in records for frame in frames_of(record)]
                if wanted := frames[max(0, first - number) :]:
                    yield b"".join(wanted)
                number += len(frames)
                last = entry.sequence
                if isinstance(records[-1], Ended):
                    return
            if not entries:
                if await logs.journal.last(key) is None:
                    raise NotFound(f"response {response_id!r} was deleted", param="response_id")
                await _wait(news, settings.poll_s)
    finally:
        await subscription.stop()


async def _wait(news: asyncio.Event, poll_s: float) -> None:
    """Until there is something to read, or may be."""
    try:
        async with asyncio.timeout(poll_s):
            await news.wait()
    except TimeoutError:
        return
    await asyncio.sleep(_STORING_S)
