"""Child: one process of the mesh, which may be killed, frozen and started again."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import psutil

from tokenmesh.cli.embedded.child import ChildSpec
from tokenmesh.cli.embedded.ports import wait_accepting
from tokenmesh.shared.parent_death import dies_with_parent

READY_S = 240.0
_POLL_S = 0.05
_PAUSE_S = 0.5
_READY = re.compile(rb'"message": "([a-z]+-[0-9a-f]+) is ready"')


class Child:
    """Use `start` and `wait_ready`; `is_well` says whether it may be the next victim."""

    def __init__(self, spec: ChildSpec, folder: Path) -> None:
        self.name = spec.name
        self.service = spec.name.partition(" ")[0]
        self.log = folder / f"{spec.name.replace(' ', '-')}.log"
        self.is_well = False
        self.may_start_again = False
        """True where it is known to have started before."""
        self.instance_id = ""
        """The id of the incarnation that runs now."""
        self.groups: list[int] = []
        """Process groups of all incarnations."""
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._log_offset = 0

    async def start(self) -> None:
        """Start a new incarnation in a process group of its own."""
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0
        environment = {**os.environ, **self._spec.environment}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._spec.command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )
        self.groups.append(self._process.pid)

    async def wait_ready(self) -> None:
        """Return when it serves; raises RuntimeError with the end of its log when it does not.

        As any supervisor would, it starts again who has given up: a service waits for a NATS server
        that is away, but not for long.
        """
        give_up_s = time.perf_counter() + READY_S
        while not await self._is_ready(give_up_s):
            if time.perf_counter() > give_up_s or not self.may_start_again:
                end = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start:\n{end}")
            await asyncio.sleep(_PAUSE_S)
            await self.start()
        self.is_well = self.may_start_again = True

    async def _is_ready(self, give_up_s: float) -> bool:
        """False as soon as it has ended."""
        if self._spec.port is not None:
            return await wait_accepting(self._spec.port, READY_S)
        while time.perf_counter() < give_up_s:
            found = _READY.search(self.log.read_bytes(), self._log_offset)
            if found is not None:
                self.instance_id = found[1].decode()
                return True
            if self.exit_code is not None:
                return False
            await asyncio.sleep(_POLL_S)
        return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def descendants(self) -> list[psutil.Process]:
        """The processes that the last incarnation has started, and theirs."""
        if self._process is None or self._process.returncode is not None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last incarnation; negative: the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    async def wait_end(self, seconds: float) -> bool:
        """Return whether it has ended by itself; killed otherwise."""
        if self._process is None:
            return True
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            return False
        return True
