"""Sampling: every parameter against an oracle in plain Python, and the distribution of draws."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.choice import first_max
from tokenmesh.engine.sampling.sampler import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    Sampler,
)
from tokenmesh.kernels.exponential_noise import exponential_noise_reference
from tokenmesh.shared.messages.sampling import SamplingParams

VOCAB = 50
EOS = 2
PROMPT = [4, 5, 6, 7, 7, 20]
OUTPUT = [8, 9, 9, 7, 30]
NONE = float("-inf")


def logits_of(seed: int, vocab_size: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * scale


def params_of(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=100, **fields)


def new_row(
    number: int,
    sampling: SamplingParams,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
) -> NewRow:
    return NewRow(number, [*prompt, *output], len(prompt), sampling, [], False)


def processed(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the logits that are left before temperature, token by token."""
    out = []
    stops = {*params.stop_token_ids, EOS}
    for token, value in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = NONE
        value += params.logit_bias.get(token, 0.0)
        if len(OUTPUT) < params.min_tokens and token in stops:
            value = NONE
        if token in PROMPT or token in OUTPUT:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        count = OUTPUT.count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        for word in params.bad_words_ids:
            head = word[:-1]
            if word[-1] == token and (not head or OUTPUT[-len(head) :] == head):
                value = NONE
        out.append(value)
    return out


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution that a token is drawn from, not normalized."""
    scaled = [value / params.temperature for value in processed(logits, params)]
    best = max(scaled)
    weights = {t: math.exp(v - best) for t, v in enumerate(scaled) if v > NONE}
    weights = {t: w for t, w in weights.items() if w >= params.min_p}
    if params.top_k:
        kth = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {t: w for t, w in weights.items() if w >= kth}
    total, before = sum(weights.values()), 0.0
    kept: dict[int, float] = {}
    for token, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if kept and params.top_p < 1.0 and before >= params.top_p * total:
            break
        kept[token] = weight
        before += weight
    # equal weights share one fate
    floor = min(kept.values())
    return [
        weight if (weight := weights.get(token, 0.0)) >= floor else 0.0
        for token in range(len(logits))
    ]


def expected_token(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    """The oracle's draw."""
    if params.temperature < 1e-5:
        values = processed(logits, params)
        return values.index(max(values))
    weights = probabilities(logits, params)
    scores = [
        weight / exponential_noise_reference(params.seed, position, token) if weight else 0.0
        for token, weight in enumerate(weights)
    ]
    return scores.index(max(scores))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 4},
    "top_k of everything": {"top_k": 1000},
    "top_k of everything with top_p": {"top_k": 1000, "top_p": 0.7},
    "top_k of more than is allowed": {
        "allowed_token_ids": [1, 8, 12, 33, 49],
        "top_k": 9,
        "top_p": 0.9,
    },
    "top_p": {"top_p": 0.6},
    "top_p of nearly nothing": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.4, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "logit_bias": {"logit_bias": {3: 4.0, 11: -100.0, 40: 2.5}},
    "allowed": {"allowed_token_ids": [1, 8, 12, 33, 49], "temperature": 2.0},
    "allowed with bias": {"allowed_token_ids": [1, 8], "logit_bias": {8: -1.0, 9: 50.0}},
    "presence": {"presence_penalty": 3.0},
    "frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 3.0},
    "all penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "temperature": 0.8,
    },
    "bad words": {"bad_words_ids": [[7], [7, 30, 12], [30, 13], [29, 14], [4, 8, 15]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [13, 22], "logit_bias": {EOS: 9.0, 13: 9.0}},
    "min_tokens reached": {"min_tokens": 5, "logit_bias": {EOS: 9.0}},
    "min_tokens with ignore_eos": {"min_tokens": 6, "ignore_eos": True, "logit_bias": {EOS: 9.0}},
    "greedy with everything": {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "bad_words_ids": [[20]],
        "logit_bias": {8: 1.0},
    },
    "ids beyond the vocabulary": {
        "logit_bias": {50: 5.0, 3: 1.0},
        "stop_token_ids": [70],
        "allowed_token_ids": [3, 4, 5, 50],
        "bad_words_ids": [[60], [61, 4]],
        "min_tokens": 9,
    },
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_each_parameter_draws_what_the_oracle_draws(fields: dict[str, Any]) -> None:
    count = 60
    sampler = Sampler(VOCAB, frozenset({EOS}))
    rows = [params_of(seed, **fields) for seed in range(count)]
    logits = torch.stack([logits_of(seed) for seed in range(count)])
    for number, params in enumerate(rows):
        sampler.add(new_row(number, params))
    draws = sampler.draw(range(count), logits.clone())
    assert draws.errors == {}
    drawn = [draws.draw_by_row[number].token_id for number in range(count)]
    wanted = [
        expected_token(logits[number].tolist(), params, len(OUTPUT))
        for number, params in enumerate(rows)
    ]
    assert drawn == wanted


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"min_p": 0.3}, {"top_k": 300}, {"top_k": 700, "top_p": 0.99}, {"top_k": 3}],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.2, 4.0], ids=["flat", "peaked"])
def test_filters_are_exact_when_more_tokens_survive_than_are_looked_at_first(
    fields: dict[str, Any], scale: float
) -> None:
    vocab_size, count = 1200, 4
    sampler = Sampler(vocab_size, frozenset())
    logits = torch.stack([logits_of(seed, vocab_size, scale) for seed in range(count)])
    # ties across the border of the first candidates
    logits[:, :400] = logits[:, :1]
    for number in range(count):
        sampler.add(new_row(number, params_of(number, **fields)))
    draws = sampler.draw(range(count), logits.clone())
    for number in range(count):
        wanted = expected_token(logits[number].tolist(), params_of(number, **fields), len(OUTPUT))
        assert draws.draw_by_row[number].token_id == wanted


