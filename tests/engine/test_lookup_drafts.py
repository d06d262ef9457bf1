"""Drafts that are looked up, on the torch runner: streams are the same, token for token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_drafts import NUM_TOKENS, check, jobs
from tests.fakes.drafts import FreeDrafts
from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.grammars import Grammars, json_schema, make_checkpoint
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.lookup import LookupProposer
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.messages.sampling import SamplingParams

METHODS = ["ngram", "suffix"]


def proposer_of(method: str, **given: Any) -> LookupProposer:
    """It drafts whatever it finds; one token that is the same is enough."""
    config = {"method": method, "prompt_lookup_min": 1, "prompt_lookup_max": 3, **given}
    proposer = LookupProposer(SpeculativeConfig.model_validate(config))
    proposer._cost = FreeDrafts()
    return proposer


def repeated() -> list[Job]:
    """Streams of so few tokens that what followed them earlier often follows again."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.7, "logprobs": 2}]
    kinds += [{"presence_penalty": 1.0}, {"n_tokens": 1}, {"bad_words_ids": [[5, 6, 5, 6]]}]
    made = []
    for number, parameters in enumerate(kinds):
        allowed = [5, 6, 7][: parameters.pop("n_tokens", 3)]
        fields = {"seed": number, "max_tokens": 2 * NUM_TOKENS, "ignore_eos": True, **parameters}
        sampling = SamplingParams(allowed_token_ids=allowed, **fields)
        made.append(Job(prompt_of(20, seed=number), sampling))
    return made


@pytest.fixture(scope="module")
def made(tiny: Tiny) -> tuple[EngineDriver, list[Outcome]]:
    """An engine, and what it makes of `jobs` without drafts."""
    driver = EngineDriver(tiny("llama").directory, max_num_seqs=9)
    return driver, driver.run([*jobs(), *repeated()])


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("method", METHODS)
def test_streams_are_the_same_with_drafts_that_are_looked_up(
    made: tuple[EngineDriver, list[Outcome]], method: str, is_async: bool
) -> None:
    driver, expected = made
    drafting = driver.again(proposer=proposer_of(method), async_scheduling=is_async)
    # in the second run all outputs are known to the tenant
    for _ in range(2):
        check(drafting.run([*jobs(), *repeated()], steps_between=1), expected)
    totals = drafting.drafts
    assert totals.draft_tokens > 100
    assert totals.accepted_tokens > (300 if method == "suffix" else 60)
    assert sum(totals.accepted_by_place) == totals.accepted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_preempted_and_migrated_streams_go_on_with_drafts_that_are_looked_up(
    made: tuple[EngineDriver, list[Outcome]], method: str
) -> None:
    driver, expected = made
    tight = driver.again(num_blocks=9, proposer=proposer_of(method), kv_watermark=0.0)
    outcomes = tight.run([*jobs(), *repeated()])
    check(outcomes, expected)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 5
    moved = [
        Job(job.prompt, job.sampling, output=outcome.token_ids[:7])
        for job, outcome in zip([*jobs(), *repeated()], expected, strict=True)
        if len(outcome.token_ids) > 7
    ]
    wanted = [outcome.token_ids for outcome in expected if len(outcome.token_ids) > 7]
    assert driver.again(proposer=proposer_of(method)).tokens(moved) == wanted


def test_a_stream_that_repeats_itself_takes_a_fraction_of_the_steps(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory, max_num_seqs=2, async_scheduling=False)
    looping = Job(
        prompt_of(30, seed=4), SamplingParams(seed=1, max_tokens=120, allowed_token_ids=[9])
    )
    expected = driver.run([looping])
    drafting = driver.again(proposer=proposer_of("ngram", num_speculative_tokens=12))
    steps: list[StepOutput] = []
    drafting.on_output = steps.append  # type: ignore[assignment]
    check(drafting.run([looping]), expected)
    assert len(steps) < 20


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["exaone4", "phi3_longrope", "gemma3_text", "deepseek_v2"])
def test_windows_boundaries_and_latents_take_drafts_that_are_looked_up(
    tiny: Tiny, name: str, method: str
) -> None:
    driver = EngineDriver(tiny(name).directory, max_num_seqs=4, block_size=4, max_model_len=100)
    some = [Job(prompt_of(length, seed=length), greedy(NUM_TOKENS)) for length in (9, 30, 37)]
    expected = driver.run(some)
    drafting = driver.again(proposer=proposer_of(method))
    check(drafting.run(some, steps_between=2), expected)
    check(drafting.run(some, steps_between=2), expected)
    assert drafting.drafts.draft_tokens > 20


