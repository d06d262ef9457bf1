"""Details about the tokens of an output that a client may request: log-probabilities and tokens.

`ContentLogprobs` selects those of the answer's text: tokens of reasoning, tool calls and markers
have log-probabilities too, but no item shows them. `RawMessages` has all tokens.
"""

from collections.abc import Sequence
from typing import Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.shared.text import Vocabulary, make_detokenizer
from tokenmesh.shared.tokens import unpack_ids

_MAX_UNDECIDED: Final = 64


class ContentLogprobs:
    """Log-probabilities of the text of one model turn."""

    def __init__(self, shapes: LogprobShapes) -> None:
        self._shapes = shapes
        self._undecided: list[ChatLogprob] = []
        """Tokens whose text the parser has not classified yet."""

    def push(self, chunk: OutputChunk) -> list[list[ChatLogprob]]:
        """One list for each content event of the chunk."""
        entries = self._shapes.chat(chunk.logprobs).content
        last = entries[-1] if entries and chunk.finish_reason is not None else None
        is_end = last is not None and not chunk.text.endswith(last.token)
        if chunk.events is None:
            return [entries[:-1] if is_end else entries]
        stretches: list[list[ChatLogprob]] = [[]]
        for entry, num_bytes in zip(entries, chunk.content_bytes, strict=True):
            if entry is not last or not is_end:
                self._undecided.append(entry)
            if num_bytes is None:
                del self._undecided[:-_MAX_UNDECIDED]
                continue
            if num_bytes:
                stretches[-1] += _last_of(self._undecided, num_bytes)
            elif stretches[-1]:
                stretches.append([])
            self._undecided.clear()
        return stretches


def _last_of(entries: list[ChatLogprob], num_bytes: int) -> list[ChatLogprob]:
    """The last entries that together have at least `num_bytes` bytes of text."""
    first, missing = len(entries), num_bytes
    while first and missing > 0:
        first -= 1
        missing -= len(entries[first].bytes)
    return entries[first:]


class RawMessages:
    """Of `enable_response_messages`: the tokens into and out of the model, by turn."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._inputs: list[Json] = []
        self._outputs: list[Json] = []
        self._ids: list[int] = []

    def write(self, chunks: Sequence[OutputChunk]) -> None:
        """Add output of the current turn."""
        for chunk in chunks:
            self._ids.extend(chunk.token_ids)

    def end_turn(self, packed_prompt: bytes) -> None:
        """End the current turn; `packed_prompt`: its prompt's token ids."""
        self._inputs.append(_message(unpack_ids(packed_prompt), self._vocabulary))
        self._outputs.append(_message(self._ids, self._vocabulary))
        self._ids = []

    def fields(self) -> Json:
        """Fields of the Response object."""
        return {"input_messages": list(self._inputs), "output_messages": list(self._outputs)}


def _message(ids: Sequence[int], vocabulary: Vocabulary) -> Json:
    """vLLM's shape: the tokens, and their text including special tokens."""
    detokenizer = make_detokenizer(
        vocabulary, (), skip_special_tokens=False, spaces_between_special_tokens=False
    )
    text = detokenizer.push(list(ids)) + detokenizer.finish()
    return {"type": "raw_message_tokens", "message": text, "tokens": list(ids)}
