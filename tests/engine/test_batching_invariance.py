"""A request gets the same tokens alone, batched, from the prefix cache, preempted or resumed."""

from random import Random

import pytest

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import rounds, some
from tokenmesh.engine.kv.make_cache import make_cache
from tokenmesh.shared.hashing import ROUTE_BLOCK_TOKENS
from tokenmesh.shared.messages.sampling import SamplingParams

NUM_TOKENS = 32
LENGTHS = (7, 33, 19, 1, 48, 16, 17, 25, 40)
"""Prompts around page borders; nine of them make the largest batch."""
KINDS = (
    "llama",
    "llama_odd",
    "llama_rope3",
    "llama_yarn",
    "llama_dynamic",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "smollm3",
    "olmo3",
    "glm4",
    "exaone4",
)
"""One of each kind of attention, norm and rope."""
FEWER = ("llama_odd", "llama_dynamic", "qwen2_window", "qwen3", "olmo3", "ministral3")
GROUPS = {"olmo3": 4, "exaone4": 4, "qwen2_window": 3}
"""The numbers of KV groups of models with several. Each request has a block table for each of
them."""
SAMPLED = SamplingParams(seed=11, max_tokens=24, temperature=0.9, top_p=0.95, ignore_eos=True)


def jobs_of(count: int) -> list[Job]:
    return [Job(prompt_of(LENGTHS[i], seed=i), greedy(NUM_TOKENS)) for i in range(count)]


def assert_greedy(tiny: Tiny, name: str, jobs: list[Job], tokens: list[list[int]]) -> None:
    """The tokens are those of transformers."""
    assert tokens == tiny(name).greedy([job.prompt for job in jobs], NUM_TOKENS, tokens)


@pytest.mark.parametrize(
    "sizes", [(1, 9), pytest.param((2, 3, 4, 5, 6, 7, 8), marks=pytest.mark.slow)], ids=str
)
@some(KINDS, {"llama_odd", "qwen2_window"})
def test_batches_of_one_to_nine_match_transformers(
    tiny: Tiny, name: str, sizes: tuple[int, ...]
) -> None:
    jobs = jobs_of(len(LENGTHS))
    for count in sizes:
        driver = EngineDriver(tiny(name).directory, long_prefill_token_threshold=7)
        assert_greedy(tiny, name, jobs[:count], driver.tokens(jobs[:count]))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2_window", "qwen3", "olmo3"])
def test_requests_that_join_a_running_batch_match_transformers(
    tiny: Tiny, name: str, is_async: bool
) -> None:
    jobs = jobs_of(6)
    driver = EngineDriver(
        tiny(name).directory, max_num_batched_tokens=24, async_scheduling=is_async
    )
    assert_greedy(tiny, name, jobs, driver.tokens(jobs, steps_between=3))


@pytest.mark.parametrize("name", KINDS)
def test_prefix_hits_match_transformers(tiny: Tiny, name: str) -> None:
    shared = prompt_of(37, seed=3)
    jobs = [Job([*shared, *prompt_of(n, seed=n)], greedy(NUM_TOKENS)) for n in (5, 20, 1)]
    jobs.append(Job(shared[:32], greedy(NUM_TOKENS)))
    driver = EngineDriver(tiny(name).directory)
    assert_greedy(tiny, name, jobs[:1], driver.tokens(jobs[:1]))
    outcomes = driver.run(jobs)
    assert_greedy(tiny, name, jobs, [outcome.token_ids for outcome in outcomes])
    # dynamic rope turns keys by the prompt's length, so these prompts have nothing in common
    assert all(outcome.num_cached > 0 for outcome in outcomes) != (name == "llama_dynamic")


