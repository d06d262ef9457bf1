"""Fill in the middle: markers are found in the vocabulary only."""

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.fakes.tokenizers import OpenVocabulary, byte_level_bpe
from tokenmesh.services.gateway.apis.openai.request import CompletionRequest
from tokenmesh.services.gateway.apis.openai.suffix import (
    FORMATS,
    Suffix,
    SuffixMarkers,
    check_copies,
    find_markers,
)
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.tokens import count_ids, pack_ids, unpack_ids


def vocabulary_with(folder: Path, *added: str) -> OpenVocabulary:
    byte_level_bpe(folder, *added)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return OpenVocabulary.of(tokenizer, tokenizer.get_added_tokens_decoder())


@pytest.mark.parametrize("markers", FORMATS, ids=lambda markers: markers.middle)
def test_text_and_ids_become_the_same_prompt(tmp_path: Path, markers: SuffixMarkers) -> None:
    vocabulary = vocabulary_with(tmp_path, *markers)
    found, marker_ids = find_markers(vocabulary)
    end = pack_ids([*vocabulary.encode("return x"), marker_ids[2]])
    suffix = Suffix("return x", found, marker_ids, end)
    text = suffix.around("def f(")
    assert text == f"{markers.prefix}def f({markers.suffix}return x{markers.middle}"
    prompt = vocabulary.encode("def f(")
    ids = unpack_ids(suffix.around_ids(prompt))
    assert ids == vocabulary.encode(text)
    assert len(ids) == len(prompt) + suffix.num_ids
    assert ids[0] == vocabulary.added_id(markers.prefix)


def test_the_ids_of_a_suffix_are_packed_once_for_all_prompts(tmp_path: Path) -> None:
    """64 prompts with a suffix of 20 KB held the event loop for a third of its time."""
    vocabulary = vocabulary_with(tmp_path, *FORMATS[0])
    ids = [5] * 20_000
    suffix = Suffix("", *find_markers(vocabulary), pack_ids(ids))
    once_s, again_s = [], []
    for _ in range(5):
        began_s = time.thread_time()
        pack_ids(ids)
        once_s.append(time.thread_time() - began_s)
        began_s = time.thread_time()
        assert count_ids(suffix.around_ids([5])) == 20_003
        again_s.append(time.thread_time() - began_s)
    assert min(again_s) < min(once_s) / 4


@pytest.mark.parametrize(
    ("prompts", "length", "kind", "setting"),
    [
        (["\N{GRINNING FACE}"] * 1024, 7_900_000, str, "gateway.max_body_bytes"),
        ([[5]] * 1024, 100_000, list, "gateway.max_json_ids"),
    ],
)
def test_a_suffix_that_prompts_multiply_is_refused_before_it_is_copied(
    prompts: Any, length: int, kind: type, setting: str
) -> None:
    limits = GatewaySettings()
    body = CompletionRequest(model="m", prompt=prompts, suffix="x")
    with pytest.raises(PayloadTooLarge, match=setting):
        check_copies(body, length, kind, limits)
    check_copies(body, 100, kind, limits)


def test_a_vocabulary_without_all_markers_is_refused(tmp_path: Path) -> None:
    vocabulary = vocabulary_with(tmp_path, "<fim_prefix>", "<fim_suffix>")
    with pytest.raises(InvalidInput, match="no markers") as wrong:
        find_markers(vocabulary)
    assert wrong.value.param == "suffix"


def test_an_ordinary_token_is_not_a_marker(tmp_path: Path) -> None:
    assert vocabulary_with(tmp_path).added_id("a") is None
