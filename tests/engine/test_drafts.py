"""Drafts on the torch runner: whatever is guessed, a stream is the same, token for token."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch

from tests.fakes.cuda_driver import CudaDriver
from tests.fakes.drafts import DiceProposer
from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.grammars import EOS, Grammars, json_schema, make_checkpoint
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured

NUM_TOKENS: Final = 20
VOCAB: Final = 100
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.3,
    },
    "bad words": {"bad_words_ids": [[n] for n in range(3, 60)] + [[70, 71], [80, 81, 82]]},
    "stops": {"logit_bias": {9: 5.0}, "min_tokens": 9, "stop_token_ids": [9]},
    "logprobs": {"logprobs": 3},
    "named": {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": [5, 6]},
    "prompt logprobs": {"prompt_logprobs": 2},
}


def jobs() -> list[Job]:
    """Each kind from one prompt with two seeds, as `n` makes them, and from a longer one."""
    made = []
    for number, parameters in enumerate(KINDS.values()):
        for seed, length in ((number, 20), (number + 50, 20), (number, 33)):
            fields = {"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, **parameters}
            made.append(Job(prompt_of(length, seed=number), SamplingParams(**fields)))
    return made


def proposer_of(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], vocab_size: int = VOCAB, **options: Any
) -> DiceProposer:
    """It knows what became of these jobs."""
    outputs = {
        (*job.prompt, job.sampling.seed): outcome.token_ids
        for job, outcome in zip(jobs, outcomes, strict=True)
    }

    def output_of(request: Request) -> list[int]:
        return outputs[*request.token_ids[: request.num_prompt], request.spec.sampling.seed]

    return DiceProposer(Random(5), output_of, vocab_size, **options)


def check(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Equal but for the last bits of log-probabilities."""
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert (outcome.error, outcome.reason) == (None, wanted.reason)
        assert outcome.token_ids == wanted.token_ids
        shown = [(each.token_id, each.rank, each.top_ids) for each in outcome.logprobs]
        assert shown == [(each.token_id, each.rank, each.top_ids) for each in wanted.logprobs]
        for one, other in zip(outcome.logprobs, wanted.logprobs, strict=True):
            values = [one.logprob, *one.top_logprobs]
            assert values == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-4)
        assert (outcome.prompt_logprobs is None) == (wanted.prompt_logprobs is None)


@pytest.fixture(scope="module")
def made(tiny: Tiny) -> tuple[EngineDriver, list[Outcome]]:
    """An engine, and what it makes of `jobs` without drafts."""
    driver = EngineDriver(tiny("llama").directory, max_num_seqs=9)
    return driver, driver.run(jobs())


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("share_wrong", [0.0, 0.5, 1.0], ids=["right", "mixed", "wrong"])
def test_streams_are_the_same_with_drafts_of_any_quality(
    made: tuple[EngineDriver, list[Outcome]], share_wrong: float, is_async: bool
) -> None:
    driver, expected = made
    proposer = proposer_of(jobs(), expected, share_wrong=share_wrong)
    drafting = driver.again(proposer=proposer, async_scheduling=is_async)
    check(drafting.run(jobs(), steps_between=1), expected)
    assert proposer.num_drafts > 100


