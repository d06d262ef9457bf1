"""Heads that draft for models on several ranks: drafts of one rank, and streams without drafts."""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.engine.test_draft_models import with_drafts
from tests.engine.test_eagle_heads import HEADS, noted
from tests.fakes.eagle import make_head
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.mtp import PREDICTORS, make_predictor
from tests.fakes.rank_runs import jobs, same, sampled
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.exec.runner import TorchRunner

K: Final = 3
UNDIVIDED: Final = {"glm_moe_dsa"}
"""Families of which no test has compared parts; they are refused by name."""
TREE: Final = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"


def given() -> list[Job]:
    """More streams than `jobs`, of which some end while others draft."""
    others = [Job(prompt_of(7 + 9 * seed, seed), sampled(seed, max_tokens=24)) for seed in range(3)]
    return [*jobs(), *others, Job(prompt_of(30, 8), greedy(40))]


def compare(
    directory: Path, config: dict[str, Any], world: int = 2, drafts: int = 40, **settings: Any
) -> None:
    """Streams are those of one rank without drafts; drafts are those of one rank."""
    with_head = {"speculative_config": config, "max_num_batched_tokens": 16, **settings}
    plain = EngineDriver(directory, cpu_threads=1, max_num_batched_tokens=16, **settings)
    many = RanksDriver(directory, world, **with_head)
    drafted = with_drafts(many)
    same(drafted.run(given(), steps_between=1), plain.run(given(), steps_between=1))
    assert drafted.drafts.draft_tokens > drafts
    one = with_drafts(EngineDriver(directory, cpu_threads=1, **with_head), async_scheduling=False)
    job, again = Job(prompt_of(37, seed=5), greedy(12)), with_drafts(many, async_scheduling=False)
    expected = noted(one, job)
    assert noted(again, job) == expected
    assert sum(len(each) for _, each in expected) > 10
    assert many.sleep(2) > 0
    many.model.resident.wake(["weights", "kv_cache"])
    assert noted(with_drafts(many, async_scheduling=False), job) == expected
    assert not many.followers.ends
    many.close()


WAYS: Final[dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]]] = {
    "eagle": ("eagle", 2, {}, {}),
    "eagle3": ("eagle3", 2, {}, {}),
    "own-embedding": ("own embedding", 2, {}, {}),
    "repeated-heads": ("some tokens", 4, {}, {}),
    "branches": ("eagle3", 2, {"speculative_token_tree": TREE}, {}),
    "torch": ("two states", 2, {}, {"native_kernels": False}),
    "tree": ("eagle3", 2, {}, {"model_impl": "transformers"}),
    "rounded": ("eagle", 2, {}, {"quantization": "int8"}),
}


@some(WAYS, {"eagle", "eagle3", "branches", "tree"})
def test_a_head_on_the_leader_reads_what_all_ranks_compute(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    kind, world, config, settings = WAYS[name]
    head = make_head(tmp_path / "head", **HEADS[kind])
    given = {"method": head.kind, "model": str(head.directory), "num_speculative_tokens": K}
    if config:
        given["num_speculative_tokens"] = 5
    compare(tiny("llama").directory, {**given, **config}, world, **settings)


@pytest.mark.timeout(120)  # the kernels of gated delta are compiled
@some(sorted({*PREDICTORS} - UNDIVIDED), {"deepseek_v3", "exaone_moe", "qwen3_next"})
def test_a_layer_of_a_divided_model_drafts_on_the_leader(tmp_path: Path, name: str) -> None:
    made = make_predictor(tmp_path, name)
    config = {"method": "mtp", "num_speculative_tokens": K}
    compare(made.directory, config, drafts=10)


def test_only_the_leader_has_the_head(tiny: Tiny, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", **HEADS["eagle3"])
    config = {"method": "eagle3", "model": str(head.directory), "num_speculative_tokens": K}
    two = RanksDriver(tiny("llama").directory, speculative_config=config)
    runner = two.model.runner
    assert isinstance(runner, TorchRunner)
    assert runner.drafter is not None
    ends: Any = runner.drafter.model
    assert not hasattr(ends.target, "embedding"), "a head finds no part of a weight"
    two.close()
