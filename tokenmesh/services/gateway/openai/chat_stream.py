"""ChatStream: output chunks of choices as the chunks of a streamed chat."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.request import ChunkOptions, Head
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.chunk_stream import CHAT_CHUNK, NULL, ChunkStream
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.parsers.events import CallBegin, Content, Event, Reasoning

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
        reasons = encode_json(chunk.finish_reason)
        if chunk.finish_reason is not None:
            reasons += b',"stop_reason":' + encode_json(chunk.stop_reason)
        if self._options.token_ids:
            reasons += b',"token_ids":' + encode_json(chunk.token_ids)
        delta = self._delta(chunk)
        usage = self._running_usage(self._prompt_tokens, count)
        before = b""
        if chunk.finish_reason is not None and "tool_calls" in delta:
            # openai's stream helper misses the end of a call in the chunk that ends the choice
            before = self._chunk(chunk.choice, encode_json(delta), logprobs, NULL, b"")
            delta, logprobs = {}, NULL
        return before + self._chunk(chunk.choice, encode_json(delta), logprobs, reasons, usage)

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
