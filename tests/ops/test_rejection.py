"""rejection on a CPU: equal to its reference, and of the model's distribution."""

from typing import Final

import numpy as np
import pytest
import torch

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.choice import ChoiceState, signed64
from tokenmesh.kernels.exponential_noise import exponential_noise
from tokenmesh.kernels.rejection import rejection, rejection_reference
from tokenmesh.shared.messages.sampling import SamplingParams

NUM_DRAWS: Final = 1_000_000
VOCAB: Final = 24
DRAFTING: Final = signed64(0x9B05688C2B3E6C1F)


@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize(("rows", "vocab"), [(0, 9), (1, 8191), (2, 8192), (2, 8193), (40, 64)])
def test_tokens_equal_the_reference(rows: int, vocab: int, is_certain: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randn(rows, vocab, generator=generator).mul(2).softmax(-1)
    draft = (target.log() + torch.randn(rows, vocab, generator=generator)).softmax(-1)
    ids = draft.multinomial(1).squeeze(1) if rows else torch.empty(0, dtype=torch.int64)
    seeds, positions = torch.arange(rows) * 7919 - 3, torch.arange(rows) + 2**34
    given = (target, None if is_certain else draft, ids, seeds, positions)
    before = target.clone()
    found = rejection(*given)
    assert found.tolist() == rejection_reference(*given).tolist()
    assert torch.equal(target, before)
    assert rows < 40 or (found != ids).any()


def exact(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The probabilities by the definition of temperature, min_p, top_k and top_p."""
    scaled = logits.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    kept = weights >= params.min_p
    kept &= weights >= np.sort(weights)[::-1][params.top_k - 1]
    order = np.argsort(-weights, kind="stable")
    left = np.where(kept, weights, 0.0)[order]
    within = np.cumsum(left) - left < params.top_p * left.sum()
    kept[order] &= within
    weights = np.where(kept, weights, 0.0)
    return np.asarray(weights / weights.sum())


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities that the engine verifies with."""
    state = ChoiceState(VOCAB)
    state.add(NewRow(0, [1], 1, params, [], False))
    return state.probabilities(logits[None], [0])[0]


@pytest.mark.parametrize(
    ("temperature", "is_certain"), [(0.5, False), (1.0, False), (1.7, False), (1.0, True)]
)
def test_draws_have_the_distribution_of_the_model(temperature: float, is_certain: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(VOCAB, generator=generator) * 2
    other = logits + torch.randn(VOCAB, generator=generator)
    params = SamplingParams(
        seed=0, max_tokens=1, temperature=temperature, top_k=15, top_p=0.95, min_p=0.005
    )
    target = kept(logits, params)
    draft = kept(other, params)
    expected = exact(logits, params)
    counts, num_kept = np.zeros(VOCAB), 0
    size = NUM_DRAWS // 20
    for first in range(0, NUM_DRAWS, size):
        seeds = torch.arange(first, first + size)
        positions = torch.full((size,), 3)
        noise = exponential_noise(seeds ^ DRAFTING, positions, VOCAB)
        ids = (draft / noise).argmax(-1)
        many = target.expand(size, -1), None if is_certain else draft.expand(size, -1)
        if is_certain:
            ids = torch.full((size,), int(draft.argmax()))
        drawn = rejection(*many, ids, seeds, positions)
        counts += np.bincount(drawn.numpy(), minlength=VOCAB)
        num_kept += int((drawn == ids).sum())
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = NUM_DRAWS * expected[possible]
    chi_square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = int(possible.sum()) - 1
    # four standard deviations above the mean of the distribution
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    overlap = (
        expected[int(draft.argmax())] if is_certain else np.minimum(expected, draft.numpy()).sum()
    )
    assert num_kept / NUM_DRAWS == pytest.approx(float(overlap), abs=0.003)
