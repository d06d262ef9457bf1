"""Parts of responses that chats and completions share: chunks of a stream, log-probabilities."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenmesh.services.gateway.apis.openai.shapes import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    TopLogprob,
)
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, GenerationRequest, Head
from tokenmesh.services.gateway.core.generation.usage import Usage, usage_of
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import Vocabulary

CHAT_CHUNK: Final = b"chat.completion.chunk"
COMPLETION_CHUNK: Final = b"text_completion"
NULL: Final = b"null"


class ChunkStream:
    """Encodes what does not vary once: a chunk is a few byte strings joined."""

    def __init__(self, kind: bytes, head: Head, options: ChunkOptions) -> None:
        """`kind`: the chunks' field `object`."""
        self._options = options
        tier = b""
        if head.service_tier is not None:
            tier = b',"service_tier":' + encode_json(head.service_tier)
        self._start = b'data: {"id":%b,"object":"%b","created":%d,"model":%b%b,"choices":[' % (
            encode_json(head.id),
            kind,
            head.created,
            encode_json(head.model),
            tier,
        )

    def end(self, usage: Usage) -> bytes:
        """The chunk after the last choice has ended; empty unless the client requested usage."""
        if not self._options.usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode_json(usage))

    def _running_usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The field `usage` of a chunk, where every chunk has one."""
        if not self._options.running_usage:
            return b""
        return b',"usage":' + encode_json(usage_of(prompt_tokens, completion_tokens, None))


_LEAST = -9999.0
"""Stands for a probability of zero, as in vLLM: JSON has no infinity."""


class LogprobShapes:
    """Turns a model's ids into text; with `as_ids` into `token_id:7`."""

    def __init__(
        self, vocabulary: Vocabulary, as_ids: bool = False, *, has_named: bool = False
    ) -> None:
        """`has_named`: the client has named the tokens whose log-probabilities are returned."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._has_named = has_named

    @classmethod
    def of(cls, request: GenerationRequest) -> "LogprobShapes":
        """The shapes of a request's log-probabilities."""
        return cls(
            request.text.vocabulary,
            request.shows_tokens_as_ids,
            has_named=bool(request.jobs[0].sampling.logprob_token_ids),
        )

    def token(self, token_id: int) -> tuple[str, bytes]:
        """A token as text and as bytes."""
        if self._as_ids:
            name = f"token_id:{token_id}"
            return name, name.encode()
        return self._vocabulary.token_text(token_id)

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """The shape of chat choices."""
        return ChatLogprobs([self._chat_entry(entry) for entry in entries])

    def _chat_entry(self, entry: TokenLogprobs) -> ChatLogprob:
        text, data = self.token(entry.token_id)
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        shown = chosen_first(entry) if self._has_named else pairs
        tops = [TopLogprob(*self._shown(*pair)) for pair in shown]
        return ChatLogprob(text, finite(entry.logprob), list(data), tops)

    def _shown(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self.token(token_id)
        return text, finite(logprob), list(data)

    def completion(
        self, entries: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int
    ) -> CompletionLogprobs:
        """The shape of plain completions; `offset` is where the first token's text begins.

        The entry of a prompt's first token is None. Characters that several tokens share count
        once for each of them, as in vLLM.
        """
        shape = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            text = self.token(token_id)[0]
            shape.text_offset.append(offset)
            shape.tokens.append(text)
            shape.token_logprobs.append(None if entry is None else finite(entry.logprob))
            shape.top_logprobs.append(None if entry is None else self._top(entry))
            offset += len(text)
        return shape

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token, then the most likely ones. Different tokens may have the same text."""
        tops: dict[str, float] = {}
        for token_id, logprob in chosen_first(entry):
            tops.setdefault(self.token(token_id)[0], logprob)
        return tops

    def prompt(
        self, entries: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """One table a prompt token: by id the log-probability, rank and text."""
        return [None if entry is None else self._prompt_table(entry) for entry in entries]

    def _prompt_table(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        table = {
            str(token_id): self._prompt_cell(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
            )
        }
        own = self._prompt_cell(entry.token_id, entry.logprob, entry.rank)
        return {str(entry.token_id): own, **table}

    def _prompt_cell(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self.token(token_id)[0]
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def chosen_first(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
    """The chosen token and its log-probability, then the others in their order."""
    yield entry.token_id, finite(entry.logprob)
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        if token_id != entry.token_id:
            yield token_id, finite(logprob)


def finite(logprob: float) -> float:
    """The log-probability as JSON can contain it."""
    return max(logprob, _LEAST)
