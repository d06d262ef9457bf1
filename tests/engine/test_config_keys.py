"""Every key that transformers reads of a served model is read here, has no effect, or is refused.

A new release of transformers that reads another key fails here: read it in models/, or write down
why it changes nothing, or refuse values that change the result in models/raw_config.py.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import transformers

from tests.fakes.family_configs import MODEL_TYPES, config_of
from tests.fakes.transformers_keys import generation_keys, keys_read, rope_keys
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.native.read_rope import KEYS as ROPE_KEYS
from tokenmesh.engine.models.native.registry import FAMILIES
from tokenmesh.engine.models.raw_config import (
    REFUSED_IN_CONFIG,
    REFUSED_IN_GENERATION,
    RawConfig,
)
from tokenmesh.engine.models.token_ids import read_eos
from tokenmesh.services.tokenizer_svc import loading
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

NO_EFFECT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ["attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout"],
        "dropout is for training",
    ),
    **dict.fromkeys(
        ["initializer_range", "initializer_factor"], "weights come from the checkpoint"
    ),
    **dict.fromkeys(
        ["id2label", "label2id", "num_labels", "problem_type"], "of classifiers, which need a head"
    ),
    **dict.fromkeys(
        ["output_attentions", "output_hidden_states", "return_dict", "use_cache"],
        "what a call of transformers returns or keeps",
    ),
    **dict.fromkeys(
        ["attn_implementation", "experts_implementation"], "which kernels transformers takes"
    ),
    **dict.fromkeys(["name_or_path", "transformers_version"], "where the file comes from"),
    **dict.fromkeys(["bos_token_id", "eod_token_id"], "prompts come as ids from the tokenizer"),
    "eos_token_id": "read by read_eos, together with generation_config.json",
    "pad_token_id": "nothing is padded, and a padding index only matters to gradients",
    "chunk_size_feed_forward": "computes the same in pieces",
    "pretraining_tp": "how it was trained; transformers no longer computes in slices",
    "number_of_conv_states": "of convolution layers, which no served family has",
}
"""Keys of config.json that do not change what a model answers, and why."""

GENERATION_NO_EFFECT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ["do_sample", "max_length"], "a request says it, or has the API's default, as with vLLM"
    ),
    **dict.fromkeys(
        ["early_stopping", "length_penalty", "low_memory"], "of beam search, which is refused here"
    ),
    **dict.fromkeys(
        [
            "max_time",
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "prefill_chunk_size",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
        ],
        "how transformers runs",
    ),
    **dict.fromkeys(
        [
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
            "return_dict_in_generate",
        ],
        "what a call of transformers returns",
    ),
    **dict.fromkeys(
        [
            "use_mtp",
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "prompt_lookup_num_tokens",
            "assistant_early_exit",
            "max_matching_ngram_size",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
            "speculation_type",
        ],
        "speculation does not change the distribution",
    ),
    **dict.fromkeys(
        ["pad_token_id", "bos_token_id", "decoder_start_token_id"], "prompts come as ids"
    ),
    "remove_invalid_values": "logits that are not finite end their stream",
    "transformers_version": "where the file comes from",
}


def keys_of_family(architecture: str) -> set[str]:
    model_type = MODEL_TYPES[architecture]
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    name = architecture.replace("ForCausalLM", "Config")
    return keys_read(getattr(transformers, name), modeling)


def read_keys(values: dict[str, Any]) -> set[str]:
    """Return the keys at which our reader looks."""
    raw = RawConfig(values, "config.json")
    read_facts(raw)
    return raw.read


def test_every_family_is_compared() -> None:
    assert MODEL_TYPES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_every_key_of_a_family_is_read_or_harmless_or_refused(architecture: str) -> None:
    keys = keys_of_family(architecture)
    assert {"hidden_act", "rope_parameters", "num_hidden_layers", "is_causal"} <= keys
    known = read_keys(config_of(architecture)) | NO_EFFECT.keys() | REFUSED_IN_CONFIG.keys()
    assert not keys - known


@pytest.mark.parametrize("architecture", MODEL_TYPES)
@pytest.mark.parametrize("key", REFUSED_IN_CONFIG)
def test_a_value_that_would_change_the_result_is_refused_by_name(
    architecture: str, key: str
) -> None:
    neutral = REFUSED_IN_CONFIG[key]
    is_read = key in read_keys(config_of(architecture, **{key: neutral}))
    # four keys are refused by all families but the one that they are for
    assert is_read == (architecture == "GraniteForCausalLM" and isinstance(neutral, float))
    value = not neutral if isinstance(neutral, bool) else 7.5
    config = config_of(architecture, **{key: value})
    if is_read:
        assert read_facts(RawConfig(config, "config.json"))
        return
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is {value}") as caught:
        read_facts(RawConfig(config, "config.json"))
    assert caught.value.param == key


def test_keys_of_rope_objects_are_those_of_transformers() -> None:
    # sections of several axes: no served family turns by more than one
    assert rope_keys() - {"mrope_section"} <= ROPE_KEYS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq"}),
        ("hidden_act", "gelu"),
        ("layer_types", ["chunked_attention"] * 4),
        ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}),
        ("num_key_value_heads", 3),
    ],
)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_values_of_read_keys_that_are_not_supported_are_refused_by_name(
    architecture: str, key: str, value: Any
) -> None:
    config = config_of(architecture, **{key: value})
    with pytest.raises(CheckpointError, match=key if key != "rope_scaling" else "rope_type"):
        read_facts(RawConfig(config, "config.json"))


def test_every_key_of_generation_config_is_read_or_harmless_or_refused() -> None:
    known = set(loading._SAMPLING_FIELDS) | {"eos_token_id"}
    listed = GENERATION_NO_EFFECT.keys() | REFUSED_IN_GENERATION.keys()
    assert not known & listed
    assert not generation_keys() - known - listed


@pytest.mark.parametrize("key", REFUSED_IN_GENERATION)
def test_a_default_that_would_change_what_is_drawn_is_refused_by_name(
    tmp_path: Path, key: str
) -> None:
    raw, neutral = RawConfig({}, "config.json"), REFUSED_IN_GENERATION[key]
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 2, key: neutral}))
    model = ModelSettings(model=str(tmp_path))
    assert 2 in read_eos(raw, tmp_path, model, 10)
    path.write_text(json.dumps({"eos_token_id": 2, key: 3}))
    with pytest.raises(CheckpointError, match=f"{key} is 3.*--generation-config vllm"):
        read_eos(raw, tmp_path, model, 10)
    ignoring = ModelSettings(model=str(tmp_path), generation_config="vllm")
    assert 2 in read_eos(raw, tmp_path, ignoring, 10)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_such_a_default_is_refused_in_config_json_if_there_is_no_file_for_it(
    tmp_path: Path, part: str | None
) -> None:
    stated = {"eos_token_id": 2, "no_repeat_ngram_size": 3}
    raw = RawConfig(stated if part is None else {part: stated}, "config.json")
    model = ModelSettings(model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"config\.json.* no_repeat_ngram_size is 3"):
        read_eos(raw, tmp_path, model, 10)
    (tmp_path / "generation_config.json").write_text("{}")
    assert 2 in read_eos(raw, tmp_path, model, 10)
