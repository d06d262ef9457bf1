"""Checkpoints of real shapes with random weights, and a tokenizer in which every id has a text.

    python -m benchmarks.random_model qwen2.5-0.5b /tmp/qwen

Only the shape matters for speed. Without a text for every id a server would stream empty pieces,
and the time of a token could not be measured.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

_DEMO: Final = Path(__file__).resolve().parents[1] / "tokenmesh" / "demo_model"
_FIRST_PLAIN_ID: Final = 2048
"""Above every special token of the tokenizer."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder; `config` uses transformers' names."""

    name: str
    title: str
    family: str
    """transformers' `<family>Config`."""
    config: Mapping[str, int | bool]

    @property
    def vocab_size(self) -> int:
        """Tokens that prompts are drawn from."""
        return int(self.config["vocab_size"])


SHAPES: Final = {
    shape.name: shape
    for shape in (
        ModelShape(
            "qwen2.5-0.5b",
            "Qwen2.5-0.5B shape",
            "Qwen2",
            {
                "vocab_size": 151936,
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "qwen3-0.6b",
            "Qwen3-0.6B shape",
            "Qwen3",
            {
                "vocab_size": 151936,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "gemma3-0.4b",
            "Gemma 3 1B shape, 12 of its 26 layers, a quarter of its vocabulary",
            "Gemma3Text",
            {
                "vocab_size": 65536,
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "num_hidden_layers": 12,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "sliding_window": 512,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "llama-3.1-8b",
            "Llama-3.1-8B shape",
            "Llama",
            {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": False,
            },
        ),
        ModelShape(
            "qwen3-next-0.7b",
            "Qwen3-Next with hidden 1024, 24 layers, 16 experts",
            "Qwen3Next",
            {
                "vocab_size": 151936,
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 8,
                "linear_num_value_heads": 16,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 256,
                "shared_expert_intermediate_size": 256,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "llama-42m",
            "Llama, hidden 512, 8 layers",
            "Llama",
            {
                "vocab_size": 32000,
                "hidden_size": 512,
                "intermediate_size": 1376,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": True,
            },
        ),
        ModelShape(
            "qwen3-moe-0.8b",
            "Qwen3-MoE with hidden 2048, 6 layers, 24 experts of 768, 8 a token",
            "Qwen3Moe",
            {
                "vocab_size": 32000,
                "hidden_size": 2048,
                "num_hidden_layers": 6,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 24,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": True,
            },
        ),
    )
}


def write_checkpoint(shape: ModelShape, folder: Path) -> Any:
    """Random bfloat16 weights and a tokenizer in `folder`; returns transformers' model of them."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{shape.family}Config")(**shape.config, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((_DEMO / name).read_bytes())
    tokenizer = (_DEMO / "tokenizer.json").read_text(encoding="utf-8")
    filled = fill_vocabulary(json.loads(tokenizer), shape.vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(filled), encoding="utf-8")
    return model


def fill_vocabulary(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json with a word for each id below `vocab_size` that had none."""
    model = tokenizer["model"]
    known = {*model["vocab"].values(), *(added["id"] for added in tokenizer["added_tokens"])}
    words = {f"t{each}": each for each in range(vocab_size) if each not in known}
    return {**tokenizer, "model": {**model, "vocab": {**model["vocab"], **words}}}


def random_prompts(
    shape: ModelShape, count: int, length: int, random: Random | None = None
) -> list[list[int]]:
    """Token ids that share no beginning; the same for the same arguments."""
    random = random or Random(1)
    ids = range(_FIRST_PLAIN_ID, shape.vocab_size)
    return [random.choices(ids, k=length) for _ in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, prog="random_model")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(SHAPES[options.shape], options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
