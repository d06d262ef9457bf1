"""The response of /inference/v1/generate: token ids and log-probabilities, abortable by its id."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes, chosen_first
from tokenmesh.services.gateway.apis.scale_out.generate_request import GenerateRequest
from tokenmesh.services.gateway.apis.scale_out.shapes import (
    GenerateChoice,
    GenerateChunk,
    GenerateLogprobs,
    GenerateResponse,
    TokenCandidate,
    TokenLogprob,
)
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.answer import GenerationResponse, GenerationServices
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Meter, Usage, usage_of
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.response_sender import ResponseSender
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.errors import Draining, ProtocolError, TokenMeshError
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages import AbortRequests
from tokenmesh.shared.messages.tokens import TokenLogprobs


class GenerateWriter:
    """The `BodyWriter` of generate."""

    keep_alive = sse.COMMENT

    def __init__(self, request: GenerationRequest, body: GenerateRequest) -> None:
        self._request = request
        self._body = body
        self._sampling = request.jobs[0].sampling
        self._counts = [0] * request.num_choices
        self._begun: set[int] = set()
        self.is_aborted = False
        """It tells whether the request was aborted before it was placed on a worker."""
        self._held: list[OutputChunk] = []
        """Waits for the prompt's log-probabilities, which the first chunks contain."""

    def begin(self, delivery: Delivery) -> bytes:
        return b""

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        self._held += pieces
        first = delivery.choices[0]
        waits = self._sampling.prompt_logprobs is not None and first.prompt_logprobs is None
        if waits and first.finish_reason is None:
            return b""
        chunks, self._held = self._held, []
        return b"".join([self._frame(delivery, each) for each in chunks if not _is_empty(each)])

    def end(self, delivery: Delivery) -> bytes:
        return self._end(delivery.usage())

    def fail(self, error: TokenMeshError) -> bytes:
        return self.aborted() if self.is_aborted else sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> GenerateResponse:
        tables = delivery.choices[0].prompt_logprobs
        return self._response(
            merge(pieces, self._request.num_choices),
            delivery.usage(),
            None if tables is None else prompt_tables(tables),
        )

    def aborted(self) -> bytes:
        """The whole body, or the whole stream, of a request that was aborted before a token."""
        indexes = range(self._request.num_choices)
        chunks = [OutputChunk(index, finish_reason="abort") for index in indexes]
        usage = usage_of(len(self._body.token_ids), 0, None)
        if not self._request.is_stream:
            return sse.encode_json(self._response(chunks, usage, None))
        frames = [sse.frame(self._chunk([self._choice(each)])) for each in chunks]
        return b"".join(frames) + self._end(usage)

    def _end(self, usage: Usage) -> bytes:
        if not self._request.chunks.usage:
            return sse.DONE
        return sse.frame(self._chunk([], usage)) + sse.DONE

    def _frame(self, delivery: Delivery, output: OutputChunk) -> bytes:
        self._counts[output.choice] += len(output.token_ids)
        usage = None
        if self._request.chunks.running_usage:
            num_prompt = delivery.prompts[0].num_tokens
            usage = usage_of(num_prompt, self._counts[output.choice], None)
        chunk = self._chunk([self._choice(output)], usage)
        if self._request.chunks.token_ids and not self._begun:
            chunk.prompt_token_ids = self._body.token_ids
        tables = delivery.choices[0].prompt_logprobs
        if tables is not None and output.choice not in self._begun:
            chunk.prompt_logprobs = prompt_tables(tables)
        self._begun.add(output.choice)
        return sse.frame(chunk)

    def _chunk(self, choices: list[GenerateChoice], usage: Usage | None = None) -> GenerateChunk:
        return GenerateChunk(
            request_id=self._request.head.id,
            output_mode=self._body.output_mode,
            choices=choices,
            usage=usage,
        )

    def _response(
        self, chunks: list[OutputChunk], usage: Usage, tables: list[dict[str, Any] | None] | None
    ) -> GenerateResponse:
        head = self._request.head
        return GenerateResponse(
            request_id=head.id,
            model=head.model,
            created=head.created,
            output_mode=self._body.output_mode,
            choices=[self._choice(each) for each in chunks],
            usage=usage,
            prompt_logprobs=tables,
            prompt_token_ids=self._body.token_ids if self._request.chunks.token_ids else None,
            kv_transfer_params=self._body.kv_transfer_params,
        )

    def _choice(self, chunk: OutputChunk) -> GenerateChoice:
        is_text = self._body.output_mode == "text"
        return GenerateChoice(
            index=chunk.choice,
            text=chunk.text if is_text else msgspec.UNSET,
            logprobs=self._logprobs(chunk, is_text) if self._request.chunks.logprobs else None,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=chunk.token_ids,
        )

    def _logprobs(self, chunk: OutputChunk, is_text: bool) -> object:
        if is_text:
            return LogprobShapes.of(self._request).chat(chunk.logprobs)
        are_named = bool(self._sampling.logprob_token_ids)
        return GenerateLogprobs([token_logprob(each, are_named) for each in chunk.logprobs])


