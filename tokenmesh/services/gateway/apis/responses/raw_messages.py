"""RawMessages: all tokens into and out of the model, for clients that ask for them."""

from collections.abc import Sequence

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.shared.text import Vocabulary, make_detokenizer
from tokenmesh.shared.tokens import unpack_ids


class RawMessages:
    """It keeps the messages of `enable_response_messages`: the tokens into and out of the model, by
    turn.
    """

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
