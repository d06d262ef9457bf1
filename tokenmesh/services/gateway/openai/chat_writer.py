"""ChatWriter: the response of /v1/chat/completions."""

import msgspec

from tokenmesh.services.gateway.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.chat_stream import ChatStream, call_id
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import (
    ChatChoice,
    ChatCompletion,
    ChatMessageOut,
    FunctionOut,
    ToolCallOut,
)
from tokenmesh.services.gateway.parsers.events import CallBegin, Content, Event, Reasoning
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.tokens import unpack_ids


class ChatWriter:
    """The `BodyWriter` of a chat."""

    keep_alive = sse.COMMENT

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._logprobs = LogprobShapes.of(request)
        self._stream: ChatStream | None = None

    def begin(self, delivery: Delivery) -> bytes:
        request = self._request
        prompt = {
            "prompt_token_ids": self._prompt_ids(delivery),
            "prompt_text": self._prompt_text(delivery),
        }
        stream = self._chat_stream(delivery)
        return stream.begin(request.num_choices, request.role, request.echo, prompt)

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        return self._chat_stream(delivery).write(self._with_reasons(pieces))

    def end(self, delivery: Delivery) -> bytes:
        return self._chat_stream(delivery).end(delivery.usage()) + sse.DONE

    def fail(self, error: TokenMeshError) -> bytes:
        return sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> ChatCompletion:
        request = self._request
        merged = self._with_reasons(merge(pieces, request.num_choices))
        prompt_logprobs = delivery.choices[0].prompt_logprobs
        return ChatCompletion(
            id=request.head.id,
            created=request.head.created,
            model=request.head.model,
            choices=[self.choice(each) for each in merged],
            usage=delivery.usage(),
            service_tier=request.head.service_tier,
            prompt_logprobs=(
                self._logprobs.prompt(prompt_logprobs) if prompt_logprobs is not None else None
            ),
            prompt_token_ids=self._prompt_ids(delivery),
            prompt_text=self._prompt_text(delivery),
        )

    def choice(self, merged: OutputChunk) -> ChatChoice:
        """One choice of a response that is not streamed, from all its output."""
        request = self._request
        return ChatChoice(
            index=merged.choice,
            message=message_of(merged, request.head.id, request.role, request.echo),
            logprobs=self._logprobs.chat(merged.logprobs) if request.chunks.logprobs else None,
            finish_reason=merged.finish_reason,
            stop_reason=merged.stop_reason,
            token_ids=merged.token_ids if request.chunks.token_ids else None,
        )

    def _with_reasons(self, chunks: list[OutputChunk]) -> list[OutputChunk]:
        """OpenAI says `stop` after a call of the function that the client has named."""
        if self._request.names_tool:
            for chunk in chunks:
                if chunk.finish_reason == "tool_calls":
                    chunk.finish_reason = "stop"
        return chunks

    def _chat_stream(self, delivery: Delivery) -> ChatStream:
        if self._stream is None:
            request = self._request
            prompt_tokens = delivery.prompts[0].num_tokens
            self._stream = ChatStream(request.head, request.chunks, self._logprobs, prompt_tokens)
        return self._stream

    def _prompt_ids(self, delivery: Delivery) -> list[int] | None:
        if not self._request.chunks.token_ids:
            return None
        return unpack_ids(delivery.prompts[0].packed_ids)

    def _prompt_text(self, delivery: Delivery) -> str | None:
        """As the model gets it: after the template, truncation and expansion of media."""
        if not self._request.shows_prompt_text:
            return None
        ids = unpack_ids(delivery.prompts[0].packed_ids)
        return self._request.text.vocabulary.decode(ids)


def message_of(merged: OutputChunk, response_id: str, role: str, echo: str) -> ChatMessageOut:
    """The message of a choice; its content begins with `echo`."""
    events = merged.all_events()
    calls: dict[int, ToolCallOut] = {}
    for event in events:
        if isinstance(event, CallBegin):
            function = FunctionOut(event.name)
            calls[event.index] = ToolCallOut(call_id(response_id, merged.choice, event), function)
        elif not isinstance(event, Content | Reasoning):
            calls[event.index].function.arguments += event.text
    content = echo + _text_of(events, Content)
    reasoning = _text_of(events, Reasoning) or None
    has_more = bool(calls) or reasoning is not None
    return ChatMessageOut(
        content=None if has_more and not content else content,
        role=role,
        tool_calls=list(calls.values()) or msgspec.UNSET,
        reasoning=reasoning,
    )


def _text_of(events: list[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])
