"""Describes how one architecture of GGUF files differs from the next.

Names of tensors and keys are those of llama.cpp's gguf-py (constants.py) and of its conversion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tokenmesh.shared.gguf.metadata import GgufValues, error

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules in a layer, as most have them."""
_AFTER: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms behind attention and MLP."""
_GEMMA: Final = {**_LAYER, **_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_BEHIND: Final = {
    **{part: name for part, name in _LAYER.items() if part not in ("attn_norm", "ffn_norm")},
    **_AFTER,
}
"""No norms in front of attention and MLP."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a layer's experts are, and how config.json describes them."""

    block: str
    """The module around them."""
    gate_up_down: tuple[str, str, str]
    """The weights of one expert."""
    count: str
    """The key of config.json for their number."""
    size: str
    """The same for the numbers between an expert's two products."""
    is_normalized: bool
    """The weights of a token's experts add up to 1, unless the file says otherwise."""
    states_norm: bool
    """config.json has norm_topk_prob; else it is fixed."""
    may_be_missing: bool = False
    """Some layers may be dense."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers that see the last tokens only."""

    period: int
    """The last of so many layers sees all tokens; 0: none does."""
    size: int | None = None
    """Where the file has no attention.sliding_window; None: then all layers see all."""
    plain_rope: bool = False
    """Layers with a window have a rope of their own, which is not scaled."""
    theta: float | None = None
    """Its base, where the file has none; None: that of the others."""
    name: tuple[str, str] | None = None
    """Class and model type, where there are windows."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of them; the fields say how it differs from most."""

    name: str
    """The class, in config.json."""
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """Modules by the names of tensors."""
    is_permuted: bool = False
    """Rows of queries and keys are in the order of pairs, not of halves."""
    adds_one: bool = False
    """Norms are stored as 1 plus the weight."""
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """Key, and what config.json calls it."""
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    """The same of others, and what counts where the key is missing; None: an error."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that all models of the architecture share."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Keys of rope_parameters, where they are scaled."""
    present: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that say whether the first layer has a tensor."""
    may_turn_part: bool = False
    """True where only a part of a head turns, as rope.dimension_count says."""
    wide_layers: int = 0
    """A model of so many layers scales queries by hidden size over heads, not by a head's size."""
    windows: Windows | None = None
    experts: ExpertNames | None = None
    joins_experts: bool = False
    """All of a layer are one tensor, gate and up in turn; see joined.py."""
    with_experts: "Architecture | None" = None
    """The architecture that a file with experts has instead."""


