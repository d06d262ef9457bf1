"""Gateway: the components of one gateway process, without HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from tokenmesh.services.gateway.apis.audio.service import Transcriptions
from tokenmesh.services.gateway.apis.batches.service import BatchService
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.pooling.job import PoolBuilder
from tokenmesh.services.gateway.apis.responses.service import Responses
from tokenmesh.services.gateway.apis.scale_out.generate_response import (
    AbortableResponse,
    GenerateWriter,
)
from tokenmesh.services.gateway.apis.scale_out.scale_out import ScaleOut
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.api import Api, Background
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.mesh.catalog import ENCODER, WORKER
from tokenmesh.services.gateway.core.operations.commands import Admin
from tokenmesh.services.gateway.core.operations.mesh_view import (
    EngineMetrics,
    MeshView,
    measure_workers,
)
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.services.gateway.core.tenancy.usage import UsageReader
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.journal import Journal, Journals
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis


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
        apis: Sequence[Api] = APIS,
    ) -> None:
        self.core = core = Core(
            gateway_id,
            bus,
            blobs,
            members,
            settings,
            metrics=metrics,
            redis=redis,
            journals=journals,
            count_losses=count_losses,
        )
        self.apis = ApiTable(apis)
        self.routes = [api.build(core) for api in apis]
        for routes in self.routes:
            core.posts.update(routes.posts)
        self._take(core)

    def _take(self, core: Core) -> None:
        """The parts of APIs that do not build themselves yet."""
        limits, redis, metrics = core.settings, core.redis, core.metrics
        gateway_id, bus, members = core.id, core.bus, core.members
        self.id = gateway_id
        self.settings = limits
        self.members = members
        self.metrics = metrics
        self.blobs = core.uploads.blobs
        self.bus = bus
        self.draining = core.draining
        self.bodies = core.tenancy.bodies
        self.keys = core.tenancy.keys
        self.admission = core.tenancy.admission
        self.usage = UsageReader(redis, self.keys, self.admission)
        self.uploads = core.uploads
        self.catalog = core.mesh.catalog
        self.streams = core.mesh.streams
        self.calls = core.mesh.calls
        self.recovery = core.mesh.recovery
        self.pipeline = core.mesh.pipeline
        self.vocabularies = core.mesh.vocabularies
        self.generation = core.generation
        self.meters = core.generation.meters
        self.pooling = core.pooling
        self.requests = core.requests
        self.adapters = core.adapters
        self.respond = core.respond
        self.pool = core.pool
        self.admin = Admin(bus, members, self.catalog, limits)
        self.mesh_view = MeshView(gateway_id, bus, members, limits)
        self._make_services(core)
        self._spans: Subscription | None = None
        metrics.gauge_of("traces_kept", lambda: len(self.traces))
        measure_workers(metrics, lambda: members.service(WORKER), limits.max_metric_workers)
        self._engine_metrics = EngineMetrics(bus, self._engine_members, limits)

    def _make_services(self, core: Core) -> None:
        limits, journals, settings = core.settings, core.journals, core.config
        gateway_id, bus, redis = core.id, core.bus, core.redis
        self.builder = RequestBuilder(
            self.catalog,
            self.vocabularies,
            self.uploads,
            limits,
            self.adapters.resolve,
            self.generation.seeds,
        )
        self.scale_out = self._make_scale_out(settings)
        self.traces = TraceStore(settings.telemetry)
        self.pool_builder = PoolBuilder(self.catalog, limits, self.adapters.resolve)
        self.responses = self._make_responses(journals.responses, settings, redis)
        self.batches = BatchService(gateway_id, journals.batches, self.uploads, bus, settings)
        self.transcriptions = Transcriptions(self.builder, self.calls, self.generation)

    def _make_scale_out(self, settings: Settings) -> ScaleOut:
        mesh = self.core.mesh
        return ScaleOut(
            self.bus,
            settings,
            rendered=mesh.rendered,
            catalog=mesh.catalog,
            vocabularies=mesh.vocabularies,
            uploads=self.uploads,
            pipeline=mesh.pipeline,
            resolve=self.adapters.resolve,
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

    def _engine_members(self) -> list[Member]:
        return [*self.members.service(WORKER), *self.members.service(ENCODER)]

    def respond_abortable(
        self, request: GenerationRequest, writer: GenerateWriter
    ) -> AbortableResponse:
        """The same for a request that its client may abort by its id."""
        return AbortableResponse(request, writer, self.generation, self.scale_out.aborts)

    async def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Metrics of this process and of the engines of the mesh, and their media type."""
        await self._engine_metrics.read()
        engines = partial(self._engine_metrics.render, self.metrics.prefix)
        return self.metrics.render_with(engines, accept)

    async def start(self) -> None:
        """Subscribe to tokens and spans."""
        self._spans = await self.traces.follow(self.bus)
        await self.core.start()
        await self.scale_out.start()
        await self.responses.start()
        for work in self._background():
            await work.start()

    async def run(self) -> None:
        """Watch workers, send Cancels and adopt responses until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.core.run())
            group.create_task(self.responses.run())
            for work in self._background():
                group.create_task(work.run())

    async def stop(self) -> None:
        """Hand responses over, send the last Cancels and usage, and unsubscribe."""
        for work in self._background():
            await work.stop()
        await self.responses.stop()
        await self.scale_out.stop()
        await self.core.stop()
        if self._spans is not None:
            await self._spans.stop()

    def _background(self) -> list[Background]:
        return [work for routes in self.routes for work in routes.background]
