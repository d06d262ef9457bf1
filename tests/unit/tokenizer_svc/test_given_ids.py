"""Ids of a client are counted before they are read, and read in slices."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tokenizer_svc.test_word_cache import TOKENIZERS
from tokenmesh.services.tokenizer_svc import encoding as module
from tokenmesh.services.tokenizer_svc.encoding import check_number, decode_ids, given_ids
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.tokens import pack_ids


@given(ids=st.lists(st.integers(0, 9), max_size=30), wrong=st.none() | st.integers(0, 29))
def test_ids_are_read_in_slices_and_the_first_wrong_one_is_named(
    ids: list[int], wrong: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pauses: list[float] = []
        patch.setattr(module, "_SLICE_IDS", 4)
        patch.setattr(module, "sleep_s", pauses.append)
        if wrong is not None and wrong < len(ids):
            ids[wrong] = 10
            with pytest.raises(InvalidInput, match=f"token id 10 at position {wrong} is out"):
                given_ids(pack_ids(ids), 10)
        else:
            assert given_ids(pack_ids(ids), 10) == ids
            assert len(pauses) == max(0, len(ids) - 1) // 4


def test_ids_are_counted_before_they_are_read() -> None:
    most = module.MOST_DECODED_IDS
    check_number(bytes(4 * most), "tokens")
    with pytest.raises(InvalidInput, match=re.escape(f"tokens holds {most + 1} ids")):
        check_number(bytes(4 * most + 4), "tokens")
    with pytest.raises(InvalidInput, match="32-bit"):
        given_ids(bytes(5), 10)


def test_ids_have_the_text_that_the_tokenizer_gives_them() -> None:
    tokenizer, text = TOKENIZERS["gpt2"], "the \u4f60\u597d\U0001f600<|end|> fox" * 20
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = decode_ids(tokenizer, pack_ids(ids), tokenizer.get_vocab_size(), "tokens")
    assert found == text
