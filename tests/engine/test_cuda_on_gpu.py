"""The CUDA runner on a GPU: compiled kernels, real graphs, pinned copies, measured memory.

Torch itself fails a launch that waits for the device.
"""

import random
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tests.kernels.sampler_twins import random_params
from tokenmesh.engine.exec.cuda.launch import CudaLaunch
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.plan import StepPlan
from tokenmesh.shared.messages.sampling import SamplingParams

PROMPTS = [prompt_of(length, seed=length) for length in (1, 5, 16, 33, 17, 40)]
JOBS = [Job(prompt, greedy(8)) for prompt in PROMPTS]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # compiles every kernel
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(autouse=True)
def waiting_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = CudaRunner.launch

    def strict(self: CudaRunner, plan: StepPlan) -> CudaLaunch:
        with warnings.catch_warnings():
            # Torch warns that the mode is a prototype each time it is switched on.
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CudaRunner, "launch", strict)


def driver_of(tiny: Tiny, name: str, dtype: Any, **settings: Any) -> EngineDriver:
    return EngineDriver(
        tiny(name).directory, dtype=dtype, device="cuda", **{"max_num_seqs": 4, **settings}
    )


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral"])
def test_greedy_tokens_on_a_gpu_are_those_of_transformers(
    tiny: Tiny, name: str, eager: bool
) -> None:
    driver = driver_of(tiny, name, "float32", enforce_eager=eager, max_num_batched_tokens=24)
    assert driver.tokens(JOBS, steps_between=1) == tiny(name).greedy(PROMPTS, 8)


@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral"])
def test_bfloat16_computes_on_a_gpu(tiny: Tiny, name: str) -> None:
    tokens = driver_of(tiny, name, "bfloat16").tokens(JOBS, steps_between=1)
    expected = tiny(name).greedy(PROMPTS, 8)
    # tiny models have near ties, and a stream that took another turn stays apart
    assert sum(a[0] == b[0] for a, b in zip(tokens, expected, strict=True)) >= len(PROMPTS) // 2


def test_memory_is_measured_and_all_of_it_can_be_used(tiny: Tiny) -> None:
    driver = driver_of(
        tiny, "llama", "bfloat16", num_gpu_blocks_override=None, max_num_seqs=64, max_model_len=200
    )
    assert driver.model.runner.num_blocks == 1 + 64 * 13
    assert [len(tokens) for tokens in driver.tokens(JOBS * 20)] == [8] * 120


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_sleeps_and_wakes_more_than_once(tiny: Tiny, level: int, eager: bool) -> None:
    driver = driver_of(tiny, "llama", "float32", enforce_eager=eager)
    expected = driver.tokens(JOBS)
    for _ in range(3):
        assert driver.sleep(level) > 0
        driver.model.resident.wake(("weights", "kv_cache"))
        assert driver.tokens(JOBS) == expected


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_all_that_a_sampler_can_do_waits_for_nothing(tiny: Tiny, seed: int, eager: bool) -> None:
    rng = random.Random(seed)
    jobs = []
    for number in range(12):
        params = random_params(rng, 160)
        known = {f: getattr(params, f) for f in params.__struct_fields__}
        fields = {"max_tokens": rng.randrange(1, 8), "prompt_logprobs": rng.choice([None, 0, 3])}
        prompt = prompt_of(rng.randrange(1, 50), seed=number)
        jobs.append(Job(prompt, SamplingParams(**known | fields)))
    outcomes = driver_of(tiny, "llama", "float32", enforce_eager=eager).run(jobs, steps_between=1)
    expected = EngineDriver(tiny("llama").directory, max_num_seqs=4, native_kernels=False).run(
        jobs, steps_between=1
    )
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert outcome.error == wanted.error
    # a draw at the edge of a float may turn a stream
    equal = sum(a.token_ids == b.token_ids for a, b in zip(outcomes, expected, strict=True))
    assert equal >= len(jobs) - 2
