"""Watchdog: shows the supervisor of this process that its event loop runs.

It speaks systemd's notify protocol, so `tokenmesh up` and a systemd unit with `WatchdogSec=` see
the same.
"""

import asyncio
import logging
import socket
from contextlib import suppress
from types import TracebackType
from typing import Final

from tokenmesh.shared.config.notify import NotifyTarget, notify_target

logger = logging.getLogger(__name__)

_SIGNS: Final = 4
"""Sent within the time that the supervisor waits for one."""


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
        # A supervisor that is gone, or too busy to read, is none of this process's concern.
        with suppress(OSError):
            self._socket.sendto(text, self._target.address)
