"""ChatWriter: the answer of /v1/chat/completions."""

from tokenmesh.services.gateway.generation.chunk import OutputChunk, merge
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http import sse
from tokenmesh.services.gateway.openai.chat_events import message_of
from tokenmesh.services.gateway.openai.chat_stream import ChatStream
from tokenmesh.services.gateway.openai.shapes import ChatChoice, ChatCompletion
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.tokens import unpack_ids


class ChatWriter:
    """A `Writer`."""

    def __init__(self, ask: GenerationRequest) -> None:
        self._ask = ask
        self._stream: ChatStream | None = None

    keep_alive = sse.COMMENT

    def begin(self, delivery: Delivery) -> bytes:
        """See `Writer.begin`."""
        ask = self._ask
        stream = self._chunks(delivery)
        extra = {
            "prompt_token_ids": self._prompt_ids(delivery),
            "prompt_text": self._prompt_text(delivery),
        }
        return stream.begin(ask.num_choices, ask.role, ask.echo, extra)

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        """See `Writer.write`."""
        return self._chunks(delivery).write(self._named(pieces))

    def end(self, delivery: Delivery) -> bytes:
        """See `Writer.end`."""
        return self._chunks(delivery).end(delivery.usage()) + sse.DONE

    def fail(self, error: TokenMeshError) -> bytes:
        """See `Writer.fail`."""
        return sse.error_frames(error)

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> ChatCompletion:
        """See `Writer.whole`."""
        ask = self._ask
        choices = [self.choice(each) for each in self._named(merge(pieces, ask.num_choices))]
        prompt_logprobs = delivery.choices[0].prompt_logprobs
        return ChatCompletion(
            id=ask.head.id,
            created=ask.head.created,
            model=ask.head.model,
            choices=choices,
            usage=delivery.usage(),
            service_tier=ask.head.service_tier,
            prompt_logprobs=(
                ask.logprobs.prompt(prompt_logprobs) if prompt_logprobs is not None else None
            ),
            prompt_token_ids=self._prompt_ids(delivery),
            prompt_text=self._prompt_text(delivery),
        )

    def choice(self, piece: OutputChunk) -> ChatChoice:
        """One choice of an answer that is not streamed, from all its pieces."""
        ask = self._ask
        return ChatChoice(
            index=piece.choice,
            message=message_of(piece, ask.head.id, ask.role, ask.echo),
            logprobs=ask.logprobs.chat(piece.logprobs) if ask.chunks.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if ask.chunks.token_ids else None,
        )

    def _named(self, pieces: list[OutputChunk]) -> list[OutputChunk]:
        """A function that the client has named was not the model's choice: OpenAI says stop."""
        if self._ask.names_tool:
            for piece in pieces:
                if piece.finish_reason == "tool_calls":
                    piece.finish_reason = "stop"
        return pieces

    def _chunks(self, delivery: Delivery) -> ChatStream:
        if self._stream is None:
            ask = self._ask
            prompt_tokens = delivery.prompts[0].num_tokens
            self._stream = ChatStream(ask.head, ask.chunks, ask.logprobs, prompt_tokens)
        return self._stream

    def _prompt_ids(self, delivery: Delivery) -> list[int] | None:
        if not self._ask.chunks.token_ids:
            return None
        return unpack_ids(delivery.prompts[0].packed_ids)

    def _prompt_text(self, delivery: Delivery) -> str | None:
        """As the model has it: after the template, truncation and expansion of media."""
        if not self._ask.shows_prompt_text:
            return None
        ids = unpack_ids(delivery.prompts[0].packed_ids)
        return self._ask.text.vocabulary.decode(ids)
