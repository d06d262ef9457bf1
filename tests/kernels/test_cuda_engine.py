"""The CUDA runner on interpreted kernels: whole engine, eager and recorded steps, nothing read.

The fake device records without warming up: recorded steps run at their first replay.
"""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.fakes.cuda_driver import run
from tests.fakes.engine_driver import Job, greedy
from tests.fakes.models import make_model
from tests.fakes.tiny import TinyCheckpoint, prompt_of
from tests.kernels.interpreter import Interpreter

PROMPTS = [prompt_of(5), prompt_of(26, seed=1), prompt_of(9, seed=2)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.whole_model),
        "ministral",
    ],
)
def test_interpreted_engine_draws_what_transformers_does(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    make_model(name).save_pretrained(tmp_path)
    expected = TinyCheckpoint(tmp_path, lambda: make_model(name)).greedy(PROMPTS, 4)
    jobs = [Job(prompt, greedy(4)) for prompt in PROMPTS]
    report = interpreter.call(run, tmp_path, [jobs], 0, {}, timeout_s=100)
    assert report.tokens == expected
    assert report.num_replays > 0
