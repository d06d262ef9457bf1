"""ChunkDerendering: one chunk of generate's stream as the base route would have streamed it.

No state is kept between chunks: the choice is read again from the tokens that the client sends
back. What was sent before is dropped; the frames of the rest are folded into one chunk.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.openai.response_parts import ChunkStream
from tokenmesh.services.gateway.apis.scale_out.derender_request import (
    StreamState,
    TokensChoice,
    TokensChunk,
)
from tokenmesh.services.gateway.apis.scale_out.derender_whole import (
    check_echo,
    check_ids,
    delivery_of,
    prompt_of,
    reader_of,
    replayed,
    with_head,
)
from tokenmesh.services.gateway.apis.scale_out.shapes import DerenderedChunk, DerenderState
from tokenmesh.services.gateway.core.generation.answer import BodyWriter
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage, usage_of
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDerendering:
    """One request to derender a chunk."""

    request: GenerationRequest
    """With one job, that of the chunk's prompt."""
    chunk: TokensChunk
    state: StreamState | None
    prompt_ids: list[int]
    """Empty: unknown."""
    prompt_tokens: int | None
    is_request_known: bool
    make_writer: Callable[[GenerationRequest], BodyWriter]
    kind: bytes
    """The chunk's field `object`."""
    empty: dict[str, Any]
    """Fields of a choice without output."""
    first_choice: int = 0
    """The index of the prompt's first choice in the whole response."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are read again."""
        known = 0 if self.state is None else len(self.state.output_token_ids)
        return known + sum(len(each.token_ids or ()) for each in self.chunk.choices)

    def check(self) -> None:
        """Check what the body's types do not bound. Raises InvalidInput."""
        if len(self.chunk.choices) > 1:
            raise InvalidInput(
                f"a chunk to derender has at most one choice (got {len(self.chunk.choices)})",
                param="generate_chunk.choices",
            )
        card = self.request.jobs[0].card
        known = [] if self.state is None else self.state.output_token_ids
        added = [each for choice in self.chunk.choices for each in choice.token_ids or ()]
        _check_total(len(self.prompt_ids), len(known), len(added), card)
        check_ids("prompt_token_ids", self.prompt_ids, card)
        check_ids("stream_state.output_token_ids", known, card)
        check_ids("generate_chunk.choices", added, card)
        for choice in self.chunk.choices:
            if choice.index >= self.request.jobs[0].n:
                raise InvalidInput(
                    f"choice {choice.index} is not one of n = {self.request.jobs[0].n}",
                    param="generate_chunk.choices",
                )

    def answer(self) -> DerenderedChunk:
        """May take long. Raises InvalidInput."""
        request = with_head(
            self.request, self.chunk.request_id, None if self.state is None else self.state.created
        )
        if not self.chunk.choices:
            return DerenderedChunk(
                chunk=self._usage_chunk(request), stream_state=self._state(request)
            )
        choice = self.chunk.choices[0]
        has_logprobs = choice.logprobs is not None and choice.logprobs.content is not None
        shows = has_logprobs or (request.chunks.logprobs and not choice.token_ids)
        request = replace(request, chunks=replace(request.chunks, logprobs=shows))
        frames = self._frames(request, choice)
        bare = {"index": choice.index, **self.empty, "logprobs": None, "finish_reason": None}
        chunk = fold(chunks_of(frames, choice.index), self._frame(request, [bare]))
        for each in chunk["choices"]:
            each["index"] += self.first_choice
        return DerenderedChunk(chunk=chunk, stream_state=self._state(request, choice))

    def _frames(self, request: GenerationRequest, choice: TokensChoice) -> bytes:
        detokenizing = Tally("detokenize")
        delivery = self._delivery(request, detokenizing)
        writer = self.make_writer(request)
        frames = writer.begin(delivery)
        if self.state is not None and self.state.role_sent:
            writer.write(delivery, self._replay(request, delivery, choice.index))
            frames = b""
        reader = reader_of(request, is_request_known=self.is_request_known)
        for output in reader.outputs(choice, is_whole=False):
            frames += writer.write(delivery, delivery.push([(choice.index, output)]))
        detokenizing.record({REQUEST_ID: request.jobs[0].request_id})
        return frames

    def _delivery(self, request: GenerationRequest, detokenizing: Tally) -> Delivery:
        delivery = delivery_of(request, [prompt_of(self.prompt_ids, self._count())], detokenizing)
        first, tables = delivery.choices[0], self.chunk.prompt_logprobs
        is_first = self.state is None or not self.state.role_sent
        if tables is not None and is_first:
            reader = reader_of(request, is_request_known=self.is_request_known)
            first.prompt_logprobs = reader.prompt_logprobs(tables, self.prompt_ids)
        elif not is_first:
            # Sent before: only their number matters.
            first.prompt_logprobs = [None] * len(self.prompt_ids)
        check_echo(request, self.prompt_ids, has_prompt_logprobs=first.prompt_logprobs is not None)
        return delivery

    def _replay(self, request: GenerationRequest, delivery: Delivery, index: int) -> list[Any]:
        assert self.state is not None
        known = replayed(self.state.output_token_ids, has_logprobs=request.chunks.logprobs)
        return delivery.push([(index, known)])

    def _usage_chunk(self, request: GenerationRequest) -> dict[str, Any]:
        """After the last choice; reasoning tokens are counted only if there is one choice."""
        usage, reasoning = self.chunk.usage, None
        if usage is None:
            return self._frame(request, [])
        if request.num_choices == 1 and self.state is not None:
            delivery = delivery_of(request, [prompt_of(self.prompt_ids, 0)], Tally("detokenize"))
            delivery.push([(0, replayed(self.state.output_token_ids, has_logprobs=False))])
            reasoning = delivery.choices[0].reasoning_tokens
        # With max_tokens 0 the one token that a worker draws does not count.
        num_generated = 0 if request.options.drops_output else usage.completion_tokens or 0
        total = usage_of(
            self._count(), num_generated, usage.cached_tokens, reasoning, usage.created_cache_tokens
        )
        return self._last_chunk(request, total)

    def _frame(self, request: GenerationRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._last_chunk(request, usage_of(0, 0, None))
        del chunk["usage"]
        return {**chunk, "choices": choices}

    def _last_chunk(self, request: GenerationRequest, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage after the last choice."""
        options = replace(request.chunks, usage=True)
        (chunk,) = chunks_of(ChunkStream(self.kind, request.head, options).end(usage), 0)
        return chunk

    def _count(self) -> int:
        """Tokens of the prompt."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return self.chunk.usage.prompt_tokens if self.chunk.usage is not None else 0

    def _state(
        self, request: GenerationRequest, choice: TokensChoice | None = None
    ) -> DerenderState:
        known = [] if self.state is None else self.state.output_token_ids
        added = [] if choice is None else choice.token_ids or []
        begun = self.state is not None and self.state.role_sent
        return DerenderState(
            created=request.head.created,
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


_DATA: Final = b"data: "


def chunks_of(frames: bytes, index: int) -> list[dict[str, Any]]:
    """The chunks in `frames` that belong to a choice, or to no choice."""
    bodies = [part.removeprefix(_DATA) for part in frames.split(b"\n\n") if part.startswith(_DATA)]
    chunks: list[dict[str, Any]] = [msgspec.json.decode(body) for body in bodies]
    return [each for each in chunks if _is_of(each, index)]


def fold(chunks: Iterable[dict[str, Any]], empty: dict[str, Any]) -> dict[str, Any]:
    """All chunks as one; `empty` if there are none."""
    folded: dict[str, Any] | None = None
    for chunk in chunks:
        if folded is None:
            folded = chunk
            continue
        _join_choices(folded["choices"], chunk["choices"])
        folded |= {name: chunk[name] for name in chunk.keys() - {"choices"}}
    return empty if folded is None else folded


def _is_of(chunk: dict[str, Any], index: int) -> bool:
    return all(choice["index"] == index for choice in chunk["choices"])


def _join_choices(whole: list[dict[str, Any]], further: list[dict[str, Any]]) -> None:
    if not whole or not further:
        whole.extend(further)
        return
    into, choice = whole[0], further[0]
    for name, value in choice.items():
        known = into.get(name)
        if name == "delta":
            _join_deltas(into[name], value)
        elif name == "logprobs" and known is not None and value is not None:
            into[name] = {key: _joined(known[key], value[key]) for key in known}
        elif name in ("text", "token_ids") and known is not None:
            into[name] = known + value
        elif value is not None or known is None:
            into[name] = value


def _join_deltas(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            _join_calls(into.setdefault(name, []), value)
        elif name in ("content", "reasoning") and isinstance(into.get(name), str):
            into[name] += value or ""
        else:
            into[name] = value


def _join_calls(into: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    by_index = {each["index"]: each for each in into}
    for call in calls:
        known = by_index.get(call["index"])
        if known is None:
            into.append(call)
        else:
            known["function"]["arguments"] += call["function"]["arguments"]


def _joined(known: Any, value: Any) -> Any:
    return known + value if isinstance(known, list) and isinstance(value, list) else value
