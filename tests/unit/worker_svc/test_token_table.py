"""The bytes of every token, for each kind of tokenizer.json."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.engine.grammar.token_table import read_token_table
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.text.vocabulary import Vocabulary


def test_byte_level_tokens_are_what_they_decode_to(tmp_path: Path) -> None:
    file = byte_level_bpe(tmp_path, "<|call|>") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size()
    table = read_token_table(file, size + 30, frozenset({2, size + 100}))
    vocabulary = Vocabulary.load(tokenizer.to_str(), ())
    assert table.eos_ids == (2,)
    assert table.tokens[:4] == [b""] * 4
    assert table.tokens[size:] == [b""] * 30
    for token_id in range(4, size):
        assert table.tokens[token_id] == vocabulary.token_text(token_id)[1]
    assert table.special_ids[:4] == [0, 1, 2, 3]


def sentencepiece_bpe(path: Path) -> Path:
    """As Llama 2's tokenizer.json."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "\u2581a", "\u00e9", "\u2581\u2581{"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def test_sentencepiece_tokens_have_spaces_and_bytes(tmp_path: Path) -> None:
    table = read_token_table(sentencepiece_bpe(tmp_path), 300, frozenset({2}))
    assert table.tokens[:3] == [b"", b"", b""]
    assert table.tokens[3 : 3 + 256] == [bytes([byte]) for byte in range(256)]
    wanted = [b" ", b"a", b" a", "\u00e9".encode(), b"  {", b"<tool>"]
    assert table.tokens[259:265] == wanted
    assert table.tokens[265:] == [b""] * 35


ADDED = [
    "<tool>",
    "\u00e9",
    "na\u00efve",
    "\u00ff\u00fe",
    "a\u2192b",
    "\u0120x",
    "\u2581y",
    "\u4f60",
    " z",
]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_a_grammar_reads_an_added_token_as_its_text_is_decoded(kind: str, tmp_path: Path) -> None:
    """A byte-level tokenizer decodes the added token of one letter, U+00E9, to the byte E9."""
    is_byte_level = kind == "byte level"
    file = byte_level_bpe(tmp_path) / "tokenizer.json" if is_byte_level else None
    tokenizer = Tokenizer.from_file(str(file or sentencepiece_bpe(tmp_path)))
    tokenizer.add_tokens(ADDED)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    table = read_token_table(tmp_path / "tokenizer.json", size, frozenset({2}))
    vocabulary = Vocabulary.load(tokenizer.to_str(), ())
    for text in ADDED:
        token_id = tokenizer.get_vocab()[text]
        assert table.tokens[token_id] == vocabulary.token_text(token_id)[1], text
        decoded = tokenizer.decode([tokenizer.get_vocab()["a"], token_id])
        assert b"a" + table.tokens[token_id] == decoded.encode() or (
            "a" + table.tokens[token_id].decode(errors="replace") == decoded
        )


def test_unigram_pieces_are_a_list(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("\u2581the", -1.0), ("s", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table = read_token_table(tmp_path / "tokenizer.json", 3, frozenset({0}))
    assert table.tokens == [b"", b" the", b"s"]


def test_a_model_smaller_than_its_tokenizer_has_no_token_beyond(tmp_path: Path) -> None:
    file = byte_level_bpe(tmp_path) / "tokenizer.json"
    assert len(read_token_table(file, 50, frozenset({2})).tokens) == 50


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"model": {"vocab": 5}})])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_token_table(file, 10, frozenset({2}))
