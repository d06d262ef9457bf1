"""Gateway: the components of one gateway process, without HTTP."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

from tokenmesh.services.gateway.audio.service import Transcriptions
from tokenmesh.services.gateway.batches.service import BatchService
from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.files.sweeper import FileSweeper
from tokenmesh.services.gateway.generation.answer import (
    BodyWriter,
    GenerationResponse,
    GenerationServices,
)
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.generation.usage import Meters
from tokenmesh.services.gateway.http.body_budget import BodyBudget
from tokenmesh.services.gateway.http.response_sender import EVENTS_HEADERS
from tokenmesh.services.gateway.mesh.beam_search import BeamSearcher
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.catalog import ENCODER, WORKER, Catalog
from tokenmesh.services.gateway.mesh.held_prompts import HeldPrompts
from tokenmesh.services.gateway.mesh.launcher import Launcher
from tokenmesh.services.gateway.mesh.liveness import Breaker
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.mesh.recovery import StreamRecovery
from tokenmesh.services.gateway.mesh.stages import Stages
from tokenmesh.services.gateway.mesh.streams import Streams
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.mesh.waker import Waker
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.operations.adapters import Adapters
from tokenmesh.services.gateway.operations.commands import AdapterCommands, Admin
from tokenmesh.services.gateway.operations.mesh_view import (
    LOAD_FORMAT,
    EngineMetrics,
    Headers,
    MeshView,
    load_header,
    measure_workers,
)
from tokenmesh.services.gateway.operations.open_requests import OpenRequests
from tokenmesh.services.gateway.operations.traces import TraceStore
from tokenmesh.services.gateway.pooling.dispatcher import PoolDispatcher
from tokenmesh.services.gateway.pooling.job import PoolBuilder, PoolJob
from tokenmesh.services.gateway.pooling.prompts import PoolTokenizer
from tokenmesh.services.gateway.pooling.run import (
    Compute,
    PoolingResponse,
    PoolServices,
    answer_budget,
)
from tokenmesh.services.gateway.responses.service import Responses
from tokenmesh.services.gateway.scale_out.generate_response import AbortableResponse, GenerateWriter
from tokenmesh.services.gateway.scale_out.scale_out import ScaleOut
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.services.gateway.tenancy.auth import KeyRing
from tokenmesh.services.gateway.tenancy.usage import UsageReader
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, WorkerId
from tokenmesh.shared.journal import Journal, Journals
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis
from tokenmesh.shared.subjects import gateway_tokens


class Gateway:
    """Sends requests to workers and receives their tokens while `run` is running."""

    def __init__(
        self,
        gateway_id: GatewayId,
        bus: Bus,
        blobs: Blobs,
        members: Members,
        settings: Settings,
        *,
        metrics: Metrics,
        redis: Redis | None = None,
        journals: Journals | None = None,
        count_losses: Callable[[], int] = lambda: 0,
    ) -> None:
        """`count_losses` returns how often the connection to NATS was lost.

        Without `redis` limits are per gateway and usage is not stored. Raises ConfigError for an
        invalid key file.
        """
        limits, journals = settings.gateway, journals or Journals()
        self.id = gateway_id
        self.settings = limits
        self.members = members
        self.metrics = metrics
        self.blobs = blobs
        self.draining = asyncio.Event()
        """Set while the gateway finishes its requests and starts no background work."""
        self.bodies = BodyBudget(limits)
        self.bus = bus
        self._make_tenancy(redis)
        self._sweeper = FileSweeper.of(redis, blobs, journals.files, limits, metrics)
        self.uploads = self._sweeper.uploads
        self.catalog = Catalog(members, settings)
        self._make_mesh(count_losses)
        self.admin = Admin(bus, members, self.catalog, limits)
        self.adapters = Adapters(AdapterCommands(bus, members, limits), self.catalog, redis)
        self.mesh_view = MeshView(gateway_id, bus, members, limits)
        self.vocabularies = Vocabularies(self.calls, limits)
        self.builder = RequestBuilder(
            self.catalog, self.vocabularies, self.uploads, limits, self.adapters.resolve
        )
        self.scale_out = self._make_scale_out(settings)
        self.traces = TraceStore(settings.telemetry)
        self.pool_builder = PoolBuilder(self.catalog, limits, self.adapters.resolve)
        self.pooling = self._make_pooling()
        self.responses = self._make_responses(journals.responses, settings, redis)
        self.batches = BatchService(gateway_id, journals.batches, self.uploads, bus, settings)
        self.transcriptions = Transcriptions(self.builder, self.calls, self.generation)
        self._subscriptions: list[Subscription] = []
        self._measure()

    def _make_tenancy(self, redis: Redis | None) -> None:
        self.keys = KeyRing(self.settings, self.metrics)
        self.admission = Admission(self.id, redis, self.settings, self.metrics)
        self.usage = UsageReader(redis, self.keys, self.admission)

    def _make_mesh(self, count_losses: Callable[[], int]) -> None:
        """What sends prompts to workers and recovers their streams."""
        bus, limits, metrics = self.bus, self.settings, self.metrics
        self._breaker = breaker = Breaker(limits)
        self.streams = Streams(self.id, bus, limits, breaker)
        metrics.gauge_of("workers_left_out", lambda: len(breaker))
        self._prompts = HeldPrompts(bus, self.id)
        self.waker = Waker(bus, self.members, limits, metrics)
        self.calls = ServiceCalls(
            bus, limits, self.members, breaker.left_out, self._prompts, self.waker, metrics
        )
        launcher = Launcher(self.id, bus, self.calls, self.streams, limits, metrics)
        self.recovery = StreamRecovery(
            self.id,
            bus,
            self.streams,
            launcher,
            limits,
            metrics,
            count_losses=count_losses,
            last_beat_s=self._last_beat_s,
        )
        stages = Stages(self.calls, self.streams, launcher)
        self.pipeline = Pipeline(stages, BeamSearcher(stages).run)
        self.meters = Meters(metrics)
        self.generation = GenerationServices(
            self.pipeline, self.admission, limits, self.meters, self.load_headers
        )

    def _make_scale_out(self, settings: Settings) -> ScaleOut:
        scale_out = ScaleOut(
            self.bus,
            self.members,
            settings,
            catalog=self.catalog,
            vocabularies=self.vocabularies,
            uploads=self.uploads,
            pipeline=self.pipeline,
            resolve=self.adapters.resolve,
        )

        def on_beat(beat: Heartbeat) -> None:
            self.catalog.on_beat(beat)
            scale_out.on_beat(beat)

        self.members.on_beat = on_beat
        return scale_out

    def _make_pooling(self) -> PoolServices:
        limits = self.settings
        return PoolServices(
            tokenizer=PoolTokenizer(self.calls, limits),
            runner=PoolDispatcher(
                self.id,
                self.bus,
                self.calls,
                self.streams,
                self._breaker,
                self.blobs,
                limits,
                self.metrics,
                count_workers=lambda model: len(self.members.workers(model)),
            ),
            budget=answer_budget(limits, self.metrics),
            uploads=self.uploads,
            generation=self.generation,
        )

    def _make_responses(
        self, journal: Journal | None, settings: Settings, redis: Redis | None
    ) -> Responses:
        return Responses(
            self.id,
            self.bus,
            journal,
            self.members,
            settings,
            builder=self.builder,
            services=self.generation,
            tenant_of=self.keys.tenant,
            metrics=self.metrics,
            redis=redis,
        )

    def _measure(self) -> None:
        """Register the metrics that are read at each scrape."""
        metrics, limits = self.metrics, self.settings
        self.requests = OpenRequests(metrics)
        metrics.gauge_of("traces_kept", lambda: len(self.traces))
        metrics.gauge_of("large_body_bytes", lambda: self.bodies.num_held)
        metrics.gauge_of("open_streams", lambda: len(self.streams))
        measure_workers(metrics, lambda: self.members.service(WORKER), limits.max_metric_workers)
        self._engine_metrics = EngineMetrics(self.bus, self._engine_members, limits)

    def _engine_members(self) -> list[Member]:
        return [*self.members.service(WORKER), *self.members.service(ENCODER)]

    def respond(
        self, request: GenerationRequest, writer: BodyWriter, headers: Headers = EVENTS_HEADERS
    ) -> GenerationResponse:
        """The HTTP response that runs the request; `headers` are those of a stream."""
        return GenerationResponse(request, writer, self.generation, headers)

    def respond_abortable(
        self, request: GenerationRequest, writer: GenerateWriter
    ) -> AbortableResponse:
        """The same for a request that its client may abort by its id."""
        return AbortableResponse(request, writer, self.generation, self.scale_out.aborts)

    def pool(self, job: PoolJob, compute: Compute) -> PoolingResponse:
        """The HTTP response that computes numbers."""
        return PoolingResponse(job, compute, self.pooling)

    def load_headers(self, context: RequestContext, model: ModelName) -> Headers:
        """Further headers of a response, from the load of a model's workers."""
        if LOAD_FORMAT not in context.headers:
            return []
        return load_header(context, self.members.workers(model))

    async def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Metrics of this process and of the engines of the mesh, and their media type."""
        await self._engine_metrics.read()
        engines = partial(self._engine_metrics.render, self.metrics.prefix)
        return self.metrics.render_with(engines, accept)

    def _last_beat_s(self, worker_id: WorkerId) -> float:
        member = self.members.get(InstanceId(worker_id))
        return -inf if member is None else member.last_seen

    async def start(self) -> None:
        """Subscribe to tokens and spans."""
        tokens = await self.bus.subscribe(gateway_tokens(self.id), self.recovery.receive)
        self._subscriptions += [tokens, await self.traces.follow(self.bus)]
        await self._prompts.start()
        await self.scale_out.start()
        await self.responses.start()

    async def run(self) -> None:
        """Watch workers, send Cancels and adopt responses until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.streams.cancels.run())
            group.create_task(self.recovery.run())
            group.create_task(self.responses.run())
            group.create_task(self.keys.refresh())
            group.create_task(self.admission.run())
            group.create_task(self._sweeper.run())

    async def stop(self) -> None:
        """Hand responses over, send the last Cancels and usage, and unsubscribe."""
        await self.responses.stop()
        await self.admission.stop()
        await self.scale_out.stop()
        await self._prompts.stop()
        await self.streams.cancels.flush()
        for subscription in self._subscriptions:
            await subscription.stop()