def chi_square(tokens: torch.Tensor, weights: Sequence[float]) -> float:
    """Return how far counts are from probabilities, in standard deviations of a right sampler."""
    total = sum(weights)
    expected = torch.tensor([w / total for w in weights], dtype=torch.float64) * len(tokens)
    observed = torch.bincount(tokens, minlength=len(weights)).double()
    assert bool((observed[expected == 0] == 0).all())
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    bins = expected > 0
    freedom = int(bins.sum()) - 1
    statistic = float(((observed - expected)[bins] ** 2 / expected[bins]).sum())
    # Wilson and Hilferty: the cube root is nearly normal
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def many_draws(params: Sequence[SamplingParams], logits: torch.Tensor) -> torch.Tensor:
    """One token for each params at the first output position."""
    tokens: list[int] = []
    for first in range(0, len(params), 256):
        sampler = Sampler(len(logits), frozenset())
        batch = params[first : first + 256]
        for number, row in enumerate(batch):
            sampler.add(new_row(number, row, output=()))
        draws = sampler.draw(range(len(batch)), logits.repeat(len(batch), 1))
        tokens += [draws.draw_by_row[number].token_id for number in range(len(batch))]
    return torch.tensor(tokens)


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.6}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_distribution_as_torch_multinomial_does(fields: dict[str, Any]) -> None:
    logits, count = logits_of(3), 20_000
    weights = probabilities(logits.tolist(), params_of(**fields))
    tokens = many_draws([params_of(seed, **fields) for seed in range(count)], logits)
    torch.manual_seed(0)
    multinomial = torch.multinomial(torch.tensor(weights), count, replacement=True)
    assert chi_square(multinomial, weights) < 4
    assert chi_square(tokens, weights) < 4
    skewed = [w * (1.25 if t % 2 else 1.0) for t, w in enumerate(weights)]
    assert chi_square(tokens, skewed) > 4


def test_draws_along_a_stream_follow_the_distribution() -> None:
    logits, steps = logits_of(4), 20_000
    rows = 100
    sampler = Sampler(VOCAB, frozenset())
    for number in range(rows):
        sampler.add(new_row(number, params_of(number), output=()))
    tokens = []
    for _ in range(steps // rows):
        draws = sampler.draw(range(rows), logits.repeat(rows, 1))
        tokens += [draws.draw_by_row[number].token_id for number in range(rows)]
    stream = torch.tensor(tokens)
    weights = probabilities(logits.tolist(), params_of())
    assert chi_square(stream, weights) < 4
    pairs = stream[:-rows] * VOCAB + stream[rows:]
    assert chi_square(pairs, [a * b for a in weights for b in weights]) < 4


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    fields = list(CASES.values())
    logits = torch.stack([logits_of(i) for i in range(len(fields))])
    together = Sampler(VOCAB, frozenset({EOS}))
    for number, field in enumerate(fields):
        together.add(new_row(number, params_of(number, **field)))
    order = list(reversed(range(len(fields))))
    drawn = together.draw(order, logits[order].clone()).draw_by_row
    for number, field in enumerate(fields):
        alone = Sampler(VOCAB, frozenset({EOS}))
        alone.add(new_row(0, params_of(number, **field)))
        token = alone.draw([0], logits[number : number + 1].clone()).draw_by_row[0].token_id
        assert drawn[number].token_id == token


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 12345678901234567890])
def test_any_64_bit_seed_is_usable(seed: int) -> None:
    sampler = Sampler(VOCAB, frozenset())
    sampler.add(new_row(0, params_of(seed)))
    logits = logits_of(5).unsqueeze(0)
    token = sampler.draw([0], logits.clone()).draw_by_row[0].token_id
    assert token == expected_token(logits[0].tolist(), params_of(seed), len(OUTPUT))


