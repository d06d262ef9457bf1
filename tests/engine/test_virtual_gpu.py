"""`build_runner` with device cuda, from streamed weights to tokens, on a simulated GPU.

Nothing a launch does may wait for the device or mix it with the host; see tests/fakes/virtual_gpu.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tests.fakes.virtual_device import VirtualDevice, virtual_gpu
from tests.kernels.sampler_twins import random_params
from tests.rounds import rounds
from tokenmesh.engine.exec import build
from tokenmesh.engine.exec.cuda import runner as runner_module
from tokenmesh.engine.exec.cuda import step_buffer
from tokenmesh.engine.exec.cuda.make import warm_up
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.engine.sampling.device_sampler import DeviceSampler, Needs
from tokenmesh.shared.config.model import Dtype
from tokenmesh.shared.ids import BlobKey, GatewayId
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tensor_blob import TensorBlob

PROMPTS = [prompt_of(length, seed=length) for length in (1, 5, 16, 33, 17, 40)]
JOBS = [Job(prompt, greedy(6)) for prompt in PROMPTS]
SIZES: dict[str, Any] = {
    "num_gpu_blocks_override": 14,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
}
MODELS = ["llama", "qwen3", "ministral", "ministral3", "phi3_longrope", "llama_dynamic", "granite"]
DISTINCT = frozenset({"llama", "ministral3", "phi3_longrope", "llama_dynamic"})
"""One of each kind of rope; tests/engine/test_cuda_runner.py runs all of them."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualDevice]:
    # a separate test covers it
    monkeypatch.setattr(build, "warm_up", lambda runner, settings, max_model_len: None)
    with torch.inference_mode(), virtual_gpu() as device:
        yield device


def driver_of(tiny: Tiny, name: str = "llama", **settings: Any) -> EngineDriver:
    return EngineDriver(tiny(name).directory, device="cuda", **{**SIZES, **settings})


@pytest.mark.parametrize(
    "name",
    [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, name: str, gpu: VirtualDevice) -> None:
    driver = driver_of(tiny, name)
    tokens = driver.tokens(JOBS, steps_between=2)
    assert tokens == tiny(name).greedy(PROMPTS, 6, tokens)
    assert gpu.num_replays > 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.04), ("bfloat16", 0.3)])
def test_half_precision_is_near_to_full_precision(
    tiny: Tiny, dtype: Dtype, tolerance: float
) -> None:
    params = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def logprobs(dtype: Dtype) -> list[float]:
        driver = driver_of(tiny, dtype=dtype)
        assert driver.model.dtype == dtype
        (outcome,) = driver.run([Job(PROMPTS[-1], params)])
        assert outcome.prompt_logprobs is not None
        return [each.logprob for each in outcome.prompt_logprobs if each is not None]

    assert logprobs(dtype) == pytest.approx(logprobs("float32"), abs=tolerance)


@rounds("seed", 2, 12)
def test_all_that_a_sampler_can_do_waits_for_nothing(tiny: Tiny, seed: int) -> None:
    rng, largest = random.Random(seed), 2 * (seed % 2)
    jobs = []
    for number in range(8):
        params = random_params(rng, 160)
        fields = {"max_tokens": rng.randrange(1, 8), "prompt_logprobs": rng.choice([None, 0, 3])}
        known = {f: getattr(params, f) for f in params.__struct_fields__}
        jobs.append(
            Job(prompt_of(rng.randrange(1, 50), seed=number), SamplingParams(**known | fields))
        )
    graphs: dict[str, Any] = (
        {"max_cudagraph_capture_size": largest} if largest else {"enforce_eager": True}
    )
    outcomes = driver_of(tiny, **graphs).run(jobs, steps_between=1)
    expected = EngineDriver(tiny("llama").directory, native_kernels=False, **SIZES).run(
        jobs, steps_between=1
    )
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == wanted.token_ids
        assert (outcome.reason, outcome.error) == (wanted.reason, wanted.error)
        ranks = [(each.token_id, each.rank, each.top_ids) for each in outcome.logprobs]
        assert ranks == [(each.token_id, each.rank, each.top_ids) for each in wanted.logprobs]


def test_embeddings_of_a_prompt_are_uploaded_without_waiting(tiny: Tiny) -> None:
    values = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    blob = TensorBlob(dtype="float32", shape=(20, 64), data=values.numpy().tobytes())
    item = MediaItem(kind=EMBEDS, content_hash="e", offset=4, length=20, pixels=BlobKey("e"))
    job = Job(prompt_of(40), greedy(6), media=[item], embeddings={"e": blob})
    expected = EngineDriver(tiny("llama").directory, native_kernels=False, **SIZES).tokens([job])
    assert driver_of(tiny).tokens([job, JOBS[3]])[:1] == expected


def test_preempted_and_cancelled_rows_leave_the_others_alone(tiny: Tiny) -> None:
    driver = driver_of(tiny, num_gpu_blocks_override=7, kv_watermark=0.0)
    driver._engine.add(driver._request(Job(PROMPTS[1], greedy(50))))
    driver._engine.step()
    driver._engine.step()
    # the last launch is still in flight
    driver._engine.cancel(StreamKey(GatewayId("gateway"), 1, 0))
    driver._engine.take_output()
    outcomes = driver.run([Job(prompt, greedy(20)) for prompt in PROMPTS[2:]])
    tokens = [outcome.token_ids for outcome in outcomes]
    assert tokens == tiny("llama").greedy(PROMPTS[2:], 20, tokens)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0


def test_more_writes_than_a_step_carries_wait_for_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runner_module, step_buffer):
        monkeypatch.setattr(module, "WRITE_WORDS", 32)
    tokens = driver_of(tiny).tokens(JOBS)
    assert tokens == tiny("llama").greedy(PROMPTS, 6, tokens)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_graphs_are_recorded_again_after_a_sleep(
    tiny: Tiny, level: int, gpu: VirtualDevice
) -> None:
    driver = driver_of(tiny)
    expected = driver.tokens(JOBS)
    for _ in range(2):
        assert driver.sleep(level) > 0
        driver.model.resident.wake(("weights", "kv_cache"))
        before = gpu.num_replays
        assert driver.tokens(JOBS) == expected
        assert gpu.num_replays > before


def test_after_the_warm_up_all_is_as_if_there_had_been_none(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[Needs] = []
    find = DeviceSampler.needs

    def spy(self: DeviceSampler, numbers: Sequence[int]) -> Needs:
        needs.append(find(self, numbers))
        return needs[-1]

    monkeypatch.setattr(build, "warm_up", warm_up)
    monkeypatch.setattr(DeviceSampler, "needs", spy)
    driver = driver_of(tiny)
    kinds = {(n.has_filters, n.changes_logits, bool(n.num_top_by_index)) for n in needs}
    assert kinds >= {(False, False, False), (True, False, False)}
    assert kinds >= {(False, True, True), (True, True, True)}
    tokens = driver.tokens(JOBS)
    assert tokens == tiny("llama").greedy(PROMPTS, 6, tokens)


@pytest.mark.parametrize(
    "sizes",
    [{"max_num_batched_tokens": 1}, {"max_num_seqs": 1}, {"max_model_len": 2}, {"block_size": 1}],
    ids=str,
)
def test_a_worker_of_any_size_can_warm_up(
    tiny: Tiny, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "warm_up", warm_up)
    assert driver_of(tiny, **{"num_gpu_blocks_override": 100, **sizes}).tokens(
        [Job([5], greedy(1))]
    )
