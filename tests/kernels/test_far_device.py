"""Whole pieces on a device of its own whose kernels are interpreted: what `is_cuda` decides."""

from pathlib import Path
from typing import Final

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from benchmarks.ops.batch import parse_batch
from benchmarks.ops.catalog import WORKS
from benchmarks.ops.gate import require_right
from benchmarks.ops.work import Dimensions
from tests.fakes.cuda_driver import CudaDriver, Report, drive
from tests.fakes.engine_driver import Job, greedy
from tests.fakes.models import make_model
from tests.fakes.tiny import TinyCheckpoint, prompt_of
from tests.kernels.far_device import FAR
from tests.kernels.sampler_twins import compare_twins_apart
from tests.rounds import rounds

pytestmark = pytest.mark.timeout(120)
SIZES: Final = Dimensions(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)


def prove(op: str) -> None:
    """As bench_ops does before it measures."""
    from tests.kernels.far_interpreter import far_device_interpreted

    with torch.inference_mode(), far_device_interpreted():
        work = WORKS[op](parse_batch("q5s20_2q1s17"), SIZES, torch.float32, FAR)
        require_right(op, work)
        if work.torch_way is not None:
            work.torch_way()


@pytest.mark.parametrize("op", sorted(WORKS))
def test_what_bench_ops_measures_on_a_gpu_is_right(op: str, interpreter: Interpreter) -> None:
    interpreter.call(prove, op, timeout_s=100)


@rounds("seed", 1, 2)
def test_a_sampler_keeps_host_and_device_apart(seed: int, interpreter: Interpreter) -> None:
    assert interpreter.call(compare_twins_apart, seed, 70, 5, timeout_s=100) > 10


def run(directory: Path, jobs: list[Job]) -> Report:
    """The CUDA runner where tensors of the host and of the device do not mix."""
    from tests.kernels.far_interpreter import far_device_interpreted

    with torch.inference_mode(), far_device_interpreted():
        return drive(CudaDriver(directory, on=FAR), [jobs])


@pytest.mark.whole_model
def test_an_engine_keeps_host_and_device_apart(interpreter: Interpreter, tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    prompts = [prompt_of(5), prompt_of(33, seed=1)]
    expected = TinyCheckpoint(tmp_path, lambda: make_model("qwen3")).greedy(prompts, 3)
    jobs = [Job(prompt, greedy(3)) for prompt in prompts]
    report = interpreter.call(run, tmp_path, jobs, timeout_s=100)
    assert report.tokens == expected
    assert report.num_replays > 0
