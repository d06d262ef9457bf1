"""enable_response_messages: what went into the model and came out of it, token by token."""

from collections.abc import Sequence
from typing import Any

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.shared.text import Vocabulary, make_detokenizer
from tokenmesh.shared.tokens import unpack_ids


class RawMessages:
    """Of one response: a message in and a message out for each turn of the model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._inputs: list[dict[str, Any]] = []
        self._outputs: list[dict[str, Any]] = []
        self._ids: list[int] = []

    def write(self, pieces: Sequence[OutputChunk]) -> None:
        """More of a turn's output."""
        for piece in pieces:
            self._ids.extend(piece.token_ids)

    def end_turn(self, packed_prompt: bytes) -> None:
        """That was all of it; its prompt as packed ids."""
        self._inputs.append(_message(unpack_ids(packed_prompt), self._vocabulary))
        self._outputs.append(_message(self._ids, self._vocabulary))
        self._ids = []

    def fields(self) -> dict[str, Any]:
        """As the Response shows them."""
        return {"input_messages": list(self._inputs), "output_messages": list(self._outputs)}


def _message(ids: Sequence[int], vocabulary: Vocabulary) -> dict[str, Any]:
    """vLLM's shape: the tokens, and their text with all that is not text shown."""
    detokenizer = make_detokenizer(
        vocabulary, (), skip_special_tokens=False, spaces_between_special_tokens=False
    )
    text = detokenizer.push(list(ids)) + detokenizer.finish()
    return {"type": "raw_message_tokens", "message": text, "tokens": list(ids)}
