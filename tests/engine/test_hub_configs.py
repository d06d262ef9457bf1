"""config.json as published on the hub: keys left out, old spellings, odd values."""

from typing import Any

import pytest

from tokenmesh.engine.models.native.config import DecoderConfig, LayerConfig
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.messages.media import IMAGE

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def read(architecture: str, **values: Any) -> DecoderConfig:
    raw = RawConfig({"architectures": [architecture], **SIZES, **values}, "config.json")
    return read_facts(raw).config


def test_llava_15_leaves_out_the_sizes_of_its_language_model() -> None:
    text = {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    }
    values = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
        "torch_dtype": "float16",
    }
    facts = read_facts(RawConfig(values, "config.json"))
    config = facts.config
    assert facts.media.kinds == {IMAGE}
    assert facts.dtype == "float16"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32064, 4096, 11008)
    assert (len(config.layers), config.num_heads, config.num_kv_heads) == (32, 32, 32)
    assert (config.max_position, config.rms_norm_eps) == (4096, 1e-05)
    assert not config.tied_embeddings


def test_llama_31_scales_rope_in_the_old_spelling() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    rope = read("LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling).ropes[0]
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 500000.0, 8.0)
    assert rope.original_max_position == 8192


def test_qwen_25_with_yarn_reaches_four_times_as_far() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = read("Qwen2ForCausalLM", rope_theta=1e6, rope_scaling=scaling)
    assert config.max_position == 16384
    assert config.ropes[0].attention_factor == pytest.approx(1.1386, abs=1e-4)
    assert config.qkv_bias


@pytest.mark.parametrize("window", [None, 32768])
def test_qwen_mentions_a_window_that_it_does_not_use(window: int | None) -> None:
    config = read(
        "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=window, max_window_layers=21
    )
    assert config.layers == (LayerConfig(window=None, rope=0),) * 4


def test_mistral_01_slides_and_03_does_not() -> None:
    assert {layer.window for layer in read("MistralForCausalLM").layers} == {4096}
    none = read("MistralForCausalLM", sliding_window=None)
    assert {layer.window for layer in none.layers} == {None}


def test_phi_35_calls_longrope_su() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read(
        "Phi3ForCausalLM",
        original_max_position_embeddings=1024,
        rope_scaling=scaling,
    )
    rope = config.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position) == ("longrope", 4.0, 1024)
    assert rope.attention_factor == pytest.approx(1.0954, abs=1e-4)


def test_hunyuan_calls_a_fixed_stretch_dynamic() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}
    rope = read("HunYuanDenseV1ForCausalLM", rope_scaling=scaling).ropes[0]
    assert rope.kind == "default"
    assert rope.theta == pytest.approx(10000.0 * 1000.0 ** (16 / 14))


def test_olmo_3_scales_only_its_full_layers() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    config = read("Olmo3ForCausalLM", rope_scaling=scaling, rope_theta=500000)
    assert [rope.kind for rope in config.ropes] == ["yarn", "default"]
    assert [(layer.window, layer.rope) for layer in config.layers] == [(4096, 1)] * 3 + [(None, 0)]


def test_exaone_4_writes_its_pattern_as_letters() -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"]
    config = read("Exaone4ForCausalLM", sliding_window_pattern="LLLG", layer_types=types)
    assert [(layer.window, layer.rope) for layer in config.layers] == [(4096, 0)] * 3 + [
        (None, None)
    ]
    assert read("Exaone4ForCausalLM", sliding_window=None).layers[0] == LayerConfig(None, 0)


def test_smollm_3_turns_rope_off_in_every_fourth_layer() -> None:
    config = read("SmolLM3ForCausalLM")
    assert [layer.rope for layer in config.layers] == [0, 0, 0, None]
    assert config.tied_embeddings
    assert config.ropes[0].theta == 2000000.0


def test_glm_4_turns_half_of_each_head() -> None:
    config = read("Glm4ForCausalLM", head_dim=16)
    assert config.ropes[0].rotary_dim == 8
    assert (config.qkv_bias, config.out_bias, config.num_kv_heads) == (True, False, 2)
