"""What the engines under comparison are given: a full tokenizer, and nano-vllm's requests."""

import json
from typing import Any

from tokenizers import Tokenizer

from benchmarks.nano_workload import nano_asks
from benchmarks.random_model import fill_vocabulary
from benchmarks.serve.results import ROOT

DEMO = ROOT / "tokenmesh" / "demo_model" / "tokenizer.json"


def demo() -> dict[str, Any]:
    return dict(json.loads(DEMO.read_text(encoding="utf-8")))


def test_every_id_of_the_vocabulary_has_a_text_of_its_own() -> None:
    filled = Tokenizer.from_str(json.dumps(fill_vocabulary(demo(), 2500)))
    assert filled.get_vocab_size() == 2500
    texts = [filled.decode([token]) for token in range(1536, 2500)]
    assert all(texts)
    assert len({*texts}) == len(texts)


def test_what_the_tokenizer_knew_stays_as_it_was() -> None:
    before = Tokenizer.from_str(json.dumps(demo()))
    after = Tokenizer.from_str(json.dumps(fill_vocabulary(demo(), 2500)))
    text = "The river 42 is <|im_end|> wide."
    assert after.encode(text).ids == before.encode(text).ids


def test_nano_vllms_requests_are_the_published_ones() -> None:
    asks = nano_asks()
    assert len(asks) == 256
    assert sum(length for _, length in asks) == 133_966
    assert all(100 <= len(prompt) <= 1024 and 100 <= length <= 1024 for prompt, length in asks)
    assert nano_asks(3) == asks[:3]
