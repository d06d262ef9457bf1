"""CompletionWriter: the response of /v1/completions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenmesh.services.gateway.apis.openai.response_parts import (
    COMPLETION_CHUNK,
    NULL,
    ChunkStream,
    LogprobShapes,
)
from tokenmesh.services.gateway.apis.openai.shapes import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, GenerationRequest, Head
from tokenmesh.services.gateway.core.http import sse
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.tokenize import TextPrompt
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids


class CompletionStream(ChunkStream):
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
        super().__init__(COMPLETION_CHUNK, head, options)
        self._unsent_prompt_ids = dict(prompt_ids or {})
        self._logprobs = logprobs
        self._prompt_tokens = prompt_tokens
        self._counts = [0] * len(prompt_tokens)
        self._offsets = [0] * len(prompt_tokens)

    def echo(self, choice: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        """The first chunk of a choice: its prompt, without generated tokens."""
        self._offsets[choice] = len(text)
        shown = NULL if logprobs is None else encode_json(logprobs)
        return self._chunk(
            OutputChunk(choice, text), shown, [] if self._options.token_ids else None
        )

    def write(self, chunks: Iterable[OutputChunk]) -> bytes:
        """The frames of a flush."""
        frames = []
        for chunk in chunks:
            self._counts[chunk.choice] += len(chunk.token_ids)
            ids = chunk.token_ids if self._options.token_ids else None
            if chunk.text or ids or chunk.finish_reason is not None or chunk.logprobs:
                frames.append(self._chunk(chunk, self._shape(chunk), ids))
        return b"".join(frames)

    def _shape(self, chunk: OutputChunk) -> bytes:
        if not self._options.logprobs or not chunk.logprobs:
            return NULL
        shape = self._logprobs.completion(
            chunk.logprobs, chunk.token_ids, self._offsets[chunk.choice]
        )
        self._offsets[chunk.choice] += sum(len(token) for token in shape.tokens)
        return encode_json(shape)

    def _chunk(self, chunk: OutputChunk, logprobs: bytes, ids: list[int] | None) -> bytes:
        index = chunk.choice
        return (
            b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b}\n\n'
            % (
                self._start,
                index,
                encode_json(chunk.text),
                logprobs,
                encode_json(chunk.finish_reason),
                encode_json(chunk.stop_reason),
                (b"" if ids is None else b',"token_ids":' + encode_json(ids))
                + self._prompt_ids(index),
                self._running_usage(self._prompt_tokens[index], self._counts[index]),
            )
        )

    def _prompt_ids(self, choice: int) -> bytes:
        """Only in the first chunk of a choice."""
        ids = self._unsent_prompt_ids.pop(choice, None)
        return b"" if ids is None else b',"prompt_token_ids":' + encode_json(ids)


class CompletionWriter:
    """The `BodyWriter` of a completion. A choice belongs to prompt `choice // n`."""

    keep_alive = sse.COMMENT

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._logprobs = LogprobShapes.of(request)
        self._n = request.jobs[0].n
        self._stream: CompletionStream | None = None
        self._echoes_late = request.echoes_prompt and request.chunks.logprobs
        """A prompt's log-probabilities come with the first token of its first choice."""
        self._echoed: set[int] = set()
        self._held: dict[int, list[OutputChunk]] = {}
        """The output of choices whose prompt cannot be echoed yet."""

    def begin(self, delivery: Delivery) -> bytes:
        if not self._request.echoes_prompt or self._echoes_late:
            return b""
        indexes = range(self._request.num_choices)
        return b"".join([self._echo_frame(delivery, index) for index in indexes])

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        if self._echoes_late:
            return b"".join(self._write_echoed(delivery, pieces))
        return self._completion_stream(delivery).write(pieces)

    def _write_echoed(self, delivery: Delivery, chunks: list[OutputChunk]) -> Iterator[bytes]:
        """The chunks of each choice, after its echo."""
        for chunk in chunks:
            self._held.setdefault(chunk.choice, []).append(chunk)
        for index in tuple(self._held):
            if index not in self._echoed:
                first = delivery.choices[index // self._n * self._n]
                if first.prompt_logprobs is None and first.finish_reason is None:
                    continue
                self._echoed.add(index)
                yield self._echo_frame(delivery, index)
            yield self._completion_stream(delivery).write(self._held.pop(index))

    def _echo_frame(self, delivery: Delivery, index: int) -> bytes:
        text, ids = self._echo(delivery, index)
        shape = None
        if self._request.chunks.logprobs:
            entries = self._prompt_logprobs(delivery, index) or [None] * len(ids)
            shape = self._logprobs.completion(entries, ids, 0)
        return self._completion_stream(delivery).echo(index, text, shape)

    def end(self, delivery: Delivery) -> bytes:
        return self._completion_stream(delivery).end(delivery.usage()) + sse.DONE

    def fail(self, error: TokenMeshError) -> bytes:
        return sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> Completion:
        head = self._request.head
        merged = merge(pieces, self._request.num_choices)
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(delivery, each) for each in merged],
            usage=delivery.usage(),
            service_tier=head.service_tier,
        )

    def _choice(self, delivery: Delivery, merged: OutputChunk) -> CompletionChoice:
        request = self._request
        text, ids = "", list[int]()
        entries: list[TokenLogprobs | None] = list(merged.logprobs)
        prompt_entries = self._prompt_logprobs(delivery, merged.choice)
        if request.echoes_prompt:
            text, ids = self._echo(delivery, merged.choice)
            entries = [*(prompt_entries or ()), *entries]
        shape: CompletionLogprobs | None = None
        if request.chunks.logprobs:
            shape = self._logprobs.completion(entries, [*ids, *merged.token_ids], 0)
        prompt_logprobs = None
        if request.shows_prompt_logprobs and prompt_entries is not None:
            prompt_logprobs = self._logprobs.prompt(prompt_entries)
        return CompletionChoice(
            index=merged.choice,
            text=text + merged.text,
            logprobs=shape,
            finish_reason=merged.finish_reason,
            stop_reason=merged.stop_reason,
            token_ids=merged.token_ids if request.chunks.token_ids else None,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self._prompt_ids(delivery, merged.choice),
        )

    def _echo(self, delivery: Delivery, choice: int) -> tuple[str, list[int]]:
        """A choice's prompt as text and as ids."""
        job, prompt = self._request.jobs[choice // self._n], delivery.prompts[choice // self._n]
        ids = unpack_ids(prompt.packed_ids)
        if isinstance(job.prompt, TextPrompt) and job.truncate_prompt_tokens is None:
            return job.prompt.text, ids
        return self._request.text.vocabulary.decode(ids), ids

    def _prompt_logprobs(
        self, delivery: Delivery, choice: int
    ) -> Sequence[TokenLogprobs | None] | None:
        """Workers send them with the first choice of each prompt."""
        return delivery.choices[choice // self._n * self._n].prompt_logprobs

    def _prompt_ids(self, delivery: Delivery, choice: int) -> list[int] | None:
        if not self._request.chunks.token_ids:
            return None
        return unpack_ids(delivery.prompts[choice // self._n].packed_ids)

    def _completion_stream(self, delivery: Delivery) -> CompletionStream:
        if self._stream is None:
            request = self._request
            counts = [prompt.num_tokens for prompt in delivery.prompts for _ in range(self._n)]
            indexes = range(request.num_choices)
            by_choice = {each: self._prompt_ids(delivery, each) for each in indexes}
            prompt_ids = {each: ids for each, ids in by_choice.items() if ids is not None}
            self._stream = CompletionStream(
                request.head, request.chunks, self._logprobs, counts, prompt_ids
            )
        return self._stream
