"""Longrope past its original length: every key of a row is turned by one set of factors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from tests.fakes.cuda_driver import CudaDriver, drive
from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.shared.messages.sampling import SamplingParams

NAME: Final = "phi3_longrope_short"
BOUNDARY: Final = 40
NUM_TOKENS: Final = 24
CHUNKS = {"max_num_batched_tokens": 11}
PREEMPTIONS = {"num_gpu_blocks_override": 15, "block_size": 8, "kv_watermark": 0.0}
KERNELS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
SAMPLING = SamplingParams(
    seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=8
)


@pytest.fixture(scope="module")
def checkpoint(tiny: Tiny) -> TinyCheckpoint:
    return tiny(NAME)


def expected_logprobs(checkpoint: TinyCheckpoint, prompt: list[int], output: list[int]) -> Any:
    """transformers' log-probabilities at every step, each from a pass over the whole sequence."""
    oracle, rows = checkpoint.make_oracle(), []
    with torch.no_grad():
        for end in range(len(prompt), len(prompt) + len(output)):
            ids = torch.tensor([[*prompt, *output][:end]])
            rows.append(oracle(ids).logits[0, -1].log_softmax(-1))
    return torch.stack(rows)


def assert_exact(checkpoint: TinyCheckpoint, prompt: list[int], outcome: Outcome) -> None:
    expected = expected_logprobs(checkpoint, prompt, outcome.token_ids)
    for row, entry in zip(expected, outcome.logprobs, strict=True):
        theirs = row[torch.tensor(entry.top_ids)]
        torch.testing.assert_close(torch.tensor(entry.top_logprobs), theirs, atol=2e-4, rtol=0)


@KERNELS
@pytest.mark.parametrize(
    ("length", "settings"),
    [
        (BOUNDARY - 9, {"max_num_batched_tokens": 7}),
        *((BOUNDARY + more, {}) for more in (-1, 0, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (BOUNDARY - 9, {}),
                *((BOUNDARY + more, {"max_num_batched_tokens": 7}) for more in (-1, 0, 1)),
            )
        ),
    ],
)
def test_log_probabilities_stay_exact_where_an_answer_crosses_the_length(
    checkpoint: TinyCheckpoint, length: int, native: bool, settings: dict[str, Any]
) -> None:
    prompt = prompt_of(length)
    driver = EngineDriver(checkpoint.directory, native_kernels=native, **settings)
    (outcome,) = driver.run([Job(prompt, SAMPLING)])
    assert outcome.error is None
    assert outcome.token_ids == checkpoint.greedy([prompt], NUM_TOKENS)[0]
    assert outcome.num_preemptions == 0
    assert_exact(checkpoint, prompt, outcome)


def crossing_prompts() -> list[list[int]]:
    """Some share their first blocks, and they cross at different steps, or not at all."""
    shared = prompt_of(BOUNDARY - 8)
    return [shared, [*shared, 5], [*shared[:20], 9], prompt_of(BOUNDARY + 3), [*shared, 5, 6, 7]]


@KERNELS
@pytest.mark.parametrize(
    ("settings", "is_async"),
    [
        pytest.param(CHUNKS, False, id="chunks"),
        pytest.param(CHUNKS, True, id="chunks-async", marks=pytest.mark.slow),
        pytest.param(PREEMPTIONS, True, id="preemptions-async"),
        pytest.param(PREEMPTIONS, False, id="preemptions", marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_batches_chunks_and_preemptions(
    checkpoint: TinyCheckpoint, native: bool, is_async: bool, settings: dict[str, Any]
) -> None:
    prompts = crossing_prompts()
    driver = EngineDriver(
        checkpoint.directory,
        native_kernels=native,
        async_scheduling=is_async,
        max_num_seqs=4,
        max_model_len=80,
        **settings,
    )
    outcomes = driver.run([Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts], steps_between=2)
    assert [o.token_ids for o in outcomes] == checkpoint.greedy(prompts, NUM_TOKENS)
    assert (sum(o.num_preemptions for o in outcomes) > 0) == ("kv_watermark" in settings)


@KERNELS
def test_cached_blocks_of_one_side_never_serve_the_other(
    checkpoint: TinyCheckpoint, native: bool
) -> None:
    whole = prompt_of(BOUNDARY + 9)
    driver = EngineDriver(checkpoint.directory, native_kernels=native)
    expected = checkpoint.greedy([whole[:36], whole, whole[:36]], NUM_TOKENS)
    for cached, prompt, tokens in zip(
        (0, 32, 32), (whole[:36], whole, whole[:36]), expected, strict=True
    ):
        (outcome,) = driver.run([Job(prompt, greedy(NUM_TOKENS))])
        assert outcome.token_ids == tokens
        # the second finds blocks of the first past its crossing, the third those before it
        assert outcome.num_cached == cached


@KERNELS
@pytest.mark.parametrize(
    "moved_after",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (1, 9)), 8, 10, 23],
)
def test_a_stream_that_moves_goes_on_with_the_same_tokens(
    checkpoint: TinyCheckpoint, native: bool, moved_after: int
) -> None:
    prompt = prompt_of(BOUNDARY - 8)
    (tokens,) = checkpoint.greedy([prompt], NUM_TOKENS)
    job = Job(prompt, SAMPLING, output=tokens[:moved_after])
    driver = EngineDriver(checkpoint.directory, native_kernels=native)
    for _ in range(2):
        (outcome,) = driver.run([job])
        assert outcome.token_ids == tokens
        alone = replace(outcome, token_ids=tokens[moved_after:])
        assert_exact(checkpoint, [*prompt, *tokens[:moved_after]], alone)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"async_scheduling": False}])
def test_the_device_runner_answers_like_transformers(
    checkpoint: TinyCheckpoint, settings: dict[str, Any]
) -> None:
    prompts: Sequence[list[int]] = crossing_prompts()
    with torch.inference_mode(), reference_layers():
        driver = CudaDriver(checkpoint.directory, **settings)
        batches = [[Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]] * 2
        report = drive(driver, batches, steps_between=2)
    assert report.tokens == checkpoint.greedy(list(prompts), NUM_TOKENS) * 2
