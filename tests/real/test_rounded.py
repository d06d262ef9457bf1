"""Weights that are rounded when they are loaded, and rounded keys and values: what it costs."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.engine_driver import EngineDriver, Job
from tests.real.reference import copy_as
from tests.real.texts import prose
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

logger = logging.getLogger(__name__)
NUM_BYTES = 40_000
WINDOW = 1024
SCORED = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=1)
BOUNDS: dict[str, tuple[dict[str, Any], float, float]] = {
    "int8 weights": ({"quantization": "int8"}, -0.005, 0.012),
    "int4 weights": ({"quantization": "int4"}, 0.01, 0.32),
    "int8 pages": ({"kv_cache_dtype": "int8"}, -0.005, 0.005),
    "fp8 pages": ({"kv_cache_dtype": "fp8"}, -0.005, 0.015),
}
"""Settings, and between what perplexity may lie above that with float32 activations, as a part of
it. The weights are those of a file in 4 bits, which another 4 bits do not hold."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Perplexity = Callable[..., float]


@pytest.fixture(scope="module")
def perplexity(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Perplexity:
    """Return the perplexity of SmolLM2 in bfloat16, with settings."""
    original = checkpoint("smollm2")
    file = copy_as(original, "BF16", tmp_path_factory.mktemp("copies") / "smollm2.BF16.gguf")
    tokenizer = Tokenizer.from_file(str(unpacked(original) / "tokenizer.json"))
    ids = tokenizer.encode(prose(NUM_BYTES)).ids
    jobs = [Job(ids[i : i + WINDOW], SCORED) for i in range(0, len(ids), WINDOW)]

    def get(**settings: Any) -> float:
        engine = EngineDriver(file, max_model_len=4096, num_gpu_blocks_override=700, **settings)
        total, count = 0.0, 0
        for outcome in engine.run(jobs):
            assert outcome.error is None
            assert outcome.prompt_logprobs is not None
            scores = [each.logprob for each in outcome.prompt_logprobs if each is not None]
            total, count = total + math.fsum(scores), count + len(scores)
        return math.exp(-total / count)

    return get


@pytest.fixture(scope="module")
def exact(perplexity: Perplexity) -> float:
    return perplexity(dtype="float32")


@pytest.mark.parametrize("name", BOUNDS)
def test_perplexity_with_rounded_numbers_is_near_that_without(
    perplexity: Perplexity, exact: float, name: str
) -> None:
    settings, least, most = BOUNDS[name]
    rounded = perplexity(dtype="auto", **settings)
    logger.info("%s: perplexity %.3f, exact %.3f", name, rounded, exact)
    assert least <= rounded / exact - 1 <= most
