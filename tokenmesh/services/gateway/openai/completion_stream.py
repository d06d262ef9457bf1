"""CompletionStream: pieces of choices as chunks of a streamed plain completion."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.chat_stream import ChunkOptions
from tokenmesh.services.gateway.openai.head import Head, tier_field
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import CompletionLogprobs, Usage, usage_of

_NULL: Final = b"null"


class CompletionStream:
    """Encodes the chunks of one response."""

    def __init__(
        self,
        head: Head,
        options: ChunkOptions,
        logprobs: LogprobShapes,
        prompt_tokens: Sequence[int],
        prompt_ids: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """By choice: `prompt_tokens` for the running usage, `prompt_ids` for the first chunk."""
        self._untold = dict(prompt_ids or {})
        self._options = options
        self._logprobs = logprobs
        self._prompt_tokens = prompt_tokens
        self._counts = [0] * len(prompt_tokens)
        self._offsets = [0] * len(prompt_tokens)
        self._start = (
            b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":['
            % (encode_json(head.id), head.created, encode_json(head.model) + tier_field(head))
        )

    def echo(self, choice: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        """A choice's prompt, as its first chunk, without generated tokens."""
        self._offsets[choice] = len(text)
        shown = _NULL if logprobs is None else encode_json(logprobs)
        return self._chunk(
            OutputChunk(choice, text), shown, [] if self._options.token_ids else None
        )

    def write(self, pieces: Iterable[OutputChunk]) -> bytes:
        """The chunks of a flush."""
        frames = []
        for piece in pieces:
            self._counts[piece.choice] += len(piece.token_ids)
            ids = piece.token_ids if self._options.token_ids else None
            if piece.text or ids or piece.finish_reason is not None or piece.logprobs:
                frames.append(self._chunk(piece, self._shape(piece), ids))
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        """What comes after the last choice has ended; nothing unless usage was asked for."""
        if not self._options.usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode_json(usage))

    def _shape(self, piece: OutputChunk) -> bytes:
        if not self._options.logprobs or not piece.logprobs:
            return _NULL
        shape = self._logprobs.completion(
            piece.logprobs, piece.token_ids, self._offsets[piece.choice]
        )
        self._offsets[piece.choice] += sum(len(token) for token in shape.tokens)
        return encode_json(shape)

    def _chunk(self, piece: OutputChunk, logprobs: bytes, ids: list[int] | None) -> bytes:
        return (
            b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b}\n\n'
            % (
                self._start,
                piece.choice,
                encode_json(piece.text),
                logprobs,
                encode_json(piece.finish_reason),
                encode_json(piece.stop_reason),
                (b"" if ids is None else b',"token_ids":' + encode_json(ids))
                + self._prompt_ids(piece.choice),
                self._usage(piece.choice),
            )
        )

    def _prompt_ids(self, choice: int) -> bytes:
        """Once for each choice, where they were asked for."""
        ids = self._untold.pop(choice, None)
        return b"" if ids is None else b',"prompt_token_ids":' + encode_json(ids)

    def _usage(self, choice: int) -> bytes:
        if not self._options.running_usage:
            return b""
        usage = usage_of(self._prompt_tokens[choice], self._counts[choice], None)
        return b',"usage":' + encode_json(usage)
