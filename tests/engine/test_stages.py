"""Families of the native kind in stages of layers: the tokens and numbers of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.models import FAKES
from tests.fakes.rank_runs import (
    Pair,
    both,
    check_drafts,
    check_failed_row,
    check_host_tier,
    check_preemptions,
    check_sleep,
    jobs,
    same,
    sampled,
)
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.exec.divisible import check_divisible
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
QUICK = {"llama", "ministral", "olmo2", "phi3"}
"""One with windows, one with norms over all heads, one with fused weights: the rest run slowly."""


@some(FAKES, QUICK)
def test_two_stages_compute_what_one_rank_does(tiny: Tiny, name: str) -> None:
    many = both(tiny(name).directory, jobs(), 1, max_num_batched_tokens=16, **STAGES)
    assert many.model.num_ranks == many.model.num_stages == 2
    stored = sum(file.stat().st_size for file in tiny(name).directory.glob("*.safetensors"))
    assert many.model.times.num_bytes < 0.9 * stored, "a stage reads its own layers"
    many.close()


@pytest.mark.parametrize(
    "settings",
    [{"native_kernels": False}, {"batch_invariant": True}, {"kv_cache_dtype": "int8"}],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_settings_of_a_worker_hold_in_all_stages(tiny: Tiny, settings: dict[str, Any]) -> None:
    both(tiny("qwen3").directory, jobs(), 1, **STAGES, **settings).close()


@pytest.mark.parametrize("name", ["llama", "ministral"])
def test_two_stages_of_two_ranks_compute_what_one_rank_does(tiny: Tiny, name: str) -> None:
    many = both(tiny(name).directory, jobs(), 2, max_num_batched_tokens=16, **STAGES)
    assert many.model.num_ranks == 4
    many.close()


def test_three_stages_compute_what_one_rank_does(tiny: Tiny) -> None:
    """With more than two lanes a stream that gives way draws its next token again."""
    many = both(tiny("llama").directory, jobs(), 1, pipeline_parallel_size=3)
    prompt = prompt_of(40, 5)
    given = [Job([*prompt, *prompt_of(3, seed)], sampled(seed)) for seed in range(8)]
    one = EngineDriver(tiny("llama").directory, cpu_threads=1)
    together = many.again(num_blocks=10).run(given)
    same(together, one.run(given))
    assert sum(each.num_preemptions for each in together) > 0
    many.close()


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> Iterator[Pair]:
    """One rank and two stages, for tests that differ by their engine; each makes its own with
    `again`, since others have written to the pool."""
    directory = tiny("llama").directory
    two = RanksDriver(directory, 1, max_num_batched_tokens=32, kv_offloading_size=0.01, **STAGES)
    one = EngineDriver(directory, cpu_threads=1, max_num_batched_tokens=32, kv_offloading_size=0.01)
    yield one, two
    two.close()


def test_steps_of_two_lanes_are_in_flight(llama: Pair) -> None:
    one, two = (each.again() for each in llama)
    seen: list[set[int]] = []

    def note(_: object) -> None:
        lanes = [each.lane for each in two._engine._in_flight]
        rows = [row for each in two._engine._in_flight for row in each.rows]
        assert len(set(lanes)) == len(lanes) <= 1
        assert len(set(rows)) == len(rows)
        seen.append(set(lanes))

    two.on_output = note  # type: ignore[assignment, method-assign]
    same(two.run(jobs()), one.run(jobs()))
    block, half = one.model.kv_bytes.block, two.model.kv_bytes.block
    assert 0 < half < block, "a stage keeps KV of its own layers"
    assert {0} in seen
    assert {1} in seen


def test_prefix_hits_and_preemptions_change_nothing(llama: Pair) -> None:
    check_preemptions(llama, prompt_of(40, 5), 10, 6)


def test_drafts_are_checked_in_all_stages(llama: Pair) -> None:
    check_drafts(llama)


def test_blocks_in_host_memory_are_parts_of_each_stage(llama: Pair) -> None:
    check_host_tier(llama)


def test_a_row_that_fails_fails_alone(llama: Pair) -> None:
    check_failed_row(llama)


@pytest.mark.parametrize("level", [1, 2])
def test_all_stages_sleep_and_wake(llama: Pair, level: int) -> None:
    check_sleep(llama[1], level)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pipeline_parallel_size": 40}, "layers are fewer than 40 stages"),
        ({"kv": {"role": "decode"}}, "where workers exchange KV"),
    ],
)
def test_what_stages_cannot_serve_is_named(
    tiny: Tiny, settings: dict[str, Any], problem: str
) -> None:
    worker = WorkerSettings.model_validate({"device": "cpu", **STAGES, **settings})
    model = ModelSettings(model=str(tiny("llama").directory))
    with pytest.raises(ConfigError, match=problem) as caught:
        check_divisible(model, worker)
    assert caught.value.param == "worker.pipeline_parallel_size"
