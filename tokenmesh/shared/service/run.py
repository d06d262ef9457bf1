"""From settings to exit code: connect, build, publish heartbeats, wait, drain, stop."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import uvloop

from tokenmesh.shared import subjects
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import BusLost, CheckpointError, ConfigError, Unavailable
from tokenmesh.shared.ids import InstanceId, new_instance_id
from tokenmesh.shared.lifecycle import ExitCode, StopSignals, Watchdog
from tokenmesh.shared.logs import start_logging
from tokenmesh.shared.messages import Done, Drain, MetricsRead, Ping, ReadMetrics
from tokenmesh.shared.metrics import ENGINE_METRICS, Metrics, sample_lines
from tokenmesh.shared.metrics.endpoint import start_metrics_endpoint
from tokenmesh.shared.redis import Redis, open_redis
from tokenmesh.shared.service.mesh import Mesh
from tokenmesh.shared.telemetry import start_telemetry

if TYPE_CHECKING:
    from tokenmesh.shared.config import Settings

LAG_INTERVAL_S: Final = 0.02
"""The event loop measures so often how late it is."""


class ProcessControl(Actor):
    """Listens on the process's own control subject."""

    def __init__(self, drain: Callable[[], None], metrics: Metrics) -> None:
        super().__init__()
        self._drain = drain
        self._metrics = metrics

    @handles(Drain)
    async def drain(self, message: Drain, context: Context) -> Done:
        """Accept nothing new, finish or hand over, stop without a restart."""
        self._drain()
        return Done()

    @handles(Ping)
    async def ping(self, message: Ping, context: Context) -> Done:
        """The process is connected, and its event loop runs."""
        return Done()

    @handles(ReadMetrics)
    async def read_metrics(self, message: ReadMetrics, context: Context) -> MetricsRead:
        """Answer with the metrics of this process's engine; with nothing where it has none."""
        lines = await asyncio.to_thread(sample_lines, self._metrics, ENGINE_METRICS)
        return MetricsRead(lines=lines)


class LoopLag:
    """Measures from its creation, in a running loop, until `stop`."""

    def __init__(self, metrics: Metrics, interval_s: float) -> None:
        self._observe = metrics.histogram("event_loop_lag_seconds").observe
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._start()

    def stop(self) -> None:
        self._timer.cancel()

    def _start(self) -> None:
        self._due_s = monotonic_s() + self._interval_s
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        self._observe(max(0.0, monotonic_s() - self._due_s))
        self._start()


logger = logging.getLogger(__name__)

_GC_THRESHOLDS: Final = (20_000, 10, 20)
"""Allocations before the youngest objects are looked at, 700 by default; requests leave hardly any
cycles."""

