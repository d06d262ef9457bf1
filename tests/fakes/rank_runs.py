"""Runs on one rank and on several: the same jobs, tokens and numbers."""

from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.fakes.drafts import DiceProposer
from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.api.sampling import SamplingParams

TOLERANCE: Final = 2e-4
Pair = tuple[EngineDriver, RanksDriver]
"""One rank and several, of one checkpoint."""


def sampled(seed: int, **more: Any) -> SamplingParams:
    given = {"max_tokens": 10, "temperature": 1.0, "ignore_eos": True, **more}
    return SamplingParams(seed=seed, **given)


def jobs() -> list[Job]:
    """Prompts that are computed in chunks next to rows that decode, greedy and seeded."""
    shown: dict[str, Any] = {"logprobs": 4, "prompt_logprobs": 2}
    return [
        Job(prompt_of(5), sampled(3, **shown)),
        Job(prompt_of(23, 1), SamplingParams(seed=0, max_tokens=10, temperature=0.0, **shown)),
        Job(prompt_of(41, 2), sampled(7, frequency_penalty=0.5, top_k=20)),
    ]


def same(ours: list[Outcome], expected: list[Outcome]) -> None:
    """Tokens are equal, and log-probabilities within the tolerance."""
    assert [each.error for each in ours] == [None] * len(ours)
    assert [each.token_ids for each in ours] == [each.token_ids for each in expected]
    for one, other in zip(ours, expected, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        pairs = [*zip(one.logprobs, other.logprobs, strict=True)]
        prompts = one.prompt_logprobs or [], other.prompt_logprobs or []
        pairs += [(a, b) for a, b in zip(*prompts, strict=True) if a is not None and b is not None]
        for a, b in pairs:
            assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=TOLERANCE)


def both(directory: Path, given: list[Job], world: int = 2, **settings: Any) -> RanksDriver:
    """Run jobs on one rank and on `world`; the driver of the latter, still open."""
    one = EngineDriver(directory, cpu_threads=1, **settings)
    many = RanksDriver(directory, world, **settings)
    try:
        same(many.run(given, steps_between=2), one.run(given, steps_between=2))
    except BaseException:
        many.close()
        raise
    return many


def check_preemptions(
    pair: Pair, prompt: list[int], num_blocks: int, count: int = 5, *, is_found: bool = True
) -> None:
    """Streams that share a prompt give way for blocks; afterwards their prompt is found again."""
    given = [Job([*prompt, *prompt_of(3, seed)], sampled(seed)) for seed in range(count)]
    one, many = (each.again(num_blocks=num_blocks) for each in pair)
    together = many.run(given)
    same(together, one.run(given))
    assert sum(each.num_preemptions for each in together) > 0
    again = many.run(given[:2])
    same(again, one.run(given[:2]))
    assert not is_found or sum(each.num_cached for each in again) > 0


def check_drafts(pair: Pair) -> None:
    """Right and wrong drafts from nowhere change no token."""
    one, many = (each.again() for each in pair)
    expected = one.run(jobs())
    outputs = {
        job.sampling.seed: each.token_ids for job, each in zip(jobs(), expected, strict=True)
    }
    proposer = DiceProposer(
        Random(5), lambda request: outputs[request.spec.sampling.seed], 160, share_wrong=0.4
    )
    drafting = many.again(proposer=proposer)
    same(drafting.run(jobs(), steps_between=1), expected)
    assert drafting.drafts.accepted_tokens > 5


def check_failed_row(pair: Pair) -> None:
    """A row that cannot draw ends with the error that it has on one rank, and no other does."""
    impossible = sampled(1, allowed_token_ids=[5], bad_words_ids=[[5]])
    given = [Job(prompt_of(9), impossible), Job(prompt_of(9, 4), sampled(2))]
    one, many = (each.again() for each in pair)
    ours, theirs = many.run(given), one.run(given)
    assert ours[0].error == theirs[0].error is not None
    assert ours[1].token_ids == theirs[1].token_ids
    assert not pair[1].followers.ends


def check_sleep(driver: RanksDriver, level: int) -> None:
    """All ranks compute after a sleep what they did before."""
    driver = driver.again()  # type: ignore[assignment]
    before = driver.run(jobs())
    assert driver.sleep(level) > 0
    driver.model.resident.wake(["weights", "kv_cache"])
    same(driver.again().run(jobs()), before)


def check_host_tier(pair: Pair) -> None:
    """Blocks that only host memory has are found by all ranks."""
    one, many = (each.again() for each in pair)
    given = [Job(prompt_of(60, 7), sampled(4, logprobs=2))]
    expected = one.run(given)
    same(many.run(given), expected)
    many._engine.settle()
    many._engine._cache.pool.forget_all()
    again = many.run(given)
    same(again, expected)
    assert again[0].num_cached > 0
