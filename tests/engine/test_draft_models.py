"""A model that drafts for another: streams are the same, token for token, however good it is."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_drafts import NUM_TOKENS, check, jobs
from tests.fakes.adapters import AdapterSpec, write_adapter
from tests.fakes.drafts import FreeDrafts
from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.grammars import Grammars, json_schema, make_checkpoint
from tests.fakes.models import make_model
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.messages.sampling import SamplingParams

K: Final = 3


def spoiled(directory: Path, to: Path, share: float) -> Path:
    """A copy whose weights differ by noise of that share of their size."""
    shutil.copytree(directory, to)
    generator = torch.Generator().manual_seed(3)
    for file in to.glob("*.safetensors"):
        tensors = {
            name: each + share * each.std() * torch.randn(each.shape, generator=generator)
            if each.dim() > 1
            else each
            for name, each in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return to


def drafting(directory: Path, model: Path, **settings: Any) -> EngineDriver:
    """An engine for the checkpoint in which the model drafts."""
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": K}
    return EngineDriver(directory, speculative_config=config, **settings)


def with_drafts(driver: EngineDriver, max_rows: int = 1000, **settings: Any) -> EngineDriver:
    """Another engine on its runner, in which drafts cost nothing."""
    proposer = RunnerDrafts(driver.model.runner, max_rows, K, FreeDrafts())
    return driver.again(proposer=proposer, **settings)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[Outcome]:
    """The outcomes of `jobs` without drafts."""
    return EngineDriver(tiny("llama").directory, max_num_seqs=9).run(jobs())


@pytest.fixture(scope="module")
def drivers(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, EngineDriver]:
    """By how good the draft is."""
    directory = tiny("llama").directory
    root = tmp_path_factory.mktemp("drafts")
    models = {
        "same": directory,
        "near": spoiled(directory, root / "near", 0.05),
        "other": tiny("qwen3").directory,
    }
    return {
        name: drafting(directory, model, max_num_seqs=9, max_num_batched_tokens=64)
        for name, model in models.items()
    }


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(("name", "low", "high"), [("same", 0.9, 1), ("near", 0.3, 0.95)])
def test_streams_are_the_same_and_a_draft_that_draws_with_their_noise_agrees(
    drivers: Mapping[str, EngineDriver],
    expected: list[Outcome],
    name: str,
    low: float,
    high: float,
    is_async: bool,
) -> None:
    driver = with_drafts(drivers[name], async_scheduling=is_async)
    check(driver.run(jobs(), steps_between=1), expected)
    totals = driver.drafts
    assert totals.draft_tokens > 300
    assert low <= totals.accepted_tokens / totals.draft_tokens <= high


def test_a_draft_of_another_architecture_changes_no_stream(
    drivers: Mapping[str, EngineDriver], expected: list[Outcome]
) -> None:
    driver = with_drafts(drivers["other"])
    check(driver.run(jobs(), steps_between=1), expected)
    assert driver.drafts.draft_tokens > 300


def test_a_stream_takes_a_fraction_of_the_steps(
    drivers: Mapping[str, EngineDriver], expected: list[Outcome]
) -> None:
    driver, steps = with_drafts(drivers["same"], async_scheduling=False), list[StepOutput]()
    driver.on_output = steps.append  # type: ignore[assignment]
    check(driver.run(jobs()[:1]), expected[:1])
    assert len(steps) <= NUM_TOKENS // (1 + K) + 3


@pytest.mark.parametrize("name", ["same", "near"])
def test_preempted_migrated_and_cached_streams_go_on_with_drafts_of_a_model(
    drivers: Mapping[str, EngineDriver], expected: list[Outcome], name: str
) -> None:
    tight = with_drafts(drivers[name], num_blocks=9, kv_watermark=0.0)
    outcomes = tight.run(jobs())
    check(outcomes, expected)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 5
    moved = [
        Job(job.prompt, job.sampling, output=outcome.token_ids[:7])
        for job, outcome in zip(jobs(), expected, strict=True)
        if len(outcome.token_ids) > 7
    ]
    wanted = [outcome.token_ids for outcome in expected if len(outcome.token_ids) > 7]
    driver = with_drafts(drivers[name])
    assert driver.tokens(moved) == wanted
    found = driver.run(moved)
    assert min(outcome.num_cached for outcome in found) >= 16
    assert [outcome.token_ids for outcome in found] == wanted


def test_the_draft_reads_the_blocks_of_a_shared_prefix(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    driver = with_drafts(drafting(directory, directory, block_size=4))
    job = Job(prompt_of(60, seed=8), greedy(40))
    rates = []
    for _ in range(2):
        before = driver.drafts
        driver.run([job])
        drafts = driver.drafts.draft_tokens - before.draft_tokens
        rates.append((driver.drafts.accepted_tokens - before.accepted_tokens) / drafts)
    assert min(rates) > 0.9


def test_with_more_streams_than_drafts_are_for_none_is_computed(
    drivers: Mapping[str, EngineDriver], expected: list[Outcome]
) -> None:
    driver = with_drafts(drivers["same"], max_rows=2)
    check(driver.run(jobs(), steps_between=3), expected)
    # the last ones ran alone, after the draft had not read most of their tokens
    assert 0 < driver.drafts.draft_tokens < 300


@pytest.mark.parametrize("pair", ["exaone4 gemma3_text", "gemma3_text qwen3", "llama deepseek_v2",
                                  "deepseek_v2 llama", "llama_odd llama_odd"])  # fmt: skip
def test_windows_and_latents_draft_and_are_drafted_for(tiny: Tiny, pair: str) -> None:
    target, draft = (tiny(name).directory for name in pair.split())
    driver = drafting(target, draft, max_num_seqs=4, block_size=4, max_model_len=100)
    some = [Job(prompt_of(length, seed=length), greedy(NUM_TOKENS)) for length in (9, 30, 37)]
    wanted = driver.run(some)
    drafted = with_drafts(driver)
    check(drafted.run(some, steps_between=2), wanted)
    assert drafted.drafts.draft_tokens > 20


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}],
    ids=["int8 pages", "fp8 pages", "int8 weights"],
)
def test_quantized_models_are_drafted_for(tiny: Tiny, settings: dict[str, Any]) -> None:
    directory = tiny("llama").directory
    driver = drafting(directory, directory, max_num_seqs=9, **settings)
    wanted = driver.run(jobs()[:9])
    drafted = with_drafts(driver)
    check(drafted.run(jobs()[:9], steps_between=1), wanted)
    assert drafted.drafts.accepted_tokens > 50


def test_a_stream_with_an_adapter_is_drafted_for_without_it(tiny: Tiny, tmp_path: Path) -> None:
    path = write_adapter(make_model("llama"), tmp_path / "adapter", AdapterSpec(seed=1, size=0.1))
    lora = {"enable_lora": True, "max_lora_rank": 16}
    directory = tiny("llama").directory
    driver = drafting(directory, directory, lora=lora)
    read = driver.model.adapters.read(path)
    some = [Job(prompt_of(20, seed=n), greedy(NUM_TOKENS), adapter=read) for n in range(3)]
    wanted = driver.run(some)
    drafted = with_drafts(driver)
    check(drafted.run(some), wanted)
    assert 0 < drafted.drafts.accepted_tokens < drafted.drafts.draft_tokens


def test_a_grammar_is_followed_through_drafts_of_a_model(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path)
    structured = json_schema({"type": "array", "items": {"enum": ["a", 5, None]}, "maxItems": 9})
    grammar = Grammars(checkpoint).compile(structured)
    some = [
        Job(
            prompt_of(5 + seed, seed),
            SamplingParams(seed=seed, max_tokens=30, structured=structured),
            grammar=grammar,
        )
        for seed in range(6)
    ]
    driver = drafting(checkpoint, checkpoint, max_num_seqs=4)
    wanted = driver.run(some)
    drafted = with_drafts(driver)
    check(drafted.run(some), wanted)
    assert drafted.drafts.accepted_tokens > 10


def test_streams_beyond_the_drafts_own_length_go_on_without_it(tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny("llama").directory
    short = shutil.copytree(directory, tmp_path / "short")
    text = (short / "config.json").read_text()
    positions = '"max_position_embeddings": 256'
    assert positions in text
    (short / "config.json").write_text(text.replace(positions, '"max_position_embeddings": 64'))
    driver = drafting(directory, short)
    some = [Job(prompt_of(50, seed=1), greedy(60)), Job(prompt_of(90, seed=2), greedy(60))]
    wanted = driver.run(some)
    drafted = with_drafts(driver)
    check(drafted.run(some), wanted)
    assert 5 < drafted.drafts.draft_tokens < 20


def test_blocks_and_memory_count_what_the_draft_keeps(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    plain = EngineDriver(directory).model.kv_bytes.block
    assert drafting(directory, directory).model.kv_bytes.block == 2 * plain
    windowed = EngineDriver(tiny("gemma3_text").directory).model
    num_groups = len(windowed.runner.windows)
    assert num_groups > 1
    both = drafting(directory, tiny("gemma3_text").directory).model.kv_bytes.block
    assert both == plain + num_groups * windowed.kv_bytes.block


def test_a_draft_sleeps_and_wakes_with_its_model(
    drivers: Mapping[str, EngineDriver], expected: list[Outcome], tiny: Tiny
) -> None:
    directory = tiny("llama").directory
    driver = with_drafts(drafting(directory, directory, max_num_seqs=9))
    alone = EngineDriver(directory, max_num_seqs=9)
    for level in (1, 2):
        assert driver.sleep(level) == 2 * alone.sleep(level)
        driver.model.resident.wake(("weights", "kv_cache"))
        alone.model.resident.wake(("weights", "kv_cache"))
        before = driver.drafts.accepted_tokens
        check(driver.run(jobs()), expected)
        assert driver.drafts.accepted_tokens > before + 200


def test_what_cannot_draft_is_refused_at_the_start(tiny: Tiny, tmp_path: Path) -> None:
    directory = tiny("llama").directory
    for name, problem in (
        ("llama_odd", "has a vocabulary of 101 tokens, and that of .* has 160"),
        ("bamba", "keeps states, which cannot follow drafts"),
    ):
        with pytest.raises(ConfigError, match=problem):
            drafting(directory, tiny(name).directory)


def test_a_draft_with_another_tokenizer_is_refused_at_the_start(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    make_checkpoint(first)
    second = shutil.copytree(first, tmp_path / "second")
    file = second / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"changed":', 1))
    drafting(first, shutil.copytree(first, tmp_path / "same"))
    with pytest.raises(ConfigError, match="has another tokenizer than"):
        drafting(first, second)
