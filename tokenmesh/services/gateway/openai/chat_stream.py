"""ChatStream: pieces of choices as chunks of a streamed chat.

All that does not vary is encoded once; a usual chunk is four byte strings joined.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.chat_events import delta_of
from tokenmesh.services.gateway.openai.head import Head, tier_field
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import Usage, usage_of
from tokenmesh.services.gateway.parsers.events import Content, Event, Reasoning

_NULL: Final = b"null"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """What chunks hold besides text."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    """A chunk with the usage at the end."""
    running_usage: bool = False
    """The usage so far in every chunk."""


class ChatStream:
    """Encodes the chunks of one response."""

    def __init__(
        self, head: Head, options: ChunkOptions, logprobs: LogprobShapes, prompt_tokens: int
    ) -> None:
        self._id = head.id
        self._options = options
        self._logprobs = logprobs
        self._prompt_tokens = prompt_tokens
        self._counts: dict[int, int] = {}
        model = encode_json(head.model) + tier_field(head)
        self._start = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (encode_json(head.id), head.created, model)
        )
        self._is_plain = not (options.logprobs or options.token_ids or options.running_usage)

    def begin(self, num_choices: int, role: str, echo: str, prompt: Mapping[str, object]) -> bytes:
        """A chunk with the role for each choice, and one with the echoed text.

        `prompt`: what the first chunks tell of it, by name; None is left out.
        """
        told = [
            b',"%b":%b' % (name.encode(), encode_json(value))
            for name, value in prompt.items()
            if value is not None
        ]
        extra = b"".join(told) + self._usage(0)
        frames = []
        for index in range(num_choices):
            delta = b'{"role":%b,"content":""}' % encode_json(role)
            frames.append(self._chunk(index, delta, _NULL, b"null", extra))
            if echo:
                frames.append(self._text(index, echo))
        return b"".join(frames)

    def write(self, pieces: Iterable[OutputChunk]) -> bytes:
        """The chunks of a flush."""
        frames = []
        for piece in pieces:
            is_last = piece.finish_reason is not None
            if is_last or not self._is_plain:
                if is_last or piece.text or piece.token_ids or piece.events:
                    frames.append(self._full(piece))
            elif piece.events is not None:
                frames.append(self._events(piece, piece.events))
            elif piece.text:
                frames.append(self._text(piece.choice, piece.text))
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """What comes after the last choice has ended; nothing unless usage was asked for."""
        if not self._options.usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode_json(usage))

    def _text(self, index: int, text: str, key: bytes = b"content") -> bytes:
        return b'%b{"index":%d,"delta":{"%b":%b},"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._start,
            index,
            key,
            encode_json(text),
        )

    def _events(self, piece: OutputChunk, events: list[Event]) -> bytes:
        if not events:
            return b""
        if len(events) == 1:
            only = events[0]
            if isinstance(only, Content):
                return self._text(piece.choice, only.text)
            if isinstance(only, Reasoning):
                return self._text(piece.choice, only.text, b"reasoning")
        delta = encode_json(delta_of(events, piece.choice, self._id))
        return self._chunk(piece.choice, delta, _NULL, _NULL, b"")

    def _full(self, piece: OutputChunk) -> bytes:
        """A chunk with all that was asked for; the last one of a choice says why it ended."""
        logprobs = _NULL
        if self._options.logprobs and piece.token_ids:
            logprobs = encode_json(self._logprobs.chat(piece.logprobs))
        count = self._counts.get(piece.choice, 0) + len(piece.token_ids)
        self._counts[piece.choice] = count
        reasons = encode_json(piece.finish_reason)
        if piece.finish_reason is not None:
            reasons += b',"stop_reason":' + encode_json(piece.stop_reason)
        if self._options.token_ids:
            reasons += b',"token_ids":' + encode_json(piece.token_ids)
        delta = encode_json(self._delta(piece))
        return self._chunk(piece.choice, delta, logprobs, reasons, self._usage(count))

    def _delta(self, piece: OutputChunk) -> dict[str, Any]:
        if piece.events is not None:
            return delta_of(piece.events, piece.choice, self._id)
        if not piece.text and piece.finish_reason is not None:
            return {}
        return {"content": piece.text}

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

    def _usage(self, completion_tokens: int) -> bytes:
        if not self._options.running_usage:
            return b""
        usage = usage_of(self._prompt_tokens, completion_tokens, None)
        return b',"usage":' + encode_json(usage)
