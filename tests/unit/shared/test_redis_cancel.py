"""A cancelled call to Redis stays cancelled, whatever the library does with it."""

import asyncio
from typing import Any, cast

import pytest
from redis.asyncio import Redis as Client
from redis.exceptions import ConnectionError as RedisConnectionError

from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.redis import Redis
from tokenmesh.shared.redis_link import RedisLink


class Swallowing:
    """A client that takes a cancellation for something else."""

    def __init__(self, outcome: Exception | bytes) -> None:
        self._outcome = outcome
        self.is_waiting = asyncio.Event()

    async def execute_command(self, *_: Any) -> bytes:
        try:
            self.is_waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if isinstance(self._outcome, Exception):
                raise self._outcome from None
        return cast("bytes", self._outcome)


def redis_of(client: object, **settings: float) -> Redis:
    link = cast("RedisLink", None)  # for scripts
    return Redis(cast("Client", client), RedisSettings(**settings), link)  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [b"OK", RedisConnectionError("closed")])
async def test_a_swallowed_cancellation_is_raised_again(outcome: Exception | bytes) -> None:
    client = Swallowing(outcome)
    redis = redis_of(client)
    task = asyncio.create_task(redis.call("GET", "key"))
    await client.is_waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_end_of_the_time_is_no_cancellation() -> None:
    client = Swallowing(b"OK")
    redis = redis_of(client, call_timeout_s=0.02)
    assert await redis.call("GET", "key") == b"OK"


async def test_cleaning_up_after_a_cancellation_may_still_call() -> None:
    class Answering:
        async def execute_command(self, *_: Any) -> bytes:
            return b"OK"

    redis = redis_of(Answering())
    answers: list[Any] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            answers.append(await redis.call("DEL", "key"))
            answers.append(await redis.call("DEL", "key"))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answers == [b"OK", b"OK"]
