"""StoreWatch: restarts the embedded NATS when JetStream stays broken although its disk has room.

nats-server gives a stream up at the first write that finds no room on the disk, and takes it up
again only when it starts: without a restart, freeing the disk would not help.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.shared.bus.jetstream_answers import NoStream, answer_of
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.errors import ProtocolError, TokenMeshError

_NOWHERE: Final = "tm.nowhere"
"""A subject without entries: purging it shows whether a stream can write, and changes nothing."""
_FAILURES: Final = 2
"""Failed probes in a row before the first restart; twice as many before each that follows."""
_MAX_DOUBLINGS: Final = 6


class StoreWatch:
    """Asks every stream from time to time whether it can still write."""

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
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._limits.store_probe_s)
            try:
                self._judge(await self._complaint())
            except TokenMeshError:
                # NATS is away or hangs: whether it answers at all is for others to watch.
                self._failures = 0

    def _judge(self, complaint: str | None) -> None:
        if complaint is None:
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
            self._restart(f"killed: its disk has room and JetStream does not write: {complaint}")

    async def _complaint(self) -> str | None:
        """What a stream that cannot write says. Raises Unavailable, DeadlineExceeded."""
        names = (await self._ask("$JS.API.STREAM.NAMES", {})).get("streams") or ()
        for name in names:
            try:
                await self._ask(f"$JS.API.STREAM.PURGE.{name}", {"filter": _NOWHERE})
            except NoStream:
                continue
            except ProtocolError as error:
                return f"stream {name}: {error.message}"
        return None

    async def _ask(self, subject: str, question: dict[str, str]) -> dict[str, Any]:
        deadline_s = now_s() + self._limits.store_probe_s
        data = msgspec.json.encode(question)
        return answer_of(await self._bus.raw.ask(subject, data, deadline_s=deadline_s))
