"""Every family of the native kind on two ranks: the tokens and numbers of one rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.drafts import FreeDrafts
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.grammars import Grammars, json_schema, make_checkpoint
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
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts

UNDIVIDED = {"llama_odd", "olmo2", "olmo3"}
"""Three heads, and norms over all heads: refused."""
FAMILIES = [name for name in FAKES if name not in UNDIVIDED]
DIVIDED = {"llama", "qwen2_window", "qwen3", "phi3", "glm4", "hunyuan", "exaone4", "seed_oss"}
"""Each is divided in a way of its own: biases, norms of heads, merged products, halves of heads."""


@some(FAMILIES, DIVIDED)
def test_two_ranks_compute_what_one_does(tiny: Tiny, name: str) -> None:
    many = both(tiny(name).directory, jobs(), max_num_batched_tokens=16)
    config = many.model.facts.config  # type: ignore[attr-defined]
    steps = many.model.group.ranks.num_sums / (2 * len(config.layers) + 1)  # type: ignore[union-attr]
    assert steps == int(steps), "two sums a layer and one of the embedding"
    many.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": False},
        {"native_kernels": False},
        {"batch_invariant": True},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_settings_of_a_worker_hold_on_all_its_ranks(tiny: Tiny, settings: dict[str, Any]) -> None:
    both(tiny("qwen3").directory, jobs(), **settings).close()


def test_four_ranks_repeat_the_heads_of_two(tiny: Tiny) -> None:
    many = both(tiny("llama").directory, jobs(), 4)
    whole = EngineDriver(tiny("llama").directory).model.kv_bytes
    assert 2 * many.model.kv_bytes.block == whole.block
    many.close()


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> Iterator[Pair]:
    """One rank and two, for tests that differ by their engine."""
    directory = tiny("llama").directory
    two = RanksDriver(directory, max_num_batched_tokens=32, kv_offloading_size=0.01)
    yield EngineDriver(directory, cpu_threads=1, max_num_batched_tokens=32), two
    two.close()


def test_prefix_hits_and_preemptions_change_nothing(llama: Pair) -> None:
    check_preemptions(llama, prompt_of(40, 5), 9)


def test_drafts_are_checked_on_all_ranks(llama: Pair) -> None:
    check_drafts(llama)


def test_eight_bits_of_kv_are_those_of_one_rank(tiny: Tiny) -> None:
    both(tiny("qwen3").directory, jobs(), kv_cache_dtype="int8").close()


def test_a_row_that_fails_fails_alone(llama: Pair) -> None:
    check_failed_row(llama)


def test_a_smaller_model_drafts_on_the_rank_that_draws(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    config = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 3}
    two = RanksDriver(directory, speculative_config=config)
    proposer = RunnerDrafts(two.model.runner, 1000, 3, FreeDrafts())
    drafting = two.again(proposer=proposer)
    same(
        drafting.run(jobs(), steps_between=2),
        EngineDriver(directory, cpu_threads=1).run(jobs(), steps_between=2),
    )
    assert drafting.drafts.accepted_tokens > 5
    two.close()


def test_blocks_in_host_memory_are_parts_of_each_rank(llama: Pair) -> None:
    check_host_tier(llama)


def test_grammars_are_followed_by_the_rank_that_draws(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    grammars = Grammars(directory)
    structured = json_schema({"type": "array", "items": {"enum": [1, True, "a"]}, "maxItems": 9})
    closing = {grammars.ids(each)[0]: 3.0 for each in "]}"}
    given = [
        Job(
            prompt_of(9, seed),
            SamplingParams(seed=seed, max_tokens=40, logit_bias=closing, structured=structured),
            grammar=grammars.compile(structured),
        )
        for seed in range(3)
    ]
    two = RanksDriver(directory)
    plain = [Job(prompt_of(9, 4), sampled(4))]
    found = two.run([*given, *plain])
    same(found, EngineDriver(directory, cpu_threads=1).run([*given, *plain]))
    texts = [grammars.text(each.token_ids) for each in found[:-1] if each.reason == "stop"]
    assert texts
    assert all(isinstance(json.loads(text), list) for text in texts)
    two.close()


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_wake(llama: Pair, level: int) -> None:
    check_sleep(llama[1], level)
