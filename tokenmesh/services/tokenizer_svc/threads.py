"""Threads: where CPU work goes that would hold up the event loop; tenants take turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.fair_queue import FairSlots, Grant

Result = TypeVar("Result")


class Threads:
    """A small pool. Long texts leave one thread to short ones, where there are several."""

    def __init__(self, limits: TokenizerSettings) -> None:
        self._pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="tokenizer")
        self._inline_chars = limits.inline_chars
        self._slots = FairSlots(
            "texts to be encoded", limits.threads, limits.text_queue, costly=limits.long_text_chars
        )

    async def run(self, tenant: str, cost: float, work: Callable[[], Result]) -> Result:
        """`work()` in a thread. `cost`: characters, or what takes as long. Raises Overloaded."""
        grant = await self._slots.take(tenant, cost)
        loop = asyncio.get_running_loop()
        try:
            future = self._pool.submit(work)
        except BaseException:
            self._slots.release(grant)
            raise
        # A thread cannot be cancelled: its slot is free when the work is over.
        future.add_done_callback(lambda done: self._release_soon(loop, grant, done))
        return await asyncio.wrap_future(future)

    async def run_text(self, tenant: str, num_chars: int, work: Callable[[], Result]) -> Result:
        """`work()` in a thread, or at once when the text is so short that a thread costs more."""
        if num_chars <= self._inline_chars:
            return work()
        return await self.run(tenant, num_chars, work)

    def _release_soon(
        self, loop: asyncio.AbstractEventLoop, grant: Grant, _done: "Future[Result]"
    ) -> None:
        with suppress(RuntimeError):
            # Raised by a closed loop: the caller is gone.
            loop.call_soon_threadsafe(self._slots.release, grant)

    def stop(self) -> None:
        """Wait for what runs and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
