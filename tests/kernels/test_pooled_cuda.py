"""Models that pool on a GPU: a device of its own, interpreted kernels."""

from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.fakes.pool_driver import Numbers, PoolDriver
from tests.fakes.poolers import DECODERS, ENCODERS, make_pooler, prompts, write_modules
from tests.kernels.far_device import FAR
from tokenmesh.engine.exec import build, pool_build
from tokenmesh.engine.models.tree import swap
from tokenmesh.shared.messages.pooling import PoolingParams

pytestmark = pytest.mark.timeout(300)
TOKENS: Final = PoolingParams(task="token_embed", use_activation=False)
LENGTHS: Final = (5, 1, 17, 5, 23)
SETTINGS: Final[dict[str, Any]] = {
    "num_gpu_blocks_override": 32,
    "max_num_batched_tokens": 16,
    "long_prefill_token_threshold": 9,
    "max_num_seqs": 4,
}
QUICK: Final = frozenset({"modernbert"})


def run(directory: Path, lengths: tuple[int, ...]) -> list[list[Numbers]]:
    """Embeddings of prompts, and of each of their tokens."""
    from tests.kernels.far_interpreter import far_device_interpreted

    patches = (
        patch.object(build, "device_of", lambda _settings: FAR),
        patch.object(pool_build, "check_compiler", lambda: None),
        patch.object(pool_build, "gpu_budget", lambda _device, _settings: None),
        # the layers of a tiny model are replaced as well
        patch.object(swap, "MIN_ELEMENTS", 1),
    )
    with patches[0], patches[1], patches[2], patches[3], far_device_interpreted():
        driver = PoolDriver(directory, **SETTINGS)
        return answers(driver, lengths)


def answers(driver: PoolDriver, lengths: tuple[int, ...]) -> list[list[Numbers]]:
    given = prompts(*lengths)
    return [driver.run(given), driver.run(given, TOKENS)]


@pytest.mark.parametrize(
    "name",
    [
        each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
        for each in ("bert", "modernbert", "deberta_v2", "qwen3", "gemma3_text")
    ],
)
def test_a_device_answers_as_the_cpu_does(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    if name in ENCODERS:
        make_pooler(ENCODERS[name], "Model").save_pretrained(tmp_path)
        write_modules(tmp_path)
    else:
        make_pooler(DECODERS[name], "ForCausalLM").save_pretrained(tmp_path)
        write_modules(tmp_path, "pooling_mode_lasttoken")
    expected = answers(PoolDriver(tmp_path, native_kernels=False, **SETTINGS), LENGTHS)
    found = interpreter.call(run, tmp_path, LENGTHS, timeout_s=280)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=5e-5)
