"""Stops a process and reports that it runs: signals, exit codes, systemd's notify protocol."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import TracebackType
from typing import Final

from tokenmesh.shared.config.environment import NotifyTarget, notify_target


class ExitCode(IntEnum):
    """Exit codes of a service; its parent starts it again or gives up by them."""

    CLEAN = 0
    CRASHED = 1
    BAD_CONFIG = 2
    NO_BUS = 3
    DRAINED = 4
    """An operator removed the instance: a supervisor should not start it again."""


logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """`first` means drain, `second` means stop at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.is_drained = False
        """A Drain command was received: the process should not be restarted."""
        self._is_signalled = False

    def drain(self) -> None:
        """Stop without a restart; a signal that follows is still the first one."""
        logger.info("received Drain")
        self.is_drained = True
        self.first.set()

    def stop(self, reason: str) -> None:
        """Drain; the second time, stop at once.

        Signals call this, and tests of a service in their process.
        """
        if self._is_signalled:
            logger.warning("%s again: stopping at once", reason)
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
        self.stop(f"parent process {parent} has ended")


_SIGNS: Final = 4
"""Messages in the time after which the supervisor restarts the process."""


class Watchdog:
    """A context manager; silent until `ready`, and where no supervisor listens."""

    def __init__(self, target: NotifyTarget | None = None) -> None:
        self._target = target or notify_target()
        self._socket: socket.socket | None = None
        self._pinging: asyncio.Task[None] | None = None

    def __enter__(self) -> "Watchdog":
        if self._target is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self._socket is not None:
            self._socket.close()

    def ready(self) -> None:
        """The process does its work from now on; a silence means that it hangs."""
        if self._target is None:
            return
        self._send(b"READY=1")
        if self._target.silence_s is not None:
            pause_s = self._target.silence_s / _SIGNS
            self._pinging = asyncio.create_task(self._ping(pause_s), name="watchdog")

    async def _ping(self, pause_s: float) -> None:
        while True:
            self._send(b"WATCHDOG=1")
            await asyncio.sleep(pause_s)

    def _send(self, text: bytes) -> None:
        assert self._socket is not None
        assert self._target is not None
        # A supervisor that has ended or is too busy to read must not disturb this process.
        with suppress(OSError):
            self._socket.sendto(text, self._target.address)
