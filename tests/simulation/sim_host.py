"""Drives an engine on the event loop: the seconds that a step takes are slept, not spent."""

import asyncio
from collections import deque
from collections.abc import Callable

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.services.worker_svc.thread import Add, Command, End, Perform


class SimHost:
    """An `EngineHost` without a thread. Set `engine` before `start`."""

    engine: Engine

    def __init__(self, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        """pause_s: each step takes so much longer."""
        self._pause_s = pause_s
        self.is_running = asyncio.Event()
        """Cleared: the process stands still."""
        self.is_running.set()
        self.outputs_ready = asyncio.Event()
        self.failure: Exception | None = None
        self.busy_s = 0.0
        self._commands: deque[Command] = deque()
        self._has_commands = asyncio.Event()
        self._outputs: list[StepOutput] = []
        self._step_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def wait(self, seconds: float) -> None:
        """Let virtual time pass; the runner calls this instead of sleeping."""
        self._step_s += seconds

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self, timeout_s: float) -> bool:
        self.kill()
        return True

    def kill(self) -> None:
        """The process dies in the middle of whatever it does."""
        if self._task is not None:
            self._task.cancel()

    def submit(self, command: Command) -> None:
        self._commands.append(command)
        self._has_commands.set()

    def take_outputs(self) -> list[StepOutput]:
        taken, self._outputs = self._outputs, []
        return taken

    async def _run(self) -> None:
        while True:
            if not self.engine.has_work:
                await self._has_commands.wait()
            await self.is_running.wait()
            self._carry_out()
            if self.engine.has_work:
                self._step_s = 0.0
                self.engine.step()
                await asyncio.sleep(self._step_s + self._pause_s())
            self._outputs.append(self.engine.take_output())
            self.outputs_ready.set()

    def _carry_out(self) -> None:
        self._has_commands.clear()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Add):
                self.engine.add(command.request)
            elif isinstance(command, Perform):
                command.run(self.engine)
            elif isinstance(command, End) and command.key is None:
                self.engine.cancel_all(command.ending)
            elif isinstance(command, End) and command.key is not None:
                self.engine.cancel(command.key, command.ending)
