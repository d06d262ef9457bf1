"""Tiny random checkpoints of models that pool, and what transformers computes with them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers

VOCAB: Final = 120
HIDDEN: Final = 64
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}


@dataclass(frozen=True)
class FakePooler:
    """A family: its class in transformers and the config that makes it small."""

    kind: str
    """Prefix of the class: KIND + suffix, and KIND + Config."""
    values: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None
    takes_types: bool = False


ENCODERS: Final[Mapping[str, FakePooler]] = {
    "bert": FakePooler("Bert", {"type_vocab_size": 2}, takes_types=True),
    "roberta": FakePooler("Roberta", {"type_vocab_size": 1}),
    "xlm_roberta": FakePooler("XLMRoberta", {"type_vocab_size": 1}),
    "distilbert": FakePooler(
        "DistilBert",
        {"dim": HIDDEN, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
    ),
    "mpnet": FakePooler("MPNet"),
    "modernbert": FakePooler(
        "ModernBert", {"local_attention": 16, "global_attn_every_n_layers": 3}
    ),
    "nomic_bert": FakePooler("NomicBert", {"type_vocab_size": 2}, takes_types=True),
    "gte": FakePooler("Gte", {"type_vocab_size": 2}, takes_types=True),
    "eurobert": FakePooler("EuroBert", {"num_key_value_heads": 2}),
    "jina_embeddings_v3": FakePooler("JinaEmbeddingsV3", {"type_vocab_size": 1}),
    "electra": FakePooler("Electra", {"embedding_size": 32}, takes_types=True),
    "albert": FakePooler("Albert", {"embedding_size": 32}, takes_types=True),
    "deberta_v2": FakePooler("DebertaV2", {"type_vocab_size": 0}),
}
"""Families whose tokens see their whole prompt."""
EVERY_LINE: Final = frozenset({"distilbert", "eurobert", "modernbert", "jina_embeddings_v3"})
"""Encoders that with the tests of classifiers run every line of ours that all of them run."""

DECODERS: Final[Mapping[str, FakePooler]] = {
    "llama": FakePooler("Llama", {"num_key_value_heads": 2}),
    "qwen2": FakePooler("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": FakePooler("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": FakePooler("Mistral", {"num_key_value_heads": 2, "sliding_window": 12}),
    "gemma3_text": FakePooler(
        "Gemma3",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "num_hidden_layers": 6},
        config="Gemma3Text",
    ),
}
"""Families whose tokens see those before them."""


def make_pooler(fake: FakePooler, suffix: str, **values: Any) -> Any:
    """A model of the class KIND + suffix with weights that matter."""
    config_class = getattr(transformers, f"{fake.config or fake.kind}Config")
    config = config_class(**{**_SIZES, **fake.values, **values})
    torch.manual_seed(len(fake.kind))
    model = getattr(transformers, fake.kind + suffix)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms and biases far from neutral, so that leaving one out changes every number
            scale = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            noise = torch.randn(parameter.shape) * scale
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if is_norm else noise)
    return model


def write_modules(
    directory: Path,
    take: str = "pooling_mode_mean_tokens",
    *,
    normalizes: bool = True,
    dense: torch.nn.Linear | None = None,
    width: int = HIDDEN,
) -> None:
    """modules.json and the directories it names."""
    modules: list[tuple[str, str]] = [("", "Transformer"), ("1_Pooling", "Pooling")]
    write_json(
        directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, take: True}
    )
    if dense is not None:
        modules.append(("2_Dense", "Dense"))
        write_json(
            directory / "2_Dense" / "config.json",
            {
                "in_features": dense.in_features,
                "out_features": dense.out_features,
                "bias": dense.bias is not None,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )
        from safetensors.torch import save_file

        tensors = {f"linear.{name}": each.detach() for name, each in dense.named_parameters()}
        save_file(tensors, directory / "2_Dense" / "model.safetensors")
    if normalizes:
        modules.append(("3_Normalize", "Normalize"))
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{k}",
        }
        for index, (path, k) in enumerate(modules)
    ]
    write_json(directory / "modules.json", entries)


def write_json(path: Path, content: object) -> None:
    """With the directories before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@torch.no_grad()
def states_of(model: Any, prompt: Sequence[int], types: Sequence[int] = ()) -> torch.Tensor:
    """[n, H] of one prompt alone, by transformers."""
    named: dict[str, Any] = {"token_type_ids": torch.tensor([types])} if types else {}
    body = model.base_model
    return body(input_ids=torch.tensor([prompt]), **named).last_hidden_state[0]  # type: ignore[no-any-return]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens that are not special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def write_reranker(directory: Path) -> None:
    """Modules that score by the logits of two tokens."""
    kind = "sentence_transformers.cross_encoder.modules."
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": f"{kind}LogitScore"},
    ]
    write_json(directory / "modules.json", entries)
    write_json(
        directory / "1_LogitScore" / "config.json", {"true_token_id": 9, "false_token_id": 7}
    )
