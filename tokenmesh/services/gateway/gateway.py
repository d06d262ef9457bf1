"""Gateway: one gateway process without HTTP: a core, and the APIs that are built from it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.api import Api, Background, Routes
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.membership import Members
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
        journals: Mapping[str, Journal] | None = None,
        count_losses: Callable[[], int] = lambda: 0,
        apis: Sequence[Api] = APIS,
    ) -> None:
        """`count_losses` returns how often the connection to NATS was lost.

        Without `redis` limits are per gateway and usage is not stored. Raises ConfigError for an
        invalid key file.
        """
        self.core = Core(
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
        self.routes: list[Routes] = []
        for api in apis:
            routes = api.build(self.core)
            taken = self.core.posts.keys() & routes.posts.keys()
            assert not taken, f"{api.name} has paths of other APIs: {taken}"
            self.core.posts.update(routes.posts)
            self.routes.append(routes)

    @property
    def background(self) -> list[Background]:
        """The work of all APIs besides their routes."""
        return [work for routes in self.routes for work in routes.background]

    async def start(self) -> None:
        """Subscribe to tokens, and start the APIs."""
        await self.core.start()
        for work in self.background:
            await work.start()

    async def run(self) -> None:
        """Watch workers, send Cancels and do the work of APIs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.core.run())
            for work in self.background:
                group.create_task(work.run())

    async def stop(self) -> None:
        """Hand work over to other gateways, send the last Cancels and usage, and unsubscribe."""
        for work in reversed(self.background):
            await work.stop()
        await self.core.stop()
