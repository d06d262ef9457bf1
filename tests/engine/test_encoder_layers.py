"""Layers of encoders in C: which are taken, what rounded products move, when they are refused."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.pool_driver import Numbers, PoolDriver
from tests.fakes.poolers import ENCODERS, make_pooler, prompts, states_of, write_modules
from tests.ops.native import needs_native
from tokenmesh.engine.models.tree.pooling import build
from tokenmesh.engine.models.tree.pooling.layers import EncoderLayer
from tokenmesh.kernels.native import NativeShorts, NativeWeight
from tokenmesh.shared.messages.pooling import PoolingParams

pytestmark = needs_native

TOKENS = PoolingParams(task="token_embed", use_activation=False)
WIDE = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}


def _error(numbers: Numbers, expected: torch.Tensor) -> float:
    return float(np.linalg.norm(numbers - expected.numpy()) / expected.norm())


def _layers(driver: PoolDriver) -> list[EncoderLayer]:
    model: Any = driver.loaded.runner._model
    own = [vars(each).get("tokenmesh_own", ()) for each in model.tree.body.modules()]
    return [each for parts in own for each in parts if isinstance(each, EncoderLayer)]


def _write(name: str, directory: Path, **values: Any) -> Any:
    model = make_pooler(ENCODERS[name], "Model", **values)
    model.save_pretrained(directory)
    write_modules(directory)
    return model


@pytest.mark.parametrize(
    ("name", "values", "taken"),
    [
        ("bert", {}, 3),
        ("xlm_roberta", {}, 3),
        ("distilbert", {}, 3),
        ("electra", {}, 3),
        ("bert", {"num_attention_heads": 8}, 0),  # heads of 8 features
        ("bert", {"hidden_act": "relu"}, 0),
        ("jina_embeddings_v3", {}, 0),  # rotates queries and keys
        ("modernbert", {}, 0),  # normalizes before, and has gated MLPs
        ("albert", {}, 0),  # one layer that is called three times
    ],
)
def test_layers_like_berts_are_taken_whole(
    name: str, values: dict[str, Any], taken: int, tmp_path: Path
) -> None:
    model = _write(name, tmp_path, **values)
    driver = PoolDriver(tmp_path)
    assert len(_layers(driver)) == taken
    given = prompts(3, 40, 1, 17)
    for prompt, numbers in zip(given, driver.run(given, TOKENS), strict=True):
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("precision", "kind"), [("high", NativeShorts), ("highest", NativeWeight)])
def test_rounded_products_move_states_by_less_than_a_thousandth(
    precision: str, kind: type, tmp_path: Path
) -> None:
    model = _write("bert", tmp_path, **WIDE)
    driver = PoolDriver(tmp_path, float32_matmul_precision=precision)
    assert {type(layer.up.weight) for layer in _layers(driver)} == {kind}
    given = prompts(3, 40, 1, 17)
    for prompt, numbers in zip(given, driver.run(given, TOKENS), strict=True):
        error = _error(numbers, states_of(model, prompt))
        assert error < (1e-3 if precision == "high" else 1e-5)


def test_products_of_other_layers_are_rounded_too(tmp_path: Path) -> None:
    model = _write("nomic_bert", tmp_path, **WIDE)
    driver = PoolDriver(tmp_path)
    body: Any = driver.loaded.runner._model
    own = [vars(each).get("tokenmesh_own", ()) for each in body.tree.body.modules()]
    kinds = {type(each.weight) for parts in own for each in parts if hasattr(each, "weight")}
    assert NativeShorts in kinds
    (prompt,) = prompts(30)
    assert _error(driver.run([prompt], TOKENS)[0], states_of(model, prompt)) < 1e-3


def test_a_model_that_shows_the_rounding_is_computed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _write("bert", tmp_path, **WIDE)
    monkeypatch.setattr(build, "TOLERANCE", 2e-5)
    caplog.set_level(logging.INFO, build.logger.name)
    driver = PoolDriver(tmp_path)
    assert {type(layer.up.weight) for layer in _layers(driver)} == {NativeWeight}
    assert "is loaded again, to be computed in float32" in caplog.text
