"""Named log-probabilities, repetition rules and reasoning budgets through the whole engine."""

from random import Random
from typing import Any

import msgspec
import pytest

from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.request.repetition import ends_in_loop
from tokenmesh.engine.sampling.thinking import ThinkingTracker
from tokenmesh.shared.messages.sampling import RepetitionRule, SamplingParams, ThinkingBudget

NUM_TOKENS = 40


def params_of(seed: int, **fields: Any) -> SamplingParams:
    """Few tokens to choose from, so that loops and markers come by themselves."""
    return SamplingParams(
        seed=seed,
        max_tokens=NUM_TOKENS,
        allowed_token_ids=[10, 11, 12, 13],
        ignore_eos=True,
        **fields,
    )


def mixed_jobs() -> list[Job]:
    rng, jobs = Random(4), []
    for seed in range(8):
        rule = RepetitionRule(max_size=4, min_size=rng.choice([1, 2]), min_count=rng.choice([3, 4]))
        budget = ThinkingBudget(num_tokens=rng.randrange(5), start_ids=[11, 12], end_ids=[20, 21])
        fields: list[dict[str, Any]] = [{"repetition": rule}, {"thinking": budget}, {}]
        jobs.append(Job(prompt_of(5 + 3 * seed, seed), params_of(seed, **fields[seed % 3])))
    return jobs


def check(job: Job, outcome: Outcome) -> None:
    """The rules hold in what came out, and nowhere earlier was the end due."""
    assert outcome.error is None
    rule, budget = job.sampling.repetition, job.sampling.thinking
    ids = outcome.token_ids
    if rule is not None:
        loops = [n for n in range(1, len(ids) + 1) if ends_in_loop(ids[:n], 0, rule)]
        assert loops == ([len(ids)] if outcome.reason == "repetition" else [])
        assert outcome.reason == "repetition" or len(ids) == NUM_TOKENS
    if budget is not None:
        tracker = ThinkingTracker(budget, job.prompt, len(job.prompt))
        for token in ids:
            assert tracker.forced() in (None, token)
            tracker.push(token)


@pytest.mark.parametrize("is_async", [True, False])
def test_rules_hold_alone_batched_preempted_and_resumed(tiny: Tiny, is_async: bool) -> None:
    jobs, directory = mixed_jobs(), tiny("llama").directory
    alone = EngineDriver(directory, async_scheduling=is_async)
    expected = [alone.run([job])[0] for job in jobs]
    for job, outcome in zip(jobs, expected, strict=True):
        check(job, outcome)
    assert {"repetition", "length"} == {outcome.reason for outcome in expected}
    tight = EngineDriver(
        directory, max_model_len=96, num_gpu_blocks_override=14, long_prefill_token_threshold=7
    )
    together = tight.run(jobs, steps_between=1)
    assert sum(outcome.num_preemptions for outcome in together) > 0
    for some, one in zip(together, expected, strict=True):
        assert (some.token_ids, some.reason) == (one.token_ids, one.reason)
    for cut in (1, 5):
        for job, one in zip(jobs, expected, strict=True):
            resumed = Job(job.prompt, job.sampling, one.token_ids[:cut])
            assert alone.run([resumed])[0].token_ids == one.token_ids


def test_named_log_probabilities_are_those_of_transformers(tiny: Tiny) -> None:
    prompt, named = prompt_of(12), [50, 3, 99, 7]
    sampling = params_of(3, logprobs=2, logprob_token_ids=named)
    plain = msgspec.structs.replace(sampling, logprob_token_ids=[])
    driver = EngineDriver(tiny("llama").directory)
    outcome, other = driver.run([Job(prompt, sampling), Job(prompt, plain)])
    assert outcome.token_ids == other.token_ids
    reference = tiny("llama").logits([*prompt, *outcome.token_ids]).log_softmax(-1)
    for index, (entry, best) in enumerate(zip(outcome.logprobs, other.logprobs, strict=True)):
        row = reference[len(prompt) - 1 + index]
        assert (entry.token_id, entry.rank) == (best.token_id, best.rank)
        assert entry.top_ids == named
        assert entry.top_logprobs == pytest.approx(row[named].tolist(), abs=1e-4)
        assert best.top_ids == row.topk(2).indices.tolist()
