"""EngineThread: the thread that steps the engine, and the two queues between it and the event loop.

Commands go in, step outputs come out; nothing else is shared. The engine runs on while the event
loop is busy, up to `max_unpublished_steps`.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tokenmesh.engine.core.engine import Engine, EngineBroken
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.messages.failed import Failed

logger = logging.getLogger(__name__)

_BROKEN: Final = Ending(
    "error", error=Failed(code="unavailable", message="the engine has stopped", retryable=True)
)
_COMMANDS_PER_STREAM: Final = 4
"""A stream needs one command to begin and one to be cancelled, and two where it waits for KV."""
_COMMANDS_BESIDE: Final = 8 + 2 * 256
"""For all streams at once, for what is done between two steps, and for leases of KV."""


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class AddAll:
    """Add the requests of one Pool."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class End:
    """End a stream, or all of them."""

    ending: Ending
    key: StreamKey | None
    """None: every stream."""
    num_items: int = 1
    """This is the number of items of a Pool, whose items have keys of their own."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; open streams get nothing more."""


@dataclass(frozen=True, slots=True)
class Perform:
    """Do something to the engine between two steps; the result goes to `done`."""

    work: Callable[[Engine], Any]
    done: Future[Any]

    def run(self, engine: Engine) -> None:
        """On the engine thread. Raises nothing."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work(engine))
        # an error of the command, not of the engine
        except Exception as error:
            self.done.set_exception(error)


class Consult(Perform):
    """The same while steps stay in flight: it changes nothing that they use."""


Command = Add | AddAll | End | Perform | Stop


class EngineHost(Protocol):
    """Runs an engine for the actor; `EngineThread` outside of simulations."""

    @property
    def failure(self) -> Exception | None:
        """The error that stopped the engine."""

    @property
    def busy_s(self) -> float:
        """For how long the oldest step in flight has been going on; 0 when there is none."""

    @property
    def outputs_ready(self) -> asyncio.Event:
        """Set whenever there is something to take, or a failure to see."""

    def start(self) -> None:
        """Begin to serve commands; called on the event loop."""

    def stop(self, timeout_s: float) -> bool:
        """Leave after the step at hand; blocks. False when it is stuck in that step."""

    def submit(self, command: Command) -> None:
        """Hand over a command; it is carried out before the next step. Raises Overloaded."""

    def take_outputs(self) -> list[StepOutput]:
        """All finished steps, oldest first."""


class EngineThread:
    """Owns the engine from `start` to `stop`; see `EngineHost` for its methods."""

    def __init__(self, engine: Engine, settings: WorkerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self.outputs_ready = asyncio.Event()
        num_streams = settings.num_rows + settings.max_waiting
        self._commands: queue.Queue[Command] = queue.Queue(
            _COMMANDS_PER_STREAM * num_streams + _COMMANDS_BESIDE
        )
        self._outputs: queue.Queue[StepOutput] = queue.Queue(settings.max_unpublished_steps)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failure: Exception | None = None
        self._is_waking = False
        """It tells whether `outputs_ready` is about to be set."""

    @property
    def failure(self) -> Exception | None:
        return self._failure

    @property
    def busy_s(self) -> float:
        began_s = self._engine.busy_since_s
        return 0.0 if began_s is None else monotonic_s() - began_s

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._commands.put(Stop(), timeout=timeout_s)
                self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, command: Command) -> None:
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise Overloaded("the engine is not taking commands", retry_after_s=1.0) from None

    def take_outputs(self) -> list[StepOutput]:
        taken = []
        while True:
            try:
                taken.append(self._outputs.get_nowait())
            except queue.Empty:
                return taken

    def _run(self) -> None:
        try:
            while self._carry_out():
                if self._engine.has_work:
                    self._engine.step()
                self._emit()
                self._engine.wait_for_launch_window()
            self._engine.settle()
            self._emit()
        except EngineBroken as error:
            self._engine.cancel_all(_BROKEN)
            with suppress(queue.Full):
                self._emit()
            self._fail(error)
        # the event loop reads `failure` and ends the process
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        logger.critical("the engine has stopped: %s", error, exc_info=error)
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        """Several steps may end before the event loop runs: it is woken once for them."""
        assert self._loop is not None
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._set_ready)

    def _set_ready(self) -> None:
        # first: what is put into the queue after this line is announced again
        self._is_waking = False
        self.outputs_ready.set()

    def _carry_out(self) -> bool:
        """Carry out commands; waits for one only while the engine has no work. False: stop."""
        must_wait = not self._engine.has_work
        # only this thread takes commands, so one that is there can be had at once
        while must_wait or not self._commands.empty():
            command = self._commands.get()
            must_wait = False
            if isinstance(command, Add):
                self._engine.add(command.request)
            elif isinstance(command, AddAll):
                for request in command.requests:
                    self._engine.add(request)
            elif isinstance(command, Stop):
                return False
            elif isinstance(command, Perform):
                if not isinstance(command, Consult):
                    # the command may change a model that must not be computing
                    self._engine.settle()
                command.run(self._engine)
            elif command.key is None:
                self._engine.cancel_all(command.ending)
            else:
                for item in range(command.num_items):
                    self._engine.cancel(command.key._replace(item=item), command.ending)
        return True

    def _emit(self) -> None:
        self._outputs.put(self._engine.take_output(), timeout=self._settings.publish_wait_s)
        self._wake()
