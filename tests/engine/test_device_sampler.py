"""The device's sampler on the kernels' references: everything but the kernels, without Triton."""

import random
from typing import Any

import pytest
import torch

from tests.kernels.sampler_twins import compare_twins
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.device_penalties import DevicePenalties
from tokenmesh.engine.sampling.device_sampler import DeviceSampler, Needs
from tokenmesh.engine.sampling.device_tables import (
    DeviceTables,
    Shape,
    Slots,
    mask_words,
)
from tokenmesh.engine.sampling.penalties import PenaltyState
from tokenmesh.kernels.penalties import penalties
from tokenmesh.shared.messages.sampling import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 33, 300])
@pytest.mark.parametrize("seed", range(8))
def test_device_sampler_draws_what_the_sampler_draws(seed: int, vocab_size: int) -> None:
    assert compare_twins(100 + seed, vocab_size, num_steps=12, interpreted=False) > 30


def test_needs_name_only_what_the_batch_needs() -> None:
    sampler = DeviceSampler(4, 50, frozenset(), CPU)
    fields: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 1.0, "logprobs": 2},
    ]
    for number, field in enumerate(fields):
        params = SamplingParams(seed=1, max_tokens=9, **field)
        sampler.add(NewRow(number, [1, 2], 2, params, [], False))
    assert sampler.needs([0]) == Needs()
    assert sampler.needs([0, 1]) == Needs(has_filters=True)
    assert sampler.needs([2]) == Needs(has_limits=True)
    assert sampler.needs([0, 3]) == Needs(has_penalties=True, num_top_by_index=((1, 2),))
    assert [sampler.needs([number]).is_fixed for number in range(4)] == [True, True, False, False]
    sampler.remove(1)
    assert sampler.needs([0, 1]) == Needs()


def test_greedy_rows_need_no_filters() -> None:
    sampler = DeviceSampler(1, 50, frozenset(), CPU)
    params = SamplingParams(seed=1, max_tokens=9, temperature=0.0, top_p=0.5)
    sampler.add(NewRow(0, [1], 1, params, [], False))
    assert sampler.needs([0]) == Needs()


def test_penalties_are_those_of_the_sampler_to_the_last_bit() -> None:
    rng, vocab_size, num_rows = random.Random(5), 300, 40
    host, device = PenaltyState(vocab_size), DevicePenalties(num_rows, vocab_size, CPU)
    for number in range(num_rows):
        params = SamplingParams(
            seed=1,
            max_tokens=9,
            repetition_penalty=rng.uniform(0.5, 2),
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
        )
        ids = [rng.randrange(vocab_size + 9) for _ in range(200)]
        new = NewRow(number, ids, rng.randrange(1, 200), params, [], False)
        host.add(new)
        device.add(new)
    device.apply()
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 9
    expected = logits.clone()
    host.apply(expected, range(num_rows))
    penalties(logits, torch.arange(num_rows, dtype=torch.int32), device.rows)
    assert torch.equal(logits, expected)


def test_tables_hold_the_last_write_and_keep_it_when_they_grow() -> None:
    shapes = {"a": Shape(3, 5, torch.int32), "b": Shape(3, 1, torch.float64)}
    tables = DeviceTables.zeros(shapes, CPU)
    tables.stage("a", 1, torch.tensor([9, 9, 9], dtype=torch.int32))
    tables.stage("a", 1, torch.tensor([1, 2], dtype=torch.int32))
    tables.stage_number("b", 2, 0.1)
    assert not tables.flat.any()
    tables.apply()
    assert tables.tables["a"].tolist() == [[0] * 5, [1, 2, 0, 0, 0], [0] * 5]
    tables.stage("a", 0, torch.tensor([7], dtype=torch.int32))
    larger = tables.resized({"a": Shape(4, 6, torch.int32), "b": Shape(4, 1, torch.float64)})
    assert larger.tables["a"].tolist() == [[7] + [0] * 5, [1, 2] + [0] * 4, [0] * 6, [0] * 6]
    assert larger.column("b").tolist() == [0.0, 0.0, 0.1, 0.0]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70])
def test_mask_words_have_a_bit_for_each_token(vocab_size: int) -> None:
    tokens = [token for token in (0, 1, 30, 31, 32, 69) if token < vocab_size]
    words = mask_words(torch.tensor([*tokens, tokens[0]]), vocab_size).tolist()
    found = [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]
    assert found == tokens


def test_slots_are_used_again_before_there_are_more() -> None:
    slots = Slots()
    assert [slots.allocate(number) for number in (10, 11, 12)] == [0, 1, 2]
    assert slots.capacity == 4
    assert slots.free(11)
    assert not slots.free(11)
    assert slots.allocate(13) == 1
    assert slots.allocate(14) == 3
    assert slots.capacity == 4
    assert 13 in slots
    assert 11 not in slots
    assert len(slots) == 4
