"""With the C kernels a request's numbers are the same to the last bit, whatever runs with it."""

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tests.fakes.tiny import Tiny, prompt_of
from tests.ops.native import needs_native
from tokenmesh.shared.config.model import Dtype
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.messages.sampling import SamplingParams

LENGTHS = (37, 5, 18, 64, 1, 16, 29, 90)
KINDS = ("llama", "qwen2_window", "qwen3", "olmo3", "ministral3", "exaone4", "granite")
PROMOTED = ("gemma2", "gemma3_text", "qwen2_moe", "gpt_oss")
"""Read from module trees."""
IN_FLOAT32 = ("llama", "qwen2_window", "olmo3")
IN_BFLOAT16 = ("gemma3_text", "gpt_oss")
"""Between them they run every line and kernel of the others."""
SAMPLING = SamplingParams(
    seed=3, max_tokens=20, temperature=0.8, ignore_eos=True, logprobs=5, prompt_logprobs=1
)

pytestmark = needs_native


def numbers_of(outcome: Outcome) -> list[object]:
    return [outcome.token_ids, outcome.logprobs, outcome.prompt_logprobs]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, "float32", marks=() if name in IN_FLOAT32 else pytest.mark.slow)
            for name in (*KINDS, *PROMOTED)
        ),
        *(
            pytest.param(name, "bfloat16", marks=() if name in IN_BFLOAT16 else pytest.mark.slow)
            for name in (*KINDS, *PROMOTED)
        ),
    ],
)
def test_log_probabilities_are_bit_equal_alone_batched_and_in_chunks(
    tiny: Tiny, name: str, dtype: Dtype
) -> None:
    directory = tiny(name).directory
    jobs = [Job(prompt_of(n, seed=n), SAMPLING) for n in LENGTHS]
    whole = EngineDriver(directory, dtype=dtype, enable_prefix_caching=False)
    alone = [numbers_of(whole.run([job])[0]) for job in jobs]
    batched = [numbers_of(outcome) for outcome in whole.run(jobs)]
    assert batched == alone
    chunked = EngineDriver(
        directory, dtype=dtype, max_num_batched_tokens=11, enable_prefix_caching=False
    )
    assert [numbers_of(outcome) for outcome in chunked.run(jobs, steps_between=2)] == alone


def test_a_different_prompt_gives_different_numbers(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory)
    first, second = (driver.run([Job(prompt_of(20, seed=n), SAMPLING)])[0] for n in (1, 2))
    assert numbers_of(first) != numbers_of(second)


def test_batch_invariant_mode_starts_where_the_kernels_run(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory, batch_invariant=True)
    (outcome,) = driver.run([Job(prompt_of(9), SAMPLING)])
    assert len(outcome.token_ids) == SAMPLING.max_tokens


@pytest.mark.parametrize(("name", "native_kernels"), [("llama", False), ("mistral", True)])
def test_batch_invariant_mode_says_what_is_missing(
    tiny: Tiny, name: str, native_kernels: bool
) -> None:
    with pytest.raises(ConfigError, match="multiple of 16") as caught:
        EngineDriver(tiny(name).directory, batch_invariant=True, native_kernels=native_kernels)
    assert caught.value.param == "worker.batch_invariant"


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "olmo3"])
def test_unwritten_memory_of_the_pool_does_not_matter(tiny: Tiny, name: str) -> None:
    jobs = [Job(prompt_of(n, seed=n), SAMPLING) for n in LENGTHS]
    driver = EngineDriver(tiny(name).directory, enable_prefix_caching=False)
    clean = [numbers_of(outcome) for outcome in driver.run(jobs)]
    with torch.inference_mode():
        for pool in driver.model.resident._store.tensors:
            pool[:, :, 1:] = float("nan")
    assert [numbers_of(outcome) for outcome in driver.run(jobs)] == clean


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama", "float32"), ("qwen2_window", "float32"), ("olmo3", "bfloat16")),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen2_window", "bfloat16", marks=pytest.mark.slow),
        pytest.param("olmo3", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_stream_that_moved_into_another_batch_is_bit_equal(
    tiny: Tiny, name: str, dtype: Dtype
) -> None:
    directory = tiny(name).directory
    first, second = (
        EngineDriver(directory, dtype=dtype, batch_invariant=True, max_num_batched_tokens=budget)
        for budget in (2048, 11)
    )
    prompt = prompt_of(37, seed=1)
    (whole,) = first.run([Job(prompt, SAMPLING)])
    others = [Job(prompt_of(n, seed=n), SAMPLING) for n in LENGTHS[1:]]
    for done in (0, 1, 7, 19):
        moved = Job(prompt, SAMPLING, output=whole.token_ids[:done])
        outcome = second.run([moved, *others], steps_between=2)[0]
        assert outcome.token_ids == whole.token_ids
        assert outcome.logprobs == whole.logprobs[done:]
