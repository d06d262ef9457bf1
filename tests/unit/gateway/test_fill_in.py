"""Fill in the middle: markers are found in the vocabulary only."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.fakes.tokenizers import OpenVocabulary, byte_level_bpe
from tokenmesh.services.gateway.openai.completion_builder import (
    FORMATS,
    Suffix,
    SuffixMarkers,
    find_markers,
)
from tokenmesh.shared.errors import InvalidInput


def vocabulary_with(folder: Path, *added: str) -> OpenVocabulary:
    byte_level_bpe(folder, *added)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return OpenVocabulary.of(tokenizer, tokenizer.get_added_tokens_decoder())


@pytest.mark.parametrize("markers", FORMATS, ids=lambda markers: markers.middle)
def test_text_and_ids_become_the_same_prompt(tmp_path: Path, markers: SuffixMarkers) -> None:
    vocabulary = vocabulary_with(tmp_path, *markers)
    suffix = Suffix("return x", vocabulary.encode("return x"), *find_markers(vocabulary))
    text = suffix.around("def f(")
    assert text == f"{markers.prefix}def f({markers.suffix}return x{markers.middle}"
    ids = suffix.around(vocabulary.encode("def f("))
    assert ids == vocabulary.encode(str(text))
    assert ids[0] == vocabulary.added_id(markers.prefix)


def test_a_vocabulary_without_all_markers_is_refused(tmp_path: Path) -> None:
    vocabulary = vocabulary_with(tmp_path, "<fim_prefix>", "<fim_suffix>")
    with pytest.raises(InvalidInput, match="no markers") as wrong:
        find_markers(vocabulary)
    assert wrong.value.param == "suffix"


def test_an_ordinary_token_is_not_a_marker(tmp_path: Path) -> None:
    assert vocabulary_with(tmp_path).added_id("a") is None
