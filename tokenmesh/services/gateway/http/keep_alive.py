"""KeepAlive: a few bytes now and then on a stream that has nothing to say yet.

Proxies and clients cut connections on which nothing comes for a while: a long prompt, a queue.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tokenmesh.shared.clock import monotonic_s


class KeepAlive:
    """Calls `write` whenever nothing was written for `interval_s`; made for one stream."""

    def __init__(self, interval_s: float, write: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._write = write
        self._task = asyncio.create_task(self._run())
        self.last_write_s = monotonic_s()
        """Set by whoever writes."""

    def stop(self) -> None:
        """Nothing more is written."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            silent_s = monotonic_s() - self.last_write_s
            if silent_s >= self._interval_s:
                await self._write()
                continue
            await asyncio.sleep(self._interval_s - silent_s)
