"""SpanFeed: keeps the spans of all services in the store of traces."""

from tokenmesh.services.gateway.core.api import Background
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.operations.traces import TraceStore
from tokenmesh.shared.bus.base import Subscription


class SpanFeed(Background):
    """Every gateway keeps those of the whole mesh."""

    def __init__(self, core: Core) -> None:
        self.store = TraceStore(core.config.telemetry)
        core.metrics.gauge_of("traces_kept", lambda: len(self.store))
        self._bus = core.bus
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self.store.follow(self._bus)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()