_QWEN_MOE: Final = ExpertNames(
    "mlp",
    ("gate_proj", "up_proj", "down_proj"),
    "num_experts",
    "moe_intermediate_size",
    is_normalized=False,
    states_norm=True,
    may_be_missing=True,
)
_BIASES: Final = {"attn_q.bias": "attention_bias"}
_LAYER_NORM: Final = "attention.layer_norm_epsilon"
_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        *("LlamaForCausalLM", "llama"),
        is_permuted=True,
        present={**_BIASES, "ffn_up.bias": "mlp_bias"},
        with_experts=Architecture(
            *("MixtralForCausalLM", "mixtral"),
            is_permuted=True,
            experts=ExpertNames(
                "block_sparse_moe",
                ("w1", "w3", "w2"),
                "num_local_experts",
                "intermediate_size",
                is_normalized=True,
                states_norm=False,
            ),
        ),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", present=_BIASES),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", experts=_QWEN_MOE),
    "qwen3moe": Architecture(
        *("Qwen3MoeForCausalLM", "qwen3_moe"), experts=replace(_QWEN_MOE, is_normalized=True)
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", adds_one=True, fixed=_GELU),
    "gemma2": Architecture(
        *("Gemma2ForCausalLM", "gemma2", _GEMMA),
        adds_one=True,
        numbers={
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        fixed=_GELU,
        wide_layers=46,
        windows=Windows(2, size=4096),
    ),
    "gemma3": Architecture(
        *("Gemma3ForCausalLM", "gemma3_text", _GEMMA),
        adds_one=True,
        fixed=_GELU,
        wide_layers=62,
        windows=Windows(6, plain_rope=True, theta=10000.0),
    ),
    "phi3": Architecture(
        *("Phi3ForCausalLM", "phi3"),
        {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        may_turn_part=True,
        windows=Windows(0),
    ),
    "granite": Architecture(
        *("GraniteForCausalLM", "granite"),
        is_permuted=True,
        numbers={
            "attention.scale": ("attention_multiplier", None),
            "embedding_scale": ("embedding_multiplier", 1.0),
            "residual_scale": ("residual_multiplier", 1.0),
            "logit_scale": ("logits_scaling", None),
        },
        present={**_BIASES, "ffn_up.bias": "mlp_bias"},
    ),
    "olmo2": Architecture(
        *("Olmo2ForCausalLM", "olmo2", _BEHIND),
        windows=Windows(4, plain_rope=True, name=("Olmo3ForCausalLM", "olmo3")),
    ),
    "gpt-oss": Architecture(
        *("GptOssForCausalLM", "gpt_oss"),
        {
            **_LAYER,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        fixed={"attention_bias": True},
        rope={"truncate": False},
        windows=Windows(2),
        experts=replace(
            _QWEN_MOE,
            count="num_local_experts",
            size="intermediate_size",
            is_normalized=True,
            states_norm=False,
            may_be_missing=False,
        ),
        joins_experts=True,
    ),
    "olmoe": Architecture(
        *("OlmoeForCausalLM", "olmoe"),
        experts=replace(_QWEN_MOE, size="intermediate_size", may_be_missing=False),
    ),
    "glm4": Architecture(
        *("Glm4ForCausalLM", "glm4"),
        {
            **_LAYER,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        present=_BIASES,
        may_turn_part=True,
    ),
    "smollm3": Architecture(
        *("SmolLM3ForCausalLM", "smollm3"),
        is_permuted=True,
        fixed={"no_rope_layer_interval": 4, "use_sliding_window": False},
        present={**_BIASES, "ffn_up.bias": "mlp_bias"},
    ),
    "seed_oss": Architecture(
        *("SeedOssForCausalLM", "seed_oss"),
        {**_LAYER, "post_attention_norm": "post_attention_layernorm"},
        present={**_BIASES, "attn_output.bias": "attention_out_bias", "ffn_up.bias": "mlp_bias"},
    ),
    "exaone4": Architecture(*("Exaone4ForCausalLM", "exaone4", _BEHIND), windows=Windows(4)),
    "ernie4_5": Architecture(
        *("Ernie4_5ForCausalLM", "ernie4_5"), present={"attn_output.bias": "use_bias"}
    ),
    "starcoder2": Architecture(
        *("Starcoder2ForCausalLM", "starcoder2"),
        {**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(_LAYER_NORM, "norm_epsilon"),
        fixed=_GELU,
        present={"attn_q.bias": "use_bias"},
    ),
    "stablelm": Architecture(
        *("StableLmForCausalLM", "stablelm"),
        {key: value for key, value in _LAYER.items() if key not in ("attn_q_norm", "attn_k_norm")},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        present={"attn_q.bias": "use_qkv_bias"},
        may_turn_part=True,
    ),
    "command-r": Architecture(
        *("CohereForCausalLM", "cohere"),
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        numbers={"logit_scale": ("logit_scale", 1.0)},
        present={**_BIASES, "attn_q_norm.weight": "use_qk_norm"},
    ),
    "cohere2": Architecture(
        *("Cohere2ForCausalLM", "cohere2"),
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        numbers={"logit_scale": ("logit_scale", None)},
        present=_BIASES,
        windows=Windows(4),
    ),
}


def architecture_of(data: GgufValues) -> Architecture:
    """Raises CheckpointError for one that is not served."""
    name, file = data.architecture, data.file
    kind = file.values.get("general.type", "model")
    if name == "clip" or kind == "mmproj":
        problem = "is the vision or audio part of a model (mmproj), which is not supported"
        raise error(file, f"it {problem}; name the file of its language model")
    if kind != "model":
        raise error(file, f"general.type is {kind!r}; supported are whole models")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise error(file, f"general.architecture is {name!r}; supported are {known}")
    if found.experts is None and data.get("expert_count"):
        if found.with_experts is None:
            raise data.error("expert_count", "is set, which is not supported")
        return found.with_experts
    return found
