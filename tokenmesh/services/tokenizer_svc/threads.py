"""Threads: where CPU work goes that would hold up the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Threads:
    """A small pool. Its queue is bounded by the actor's concurrency, which feeds it."""

    def __init__(self, num_threads: int, inline_chars: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._inline_chars = inline_chars

    async def run(self, work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """`work(*arguments)` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def run_text(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """`work()` in a thread, or at once when the text is so short that a thread costs more."""
        return work() if num_chars <= self._inline_chars else await self.run(work)

    def stop(self) -> None:
        """Wait for what runs and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
