"""Incremental text equals the text of all ids at once, however the ids come."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.tokenizers import OpenVocabulary, byte_level_bpe
from tokenmesh.shared.text import make_detokenizer

TEXTS = [
    "The quick brown fox",
    "Gr\u00fc\u00dfe aus K\u00f6ln",
    "\u4f60\u597d\u4e16\u754c \U0001f642\U0001f469\u200d\U0001f680",
    "  two  spaces\n\n\tand a tab",
    "",
]


def metaspace() -> Tokenizer:
    """As Llama 2: a space is part of the next piece, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        "\u2581The",
        "\u2581quick",
        "\u2581a",
        "fox",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> OpenVocabulary:
    folder: Path = byte_level_bpe(tmp_path_factory.mktemp("bpe"), "<|with space \u00e9|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return OpenVocabulary.of(tokenizer, tokenizer.get_added_tokens_decoder())


@pytest.fixture(scope="module")
def sentence_piece() -> OpenVocabulary:
    tokenizer = metaspace()
    return OpenVocabulary.of(tokenizer, tokenizer.get_added_tokens_decoder())


def encode(vocabulary: OpenVocabulary, text: str) -> list[int]:
    return vocabulary.encode(text)


def named(*names: str) -> list[int]:
    """Ids of pieces of the metaspace vocabulary."""
    ids = [metaspace().token_to_id(name) for name in names]
    return [each for each in ids if each is not None]


def in_portions(
    vocabulary: OpenVocabulary,
    ids: list[int],
    cuts: list[int],
    *,
    skip: bool = True,
    spaces: bool = True,
) -> str:
    detokenizer = make_detokenizer(
        vocabulary, skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    parts = [detokenizer.push(ids[start:end]) for start, end in pairwise(borders)]
    return "".join(parts) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_one_token_at_a_time_gives_the_whole_text(byte_level: OpenVocabulary, text: str) -> None:
    ids = encode(byte_level, text)
    assert in_portions(byte_level, ids, list(range(len(ids)))) == text


@pytest.mark.parametrize("text", TEXTS[:3])
def test_byte_fallback_gives_the_whole_text(sentence_piece: OpenVocabulary, text: str) -> None:
    ids = encode(sentence_piece, text)
    assert in_portions(sentence_piece, ids, list(range(len(ids)))) == text


@settings(max_examples=200)
@given(
    ids=st.lists(st.integers(0, 420), max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=20),
)
def test_any_ids_in_any_portions_equal_the_tokenizers_own_text(
    byte_level: OpenVocabulary, ids: list[int], cuts: list[int]
) -> None:
    shown = in_portions(byte_level, ids, cuts, skip=False)
    assert shown == byte_level.decode(ids)


@settings(max_examples=100)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=20))
def test_any_text_in_any_portions_comes_back(
    sentence_piece: OpenVocabulary, text: str, cuts: list[int]
) -> None:
    ids = encode(sentence_piece, text)
    assert in_portions(sentence_piece, ids, cuts) == sentence_piece.decode(ids)


def test_a_cut_character_waits_for_its_rest(byte_level: OpenVocabulary) -> None:
    ids = encode(byte_level, "\U0001f680")
    assert len(ids) > 1
    detokenizer = make_detokenizer(byte_level)
    assert [detokenizer.push([each]) for each in ids] == [*[""] * (len(ids) - 1), "\U0001f680"]


def test_a_character_that_is_never_completed_is_shown_as_unknown(
    byte_level: OpenVocabulary, sentence_piece: OpenVocabulary
) -> None:
    first = {byte_level: encode(byte_level, "\U0001f680")[:1], sentence_piece: named("<0xF0>")}
    for vocabulary, ids in first.items():
        detokenizer = make_detokenizer(vocabulary)
        assert detokenizer.push(ids) == ""
        assert detokenizer.finish() == "\ufffd"


def test_garbage_bytes_do_not_wait_for_ever(sentence_piece: OpenVocabulary) -> None:
    garbage = named("<0xF0>") * 20
    detokenizer = make_detokenizer(sentence_piece)
    assert "\ufffd" in "".join(detokenizer.push([each]) for each in garbage)


