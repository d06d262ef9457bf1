"""Tiny random checkpoints of the families that only the general kind serves.

Windows, groups of experts, shared experts and correction biases are small and far from neutral, so
that leaving one out changes every logit.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tests.fakes.models import YARN, Fake, make_fake

_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_SHARED: Final[Mapping[str, Any]] = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_GROUPED: Final[Mapping[str, Any]] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_LATENT: Final[Mapping[str, Any]] = {
    **_GROUPED,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_DELTA: Final[Mapping[str, Any]] = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: Final[Mapping[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
FALCON_H1_MULTIPLIERS: Final[Mapping[str, Any]] = {
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9375,
    "key_multiplier": 0.39062499999999994,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}
"""Those of Falcon-H1 0.5B, but its 0.0390625 for the head and 1.0 for what attention reads."""

GENERAL: Final[Mapping[str, Fake]] = {
    "gemma": Fake("Gemma"),
    "gemma2": Fake(
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": Fake(
        "Gemma3",
        {"num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 20},
        config="Gemma3Text",
    ),
    "mixtral": Fake("Mixtral", {**_EXPERTS, "sliding_window": 16}),
    "qwen2_moe": Fake("Qwen2Moe", {**_SHARED, "mlp_only_layers": [1]}),
    "qwen3_moe": Fake("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "olmoe": Fake("Olmoe", {**_EXPERTS, "clip_qkv": 1.0}),
    "hunyuan_v1_moe": Fake("HunYuanMoEV1", {**_EXPERTS, "moe_topk": 2, "num_shared_expert": 1}),
    "glm4_moe": Fake("Glm4Moe", {**_GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "exaone_moe": Fake("ExaoneMoe", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": 16}),
    "minimax_m2": Fake("MiniMaxM2", {**_EXPERTS, "rotary_dim": 8}),
    "gpt_oss": Fake(
        "GptOss",
        {**_EXPERTS, "num_hidden_layers": 4, "sliding_window": 16},
        {**YARN, "truncate": False},
    ),
    "deepseek_v2": Fake(
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": Fake("DeepseekV3", _LATENT, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "glm4_moe_lite": Fake("Glm4MoeLite", _LATENT),
    "deepseek_v32": Fake(
        "DeepseekV32", {**_LATENT, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 16}
    ),
    "qwen3_next": Fake("Qwen3Next", {**_DELTA, **_SHARED}),
    "qwen3_5_text": Fake("Qwen3_5", _DELTA, config="Qwen3_5Text"),
    "qwen3_5_moe_text": Fake("Qwen3_5Moe", {**_DELTA, **_SHARED}, config="Qwen3_5MoeText"),
    "olmo_hybrid": Fake("OlmoHybrid", _DELTA),
    "kimi_linear": Fake(
        "KimiLinear",
        {
            **_LATENT,
            **_EXPERTS,
            "num_hidden_layers": 5,
            "q_lora_rank": None,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "mamba2": Fake(
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 16,
        },
    ),
    "bamba": Fake("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": Fake("FalconH1", {**_MAMBA, "mamba_d_ssm": 128, **FALCON_H1_MULTIPLIERS}),
    "granitemoehybrid": Fake(
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
        },
    ),
    "nemotron_h": Fake(
        "NemotronH",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "lfm2": Fake("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
}
"""By the model type in config.json."""

_ONE_GROUP: Final[Mapping[str, Any]] = {**_GROUPED, "n_group": 1}
VARIANTS: Final[Mapping[str, Fake]] = {
    "ernie4_5_moe": Fake("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 2, **_EXPERTS}),
    "olmoe_unclipped": Fake("Olmoe", _EXPERTS),
    "qwen3_moe_raw": Fake(
        "Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}
    ),
    "glm4_moe_one_group": Fake(
        "Glm4Moe", {**_ONE_GROUP, "use_qk_norm": True, "attention_bias": True}
    ),
    "exaone_moe_one_group": Fake(
        "ExaoneMoe", {**_ONE_GROUP, "num_hidden_layers": 4, "sliding_window": 16}
    ),
}
"""More families and forms with experts, which are chosen as native layers choose them."""

HEADS: Final[Mapping[str, Any]] = {"head_dim": 16}
"""Sizes that they have in addition to those of all fakes."""
STATES: Final = frozenset(
    {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
        *("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2"),
    }
)
"""Those whose rows keep states."""


ON_GPU: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {},
    "exaone_moe": {},
    "gpt_oss": {},
    "qwen3_moe": {},
    "deepseek_v3": {
        **{"q_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16},
    },
    "deepseek_v32": {
        **{"q_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16},
    },
    "qwen3_next": {},
    "mamba2": {},
    "lfm2": {},
}
"""Families that are run on a GPU, with sizes that it takes in place of theirs."""
EAGER: Final = frozenset({"deepseek_v32"})
"""Those of them whose steps cannot be recorded."""


def make_general(name: str, sizes: Mapping[str, Any] | None = None) -> Any:
    """The transformers model of an entry, in float32, with weights that depend on nothing else.

    sizes: in place of the entry's.
    """
    fake = {**GENERAL, **VARIANTS}[name]
    return make_fake(replace(fake, sizes={**fake.sizes, **(sizes or {})}), HEADS)
