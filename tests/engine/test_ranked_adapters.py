"""Adapters of models on several ranks: streams and numbers of one rank, read by all or by none."""

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engine.test_adapters import LORA, SPECS, TREES
from tests.fakes.adapters import AdapterSpec, write_adapter
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.general_models import make_general
from tests.fakes.models import make_model
from tests.fakes.rank_runs import same, sampled
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.engine.adapters.read import AdapterReader
from tokenmesh.shared.errors import InvalidInput, Unavailable

Read = Callable[[AdapterReader, Path], ReadAdapter]


def adapted(driver: EngineDriver, paths: list[Path]) -> list[Job]:
    """Streams of each adapter and of none in one batch."""
    prompt, jobs = prompt_of(23), [Job(prompt_of(9, 2), sampled(1, logprobs=3))]
    for seed, path in enumerate(paths):
        read = driver.model.adapters.read(path)
        jobs.append(Job(prompt, sampled(seed, logprobs=3, prompt_logprobs=1), adapter=read))
    return jobs


def compare(
    directory: Path, paths: list[Path], world: int = 2, lora: Any = LORA, **settings: Any
) -> None:
    one = EngineDriver(directory, lora=lora, cpu_threads=1, max_num_batched_tokens=16)
    many = RanksDriver(directory, world, lora=lora, max_num_batched_tokens=16, **settings)
    jobs, expected = adapted(many, paths), adapted(one, paths)
    hashes = [
        [each.adapter and each.adapter.content_hash for each in js] for js in (jobs, expected)
    ]
    assert hashes[0] == hashes[1], "the hash is of the whole adapter"
    found = many.run(jobs, steps_between=1)
    same(found, one.run(expected, steps_between=1))
    plain = one.run([replace(each, adapter=None) for each in expected])
    assert [each.token_ids for each in found[1:]] != [each.token_ids for each in plain[1:]]
    many.close()


WAYS: Final[dict[str, tuple[str, int, dict[str, Any]]]] = {
    "merged-weights": ("phi3", 2, {}),
    "torch": ("llama", 2, {"native_kernels": False}),
    "repeated-heads": ("llama", 4, {}),
    "stages": ("llama", 2, {"pipeline_parallel_size": 2}),
    "norms-of-heads": ("qwen3", 2, {}),
    "promoted-tree": ("qwen3", 2, {"model_impl": "transformers"}),
    "plain-tree": ("llama", 2, {"model_impl": "transformers", "native_kernels": False}),
}


@some(WAYS, {"merged-weights", "repeated-heads", "stages", "promoted-tree"})
def test_every_target_changes_what_it_does_on_one_rank(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    family, world, settings = WAYS[name]
    paths = [
        write_adapter(make_model(family), tmp_path / str(number), spec)
        for number, spec in enumerate(SPECS[family])
    ]
    compare(tiny(family).directory, paths, world, **settings)


@some(TREES, {"deepseek_v3", "qwen3_moe"})
def test_modules_and_experts_of_trees_are_divided(tiny: Tiny, tmp_path: Path, name: str) -> None:
    spec, _ = TREES[name]
    paths = [write_adapter(make_general(name), tmp_path / "a", spec)]
    compare(tiny(name).directory, paths)


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_each_rank_adapts_the_experts_that_it_has(tiny: Tiny, tmp_path: Path, name: str) -> None:
    spec, _ = TREES[name]
    paths = [write_adapter(make_general(name), tmp_path / "a", spec)]
    compare(tiny(name).directory, paths, enable_expert_parallel=True)


def on_followers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Read], Read]) -> None:
    """Let followers read adapters otherwise than the leader does."""
    read = AdapterReader.read
    changed = change(read)

    def chosen(self: AdapterReader, directory: Path) -> ReadAdapter:
        is_follower = threading.current_thread().name == "rank-adapters"
        return (changed if is_follower else read)(self, directory)

    monkeypatch.setattr(AdapterReader, "read", chosen)


def missing(_: Read) -> Read:
    def read(_reader: AdapterReader, _directory: Path) -> ReadAdapter:
        raise InvalidInput("the adapter holds no weights", param="lora_path")

    return read


def other_content(read: Read) -> Read:
    return lambda reader, directory: replace(read(reader, directory), content_hash="other")


@pytest.mark.parametrize(
    ("change", "problem"),
    [(missing, "the adapter holds no weights"), (other_content, "another content")],
)
def test_an_adapter_that_one_rank_cannot_read_is_loaded_on_none(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Read], Read],
    problem: str,
) -> None:
    path = write_adapter(make_model("llama"), tmp_path / "a")
    two = RanksDriver(tiny("llama").directory, lora=LORA)
    with monkeypatch.context() as within:
        on_followers(within, change)
        with pytest.raises(Unavailable, match=f"rank 1 cannot read the adapter: .*{problem}"):
            two.model.adapters.read(path)
    with pytest.raises(InvalidInput, match="an adapter holds adapter_config"):
        two.model.adapters.read(tmp_path)
    (outcome,) = two.run(adapted(two, [path])[1:])
    assert outcome.error is None, "the next one is read"
    two.close()


def test_all_ranks_give_up_the_matrices_that_nobody_uses(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Any]] = []

    def noting(read: Read) -> Read:
        def noted(reader: AdapterReader, directory: Path) -> ReadAdapter:
            found = read(reader, directory)
            kept.append(weakref.ref(found.matrices))
            return found

        return noted

    on_followers(monkeypatch, noting)
    paths = [
        write_adapter(make_model("llama"), tmp_path / str(seed), AdapterSpec(seed=seed))
        for seed in range(3)
    ]
    two = RanksDriver(tiny("llama").directory, lora=LORA)
    used = two.model.adapters.read(paths[0])
    two.run(adapted(two, paths))
    two.run([Job(prompt_of(5), sampled(1)) for _ in range(8)])  # other requests have the rows

    while sum(each() is not None for each in kept) > 1:
        gc.collect()
        threading.Event().wait(0.02)
    (outcome,) = two.run([Job(prompt_of(5), sampled(2), adapter=used)])
    assert outcome.error is None
    two.close()