@pytest.mark.parametrize("block_size", [24, 7])
def test_blocks_of_any_number_of_tokens_match_transformers(
    tiny: Tiny, block_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared = prompt_of(50, seed=3)
    jobs = [Job([*shared, *prompt_of(n, seed=n)], greedy(NUM_TOKENS)) for n in (5, 20)]
    for name in ("llama", "qwen2_window", "olmo3"):
        driver = EngineDriver(
            tiny(name).directory, block_size=block_size, max_num_batched_tokens=31
        )
        assert_greedy(tiny, name, jobs[:1], driver.tokens(jobs[:1]))
        outcomes = driver.run(jobs)
        assert_greedy(tiny, name, jobs, [outcome.token_ids for outcome in outcomes])
        assert all(
            outcome.num_cached and not outcome.num_cached % block_size for outcome in outcomes
        )
    make_cache(driver.settings, driver.model.runner, ROUTE_BLOCK_TOKENS, None)
    assert f"whole number of blocks of {block_size}" in caplog.text


@some(KINDS, FEWER)
def test_preempted_requests_match_transformers(tiny: Tiny, name: str) -> None:
    jobs = jobs_of(6)
    driver = EngineDriver(
        tiny(name).directory,
        num_gpu_blocks_override=1 + 8 * GROUPS.get(name, 2),
        kv_watermark=0.0,
        enable_prefix_caching=False,
        max_model_len=120,
    )
    outcomes = driver.run(jobs)
    assert_greedy(tiny, name, jobs, [outcome.token_ids for outcome in outcomes])
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0


def test_seeded_draws_are_equal_alone_batched_and_preempted(tiny: Tiny) -> None:
    jobs = [Job(prompt_of(LENGTHS[i], seed=i), SAMPLED) for i in range(6)]
    directory = tiny("llama").directory
    alone = [EngineDriver(directory).tokens([job])[0] for job in jobs]
    assert len({tuple(tokens) for tokens in alone}) == len(jobs)
    assert EngineDriver(directory).tokens(jobs) == alone
    crowded = EngineDriver(directory, num_gpu_blocks_override=17, max_model_len=120)
    outcomes = crowded.run(jobs)
    assert [outcome.token_ids for outcome in outcomes] == alone
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0


def test_a_stream_resumed_from_its_tokens_goes_on_as_if_nothing_had_happened(tiny: Tiny) -> None:
    sampling = SamplingParams(
        seed=5,
        max_tokens=24,
        temperature=0.8,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=20,
        bad_words_ids=[[30, 31], [40]],
    )
    prompt = prompt_of(21)
    driver = EngineDriver(tiny("qwen3").directory)
    (whole,) = driver.tokens([Job(prompt, sampling)])
    for done in (1, 9, 17):
        (resumed,) = driver.tokens([Job(prompt, sampling, output=whole[:done])])
        assert resumed == whole


def test_blocks_of_an_ended_request_leave_no_trace(tiny: Tiny) -> None:
    directory = tiny("mistral").directory
    driver = EngineDriver(directory, enable_prefix_caching=False, num_gpu_blocks_override=20)
    job = Job(prompt_of(20), greedy(NUM_TOKENS))
    first = driver.tokens([job])
    driver.tokens([Job(prompt_of(48, seed=9), greedy(60))])
    assert driver.tokens([job]) == first


@rounds("seed", 4, 16)
def test_no_setting_of_the_scheduler_changes_a_token(tiny: Tiny, seed: int) -> None:
    rng = Random(seed)
    name = rng.choice(["llama_odd", "qwen2_window", "qwen3", "olmo3", "ministral3"])
    jobs = jobs_of(6)
    rng.shuffle(jobs)
    block_size = rng.choice([1, 2, 5, 8, 64])
    longest = GROUPS.get(name, 1) * -(-120 // block_size)
    driver = EngineDriver(
        tiny(name).directory,
        max_model_len=120,
        block_size=block_size,
        num_gpu_blocks_override=1 + longest * rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([1, 3, 9]),
        max_num_batched_tokens=rng.choice([2, 11, 64, 1024]),
        long_prefill_token_threshold=rng.choice([0, 1, 6, 100]),
        enable_prefix_caching=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.7,
    )
    steps_between = rng.choice([0, 1, 4])
    assert_greedy(tiny, name, jobs, driver.tokens(jobs, steps_between=steps_between))
