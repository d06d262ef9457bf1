"""Random configurations: log-probabilities are those of transformers, or loading refuses them."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.fakes.family_configs import MODEL_TYPES, checkpoint_of, logits_of
from tests.fakes.random_configs import random_config
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.errors import CheckpointError

ATOL: Final = 2e-4
FEW, MANY = 6, 250
OUTCOMES: Final = frozenset({"equal", "refused", "rejected"})
REJECTED: Final = (
    *(KeyError, ValueError, TypeError, AttributeError, RuntimeError, ZeroDivisionError),
    StrictDataclassError,
)
"""Errors of transformers for a configuration that it cannot run."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of odd values, which is what they are here for."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def compare(directory: Path, config: dict[str, Any], rng: Random) -> str:
    """Name the result for a configuration; an AssertionError when we compute something else."""
    prompt = prompt_of(rng.choice([9, 30, 50]), seed=rng.randrange(99))
    try:
        read_facts(RawConfig(config, "config.json"))
    except CheckpointError as refusal:
        is_named = refusal.param is not None and refusal.param in str(refusal)
        return "refused" if is_named else f"no key is named: {refusal}"
    try:
        checkpoint = checkpoint_of(directory, config)
        expected = checkpoint.logits(prompt).log_softmax(-1)
    except REJECTED:
        return "rejected"
    chunk = rng.choice([len(prompt), 7])
    native = rng.random() < 0.5
    ours = logits_of(directory, prompt, native=native, chunk=chunk).log_softmax(-1)
    error = float((ours - expected).abs().max())
    if error > ATOL:
        # large multipliers make large scores: how far is transformers from itself in float64?
        with torch.no_grad():
            exact = checkpoint.make_oracle().double()(torch.tensor([prompt])).logits[0]
        own = float((exact.log_softmax(-1) - expected).abs().max())
        assert error < ATOL + 4 * own, f"{error} nats off, where rounding makes {own}: {config}"
    return "equal"


def compare_many(tmp_path: Path, architecture: str, seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = Random(f"{architecture} {seed}")
        config = random_config(rng, architecture)
        counts[compare(tmp_path / str(seed), config, rng)] += 1
    return counts


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_random_configurations_are_computed_as_by_transformers_or_refused(
    tmp_path: Path, architecture: str
) -> None:
    counts = compare_many(tmp_path, architecture, range(FEW))
    assert counts.keys() <= OUTCOMES
    assert counts["equal"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_many_random_configurations_are_computed_as_by_transformers_or_refused(
    tmp_path: Path, architecture: str
) -> None:
    counts = compare_many(tmp_path, architecture, range(1000, 1000 + MANY))
    assert counts.keys() <= OUTCOMES
    assert counts["equal"] > MANY / 5
    assert counts["refused"] > 0
