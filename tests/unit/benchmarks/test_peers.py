"""Checks how bench_peers computes what it shows of the engines that it compares."""

from itertools import pairwise

import pytest

from benchmarks.engine_results import BoundLine
from benchmarks.peers.results import ModelResult
from benchmarks.peers.sample import Sample, decode_rate
from benchmarks.random_model import ModelShape

TINY = ModelShape("tiny", "Tiny", "Llama", {"vocab_size": 4000})


def test_the_decode_rate_starts_when_the_last_stream_has_its_first_token() -> None:
    # after 2.0 s: three tokens in two seconds
    assert decode_rate([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]) == 1.5
    assert decode_rate([[1.0]]) == 0.0
    assert decode_rate([]) == 0.0


def test_the_bound_is_the_median_share_of_the_rounds() -> None:
    bounds = [BoundLine("m", 40.0, read_ms, "sum") for read_ms in (36.0, 20.0, 34.0)]
    assert ModelResult("m", "M", 10**9, bounds).bound_share == pytest.approx(0.85)
    assert ModelResult("m", "M", 10**9).bound_share is None


def test_the_mesh_is_held_against_its_engine_by_medians() -> None:
    def samples(*numbers: float) -> list[Sample]:
        return [Sample(speed, 0.0, 1000 / speed) for speed in numbers]

    result = ModelResult("m", "M", 1, rounds={1: {"mesh": samples(10, 20, 100)}})
    assert result.added_ttft_ms is None
    assert result.lost_throughput(32) is None
    result.rounds = {
        1: {"mesh": samples(10, 20, 100), "engine": samples(25, 25, 1)},
        32: {"mesh": samples(90, 95, 1), "engine": samples(100, 120, 100)},
    }
    assert result.added_ttft_ms == pytest.approx(50 - 40)
    assert result.lost_throughput(32) == pytest.approx(0.1)


def test_prompts_are_the_same_in_every_round() -> None:
    from benchmarks.random_model import random_prompts

    first, again = random_prompts(TINY, 4, 16), random_prompts(TINY, 4, 16)
    assert first == again
    assert all(one != other for one, other in pairwise(first))
    assert {token for prompt in first for token in prompt} <= {*range(2048, 4000)}
