"""Quantized weights and pages, experts, adapters, images and pooling on a GPU, against the CPU."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.engine.test_cuda_on_gpu import waiting_forbidden
from tests.engine.test_media_families import ONE, TEXT, THREE, ImageFamily, family
from tests.engine.test_mxfp4_checkpoint import write_pair
from tests.engine.test_quantized_experts import written
from tests.fakes.adapters import AdapterSpec, write_adapter
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.experts import stacks_of
from tests.fakes.models import Fake, make_fake, make_model
from tests.fakes.pool_driver import PoolDriver
from tests.fakes.poolers import DECODERS, ENCODERS, make_pooler, prompts, write_modules
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.kernels.moe import DeviceExperts
from tokenmesh.shared.messages.pooling import PoolingParams

__all__ = ["family", "waiting_forbidden"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # compiles every kernel
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SIZES: Final[dict[str, Any]] = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
JOBS: Final = [Job(prompt_of(length, seed=length), greedy(6)) for length in (1, 5, 17, 40)]


@pytest.mark.parametrize("scheme", ["pack4", "awq", "gptq_desc_act", "int8", "fp8_channel"])
def test_quantized_weights_draw_what_the_cpu_draws(scheme: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_fake(Fake("Qwen2", {"intermediate_size": 96})).save_pretrained(source)
    write_checkpoint(source, tmp_path / "out", tmp_path / "plain", SCHEMES[scheme])
    expected = EngineDriver(tmp_path / "out").tokens(JOBS)
    assert EngineDriver(tmp_path / "out", device="cuda", **SIZES).tokens(JOBS) == expected


@pytest.mark.parametrize("scheme", ["mxfp4", "pack4", "int8", "fp8_channel"])
def test_quantized_experts_stay_codes_and_draw_what_the_cpu_draws(
    scheme: str, tmp_path: Path
) -> None:
    directory = tmp_path / "quantized"
    if scheme == "mxfp4":
        write_pair(directory, tmp_path / "plain")
    else:
        directory, _ = written("qwen3_moe", SCHEMES[scheme], tmp_path)
    expected = EngineDriver(directory).tokens(JOBS)
    driver = EngineDriver(directory, device="cuda", **SIZES)
    assert all(isinstance(each, DeviceExperts) for each in stacks_of(driver.model))
    assert driver.tokens(JOBS, steps_between=1) == expected


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_pages_of_8_bits_draw_what_the_cpu_draws(tiny: Tiny, kind: str) -> None:
    directory = tiny("llama").directory
    expected = EngineDriver(directory, kv_cache_dtype=kind, native_kernels=False).tokens(JOBS)
    driver = EngineDriver(directory, device="cuda", kv_cache_dtype=kind, **SIZES)
    # a key that lies between two codes may get either
    equal = sum(a == b for a, b in zip(driver.tokens(JOBS), expected, strict=True))
    assert equal >= len(JOBS) - 1


def test_adapters_draw_what_the_cpu_draws(tiny: Tiny, tmp_path: Path) -> None:
    paths = [tmp_path / str(seed) for seed in range(3)]
    for seed, path in enumerate(paths):
        write_adapter(make_model("llama"), path, AdapterSpec(seed=seed, rank=1 + 7 * seed))

    def drawn(**settings: Any) -> list[list[int]]:
        lora = {"enable_lora": True, "max_loras": 3}
        driver = EngineDriver(tiny("llama").directory, lora=lora, **settings)
        read = [None, *(driver.model.adapters.read(path) for path in paths)]
        jobs = [Job(job.prompt, job.sampling, adapter=each) for job in JOBS for each in read]
        return driver.tokens(jobs)

    assert drawn(device="cuda", **SIZES) == drawn()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"], indirect=True)
def test_images_draw_what_transformers_draws(family: ImageFamily) -> None:
    driver = EngineDriver(family.directory, device="cuda", max_num_batched_tokens=64)
    given = [ONE, TEXT, THREE]
    assert driver.tokens(family.jobs(given), steps_between=1) == family.answers(given)


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta_v2", "qwen3", "gemma3_text"])
def test_models_that_pool_answer_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    if name in ENCODERS:
        make_pooler(ENCODERS[name], "Model").save_pretrained(tmp_path)
        write_modules(tmp_path)
    else:
        make_pooler(DECODERS[name], "ForCausalLM").save_pretrained(tmp_path)
        write_modules(tmp_path, "pooling_mode_lasttoken")
    given = prompts(7, 1, 33, 7, 20)
    tokens = PoolingParams(task="token_embed", use_activation=False)
    here, there = (PoolDriver(tmp_path, device=device, **SIZES) for device in ("cpu", "cuda"))
    for task in (None, tokens):
        params = () if task is None else (task,)
        for ours, theirs in zip(there.run(given, *params), here.run(given, *params), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