def test_right_drafts_save_steps(made: tuple[EngineDriver, list[Outcome]]) -> None:
    driver, expected = made
    plans: list[StepPlan] = []
    runner, launch = driver.model.runner, driver.model.runner.launch

    def noting(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    proposer = proposer_of(jobs(), expected, share_wrong=0.0)
    drafting = driver.again(proposer=proposer, async_scheduling=False)
    runner.launch = noting  # type: ignore[method-assign]
    try:
        check(drafting.run(jobs()[:1]), expected[:1])
    finally:
        del runner.launch
    assert len(plans) < NUM_TOKENS // 2


def test_a_preempted_stream_goes_on_with_drafts(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, expected = made
    proposer = proposer_of(jobs(), expected)
    tight = driver.again(num_blocks=9, proposer=proposer, kv_watermark=0.0)
    outcomes = tight.run(jobs())
    check(outcomes, expected)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 5


def test_a_migrated_stream_goes_on_with_drafts(made: tuple[EngineDriver, list[Outcome]]) -> None:
    driver, expected = made
    moved = [
        Job(job.prompt, job.sampling, output=outcome.token_ids[:7])
        for job, outcome in zip(jobs(), expected, strict=True)
        if len(outcome.token_ids) > 7
    ]
    outcomes = driver.again(proposer=proposer_of(jobs(), expected)).run(moved)
    wanted = [outcome.token_ids for outcome in expected if len(outcome.token_ids) > 7]
    assert [outcome.token_ids for outcome in outcomes] == wanted


def test_nothing_comes_after_the_end_however_right_the_drafts_are(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, _ = made
    prompt = prompt_of(25, seed=9)
    (endless,) = driver.run([Job(prompt, greedy(NUM_TOKENS))])
    for place in (1, 4, 9):
        token = endless.token_ids[place]
        first = endless.token_ids.index(token)
        sampling = SamplingParams(
            seed=0, max_tokens=NUM_TOKENS, temperature=0.0, stop_token_ids=[token], logprobs=1
        )
        job = Job(prompt, sampling)
        proposer = proposer_of([job], [endless], share_wrong=0.0)
        (outcome,) = driver.again(proposer=proposer).run([job])
        assert (outcome.reason, outcome.token_ids) == ("stop", endless.token_ids[: first + 1])
        assert [each.token_id for each in outcome.logprobs] == outcome.token_ids


@pytest.mark.parametrize("name", ["exaone4", "phi3_longrope", "gemma3_text", "deepseek_v2"])
def test_windows_boundaries_and_latents_take_drafts(tiny: Tiny, name: str) -> None:
    driver = EngineDriver(tiny(name).directory, max_num_seqs=4, block_size=4, max_model_len=100)
    some = [Job(prompt_of(length, seed=length), greedy(NUM_TOKENS)) for length in (9, 30, 37)]
    expected = driver.run(some)
    proposer = proposer_of(some, expected, max_drafts=7)
    check(driver.again(proposer=proposer).run(some, steps_between=2), expected)
    assert proposer.num_drafts > 20


@pytest.fixture(scope="module")
def grammar_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafts"))


def test_a_grammar_is_followed_through_drafts(grammar_checkpoint: Path) -> None:
    grammars = Grammars(grammar_checkpoint)
    kinds = (
        Structured(kind="regex", text="[a-z]{3,9}(-[0-9]{2,5}){1,3}"),
        json_schema({"type": "array", "items": {"enum": ["a", 5, None]}, "maxItems": 3}),
        Structured(kind="choice", text='["yes", "no", "maybe"]'),
    )
    some = []
    for seed in range(9):
        structured = kinds[seed % 3]
        sampling = SamplingParams(seed=seed, max_tokens=30, structured=structured)
        grammar = grammars.compile(structured)
        some.append(Job(prompt_of(5 + seed, seed), sampling, grammar=grammar))
    driver = EngineDriver(grammar_checkpoint, max_num_seqs=4)
    expected = driver.run(some)
    assert sum(outcome.token_ids[-1] == EOS for outcome in expected) > 3
    for share_wrong in (0.0, 0.5):
        proposer = proposer_of(some, expected, 400, share_wrong=share_wrong)
        check(driver.again(proposer=proposer).run(some), expected)
        assert proposer.num_drafts > 20


def test_a_row_that_is_left_no_token_fails_after_what_it_could_draw(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, _ = made
    allowed = SamplingParams(
        seed=1, max_tokens=9, allowed_token_ids=[7], bad_words_ids=[[7, 7, 7, 7]], ignore_eos=True
    )
    job = Job(prompt_of(11), allowed)
    (expected,) = driver.run([job])
    assert (expected.token_ids, expected.code) == ([7, 7, 7], "invalid_request_error")
    guess = Outcome([7] * 9, "", None, None, 0, 0)
    (outcome,) = driver.again(proposer=proposer_of([job], [guess], share_wrong=0.0)).run([job])
    assert (outcome.token_ids, outcome.error) == (expected.token_ids, expected.error)


def test_an_engine_on_a_gpu_refuses_a_proposer_at_its_start(tiny: Tiny) -> None:
    with torch.inference_mode(), reference_layers():
        driver = CudaDriver(tiny("llama").directory)
        with pytest.raises(ConfigError, match="one token at a time"):
            Engine(driver.runner, driver.settings, proposer=proposer_of([], []))


def test_more_drafts_than_the_model_proposes_are_refused_at_the_start(
    made: tuple[EngineDriver, list[Outcome]],
) -> None:
    driver, _ = made
    with pytest.raises(ConfigError, match="proposes 0 at most"):
        RunnerDrafts(driver.model.runner, max_rows=8, max_drafts=4)


class FirstOnly(DiceProposer):
    """The first request is asked for drafts, and has none; the others decode without."""

    def wants(self, request: Request) -> bool:
        return request.key.stream == 1

    def _of(self, request: Request, limit: int) -> list[int]:
        return []


def test_rows_with_drafts_and_without_are_computed_in_the_same_steps(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory)
    some = [Job(prompt_of(12, seed=seed), greedy(NUM_TOKENS)) for seed in range(3)]
    expected = driver.tokens(some)
    driver = EngineDriver(tiny("llama").directory).again(
        proposer=FirstOnly(Random(1), lambda request: [], VOCAB)
    )
    sizes: list[int] = []

    def note(output: StepOutput) -> None:
        sizes.append(sum(map(len, output.deltas.values())))

    driver.on_output = note  # type: ignore[method-assign]
    assert driver.tokens(some) == expected
    # each step has a token of each stream, but for the steps in which they begin and end
    assert sum(size == 3 for size in sizes) >= NUM_TOKENS - 2
