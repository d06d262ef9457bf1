"""Responses of /v1/messages: content blocks, their stream events, and the bodies.

A streamed response sends the events of `ContentBlocks`; a whole one is collected from them.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import xxhash
from pydantic_core import from_json

from tokenmesh.services.gateway.apis.anthropic.conversation import INVALID_INPUT
from tokenmesh.services.gateway.apis.anthropic.errors import error_body
from tokenmesh.services.gateway.apis.openai.translation import FieldNames
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.core.http.sse import encode_json, event_frame
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from tokenmesh.shared.errors import TokenMeshError

_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}

BlockEvent = dict[str, Any]
"""A content_block_start, content_block_delta or content_block_stop event."""


class OutputTokensDetails(msgspec.Struct):
    """Output tokens by purpose."""

    thinking_tokens: int


class InputTokensDetails(msgspec.Struct, omit_defaults=True):
    """Prompt tokens that stand for media; Anthropic's API has no field for them."""

    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0


class MessageUsage(msgspec.Struct, omit_defaults=True):
    """Token counts. The prompt has the sum of the three input counts."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: OutputTokensDetails | None = None
    input_tokens_details: InputTokensDetails | None = None


class MessageBody(msgspec.Struct, kw_only=True):
    """A whole response; without content also the start of a streamed one."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The response of count_tokens."""

    input_tokens: int


class MessagesWriter:
    """The `BodyWriter` of a message, which has one choice."""

    keep_alive = _PING

    def __init__(
        self, generation: GenerationRequest, names: FieldNames, *, shows_thinking: bool = True
    ) -> None:
        self._head = generation.head
        self._names = names
        self._blocks = ContentBlocks(self._head.id, shows_thinking=shows_thinking)
        self._stop: tuple[str, str | None] = ("end_turn", None)

    def begin(self, delivery: Delivery) -> bytes:
        message = self._message(delivery, [])
        message.usage.output_tokens = 0
        return event_frame({"type": "message_start", "message": message})

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        return b"".join([event_frame(event) for chunk in pieces for event in self._events(chunk)])

    def end(self, delivery: Delivery) -> bytes:
        reason, sequence = self._stop
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": message_usage(delivery.usage()),
        }
        return event_frame(ending) + event_frame({"type": "message_stop"})

    def fail(self, error: TokenMeshError) -> bytes:
        error = self._names.rename(error)
        body = error_body(error.status, error.message, error.param, self._head.id)
        return b"event: error\ndata: " + encode_json(body) + b"\n\n"

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> MessageBody:
        (chunk,) = merge(pieces, 1)
        message = self._message(delivery, collect(self._events(chunk)))
        message.stop_reason, message.stop_sequence = self._stop
        return message

    def _events(self, chunk: OutputChunk) -> list[BlockEvent]:
        events = list(self._blocks.push(chunk.all_events()))
        if chunk.finish_reason is not None:
            events.extend(self._blocks.finish())
            self._stop = stop_of(chunk.finish_reason, chunk.stop_reason)
        return events

    def _message(self, delivery: Delivery, content: list[dict[str, Any]]) -> MessageBody:
        head, usage = self._head, message_usage(delivery.usage())
        return MessageBody(id=head.id, model=head.model, content=content, usage=usage)


class ContentBlocks:
    """The content blocks of one response. A block begins where the kind of output changes."""

    def __init__(self, message_id: str, *, shows_thinking: bool = True) -> None:
        self._message_id = message_id
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind = ""
        self._blank = ""
        """White space that becomes text only if text follows."""
        self._thinking_hash = hashlib.sha256()

    def push(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        """Stream events for parser events."""
        for event in events:
            if isinstance(event, Content):
                yield from self._push_text(event.text)
            elif isinstance(event, Reasoning):
                yield from self._push_thinking(event.text)
            elif isinstance(event, CallBegin):
                yield from self._begin_call(event)
            elif isinstance(event, CallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})

    def finish(self) -> Iterator[BlockEvent]:
        """The end of the open block, if there is one."""
        if self._kind == "thinking":
            signature = self._thinking_hash.hexdigest()
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = self._blank = ""

    def _push_text(self, text: str) -> Iterator[BlockEvent]:
        """White space alone does not begin a block: the API refuses such blocks as input."""
        if self._kind != "text":
            self._blank += text
            if not text.strip():
                return
            text = self._blank
            yield from self._begin("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _push_thinking(self, text: str) -> Iterator[BlockEvent]:
        if self._kind != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begin("thinking", block)
            self._thinking_hash = hashlib.sha256()
        self._thinking_hash.update(text.encode())
        if self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _begin_call(self, event: CallBegin) -> Iterator[BlockEvent]:
        hashed = xxhash.xxh3_128_hexdigest(f"{self._message_id}:{event.index}".encode())
        call_id = event.model_id or f"toolu_{hashed}"
        block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
        yield from self._begin("tool_use", block)

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[BlockEvent]:
        yield from self.finish()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def collect(events: Iterable[BlockEvent]) -> list[dict[str, Any]]:
    """The content blocks that all events of a response add up to."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
                continue
            name = delta["type"].removesuffix("_delta")
            blocks[-1][name] += delta[name]
    for index, text in arguments.items():
        blocks[index]["input"] = _parse_input(text)
    return blocks


def _parse_input(text: str) -> dict[str, Any]:
    """The input of a call; of an unfinished call as much as can be parsed."""
    try:
        value = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_INPUT: text}


def message_usage(usage: Usage) -> MessageUsage:
    """`input_tokens` counts prompt tokens neither read from nor written to the prefix cache."""
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    cached = 0 if prompt is None else prompt.cached_tokens
    created = 0 if prompt is None else prompt.created_cache_tokens or 0
    details = None if output is None else OutputTokensDetails(output.reasoning_tokens)
    media = None
    if prompt is not None and prompt.multimodal_tokens:
        media = InputTokensDetails(prompt.image_tokens, prompt.audio_tokens, prompt.video_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached - created,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=created,
        output_tokens_details=details,
        input_tokens_details=media,
    )


def stop_of(finish_reason: str | None, stop_reason: str | int | None) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence` of a finished choice."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return _STOP_REASONS.get(finish_reason or "", "end_turn"), None
