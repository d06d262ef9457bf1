"""GenerateAnswer: an Answer that can be aborted by its id."""

import asyncio

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.response_sender import ResponseSender
from tokenmesh.services.gateway.scale_out.generate_writer import GenerateWriter
from tokenmesh.shared.errors import Draining


class GenerateAnswer(GenerationResponse):
    """An aborted answer ends with the tokens that it has and finish_reason "abort"."""

    def __init__(
        self, ask: GenerationRequest, gateway: Gateway, writer: GenerateWriter, started_s: float
    ) -> None:
        super().__init__(ask, gateway, writer, started_s)
        self._tokens = writer
        self._aborts = gateway.scale_out.aborts
        self._task: asyncio.Task[object] | None = None
        self._delivery: Delivery | None = None

    def abort(self) -> None:
        """See `Abortable.abort`."""
        if self._delivery is not None:
            self._delivery.abort()
        elif self._task is not None and not self._tokens.is_aborted:
            # No worker has it yet: nothing to read, only a wait to end.
            self._tokens.is_aborted = True
            self._task.cancel()

    async def _run(self, outlet: ResponseSender, exchange: RequestContext) -> None:
        job = self._ask.jobs[0]
        self._task = asyncio.current_task()
        with self._aborts.running(job.tenant.name, job.request_id, self):
            try:
                await super()._run(outlet, exchange)
            except Draining:
                # What the outlet makes of any cancellation but that by the client.
                if not self._tokens.is_aborted or outlet.has_begun:
                    raise
                await self._end(outlet)
            finally:
                if self._tokens.is_aborted and self._task is not None:
                    self._task.uncancel()

    async def _end(self, outlet: ResponseSender) -> None:
        data = self._tokens.aborted()
        await (outlet.end(data) if self._ask.is_stream else outlet.answer(data))

    async def _stream(self, delivery: Delivery, outlet: ResponseSender) -> None:
        self._delivery = delivery
        await super()._stream(delivery, outlet)

    async def _collect(self, delivery: Delivery, outlet: ResponseSender) -> None:
        self._delivery = delivery
        await super()._collect(delivery, outlet)
