"""GenerationResponse: a generation as an HTTP response, streamed or whole.

Nothing is sent before the first tokens arrive, so that an earlier error has its status; only a
stream that waits longer than the keep-alive interval begins without them.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery, PromptRunner, deliver
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Meter, Meters
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.response_sender import (
    EVENTS_HEADERS,
    ClientWatch,
    Headers,
    ResponseSender,
)
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.ids import ModelName, SeedSource
from tokenmesh.shared.telemetry import REQUEST_ID, Tally

LOAD_FORMAT: Final = b"endpoint-load-metrics-format"
"""The header in which a client asks for the load of workers."""
LoadHeaders = Callable[[RequestContext, ModelName], Headers]
"""Further headers of a response, from the load of a model's workers."""


class BodyWriter(Protocol):
    """Writes the body in the format of one API."""

    @property
    def keep_alive(self) -> bytes:
        """Return what clients of a stream skip; also sent before `begin`."""

    def begin(self, delivery: Delivery) -> bytes:
        """The start of a stream."""

    def write(self, delivery: Delivery, chunks: list[OutputChunk]) -> bytes:
        """The events of some chunks; may be empty."""

    def end(self, delivery: Delivery) -> bytes:
        """The end of a stream."""

    def fail(self, error: TokenMeshError) -> bytes:
        """The end of a stream that fails after it has begun."""

    def whole(self, delivery: Delivery, chunks: list[OutputChunk]) -> Any:
        """The body of a response that is not streamed, from all its chunks."""


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """It holds what every generation of a gateway runs with."""

    pipeline: PromptRunner
    admission: Admission
    settings: GatewaySettings
    meters: Meters
    read_load: LoadHeaders
    seeds: SeedSource
    """It makes the seeds of requests without a seed of their own."""

    def load_headers(self, context: RequestContext, model: ModelName) -> Headers:
        """Further headers of a response, where its client asks for them."""
        return self.read_load(context, model) if LOAD_FORMAT in context.headers else []

    def respond(
        self, request: GenerationRequest, writer: BodyWriter, headers: Headers = EVENTS_HEADERS
    ) -> "GenerationResponse":
        """The HTTP response that runs the request; `headers` are those of a stream."""
        return GenerationResponse(request, writer, self, headers)


class GenerationResponse(Response):
    """Runs a GenerationRequest when it is called."""

    def __init__(
        self,
        request: GenerationRequest,
        writer: BodyWriter,
        services: GenerationServices,
        stream_headers: Headers = EVENTS_HEADERS,
    ) -> None:
        super().__init__()
        self._stream_headers = stream_headers
        self._request = request
        self._writer = writer
        self._services = services
        self._has_begun = False
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, jobs, services = context_of(scope), self._request.jobs, self._services
        try:
            await context.widen(len(jobs), self._request.num_choices)
            async with ClientWatch(receive, services.settings.write_timeout_s) as watch:
                headers = partial(services.load_headers, context, jobs[0].card.name)
                sender = ResponseSender(send, watch, self._flushing, headers, self._stream_headers)
                await self._run(sender, context)
        except Cancelled:
            context.has_client_left = True

    async def _run(self, sender: ResponseSender, context: RequestContext) -> None:
        request, services = self._request, self._services
        settings = services.settings
        meter = services.meters.start(request.head.model, context)
        if request.is_stream:
            sender.keep_alive(settings.sse_keep_alive_s, self._writer.keep_alive)
        try:
            with sender.until_draining():
                async with deliver(
                    services.pipeline, request, settings.max_buffered_tokens, services.admission
                ) as delivery:
                    context.warnings.extend(_cuts(request, delivery))
                    for job, prompt in zip(request.jobs, delivery.prompts, strict=True):
                        texts = prompt.warning_texts(job.path, context.rename_error)
                        context.warnings.extend(texts)
                    send = self._stream if request.is_stream else self._collect
                    await send(delivery, sender, meter)
                    meter.finish(delivery.prompts, delivery.choices)
        except TokenMeshError as error:
            if not sender.has_begun or isinstance(error, Cancelled):
                raise
            forget_frames(error)
            await sender.end(self._writer.fail(error))
        finally:
            sender.stop()
            self._flushing.record({REQUEST_ID: request.jobs[0].request_id})

    async def _stream(self, delivery: Delivery, sender: ResponseSender, meter: Meter) -> None:
        writer = self._writer
        async for chunks in delivery.chunks():
            meter.flush(delivery.prompts)
            data = b"" if self._has_begun else writer.begin(delivery)
            self._has_begun = True
            data += writer.write(delivery, chunks)
            if delivery.is_complete:
                await sender.end(data + writer.end(delivery))
            elif data:
                await sender.write(data)

    async def _collect(self, delivery: Delivery, sender: ResponseSender, meter: Meter) -> None:
        collected: list[OutputChunk] = []
        async for chunks in delivery.chunks():
            meter.flush(delivery.prompts)
            collected.extend(chunks)
        if _num_logprobs(delivery, collected) > self._services.settings.inline_logprobs:
            # Encoding megabytes of JSON here would delay the streams of other clients.
            body = await asyncio.to_thread(self._whole, delivery, collected)
        else:
            body = self._whole(delivery, collected)
        await sender.answer(body)

    def _whole(self, delivery: Delivery, chunks: list[OutputChunk]) -> bytes:
        return sse.encode_json(self._writer.whole(delivery, chunks))


def _cuts(request: GenerationRequest, delivery: Delivery) -> Iterator[str]:
    """Warnings for prompts that leave less room than `max_tokens`."""
    for job, prompt in zip(request.jobs, delivery.prompts, strict=True):
        if job.max_tokens is not None and prompt.max_tokens < job.max_tokens:
            yield (
                f"max_tokens cut from {job.max_tokens} to {prompt.max_tokens}: the context of "
                f"{job.card.max_model_len} tokens has no more room"
            )


def _num_logprobs(delivery: Delivery, chunks: list[OutputChunk]) -> int:
    """Tokens whose log-probabilities the body holds."""
    of_prompts = sum(len(choice.prompt_logprobs or ()) for choice in delivery.choices)
    return of_prompts + sum(len(chunk.logprobs) for chunk in chunks)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was sent to the client, and of its causes.

    Their frames refer to the request's body. A frame that refers to its own error would keep it
    until the next garbage collection.
    """
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
