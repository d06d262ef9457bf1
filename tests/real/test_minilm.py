"""Embeddings of MiniLM are those of transformers, pooled by hand."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.fakes.pool_driver import PoolDriver
from tests.real.texts import LANGUAGES, prose
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared.config.model import ModelSettings

LONGEST = 256
"""Tokens, special ones included."""
SIMILAR = ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "Stocks fell on Monday.")
ROUNDED = 5e-4
"""Tolerance of float32 with C kernels, which multiply integers of 16 bits; torch's are equal."""
NEAR = 0.9999
"""Least cosine by default."""
pytestmark = pytest.mark.timeout(120)


def test_embeddings_of_texts_are_those_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("minilm")
    manual = prose(20_000)
    texts = [*SIMILAR, *LANGUAGES.values(), "", *(manual[:n] for n in (40, 400, 4000, 20_000))]
    loaded = load_model(ModelSettings(model=str(directory)))
    encoder = TextEncoder(loaded.tokenizer, loaded.lean_json)
    prompts = [
        encoder.work(each, add_special_tokens=True, max_tokens=LONGEST, side="right")[0]()
        for each in texts
    ]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for text, prompt in zip(texts, prompts, strict=True):
        given = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        assert given["input_ids"][0].tolist() == prompt
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].mean(0)
        expected.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    exact = PoolDriver(directory, native_kernels=False).run(prompts)
    np.testing.assert_allclose(np.stack(exact), np.stack(expected), atol=2e-6)
    default = PoolDriver(directory, model={"dtype": "auto"}).run(prompts)
    rounded = PoolDriver(directory).run(prompts)
    np.testing.assert_allclose(np.stack(rounded), np.stack(expected), atol=ROUNDED)
    cosines = [float(a @ b) for a, b in zip(default, expected, strict=True)]
    assert min(cosines) >= NEAR, cosines
    first, second, other = default[: len(SIMILAR)]
    assert first @ second > 0.5 > first @ other + 0.3
