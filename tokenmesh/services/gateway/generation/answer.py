"""GenerationResponse: a generation as an HTTP response, streamed or whole.

Nothing is sent before the first tokens are there, so that an error until then has its status; only
a stream that waits for longer than the keep-alive's interval begins without them.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.context import RequestContext, context_of
from tokenmesh.services.gateway.errors import forget_frames
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.delivery import Delivery, deliver
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.http.client_watch import ClientWatch
from tokenmesh.services.gateway.http.response_sender import ResponseSender
from tokenmesh.services.gateway.operations.load_header import Headers, load_header
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


class BodyWriter(Protocol):
    """The shape of a route's answer."""

    @property
    def keep_alive(self) -> bytes:
        """What clients of a stream skip; also sent before `begin`."""

    def begin(self, delivery: Delivery) -> bytes:
        """What a stream starts with."""

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """The chunks of a flush; may be empty."""

    def end(self, delivery: Delivery) -> bytes:
        """What a stream ends with."""

    def fail(self, error: TokenMeshError) -> bytes:
        """The end of a stream that has begun and cannot be completed."""

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> Any:
        """The body of an answer that is not streamed, from all its pieces."""


class GenerationResponse(Response):
    """Runs an Ask when it is called."""

    def __init__(
        self, ask: GenerationRequest, gateway: Gateway, writer: BodyWriter, started_s: float
    ) -> None:
        """`started_s`: when the request arrived (monotonic)."""
        super().__init__()
        self._ask = ask
        self._pipeline = gateway.pipeline
        self._admission = gateway.admission
        self._members = gateway.members
        self._settings = gateway.settings
        self._writer = writer
        self._meter = gateway.meters.start(ask.head.model, started_s)
        self._has_begun = False
        self._flushing = Tally("flush")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        exchange = context_of(scope)
        try:
            await exchange.widen(len(self._ask.jobs), self._ask.num_choices)
            async with ClientWatch(receive, self._settings.write_timeout_s) as watch:
                outlet = ResponseSender(
                    send, watch, self._flushing, partial(self._load_header, scope)
                )
                await self._run(outlet, exchange)
        except Cancelled:
            exchange.has_client_left = True

    def _load_header(self, scope: Scope) -> Headers:
        return load_header(scope, self._members.workers(self._ask.jobs[0].card.name))

    async def _run(self, outlet: ResponseSender, exchange: RequestContext) -> None:
        ask, limit = self._ask, self._settings.max_buffered_tokens
        if ask.is_stream:
            outlet.keep_alive(self._settings.sse_keep_alive_s, self._writer.keep_alive)
        try:
            with outlet.until_draining():
                async with deliver(
                    self._pipeline, ask.jobs, ask.make_choices, limit, self._admission
                ) as delivery:
                    exchange.warnings.extend(_cuts(ask, delivery))
                    if ask.is_stream:
                        await self._stream(delivery, outlet)
                    else:
                        await self._collect(delivery, outlet)
                    self._meter.finish(delivery, ask.jobs[0].n)
        except TokenMeshError as error:
            if not outlet.has_begun or isinstance(error, Cancelled):
                raise
            forget_frames(error)
            await outlet.end(self._writer.fail(error))
        finally:
            outlet.stop()
            self._flushing.record({REQUEST_ID: ask.jobs[0].request_id})

    async def _stream(self, delivery: Delivery, outlet: ResponseSender) -> None:
        writer = self._writer
        async for pieces in delivery.pieces():
            self._meter.flush(delivery)
            data = b"" if self._has_begun else writer.begin(delivery)
            self._has_begun = True
            data += writer.write(delivery, pieces)
            if delivery.is_complete:
                await outlet.end(data + writer.end(delivery))
            elif data:
                await outlet.write(data)

    async def _collect(self, delivery: Delivery, outlet: ResponseSender) -> None:
        collected: list[OutputChunk] = []
        async for pieces in delivery.pieces():
            self._meter.flush(delivery)
            collected.extend(pieces)
        if _num_logprobs(delivery, collected) > self._settings.inline_logprobs:
            # Megabytes of JSON: the streams of others must not wait for it.
            body = await asyncio.to_thread(self._whole, delivery, collected)
        else:
            body = self._whole(delivery, collected)
        await outlet.answer(body)

    def _whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        return sse.encode_json(self._writer.whole(delivery, pieces))


def _cuts(ask: GenerationRequest, delivery: Delivery) -> Iterator[str]:
    """Warnings of prompts that left less room than max_tokens asked for."""
    for job, prompt in zip(ask.jobs, delivery.prompts, strict=True):
        if job.max_tokens is not None and prompt.max_tokens < job.max_tokens:
            yield (
                f"max_tokens cut from {job.max_tokens} to {prompt.max_tokens}: the context of "
                f"{job.card.max_model_len} tokens has no more room"
            )


def _num_logprobs(delivery: Delivery, pieces: list[OutputChunk]) -> int:
    """Tokens whose log-probabilities are to be written."""
    of_prompts = sum(len(choice.prompt_logprobs or ()) for choice in delivery.choices)
    return of_prompts + sum(len(piece.logprobs) for piece in pieces)
