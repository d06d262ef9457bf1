"""CompletionWriter: the answer of /v1/completions."""

from collections.abc import Iterator, Sequence

from tokenmesh.services.gateway.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.completion_stream import CompletionStream
from tokenmesh.services.gateway.openai.shapes import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.tokenize import TextPrompt
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids


class CompletionWriter:
    """A `Writer`. A choice belongs to prompt `choice // n`."""

    def __init__(self, ask: GenerationRequest) -> None:
        self._ask = ask
        self._n = ask.jobs[0].n
        self._stream: CompletionStream | None = None
        self._echoes_late = ask.echoes_prompt and ask.chunks.logprobs
        """A prompt's log-probabilities come with the first token of its first choice."""
        self._echoed: set[int] = set()
        self._held: dict[int, list[OutputChunk]] = {}
        """Of choices whose prompt cannot be echoed yet."""

    keep_alive = sse.COMMENT

    def begin(self, delivery: Delivery) -> bytes:
        """See `Writer.begin`."""
        if not self._ask.echoes_prompt or self._echoes_late:
            return b""
        frames = (self._echo_frame(delivery, index) for index in range(self._ask.num_choices))
        return b"".join(frames)

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """See `Writer.write`."""
        if self._echoes_late:
            return b"".join(self._write_echoed(delivery, pieces))
        return self._chunks(delivery).write(pieces)

    def _write_echoed(self, delivery: Delivery, pieces: list[OutputChunk]) -> Iterator[bytes]:
        """The chunks of each choice behind its echo."""
        for piece in pieces:
            self._held.setdefault(piece.choice, []).append(piece)
        for index in tuple(self._held):
            if index not in self._echoed:
                first = delivery.choices[index // self._n * self._n]
                if first.prompt_logprobs is None and first.finish_reason is None:
                    continue
                self._echoed.add(index)
                yield self._echo_frame(delivery, index)
            yield self._chunks(delivery).write(self._held.pop(index))

    def _echo_frame(self, delivery: Delivery, index: int) -> bytes:
        text, ids = self._echo(delivery, index)
        shape = None
        if self._ask.chunks.logprobs:
            entries = self._prompt_logprobs(delivery, index) or [None] * len(ids)
            shape = self._ask.logprobs.completion(entries, ids, 0)
        return self._chunks(delivery).echo(index, text, shape)

    def end(self, delivery: Delivery) -> bytes:
        """See `Writer.end`."""
        return self._chunks(delivery).end(delivery.usage()) + sse.DONE

    def fail(self, error: TokenMeshError) -> bytes:
        """See `Writer.fail`."""
        return sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> Completion:
        """See `Writer.whole`."""
        head = self._ask.head
        merged = merge(pieces, self._ask.num_choices)
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(delivery, piece) for piece in merged],
            usage=delivery.usage(),
            service_tier=head.service_tier,
        )

    def _choice(self, delivery: Delivery, piece: OutputChunk) -> CompletionChoice:
        ask = self._ask
        text, ids = "", list[int]()
        entries: list[TokenLogprobs | None] = list(piece.logprobs)
        if ask.echoes_prompt:
            text, ids = self._echo(delivery, piece.choice)
            entries = [*(self._prompt_logprobs(delivery, piece.choice) or ()), *entries]
        shape: CompletionLogprobs | None = None
        if ask.chunks.logprobs:
            shape = ask.logprobs.completion(entries, [*ids, *piece.token_ids], 0)
        prompt_logprobs = None
        if ask.shows_prompt_logprobs:
            told = self._prompt_logprobs(delivery, piece.choice)
            prompt_logprobs = ask.logprobs.prompt(told) if told is not None else None
        return CompletionChoice(
            index=piece.choice,
            text=text + piece.text,
            logprobs=shape,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if ask.chunks.token_ids else None,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self._prompt_ids(delivery, piece.choice),
        )

    def _echo(self, delivery: Delivery, choice: int) -> tuple[str, list[int]]:
        """A choice's prompt as text and as ids."""
        job, prompt = self._ask.jobs[choice // self._n], delivery.prompts[choice // self._n]
        ids = unpack_ids(prompt.packed_ids)
        if isinstance(job.prompt, TextPrompt) and job.truncate_prompt_tokens is None:
            return job.prompt.text, ids
        return self._ask.text.vocabulary.decode(ids), ids

    def _prompt_logprobs(
        self, delivery: Delivery, choice: int
    ) -> Sequence[TokenLogprobs | None] | None:
        """Only the first choice of a prompt is told them."""
        return delivery.choices[choice // self._n * self._n].prompt_logprobs

    def _prompt_ids(self, delivery: Delivery, choice: int) -> list[int] | None:
        if not self._ask.chunks.token_ids:
            return None
        return unpack_ids(delivery.prompts[choice // self._n].packed_ids)

    def _chunks(self, delivery: Delivery) -> CompletionStream:
        if self._stream is None:
            ask = self._ask
            counts = [prompt.num_tokens for prompt in delivery.prompts for _ in range(self._n)]
            ids = [self._prompt_ids(delivery, choice) for choice in range(ask.num_choices)]
            told = {choice: each for choice, each in enumerate(ids) if each is not None}
            self._stream = CompletionStream(ask.head, ask.chunks, ask.logprobs, counts, told)
        return self._stream
