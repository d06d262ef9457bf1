"""Quantized experts on the CUDA runner: they stay codes, and tokens are those of the CPU."""

from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.engine.test_mxfp4_checkpoint import write_pair
from tests.engine.test_quantized_experts import FP8_BLOCK, written
from tests.fakes.cuda_driver import CudaDriver, drive
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.experts import stacks_in
from tests.fakes.quantized import Scheme
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import prompt_of
from tests.kernels.far_device import FAR
from tokenmesh.engine.models.tree.quantized import deferred_experts
from tokenmesh.kernels.moe import DeviceExperts
from tokenmesh.shared.config.model import ModelImpl

pytestmark = pytest.mark.timeout(300)
JOBS: Final = [Job(prompt_of(5), greedy(3)), Job(prompt_of(19, seed=1), greedy(3))]
CASES: Final[dict[str, tuple[str, Scheme, ModelImpl]]] = {
    "pack4-tree": ("qwen3_moe", SCHEMES["pack4"], "transformers"),
    "awq": ("mixtral", SCHEMES["awq"], "auto"),
    "gptq-order": ("qwen3_moe", SCHEMES["gptq_desc_act"], "auto"),
    "int8": ("qwen3_moe", SCHEMES["int8"], "auto"),
    "fp8-block": ("qwen3_moe", FP8_BLOCK, "auto"),
}


def run(
    directory: Path, impl: ModelImpl, jobs: list[Job], share: float
) -> tuple[list[list[int]], list[bool]]:
    """The tokens, and of each stack of experts whether it is codes.

    share: of the memory that plain experts may take while they are loaded.
    """
    from tests.kernels.far_interpreter import far_device_interpreted

    shared = patch.object(deferred_experts, "_SHARE", share)
    with torch.inference_mode(), shared, far_device_interpreted():
        driver = CudaDriver(directory, on=FAR, model_impl=impl)
        stacks = stacks_in(driver.runner._forward.model)
        tokens = drive(driver, [jobs]).tokens
        return tokens, [isinstance(each, DeviceExperts) for each in stacks]


def check(
    directory: Path,
    impl: ModelImpl,
    interpreter: Interpreter,
    jobs: list[Job] = JOBS,
    share: float = 0.5,
) -> None:
    tokens, kinds = interpreter.call(run, directory, impl, jobs, share, timeout_s=280)
    assert kinds
    assert all(kinds)
    assert tokens == EngineDriver(directory).tokens(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_experts_stay_codes_on_a_device(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    family, scheme, impl = CASES[name]
    quantized, _ = written(family, scheme, tmp_path)
    check(quantized, impl, interpreter)


@pytest.mark.whole_model
def test_experts_of_gpt_oss_stay_in_mxfp4(interpreter: Interpreter, tmp_path: Path) -> None:
    """They are read layer by layer, as where plain ones do not fit into memory."""
    write_pair(tmp_path / "quantized", tmp_path / "plain")
    jobs = [Job(prompt_of(11), greedy(2))]
    check(tmp_path / "quantized", "auto", interpreter, jobs, share=0.0)
