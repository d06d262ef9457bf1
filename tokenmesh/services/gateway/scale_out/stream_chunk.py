"""Stream chunks: one chunk of generate's stream as the base route would have streamed it.

Nothing is kept between two of them: the choice is read again from the tokens that the client
carries, what was shown before is dropped, and the rest is the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmesh.services.gateway.generation.answer import BodyWriter
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.shapes import Usage, usage_of
from tokenmesh.services.gateway.scale_out.derender_request import (
    StreamState,
    TokensChoice,
    TokensChunk,
)
from tokenmesh.services.gateway.scale_out.folding import chunks_of, fold
from tokenmesh.services.gateway.scale_out.outputs import replayed
from tokenmesh.services.gateway.scale_out.shapes import DerenderedChunk, DerenderState
from tokenmesh.services.gateway.scale_out.whole_answer import (
    check_echo,
    check_ids,
    delivery_of,
    prompt_of,
    reader_of,
    with_head,
)
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReading:
    """One request."""

    ask: GenerationRequest
    """With one job, that of the chunk's prompt."""
    chunk: TokensChunk
    state: StreamState | None
    prompt_ids: list[int]
    """Empty: unknown."""
    prompt_tokens: int | None
    is_request_known: bool
    make_writer: Callable[[GenerationRequest], BodyWriter]
    end: Callable[[GenerationRequest, Usage], bytes]
    """The frame with the usage after the last chunk."""
    empty: dict[str, Any]
    """The choice of a chunk in which there is nothing to show."""
    first_choice: int = 0
    """Of the prompt, among all of the response."""

    @property
    def num_tokens(self) -> int:
        """To be read again."""
        known = 0 if self.state is None else len(self.state.output_token_ids)
        return known + sum(len(each.token_ids or ()) for each in self.chunk.choices)

    def check(self) -> None:
        """Raises InvalidInput for what has no bound of its own in a body."""
        if len(self.chunk.choices) > 1:
            raise InvalidInput(
                f"a chunk to derender has at most one choice (got {len(self.chunk.choices)})",
                param="generate_chunk.choices",
            )
        card = self.ask.jobs[0].card
        known = [] if self.state is None else self.state.output_token_ids
        added = [each for choice in self.chunk.choices for each in choice.token_ids or ()]
        _check_total(len(self.prompt_ids), len(known), len(added), card)
        check_ids("prompt_token_ids", self.prompt_ids, card)
        check_ids("stream_state.output_token_ids", known, card)
        check_ids("generate_chunk.choices", added, card)
        for choice in self.chunk.choices:
            if choice.index >= self.ask.jobs[0].n:
                raise InvalidInput(
                    f"choice {choice.index} is not one of n = {self.ask.jobs[0].n}",
                    param="generate_chunk.choices",
                )

    def answer(self) -> DerenderedChunk:
        """May take long. Raises InvalidInput."""
        ask = with_head(
            self.ask, self.chunk.request_id, None if self.state is None else self.state.created
        )
        if not self.chunk.choices:
            return DerenderedChunk(chunk=self._usage_chunk(ask), stream_state=self._state(ask))
        choice = self.chunk.choices[0]
        has_logprobs = choice.logprobs is not None and choice.logprobs.content is not None
        shows = ask.chunks.logprobs and (has_logprobs or not choice.token_ids)
        ask = replace(ask, chunks=replace(ask.chunks, logprobs=shows))
        frames = self._frames(ask, choice)
        bare = {"index": choice.index, **self.empty, "logprobs": None, "finish_reason": None}
        chunk = fold(chunks_of(frames, choice.index), self._frame(ask, [bare]))
        for each in chunk["choices"]:
            each["index"] += self.first_choice
        return DerenderedChunk(chunk=chunk, stream_state=self._state(ask, choice))

    def _frames(self, ask: GenerationRequest, choice: TokensChoice) -> bytes:
        detokenizing = Tally("detokenize")
        delivery = self._delivery(ask, detokenizing)
        writer = self.make_writer(ask)
        frames = writer.begin(delivery)
        if self.state is not None and self.state.role_sent:
            writer.write(delivery, self._replay(ask, delivery, choice.index))
            frames = b""
        reader = reader_of(ask, is_request_known=self.is_request_known)
        for output in reader.outputs(choice, is_whole=False):
            frames += writer.write(delivery, delivery.push([(choice.index, output)]))
        detokenizing.record({REQUEST_ID: ask.jobs[0].request_id})
        return frames

    def _delivery(self, ask: GenerationRequest, detokenizing: Tally) -> Delivery:
        delivery = delivery_of(ask, [prompt_of(self.prompt_ids, self._count())], detokenizing)
        first, tables = delivery.choices[0], self.chunk.prompt_logprobs
        is_first = self.state is None or not self.state.role_sent
        if tables is not None and is_first:
            reader = reader_of(ask, is_request_known=self.is_request_known)
            first.prompt_logprobs = reader.prompt_logprobs(tables, self.prompt_ids)
        elif not is_first:
            # Shown before: how many there were is all that counts.
            first.prompt_logprobs = [None] * len(self.prompt_ids)
        check_echo(ask, self.prompt_ids, has_prompt_logprobs=first.prompt_logprobs is not None)
        return delivery

    def _replay(self, ask: GenerationRequest, delivery: Delivery, index: int) -> list[Any]:
        assert self.state is not None
        known = replayed(self.state.output_token_ids, has_logprobs=ask.chunks.logprobs)
        return delivery.push([(index, known)])

    def _usage_chunk(self, ask: GenerationRequest) -> dict[str, Any]:
        """After the last choice; reasoning is counted where one choice is all there is."""
        usage, reasoning = self.chunk.usage, None
        if usage is None:
            return self._frame(ask, [])
        if ask.num_choices == 1 and self.state is not None:
            delivery = delivery_of(ask, [prompt_of(self.prompt_ids, 0)], Tally("detokenize"))
            delivery.push([(0, replayed(self.state.output_token_ids, has_logprobs=False))])
            reasoning = delivery.choices[0].reasoning_tokens
        # With max_tokens 0 the token that a worker has to draw does not count.
        num_generated = 0 if ask.options.drops_output else usage.completion_tokens or 0
        told = usage_of(
            self._count(), num_generated, usage.cached_tokens, reasoning, usage.created_cache_tokens
        )
        options = replace(ask.chunks, usage=True)
        (chunk,) = chunks_of(self.end(replace(ask, chunks=options), told), 0)
        return chunk

    def _frame(self, ask: GenerationRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
        (chunk,) = chunks_of(
            self.end(replace(ask, chunks=replace(ask.chunks, usage=True)), usage_of(0, 0, None)), 0
        )
        del chunk["usage"]
        return {**chunk, "choices": choices}

    def _count(self) -> int:
        """Tokens of the prompt."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return self.chunk.usage.prompt_tokens if self.chunk.usage is not None else 0

    def _state(self, ask: GenerationRequest, choice: TokensChoice | None = None) -> DerenderState:
        known = [] if self.state is None else self.state.output_token_ids
        added = [] if choice is None else choice.token_ids or []
        begun = self.state is not None and self.state.role_sent
        return DerenderState(
            created=ask.head.created,
            role_sent=begun or choice is not None,
            output_token_ids=[*known, *added],
        )


def _check_total(num_prompt: int, num_known: int, num_added: int, card: ModelCard) -> None:
    if num_prompt + num_known + num_added > card.max_model_len:
        raise InvalidInput(
            f"prompt_token_ids length ({num_prompt}) plus output_token_ids length ({num_known}) "
            f"plus delta ({num_added}) exceeds max_model_len ({card.max_model_len})",
            param="stream_state",
        )
