"""A text that is put together of known words must have the ids that the tokenizer gives it."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tokenmesh.services.tokenizer_svc import word_cache as module
from tokenmesh.services.tokenizer_svc.encoding import encode_texts
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.services.tokenizer_svc.word_cache import WordCache, word_cache

CORPUS = (
    "the quick brown fox jumps over the lazy dog, isn't it? It's 1234 5678 -- e\u0301t\u00e9",
    "def f(x):\n    return [x,  x]\n\n\n\t# \u4f60\u597d\u4e16\u754c \u043c\u0438\u0440 ... ",
    "   spaces    in\u00a0many\u3000forms \r\n and the dogs' foxes jumped",
)
SPECIAL = ("<|bos|>", "<|end|>", "<\uff5cuser\uff5c>")
PIECES = st.sampled_from(
    (
        *(*" ".join(CORPUS).split(" "), *SPECIAL, "<think>", " ", "  ", "\n", "\t", "\r\n", "'s"),
        *("\u0301", "\u200b", "\x85", "\x1c", "\u2028", "\u00b2", "12345", "\u0085x", "!", "~"),
    )
)
TEXTS = st.lists(PIECES | st.just(" "), max_size=60).map("".join) | st.text(max_size=80)


def made(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: object = None, **added: bool
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, **added)])
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    found = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**found, "normalizer": normalizer}))


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), bytes_only])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3, QWEN2 = sorted(module._PATTERNS, key=len, reverse=True)
TOKENIZERS = {
    "gpt2": made(GPT2),
    "llama3": made(split(LLAMA3)),
    "qwen2": made(split(QWEN2), {"type": "NFC"}),
}


def cache_of(tokenizer: Tokenizer) -> WordCache | None:
    return word_cache(tokenizer, tokenizer.to_str().encode())


@cache
def shared(name: str) -> WordCache:
    found = cache_of(TOKENIZERS[name])
    assert found is not None
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_known_words_make_the_ids_of_the_text(name: str, text: str) -> None:
    expected = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    words = shared(name)
    parts = text.split(" ")
    pieces = [*module._divided(text, parts, [None] * len(parts)).unknown.values()]
    assert "".join(pieces) == text
    alone = [TOKENIZERS[name].encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert [token for ids in alone for token in ids] == expected
    assert words.encode(text) == expected
    assert words._learn(pieces) == alone
    assert words.encode(text) == expected
    bare, _ = words.work(text)
    assert bare() == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_added_and_texts_cut_as_without_it(
    name: str, limit: int | None, special: bool
) -> None:
    text = "the quick fox jumps over the dog"
    encoder = TextEncoder(TOKENIZERS[name])
    (whole,) = encode_texts(TOKENIZERS[name], [text], add_special_tokens=special)
    expected = whole if limit is None else [*whole[:special], *whole[special - limit :]]
    for _ in range(2):
        work, _ = encoder.work(text, add_special_tokens=special, max_tokens=limit)
        assert work() == expected


def test_only_words_are_kept_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    words = cache_of(TOKENIZERS["gpt2"])
    assert words is not None
    text = "the fox  jumped " + "x" * 40 + " end. caf\u00e9 tail\n over"
    for _ in range(20):
        words.encode(text)
    assert sorted(words._ids) == ["caf\u00e9", "end.", "fox", "jumped", "over"]
    parts = text.split(" ")
    pieces = module._divided(text, parts, [None, *map(words._ids.get, parts[1:])]).unknown
    assert [*pieces.values()] == ["the", "  jumped", " " + "x" * 40, " tail\n over"]
    monkeypatch.setattr(module, "_MOST_WORDS", 4)
    for _ in range(20):
        words.encode("a b c d e f g")
    assert 0 < len(words._ids) <= 4


def test_known_words_cost_little_and_unknown_texts_no_more_than_before() -> None:
    words = cache_of(TOKENIZERS["gpt2"])
    assert words is not None
    text = "the fox " * 500
    assert words.work(text)[1] >= len(text)
    for _ in range(100):
        words.encode(text)
    assert words.work(text)[1] < len(text) // 8
    assert words.work("x" * 40_000)[1] == 40_000


def test_a_text_of_mostly_unknown_words_is_encoded_whole_and_learned_in_part() -> None:
    words = cache_of(TOKENIZERS["gpt2"])
    assert words is not None
    text = " ".join(f"n{number}" for number in range(1000))
    expected = TOKENIZERS["gpt2"].encode(text, add_special_tokens=False).ids
    sizes = []
    for _ in range(2):
        assert words.encode(text) == expected
        sizes.append(len(words._ids))
    assert 0 < sizes[0] < sizes[1] < 1000


def test_a_text_of_many_unknown_pieces_is_not_divided_on_the_event_loop() -> None:
    words = cache_of(TOKENIZERS["gpt2"])
    assert words is not None
    words._learn([" fox"])
    text = "fox fox \u2014 " * (module._MOST_PIECES + 1)
    expected = TOKENIZERS["gpt2"].encode(text, add_special_tokens=False).ids
    work, cost = words.work(text)
    assert words.look_up(text, module._MOST_PIECES) is None
    assert cost == len(text)
    assert work() == expected


def test_words_of_many_ids_are_not_kept() -> None:
    words = cache_of(TOKENIZERS["gpt2"])
    assert words is not None
    words._learn([" " + "\u4e01" * 10, " fox"])
    assert [*words._ids] == ["fox"]


BY_METASPACE = made(pre_tokenizers.Metaspace())


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(made(GPT2, lstrip=True), id="lstrip"),
        pytest.param(made(GPT2, rstrip=True), id="rstrip"),
        pytest.param(made(GPT2, single_word=True), id="single-word"),
        pytest.param(made(GPT2, {"type": "NFKC"}), id="NFKC"),
        pytest.param(made(GPT2, {"type": "Prepend", "prepend": "x"}), id="prepend"),
        pytest.param(made(pre_tokenizers.ByteLevel(add_prefix_space=True)), id="prefix-space"),
        pytest.param(made(split(LLAMA3, "merged_with_next")), id="merged"),
        pytest.param(made(split(r"\w+ \w+|.")), id="other-pattern"),
        pytest.param(made(split(LLAMA3.replace(r"|\s+", r"|\S+ \S+|\s+"))), id="crossing-pattern"),
        pytest.param(BY_METASPACE, id="metaspace"),
        pytest.param(Tokenizer(models.Unigram([("a", 0.0)], 0)), id="unigram"),
    ],
)
def test_no_other_tokenizer_has_a_cache(tokenizer: Tokenizer) -> None:
    assert cache_of(tokenizer) is None


def test_an_added_token_with_a_space_forbids_the_cache() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["gpt2"].to_str())
    tokenizer.add_tokens([AddedToken("fox jumps", normalized=False)])
    assert cache_of(tokenizer) is None
