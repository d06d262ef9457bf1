"""Tiny random checkpoints of every family, made with transformers, which is the oracle as well.

Weights are N(0, 1/fan_in) and norms and biases are far from 1 and 0: with the default start all
logits are nearly equal, and a test on them proves nothing. Most have a head_dim of 16 or 32, which
the C kernels take; the odd ones run in torch everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers

LOGIT_SCALE: Final = 3.0
"""Standard deviation of the logits, about."""
BLOCK_SCALE: Final = 1.6
"""Gain of the layers: with less, a tied embedding makes greedy output repeat one token."""

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Fake:
    """A checkpoint to make: transformers' class names without ForCausalLM and Config."""

    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] | None = None
    config: str | None = None
    """Name of the config class, where it is not the family's."""


_LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 5.0],
}

FAKES: Final[Mapping[str, Fake]] = {
    "llama": Fake("Llama"),
    "llama_odd": Fake(
        "Llama",
        {
            "vocab_size": 101,
            "hidden_size": 42,
            "intermediate_size": 50,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama_rope3": Fake("Llama", {"num_key_value_heads": 4}, _LLAMA3),
    "llama_yarn": Fake("Llama", rope=YARN),
    "llama_yarn_mscale": Fake(
        "Llama", rope={**YARN, "mscale": 0.8, "mscale_all_dim": 1.0, "truncate": False}
    ),
    "llama_linear": Fake("Llama", rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "llama_dynamic": Fake(
        "Llama",
        {"max_position_embeddings": 32},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "mistral": Fake("Mistral", {"sliding_window": 9, "head_dim": 20}),
    "mistral_long": Fake("Mistral", {"sliding_window": 600, "max_position_embeddings": 1200}),
    "ministral": Fake(
        "Ministral",
        {
            "sliding_window": 7,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": Fake(
        "Ministral3",
        {"head_dim": 16},
        {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    ),
    "qwen2": Fake(
        "Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96}
    ),
    "qwen2_window": Fake(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
    ),
    "qwen3": Fake("Qwen3", {"head_dim": 32, "attention_bias": True, "num_attention_heads": 6}),
    "phi3": Fake("Phi3", {"partial_rotary_factor": 0.5}),
    "phi3_longrope": Fake(
        "Phi3",
        {"original_max_position_embeddings": 128, "partial_rotary_factor": 0.5},
        _LONGROPE,
    ),
    "phi3_longrope_short": Fake(
        "Phi3",
        {"original_max_position_embeddings": 40, "partial_rotary_factor": 0.5},
        _LONGROPE,
    ),
    "smollm3": Fake("SmolLM3", {"no_rope_layer_interval": 2}),
    "granite": Fake(
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
    ),
    "olmo2": Fake("Olmo2"),
    "olmo3": Fake(
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 8},
        {"sliding_attention": {"rope_type": "default"}, "full_attention": YARN},
    ),
    "glm": Fake("Glm", {"head_dim": 12, "attention_bias": True}),
    "glm4": Fake("Glm4", {"head_dim": 16, "attention_bias": True}),
    "seed_oss": Fake("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "hunyuan": Fake(
        "HunYuanDenseV1",
        {"head_dim": 16},
        {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone4": Fake("Exaone4", {"num_hidden_layers": 4, "sliding_window": 10}),
}


def make_model(name: str) -> Any:
    """The transformers model of a fake, in float32, with weights that depend on nothing else."""
    return make_fake(FAKES[name])


def make_fake(fake: Fake, more: Mapping[str, Any] | None = None) -> Any:
    """The same of any fake; `more`: sizes that it need not name."""
    return randomized(classes(fake)[1](config_of(fake, more)))


def config_of(fake: Fake, more: Mapping[str, Any] | None = None) -> Any:
    """Its config; see `make_fake`."""
    sizes = {**_SIZES, **(more or {}), **fake.sizes}
    if fake.rope is not None:
        sizes["rope_parameters"] = _copied(fake.rope)
    return classes(fake)[0](**sizes)


def classes(fake: Fake) -> tuple[Any, Any]:
    """transformers' classes of config and model."""
    return (
        getattr(transformers, f"{fake.config or fake.family}Config"),
        getattr(transformers, f"{fake.family}ForCausalLM"),
    )


# Looked up here, where no test's deadline runs: transformers imports each on its first use.
for _fake in FAKES.values():
    classes(_fake)


def randomized(model: Any) -> Any:
    """Give every parameter values that matter to the output; the same on every call."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            elif name.endswith("A_log"):
                parameter.copy_(noise * 0.5 - 2.0)  # states that last about ten tokens
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + noise * 0.3)
            else:
                # experts lie behind each other
                fan_in = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
                scale = LOGIT_SCALE if "embed" in name or "lm_head" in name else BLOCK_SCALE
                parameter.copy_(noise * scale * fan_in**-0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model.eval()


def _copied(rope: Mapping[str, Any]) -> dict[str, Any]:
    """transformers writes into what it is given."""
    return {key: dict(v) if isinstance(v, Mapping) else v for key, v in rope.items()}


def generated(model: Any, inputs: dict[str, Any], num_tokens: int) -> tuple[list[int], list[int]]:
    """The prompt of a processor's inputs, and the greedy tokens of transformers after it."""
    if hasattr(model.model, "rope_deltas"):
        # left from the prompt before
        model.model.rope_deltas = None
    with torch.inference_mode():
        ids = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    prompt = inputs["input_ids"][0].tolist()
    return prompt, ids[0, len(prompt) :].tolist()
