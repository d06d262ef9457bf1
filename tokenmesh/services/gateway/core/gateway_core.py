"""Core: what one gateway process builds its APIs from."""

import asyncio
from collections.abc import Callable, Mapping

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.files.contents import JOURNAL
from tokenmesh.services.gateway.core.files.sweeper import FileSweeper
from tokenmesh.services.gateway.core.files.uploads import Uploads
from tokenmesh.services.gateway.core.generation.answer import (
    GenerationServices,
)
from tokenmesh.services.gateway.core.generation.usage import Meters
from tokenmesh.services.gateway.core.http.endpoint import Post
from tokenmesh.services.gateway.core.mesh.client import MeshClient
from tokenmesh.services.gateway.core.operations.adapters import Adapters
from tokenmesh.services.gateway.core.operations.commands import AdapterCommands
from tokenmesh.services.gateway.core.operations.mesh_view import Headers, load_header
from tokenmesh.services.gateway.core.operations.open_requests import OpenRequests
from tokenmesh.services.gateway.core.pooling.dispatcher import PoolDispatcher
from tokenmesh.services.gateway.core.pooling.job import PoolJob
from tokenmesh.services.gateway.core.pooling.prompts import PoolTokenizer
from tokenmesh.services.gateway.core.pooling.run import (
    Compute,
    PoolingResponse,
    PoolServices,
    answer_budget,
)
from tokenmesh.services.gateway.core.tenancy.tenancy import Tenancy
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import GatewayId, ModelName, SeedSource
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.membership import Members
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis


class Core:
    """Its parts work while `run` is running."""

    def __init__(
        self,
        gateway_id: GatewayId,
        bus: Bus,
        blobs: Blobs,
        members: Members,
        config: Settings,
        *,
        metrics: Metrics,
        redis: Redis | None = None,
        journals: Mapping[str, Journal] | None = None,
        count_losses: Callable[[], int] = lambda: 0,
    ) -> None:
        """Without `redis` limits are per gateway and usage is not stored.

        Raises ConfigError for an invalid key file.
        """
        limits = config.gateway
        self.id = gateway_id
        self.bus = bus
        self.members = members
        self.metrics = metrics
        self.redis = redis
        self.config = config
        """These are the settings of all services."""
        self.journals = journals or {}
        """It holds what outlives the process, by names; what has none is not stored."""
        self.draining = asyncio.Event()
        """Set while the gateway finishes its requests and starts no background work."""
        self.posts: dict[str, Post] = {}
        """These are the endpoints of all APIs by path; complete when the first request arrives."""
        self.requests = OpenRequests(metrics)
        self.tenancy = Tenancy(gateway_id, redis, limits, metrics)
        self._sweeper = FileSweeper.of(redis, blobs, self.journals.get(JOURNAL), limits, metrics)
        self.mesh = MeshClient(gateway_id, bus, members, config, metrics, count_losses)
        commands = AdapterCommands(bus, members, limits)
        self.adapters = Adapters(commands, self.mesh.catalog, redis)
        self.generation = GenerationServices(
            self.mesh.pipeline,
            self.tenancy.admission,
            limits,
            Meters(metrics),
            self._read_load,
            SeedSource(limits.seed),
        )
        self.pooling = self._make_pooling(blobs)

    @property
    def settings(self) -> GatewaySettings:
        return self.config.gateway

    @property
    def uploads(self) -> Uploads:
        """The files of tenants."""
        return self._sweeper.uploads

    def _make_pooling(self, blobs: Blobs) -> PoolServices:
        limits, mesh = self.settings, self.mesh
        return PoolServices(
            tokenizer=PoolTokenizer(mesh.calls, limits),
            runner=PoolDispatcher(
                self.id,
                self.bus,
                mesh.calls,
                mesh.streams,
                mesh.breaker,
                blobs,
                limits,
                self.metrics,
                count_workers=lambda model: len(self.members.workers(model)),
            ),
            budget=answer_budget(limits, self.metrics),
            uploads=self.uploads,
            generation=self.generation,
        )

    def _read_load(self, context: RequestContext, model: ModelName) -> Headers:
        return load_header(context, self.members.workers(model))

    def pool(self, job: PoolJob, compute: Compute) -> PoolingResponse:
        """The HTTP response that computes numbers."""
        return PoolingResponse(job, compute, self.pooling)

    async def start(self) -> None:
        """Begin to receive tokens."""
        await self.mesh.start()

    async def run(self) -> None:
        """Watch workers and keep the tenants' limits until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.mesh.run())
            group.create_task(self.tenancy.run())
            group.create_task(self._sweeper.run())

    async def stop(self) -> None:
        """Send the last usage and Cancels."""
        await self.tenancy.stop()
        await self.mesh.stop()
