"""GenerateWriter: the answer of /inference/v1/generate."""

from typing import Any

import msgspec

from tokenmesh.services.gateway.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.shapes import Usage, usage_of
from tokenmesh.services.gateway.scale_out.generate_request import GenerateRequest
from tokenmesh.services.gateway.scale_out.shapes import (
    GenerateChoice,
    GenerateChunk,
    GenerateLogprobs,
    GenerateResponse,
)
from tokenmesh.services.gateway.scale_out.token_logprobs import prompt_tables, shown
from tokenmesh.shared.errors import TokenMeshError


class GenerateWriter:
    """A `Writer`."""

    def __init__(self, ask: GenerationRequest, body: GenerateRequest) -> None:
        self._ask = ask
        self._body = body
        self._sampling = ask.jobs[0].sampling
        self._counts = [0] * ask.num_choices
        self._begun: set[int] = set()
        self.is_aborted = False
        """Whether the request was aborted before a worker had it."""
        self._held: list[OutputChunk] = []
        """Until the prompt's log-probabilities are there, which the first chunks carry."""

    keep_alive = sse.COMMENT

    def begin(self, delivery: Delivery) -> bytes:
        """See `Writer.begin`."""
        return b""

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """See `Writer.write`."""
        self._held += pieces
        first = delivery.choices[0]
        waits = self._sampling.prompt_logprobs is not None and first.prompt_logprobs is None
        if waits and first.finish_reason is None:
            return b""
        pieces, self._held = self._held, []
        return b"".join([self._frame(delivery, piece) for piece in pieces if _tells(piece)])

    def end(self, delivery: Delivery) -> bytes:
        """See `Writer.end`."""
        return self._end(delivery.usage())

    def fail(self, error: TokenMeshError) -> bytes:
        """See `Writer.fail`."""
        return self.aborted() if self.is_aborted else sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> GenerateResponse:
        """See `Writer.whole`."""
        tables = delivery.choices[0].prompt_logprobs
        return self._response(
            merge(pieces, self._ask.num_choices),
            delivery.usage(),
            None if tables is None else prompt_tables(tables),
        )

    def aborted(self) -> bytes:
        """The whole answer, or all of the stream, of a request that was aborted before a token."""
        pieces = [
            OutputChunk(index, finish_reason="abort") for index in range(self._ask.num_choices)
        ]
        usage = usage_of(len(self._body.token_ids), 0, None)
        if not self._ask.is_stream:
            return sse.encode_json(self._response(pieces, usage, None))
        frames = [sse.frame(self._chunk([self._choice(each)])) for each in pieces]
        return b"".join(frames) + self._end(usage)

    def _end(self, usage: Usage) -> bytes:
        if not self._ask.chunks.usage:
            return sse.DONE
        return sse.frame(self._chunk([], usage)) + sse.DONE

    def _frame(self, delivery: Delivery, piece: OutputChunk) -> bytes:
        self._counts[piece.choice] += len(piece.token_ids)
        usage = None
        if self._ask.chunks.running_usage:
            num_prompt = delivery.prompts[0].num_tokens
            usage = usage_of(num_prompt, self._counts[piece.choice], None)
        chunk = self._chunk([self._choice(piece)], usage)
        if self._ask.chunks.token_ids and not self._begun:
            chunk.prompt_token_ids = self._body.token_ids
        tables = delivery.choices[0].prompt_logprobs
        if tables is not None and piece.choice not in self._begun:
            chunk.prompt_logprobs = prompt_tables(tables)
        self._begun.add(piece.choice)
        return sse.frame(chunk)

    def _chunk(self, choices: list[GenerateChoice], usage: Usage | None = None) -> GenerateChunk:
        return GenerateChunk(
            request_id=self._ask.head.id,
            output_mode=self._body.output_mode,
            choices=choices,
            usage=usage,
        )

    def _response(
        self, pieces: list[OutputChunk], usage: Usage, tables: list[dict[str, Any] | None] | None
    ) -> GenerateResponse:
        head = self._ask.head
        return GenerateResponse(
            request_id=head.id,
            model=head.model,
            created=head.created,
            output_mode=self._body.output_mode,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage,
            prompt_logprobs=tables,
            prompt_token_ids=self._body.token_ids if self._ask.chunks.token_ids else None,
            kv_transfer_params=self._body.kv_transfer_params,
        )

    def _choice(self, piece: OutputChunk) -> GenerateChoice:
        is_text = self._body.output_mode == "text"
        return GenerateChoice(
            index=piece.choice,
            text=piece.text if is_text else msgspec.UNSET,
            logprobs=self._logprobs(piece, is_text) if self._ask.chunks.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids,
        )

    def _logprobs(self, piece: OutputChunk, is_text: bool) -> object:
        if is_text:
            return self._ask.logprobs.chat(piece.logprobs)
        are_named = bool(self._sampling.logprob_token_ids)
        return GenerateLogprobs([shown(each, are_named=are_named) for each in piece.logprobs])


def _tells(piece: OutputChunk) -> bool:
    return bool(piece.token_ids or piece.text or piece.finish_reason is not None)
