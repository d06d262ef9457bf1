"""Images on the CUDA runner: rows of positions, deepstack, spans; interpreted kernels."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.engine.test_media_families import ONE, TEXT, ImageFamily, family
from tests.fakes.cuda_driver import CudaDriver, Report, StrictRunner, drive
from tests.fakes.engine_driver import Job, greedy
from tests.kernels.far_device import FAR
from tokenmesh.engine.exec.cuda.launch import CudaLaunch
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.plan import StepPlan

__all__ = ["family"]

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 3


def run(directory: Path, jobs: list[Job]) -> Report:
    from tests.kernels.far_interpreter import far_device_interpreted

    with torch.inference_mode(), far_device_interpreted() as device:

        def launch(self: CudaRunner, plan: StepPlan) -> CudaLaunch:
            """May read what the host has, such as the positions of a prompt."""
            device.may_read = False
            try:
                return CudaRunner.launch(self, plan)
            finally:
                device.may_read = True

        driver = CudaDriver(directory, on=FAR, max_num_batched_tokens=64)
        with patch.object(StrictRunner, "launch", launch):
            return drive(driver, [jobs], steps_between=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"], indirect=True)
def test_a_device_draws_what_transformers_draws(
    family: ImageFamily, interpreter: Interpreter
) -> None:
    made = family.jobs([ONE, TEXT])
    jobs = [Job(j.prompt, greedy(NUM_TOKENS), media=j.media, embeddings=j.embeddings) for j in made]
    report = interpreter.call(run, family.directory, jobs, timeout_s=280)
    assert report.tokens == [tokens[:NUM_TOKENS] for tokens in family.answers([ONE, TEXT])]
    # a text mixed with images is decoded by graphs, once it is alone
    assert report.num_graphs > 0
