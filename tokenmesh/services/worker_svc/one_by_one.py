"""OneByOne: commands that change a worker's state, one after the other, each to its end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class OneByOne:
    """A caller whose time is over stops to wait; what it began goes on, and is known to be done."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The outcome of `work`, which begins when those before it have ended."""
        task = asyncio.create_task(self._in_turn(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        async with self._turn:
            return await work
