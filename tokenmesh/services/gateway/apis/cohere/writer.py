"""Responses of /cohere/v2/chat: a message, or the events of its stream."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.cohere.errors import error_body
from tokenmesh.services.gateway.apis.openai.chat_writer import call_id
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes, finite
from tokenmesh.services.gateway.apis.openai.translation import FieldNames, Json
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.parsers.parser import CallArguments, CallBegin, Content, Event
from tokenmesh.shared.errors import TokenMeshError

_FINISHES: Final = {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "error": "ERROR"}
_COMPLETE: Final = "COMPLETE"


class CohereTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct, omit_defaults=True):
    """Token counts; those that are billed are all of them."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int | None = None


class CohereLogprobs(msgspec.Struct):
    """Log-probabilities of a piece of text."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereReply(msgspec.Struct, omit_defaults=True):
    role: str
    content: list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_plan: str | None = None


class CohereChat(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str
    finish_reason: str
    message: CohereReply
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | None = None


class CohereWriter:
    """The `BodyWriter` of a chat, which has one choice."""

    keep_alive = sse.COMMENT

    def __init__(
        self, generation: GenerationRequest, names: FieldNames, *, is_reasoning_model: bool = True
    ) -> None:
        """Where `is_reasoning_model` is false, reasoning before calls is a `tool_plan`."""
        self._head = generation.head
        self._names = names
        self._shapes = LogprobShapes.of(generation)
        self._shows_logprobs = generation.chunks.logprobs
        self._blocks = CohereEvents(self._head.id, is_reasoning_model=is_reasoning_model)
        self._is_reasoning_model = is_reasoning_model
        self._held: list[CohereLogprobs] = []
        """Log-probabilities of tokens whose text is not content, or not yet."""
        self._finish = _COMPLETE

    def begin(self, delivery: Delivery) -> bytes:
        delta = {"message": {"role": "assistant"}}
        return sse.frame({"type": "message-start", "id": self._head.id, "delta": delta})

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        return b"".join([sse.frame(event) for chunk in pieces for event in self._events(chunk)])

    def end(self, delivery: Delivery) -> bytes:
        delta = {"finish_reason": self._finish, "usage": cohere_usage(delivery.usage())}
        return self._ending(delta)

    def fail(self, error: TokenMeshError) -> bytes:
        error = self._names.rename(error)
        body = error_body(error.message, error.param)
        closing = b"".join([sse.frame(event) for event in self._blocks.finish()])
        return closing + self._ending({"error": body.message, "finish_reason": "ERROR"})

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> CohereChat:
        (chunk,) = merge(pieces, 1)
        return CohereChat(
            id=self._head.id,
            finish_reason=finish_of(chunk.finish_reason, chunk.stop_reason),
            message=self._message(chunk.all_events()),
            usage=cohere_usage(delivery.usage()),
            logprobs=self._logprobs(chunk) if self._shows_logprobs else None,
        )

    def _ending(self, delta: Json) -> bytes:
        event = {"type": "message-end", "id": self._head.id, "delta": delta}
        return sse.frame(event) + sse.DONE

    def _events(self, chunk: OutputChunk) -> Iterator[Json]:
        if self._shows_logprobs:
            self._held += self._logprobs(chunk)
        for event in self._blocks.push(chunk.all_events()):
            if event["type"] == "content-delta" and self._held:
                held, self._held = self._held, []
                event["logprobs"] = _joined(held)
            yield event
        if chunk.finish_reason is not None:
            yield from self._blocks.finish()
            self._finish = finish_of(chunk.finish_reason, chunk.stop_reason)

    def _logprobs(self, chunk: OutputChunk) -> list[CohereLogprobs]:
        return [
            CohereLogprobs(
                self._shapes.token(each.token_id)[0], [each.token_id], [finite(each.logprob)]
            )
            for each in chunk.logprobs
        ]

    def _message(self, events: Iterable[Event]) -> CohereReply:
        content: list[Json] = []
        calls: list[Json] = []
        for event in events:
            if isinstance(event, CallBegin):
                calls.append(_call(call_id(self._head.id, 0, event), event.name))
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
            else:
                kind = "text" if isinstance(event, Content) else "thinking"
                content.append({"type": kind, kind: event.text})
        plan = ""
        if calls and not self._is_reasoning_model:
            plan = "".join(each.get("thinking", "") for each in content)
            content = [each for each in content if each["type"] == "text"]
        return CohereReply("assistant", content or None, calls or None, plan or None)


class CohereEvents:
    """The events of one response. A block begins where the kind of output changes."""

    def __init__(self, response_id: str, *, is_reasoning_model: bool = True) -> None:
        self._response_id = response_id
        self._is_reasoning_model = is_reasoning_model
        self._open: Json | None = None
        """The event that ends the open block."""
        self._kind = ""
        self._num_blocks = 0

    def push(self, events: Iterable[Event]) -> Iterator[Json]:
        """Stream events for parser events."""
        for event in events:
            if isinstance(event, CallBegin):
                yield from self._begin("tool-call", event.index)
                call = _call(call_id(self._response_id, 0, event), event.name)
                yield _event("tool-call-start", event.index, {"tool_calls": call})
            elif isinstance(event, CallArguments):
                arguments = {"function": {"arguments": event.text}}
                yield _event("tool-call-delta", event.index, {"tool_calls": arguments})
            elif isinstance(event, Content):
                yield from self._push_content("text", event.text)
            elif self._is_reasoning_model:
                yield from self._push_content("thinking", event.text)
            else:
                yield from self.finish()
                plan = {"message": {"tool_plan": event.text}}
                yield {"type": "tool-plan-delta", "delta": plan}

    def finish(self) -> Iterator[Json]:
        """The end of the open block, if there is one."""
        if self._open is not None:
            yield self._open
        self._open, self._kind = None, ""

    def _push_content(self, kind: str, text: str) -> Iterator[Json]:
        if self._kind != kind:
            index = self._num_blocks
            self._num_blocks += 1
            yield from self._begin("content", index)
            self._kind = kind
            yield _event("content-start", index, {"content": {"type": kind, kind: ""}})
        yield _event("content-delta", self._num_blocks - 1, {"content": {kind: text}})

    def _begin(self, name: str, index: int) -> Iterator[Json]:
        yield from self.finish()
        self._open = {"type": f"{name}-end", "index": index}


def _event(name: str, index: int, message: Json) -> Json:
    return {"type": name, "index": index, "delta": {"message": message}}


def _call(call: str, name: str) -> Json:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": ""}}


def _joined(items: list[CohereLogprobs]) -> CohereLogprobs:
    return CohereLogprobs(
        "".join(each.text for each in items),
        [id_ for each in items for id_ in each.token_ids],
        [value for each in items for value in each.logprobs],
    )


def cohere_usage(usage: Usage) -> CohereUsage:
    counts = CohereTokens(usage.prompt_tokens, usage.completion_tokens)
    prompt = usage.prompt_tokens_details
    return CohereUsage(counts, counts, None if prompt is None else prompt.cached_tokens)


def finish_of(finish_reason: str | None, stop_reason: str | int | None) -> str:
    """Cohere's word for why a choice ended."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "STOP_SEQUENCE"
    return _FINISHES.get(finish_reason or "", _COMPLETE)
