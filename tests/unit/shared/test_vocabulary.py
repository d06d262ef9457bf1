"""A vocabulary of names alone turns ids into the text of the tokenizer that it was made of."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.fakes.tokenizers import byte_level_bpe
from tests.unit.shared.test_detokenizer import metaspace
from tokenmesh import demo_model
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.text.token_names import MAX_IDS, TokenNames

FILE: Final = "tokenizer.json"


def unigram(_folder: Path) -> Tokenizer:
    """Pieces that come twice, as some converted models have them."""
    pieces = [("<unk>", 0.0), ("\u2581the", -1.0), ("s", -2.0), ("\u2581", -3.0), ("s", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def without_decoder(_folder: Path) -> Tokenizer:
    """Words with spaces between, one of them empty, some ids without a token."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 3, "b": 7}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def words(_folder: Path) -> Tokenizer:
    """A tokenizer like BERT's, in which parts of words begin with ##."""
    names = ["[UNK]", "[CLS]", "a", "##b", "don", "'", "t", "."]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


KINDS: Final[dict[str, Callable[[Path], Tokenizer]]] = {
    "bytes": lambda folder: read(byte_level_bpe(folder, "<|with space \u00e9|>")),
    "pieces": lambda _folder: metaspace(),
    "demo": lambda _folder: read(Path(demo_model.__file__).parent),
    "words": words,
    "unigram": unigram,
    "no decoder": without_decoder,
}


def read(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / FILE))


def bare(tokenizer: Tokenizer) -> str:
    """The JSON that tokenizers send, which has no merges."""
    whole: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    whole["model"].pop("merges", None)
    return msgspec.json.encode(whole).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_have_the_text_that_their_tokenizer_gives_them(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind](tmp_path)
    added = tokenizer.get_added_tokens_decoder()
    found = Vocabulary.load(bare(tokenizer), [id for id, token in added.items() if token.special])
    size = 3 + max([*tokenizer.get_vocab().values(), *added])
    assert found.added_ids == set(added)
    for token_id in range(size):
        assert found.name(token_id) == (tokenizer.id_to_token(token_id) or "")
    for text in ("a", "<s>", "<tool>", "no such token", *(each.content for each in added.values())):
        expected = tokenizer.token_to_id(text)
        assert found.added_id(text) == (expected if expected in added else None)
    chance = random.Random(0)
    for _ in range(300):
        ids = chance.choices(range(size), k=chance.randrange(12))
        assert found.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_vocabulary_takes_some_bytes_a_token() -> None:
    entries = {f"\u2581token{i}": i for i in range(50_000)}
    names = TokenNames(Tokenizer(models.BPE(entries, [])).to_str())
    held = [value for value in vars(names).values() if hasattr(value, "__len__")]
    num_bytes = sum(len(each) * getattr(each, "itemsize", 1) for each in held)
    spelled = sum(len(name.encode()) for name in entries)
    assert num_bytes < spelled + 6 * len(entries)
    assert not any(len(each) > 300 for each in held if isinstance(each, dict | set | list))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"model": {"vocab": 5}}',
        f'{{"model": {{"vocab": {{"a": {MAX_IDS}}}}}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {}}, "decoder": {"type": "Unheard"}}',
    ],
)
def test_what_cannot_be_a_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Vocabulary.load(text, ())
