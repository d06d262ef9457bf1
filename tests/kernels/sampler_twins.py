"""The sampler and its device twin side by side, through rows that come, go and resume."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.fakes.cuda_device import HOST
from tests.kernels.far_device import FAR
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.device_sampler import DeviceSampler
from tokenmesh.engine.sampling.sampler import Draw, Draws, Sampler
from tokenmesh.kernels.dispatch import interpreted_on_cpu
from tokenmesh.kernels.sample import ChoiceRows, sample
from tokenmesh.shared.messages.sampling import SamplingParams, ThinkingBudget

EOS = 2
NUM_ROWS = 16


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Each feature is off in most rows and on in some, alone and with any others."""

    def token() -> int:
        # some ids lie beyond the vocabulary
        return rng.randrange(vocab_size + 3)

    def maybe(share: float, values: dict[str, Any]) -> dict[str, Any]:
        return values if rng.random() < share else {}

    few = min(12, vocab_size)
    fields = {
        **maybe(0.25, {"temperature": 0.0}),
        **maybe(0.3, {"temperature": rng.choice([1e-6, 0.2, 0.7, 1.6, 5.0])}),
        **maybe(0.3, {"top_k": rng.choice([1, 2, 7, 40, 300, vocab_size, 10**6])}),
        **maybe(0.3, {"top_p": rng.choice([1e-9, 0.3, 0.8, 0.95, 0.9999])}),
        **maybe(0.25, {"min_p": rng.choice([1e-4, 0.05, 0.4, 1.0])}),
        **maybe(0.15, {"presence_penalty": rng.uniform(-2, 2)}),
        **maybe(0.15, {"frequency_penalty": rng.uniform(-2, 2)}),
        **maybe(0.15, {"repetition_penalty": rng.choice([0.6, 1.2, 3.0])}),
        **maybe(
            0.15, {"logit_bias": {token(): rng.uniform(-9, 9) for _ in range(rng.randrange(9))}}
        ),
        **maybe(0.15, {"allowed_token_ids": [token() for _ in range(rng.choice([1, few, 40]))]}),
        **maybe(0.15, {"min_tokens": rng.randrange(9), "stop_token_ids": [token(), token()]}),
        **maybe(0.1, {"ignore_eos": True}),
        **maybe(0.25, {"logprobs": rng.choice([0, 1, 5, vocab_size])}),
        **maybe(0.1, {"logprobs": 0, "logprob_token_ids": _some_ids(rng, vocab_size, 7)}),
        **maybe(0.2, {"thinking": _budget(rng, vocab_size)}),
        **maybe(
            0.15,
            {
                "bad_words_ids": [
                    [rng.randrange(5) for _ in range(rng.choice([0, 1, 1, 2]))] + [token()]
                    for _ in range(rng.randrange(1, 9))
                ]
            },
        ),
    }
    return SamplingParams(seed=rng.randrange(-(2**63), 2**64), max_tokens=100, **fields)


def _some_ids(rng: random.Random, vocab_size: int, most: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(rng.randint(1, most))]


def _budget(rng: random.Random, vocab_size: int) -> ThinkingBudget:
    """Make a budget of few tokens, so that prompts and outputs hold markers and parts of them."""
    few = min(4, vocab_size)
    start = _some_ids(rng, few, 2) if rng.random() < 0.7 else []
    end = _some_ids(rng, few, 3)
    return ThinkingBudget(
        num_tokens=rng.randrange(6),
        is_open=rng.random() < 0.5,
        num_spent=rng.randrange(3),
        start_ids=start,
        end_ids=end,
        other_ends=[_some_ids(rng, few, 2) for _ in range(rng.choice([0, 0, 1, 4]))],
    )


