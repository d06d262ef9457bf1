"""ProcessSupervisor: starts children, starts them again when they die, stops them in order."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.cli.embedded.child import Child, ChildSpec, Fork, OnLine, Phase
from tokenmesh.cli.embedded.fork_server import ForkServer
from tokenmesh.cli.embedded.ports import wait_accepting
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.lifecycle import ExitCode

TAIL_LINES: Final = 40
"""Last lines of a process that are kept, to explain its death."""

_KILL_WAIT_S: Final = 5.0
_MAX_DOUBLINGS: Final = 32
"""`up.restart_max_s` bounds the pause long before; this one keeps the power finite."""


@dataclass(frozen=True)
class Death:
    """The unexpected end of a child."""

    name: str
    exit_code: int
    tail: tuple[str, ...]
    """The last lines it wrote."""
    in_a_row: int = 1
    """The number of deaths of the child without `up.restart_reset_s` of life in between."""


OnRestart = Callable[[Death, float], None]
"""Called with a death and the pause before the child starts again."""

OnRecovered = Callable[[str, int], None]
"""Called with the name of a child that lives again for long enough, and how often it had died."""


class ProcessSupervisor:
    """Owns the children from start to stop; `stop` leaves none behind."""

    def __init__(
        self,
        limits: UpSettings,
        on_line: OnLine,
        on_restart: OnRestart,
        on_drained: Callable[[str], None] = lambda _name: None,
        on_recovered: OnRecovered = lambda _name, _deaths: None,
        goes_on_without: Callable[[ChildSpec], bool] = lambda _spec: False,
    ) -> None:
        """`on_drained` is called with the name of a drained child that has ended.

        goes_on_without: asked of a child that cannot run, after those in `failed`.
        """
        self._limits = limits
        self._on_line = on_line
        self._on_restart = on_restart
        self._on_drained = on_drained
        self._on_recovered = on_recovered
        self._goes_on_without = goes_on_without
        self.failed: dict[ChildSpec, Death] = {}
        """Children that cannot run, without which the others do."""
        self._never_gives_up = False
        self._children: dict[ChildSpec, Child] = {}
        self._keepers: dict[ChildSpec, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self.dead: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        """The first child that could not be started, see `never_give_up`."""

    @property
    def children(self) -> tuple[Child, ...]:
        """The children as they run now."""
        return tuple(self._children.values())

    def never_give_up(self) -> None:
        """The mesh has started: from now on children are restarted without end."""
        self._never_gives_up = True

    def kill(self, name: str, reason: str) -> None:
        """End a child, to be started again."""
        for child in self.children:
            if child.spec.name == name:
                child.kill(reason)

    async def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start children; those with a port have started when it accepts connections."""
        for spec in specs:
            if not spec.imports:
                await self._begin(spec)
        await self._begin_forks([spec for spec in specs if spec.imports])
        for spec in specs:
            if spec.port is not None and not await self._accepts(spec.port):
                self._children[spec].kill()

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Terminate phase after phase, each within `grace_s`; kill the rest.

        `hurry` ends the wait.
        """
        self._stopping.set()
        for phase in Phase:
            children = [child for spec, child in self._children.items() if spec.phase is phase]
            for child in children:
                child.terminate()
            await self._until_gone(phase, grace_s, hurry)
            for child in children:
                child.kill()
        if self._keepers:
            await asyncio.wait(self._keepers.values(), timeout=_KILL_WAIT_S)

    async def _until_gone(self, phase: Phase, grace_s: float, hurry: asyncio.Event) -> None:
        keepers = [task for spec, task in self._keepers.items() if spec.phase is phase]
        leaving = asyncio.create_task(asyncio.wait(keepers)) if keepers else None
        if leaving is not None:
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait(
                (leaving, hurried), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in (leaving, hurried):
                task.cancel()

    async def _begin_forks(self, specs: Sequence[ChildSpec]) -> None:
        """Start children that share imports, last: the others start while it imports."""
        server = await ForkServer.start(specs)
        try:
            for spec in specs:
                await self._begin(spec, server.fork if server is not None else None)
        finally:
            if server is not None:
                await server.close()

    async def _begin(self, spec: ChildSpec, fork: Fork | None = None) -> None:
        await self._start(spec, fork)
        self._keepers[spec] = asyncio.create_task(self._keep(spec), name=f"keep {spec.name}")

    async def _start(self, spec: ChildSpec, fork: Fork | None = None) -> None:
        child = Child(spec, TAIL_LINES, self._on_line)
        self._children[spec] = child
        await child.start(fork)

    async def _accepts(self, port: int) -> bool:
        accepting = asyncio.create_task(wait_accepting(port, self._limits.server_start_s))
        await asyncio.wait((accepting, self.dead), return_when=asyncio.FIRST_COMPLETED)
        return self.dead.done() or await accepting

    async def _keep(self, spec: ChildSpec) -> None:
        """Wait for the child's death and start it again, until it cannot run or is stopped."""
        deaths = 0
        while True:
            code, is_recovered = await self._wait(spec, deaths)
            if self._stopping.is_set():
                return
            if code == ExitCode.DRAINED:
                self._on_drained(spec.name)
                return
            deaths = 1 if is_recovered else deaths + 1
            death = Death(spec.name, code, tuple(self._children[spec].tail), deaths)
            if self._is_final(death):
                if self._goes_on_without(spec):
                    self.failed[spec] = death
                elif not self.dead.done():
                    self.dead.set_result(death)
                return
            wait_s = pause_s(self._limits, deaths)
            self._on_restart(death, wait_s)
            if await self._stops_within(wait_s):
                return
            await self._start_again(spec)
            if self._stopping.is_set():
                self._children[spec].kill()

    async def _wait(self, spec: ChildSpec, deaths: int) -> tuple[int, bool]:
        """The exit code, and whether it ran long enough for earlier deaths to be forgotten."""
        waiting = asyncio.create_task(self._children[spec].wait())
        done, _ = await asyncio.wait((waiting,), timeout=self._limits.restart_reset_s)
        is_recovered = not done
        if is_recovered and deaths and not self._stopping.is_set():
            self._on_recovered(spec.name, deaths)
        return await waiting, is_recovered

    def _is_final(self, death: Death) -> bool:
        is_wrong = death.exit_code == ExitCode.BAD_CONFIG
        too_often = death.in_a_row > self._limits.max_restarts
        return (is_wrong or too_often) and not self._never_gives_up

    async def _start_again(self, spec: ChildSpec) -> None:
        """Where the machine has no room for it, that is one more death."""
        try:
            await self._start(spec)
        except OSError as error:
            self._children[spec].tail.append(f"it cannot be started: {error}")

    async def _stops_within(self, pause_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            return False
        return True


def pause_s(limits: UpSettings, deaths: int) -> float:
    """Return the seconds to wait after so many deaths in a row."""
    doublings = min(deaths - 1, _MAX_DOUBLINGS)
    return min(limits.restart_min_s * 2.0**doublings, limits.restart_max_s)
