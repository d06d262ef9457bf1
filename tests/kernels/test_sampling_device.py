"""The sampler on a device draws what the sampler on the CPU draws: streams move between workers."""

import math

import pytest
import torch

from tests.kernels.interpreter import Interpreter
from tests.kernels.sampler_twins import compare_twins, draw_counts

pytest.importorskip("triton")


@pytest.mark.timeout(120)  # the first case waits for the child to import torch
@pytest.mark.parametrize(
    ("seed", "vocab_size", "num_steps"),
    [
        (0, 50, 8),
        *(pytest.param(seed, 50, 8, marks=pytest.mark.slow) for seed in (1, 2, 3, 4)),
        (5, 1, 4),
        pytest.param(6, 1100, 6, marks=pytest.mark.slow),
        (7, 2100, 4),
    ],
)
def test_kernels_draw_what_the_cpu_draws(
    seed: int, vocab_size: int, num_steps: int, interpreter: Interpreter
) -> None:
    arguments = (seed, vocab_size, num_steps, True)
    assert interpreter.call(compare_twins, *arguments, timeout_s=100) > 2 * num_steps


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("filters", "num_draws"),
    [
        ({}, 200),
        ({"top_k": 4}, 100),
        ({"top_p": 0.8}, 100),
        pytest.param({}, 400, marks=pytest.mark.slow),
        pytest.param({"top_k": 4}, 200, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, 200, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_follow_the_distribution(
    filters: dict[str, float], num_draws: int, interpreter: Interpreter
) -> None:
    counts, weights = interpreter.call(draw_counts, filters, num_draws, timeout_s=100)
    assert sum(counts) == num_draws
    assert _chi_square(counts, weights) < 4
    skewed = [weight * (3.0 if token % 2 else 1.0) for token, weight in enumerate(weights)]
    assert _chi_square(counts, skewed) > 4


def _chi_square(counts: list[int], weights: list[float]) -> float:
    """Return how far counts are from probabilities, in standard deviations of a right sampler."""
    observed = torch.tensor(counts, dtype=torch.float64)
    expected = torch.tensor(weights, dtype=torch.float64)
    expected *= observed.sum() / expected.sum()
    assert bool((observed[expected == 0] == 0).all())
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    is_possible = expected > 0
    freedom = int(is_possible.sum()) - 1
    statistic = float(((observed - expected)[is_possible] ** 2 / expected[is_possible]).sum())
    # Wilson and Hilferty: the cube root is nearly normal
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
