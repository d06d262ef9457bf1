"""WorkerActor: accepts streams, cancels them, sends their output again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from tokenmesh.engine.core.engine import ABORTED, EngineBroken
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending, StreamKey
from tokenmesh.services.worker_svc.adapters.store import AdapterStore, adapter_of
from tokenmesh.services.worker_svc.admission import admit
from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.intake import Identity, Intake
from tokenmesh.services.worker_svc.kv.actor import KvActor
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.kv.parts import KvMetrics, KvParts
from tokenmesh.services.worker_svc.load import EarlyHeartbeats, LoadBook
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.on_demand import OnDemand
from tokenmesh.services.worker_svc.pooling.actor import PoolingActor
from tokenmesh.services.worker_svc.pooling.desk import PoolDesk
from tokenmesh.services.worker_svc.prefix_index.writer import IndexWriter
from tokenmesh.services.worker_svc.preparation import RequestPreparation
from tokenmesh.services.worker_svc.profiling import Profiling
from tokenmesh.services.worker_svc.publisher import Publisher
from tokenmesh.services.worker_svc.sleep import SleepController
from tokenmesh.services.worker_svc.streams import GatewayWatch, WorkerStream, WorkerStreams
from tokenmesh.services.worker_svc.telemetry import WorkerMetrics, sampled
from tokenmesh.services.worker_svc.thread import End, EngineHost
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_ns
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Draining, InvalidInput
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages import (
    Accepted,
    Cancel,
    Done,
    Drain,
    Generate,
    Ping,
    Pool,
    Profiled,
    Refused,
    Resend,
    Sleep,
    Slept,
    StartProfile,
    StopProfile,
    StreamUnknown,
    WakeUp,
    Woken,
)
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.metrics import Metrics

logger = logging.getLogger(__name__)

STOP_WAIT_S: Final = 2.0
"""A leaving worker waits so long for the step at hand."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """It holds what the worker needs of its process."""

    bus: Bus
    blobs: Blobs
    metrics: Metrics
    is_alive: Callable[[GatewayId], bool]
    """True also while this is unknown."""
    leave: Callable[[], None]
    """Drain and end the process."""
    beat: Callable[[], Coroutine[object, object, None]]
    """Publish a heartbeat at once."""
    grammars: GrammarCompiler | None = None
    """None: no structured output."""
    index: IndexWriter | None = None
    """None: the prefix cache is not reported to schedulers."""
    block_events: BlockEventStream | None = None
    """None: nor is it reported to subscribers outside."""
    adapters: AdapterStore | None = None
    """None: there are none."""
    on_demand: OnDemand | None = None
    """None: the model stays awake."""
    transfer: TransferProcess | None = None
    """None: no KV is moved to other workers or stores."""


class WorkerActor(Actor):
    """Handles the mesh's messages to one engine."""

    def __init__(
        self,
        identity: Identity,
        settings: WorkerSettings,
        loaded: Loaded,
        host: EngineHost,
        around: WorkerContext,
    ) -> None:
        super().__init__()
        self._identity = identity
        self._settings = settings
        self._loaded = loaded
        self._host = host
        self._around = around
        self._index = around.index
        streams = WorkerStreams(settings, self._index.release if self._index else None)
        self._streams, self._book = streams, (book := LoadBook.of(settings, loaded))
        self._preparation = RequestPreparation(
            settings, loaded, host, streams, book, around.blobs, around.grammars, around.adapters
        )
        self._desk = PoolDesk(settings, loaded, host, streams, book, around.blobs, around.adapters)
        self._watch = GatewayWatch(settings.gateway_grace_s)
        self._pace = EarlyHeartbeats(settings)
        meters = WorkerMetrics(around.metrics, identity.names[0], identity.worker_id, self._book)
        meters.show_format(loaded.weight_format)
        meters.watch_ranks(loaded)
        sender = (around.bus, identity.worker_id, identity.epoch)
        self._kv = self._make_kv(around.transfer, meters)
        self._publisher = Publisher(
            *sender, streams, meters, self._index, around.block_events, self._desk.note
        )
        self._sleeping = SleepController(
            *(loaded, host, self._streams, self._end_all, around.beat, around.on_demand),
            None if self._kv is None else self._kv.settle,
        )
        meters.watch_sleep(lambda: self._sleeping.level)
        self._profiling = Profiling(settings, identity.worker_id, loaded.make_trace)
        self._intake = Intake(identity, self._streams, self._sleeping.refusal, self._end)

    def _make_kv(self, transfer: TransferProcess | None, meters: WorkerMetrics) -> KvParts | None:
        shared, around = self._loaded.shared_kv, self._around
        if transfer is None or shared is None:
            return None
        parts = KvParts(
            *(self._settings, shared, self._host, transfer, around.bus, self._identity.worker_id),
            *(self._preparation.begin, self._end_key, KvMetrics(around.metrics, meters.labels)),
            lambda: self._sleeping.level == 0,
        )
        self._preparation.arrivals = parts.arrivals
        return parts

    async def start(self) -> None:
        """Start the engine and the tasks around it."""
        self._host.start()
        self.spawn(self._publish_forever, "publish", is_fatal=True)
        self.spawn(self._watch_engine, "watch engine", is_fatal=True)
        self.spawn(self._watch_gateways, "watch gateways")
        if self._index is not None:
            self.spawn(self._index.run, "prefix index")
        if self._around.on_demand is not None:
            self.spawn(self._sleeping.sleep_when_idle, "sleep when idle", is_fatal=True)

    async def stop(self) -> None:
        """Stop the engine; its last outputs are still published."""
        await self._preparation.stop()
        if self._kv is not None:
            await self._kv.stop()
        if not await asyncio.to_thread(self._host.stop, STOP_WAIT_S):
            logger.warning("the engine is stuck in a step; exiting without it")
        await self._profiling.close()
        await self._publish_outputs()
        if self._index is not None:
            await self._index.close()

    def load(self) -> WorkerLoad:
        index, level = self._index, self._sleeping.level
        load = self._preparation.load(level, is_indexed=index is not None and index.is_current)
        load = load if self._kv is None else self._kv.describe(load)
        return self._sleeping.describe(load)

    def stop_taking(self) -> None:
        self._intake.is_draining = True

    def pooling(self) -> PoolingActor:
        """The actor that takes Pools, of a model that pools."""
        return PoolingActor(self._desk, self._intake.check)

    def for_readers(self) -> KvActor | None:
        """The actor that takes messages of workers that read KV here."""
        desk = None if self._kv is None else self._kv.desk
        return None if desk is None else KvActor(desk, self._admit_for_reader)

    def _admit_for_reader(
        self, message: Generate, traceparent: str | None, computes: bool
    ) -> Request | Refused:
        refusal = self._intake.check_source(message, computes=computes)
        if refusal is not None:
            return refusal
        lora = adapter_of(self._around.adapters, message)
        block_size = self._settings.block_size
        request = admit(message, self._loaded, block_size, sampled(traceparent), lora)
        request.timeline.arrived_ns = now_ns()
        if not computes:
            return request
        refusal = self._book.refusal(request.num_known, request.spec.owner, self._streams)
        return request if refusal is None else refusal

    @handles(Generate)
    async def generate(self, message: Generate, context: Context) -> Accepted | Refused:
        """Queue a stream, or refuse it with a reason."""
        known = self._intake.check(message)
        if isinstance(known, Refused):
            return known
        if known is not None:
            return Accepted(worker_id=self._identity.worker_id)
        traceparent = sampled(context.traceparent)
        lora = adapter_of(self._around.adapters, message)
        request = admit(message, self._loaded, self._settings.block_size, traceparent, lora)
        request.timeline.arrived_ns = now_ns()
        refusal = self._book.refusal(request.num_known, request.spec.owner, self._streams)
        if refusal is not None:
            return refusal
        await self._preparation.begin(request, message)
        return Accepted(worker_id=self._identity.worker_id)

    @handles(Pool)
    async def pool(self, message: Pool, context: Context) -> Refused:
        """Raises InvalidInput: a model that pools has an actor for it, see `pooling`."""
        raise InvalidInput("this model generates text; it does not pool", param="model")

    @handles(Cancel)
    async def cancel(self, message: Cancel, context: Context) -> Done:
        """End a stream; its blocks are free before the next step."""
        known = self._streams.get(message.gateway, message.stream)
        if known is not None and known.key.attempt <= message.attempt:
            self._end(known)
        if known is None or known.key.attempt < message.attempt:
            # the Generate that this cancels may still be on its way
            key = StreamKey(message.gateway, message.stream, message.attempt)
            self._streams.end(self._streams.open(key, first_offset=0), monotonic_s())
        return Done()

    @handles(Resend)
    async def resend(self, message: Resend, context: Context) -> Done | StreamUnknown:
        """Publish again what a gateway missed."""
        known = self._streams.get(message.gateway, message.stream)
        if known is None or known.key.attempt != message.attempt:
            return StreamUnknown()
        delta = known.replay(message.offset)
        if delta is None:
            return StreamUnknown()
        if delta.token_ids or delta.finish is not None:
            await self._publisher.send(message.gateway, [delta])
        return Done()

    @handles(Ping)
    async def ping(self, message: Ping, context: Context) -> Done:
        """Answer while the event loop runs; a failed engine ends the process."""
        return Done()

    @handles(Drain)
    async def drain_command(self, message: Drain, context: Context) -> Done:
        """Drain and exit as after SIGTERM."""
        self.stop_taking()
        self._around.leave()
        return Done()

    @handles(Sleep)
    async def sleep(self, message: Sleep, context: Context) -> Slept:
        """End or finish all streams and release memory."""
        return await self._sleeping.sleep(message, context.remaining_s())

    @handles(WakeUp)
    async def wake_up(self, message: WakeUp, context: Context) -> Woken:
        """Allocate the memory again."""
        return await self._sleeping.wake(message)

    @handles(StartProfile)
    async def start_profile(self, message: StartProfile, context: Context) -> Done:
        """Record a trace from now on."""
        await self._profiling.start()
        return Done()

    @handles(StopProfile)
    async def stop_profile(self, message: StopProfile, context: Context) -> Profiled:
        return await self._profiling.stop()

    async def drain(self, grace_s: float) -> None:
        """Wait for the streams; shortly before the deadline, let the others migrate."""
        self.stop_taking()
        hand_over_s = min(grace_s, self._settings.hand_over_s)
        if await self._streams.wait_idle(grace_s - hand_over_s):
            return
        logger.info("handing over %d streams", self._streams.num_live)
        await self._end_all(Ending("error", error=to_failed(Draining("the worker is draining"))))
        await self._streams.wait_idle(hand_over_s)

    def _end_key(self, key: StreamKey) -> None:
        known = self._streams.get(key.gateway, key.stream)
        if known is not None and known.key == key:
            self._end(known)

    def _end(self, stream: WorkerStream) -> None:
        """Cancel a stream, wherever it is on its way."""
        if self._desk.cancel(stream):
            return
        if not stream.is_submitted:
            self._streams.end(stream, monotonic_s())
        elif stream.ended_s is None and not stream.is_cancelled:
            self._host.submit(End(ABORTED, stream.key))
            stream.is_cancelled = True

    async def _end_all(self, ending: Ending) -> None:
        """End every stream; gateways get the end of those that the engine lacks from here."""
        for stream in list(self._streams.live()):
            if not self._desk.cancel(stream, ending):
                await self._publisher.break_off(stream, ending)
        self._host.submit(End(ending, key=None))

    async def _publish_forever(self) -> None:
        while True:
            await self._host.outputs_ready.wait()
            self._host.outputs_ready.clear()
            await self._publish_outputs()
            if self._host.failure is not None:
                raise self._host.failure

    async def _publish_outputs(self) -> None:
        num_ended = 0
        outputs = self._host.take_outputs()
        self._profiling.note_steps(sum(output.num_tokens > 0 for output in outputs))
        for output in outputs:
            self._book.update(output.stats)
            num_ended += len(output.ended)
        await self._publisher.publish(outputs)
        if self._kv is not None:
            self._kv.note(outputs)
        if self._pace.is_due(num_ended, monotonic_s()):
            await self._around.beat()

    async def _watch_engine(self) -> None:
        """Fail when a step never ends: the event loop would still answer pings."""
        while True:
            await asyncio.sleep(self._settings.engine_check_s)
            if self._host.busy_s > self._settings.max_step_s:
                raise EngineBroken(f"a step has taken over {self._settings.max_step_s:g} s")

    async def _watch_gateways(self) -> None:
        """End the streams of dead gateways: they have no reader."""
        while True:
            await asyncio.sleep(self._settings.gateway_check_s)
            self._streams.expire(monotonic_s())
            gateways = {stream.key.gateway for stream in self._streams.live()}
            dead = self._watch.dead(gateways, self._around.is_alive, monotonic_s())
            for stream in [each for each in self._streams.live() if each.key.gateway in dead]:
                logger.warning("gateway %s is dead: ending its stream", stream.key.gateway)
                self._end(stream)
