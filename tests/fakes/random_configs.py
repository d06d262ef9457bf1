"""Random configurations of every family, of keys and values that published checkpoints have."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from tests.fakes.family_configs import config_of

_SLIDING, _FULL = "sliding_attention", "full_attention"


def random_config(rng: Random, architecture: str) -> dict[str, Any]:
    """A small config.json. Some of them are not supported by us, some not by transformers."""
    heads = rng.choice([2, 4, 6])
    values: dict[str, Any] = {
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 3, 4, 6) if heads % n == 0]),
        "head_dim": rng.choice([16, 16, 16, 12, 32]),
        "intermediate_size": rng.choice([48, 80]),
        "num_hidden_layers": rng.choice([1, 2, 4, 5]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-2]),
        "hidden_act": rng.choice(["silu"] * 18 + ["swish", "gelu"]),
        "tie_word_embeddings": rng.random() < 0.3,
        "max_position_embeddings": rng.choice([40, 256]),
    }
    values |= _rope(rng, values, _OWN_ROPES.get(architecture, _plain_kinds))
    if architecture in _SLIDES or rng.random() < 0.1:
        values |= _windows(rng, values["num_hidden_layers"])
    for key in ("attention_bias", "mlp_bias", "attention_out_bias"):
        if rng.random() < 0.4:
            values[key] = rng.random() < 0.5
    if architecture == "GraniteForCausalLM" or rng.random() < 0.05:
        for key in ("attention", "embedding", "residual"):
            values[f"{key}_multiplier"] = rng.choice([1.0, 0.3, 2.0])
        values["logits_scaling"] = rng.choice([1.0, 3.0])
    for key, choices in _RARE.items():
        if rng.random() < 0.04:
            values[key] = rng.choice(choices)
    # what config.json leaves out is the family's default
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        if rng.random() < 0.1 and not (key == "head_dim" and architecture not in _DERIVED):
            del values[key]
    config = config_of(architecture)
    return {
        key: value for key, value in config.items() if key in values or key not in _SIZED
    } | values


_SIZED: Final = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
_DERIVED: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Olmo2ForCausalLM")
"""Families whose head_dim is hidden_size over heads when it is left out."""

_SLIDES: Final = (
    *("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"),
    *("Olmo3ForCausalLM", "Exaone4ForCausalLM"),
)
"""Families that may slide a window in some layers."""

_RARE: Final[dict[str, list[Any]]] = {
    "is_causal": [True, False],
    "attention_chunk_size": [None, 8],
    "attention_dropout": [0.0, 0.1],
    "pretraining_tp": [1, 2],
    "final_logit_softcapping": [None, 30.0],
    "use_cache": [True, False],
    "rope_scaling": [{}, None],
    "initializer_range": [0.1],
}


def _windows(rng: Random, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if rng.random() < 0.6:
        values["sliding_window"] = rng.choice([None, 1, 7, 20, 300])
    if rng.random() < 0.5:
        values["use_sliding_window"] = rng.random() < 0.6
    if rng.random() < 0.4:
        values["max_window_layers"] = rng.randint(0, count)
    if rng.random() < 0.4:
        choices = rng.choice([[_FULL], [_SLIDING], [_FULL, _SLIDING]])
        values["layer_types"] = [rng.choice(choices) for _ in range(count)]
    if rng.random() < 0.3:
        values["no_rope_layer_interval"] = rng.choice([1, 2, 3])
    if rng.random() < 0.2:
        values["no_rope_layers"] = [rng.randint(0, 1) for _ in range(count)]
    if rng.random() < 0.2:
        values["sliding_window_pattern"] = rng.choice([2, 3, "LG"])
    return values


Kinds = Callable[[Random, int], list[dict[str, Any]]]


def _rope(rng: Random, values: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    """In the old spelling or the new one; by layer type where the family has it so."""
    rope: dict[str, Any] = {}
    fraction = rng.choice([1.0, 1.0, 0.5])
    if rng.random() < 0.3:
        rope["partial_rotary_factor"] = fraction
    pairs = int(values["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    theta = rng.choice([100.0, 1e4, 5e5, 5e5])
    chosen = rng.choice(kinds(rng, pairs))
    if rng.random() < 0.1:
        rope["original_max_position_embeddings"] = 32
    if not chosen:
        return rope | ({"rope_theta": theta} if rng.random() < 0.7 else {})
    if _FULL in chosen:
        return rope | {"rope_parameters": chosen}
    if rng.random() < 0.5:
        return rope | {"rope_theta": theta, "rope_scaling": chosen}
    return rope | {"rope_parameters": {**chosen, "rope_theta": theta}}


def _plain_kinds(rng: Random, pairs: int) -> list[dict[str, Any]]:
    original = {"original_max_position_embeddings": rng.choice([16, 64])}
    yarn = _yarn(rng)
    odd = {"mscale": 0.8, "mscale_all_dim": 1.1, "beta_fast": 16.0, "truncate": False}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return [
        {},
        {},
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, **bands, **original},
        yarn,
        {**yarn, **{key: value for key, value in odd.items() if rng.random() < 0.5}},
        {**yarn, "attention_factor": 1.3},
        {"rope_type": "longrope", **_factors(rng, pairs), **original},
        *([{"rope_type": "default", "mrope_section": [1, 2, 3]}] if rng.random() < 0.1 else []),
    ]


def _yarn(rng: Random) -> dict[str, Any]:
    """A stretch to twice or four times the length."""
    original = {"original_max_position_embeddings": rng.choice([16, 64])}
    return {"rope_type": "yarn", "factor": rng.choice([2.0, 4.0]), **original}


def _factors(rng: Random, pairs: int) -> dict[str, list[float]]:
    return {
        "short_factor": [1 + rng.random() for _ in range(pairs)],
        "long_factor": [1 + 4 * rng.random() for _ in range(pairs)],
    }


def _phi3_kinds(rng: Random, pairs: int) -> list[dict[str, Any]]:
    named = [
        {"type": name, **_factors(rng, pairs), "original_max_position_embeddings": 32}
        for name in ("longrope", "su", "yarn")
    ]
    return [{}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, *named]


def _olmo3_kinds(rng: Random, pairs: int) -> list[dict[str, Any]]:
    one, other = rng.sample(_plain_kinds(rng, pairs)[2:8], 2)
    parts = {_FULL: {**one, "rope_theta": 300.0}, _SLIDING: {**other, "rope_theta": 1e4}}
    return [{}, _yarn(rng), parts, parts, parts, {_FULL: one, _SLIDING: other}]


def _ministral3_kinds(rng: Random, pairs: int) -> list[dict[str, Any]]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    scaled = {**yarn, "llama_4_scaling_beta": rng.choice([0.1, 0.4])}
    return [scaled, scaled, {**scaled, "max_position_embeddings": 256}]


def _hunyuan_kinds(rng: Random, pairs: int) -> list[dict[str, Any]]:
    alpha = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    return [*_plain_kinds(rng, pairs), alpha, alpha, alpha]


_OWN_ROPES: Final[dict[str, Kinds]] = {
    "Phi3ForCausalLM": _phi3_kinds,
    "Olmo3ForCausalLM": _olmo3_kinds,
    "Ministral3ForCausalLM": _ministral3_kinds,
    "HunYuanDenseV1ForCausalLM": _hunyuan_kinds,
}
