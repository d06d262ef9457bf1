"""ScaleOut: the parts of a gateway that is only a frontend or only an engine."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tokenmesh.services.gateway.generation.request import GenerationRequest, Prompt
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.scale_out.aborts import Aborts
from tokenmesh.services.gateway.scale_out.generate_builder import GenerateBuilder
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.config import Settings
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages.beat import Heartbeat


class ScaleOut:
    """Does nothing if the routes are disabled."""

    def __init__(
        self,
        bus: Bus,
        members: Members,
        settings: Settings,
        *,
        catalog: Catalog,
        vocabularies: Vocabularies,
        blobs: Blobs,
        pipeline: Pipeline,
        resolve: Callable[[str], Awaitable[None]],
    ) -> None:
        """`catalog`: of models that workers serve; `resolve`: see `RequestBuilder`."""
        limits = settings.gateway
        self.is_enabled = limits.serves_scale_out
        self.catalog = Catalog(members, settings, includes_tokenized=True)
        """Includes models that only a tokenizer serves: that is enough to render."""
        self.builder = RequestBuilder(self.catalog, vocabularies, blobs, limits, resolve)
        self.tokens = GenerateBuilder(
            RequestBuilder(catalog, vocabularies, blobs, limits, resolve),
            catalog,
            vocabularies,
            settings,
        )
        self.aborts = Aborts(bus, limits.max_abort_requests)
        self._pipeline = pipeline

    def on_beat(self, beat: Heartbeat) -> None:
        """Record what a process serves."""
        if self.is_enabled:
            self.catalog.on_beat(beat)

    async def start(self) -> None:
        if self.is_enabled:
            await self.aborts.start()

    async def stop(self) -> None:
        await self.aborts.stop()

    async def tokenize(self, request: GenerationRequest) -> Sequence[Prompt]:
        """The prompts of all jobs. Raises the error of the first that fails."""
        tasks = [asyncio.create_task(self._pipeline.tokenize(job)) for job in request.jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
