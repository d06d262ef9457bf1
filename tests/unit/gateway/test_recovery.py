"""When StreamRecovery checks workers. What it finds is tested with workers that die and hang."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.mesh.liveness import Breaker
from tokenmesh.services.gateway.core.mesh.recovery import StreamRecovery
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.services.gateway.core.mesh.streams import Stream, Streams
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import DeadlineExceeded
from tokenmesh.shared.ids import GatewayId, WorkerId
from tokenmesh.shared.messages import Done
from tokenmesh.shared.metrics import Metrics

GATEWAY = GatewayId("g")
WORKER = WorkerId("w")
SETTINGS = GatewaySettings(
    watch_interval_s=0.001, silence_s=0.03, silence_max_s=0.03, first_answer_s=0
)


class Bus:
    """Answers each ping and records when it was sent."""

    def __init__(self) -> None:
        self.pinged_s: list[float] = []

    async def request(self, *_: object, **__: object) -> Done:
        self.pinged_s.append(monotonic_s())
        return Done()


class HangingBus(Bus):
    """Hangs from before a ping until its deadline, then answers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flushes = 0
        self._resumed = asyncio.Event()

    async def request(self, *_: object, **__: object) -> Done:
        await super().request()
        await asyncio.sleep(SETTINGS.ping_timeout_s * 0.9)
        self._resumed.set()
        raise DeadlineExceeded("no answer")

    async def flush(self) -> None:
        self.num_flushes += 1
        await self._resumed.wait()


class SlowBus(Bus):
    """Answers each ping after a time."""

    async def request(self, *_: object, **__: object) -> Done:
        await super().request()
        await asyncio.sleep(2 * SETTINGS.ping_timeout_s)
        return Done()

    async def flush(self) -> None:
        return


class Launcher:
    """Where streams of workers that were declared dead go."""

    def __init__(self) -> None:
        self.moved: list[Stream] = []

    def recover(self, stream: Stream) -> None:
        self.moved.append(stream)


@asynccontextmanager
async def checking(
    bus: Bus,
    checks: "count[int]",
    launcher: Launcher | None = None,
    settings: GatewaySettings = SETTINGS,
) -> AsyncIterator[Streams]:
    """A StreamRecovery that runs; each check takes a number from `checks`."""
    anything = cast("Any", bus)
    streams = Streams(GATEWAY, anything, settings, Breaker(settings))
    recovery = StreamRecovery(
        GATEWAY,
        anything,
        streams,
        cast("Any", launcher),
        settings,
        Metrics(),
        count_losses=lambda: next(checks) * 0,
    )
    task = asyncio.create_task(recovery.run())
    try:
        yield streams
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    """Bounded by the test's time limit."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def open_stream(streams: Streams) -> Stream:
    """A stream on the worker."""
    nothing = cast("Any", None)
    session, number = streams.new_session(), streams.next_number()
    stream = Stream(number, session, Inbox(8), 0, nothing, nothing, nothing)
    streams.open(stream)
    streams.start(stream, WORKER, 0)
    return stream


async def test_there_are_few_checks_while_no_worker_runs_a_stream() -> None:
    checks = count()
    async with checking(Bus(), checks) as streams:
        await asyncio.sleep(0.1)
        assert next(checks) <= 1
        stream = open_stream(streams)
        await until(lambda: next(checks) >= 8)
        stream.session.end()
        streams.close(stream)
        await until(lambda: not streams.has_workers.is_set())
        await asyncio.sleep(0.05)
        num_checks = next(checks)
        await asyncio.sleep(0.1)
        assert next(checks) - num_checks <= 2


async def test_a_silent_worker_is_pinged_after_its_time_and_not_before() -> None:
    bus = Bus()
    async with checking(bus, count()) as streams:
        began_s = monotonic_s()
        open_stream(streams)
        await until(lambda: len(bus.pinged_s) >= 3)
        assert bus.pinged_s[0] - began_s >= SETTINGS.silence_s
        assert bus.pinged_s[2] - began_s >= 3 * SETTINGS.silence_s


async def test_a_bus_that_hung_during_a_ping_explains_the_silence() -> None:
    bus = HangingBus()
    async with checking(bus, count()) as streams:
        stream = open_stream(streams)
        await until(lambda: len(bus.pinged_s) >= 2)
        assert bus.num_flushes >= 1
        assert stream.session.state is SessionState.RUNNING
        assert streams.on(WORKER) == [stream]


async def test_a_worker_that_was_only_slow_has_longer_the_next_time() -> None:
    bus, launcher = SlowBus(), Launcher()
    async with checking(bus, count(), launcher) as streams:
        first = open_stream(streams)
        await until(lambda: launcher.moved == [first])
        answers = streams._answers[WORKER]
        await until(lambda: answers.at(monotonic_s()) > SETTINGS.ping_timeout_s)
        streams.close(first)
        second, before = open_stream(streams), len(bus.pinged_s)
        # each ping is sent twice: the third silence begins when the second was answered
        await until(lambda: len(bus.pinged_s) >= before + 5)
        assert launcher.moved == [first]
        assert streams.on(WORKER) == [second]


async def test_a_worker_in_its_first_seconds_may_be_slow() -> None:
    bus, launcher = SlowBus(), Launcher()
    known = GatewaySettings.model_fields["first_answer_s"].default
    settings = SETTINGS.model_copy(update={"first_answer_s": known})
    async with checking(bus, count(), launcher, settings) as streams:
        stream = open_stream(streams)
        # the third silence begins when the second ping was answered
        await until(lambda: len(bus.pinged_s) >= 5)
        assert launcher.moved == []
        assert streams.on(WORKER) == [stream]


async def test_a_machine_that_becomes_slow_during_a_ping_leaves_more_time() -> None:
    bus, launcher = SlowBus(), Launcher()
    async with checking(bus, count(), launcher) as streams:
        open_stream(streams)
        await until(lambda: bool(bus.pinged_s))
        time.sleep(0.08)  # noqa: ASYNC251 - the event loop is late by it
        await until(lambda: len(bus.pinged_s) >= 3)
        assert launcher.moved == []
