"""Module trees of transformers on the CUDA runner: a device of its own, interpreted kernels."""

from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.fakes.cuda_driver import CudaDriver, Report, drive
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import EAGER, ON_GPU, make_general
from tests.fakes.models import make_model
from tests.fakes.tiny import prompt_of
from tests.kernels.far_device import FAR
from tokenmesh.engine.models.tree import swap

pytestmark = pytest.mark.timeout(300)
PROMPTS: Final = [prompt_of(5), prompt_of(26, seed=1)]
NUM_TOKENS: Final = 3
QUICK: Final = frozenset({"deepseek_v3", "qwen3_next"})
"""Between them: pages, latents, states, experts."""


def run(directory: Path, jobs: list[Job], settings: dict[str, Any]) -> Report:
    """The CUDA runner where tensors of the host and of the device do not mix."""
    from tests.kernels.far_interpreter import far_device_interpreted

    # the layers of a tiny model are replaced as well
    everything = patch.object(swap, "MIN_ELEMENTS", 1)
    with torch.inference_mode(), everything, far_device_interpreted():
        driver = CudaDriver(directory, on=FAR, model_impl="transformers", **settings)
        return drive(driver, [jobs])


def expected(directory: Path, jobs: list[Job]) -> list[list[int]]:
    """Return the tokens that the CPU's runner draws."""
    driver = EngineDriver(directory, model_impl="transformers", max_num_batched_tokens=24)
    return driver.tokens(jobs)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.whole_model if name in QUICK else pytest.mark.slow)
        for name in ("llama", *ON_GPU)
    ],
)
def test_a_tree_draws_on_a_device_what_it_draws_on_the_cpu(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    model = make_general(name, ON_GPU[name]) if name in ON_GPU else make_model(name)
    model.save_pretrained(tmp_path)
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in PROMPTS]
    report = interpreter.call(run, tmp_path, jobs, {}, timeout_s=280)
    assert report.tokens == expected(tmp_path, jobs)
    assert (report.num_replays > 0) == (name not in EAGER)
