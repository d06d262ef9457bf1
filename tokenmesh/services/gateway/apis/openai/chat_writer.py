"""ChatStream and ChatWriter: the response of /v1/chat/completions, streamed or whole."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.apis.openai.response_parts import (
    CHAT_CHUNK,
    NULL,
    ChunkStream,
    LogprobShapes,
)
from tokenmesh.services.gateway.apis.openai.shapes import (
    ChatChoice,
    ChatCompletion,
    ChatMessageOut,
    FunctionOut,
    ToolCallOut,
)
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, GenerationRequest, Head
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.parsers.parser import CallBegin, Content, Event, Reasoning
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.tokens import unpack_ids

_DIGEST_BYTES: Final = 16


class ChatStream(ChunkStream):
    """Encodes the chunks of one response; one with text alone has a short path."""

    def __init__(
        self, head: Head, options: ChunkOptions, logprobs: LogprobShapes, prompt_tokens: int
    ) -> None:
        super().__init__(CHAT_CHUNK, head, options)
        self._id = head.id
        self._logprobs = logprobs
        self._prompt_tokens = prompt_tokens
        self._counts: dict[int, int] = {}
        self._is_plain = not (options.logprobs or options.token_ids or options.running_usage)

    def begin(self, num_choices: int, role: str, echo: str, prompt: Mapping[str, object]) -> bytes:
        """For each choice a chunk with the role, and one with the echoed text if there is any.

        `prompt`: further fields of the chunks with the role; None is left out.
        """
        fields = [
            b',"%b":%b' % (name.encode(), encode_json(value))
            for name, value in prompt.items()
            if value is not None
        ]
        extra = b"".join(fields) + self._running_usage(self._prompt_tokens, 0)
        delta = b'{"role":%b,"content":""}' % encode_json(role)
        frames = []
        for index in range(num_choices):
            frames.append(self._chunk(index, delta, NULL, NULL, extra))
            if echo:
                frames.append(self._text(index, echo))
        return b"".join(frames)

    def write(self, chunks: Iterable[OutputChunk]) -> bytes:
        """The frames of a flush."""
        frames = []
        for chunk in chunks:
            is_last = chunk.finish_reason is not None
            if is_last or not self._is_plain:
                if is_last or chunk.text or chunk.token_ids or chunk.events:
                    frames.append(self._full(chunk))
            elif chunk.events is not None:
                frames.append(self._events(chunk, chunk.events))
            elif chunk.text:
                frames.append(self._text(chunk.choice, chunk.text))
        return b"".join(frames)

    def _text(self, index: int, text: str, key: bytes = b"content") -> bytes:
        return b'%b{"index":%d,"delta":{"%b":%b},"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._start,
            index,
            key,
            encode_json(text),
        )

    def _events(self, chunk: OutputChunk, events: list[Event]) -> bytes:
        if not events:
            return b""
        if len(events) == 1:
            only = events[0]
            if isinstance(only, Content):
                return self._text(chunk.choice, only.text)
            if isinstance(only, Reasoning):
                return self._text(chunk.choice, only.text, b"reasoning")
        delta = encode_json(delta_of(events, chunk.choice, self._id))
        return self._chunk(chunk.choice, delta, NULL, NULL, b"")

    def _full(self, chunk: OutputChunk) -> bytes:
        """A chunk with all requested fields; the last one of a choice has its finish reason."""
        logprobs = NULL
        if self._options.logprobs and chunk.token_ids:
            logprobs = encode_json(self._logprobs.chat(chunk.logprobs))
        count = self._counts.get(chunk.choice, 0) + len(chunk.token_ids)
        self._counts[chunk.choice] = count
        delta, ids = self._delta(chunk), chunk.token_ids
        usage = self._running_usage(self._prompt_tokens, count)
        before = b""
        if chunk.finish_reason is not None and "tool_calls" in delta:
            # openai's stream helper misses the end of a call in the chunk that ends the choice
            reasons = NULL + self._ids(ids)
            before = self._chunk(chunk.choice, encode_json(delta), logprobs, reasons, usage)
            delta, logprobs, ids = {}, NULL, []
        reasons = encode_json(chunk.finish_reason)
        if chunk.finish_reason is not None:
            reasons += b',"stop_reason":' + encode_json(chunk.stop_reason)
        reasons += self._ids(ids)
        return before + self._chunk(chunk.choice, encode_json(delta), logprobs, reasons, usage)

    def _ids(self, ids: list[int]) -> bytes:
        """The ids that became the delta of the same chunk, if they are requested."""
        return b',"token_ids":' + encode_json(ids) if self._options.token_ids else b""

    def _delta(self, chunk: OutputChunk) -> dict[str, Any]:
        if chunk.events is not None:
            return delta_of(chunk.events, chunk.choice, self._id)
        if not chunk.text and chunk.finish_reason is not None:
            return {}
        return {"content": chunk.text}

    def _chunk(
        self, index: int, delta: bytes, logprobs: bytes, reasons: bytes, extra: bytes
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._start,
            index,
            delta,
            logprobs,
            reasons,
            extra,
        )


def delta_of(events: list[Event], choice: int, response_id: str) -> dict[str, Any]:
    """Parser events of a choice as one delta; empty if there is nothing to show."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            delta["reasoning"] = delta.get("reasoning", "") + event.text
        elif isinstance(event, CallBegin):
            calls[event.index] = {
                "index": event.index,
                "id": call_id(response_id, choice, event),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        else:
            call = calls.setdefault(
                event.index, {"index": event.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += event.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def call_id(response_id: str, choice: int, call: CallBegin) -> str:
    """The model's own id of a call, or one derived from the response: the same on every gateway."""
    if call.model_id is not None:
        return call.model_id
    place = f"{response_id}\0{choice}\0{call.index}".encode()
    return f"chatcmpl-tool-{blake2b(place, digest_size=_DIGEST_BYTES).hexdigest()}"


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
        stream = self._stream or self._chat_stream(delivery)
        return stream.write(self._with_reasons(pieces) if self._request.names_tool else pieces)

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