@pytest.fixture(scope="module")
def grammar_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lookups"))


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_is_followed_through_drafts_that_are_looked_up(
    grammar_checkpoint: Path, method: str
) -> None:
    grammars = Grammars(grammar_checkpoint)
    structured = json_schema({"type": "array", "items": {"enum": ["a", 5, None]}, "maxItems": 9})
    grammar = grammars.compile(structured)
    some = [
        Job(
            prompt_of(5 + seed, seed),
            SamplingParams(seed=seed, max_tokens=30, structured=structured),
            grammar=grammar,
        )
        for seed in range(6)
    ]
    driver = EngineDriver(grammar_checkpoint, max_num_seqs=4)
    expected = driver.run(some)
    drafting = driver.again(proposer=proposer_of(method))
    check(drafting.run(some), expected)
    check(drafting.run(some), expected)
    assert drafting.drafts.draft_tokens > 10


def test_a_tenants_texts_are_looked_up_by_its_own_streams_only(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory, max_num_seqs=2, async_scheduling=False)
    proposer = proposer_of("suffix", suffix_decoding_max_tree_depth=8)
    driver = driver.again(proposer=proposer)
    job = Job(prompt_of(12, seed=4), SamplingParams(seed=3, max_tokens=40, ignore_eos=True))
    driver.owner = "one"
    driver.run([job])
    accepted = []
    for owner, salt in (("other", None), ("one", "salt"), ("one", None)):
        before = driver.drafts.accepted_tokens
        driver.owner, driver.salt = owner, salt
        driver.run([job])
        accepted.append(driver.drafts.accepted_tokens - before)
    assert max(accepted[:2]) < 10
    assert accepted[2] > 25


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_kept_of_streams_that_ended_but_what_their_tenant_may_look_up(
    made: tuple[EngineDriver, list[Outcome]], method: str
) -> None:
    driver, expected = made
    proposer = proposer_of(method, suffix_decoding_max_cached_requests=0)
    sizes = []
    drafting = driver.again(proposer=proposer)
    drafting.on_output = lambda output: sizes.append(output.stats.draft_bytes)  # type: ignore[method-assign]
    check(drafting.run([*jobs(), *repeated()]), expected)
    assert max(sizes) > 10_000
    assert (sizes[-1], proposer.num_bytes) == (0, 0)


def predicted(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Job]:
    """Each with a prediction of its output in which some is missing, some wrong and some added."""
    made = []
    for number, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True)):
        ids = list(outcome.token_ids)
        ids[3:4] = [[], [ids[3] + 1], [4, ids[3], 8], ids[3:4]][number % 4]
        made.append(replace(job, prediction=ids if number % 5 else ids[::-1]))
    return made


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_streams_are_the_same_with_predictions(
    made: tuple[EngineDriver, list[Outcome]], method: str | None, is_async: bool
) -> None:
    driver, expected = made
    all_jobs = [*jobs(), *repeated()]
    config = {"method": method} if method else {}
    proposer = LookupProposer(SpeculativeConfig.model_validate(config))
    proposer._cost = FreeDrafts()
    drafting = driver.again(proposer=proposer, async_scheduling=is_async)
    check(drafting.run(predicted(all_jobs, expected), steps_between=1), expected)
    assert drafting.drafts.accepted_tokens > 150
    assert proposer.num_bytes == 0 or method == "suffix"


def test_preempted_and_migrated_streams_go_on_with_their_predictions(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, expected = made
    some = predicted([*jobs(), *repeated()], expected)
    proposer = LookupProposer(SpeculativeConfig())
    proposer._cost = FreeDrafts()
    tight = driver.again(num_blocks=9, proposer=proposer, kv_watermark=0.0)
    outcomes = tight.run(some)
    check(outcomes, expected)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 5
    moved = [
        replace(job, output=outcome.token_ids[:7])
        for job, outcome in zip(some, expected, strict=True)
        if len(outcome.token_ids) > 7
    ]
    wanted = [outcome.token_ids for outcome in expected if len(outcome.token_ids) > 7]
    again = driver.again(proposer=proposer)
    assert again.tokens(moved) == wanted
    assert again.drafts.accepted_tokens > 150


class Counting(LookupProposer):
    """Counts its calls."""

    num_calls = 0

    def wants(self, request: Request) -> bool:
        self.num_calls += 1
        return super().wants(request)

    def note_step(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        self.num_calls += 1

    def forget(self, request: Request) -> None:
        self.num_calls += 1
        super().forget(request)


def test_without_a_method_nothing_is_called_until_a_request_has_a_prediction(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, expected = made
    proposer = Counting(SpeculativeConfig())
    proposer._cost = FreeDrafts()
    drafting = driver.again(proposer=proposer)
    check(drafting.run(jobs()[:3]), expected[:3])
    assert (proposer.num_calls, drafting.drafts.drafts) == (0, 0)
    some = [*predicted(jobs()[1:2], expected[1:2]), *jobs()[2:4]]
    check(drafting.run(some), expected[1:4])
    num_calls, num_drafts = proposer.num_calls, drafting.drafts.drafts
    assert num_calls > 0
    assert num_drafts > 0
    check(drafting.run(jobs()[:3]), expected[:3])
    assert (proposer.num_calls, drafting.drafts.drafts) == (num_calls, num_drafts)
