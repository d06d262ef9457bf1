"""Quantized checkpoints on the CUDA runner: weights stay codes, tokens are those of the CPU."""

from pathlib import Path
from typing import Final
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.fakes.cuda_driver import CudaDriver, drive
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import prompt_of
from tests.kernels.far_device import FAR
from tokenmesh.engine.models.quantization import write
from tokenmesh.engine.models.tree import swap
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.quantized_linear import DeviceCodes
from tokenmesh.shared.config.model import ModelImpl

pytestmark = pytest.mark.timeout(300)
LAYERS: Final = 2
JOBS: Final = [Job(prompt_of(5), greedy(3)), Job(prompt_of(26, seed=1), greedy(3))]


def run(directory: Path, jobs: list[Job], impl: ModelImpl) -> tuple[list[list[int]], int]:
    """The tokens, and the number of weights that stay codes on the device."""
    from tests.kernels.far_interpreter import far_device_interpreted

    packed: list[DeviceCodes] = []
    pack = DeviceCodes.pack

    def count(codes: Codes, bias: torch.Tensor | None) -> DeviceCodes:
        packed.append(pack(codes, bias))
        return packed[-1]

    counted = patch.object(DeviceCodes, "pack", staticmethod(count))
    # the layers of a tiny model are replaced as well
    everything = patch.object(swap, "MIN_ELEMENTS", 1)
    with torch.inference_mode(), counted, everything, far_device_interpreted():
        driver = CudaDriver(directory, on=FAR, model_impl=impl)
        return drive(driver, [jobs]).tokens, len(packed)


@pytest.mark.parametrize(
    ("to", "impl"),
    [
        pytest.param("int4", "native", marks=pytest.mark.slow),
        pytest.param("int8", "transformers", marks=pytest.mark.whole_model),
    ],
)
def test_a_quantized_model_draws_on_a_device_what_it_draws_on_the_cpu(
    to: str, impl: ModelImpl, interpreter: Interpreter, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = {"intermediate_size": 96, "num_hidden_layers": LAYERS}
    make_fake(Fake("Qwen2", sizes)).save_pretrained(source)
    assert write.main([str(source), str(out), "--format", to]) == 0
    tokens, count = interpreter.call(run, out, JOBS, impl, timeout_s=280)
    assert tokens == EngineDriver(out).tokens(JOBS)
    assert count >= 4 * LAYERS