@dataclass
class Twins:
    """Both samplers and what the rows hold."""

    rng: random.Random
    vocab_size: int
    on: torch.device = HOST
    known: dict[int, NewRow] = field(default_factory=dict)
    num_draws: int = 0

    def __post_init__(self) -> None:
        self.host = Sampler(self.vocab_size, frozenset({EOS}))
        self.device = DeviceSampler(NUM_ROWS, self.vocab_size, frozenset({EOS}), self.on)

    def add(self, number: int, params: SamplingParams, prompt: list[int], out: list[int]) -> None:
        """A request enters a row, or comes back to one."""
        new = NewRow(number, [*prompt, *out], len(prompt), params, [], False)
        self.known[number] = new
        self.host.add(new)
        self.device.add(new)

    def remove(self, number: int) -> None:
        """A request leaves."""
        del self.known[number]
        self.host.remove(number)
        self.device.remove(number)

    def churn(self) -> None:
        """Some rows end, some are preempted and come back, some are new."""
        rng = self.rng
        for number in range(NUM_ROWS):
            row = self.known.get(number)
            if row is not None and rng.random() < 0.2:
                self.remove(number)
            if row is not None and rng.random() < 0.1:
                split = row.num_prompt
                self.add(number, row.sampling, row.token_ids[:split], row.token_ids[split:])
            if row is None and rng.random() < 0.6:
                ids = [rng.randrange(min(9, self.vocab_size)) for _ in range(20)]
                length = rng.choice([0, 0, 1, 5])
                self.add(number, random_params(rng, self.vocab_size), ids, ids[:length])
        self.device.apply()

    def steps(self, count: int) -> None:
        """Churn and draw."""
        for _ in range(count):
            self.churn()
            if self.known:
                self.step()

    def step(self) -> None:
        """One draw of both for some of the rows, in any order, with a row of padding."""
        numbers = self.rng.sample(sorted(self.known), self.rng.randint(1, len(self.known)))
        logits = self._logits(len(numbers) + 1)
        positions = [len(r.token_ids) - r.num_prompt for r in map(self.known.__getitem__, numbers)]
        batch = (
            torch.tensor([*numbers, -1], dtype=torch.int32, device=self.on),
            torch.empty_like(logits, device=self.on).copy_(logits),
            torch.tensor([*positions, 0], device=self.on),
        )
        drawn = self.device.draw(self.device.needs(numbers), *batch)
        draws = drawn.read(numbers)
        expected = self.host.draw(numbers, logits[:-1].clone())
        self._compare(numbers, draws, expected, logits)
        for number in numbers:
            if number in expected.errors:
                self.remove(number)
            else:
                self.known[number].token_ids.append(expected.draw_by_row[number].token_id)

    def _logits(self, num_rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        scale = self.rng.choice([0.3, 2.0, 8.0])
        logits = torch.randn(num_rows, self.vocab_size, generator=generator) * scale
        if self.rng.random() < 0.3:
            logits = logits.round()
        if self.rng.random() < 0.3:
            corrupted = self.rng.randrange(num_rows)
            value = self.rng.choice([float("nan"), float("inf"), float("-inf")])
            where = slice(None) if value < 0 else self.rng.randrange(self.vocab_size)
            logits[corrupted, where] = value
        return logits

    def _compare(
        self, numbers: Sequence[int], draws: Draws, expected: Draws, logits: torch.Tensor
    ) -> None:
        assert draws.errors == expected.errors
        assert draws.draw_by_row.keys() == expected.draw_by_row.keys()
        for index, number in enumerate(numbers):
            if number in expected.errors:
                continue
            wanted = expected.draw_by_row[number]
            drawn = draws.draw_by_row[number]
            params = self.known[number].sampling
            assert drawn.token_id == wanted.token_id, (number, params)
            _compare_logprobs(drawn, wanted, logits[index], params)
        self.num_draws += len(numbers)


def _compare_logprobs(
    drawn: Draw, wanted: Draw, logits: torch.Tensor, params: SamplingParams
) -> None:
    if wanted.logprobs is None:
        assert drawn.logprobs is None
        return
    assert drawn.logprobs is not None
    assert drawn.logprobs.token_id == wanted.logprobs.token_id
    assert drawn.logprobs.rank == wanted.logprobs.rank
    assert drawn.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-4)
    assert drawn.logprobs.top_logprobs == pytest.approx(wanted.logprobs.top_logprobs, abs=1e-4)
    # which of equal tokens come first is the device's to say
    ids = drawn.logprobs.top_ids
    if params.logprob_token_ids:
        assert ids == wanted.logprobs.top_ids == params.logprob_token_ids
        return
    assert len(set(ids)) == len(ids)
    assert torch.equal(logits[ids], logits[wanted.logprobs.top_ids])


def compare_twins(seed: int, vocab_size: int, num_steps: int, interpreted: bool) -> int:
    """Compare the twins, with the kernels or with their references; return the number of tokens."""
    twins = Twins(random.Random(seed), vocab_size)
    with interpreted_on_cpu() if interpreted else nullcontext():
        twins.steps(num_steps)
    return twins.num_draws


def compare_twins_apart(seed: int, vocab_size: int, num_steps: int) -> int:
    """`compare_twins` with the kernels, on a device that is not the host."""
    from tests.kernels.far_interpreter import far_device_interpreted

    with far_device_interpreted():
        twins = Twins(random.Random(seed), vocab_size, FAR)
        twins.steps(num_steps)
    return twins.num_draws


def draw_counts(filters: dict[str, float], num_draws: int) -> tuple[list[int], list[float]]:
    """Tokens drawn by the kernel from one distribution over six tokens, and its kept weights."""
    logits = torch.tensor([0.0, 1.0, 0.4, -1.0, 0.7, 0.4])
    defaults = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    values = {**defaults, **filters}
    rows = ChoiceRows(
        temperature=torch.ones(num_draws),
        min_p=torch.full((num_draws,), values["min_p"]),
        top_k=torch.full((num_draws,), int(values["top_k"]), dtype=torch.int32),
        top_p=torch.full((num_draws,), values["top_p"], dtype=torch.float64),
        seed=torch.arange(num_draws),
    )
    batch = (logits.repeat(num_draws, 1), torch.arange(num_draws, dtype=torch.int32))
    with interpreted_on_cpu():
        tokens, _ = sample(*batch, torch.zeros(num_draws, dtype=torch.int64), rows)
    weights = (logits - logits.max()).double().exp()
    ordered = weights.sort(descending=True).values
    floor = values["min_p"]
    if values["top_k"]:
        floor = float(ordered[int(values["top_k"]) - 1])
    if values["top_p"] < 1:
        num_before = (ordered.cumsum(0) < values["top_p"] * ordered.sum()).sum()
        floor = float(ordered[num_before])
    kept = weights * (weights >= floor)
    return torch.bincount(tokens, minlength=len(logits)).tolist(), kept.tolist()