def test_logprobs_are_the_models_with_rank_and_the_requested_number() -> None:
    sampler = Sampler(VOCAB, frozenset())
    asked = [None, 0, 3, 7, 3]
    logits = torch.stack([logits_of(i) for i in range(len(asked))])
    for number, count in enumerate(asked):
        bias = {9: 30.0} if number == 4 else {}
        sampler.add(new_row(number, params_of(number, logprobs=count, logit_bias=bias)))
    draws = sampler.draw(range(len(asked)), logits.clone()).draw_by_row
    assert draws[0].logprobs is None
    assert draws[4].token_id == 9
    for number, count in enumerate(asked):
        entry = draws[number].logprobs
        if count is None:
            continue
        reference = logits[number].double().log_softmax(-1)
        assert entry is not None
        assert entry.token_id == draws[number].token_id
        assert entry.logprob == pytest.approx(float(reference[entry.token_id]), abs=1e-5)
        assert entry.rank == 1 + int((reference > reference[entry.token_id]).sum())
        best = reference.argsort(descending=True)[:count].tolist()
        assert entry.top_ids == best
        assert entry.top_logprobs == pytest.approx(reference[best].tolist(), abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}, {"logprobs": 2}, {"top_p": 0.5}],
    ids=str,
)
def test_logits_that_are_not_finite_fail_their_row_alone(
    fields: dict[str, Any], value: float
) -> None:
    sampler = Sampler(VOCAB, frozenset())
    for number in range(3):
        sampler.add(new_row(number, params_of(number, **fields)))
    logits = torch.stack([logits_of(i) for i in range(3)])
    logits[1, slice(None) if value == NONE else 17] = value
    draws = sampler.draw(range(3), logits)
    assert draws.errors == {1: NOT_FINITE}
    assert sorted(draws.draw_by_row) == [0, 2]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 2}], ids=str)
def test_a_row_that_may_draw_nothing_fails_alone(fields: dict[str, Any]) -> None:
    sampler = Sampler(VOCAB, frozenset())
    sampler.add(new_row(0, params_of(allowed_token_ids=[9], bad_words_ids=[[9]], **fields)))
    sampler.add(new_row(1, params_of(allowed_token_ids=[99], **fields)))
    sampler.add(new_row(2, params_of(**fields)))
    draws = sampler.draw([0, 1, 2], torch.stack([logits_of(i) for i in range(3)]))
    assert draws.errors == {0: NOTHING_ALLOWED, 1: NOTHING_ALLOWED}
    assert list(draws.draw_by_row) == [2]


def test_a_reused_row_number_forgets_what_it_held() -> None:
    sampler = Sampler(VOCAB, frozenset())
    sampler.add(new_row(0, params_of(allowed_token_ids=[9], logprobs=1, frequency_penalty=2.0)))
    sampler.add(new_row(0, params_of(temperature=0.0)))
    logits = logits_of(6).unsqueeze(0)
    draw = sampler.draw([0], logits.clone()).draw_by_row[0]
    assert draw.token_id == int(logits.argmax())
    assert draw.logprobs is None


@pytest.mark.parametrize("size", [1, 50, 64, 128, 1024, 4096, 151936 // 8, 4099])
def test_first_max_is_the_first_of_the_largest(size: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(5, size)
    values[1] = values[1].round()
    values[2] = NONE
    values[3, -1] = 99.0
    expected = values.double().argmax(-1)
    assert (
        first_max(values).tolist()
        == [row.index(max(row)) for row in values.tolist()]
        == expected.tolist()
    )


@pytest.mark.parametrize("fields", [*CASES.values(), {"temperature": 0.0}], ids=str)
def test_processed_log_probabilities_are_those_of_the_draw(fields: dict[str, Any]) -> None:
    params = params_of(7, logprobs=VOCAB, **fields)
    logits = torch.stack([logits_of(7)])
    seen: dict[bool, Any] = {}
    for shows_processed in (False, True):
        sampler = Sampler(VOCAB, frozenset({EOS}), shows_processed=shows_processed)
        sampler.add(new_row(0, params))
        draw = sampler.draw([0], logits.clone()).draw_by_row[0]
        assert draw.logprobs is not None
        seen[shows_processed] = draw
    assert seen[True].token_id == seen[False].token_id
    shown = dict(zip(seen[True].logprobs.top_ids, seen[True].logprobs.top_logprobs, strict=True))
    kept = {each: value for each, value in shown.items() if value > -math.inf}
    assert sum(math.exp(value) for value in kept.values()) == pytest.approx(1, abs=1e-4)
    assert seen[True].token_id in kept
    if 0 < params.top_k < VOCAB and params.temperature > 0:
        assert len(kept) <= params.top_k
    if params.allowed_token_ids:
        assert kept.keys() <= set(params.allowed_token_ids)
    raw = dict(zip(seen[False].logprobs.top_ids, seen[False].logprobs.top_logprobs, strict=True))
    changes = params.temperature not in (0.0, 1.0) or len(kept) < VOCAB
    assert (raw != shown) or not changes
