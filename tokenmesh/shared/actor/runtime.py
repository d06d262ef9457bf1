"""ActorRuntime: takes envelopes from the bus, runs handlers, and answers every one exactly once.

The path of a message: `receive` -> a free slot or the mailbox -> `_run` in a task of its own ->
`_answer` (the handler, its deadline, its errors) -> the reply. Handlers of a tenant start in order
of arrival, tenants take turns, and all run side by side.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from tokenmesh.shared.actor.actor import Actor, BackgroundTasks, Context
from tokenmesh.shared.actor.meters import ActorCounts, ActorMeters
from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.clock import now_s, perf_s
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Overloaded,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.fair_queue import FairQueue
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.logs import bind_request
from tokenmesh.shared.messages import Done, Message, Tokens
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import REQUEST_ID, span

logger = logging.getLogger(__name__)

OVERLOADED_RETRY_AFTER_S: Final = 0.5
"""Retry-After of a full mailbox."""


@contextmanager
def _bound(message: Message | Tokens, name: str, parent: str | None) -> Iterator[None]:
    """A span for the handler; spans and logs have the request's id if it is not empty.

    None for what belongs to no request and to no trace, as pings do: they would be traces of their
    own, and push those of requests out of where the last ones are kept.
    """
    request_id: RequestId | None = getattr(message, "request_id", None)
    if request_id:
        with bind_request(request_id), span(name, {REQUEST_ID: request_id}, parent):
            yield
    elif parent is not None:
        with span(name, parent=parent):
            yield
    else:
        yield


def _ignore_fatal(name: str) -> None:
    logger.error("fatal: background task %s crashed", name)


async def _ignore_turn(_turn: str) -> None:
    """For an actor that is not watched."""


_SOLE_S: Final = 5.0
"""A sole turn waits so long for the requests before it, and lasts so long at most."""


class ActorRuntime:
    """Runs one actor on any number of subjects, with one mailbox for all of them."""

    def __init__(
        self,
        actor: Actor,
        bus: Bus,
        settings: ServiceSettings,
        *,
        metrics: Metrics | None = None,
        on_fatal: Callable[[str], None] = _ignore_fatal,
        on_sole_turn: Callable[[str], Awaitable[None]] = _ignore_turn,
    ) -> None:
        """`on_sole_turn` is awaited with the name of a sole turn before it begins, and with an
        empty one before it ends."""
        self.actor = actor
        self._meters = ActorMeters(self.name, metrics or Metrics())
        self._bus = bus
        self._settings = settings
        self._mailbox: FairQueue[Envelope] = FairQueue(settings.mailbox_size)
        self._running: set[asyncio.Task[None]] = set()
        self._sole_turn: str | None = None
        """The turn in which no other handler starts."""
        self._on_sole_turn = on_sole_turn
        self._idle = asyncio.Event()
        self._idle.set()
        self._subscriptions: list[Subscription] = []
        self.listening: list[tuple[str, str | None]] = []
        """Subjects and their queue groups."""
        self._is_started = False
        self._is_stopping = False
        self._is_stopped = False
        actor.background = BackgroundTasks(on_fatal, settings)

    @property
    def name(self) -> str:
        """Class name of the actor."""
        return type(self.actor).__name__

    @property
    def counts(self) -> ActorCounts:
        """The actor's counts since its start."""
        return self._meters.counts

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Messages in the mailbox."""
        return len(self._mailbox)

    async def listen(self, subject: str, queue: str | None = None) -> None:
        """Take messages from `subject`, shared with the other members of `queue`.

        The first call starts the actor.
        """
        if not self._is_started:
            self._is_started = True
            await self.actor.start()
        subscription = await self._bus.subscribe(subject, self.receive, queue=queue)
        self._subscriptions.append(subscription)
        self.listening.append((subject, queue))

    async def receive(self, envelope: Envelope) -> None:
        """Start a handler, or keep the message for later, or refuse it."""
        self.counts.received += 1
        if self._has_room():
            self._start(envelope)
            return
        # Senders without a tenant are one.
        tenant = getattr(envelope.message, "tenant", "")
        refused = self._mailbox.push(tenant, envelope)
        if refused is not None:
            self.counts.refused += 1
            wait_s = OVERLOADED_RETRY_AFTER_S
            full = Overloaded("the mailbox is full", retry_after_s=wait_s)
            await self._send(refused, to_failed(full))

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, finish for `grace_s`, answer what is left with Failed(draining).

        A stop that was cancelled may be followed by another one with less grace.
        """
        if self._is_stopped:
            return
        await asyncio.gather(*(subscription.stop() for subscription in self._subscriptions))
        self._subscriptions.clear()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            await self._abandon()
        if self._is_started:
            await self._stop_actor()
        await self.actor.background.stop()
        self._is_stopped = True

    async def _stop_actor(self) -> None:
        try:
            await self.actor.stop()
        except Exception:
            # Other actors have yet to stop, and the last heartbeat to be sent.
            logger.exception("%s did not stop cleanly", self.name)

    async def _abandon(self) -> None:
        self._is_stopping = True
        waiting = self._mailbox.drain()
        # A task that is canceled before its first step never answers.
        await asyncio.sleep(0)
        running = tuple(self._running)
        for task in running:
            task.cancel()
        left = to_failed(Draining("the service has left"))
        for envelope in waiting:
            await self._send(envelope, left)
        if running:
            await asyncio.wait(running, timeout=self._settings.cancel_grace_s)

    def _has_room(self) -> bool:
        return len(self._running) < self._settings.concurrency and self._sole_turn is None

    def _start(self, envelope: Envelope) -> None:
        self._sole_turn = envelope.headers.alone
        task = asyncio.create_task(self._run(envelope))
        self._running.add(task)
        self._idle.clear()
        task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._fill()
        if not self._running:
            self._idle.set()

    def _fill(self) -> None:
        while self._has_room() and (envelope := self._mailbox.pop()) is not None:
            self._start(envelope)

    async def _run(self, envelope: Envelope) -> None:
        started_s, turn = perf_s(), envelope.headers.alone
        try:
            if turn is None:
                answer = await self._answer(envelope)
            else:
                async with self._alone(turn):
                    answer = await self._answer(envelope)
        except asyncio.CancelledError:
            # The task is ours and ends here: a cancelled caller gets an answer, too.
            gone = Draining("the service has left") if self._is_stopping else Cancelled("cancelled")
            answer = to_failed(gone)
        self._meters.note_handled(type(envelope.message).__name__, perf_s() - started_s)
        await self._send(envelope, answer)

    @asynccontextmanager
    async def _alone(self, turn: str) -> AsyncIterator[None]:
        """A block with a turn that is announced and in which nothing else runs.

        Others that take long are not waited for, and a turn that takes long ends before the block
        does: then it is a request like any other.
        """
        others = self._running - {asyncio.current_task()}
        ending: asyncio.Task[None] | None = None
        try:
            if others and (await asyncio.wait(others, timeout=_SOLE_S))[1]:
                self._end_turn(turn)
            else:
                await self._announce(turn)
                ending = asyncio.create_task(self._end_turn_after(_SOLE_S, turn))
            yield
        finally:
            if ending is not None and ending.cancel():
                await self._announce("")
            self._end_turn(turn)

    async def _end_turn_after(self, seconds: float, turn: str) -> None:
        await asyncio.sleep(seconds)
        await self._announce("")
        self._end_turn(turn)

    async def _announce(self, turn: str) -> None:
        # Without the bus the turn is not known, and what happens in it counts for nothing.
        with suppress(TokenMeshError):
            await self._on_sole_turn(turn)

    def _end_turn(self, turn: str) -> None:
        if self._sole_turn == turn:
            self._sole_turn = None
            self._fill()

    async def _answer(self, envelope: Envelope) -> Message:
        deadline_s = envelope.headers.deadline_s
        if deadline_s is None:
            deadline_s = now_s() + self._settings.handler_timeout_s
        context = Context(self._bus, envelope, deadline_s)
        try:
            if deadline_s <= now_s():
                raise DeadlineExceeded("the deadline had passed before the work began")
            return await self._handle(envelope, context)
        except TokenMeshError as error:
            return to_failed(error)
        except Exception as error:
            # A caller is answered whatever went wrong.
            name = type(envelope.message).__name__
            logger.exception("%s failed on %s", type(self.actor).__name__, name)
            return to_failed(TokenMeshError(f"{type(error).__name__} while handling {name}"))

    async def _handle(self, envelope: Envelope, context: Context) -> Message:
        message = envelope.message
        handler = self.actor.handlers.get(type(message))
        if handler is None:
            actor = type(self.actor).__name__
            raise ProtocolError(f"{actor} does not handle {type(message).__name__}")
        limit = asyncio.timeout(context.remaining_s())
        try:
            with _bound(message, handler.__name__, envelope.headers.traceparent):
                async with limit:
                    return await handler(self.actor, message, context) or Done()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the deadline passed during the work") from error

    async def _send(self, envelope: Envelope, answer: Message) -> None:
        self._meters.note_answer(answer)
        try:
            try:
                await self._bus.reply(envelope, answer)
            except TokenMeshError as error:
                # Most likely the answer is too large; a Failed is not.
                await self._bus.reply(envelope, to_failed(error))
            self.counts.answered += 1
        except TokenMeshError as error:
            self.counts.unsent += 1
            logger.warning("an answer to %s is lost: %s", envelope.subject, error)
