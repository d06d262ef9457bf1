"""Experts that are read layer by layer while a tree is loaded: the same model, less memory."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.engine.test_quantized import SCORED
from tests.engine.test_quantized_experts import FP8_BLOCK, source_of, written
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.experts import coded_experts
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import prompt_of
from tests.ops.native import needs_native
from tokenmesh.engine.models.tree.quantized import deferred_experts
from tokenmesh.engine.models.tree.quantized.deferred_experts import (
    DeferredExperts,
    deferred_of,
)
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts

pytestmark = needs_native

STORED: Final = {
    "qwen3_moe": SCHEMES["pack4_zeros"],
    "deepseek_v3": FP8_BLOCK,
}
"""A family that becomes a native decoder, and one that stays a module tree."""


def scarce(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no plain experts fit into memory; how many layers had theirs after each reading."""
    monkeypatch.setattr(deferred_experts, "_SHARE", 0.0)
    trees: list[Any] = []
    seen: list[int] = []
    defer, fill = deferred_experts.defer, DeferredExperts.fill

    def note(tree: torch.nn.Module, found: Any) -> None:
        assert found or not trees
        trees.append(tree)
        defer(tree, found)

    def counted(self: DeferredExperts, module: Any) -> None:
        fill(self, module)
        layers = [each for each in trees[-1].modules() if is_experts(each)]
        own = [each for each in layers if each.down_proj is not None]
        seen.append(sum(not each.down_proj.is_meta for each in own))
        assert deferred_of(module) in (self, None)

    monkeypatch.setattr("tokenmesh.engine.models.tree.weights.defer", note)
    monkeypatch.setattr(DeferredExperts, "fill", counted)
    return seen


def check(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """With and without memory for plain experts the model is the same."""
    job = Job(prompt_of(40), SCORED)
    (expected,) = EngineDriver(directory, **settings).run([job])
    seen = scarce(monkeypatch)
    driver = EngineDriver(directory, **settings)
    assert len(seen) > 4
    assert max(seen) == 1
    coded_experts(driver.model)
    (found,) = driver.run([job])
    assert found.token_ids == expected.token_ids
    assert found.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("family", STORED)
def test_stored_codes_are_those_of_a_tree_that_was_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    check(written(family, STORED[family], tmp_path)[0], monkeypatch)


@pytest.mark.parametrize(
    ("family", "rounding"),
    [("gpt_oss", "int4"), pytest.param("mixtral", "int8", marks=pytest.mark.slow)],
)
def test_rounded_weights_are_those_of_a_tree_that_was_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rounding: Any
) -> None:
    directory = source_of(family, tmp_path)
    check(directory, monkeypatch, dtype="bfloat16", quantization=rounding)
