"""exponential_noise: published vectors, equal bits everywhere, and the quality of the draws."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.exponential_noise import (
    TOLERANCE,
    cpu,
    exponential_noise,
    exponential_noise_of,
    exponential_noise_reference,
)
from tokenmesh.kernels.exponential_noise.reference import noise_bits_reference, philox_4x32
from tokenmesh.kernels.native import native_noise

VOCAB: Final = 151_936
KNOWN_ANSWERS: Final = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Counter, key and result of Philox 4x32-10 in Random123's kat_vectors."""
SEEDS: Final = torch.tensor([0, 1, -5, 2**62 + 3, -(2**63)])
POSITIONS: Final = torch.tensor([0, 1, 2, 131071, 2**40])


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert philox_4x32(counter, key) == wanted
    c0, c1, c2, c3, k0, k1 = (np.array([word], dtype=np.uint64) for word in (*counter, *key))
    assert tuple(int(word[0]) for word in cpu.philox_4x32((c0, c1, c2, c3), (k0, k1))) == wanted


def test_bits_equal_the_reference() -> None:
    ids = torch.tensor([0, 1, 2, 3, 77, VOCAB - 1, 2**31 - 1]).repeat(len(SEEDS), 1)
    bits = cpu.noise_bits_of(SEEDS, POSITIONS, ids)
    for row, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        wanted = [noise_bits_reference(seed, position, token) for token in ids[row].tolist()]
        assert bits[row].tolist() == wanted
    of_all = cpu.noise_bits(SEEDS, POSITIONS, 79)
    assert torch.equal(of_all[:, ids[0, :5]], bits[:, :5])


@needs_native
@in_avx2
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 8191, 8192, 8193, 20_001])
def test_bits_in_c_equal_numpys(size: int) -> None:
    bits = native_noise(SEEDS, POSITIONS, size, torch.int32)
    assert torch.equal(bits, cpu.noise_bits(SEEDS, POSITIONS, size))
    ids = torch.randint(0, 2**31 - 1, (5, size), generator=torch.Generator().manual_seed(0))
    of_ids = native_noise(SEEDS, POSITIONS, ids, torch.int32)
    assert torch.equal(of_ids, cpu.noise_bits_of(SEEDS, POSITIONS, ids))


@needs_native
@in_avx2
def test_numbers_in_c_are_within_the_tolerance_of_exact_ones() -> None:
    bits = cpu.noise_bits(SEEDS, POSITIONS, VOCAB)
    uniform = (bits.float() + 0.5).mul_(2**-31).clamp_(max=1 - 2**-24).double()
    exact = uniform.neg_().log1p_().neg_()
    numbers = native_noise(SEEDS, POSITIONS, VOCAB).double()
    assert float(((numbers - exact) / exact).abs().max()) < TOLERANCE


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 131071])
@pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_native)])
def test_numbers_equal_the_reference(
    seed: int, position: int, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_started", lambda: in_c)
    ids = torch.tensor([[0, 1, 2, 77, VOCAB - 1, 2**31 - 1]])
    keys = (torch.tensor([seed]), torch.tensor([position]))
    wanted = [exponential_noise_reference(seed, position, token) for token in ids[0].tolist()]
    assert exponential_noise_of(*keys, ids)[0].tolist() == pytest.approx(wanted, rel=TOLERANCE)
    of_all = exponential_noise(*keys, 78)[0, ids[0, :4]].tolist()
    assert of_all == pytest.approx(wanted[:4], rel=TOLERANCE)


def test_numbers_do_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(7) * 999, torch.arange(7)
    together = exponential_noise(seeds, positions, 1003)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(exponential_noise(seeds[one], positions[one], 1003)[0], together[row])
        some = torch.arange(row, 1003, 13)
        picked = exponential_noise_of(seeds[one], positions[one], some.unsqueeze(0))[0]
        assert torch.equal(picked, together[row, some])


def _old_key(token_id: torch.Tensor) -> torch.Tensor:
    """The 32-bit hash by which an earlier generator distinguished tokens."""
    key = token_id.clone()
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        key = ((key ^ (key >> shift)) * factor) & 0xFFFFFFFF
    return key ^ (key >> 16)


def _pairs_alike(num_bits: int) -> list[list[int]]:
    """Pairs of ids whose old keys agree in their lowest bits."""
    low = _old_key(torch.arange(VOCAB)) & ((1 << num_bits) - 1)
    order = low.argsort()
    same = (low[order][1:] == low[order][:-1]).nonzero().flatten()
    return torch.stack([order[same], order[same + 1]], 1).tolist()


def _neighbors(count: int) -> list[list[int]]:
    """Pairs that share a counter, pairs that do not, and pairs far apart."""
    return [[5 * i, 5 * i + 1] for i in range(count)] + [[i, 99_991 - i] for i in range(count)]


@pytest.mark.parametrize("pairs", [lambda: _pairs_alike(30), lambda: _neighbors(6)])
def test_two_tokens_are_drawn_with_their_shares(pairs: Callable[[], list[list[int]]]) -> None:
    """p = 0.7 and 0.3 over a million seeds: within 4 standard deviations for every pair."""
    count, rows = 1_000_000, 50_000
    ids = torch.tensor(pairs()).flatten().unsqueeze(0)
    assert ids.numel() >= 24
    won = torch.zeros(ids.numel() // 2)
    for first in range(0, count, rows):
        seeds, positions = torch.arange(first, first + rows), torch.zeros(rows, dtype=torch.int64)
        noise = exponential_noise_of(seeds, positions, ids.expand(rows, -1)).view(rows, -1, 2)
        won += (noise[:, :, 0] / 0.7 < noise[:, :, 1] / 0.3).sum(0)
    assert float((won / count - 0.7).abs().max()) < 4 * math.sqrt(0.7 * 0.3 / count)


@pytest.mark.parametrize("axis", ["seeds", "positions", "tokens"])
def test_numbers_along_each_key_are_exponential_and_uncorrelated(axis: str) -> None:
    count = 100_000
    one = torch.tensor([[5]])
    keys = {
        "seeds": (torch.arange(count), torch.zeros(count).long(), one.expand(count, 1)),
        "positions": (torch.full((count,), 3), torch.arange(count), one.expand(count, 1)),
        "tokens": (torch.tensor([3]), torch.tensor([9]), torch.arange(count).unsqueeze(0)),
    }
    noise = exponential_noise_of(*keys[axis]).flatten().double()
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
    count = 20_000
    seeds = torch.tensor([0, 1, 2, 0, 0, 2**32, 2**33, 0, 0])
    positions = torch.tensor([0, 0, 0, 1, 2, 0, 0, 2**32, 2**33])
    uniform = (-exponential_noise(seeds, positions, count).double()).exp() - 0.5
    correlation = uniform @ uniform.t() * 12 / count
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert float(off_diagonal.abs().max()) < 4.5 / math.sqrt(count)
    assert float((correlation.diag() - 1).abs().max()) < 0.05
