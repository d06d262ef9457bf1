"""ScaleOut: the parts of a gateway that is only a frontend or only an engine, and Aborts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from tokenmesh.services.gateway.files.uploads import Uploads
from tokenmesh.services.gateway.generation.request import GenerationRequest, Prompt
from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.scale_out.generate_builder import GenerateBuilder
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.membership import Members
from tokenmesh.shared.messages import AbortRequests
from tokenmesh.shared.messages.beat import Heartbeat

_VLLM_PREFIX: Final = "generate-tokens-"
"""vLLM's prefix of response ids; ours are the client's own ids."""


class Abortable(Protocol):
    def abort(self) -> None:
        """End it with the tokens that it has."""


class Aborts:
    """Ends running requests by tenant and id on all gateways; holds those of this gateway."""

    def __init__(self, bus: Bus, max_ids: int) -> None:
        self._bus = bus
        self._max_ids = max_ids
        self._running: dict[tuple[str, RequestId], list[Abortable]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen for aborts that other gateways received."""
        self._subscription = await self._bus.subscribe(subjects.aborts(), self._receive)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    @contextmanager
    def running(self, tenant: str, request_id: RequestId, request: Abortable) -> Iterator[None]:
        """Inside the block the request can be aborted."""
        key = (tenant, request_id)
        self._running.setdefault(key, []).append(request)
        try:
            yield
        finally:
            self._running[key].remove(request)
            if not self._running[key]:
                del self._running[key]

    async def abort(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Abort a tenant's requests on every gateway. Unknown ids are ignored."""
        ids = [RequestId(each.removeprefix(_VLLM_PREFIX)) for each in request_ids]
        await self._bus.publish(
            subjects.aborts(), AbortRequests(tenant=tenant, request_ids=list(dict.fromkeys(ids)))
        )

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, AbortRequests):
            raise ProtocolError(f"a {type(message).__name__} instead of AbortRequests")
        if len(message.request_ids) > self._max_ids:
            raise ProtocolError(f"{len(message.request_ids)} ids to abort")
        for request_id in message.request_ids:
            for request in tuple(self._running.get((message.tenant, request_id), ())):
                request.abort()


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
        uploads: Uploads,
        pipeline: Pipeline,
        resolve: Callable[[str], Awaitable[None]],
    ) -> None:
        """`catalog`: of models that workers serve; `resolve`: see `RequestBuilder`."""
        limits = settings.gateway
        self.is_enabled = limits.serves_scale_out
        self.catalog = Catalog(members, settings, includes_tokenized=True)
        """Includes models that only a tokenizer serves: that is enough to render."""
        self.builder = RequestBuilder(self.catalog, vocabularies, uploads, limits, resolve)
        self.tokens = GenerateBuilder(
            RequestBuilder(catalog, vocabularies, uploads, limits, resolve),
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
