"""Files of each family as llama.cpp's conversion writes them: keys, and names of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fakes.general_models import GENERAL, HEADS
from tests.fakes.models import FAKES, Fake


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of GGUF files, by a tiny checkpoint of transformers."""

    fake: Fake
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors by module, where they are not named as most."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys by those of config.json."""
    is_permuted: bool = False
    adds_one: bool = False
    rotated: float = 1.0
    """Part of a head that turns."""
    arch: str = ""
    """Where it is not the name in the table."""


_AFTER: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA: Final = {**_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_WINDOW: Final = {"sliding_window": "attention.sliding_window"}
_LAYER_NORM: Final = {"layer_norm_eps": "attention.layer_norm_epsilon"}
_QUERIES: Final = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
_COHERE: Final = {"tie_word_embeddings": True, "logit_scale": 0.3}
_SOFTCAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA3_ROPE: Final = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def _fake(name: str, **more: Any) -> Fake:
    """One of the tables, with other sizes."""
    found = {**FAKES, **GENERAL}[name]
    sizes = {**(HEADS if name in GENERAL else {}), **found.sizes, **more}
    return Fake(found.family, sizes, found.rope, found.config)


FAMILIES: Final[Mapping[str, Family]] = {
    "gemma": Family(_fake("gemma", tie_word_embeddings=True), adds_one=True),
    "gemma2": Family(_fake("gemma2", **_QUERIES), _GEMMA, {**_WINDOW, **_SOFTCAPS}, adds_one=True),
    "gemma3": Family(
        Fake("Gemma3", _fake("gemma3_text", **_QUERIES).sizes, _GEMMA3_ROPE, "Gemma3Text"),
        *(_GEMMA, _WINDOW),
        adds_one=True,
    ),
    "phi3": Family(
        _fake("phi3", sliding_window=16),
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        _WINDOW,
        rotated=0.5,
    ),
    "phi3_longrope": Family(
        _fake("phi3_longrope"),
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        rotated=0.5,
        arch="phi3",
    ),
    "granite": Family(
        _fake("granite"),
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        is_permuted=True,
    ),
    "olmo2": Family(_fake("olmo2"), _AFTER),
    "olmo3": Family(_fake("olmo3"), _AFTER, _WINDOW, arch="olmo2"),
    "gpt-oss": Family(
        _fake("gpt_oss", intermediate_size=96),
        {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        {**_WINDOW, "intermediate_size": "expert_feed_forward_length"},
    ),
    "olmoe": Family(Fake("Olmoe", {**HEADS, "num_experts": 8, "num_experts_per_tok": 2})),
    "glm4": Family(
        _fake("glm4"),
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
        rotated=0.5,
    ),
    "smollm3": Family(Fake("SmolLM3", {"num_hidden_layers": 5}), is_permuted=True),
    "seed_oss": Family(_fake("seed_oss"), {"post_attention_layernorm": "post_attention_norm"}),
    "exaone4": Family(_fake("exaone4"), _AFTER, _WINDOW),
    "ernie4_5": Family(Fake("Ernie4_5", HEADS)),
    "starcoder2": Family(
        Fake("Starcoder2"),
        {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        {"norm_epsilon": "attention.layer_norm_epsilon"},
    ),
    "stablelm": Family(Fake("StableLm", {"use_qkv_bias": True}), keys=_LAYER_NORM, rotated=0.25),
    "command-r": Family(
        Fake("Cohere", {**_COHERE, "use_qk_norm": True}),
        keys={**_LAYER_NORM, "logit_scale": "logit_scale"},
    ),
    "cohere2": Family(
        Fake("Cohere2", {**_COHERE, **HEADS, "num_hidden_layers": 4, "sliding_window": 9}),
        keys={**_LAYER_NORM, **_WINDOW, "logit_scale": "logit_scale"},
    ),
}
