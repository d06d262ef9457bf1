"""MeshClient: sends prompts to the services of the mesh, and recovers streams whose workers die."""

import asyncio
from collections.abc import Callable
from math import inf

from tokenmesh.services.gateway.core.mesh.beam_search import BeamSearcher
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.mesh.held_prompts import HeldPrompts
from tokenmesh.services.gateway.core.mesh.launcher import Launcher
from tokenmesh.services.gateway.core.mesh.liveness import Breaker
from tokenmesh.services.gateway.core.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.core.mesh.recovery import StreamRecovery
from tokenmesh.services.gateway.core.mesh.stages import Stages
from tokenmesh.services.gateway.core.mesh.streams import Streams
from tokenmesh.services.gateway.core.mesh.vocabularies import Vocabularies
from tokenmesh.shared.bus.base import Bus, Subscription
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import GatewayId, InstanceId, WorkerId
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.subjects import gateway_tokens


class MeshClient:
    """The parts of one gateway; they work between `start` and `stop`, while `run` is running."""

    def __init__(
        self,
        gateway_id: GatewayId,
        bus: Bus,
        members: Members,
        settings: Settings,
        metrics: Metrics,
        count_losses: Callable[[], int],
    ) -> None:
        """`count_losses` returns how often the connection to NATS was lost."""
        limits = settings.gateway
        self._id = gateway_id
        self._bus = bus
        self._members = members
        self.catalog = Catalog(members, settings)
        """The models that workers serve."""
        self.rendered = self.catalog
        """The models whose prompts can be rendered."""
        if limits.serves_scale_out:
            # A tokenizer alone is enough to render.
            self.rendered = Catalog(members, settings, includes_tokenized=True)
        members.on_beat = self._on_beat
        self.breaker = Breaker(limits)
        metrics.gauge_of("workers_left_out", lambda: len(self.breaker))
        self.streams = Streams(gateway_id, bus, limits, self.breaker)
        metrics.gauge_of("open_streams", lambda: len(self.streams))
        self._prompts = HeldPrompts(bus, gateway_id)
        self.calls = ServiceCalls(
            bus, limits, members, self.breaker.left_out, self._prompts, metrics
        )
        self.vocabularies = Vocabularies(self.calls, limits)
        launcher = Launcher(gateway_id, bus, self.calls, self.streams, limits, metrics)
        self.recovery = StreamRecovery(
            gateway_id,
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
        self._tokens: Subscription | None = None

    def _on_beat(self, beat: Heartbeat) -> None:
        self.catalog.on_beat(beat)
        if self.rendered is not self.catalog:
            self.rendered.on_beat(beat)

    def _last_beat_s(self, worker_id: WorkerId) -> float:
        member = self._members.get(InstanceId(worker_id))
        return -inf if member is None else member.last_seen

    async def start(self) -> None:
        """Subscribe to tokens, and serve large prompts to tokenizers."""
        self._tokens = await self._bus.subscribe(gateway_tokens(self._id), self.recovery.receive)
        await self._prompts.start()

    async def run(self) -> None:
        """Watch workers and send Cancels until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.streams.cancels.run())
            group.create_task(self.recovery.run())

    async def stop(self) -> None:
        """Send the last Cancels, and unsubscribe."""
        await self._prompts.stop()
        await self.streams.cancels.flush()
        if self._tokens is not None:
            await self._tokens.stop()
