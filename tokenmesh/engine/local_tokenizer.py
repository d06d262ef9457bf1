"""LocalTokenizer: texts to token ids and back, with the checkpoint's own tokenizer and template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tokenmesh.engine.models.location import locate_tokenizer_files
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.model_files import sentence_config_path

Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, as chat templates take them."""
_TYPES: Final = "token_type_ids"


class LocalTokenizer:
    """transformers' tokenizer of a model; loaded with the first text."""

    def __init__(self, model: ModelSettings) -> None:
        self._model = model
        self._loaded: Any = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], bytes]:
        """The ids of two texts in one prompt, and 0 or 1 for the text that each belongs to.

        Raises InvalidInput for a checkpoint that writes pairs by a template: ids without it would
        give other scores.
        """
        directory = locate_tokenizer_files(self._model)
        config = sentence_config_path(directory)
        if config is not None and "message" in (
            json.loads(config.read_bytes()).get("modality_config") or ()
        ):
            raise InvalidInput("the model reads pairs by a template, which a mesh serves")
        # asked for: some tokenizers' configs leave them out, which the model would read as one text
        encoded = self._tokenizer(first, second, return_token_type_ids=True)
        return list(encoded["input_ids"]), bytes(encoded[_TYPES])

    def render(self, conversation: Conversation, variables: Mapping[str, Any]) -> list[int]:
        """The ids of a conversation by the checkpoint's chat template, ready for an answer.

        Raises InvalidInput where it has none."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise InvalidInput("the checkpoint has no chat template", param="messages")
        messages = [dict(message) for message in conversation]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids, without special tokens; empty for a checkpoint without a tokenizer."""
        if self._loaded is None and not self._has_tokenizer:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def _has_tokenizer(self) -> bool:
        return (locate_tokenizer_files(self._model) / "tokenizer.json").is_file()

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            # imported here: it takes a second, and prompts may be token ids
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(
                locate_tokenizer_files(self._model),
                trust_remote_code=self._model.trust_remote_code,
            )
        return self._loaded
