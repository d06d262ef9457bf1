"""ComputeThread: runs steps in the order of their launch, while the engine thread does the rest."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from tokenmesh.engine.plan import StepResult
from tokenmesh.shared.errors import TokenMeshError


class Skipped(TokenMeshError):
    """The step was launched on top of one that failed."""


class Task:
    """An in-flight step; implements `Launch`."""

    def __init__(self, compute: Callable[[], StepResult], below: "Task | None") -> None:
        """below is the step before, unless its result was taken already."""
        self._compute: Callable[[], StepResult] | None = compute
        self._below = below
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self.is_taken = False

    def run(self) -> None:
        """Run the step on the compute thread."""
        assert self._compute is not None
        try:
            if self._below is not None and self._below._error is not None:
                raise Skipped("a step below failed")
            self._result = self._compute()
        # raised again where the result is taken
        except BaseException as error:
            self._error = error
        # what a task refers to must not live on with it
        self._compute = self._below = None
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def result(self) -> StepResult:
        """See `Launch.result`. The worker's watchdog bounds the wait."""
        self._ended.wait()
        self.is_taken = True
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class ComputeHere:
    """The same for an engine that never launches ahead, without handing steps to a thread."""

    def submit(self, compute: Callable[[], StepResult]) -> Task:
        """Run the step; it has ended when this returns."""
        task = Task(compute, below=None)
        task.run()
        return task


class ComputeThread:
    """One thread, which ends when this object is garbage-collected."""

    def __init__(self) -> None:
        # never holds more than the launches that the engine has in flight
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._last: Task | None = None
        threading.Thread(target=_serve, args=(self._tasks,), name="compute", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, compute: Callable[[], StepResult]) -> Task:
        """Queue a step; it is skipped when the step before it fails before the engine knows."""
        below = None if self._last is None or self._last.is_taken else self._last
        self._last = Task(compute, below)
        self._tasks.put(self._last)
        return self._last


def _serve(tasks: "SimpleQueue[Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task.run()
        # a runner lives as long as something refers to it; this thread must not
        del task
