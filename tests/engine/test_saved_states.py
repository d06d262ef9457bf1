"""Prefix hits of models with states: equal to a run without them, and to one that was cut alike."""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from tests.engine.test_general_kind import (
    PAGE,
    STATE_ATOL,
    check_greedy,
    jobs_of,
    poisoned,
)
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.general_models import STATES
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.shared.messages.sampling import SamplingParams

General = Callable[[str], EngineDriver]

NAMES: Final = ("qwen3_next", "granitemoehybrid", "mamba2", "lfm2", "kimi_linear")
"""Gated delta rule, Mamba with pages and without, short convolutions, states with latents."""
HITS: Final = ("qwen3_next", "mamba2")
FEWER: Final = ("mamba2", "kimi_linear")
SHARED: Final = prompt_of(70, seed=11)
FIRST: Final = [*SHARED, *prompt_of(21, seed=12)]
SECOND: Final = [*SHARED, *prompt_of(30, seed=13)]
THIRD: Final = [*SHARED, *prompt_of(9, seed=14)]
NUM_TOP: Final = 20


def answer_of(driver: EngineDriver, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """Return the answer to a prompt, and the logprobs [tokens, NUM_TOP] on the way, best first."""
    sampling = SamplingParams(
        seed=0, max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP
    )
    (outcome,) = driver.run([Job(prompt, sampling)])
    assert outcome.error is None
    return outcome.token_ids, torch.tensor([each.top_logprobs for each in outcome.logprobs])


@some(sorted(STATES), HITS)
def test_hits_change_no_token(general: General, tiny: Tiny, name: str) -> None:
    driver, _, _ = poisoned(general, name)
    engine = driver.again(mamba_block_size=PAGE, max_num_batched_tokens=48)
    prompts = [FIRST, SECOND, THIRD, FIRST, SHARED[:40]]
    outcomes = [engine.run(jobs_of([prompt]))[0] for prompt in prompts]
    check_greedy(tiny(name), prompts, outcomes)
    # THIRD ends before the next border behind what it shares; FIRST goes on at its last one
    assert [outcome.num_cached for outcome in outcomes] == [0, 64, 64, 80, 32]


@some(NAMES, FEWER)
def test_a_hit_has_the_numbers_of_a_run_that_was_cut_at_the_same_border(
    general: General, name: str
) -> None:
    driver, _, _ = poisoned(general, name)
    engine = driver.again(mamba_block_size=PAGE)
    without = answer_of(engine, FIRST)
    assert torch.equal(answer_of(engine, FIRST)[1], without[1])
    # the state behind the same tokens, saved by another prompt
    alone = answer_of(driver.again(mamba_block_size=PAGE), SECOND)
    tokens, logprobs = answer_of(engine, SECOND)
    assert tokens == alone[0]
    torch.testing.assert_close(logprobs, alone[1], atol=STATE_ATOL, rtol=0)
    # and a run that nothing cuts
    tokens, logprobs = answer_of(driver.again(enable_prefix_caching=False), FIRST)
    assert tokens == without[0]
    torch.testing.assert_close(logprobs, without[1], atol=STATE_ATOL, rtol=0)


@some(NAMES, FEWER)
def test_preempted_rows_go_on_from_saved_states(general: General, tiny: Tiny, name: str) -> None:
    driver, _, _ = poisoned(general, name)
    engine = driver.again(num_blocks=15, mamba_block_size=PAGE, max_num_batched_tokens=64)
    prompts = [FIRST, SECOND, THIRD, SHARED[:33]]
    outcomes = engine.run(jobs_of(prompts), steps_between=4)
    check_greedy(tiny(name), prompts, outcomes)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0
    assert max(outcome.num_cached for outcome in outcomes) == 64


def test_with_fewer_slots_than_prompts_the_last_are_kept(general: General, tiny: Tiny) -> None:
    driver, _, _ = poisoned(general, "mamba2")
    runner = driver.model.runner
    slots, runner.num_saved_states = runner.num_saved_states, 2
    try:
        engine = driver.again(mamba_block_size=PAGE)
    finally:
        runner.num_saved_states = slots
    prompts = [[seed, *prompt_of(40, seed=seed)] for seed in (1, 2, 3)]
    order = [*prompts, *reversed(prompts)]
    outcomes = [engine.run(jobs_of([prompt]))[0] for prompt in order]
    check_greedy(tiny("mamba2"), order, outcomes)
    assert [outcome.num_cached for outcome in outcomes] == [0, 0, 0, 32, 32, 0]


def test_what_was_saved_is_gone_after_sleep(general: General, tiny: Tiny) -> None:
    driver, _, _ = poisoned(general, "qwen3_next")
    engine = driver.again(mamba_block_size=PAGE)
    first = engine.run(jobs_of([FIRST]))
    engine.sleep(1)
    engine.model.resident.wake(("kv_cache", "weights"))
    outcomes = [*first, *engine.run(jobs_of([FIRST]))]
    check_greedy(tiny("qwen3_next"), [FIRST, FIRST], outcomes)
    assert [outcome.num_cached for outcome in outcomes] == [0, 0]
