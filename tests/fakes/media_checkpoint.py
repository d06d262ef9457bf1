"""Sizes, template and weights that tiny checkpoints of models that take media share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from tests.fakes.models import randomized
from tests.fakes.tokenizers import write_json

TEXT: Final[Mapping[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Sizes of every language model."""

_TEMPLATE: Final = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER\
{% elif part['type'] == 'video' %}VIDEO\
{% elif part['type'] == 'audio' %}AUDIO\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tokenizer_config(
    directory: Path, tokens: Mapping[str, str], image: str = "", video: str = "", audio: str = ""
) -> None:
    """With a chat template that writes these placeholders of items."""
    template = _TEMPLATE.replace("PLACEHOLDER", image).replace("VIDEO", video)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": dict(tokens),
        "chat_template": template.replace("AUDIO", audio),
        "padding_side": "left",
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def with_weights(directory: Path, architecture: str) -> Path:
    """Add random weights, in float32, that depend on nothing but config.json."""
    stated = (directory / "config.json").read_text()
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    randomized(getattr(transformers, architecture)(config)).save_pretrained(directory)
    (directory / "config.json").write_text(stated)
    return directory


def loaded(directory: Path, architecture: str) -> Any:
    """A checkpoint as its class of transformers."""
    kind = getattr(transformers, architecture)
    return kind.from_pretrained(directory, dtype=torch.float32).eval()
