"""Every proposer with every kind of model, whatever happens to streams: they stay the same."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from tests.engine.test_drafts import proposer_of
from tests.engine.test_llava import job_of
from tests.fakes.drafts import FreeDrafts
from tests.fakes.eagle import make_head
from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.llava import llava
from tests.fakes.models import randomized
from tests.fakes.tiny import Tiny, prompt_of
from tests.ops.native import needs_native
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.speculate.lookup import LookupProposer
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.config.model import Dtype
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.messages.sampling import SamplingParams

NUM_TOKENS: Final = 24
FAMILIES: Final = {
    "dense": "llama",
    "experts": "qwen3_moe",
    "latents": "deepseek_v2",
    "windows": "gemma3_text",
    "gated delta": "qwen3_next",
    "mamba2": "bamba",
    "short convolutions": "lfm2",
}
EQUAL: Final = ("dense", "experts", "windows")
"""The C kernels compute these to the last bit in batches of any size, in bfloat16 as well."""
OWN: Final = ("dice", "model")
LOOKUPS: Final = ("ngram", "suffix", "prediction")
PROPOSERS: Final = (*LOOKUPS, *OWN)
TROUBLES: Final[dict[str, Any]] = {
    "max_num_seqs": 8,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 19,
    "kv_watermark": 0.0,
}
"""Prompts in chunks, streams that are preempted."""


def jobs() -> list[Job]:
    """Sampled and greedy, of few tokens and of many; half of them begin alike."""
    made = []
    for number in range(8):
        prompt = prompt_of(21, seed=number % 2) + prompt_of(3 + number, seed=number)
        fields: dict[str, Any] = {"temperature": 0.0} if number % 3 == 0 else {"top_p": 0.9}
        if number % 4 == 1:
            fields["allowed_token_ids"] = [5, 6, 7]
        sampling = SamplingParams(seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
        made.append(Job(prompt, sampling))
    return made


def named(
    name: str, driver: EngineDriver, some: Sequence[Job], outcomes: Sequence[Outcome]
) -> Proposer:
    if name == "dice":
        return proposer_of(some, outcomes, share_wrong=0.4)
    if name == "model":
        return RunnerDrafts(driver.model.runner, 1000, 3, FreeDrafts())
    fields: dict[str, Any] = {"method": name, "num_speculative_tokens": 6}
    if name == "ngram":
        fields |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    config = SpeculativeConfig.model_validate({} if name == "prediction" else fields)
    proposer = LookupProposer(config)
    proposer._cost = FreeDrafts()
    return proposer


def check_all(
    driver: EngineDriver,
    some: Sequence[Job],
    num_blocks: int,
    proposers: Sequence[str] = PROPOSERS,
    least_accepted: int = 10,
) -> None:
    """Streams that are preempted, that find their prompts cached, and that moved here after any of
    their tokens, with the drafts of each proposer."""
    expected = driver.again(max_num_batched_tokens=512).run(some)
    rng = Random(3)
    for name in proposers:
        proposer = named(name, driver, some, expected)
        drafting = driver.again(num_blocks=num_blocks, proposer=proposer)
        given = list(some)
        if name == "prediction":
            given = [
                replace(job, prediction=[*outcome.token_ids[:9], 4, *outcome.token_ids[12:]])
                for job, outcome in zip(some, expected, strict=True)
            ]
        outcomes = drafting.run(given)
        moved = [
            replace(job, output=outcome.token_ids[: rng.randrange(1, NUM_TOKENS)])
            for job, outcome in zip(given, expected, strict=True)
        ]
        later = drafting.run(moved, steps_between=2)
        for found in (outcomes, later):
            assert [each.error for each in found] == [None] * len(some), name
            assert [each.token_ids for each in found] == [each.token_ids for each in expected], name
        # blocks behind a window are free: so small a pool has neither too few nor old ones
        runner = driver.model.runner
        if len(runner.windows) == 1 and not runner.has_states:
            assert sum(each.num_preemptions for each in outcomes + later) > 0, name
            assert sum(each.num_cached for each in outcomes + later) > 0, name
        totals = drafting.drafts
        assert totals.accepted_tokens > least_accepted, name
        assert totals.draft_tokens > totals.accepted_tokens, name


def slow_but(each: str, kept: str) -> Any:
    return pytest.param(each, id=each, marks=() if each == kept else pytest.mark.slow)


def blocks_of(family: str) -> int:
    """So few that streams are preempted."""
    return 70 if family == "windows" else 34


@pytest.mark.timeout(60)  # the kernels of gated delta are compiled
@pytest.mark.parametrize(
    ("family", "proposers"),
    [
        # what looks drafts up knows nothing of layers: one family shows it
        *(pytest.param(each, PROPOSERS if each == "dense" else OWN, id=each) for each in FAMILIES),
        *(
            pytest.param(each, LOOKUPS, id=f"{each}-lookups", marks=pytest.mark.slow)
            for each in FAMILIES
            if each != "dense"
        ),
    ],
)
def test_streams_of_a_family_are_the_same_with_every_proposer(
    tiny: Tiny, family: str, proposers: Sequence[str]
) -> None:
    config = {"method": "draft_model", "model": str(tiny("qwen3").directory)}
    directory = tiny(FAMILIES[family]).directory
    driver = EngineDriver(directory, speculative_config=config, **TROUBLES)
    check_all(driver, jobs(), blocks_of(family), proposers)


@needs_native
@pytest.mark.timeout(60)  # as above
@pytest.mark.parametrize("family", [slow_but(each, "dense") for each in EQUAL])
def test_streams_in_bfloat16_are_the_same_with_every_proposer(tiny: Tiny, family: str) -> None:
    directory = tiny(FAMILIES[family]).directory
    config = {"method": "draft_model", "model": str(tiny("qwen3").directory)}
    driver = EngineDriver(directory, dtype="bfloat16", speculative_config=config, **TROUBLES)
    check_all(driver, jobs(), num_blocks=blocks_of(family), least_accepted=5)


def head_of(directory: Path, to: Path, method: Literal["eagle", "eagle3"]) -> dict[str, Any]:
    """Write a head for a checkpoint; the config with which it drafts."""
    raw = json.loads((directory / "config.json").read_text())
    text = {**raw, **raw.get("text_config", {})}
    head = make_head(
        to,
        method,
        hidden_size=text["hidden_size"],
        target_hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        taps=(0, 1),
    )
    return {"method": method, "model": str(head.directory), "num_speculative_tokens": 3}


HEADED: Final = [
    *(("eagle", family, "float32") for family in FAMILIES),
    *(("eagle3", family, "float32") for family in ("dense", "experts", "gated delta")),
    *(("eagle3", "dense", "bfloat16"), ("eagle", "windows", "bfloat16")),
]
"""EAGLE-3 has heads for these of the families only."""


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(60)  # as above
@pytest.mark.parametrize(("method", "family", "dtype"), HEADED)
def test_streams_of_a_family_are_the_same_with_a_head(
    tiny: Tiny, tmp_path: Path, method: Literal["eagle", "eagle3"], family: str, dtype: Dtype
) -> None:
    directory = tiny(FAMILIES[family]).directory
    config = head_of(directory, tmp_path / "head", method)
    driver = EngineDriver(directory, dtype=dtype, speculative_config=config, **TROUBLES)
    check_all(driver, jobs(), blocks_of(family), ["model"], least_accepted=2)


@pytest.mark.parametrize("method", ["", pytest.param("eagle", marks=pytest.mark.slow)])
def test_streams_with_images_are_the_same_with_every_proposer(
    tmp_path: Path, method: Literal["", "eagle"]
) -> None:
    directory = llava(tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    randomized(model).save_pretrained(directory)
    some = []
    for seed, images in enumerate(([1], [2, 3], [], [1])):
        allowed = [5, 6, 7] if seed == 2 else None
        sampling = SamplingParams(
            seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=allowed
        )
        some.append(replace(job_of(model, images, seed), sampling=sampling))
    troubles = {**TROUBLES, "max_model_len": 160, "max_num_batched_tokens": 40}
    config = head_of(directory, tmp_path / "head", method) if method else {}
    driver = EngineDriver(directory, speculative_config=config, **troubles)
    proposers, least = (["model"], 2) if method else (PROPOSERS[:-1], 10)
    check_all(driver, some, 50, proposers, least)
