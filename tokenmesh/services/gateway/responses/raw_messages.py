"""enable_response_messages: what went into the model and came out of it, token by token."""

from collections.abc import Sequence
from typing import Any

from tokenmesh.shared.text import Vocabulary, make_detokenizer


def raw_message(ids: Sequence[int], vocabulary: Vocabulary) -> dict[str, Any]:
    """vLLM's shape: the tokens, and their text with all that is not text shown."""
    detokenizer = make_detokenizer(
        vocabulary, (), skip_special_tokens=False, spaces_between_special_tokens=False
    )
    text = detokenizer.push(list(ids)) + detokenizer.finish()
    return {"type": "raw_message_tokens", "message": text, "tokens": list(ids)}
