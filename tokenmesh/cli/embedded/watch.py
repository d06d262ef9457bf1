"""Watches of `tokenmesh up`: restart hung children, and NATS when JetStream cannot write."""

import asyncio
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.cli.embedded.child import Child
from tokenmesh.cli.embedded.ports import LOOPBACK
from tokenmesh.shared.bus.jetstream import StreamMissing, answer_of
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ConfigError, ProtocolError, TokenMeshError

_NOWHERE: Final = "tm.nowhere"
"""A subject without entries: purging it shows whether a stream can write, and changes nothing."""
_FAILURES: Final = 2
"""Failed probes in a row before the first restart; twice as many before each that follows."""
_MAX_DOUBLINGS: Final = 6
"""A store that restarts do not help is given 128 failed probes at most before the next one."""


class StoreWatch:
    """Probes regularly whether every stream can still write."""

    def __init__(
        self,
        bus: MessageBus,
        store: Path,
        limits: UpSettings,
        *,
        restart: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """`restart` gets the reason and restarts NATS; `warn` is called once for a full disk."""
        self._bus = bus
        self._store = store
        self._limits = limits
        self._restart = restart
        self._warn = warn
        self._failures = 0
        self._restarts = 0
        self._is_full = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._limits.store_probe_s)
            try:
                self._judge(await self._failure())
            except TokenMeshError:
                # NATS is down or hangs, which ProcessWatch handles.
                self._failures = 0

    def _judge(self, failure: str | None) -> None:
        if failure is None:
            self._failures, self._restarts, self._is_full = 0, 0, False
            return
        if shutil.disk_usage(self._store).free < self._limits.store_min_free_bytes:
            if not self._is_full:
                self._warn(f"no room on the disk of {self._store}: responses cannot be stored")
            self._failures, self._is_full = 0, True
            return
        self._failures += 1
        if self._failures >= _FAILURES * 2 ** min(self._restarts, _MAX_DOUBLINGS):
            self._restarts, self._failures = self._restarts + 1, 0
            self._restart(f"killed: its disk has room and JetStream does not write: {failure}")

    async def _failure(self) -> str | None:
        """The error of a stream that cannot write. Raises Unavailable, DeadlineExceeded."""
        names = (await self._request("$JS.API.STREAM.NAMES", {})).get("streams") or ()
        for name in names:
            try:
                await self._request(f"$JS.API.STREAM.PURGE.{name}", {"filter": _NOWHERE})
            except StreamMissing:
                continue
            except ProtocolError as error:
                return f"stream {name}: {error.message}"
        return None

    async def _request(self, subject: str, request: dict[str, str]) -> dict[str, Any]:
        deadline_s = now_s() + self._limits.store_probe_s
        data = msgspec.json.encode(request)
        return answer_of(await self._bus.raw.request(subject, data, deadline_s=deadline_s))


_LOOKS: Final = 10
"""A child is looked at so often within the time that it may be silent."""
_SIGN_BYTES: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a datagram's sender, from the kernel."""

Children = Callable[[], Iterable[Child]]


class ProcessWatch:
    """Looks after children as long as `run` runs."""

    def __init__(self, limits: UpSettings, children: Children) -> None:
        self._limits = limits
        self._children = children
        self._pause_s = limits.hung_s / _LOOKS

    async def run(self) -> None:
        looked_s = monotonic_s()
        while True:
            await asyncio.sleep(self._pause_s)
            self._shift_times(monotonic_s() - looked_s - self._pause_s)
            await asyncio.gather(*(self._ask(child) for child in self._children()))
            looked_s = monotonic_s()
            for child in self._children():
                self._judge(child, looked_s)

    @contextmanager
    def listening(self, path: Path) -> Iterator[None]:
        """Take heartbeats from a socket at `path`. Raises ConfigError when it is too long."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as signs:
            signs.setblocking(False)
            signs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                signs.bind(os.fspath(path))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {path}: {error}; set TMPDIR to a shorter path"
                ) from error
            loop = asyncio.get_running_loop()
            loop.add_reader(signs, self._take, signs)
            try:
                yield
            finally:
                loop.remove_reader(signs)

    def _take(self, signs: socket.socket) -> None:
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        with suppress(BlockingIOError):
            _, ancillary, _, _ = signs.recvmsg(_SIGN_BYTES, room)
            senders = {
                _CREDENTIALS.unpack(data)[0]
                for level, kind, data in ancillary
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            }
            for child in self._children():
                if child.pid in senders:
                    child.answered_s = monotonic_s()

    def _shift_times(self, late_s: float) -> None:
        """When this process itself was stopped, its pause does not count as silence of children."""
        if late_s < self._pause_s:
            return
        for child in self._children():
            child.began_s += late_s
            if child.answered_s is not None:
                child.answered_s += late_s

    async def _ask(self, child: Child) -> None:
        port, greeting = child.spec.port, child.spec.greeting
        if (
            port is not None
            and greeting is not None
            and await _answers(port, greeting, self._pause_s)
        ):
            child.answered_s = monotonic_s()

    def _judge(self, child: Child, now: float) -> None:
        if not child.spec.is_watched or not child.is_running:
            return
        if child.answered_s is None:
            if now - child.began_s >= self._limits.ready_s:
                child.kill(f"killed: not ready after up.ready_s = {self._limits.ready_s:.0f} s")
        elif now - child.answered_s >= self._limits.hung_s:
            child.kill(f"killed: it did not answer for up.hung_s = {self._limits.hung_s:g} s")


async def _answers(port: int, greeting: bytes, timeout_s: float) -> bool:
    """Return whether a server sends a line in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                writer.write(greeting)
                return bool(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
