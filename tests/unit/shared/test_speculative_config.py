"""SpeculativeConfig: vLLM's names, and what is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from tokenmesh.shared.config.speculative import SpeculativeConfig


def config(**given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(given)


def test_without_a_method_there_are_no_drafts() -> None:
    assert config().method is None
    assert config(method=None, num_speculative_tokens=None).method is None


@pytest.mark.parametrize(
    "given", [{}, {"method": "ngram"}, {"method": "suffix"}, {"model": "small"}]
)
def test_a_config_that_is_written_out_is_read_again(given: dict[str, Any]) -> None:
    made = config(**given)
    assert SpeculativeConfig.model_validate(made.model_dump()) == made
    assert SpeculativeConfig.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_a_lookup_may_be_named_as_the_model(model: str) -> None:
    assert config(model=model, num_speculative_tokens=3).method == "ngram"


def test_a_model_drafts_without_a_method_as_well() -> None:
    made = config(model="small")
    assert (made.method, made.is_drafted, made.max_drafts) == ("draft_model", True, 3)


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_a_models_own_head_has_a_name_of_its_family_too(name: str) -> None:
    made = config(method=name, num_speculative_tokens=2)
    assert (made.method, made.model, made.is_drafted, made.max_drafts) == ("mtp", None, True, 2)
    assert config(method=name, model="served").model == "served"


def test_one_length_of_a_lookup_is_the_other_too() -> None:
    assert config(method="ngram").lookup == (2, 5)
    assert config(method="ngram", prompt_lookup_max=4).lookup == (4, 4)
    assert config(method="ngram", prompt_lookup_min=3).lookup == (3, 3)
    assert config(method="ngram", prompt_lookup_min=1, prompt_lookup_max=4).lookup == (1, 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": ({"method": "crystal"}, "ngram, .* or .*: method crystal is unknown"),
    "a lookup in place of the model of a head": (
        {"method": "mtp", "model": "ngram"},
        "with model, for method mtp",
    ),
    "a method of heads": (
        {"method": "medusa", "model": "head", "draft_tensor_parallel_size": 1},
        "ngram, .* or .*: method medusa is not implemented",
    ),
    "a draft model that is not named": (
        {"method": "draft_model"},
        "with model, for method draft_model",
    ),
    "a lookup in place of a draft model": (
        {"method": "draft_model", "model": "ngram"},
        "with model, for method draft_model",
    ),
    "a model where texts are looked up": (
        {"method": "ngram", "model": "small"},
        "without model small, for method ngram",
    ),
    "a draft model in parts": (
        {"method": "draft_model", "model": "small", "draft_tensor_parallel_size": 2},
        "less than or equal to 1",
    ),
    "numbers without a method": ({"num_speculative_tokens": 3}, "with a method: ngram, suffix"),
    "no drafts": ({"method": "ngram", "num_speculative_tokens": 0}, "greater than or equal to 1"),
    "too many drafts": ({"method": "ngram", "num_speculative_tokens": 65}, "less than or equal to"),
    "lengths that are none": (
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
        "without prompt_lookup_min 5 above prompt_lookup_max 2",
    ),
    "another verification": (
        {"method": "ngram", "rejection_sample_method": "synthetic"},
        "standard, strict or probabilistic: synthetic is not implemented",
    ),
    "an unknown key": (
        {"method": "ngram", "tree": "x"},
        "without tree: its keys are method, model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_by_name(name: str) -> None:
    given, error = REFUSED[name]
    with pytest.raises(ValidationError, match=error):
        config(**given)
