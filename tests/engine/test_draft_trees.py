"""Drafts that branch: a step draws what it draws with each chain of them alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.engine.test_draft_models import spoiled, with_drafts
from tests.engine.test_drafts import check, jobs
from tests.engine.test_eagle_heads import HEADS, driver_of, noted
from tests.fakes.drafts import FreeDrafts
from tests.fakes.eagle import make_head
from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.tiny import Tiny
from tests.ops.native import needs_native
from tokenmesh.engine.exec.branches import Branches
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.config.draft_tree import DraftTree, chains_of
from tokenmesh.shared.errors import ConfigError

TEXT: Final = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"
TREE: Final = DraftTree.of(TEXT)
VOCAB: Final = 100


class OneChain(RunnerDrafts):
    """Knows what streams draw, and puts that into a chain of the tree, for some tokens."""

    def __init__(
        self, driver: EngineDriver, output_of: Callable[[Request], list[int]], chain: int
    ) -> None:
        """chain: -1: another one in each step."""
        super().__init__(driver.model.runner, 1000, len(TREE.paths), FreeDrafts(), TREE)
        self._output_of = output_of
        self._chain = chain
        self._rng = Random(3)

    def ask(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[int]:
        return [0] * len(rows)

    def propose(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[list[int]]:
        return [self._of(request)[:limit] for request, limit in rows]

    def _of(self, request: Request) -> list[int]:
        drafts = [self._rng.randrange(VOCAB) for _ in TREE.paths]
        chains = chains_of(TREE.parents)
        chain = self._chain if self._chain >= 0 else self._rng.randrange(len(chains))
        coming = self._output_of(request)[request.num_known - request.num_prompt :]
        right = self._rng.choice([1, 2, 3, 3, 3])
        for place, token in zip(chains[chain][:right], coming, strict=False):
            drafts[place] = token
        return drafts


def settled(driver: EngineDriver) -> list[int]:
    """Notes the rows that follow another chain than their first one."""
    runner = driver.model.runner
    assert isinstance(runner, TorchRunner)
    branches: Any = runner._branches
    found: list[int] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(branches, name)

        def settle(self, tokens: Mapping[int, list[int]]) -> dict[int, int]:
            taken = Branches.settle(branches, tokens)
            found.extend(taken)
            return taken

    runner._branches = Noting()  # type: ignore[assignment]
    return found


def outputs_of(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> Callable[[Request], list[int]]:
    outputs = {
        (*job.prompt, job.sampling.seed): outcome.token_ids
        for job, outcome in zip(jobs, outcomes, strict=True)
    }
    return lambda request: outputs[
        *request.token_ids[: request.num_prompt], request.spec.sampling.seed
    ]


def with_tree(directory: Path, draft: Path, **settings: Any) -> EngineDriver:
    config = {"model": str(draft), "speculative_token_tree": TEXT}
    settings = {"max_num_seqs": 9, "block_size": 4, "num_gpu_blocks_override": 512, **settings}
    return EngineDriver(directory, speculative_config=config, **settings)


KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "dense": ("llama", {}),
    "module tree": ("llama", {"model_impl": "transformers"}),
    "latents": ("deepseek_v2", {}),
    "experts": ("qwen3_moe", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "8-bit pages": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
}


@needs_native
@pytest.mark.timeout(90)  # kernels of latents without a program
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=() if each == "dense" else pytest.mark.slow) for each in KINDS],
)
def test_a_stream_goes_on_whichever_chain_it_follows(tiny: Tiny, kind: str) -> None:
    name, settings = KINDS[kind]
    directory = tiny(name).directory
    driver = with_tree(directory, tiny("llama").directory, **settings)
    some = jobs()
    expected = driver.run(some)
    followed = settled(driver)
    num_chains = len(chains_of(TREE.parents))
    for chain in (*range(num_chains), -1) if kind == "dense" else (0, num_chains - 1, -1):
        before = len(followed)
        proposer = OneChain(driver, outputs_of(some, expected), chain)
        drafting = driver.again(proposer=proposer, async_scheduling=chain % 2 == 0)
        check(drafting.run(some, steps_between=1), expected)
        totals = drafting.drafts
        assert totals.accepted_tokens > 150
        assert totals.accepted_tokens == sum(totals.accepted_by_place)
        assert (len(followed) - before > 50) == (chain != 0)


@pytest.mark.parametrize("is_tight", [False, True], ids=["", "tight"])
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_streams_are_the_same_with_a_tree_of_drafts(
    tiny: Tiny, tmp_path: Path, kind: str, is_tight: bool
) -> None:
    directory = tiny("llama").directory
    expected = EngineDriver(directory, max_num_seqs=9).run(jobs())
    if kind == "model":
        draft = spoiled(directory, tmp_path / "near", 0.1)
        driver = with_tree(directory, draft, max_num_batched_tokens=64)
    else:
        head = make_head(tmp_path / "head", **HEADS["eagle3"])
        config = {"method": "eagle3", "model": str(head.directory), "speculative_token_tree": TEXT}
        driver = EngineDriver(
            directory, speculative_config=config, max_num_seqs=9, max_num_batched_tokens=64
        )
    followed = settled(driver)
    proposer = RunnerDrafts(
        driver.model.runner, 1000, len(TREE.paths), FreeDrafts(), tree=DraftTree.of(TEXT)
    )
    blocks: dict[str, Any] = {"num_blocks": 50 if kind == "model" else 9, "kv_watermark": 0.0}
    drafted = driver.again(proposer=proposer, **(blocks if is_tight else {}))
    outcomes = drafted.run(jobs(), steps_between=1)
    check(outcomes, expected)
    totals = drafted.drafts
    assert totals.draft_tokens > 300
    assert not is_tight or sum(outcome.num_preemptions for outcome in outcomes) > 3
    assert kind != "model" or len(followed) > 20


def test_a_tree_for_one_head_drafts_what_each_of_its_chains_does(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The likeliest chain is the one that the head drafts without a tree."""
    directory = tiny("llama").directory
    head = make_head(tmp_path / "head", **HEADS["eagle3"])
    job = jobs()[0]
    chain = noted(with_drafts(driver_of(directory, head), async_scheduling=False), job)
    config = {"method": "eagle3", "model": str(head.directory), "speculative_token_tree": TEXT}
    driver = EngineDriver(directory, speculative_config=config, max_num_seqs=9)
    proposer = RunnerDrafts(driver.model.runner, 1000, len(TREE.paths), FreeDrafts(), tree=TREE)
    tree = noted(driver.again(proposer=proposer, async_scheduling=False), job)
    known = {tuple(tokens): drafts for tokens, drafts in tree}
    compared = 0
    for tokens, drafts in chain:
        others = known.get(tuple(tokens))
        if others is not None and len(drafts) == 3 and len(others) == len(TREE.paths):
            assert [others[n] for n in (0, 3, 6)] == drafts
            assert len({*others[:3]}) == 3
            compared += 1
    assert compared > 3


def test_models_whose_drafts_cannot_branch_are_refused_at_the_start(tiny: Tiny) -> None:
    draft = tiny("llama").directory
    with pytest.raises(ConfigError, match="for models without states"):
        with_tree(tiny("bamba").directory, draft)
    with pytest.raises(ConfigError, match="for models without windows"):
        with_tree(tiny("gemma3_text").directory, draft)
