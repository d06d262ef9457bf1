"""Module trees of transformers on a GPU: eager and recorded steps, against the CPU's runner.

Torch itself fails a launch that waits for the device, except of a family whose code waits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.test_cuda_on_gpu import JOBS, waiting_forbidden
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import EAGER, ON_GPU, make_general
from tests.fakes.models import make_model
from tests.fakes.tiny import prompt_of

__all__ = ["waiting_forbidden"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # compiles every kernel
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SIZES: dict[str, Any] = {
    "model_impl": "transformers",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}


def checkpoint(name: str, folder: Path) -> Path:
    model = make_general(name, ON_GPU[name]) if name in ON_GPU else make_model(name)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["llama", *ON_GPU])
def test_a_tree_draws_on_a_gpu_what_it_draws_on_the_cpu(
    name: str, eager: bool, tmp_path: Path
) -> None:
    directory = checkpoint(name, tmp_path)
    driver = EngineDriver(directory, device="cuda", enforce_eager=eager, **SIZES)
    expected = EngineDriver(directory, **SIZES).tokens(JOBS, steps_between=1)
    assert driver.tokens(JOBS, steps_between=1) == expected
    # the rows once more, whose pages and states hold the others' numbers
    assert driver.tokens(JOBS) == expected
    sizes = driver.model.runner.graph_sizes  # type: ignore[union-attr]
    assert bool(sizes) == (not eager and name not in EAGER)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_tree_computes_in_bfloat16_on_a_gpu(name: str, tmp_path: Path) -> None:
    directory = checkpoint(name, tmp_path)
    jobs = [Job(prompt_of(length, seed=length), greedy(1)) for length in range(3, 40, 4)]
    drawn = EngineDriver(directory, device="cuda", dtype="bfloat16", **SIZES).tokens(jobs)
    expected = EngineDriver(directory, **SIZES).tokens(jobs)
    # tiny models have near ties
    assert sum(a == b for a, b in zip(drawn, expected, strict=True)) >= len(jobs) // 2


@pytest.mark.parametrize("level", [1, 2])
def test_a_tree_sleeps_and_wakes_on_a_gpu(level: int, tmp_path: Path) -> None:
    driver = EngineDriver(checkpoint("qwen3_next", tmp_path), device="cuda", **SIZES)
    expected = driver.tokens(JOBS)
    for _ in range(2):
        assert driver.sleep(level) > 0
        driver.model.resident.wake(("weights", "kv_cache"))
        assert driver.tokens(JOBS) == expected
