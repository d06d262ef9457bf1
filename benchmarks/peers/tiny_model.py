"""A model folder without weights, for engines that only pretend: a tokenizer and a long context."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.serve.results import ROOT

_VOCAB_SIZE: Final = 8192
_CONTEXT: Final = 32_768
_SPECIAL: Final = ["<|bos|>", "<|end|>", "<|role|>", "<|text|>"]
_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|role|>{{ message['role'] }}<|text|>"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|text|>{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """A Llama configuration and a byte-level BPE tokenizer trained on this repository's pages."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = sorted(str(path) for path in (ROOT / "docs").rglob("*.md"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE, special_tokens=_SPECIAL, initial_alphabet=alphabet
    )
    tokenizer.train(pages, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    identity = {"bos_token_id": 0, "eos_token_id": 1}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"},
        **{**identity, **shape, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"max_position_embeddings": _CONTEXT, "vocab_size": tokenizer.get_vocab_size()},
        **{"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True},
    }
    of_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": _CONTEXT,
        "chat_template": _TEMPLATE,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", identity),
        ("tokenizer_config.json", of_tokenizer),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
