"""Threads: runs CPU work that would block the event loop; tenants take turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.fair_queue import FairSlots, Grant

INLINE_CHARS: Final = 2000
"""Text up to this length (longer, if known) is encoded on the event loop."""
TEXT_QUEUE: Final = 1024
"""Texts and images that wait for a thread; then: overloaded."""
LONG_TEXT_CHARS: Final = 65536
"""Texts from this length on leave one thread to shorter ones, where there are several threads."""

Result = TypeVar("Result")


class Threads:
    """A small pool. If it has several threads, long texts leave one free for short ones."""

    def __init__(self, limits: TokenizerSettings) -> None:
        self._pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="tokenizer")
        self._inline_chars = INLINE_CHARS
        self._slots = FairSlots(
            "texts to be encoded", limits.threads, TEXT_QUEUE, costly=LONG_TEXT_CHARS
        )

    async def run(self, tenant: str, cost: float, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread; `cost`: characters, or similar work. Raises Overloaded."""
        grant = await self._slots.take(tenant, cost)
        loop = asyncio.get_running_loop()
        try:
            future = self._pool.submit(work)
        except BaseException:
            self._slots.release(grant)
            raise
        # A thread cannot be cancelled: its slot is released when the work ends.
        future.add_done_callback(lambda done: self._release_soon(loop, grant, done))
        try:
            return await asyncio.wrap_future(future)
        finally:
            # An error's traceback holds this frame: with the future, which holds the error, they
            # would keep the text, and all that was made of it, until a collection of cycles.
            del future

    async def run_text(self, tenant: str, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, or directly if the text is so short that a thread costs more."""
        if num_chars <= self._inline_chars:
            return work()
        return await self.run(tenant, num_chars, work)

    def _release_soon(
        self, loop: asyncio.AbstractEventLoop, grant: Grant, _done: "Future[Result]"
    ) -> None:
        with suppress(RuntimeError):
            # A closed loop raises it: nothing waits for the result.
            loop.call_soon_threadsafe(self._slots.release, grant)

    def stop(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
