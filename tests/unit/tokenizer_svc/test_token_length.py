"""A bound on what a token stands for must hold for every text, or there is none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.fakes.back_end import fake_tokenizer
from tokenmesh.services.tokenizer_svc.token_length import chars_per_token
from tokenmesh.shared.config.loader import DEMO_MODEL

LIMIT = chars_per_token(fake_tokenizer().to_str().encode())


@given(
    st.text(max_size=200) | st.text(alphabet="the quick brown<|endoftext|> \u4f60", max_size=200)
)
def test_no_text_has_fewer_tokens_than_it_says(text: str) -> None:
    assert LIMIT is not None
    assert len(text) <= LIMIT * len(fake_tokenizer().encode(text, add_special_tokens=False).ids)


def test_the_model_that_ships_has_a_bound() -> None:
    text = (DEMO_MODEL / "tokenizer.json").read_bytes()
    longest = chars_per_token(text)
    assert longest is not None
    assert longest == max(map(len, Tokenizer.from_str(text.decode()).get_vocab()))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"decoder": {"type": "Metaspace"}},
        {"decoder": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"added_tokens": [{"content": "<a>", "lstrip": True, "rstrip": False}]},
        {"added_tokens": [{"content": "<a>", "lstrip": False, "rstrip": True}]},
    ],
)
def test_where_characters_may_vanish_there_is_none(change: dict[str, object]) -> None:
    whole = json.loads(fake_tokenizer().to_str())
    assert chars_per_token(json.dumps({**whole, **change}).encode()) is None


def test_other_kinds_of_tokenizers_have_none() -> None:
    assert chars_per_token(Tokenizer(models.Unigram()).to_str().encode()) is None
    assert chars_per_token(Tokenizer(models.WordLevel()).to_str().encode()) is None
    assert chars_per_token(b"{") is None
