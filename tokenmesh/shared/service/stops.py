"""StopSignals: SIGTERM, SIGINT and the parent's death as events."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """`first` asks to drain, `second` asks to leave at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.is_drained = False
        """Somebody on the mesh asked this process to leave for good."""
        self._is_signalled = False

    def drain(self) -> None:
        """Leave for good; a signal that follows is still the first one."""
        logger.info("told to drain")
        self.is_drained = True
        self.first.set()

    def stop(self, reason: str) -> None:
        """What a signal does; also for stopping a service that runs inside a test."""
        if self._is_signalled:
            logger.warning("%s again: leaving at once", reason)
            self.second.set()
        else:
            logger.info("%s: draining", reason)
            self._is_signalled = True
            self.first.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Signal handlers for the time of the block; only on a main thread."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop, number.name)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def watch_parent(self, poll_s: float) -> None:
        """Stop when the process that started this one has died."""
        parent = os.getppid()
        while True:
            await asyncio.sleep(poll_s)
            if os.getppid() != parent:
                break
        self.stop(f"parent process {parent} is gone")