_VLLM_PREFIX: Final = "generate-tokens-"
"""vLLM's prefix of response ids; ours are the client's own ids."""


class Aborts:
    """Ends running requests by tenant and id on all gateways; holds those of this gateway."""

    def __init__(self, bus: Bus, max_ids: int) -> None:
        self._bus = bus
        self._max_ids = max_ids
        self._running: dict[tuple[str, RequestId], list[AbortableResponse]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen for aborts that other gateways received."""
        self._subscription = await self._bus.subscribe(subjects.aborts(), self._receive)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    @contextmanager
    def running(
        self, tenant: str, request_id: RequestId, request: "AbortableResponse"
    ) -> Iterator[None]:
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


class AbortableResponse(GenerationResponse):
    """An aborted response ends with the tokens that it has and finish_reason `abort`."""

    def __init__(
        self,
        request: GenerationRequest,
        writer: GenerateWriter,
        services: GenerationServices,
        aborts: Aborts,
    ) -> None:
        super().__init__(request, writer, services)
        self._generate_writer = writer
        self._aborts = aborts
        self._task: asyncio.Task[object] | None = None
        self._delivery: Delivery | None = None

    def abort(self) -> None:
        """End the request on this gateway."""
        if self._delivery is not None:
            self._delivery.abort()
        elif self._task is not None and not self._generate_writer.is_aborted:
            # It is not placed yet: there is no output, only a wait to end.
            self._generate_writer.is_aborted = True
            self._task.cancel()

    async def _run(self, sender: ResponseSender, context: RequestContext) -> None:
        job = self._request.jobs[0]
        self._task = asyncio.current_task()
        with self._aborts.running(job.tenant.name, job.request_id, self):
            try:
                await super()._run(sender, context)
            except Draining:
                # The sender raises this for every cancellation but that by the client.
                if not self._generate_writer.is_aborted or sender.has_begun:
                    raise
                data = self._generate_writer.aborted()
                await (sender.end(data) if self._request.is_stream else sender.answer(data))
            finally:
                if self._generate_writer.is_aborted and self._task is not None:
                    self._task.uncancel()

    async def _stream(self, delivery: Delivery, sender: ResponseSender, meter: Meter) -> None:
        self._delivery = delivery
        await super()._stream(delivery, sender, meter)

    async def _collect(self, delivery: Delivery, sender: ResponseSender, meter: Meter) -> None:
        self._delivery = delivery
        await super()._collect(delivery, sender, meter)


def token_logprob(entry: TokenLogprobs, are_named: bool = False) -> TokenLogprob:
    """`are_named`: the candidates are tokens that the client named, whose ranks are unknown."""
    place = {token_id: rank for rank, token_id in enumerate(entry.top_ids, start=1)}
    candidates = [
        TokenCandidate(token_id, logprob, None if are_named else place.get(token_id))
        for token_id, logprob in chosen_first(entry)
    ]
    own = candidates[0]
    own.rank = entry.rank
    return TokenLogprob(own.token_id, own.logprob, own.rank, candidates)


def prompt_tables(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape for prompts: by token id, the prompt's own token first."""
    return [None if entry is None else _table(entry) for entry in entries]


def _table(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        str(each.token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": None}
        for each in token_logprob(entry).top_logprobs
    }


def _is_empty(chunk: OutputChunk) -> bool:
    return not (chunk.token_ids or chunk.text or chunk.finish_reason is not None)
