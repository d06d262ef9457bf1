"""MeshMetrics: the metrics of a gateway and of the engines of the mesh."""

from functools import partial

from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.mesh.catalog import ENCODER, WORKER
from tokenmesh.services.gateway.core.operations.mesh_view import EngineMetrics, measure_workers
from tokenmesh.shared.membership import Member


class MeshMetrics:
    """Read at each scrape."""

    def __init__(self, core: Core) -> None:
        self._metrics = core.metrics
        self._members = core.members
        limits = core.settings
        measure_workers(
            core.metrics, lambda: core.members.service(WORKER), limits.max_metric_workers
        )
        self._engines = EngineMetrics(core.bus, self._engine_members, limits)

    def _engine_members(self) -> list[Member]:
        return [*self._members.service(WORKER), *self._members.service(ENCODER)]

    async def render(self, accept: str) -> tuple[bytes, str]:
        """All of them as text, and its media type."""
        await self._engines.read()
        engines = partial(self._engines.render, self._metrics.prefix)
        return self._metrics.render_with(engines, accept)
