"""The CUDA runner on a GPU: compiled kernels, real graphs, pinned copies."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of

PROMPTS = [prompt_of(length, seed=length) for length in (1, 5, 16, 33, 17, 40)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # compiles every kernel
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def outputs(tiny: Tiny, name: str, dtype: Any, **settings: Any) -> list[list[int]]:
    driver = EngineDriver(
        tiny(name).directory, dtype=dtype, device="cuda", max_num_seqs=4, **settings
    )
    return driver.tokens([Job(prompt, greedy(8)) for prompt in PROMPTS], steps_between=1)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral"])
def test_greedy_tokens_on_a_gpu_are_those_of_transformers(
    tiny: Tiny, name: str, eager: bool
) -> None:
    tokens = outputs(tiny, name, "float32", enforce_eager=eager, max_num_batched_tokens=24)
    assert tokens == tiny(name).greedy(PROMPTS, 8)


@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral"])
def test_bfloat16_computes_on_a_gpu(tiny: Tiny, name: str) -> None:
    tokens = outputs(tiny, name, "bfloat16")
    expected = tiny(name).greedy(PROMPTS, 8)
    # tiny models have near ties, and a stream that took another turn stays apart
    assert sum(a[0] == b[0] for a, b in zip(tokens, expected, strict=True)) >= len(PROMPTS) // 2
