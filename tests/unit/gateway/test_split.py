"""A name shared by several models: chosen by weight, and the same for the same request id."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenmesh.services.gateway.core.mesh.catalog import in_order
from tokenmesh.shared.config.gateway import GatewaySettings


@pytest.mark.parametrize("weights", [{"a": 9.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 2.0}])
def test_requests_are_shared_by_weight(weights: dict[str, float]) -> None:
    counts = Counter(in_order(weights, f"chatcmpl-{number}")[0] for number in range(5000))
    for model, weight in weights.items():
        assert counts[model] / 5000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


@given(st.dictionaries(st.text(min_size=1), st.floats(0.01, 100), min_size=2), st.text(min_size=1))
def test_only_requests_of_a_removed_model_move(weights: dict[str, float], request_id: str) -> None:
    order = in_order(weights, request_id)
    assert sorted(order) == sorted(weights)
    gone = order[-1]
    rest = {model: weight for model, weight in weights.items() if model != gone}
    assert in_order(rest, request_id) == order[:-1]


def test_without_an_id_the_highest_weight_comes_first() -> None:
    assert in_order({"b": 1, "a": 1, "c": 2}, "") == ["c", "a", "b"]


WRONG: list[dict[str, Any]] = [
    {"model_splits": {"chat": {}}},
    {"model_splits": {"chat": {"a": 0}}},
    {"model_splits": {"chat": {"a": float("inf")}}},
    {"model_splits": {"chat": {"chat": 1}}},
    {"model_splits": {"x": {"chat": 1}, "chat": {"a": 1}}},
    {"model_splits": {"chat": {"a": 1}}, "model_aliases": {"chat": "a"}},
]


@pytest.mark.parametrize("settings", WRONG)
def test_invalid_splits_are_refused_at_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="model_splits"):
        GatewaySettings(**settings)
