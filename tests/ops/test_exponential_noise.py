"""exponential_noise against Python's whole numbers, and the quality of what comes out."""

import math

import pytest
import torch

from tokenmesh.kernels.exponential_noise import (
    TOLERANCE,
    exponential_noise,
    exponential_noise_reference,
    token_keys,
)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_numbers_equal_the_reference(seed: int, position: int) -> None:
    ids = torch.tensor([0, 1, 2, 77, 151935, 2**31 - 1], dtype=torch.int32)
    noise = exponential_noise(torch.tensor([seed]), torch.tensor([position]), token_keys(ids))[
        0
    ].tolist()
    wanted = [exponential_noise_reference(seed, position, token) for token in ids.tolist()]
    assert noise == pytest.approx(wanted, rel=TOLERANCE)


def test_numbers_do_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(7) * 999, torch.arange(7)
    ids = token_keys(torch.arange(1003, dtype=torch.int32))
    together = exponential_noise(seeds, positions, ids)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(exponential_noise(seeds[one], positions[one], ids)[0], together[row])
        some = ids[row::13]
        picked = exponential_noise(seeds[one], positions[one], some.unsqueeze(0))[0]
        assert torch.equal(picked, together[row, row::13])


def test_ids_and_keys_are_left_as_they_were() -> None:
    ids = torch.arange(9, dtype=torch.int32)
    keys = token_keys(ids)
    before = keys.clone()
    exponential_noise(torch.tensor([1, 2]), torch.tensor([0, 0]), keys)
    assert ids.tolist() == list(range(9))
    assert torch.equal(keys, before)


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens"])
def test_numbers_along_each_key_are_exponential_and_uncorrelated(axis: str) -> None:
    count = 100_000
    keys = {
        "seeds": (torch.arange(count), torch.zeros(count).long(), torch.tensor([5])),
        "positions": (torch.full((count,), 3), torch.arange(count), torch.tensor([5])),
        "tokens": (torch.tensor([3]), torch.tensor([9]), torch.arange(count)),
    }
    seeds, positions, ids = keys[axis]
    noise = exponential_noise(seeds, positions, token_keys(ids.int())).flatten().double()
    assert bool((noise > 0).all())
    assert bool(noise.isfinite().all())
    uniform = (-noise).exp().sort().values
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    # Kolmogorov and Smirnov, at one in ten thousand
    assert float((uniform - steps).abs().max()) < 2.2 / math.sqrt(count)
    flat = (-noise).exp() - 0.5
    for lag in (1, 2, 7, 64):
        correlation = float((flat[:-lag] * flat[lag:]).mean() * 12)
        assert abs(correlation) < 4 / math.sqrt(count)


def test_streams_and_positions_share_no_pattern_over_the_vocabulary() -> None:
    """Rows of neighboring seeds and positions look like independent draws to each other."""
    keys = token_keys(torch.arange(20_000, dtype=torch.int32))
    seeds = torch.tensor([0, 1, 2, 0, 0, 2**32, 2**33])
    positions = torch.tensor([0, 0, 0, 1, 2, 0, 0])
    uniform = (-exponential_noise(seeds, positions, keys).double()).exp() - 0.5
    correlation = uniform @ uniform.t() * 12 / keys.numel()
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(keys.numel())
    assert float((correlation.diag() - 1).abs().max()) < 0.05
