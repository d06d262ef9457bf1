"""When the watchdog looks. What it finds is tested with real workers that die and stand still."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.mesh.cancels import Cancels
from tokenmesh.services.gateway.mesh.recovery import StreamRecovery
from tokenmesh.services.gateway.mesh.session import SessionState
from tokenmesh.services.gateway.mesh.streams import Stream, Streams
from tokenmesh.services.gateway.mesh.watch_times import WatchTimes
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import DeadlineExceeded
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import Done
from tokenmesh.shared.metrics import Metrics

WORKER = WorkerId("w")
PATIENT = GatewaySettings(watch_interval_s=0.001, silence_s=0.03, silence_max_s=0.03)


class Bus:
    """Answers each ping and notes when it was asked."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    async def request(self, *_: object, **__: object) -> Done:
        self.asked_s.append(monotonic_s())
        return Done()


class Waking(Bus):
    """Stands still from before a ping until its deadline, then answers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flushes = 0
        self._is_awake = asyncio.Event()

    async def request(self, *_: object, **__: object) -> Done:
        await super().request()
        await asyncio.sleep(PATIENT.ping_timeout_s * 0.9)
        self._is_awake.set()
        raise DeadlineExceeded("no answer")

    async def flush(self) -> None:
        self.num_flushes += 1
        await self._is_awake.wait()


@asynccontextmanager
async def watching(bus: Bus, looks: "count[int]") -> AsyncIterator[Streams]:
    """A watchdog at work; it takes a number from `looks` with each look."""
    streams = Streams(WatchTimes.of(PATIENT), cast("Cancels", None), max_streams=8, max_told=8)
    dog = StreamRecovery(
        cast("Any", bus),
        streams,
        cast("Any", None),
        PATIENT,
        Metrics(),
        count_losses=lambda: next(looks) * 0,
    )
    task = asyncio.create_task(dog.run())
    try:
        yield streams
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    """The test's own time limit bounds it."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def open_stream(streams: Streams) -> Stream:
    """A stream on the worker."""
    generate = cast("Any", type("Generate", (), {"stream": streams.next_number()}))
    stream = Stream(streams.new_session(), Inbox(8), 0, cast("Any", None), generate, deadline_s=0.0)
    streams.open(stream)
    streams.start(stream, WORKER, 0)
    return stream


async def test_there_are_few_looks_while_no_worker_has_a_stream() -> None:
    looks = count()
    async with watching(Bus(), looks) as streams:
        await asyncio.sleep(0.1)
        assert next(looks) <= 1
        stream = open_stream(streams)
        await until(lambda: next(looks) >= 8)
        stream.session.end()
        streams.close(stream)
        await until(lambda: not streams.has_workers.is_set())
        await asyncio.sleep(0.05)
        num_looks = next(looks)
        await asyncio.sleep(0.1)
        assert next(looks) - num_looks <= 2


async def test_a_silent_worker_is_pinged_when_its_time_is_over_not_before() -> None:
    bus = Bus()
    async with watching(bus, count()) as streams:
        began_s = monotonic_s()
        open_stream(streams)
        await until(lambda: len(bus.asked_s) >= 3)
        assert bus.asked_s[0] - began_s >= PATIENT.silence_s
        assert bus.asked_s[2] - began_s >= 3 * PATIENT.silence_s


async def test_a_bus_that_was_still_during_a_ping_is_to_blame_though_it_answers_now() -> None:
    bus = Waking()
    async with watching(bus, count()) as streams:
        stream = open_stream(streams)
        await until(lambda: len(bus.asked_s) >= 2)
        assert bus.num_flushes >= 1
        assert stream.session.state is SessionState.RUNNING
        assert streams.on(WORKER) == [stream]
