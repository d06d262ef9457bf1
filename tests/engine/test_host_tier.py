"""Blocks that the pool has lost and the host tier has: the tokens are those that are computed.

A page that is free holds NaN before each run.
"""

from typing import Any

import pytest
import torch

from tests.engine.test_general_kind import poison
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import GENERAL
from tests.fakes.tiny import Tiny, prompt_of
from tests.ops.native import needs_native
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.kv.host_tier import HostTier
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.messages.sampling import SamplingParams

SIZE = 8
LENGTH = 120
FOUND = 112
"""Tokens of a prompt in whole blocks before its last token."""
BLOCKS = {"gpt_oss": 40, "gemma3_text": 110}
"""In the pool; others need 22 for a prompt and its output."""
FAMILIES = [
    ("llama", {}),
    ("llama", {"kv_cache_dtype": "int8"}),
    ("llama", {"kv_cache_dtype": "fp8"}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
    ("gemma3_text", {}),
]
SAMPLED = SamplingParams(seed=5, max_tokens=20, temperature=0.9, ignore_eos=True)


def driver_of(tiny: Tiny, name: str, **settings: Any) -> EngineDriver:
    """With a pool for one prompt and its output."""
    given: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS.get(name, 24), "block_size": SIZE}
    given |= {"max_num_batched_tokens": 64, "kv_offloading_size": 0.004, "max_num_seqs": 4}
    return EngineDriver(
        tiny(name).directory,
        model_impl="transformers" if name in GENERAL else "auto",
        max_model_len=160,
        **{**given, **settings},
    )


def arena_of(driver: EngineDriver) -> torch.Tensor:
    assert isinstance(driver.model.runner, TorchRunner)
    assert driver.model.runner.arena is not None
    return driver.model.runner.arena


def tier_of(driver: EngineDriver) -> HostTier:
    tier = driver._engine._cache.host
    assert tier is not None
    return tier


@torch.inference_mode()
def forget_pool(driver: EngineDriver) -> None:
    """Fill the pool with NaN; only the host tier has anything."""
    driver._engine.settle()
    driver._engine._cache.pool.forget_all()
    if not driver.settings.kv_code:
        poison(driver.model.resident._store)


def found_in(driver: EngineDriver) -> int:
    """Window groups have blocks for one chunk: it fills all but one, and computes that."""
    return FOUND - SIZE if len(driver.model.runner.windows) > 1 else FOUND


def check(driver: EngineDriver, jobs: list[Job], expected: list[list[int]]) -> None:
    for job, tokens in zip(jobs, expected, strict=True):
        forget_pool(driver)
        (outcome,) = driver.run([job])
        assert outcome.num_cached == found_in(driver)
        assert outcome.token_ids == tokens


# the images are the same bytes whatever has computed them, so one pool shows what torch does
@pytest.mark.parametrize(
    ("name", "settings", "native"),
    [
        pytest.param(
            *(name, settings, False),
            id=f"{name}-{'-'.join(settings.values())}-torch",
            marks=pytest.mark.slow if index else (),
        )
        for index, (name, settings) in enumerate(FAMILIES)
    ]
    + [
        pytest.param(
            *(name, settings, True),
            id=f"{name}-{'-'.join(settings.values())}-native",
            marks=needs_native,
        )
        for name, settings in FAMILIES
    ],
)
def test_a_prompt_from_the_host_tier_draws_the_tokens_of_one_that_is_computed(
    tiny: Tiny, name: str, settings: dict[str, str], native: bool
) -> None:
    driver = driver_of(tiny, name, native_kernels=native, **settings)
    jobs = [Job(prompt_of(LENGTH), greedy(20)), Job(prompt_of(LENGTH, seed=1), SAMPLED)]
    expected = driver.again(enable_prefix_caching=False).tokens(jobs, steps_between=100)
    assert driver.tokens(jobs, steps_between=100) == expected
    check(driver, jobs, expected)
    # and in another engine that was given the images under their keys
    other = driver_of(tiny, name, native_kernels=native, **settings)
    give_images(driver, other)
    check(other, jobs, expected)


@torch.inference_mode()
def give_images(driver: EngineDriver, other: EngineDriver) -> None:
    """As a transfer would bring them."""
    mine, theirs = tier_of(driver), tier_of(other)
    for key, slot in mine._ready.items():
        (there,) = theirs.reserve([key])
        assert there is not None
        arena_of(other)[there] = arena_of(driver)[slot]
        theirs.finish([key], [True])


def test_a_prompt_longer_than_a_step_can_fill_comes_back_over_several(tiny: Tiny) -> None:
    driver = driver_of(tiny, "llama", max_num_batched_tokens=16, long_prefill_token_threshold=0)
    job = Job(prompt_of(LENGTH, seed=2), greedy(8))
    (expected,) = driver.tokens([job])
    forget_pool(driver)
    before = tier_of(driver).stats.filled
    (outcome,) = driver.run([job])
    assert outcome.token_ids == expected
    assert tier_of(driver).stats.filled - before >= FOUND // SIZE - 2


def test_what_a_preempted_stream_had_computed_comes_back(tiny: Tiny) -> None:
    driver = driver_of(tiny, "llama", num_gpu_blocks_override=30)
    jobs = [Job(prompt_of(LENGTH // 2, seed=seed), greedy(80)) for seed in range(2)]
    expected = driver.again(enable_prefix_caching=False).tokens(jobs)
    outcomes = driver.run(jobs)
    assert [each.token_ids for each in outcomes] == expected
    assert sum(each.num_preemptions for each in outcomes) > 0
    assert tier_of(driver).stats.filled > 0


def test_sleep_drops_the_host_tier(tiny: Tiny) -> None:
    driver = driver_of(tiny, "llama")
    job = Job(prompt_of(LENGTH), greedy(4))
    expected = driver.tokens([job])
    assert tier_of(driver).states["ready"] > 0
    assert driver.sleep(1) > 0
    assert tier_of(driver).states["free"] == tier_of(driver).num_slots
    driver.model.resident.wake({"weights", "kv_cache"})
    (outcome,) = driver.run([job])
    assert (outcome.num_cached, [outcome.token_ids]) == (0, expected)


@pytest.mark.parametrize(
    ("size", "words"), [(1e9, "host memory are free"), (1e-8, "holds no block")]
)
def test_a_size_that_cannot_be_is_named_at_the_start(tiny: Tiny, size: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        driver_of(tiny, "llama", kv_offloading_size=size)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_models_that_keep_states_have_no_host_tier_and_say_so(
    tiny: Tiny, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = EngineDriver(tiny(name).directory, model_impl="auto", kv_offloading_size=0.001)
    assert driver._engine._cache.host is None
    assert "the model keeps states" in caplog.text
    assert isinstance(driver.model.runner, TorchRunner)
    assert driver.model.runner.images.slots == 0
