"""Models whose every layer runs in Triton's interpreter, against transformers."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.general_models import GENERAL, make_general
from tests.fakes.models import make_model
from tests.fakes.tiny import prompt_of
from tests.kernels.interpreter import Interpreter
from tests.kernels.whole_model import greedy_logits

ATOL = 2e-4
CHUNK, NUM_DECODE = 11, 2

# Between them: norms of heads before and after rope and over all heads, norms after blocks and none
# before, windows, a scaled query, softcaps of scores and logits with gelu.
MODELS = [
    *(pytest.param(name, marks=pytest.mark.whole_model) for name in ("gemma2", "hunyuan")),
    *("olmo3", "ministral3", pytest.param("qwen3", marks=pytest.mark.slow)),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MODELS)
def test_interpreted_model_computes_what_transformers_does(
    name: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    prompt = prompt_of(17)
    oracle = make_general(name) if name in GENERAL else make_model(name)
    oracle.save_pretrained(tmp_path)
    logits = interpreter.call(greedy_logits, tmp_path, prompt, CHUNK, NUM_DECODE, timeout_s=100)
    tokens = logits.argmax(-1).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt + tokens[len(prompt) - 1 : -1]])).logits[0]
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
