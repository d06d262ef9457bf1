"""Tenancy: the keys, limits and shares of the tenants of one gateway."""

import asyncio

from tokenmesh.services.gateway.core.http.body_budget import BodyBudget
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.services.gateway.core.tenancy.auth import KeyRing
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis


class Tenancy:
    """Without Redis limits are per gateway, and usage is not stored."""

    def __init__(
        self,
        gateway_id: GatewayId,
        redis: Redis | None,
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> None:
        """Raises ConfigError for an invalid key file."""
        self.keys = KeyRing(settings, metrics)
        self.admission = Admission(gateway_id, redis, settings, metrics)
        self.bodies = BodyBudget(settings)
        metrics.gauge_of("large_body_bytes", lambda: self.bodies.num_held)

    async def run(self) -> None:
        """Read changed keys and settle usage until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keys.refresh())
            group.create_task(self.admission.run())

    async def stop(self) -> None:
        """Store the last usage."""
        await self.admission.stop()
