"""The CUDA runner on a fake GPU, its kernels stood for by their references: no Triton, no GPU.

Tokens must be those of transformers and of the CPU's runner, whatever is in flight.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.fakes.cuda_driver import CudaDriver, drive
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import Tiny, prompt_of
from tests.kernels.sampler_twins import random_params
from tests.rounds import rounds
from tokenmesh.engine.exec.cuda import runner as runner_module
from tokenmesh.engine.exec.cuda import step_buffer
from tokenmesh.engine.exec.cuda.forward import Forward
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages.sampling import SamplingParams

PROMPTS = [prompt_of(length, seed=length) for length in (1, 5, 16, 33, 17, 40)]
MODELS = ["llama", "qwen3", "mistral", "phi3_longrope", "llama_dynamic", "granite", "ministral3"]


@pytest.fixture(autouse=True)
def _on_references() -> Iterator[None]:
    with torch.inference_mode(), reference_layers():
        yield


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, each, marks=pytest.mark.slow if each and name != "qwen3" else ())
        for name in MODELS
        for each in ({}, {"enforce_eager": True}, {"async_scheduling": False})
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    tiny: Tiny, name: str, settings: dict[str, Any]
) -> None:
    driver = CudaDriver(tiny(name).directory, **settings)
    report = drive(driver, [[Job(prompt, greedy(6)) for prompt in PROMPTS]], steps_between=2)
    assert report.tokens == tiny(name).greedy(PROMPTS, 6, report.tokens)
    assert (report.num_replays > 0) == (not settings.get("enforce_eager", False))


@rounds("seed", 3, 18)
def test_all_that_a_sampler_can_do_is_what_the_cpu_does(tiny: Tiny, seed: int) -> None:
    rng, largest = random.Random(seed), 2 * (seed % 3)
    jobs = []
    for number in range(8):
        params = random_params(rng, 160)
        fields = {"max_tokens": rng.randrange(1, 8), "prompt_logprobs": rng.choice([None, 0, 3])}
        sampling = SamplingParams(
            **{f: getattr(params, f) for f in params.__struct_fields__} | fields
        )
        jobs.append(Job(prompt_of(rng.randrange(1, 50), seed=number), sampling))
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 12,
    }
    directory = tiny("llama").directory
    graphs: dict[str, Any] = (
        {"max_cudagraph_capture_size": largest} if largest else {"enforce_eager": True}
    )
    expected = EngineDriver(directory, max_model_len=96, native_kernels=False, **sizes).run(
        jobs, steps_between=1
    )
    outcomes = CudaDriver(directory, **sizes, **graphs).run(jobs, steps_between=1)
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == wanted.token_ids
        assert (outcome.reason, outcome.error) == (wanted.reason, wanted.error)
        _assert_close(outcome.logprobs, wanted.logprobs)
        _assert_close(outcome.prompt_logprobs or [], wanted.prompt_logprobs or [])


def _assert_close(entries: list[Any], wanted: list[Any]) -> None:
    for entry, other in zip(entries, wanted, strict=True):
        if other is None:
            assert entry is None
            continue
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert entry.top_ids == other.top_ids
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_preempted_rows_come_back_where_they_were(tiny: Tiny) -> None:
    prompts = PROMPTS[2:]
    driver = CudaDriver(tiny("llama").directory, num_gpu_blocks_override=8, kv_watermark=0.0)
    outcomes = driver.run([Job(prompt, greedy(20)) for prompt in prompts])
    assert [o.token_ids for o in outcomes] == tiny("llama").greedy(prompts, 20)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0


def test_a_prefix_that_is_cached_is_not_computed_again(tiny: Tiny) -> None:
    shared = prompt_of(40)
    prompts = [shared, [*shared, 7, 8], [*shared[:20], 9]]
    driver = CudaDriver(tiny("qwen3").directory)
    first = driver.run([Job(shared, greedy(4))])
    outcomes = first + driver.run([Job(prompt, greedy(4)) for prompt in prompts[1:]])
    assert [o.token_ids for o in outcomes] == tiny("qwen3").greedy(prompts, 4)
    assert [outcome.num_cached for outcome in outcomes] == [0, 32, 16]


def test_cancelled_rows_are_given_away_while_they_compute(tiny: Tiny) -> None:
    driver = CudaDriver(tiny("llama").directory, max_num_seqs=2)
    for number, prompt in enumerate(PROMPTS[:2], start=1):
        driver.engine.add(driver.request(Job(prompt, greedy(50))))
        driver.engine.step()
        driver.engine.step()
        # the last launch is still in flight
        driver.engine.cancel(StreamKey(GatewayId("gateway"), number, 0))
    driver.engine.take_output()
    report = drive(driver, [[Job(prompt, greedy(6)) for prompt in PROMPTS[2:]]])
    assert report.tokens == tiny("llama").greedy(PROMPTS[2:], 6)


def test_a_step_that_fails_ends_its_own_and_spares_the_others(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CudaDriver(tiny("llama").directory, max_step_failures=3)
    hidden, calls = Forward.hidden, iter([False, True, False])

    def broken(self: Forward, batch: Any) -> torch.Tensor:
        if next(calls, False):
            raise RuntimeError("out of luck")
        return hidden(self, batch)

    monkeypatch.setattr(Forward, "hidden", broken)
    jobs = [Job(prompt, greedy(6)) for prompt in PROMPTS]
    outcomes = driver.run(jobs, steps_between=1)
    expected = tiny("llama").greedy(PROMPTS, 6)
    failed = [outcome.error is not None for outcome in outcomes]
    assert 0 < sum(failed) < len(jobs)
    for outcome, tokens in zip(outcomes, expected, strict=True):
        assert outcome.error == "RuntimeError: out of luck" or outcome.token_ids == tokens
    again = driver.run([Job(PROMPTS[3], greedy(6))])
    assert again[0].token_ids == expected[3]


def test_a_token_outside_the_vocabulary_fails_its_request_alone(tiny: Tiny) -> None:
    jobs = [Job([5, 160], greedy(4)), Job(PROMPTS[1], greedy(4))]
    outcomes = CudaDriver(tiny("llama").directory).run(jobs)
    assert outcomes[0].error == "token id 160 is not in the vocabulary of 160"
    assert outcomes[1].token_ids == tiny("llama").greedy(PROMPTS[1:2], 4)[0]


def test_more_writes_than_a_step_carries_take_a_separate_copy(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runner_module, step_buffer):
        monkeypatch.setattr(module, "WRITE_WORDS", 32)
    report = drive(
        CudaDriver(tiny("llama").directory), [[Job(prompt, greedy(4)) for prompt in PROMPTS]]
    )
    assert report.tokens == tiny("llama").greedy(PROMPTS, 4)


def test_new_weights_are_those_that_compute(tiny: Tiny) -> None:
    """Level 2 of sleep: graphs must not know the old ones any more."""
    driver = CudaDriver(tiny("llama").directory)
    other = CudaDriver(tiny("llama_yarn").directory)
    driver.run([Job(PROMPTS[3], greedy(4))])
    driver.engine.forget_kv()
    driver.runner.drop_model()
    driver.runner.take_model(other.decoder)
    driver.runner.make_graphs(driver.runner.graph_sizes)
    report = drive(driver, [[Job(PROMPTS[3], greedy(4))]])
    assert report.num_replays > 0
    assert report.tokens == tiny("llama_yarn").greedy(PROMPTS[3:4], 4)
    assert report.tokens != tiny("llama").greedy(PROMPTS[3:4], 4)
