"""The logits of a loaded tree may differ from those of transformers by this much."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tokenmesh.engine.models.tree.check import check, reference
from tokenmesh.engine.models.tree.run import UnservedModel

VOCAB = 50


class Waves(torch.nn.Module):
    """Logits turn by `steepness` for each unit of an embedding: the steeper, the more rounding."""

    def __init__(self, steepness: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, VOCAB, dtype=dtype)
        self.steepness, self.dtype, self.device = steepness, dtype, torch.device("cpu")

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=(self.table(input_ids).float() * self.steepness).sin())


class WithIds(Waves):
    """Adds a little that embeddings alone do not."""

    def forward(self, use_cache: bool, **given: torch.Tensor) -> Any:  # type: ignore[override]
        if "input_ids" in given:
            return SimpleNamespace(logits=self.table(given["input_ids"]).float().sin() + 0.1)
        return SimpleNamespace(logits=given["inputs_embeds"].float().sin())


def test_in_half_precision_a_model_that_needs_token_ids_is_refused() -> None:
    model = WithIds(1.0, torch.bfloat16)
    with pytest.raises(UnservedModel, match="needs token ids in addition to their embeddings"):
        reference(cast("Any", model), VOCAB)


def limit_of(steepness: float, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    return reference(cast("Any", Waves(steepness, dtype)), VOCAB).limit


def test_in_half_precision_a_model_may_err_as_its_own_rounding_makes_it() -> None:
    assert limit_of(1e4, torch.float32) == 2e-3
    assert limit_of(1.0, torch.bfloat16) == 0.2
    assert 0.25 < limit_of(40.0, torch.bfloat16) < 0.8
    # even where rounding decides most, another function is refused
    assert limit_of(1e4, torch.bfloat16) == 0.8


def test_other_logits_are_refused_with_both_numbers() -> None:
    torch.manual_seed(0)
    expected = reference(cast("Any", Waves(1.0, torch.bfloat16)), VOCAB)
    assert check(expected, expected.results * 1.1) == pytest.approx(0.1, rel=1e-4)
    with pytest.raises(UnservedModel, match=r"are 0\.3 away .* more than 0\.2 is not rounding"):
        check(expected, expected.results * 1.3)
    with pytest.raises(UnservedModel, match="are nan away"):
        check(expected, expected.results * float("nan"))