Build = Callable[[Mesh], Coroutine[Any, Any, None]]


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's exception handler: logs all but look-ups of names that no caller waits for.

    uvloop leaves the look-up of a connection whose time is over to itself. What wanted to
    connect has reported that, and tries again.
    """
    is_lookup = isinstance(context.get("exception"), socket.gaierror) and "future" in context
    if not is_lookup or "task" in context:
        loop.default_exception_handler(context)


def run_service(name: str, settings: "Settings", build: Build) -> int:
    """Run one service until a signal ends it; returns the exit code."""

    instance_id = new_instance_id(name)
    start_logging(name, instance_id, settings.telemetry)

    is_built = False

    async def build_and_freeze(mesh: Mesh) -> None:
        nonlocal is_built
        await build(mesh)
        # What is loaded stays: a collection over it would cost more than a request.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        is_built = True

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(log_unhandled)
        stops = StopSignals()
        with stops.installed():
            code = await serve(name, instance_id, settings, build_and_freeze, stops)
        if stops.first.is_set() and not is_built:
            # The loop would wait for the thread that loads a model or compiles kernels.
            logging.shutdown()
            os._exit(code)
        return code

    return uvloop.run(main())


async def serve(
    name: str, instance_id: InstanceId, settings: "Settings", build: Build, stops: StopSignals
) -> int:
    """`run_service` inside a running loop; `stops` takes the place of signals."""
    async with AsyncExitStack() as stack:
        # The first to enter: the last steps of leaving are watched, too.
        watchdog = stack.enter_context(Watchdog())
        try:
            mesh = await _enter(name, instance_id, settings, stack)
        except BusLost as error:
            logger.critical("%s", error.message)
            return ExitCode.NO_BUS
        except ConfigError as error:
            logger.critical("%s", error.message)
            return ExitCode.BAD_CONFIG
        limits = settings.service
        if limits.exit_with_parent:
            watch = asyncio.create_task(stops.watch_parent(limits.parent_poll_s))
            stack.callback(watch.cancel)
        return await _live(mesh, build, stops, watchdog)


async def _enter(
    name: str, instance_id: InstanceId, settings: "Settings", stack: AsyncExitStack
) -> Mesh:
    """Connect everything; `stack` gets what closes it, in the order of leaving."""
    metrics = Metrics(settings.telemetry.metrics_prefix)
    metrics.watch_process()
    stack.callback(LoopLag(metrics, LAG_INTERVAL_S).stop)
    bus = await connect(
        settings.bus,
        instance_id,
        on_problem=lambda kind: metrics.counter("bus_complaints", kind=kind).inc(),
    )
    stack.push_async_callback(bus.close)
    telemetry = start_telemetry(name, instance_id, settings.telemetry, bus, metrics)
    stack.push_async_callback(telemetry.stop)
    endpoint = start_metrics_endpoint(metrics, settings.telemetry)
    if endpoint is not None:
        stack.push_async_callback(endpoint.stop)
    redis = open_redis(settings.redis)
    stack.push_async_callback(redis.close)
    await _check_redis(redis)
    mesh = Mesh(name, instance_id, settings, bus, redis, metrics)
    stack.push_async_callback(mesh.leave)
    await mesh.start()
    return mesh


async def _check_redis(redis: Redis) -> None:
    """A wrong password ends the service; an absent Redis does not: each call tries again."""
    try:
        await redis.call("PING")
    except Unavailable as error:
        logger.warning("continuing without Redis: %s", error.message)


async def _live(mesh: Mesh, build: Build, stops: StopSignals, watchdog: Watchdog) -> int:
    mesh.announce()
    building = asyncio.create_task(build(mesh))
    if await _first_of(building, stops.first.wait()) is not building:
        return ExitCode.CLEAN
    if error := building.exception():
        return _explain(mesh, error)
    control = ProcessControl(stops.drain, mesh.metrics)
    await mesh.listen(control, subjects.process_control(mesh.instance_id))
    await mesh.join()
    watchdog.ready()
    logger.info("%s is ready", mesh.instance_id)
    stop = asyncio.create_task(stops.first.wait())
    if await _first_of(stop, mesh.crashed.wait(), mesh.bus.wait_lost()) is not stop:
        return ExitCode.CRASHED
    drain = asyncio.create_task(mesh.drain(mesh.settings.service.drain_grace_s))
    if await _first_of(drain, stops.second.wait()) is drain:
        drain.result()
    return ExitCode.DRAINED if stops.is_drained else ExitCode.CLEAN


def _explain(mesh: Mesh, error: BaseException) -> int:
    """Log why the service could not be built; configuration errors without a traceback."""
    if isinstance(error, ConfigError | CheckpointError):
        logger.critical("%s", error.message)
        return ExitCode.BAD_CONFIG
    logger.critical("%s cannot start", mesh.instance_id, exc_info=error)
    return ExitCode.CRASHED


async def _first_of(*waits: Coroutine[object, object, object] | asyncio.Task[object]) -> object:
    """The wait that ends first; the others are cancelled."""
    tasks = [
        wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits
    ]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return next(wait for wait, task in zip(waits, tasks, strict=True) if task in done)
