"""Every family of the native kind on two ranks: the tokens and numbers of one rank."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fakes.drafts import DiceProposer
from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.models import FAKES
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.api.sampling import SamplingParams

TOLERANCE = 2e-4
UNDIVIDED = {"llama_odd", "olmo2", "olmo3"}
"""Three heads, and norms over all heads: refused."""
FAMILIES = [name for name in FAKES if name not in UNDIVIDED]
DIVIDED = {"llama", "qwen2_window", "qwen3", "phi3", "glm4", "hunyuan", "exaone4", "seed_oss"}
"""Each is divided in a way of its own: biases, norms of heads, merged products, halves of heads."""


def sampled(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=10, temperature=1.0, ignore_eos=True, **more)


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
def llama(tiny: Tiny) -> Iterator[tuple[EngineDriver, RanksDriver]]:
    """One rank and two, for tests that differ by their engine."""
    directory = tiny("llama").directory
    two = RanksDriver(directory, max_num_batched_tokens=32)
    yield EngineDriver(directory, cpu_threads=1, max_num_batched_tokens=32), two
    two.close()


def test_prefix_hits_and_preemptions_change_nothing(
    llama: tuple[EngineDriver, RanksDriver],
) -> None:
    prompt = prompt_of(40, 5)
    given = [Job([*prompt, *prompt_of(3, seed)], sampled(seed)) for seed in range(5)]
    one, two = (each.again(num_blocks=9) for each in llama)
    together = two.run(given)
    same(together, one.run(given))
    assert sum(each.num_preemptions for each in together) > 0
    again = two.run(given[:2])
    same(again, one.run(given[:2]))
    assert sum(each.num_cached for each in again) > 0


def test_drafts_are_checked_on_all_ranks(llama: tuple[EngineDriver, RanksDriver]) -> None:
    one, two = llama
    expected = one.run(jobs())
    outputs = {
        job.sampling.seed: each.token_ids for job, each in zip(jobs(), expected, strict=True)
    }
    proposer = DiceProposer(
        Random(5), lambda request: outputs[request.spec.sampling.seed], 160, share_wrong=0.4
    )
    drafting = two.again(proposer=proposer)
    same(drafting.run(jobs(), steps_between=1), expected)
    assert drafting.drafts.accepted_tokens > 5


def test_eight_bits_of_kv_are_those_of_one_rank(tiny: Tiny) -> None:
    both(tiny("qwen3").directory, jobs(), kv_cache_dtype="int8").close()


def test_a_row_that_fails_fails_alone(llama: tuple[EngineDriver, RanksDriver]) -> None:
    impossible = sampled(1, allowed_token_ids=[5], bad_words_ids=[[5]])
    given = [Job(prompt_of(9), impossible), Job(prompt_of(9, 4), sampled(2))]
    one, two = llama
    ours = two.run(given)
    assert ours[0].error == one.run(given)[0].error is not None
    assert ours[1].token_ids == one.run(given)[1].token_ids
    assert not two.followers.ends


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_wake(llama: tuple[EngineDriver, RanksDriver], level: int) -> None:
    _, two = llama
    before = two.run(jobs())
    assert two.sleep(level) > 0
    two.model.resident.wake(["weights", "kv_cache"])
    same(two.again().run(jobs()), before)