def by_character(vocabulary: OpenVocabulary, ids: list[int]) -> str:
    """The whole text by SentencePiece's rule: a byte of no character is U+FFFD."""
    parts: list[bytes | int] = []
    for token_id in ids:
        piece = vocabulary.bytes_by_id.get(token_id)
        if piece is None:
            parts.append(token_id)
        elif parts and isinstance(parts[-1], bytes):
            parts[-1] += piece
        else:
            parts.append(piece)
    shown: list[int] = []
    for part in parts:
        if isinstance(part, int):
            shown.append(part)
            continue
        text = part.decode("utf-8", "surrogateescape")
        whole = "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)
        shown += [BYTE_IDS[byte] for byte in whole.encode()]
    return vocabulary.decode(shown)


BYTE_IDS = named(*(f"<0x{byte:02X}>" for byte in range(256)))
BROKEN = [
    "<0xF0>",
    "\u2581a",
    *("<0xE4>", "<0xBD>", "<0xA0>", "<0xF0>", "a"),
    *("<0xE4>", "<0xBD>", "<0xC3>", "<0xBC>", "<0xFF>", "<0x20>", "<0x61>"),
    *("\u2581The", "<0xE5>"),
]


@pytest.mark.parametrize("start", [0, 1, 2, 7, 12])
def test_broken_characters_have_one_text_in_all_portions(
    sentence_piece: OpenVocabulary, start: int
) -> None:
    ids = named(*BROKEN[start:])
    wanted = by_character(sentence_piece, ids)
    portions = [in_portions(sentence_piece, ids, [*range(0, 20, size)]) for size in range(1, 20)]
    assert set(portions) == {wanted}


@settings(max_examples=300)
@given(
    ids=st.lists(st.sampled_from(named(*BROKEN, "fox", "<0x80>", "<0x9F>", "<0x98>"))),
    cuts=st.lists(st.integers(0, 100), max_size=20),
)
def test_any_bytes_in_any_portions_have_one_text(
    sentence_piece: OpenVocabulary, ids: list[int], cuts: list[int]
) -> None:
    for spaces in (True, False):
        shown = in_portions(sentence_piece, ids, cuts, spaces=spaces)
        assert shown == by_character(sentence_piece, ids)


def test_special_tokens_are_skipped_or_shown(byte_level: OpenVocabulary) -> None:
    special = min(byte_level.special_ids)
    ids = [*encode(byte_level, "a"), special, *encode(byte_level, "b")]
    assert in_portions(byte_level, ids, [1, 2]) == "ab"
    shown = in_portions(byte_level, ids, [1, 2], skip=False)
    assert shown == f"a{byte_level.name(special)}b"


def test_a_first_token_keeps_its_space_after_a_prompt(sentence_piece: OpenVocabulary) -> None:
    ids = named("\u2581The", "\u2581quick")
    alone = make_detokenizer(sentence_piece)
    after = make_detokenizer(sentence_piece, ids[:1])
    assert (alone.push(ids[1:]), after.push(ids[1:])) == ("quick", " quick")


def test_added_tokens_are_written_without_spaces_between(sentence_piece: OpenVocabulary) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[A]": 0, "x": 1}, unk_token="x"))
    tokenizer.add_special_tokens(["[A]"])
    vocabulary = OpenVocabulary.of(tokenizer, [0])
    ids = [1, 0, 0, 1]
    spaced = in_portions(vocabulary, ids, [1, 2, 3], skip=False)
    tight = in_portions(vocabulary, ids, [1, 2, 3], skip=False, spaces=False)
    assert (spaced, tight) == ("x [A] [A] x", "x [A][A] x")


def test_unknown_ids_are_nothing(byte_level: OpenVocabulary) -> None:
    detokenizer = make_detokenizer(byte_level)
    assert detokenizer.push([10**6]) + detokenizer.finish() == ""


def test_a_token_by_itself_has_text_and_bytes(
    byte_level: OpenVocabulary, sentence_piece: OpenVocabulary
) -> None:
    part = encode(byte_level, "\U0001f680")[0]
    text, data = byte_level.token_text(part)
    assert text == "\ufffd"
    assert "\U0001f680".encode().startswith(data)
    quick, byte = named("\u2581quick", "<0xF0>")
    assert sentence_piece.token_text(quick) == (" quick", b" quick")
    assert sentence_piece.token_text(byte) == ("\ufffd", b"\xf0")
