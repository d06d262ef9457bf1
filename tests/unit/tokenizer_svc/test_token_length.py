"""A bound on what a token stands for must hold for every text, or there is none."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.fakes.back_end import fake_tokenizer
from tokenmesh.services.tokenizer_svc.token_length import LengthBound, length_bound
from tokenmesh.shared.config.loader import DEMO_MODEL

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
COMPOSED = ["\u1f82", "\u0390", "\uac01", "\u1e69", "e\u0301", "\ufdfa"]


def byte_level(**changes: object) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(fake_tokenizer().to_str()), **changes}))


def normalized(*steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def sentence_piece() -> Tokenizer:
    vocab = {**BYTES, "\u2581": 256, "a": 257, "\u2581a": 258}
    model = models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("a b", normalized=True)])
    return tokenizer


def unigram() -> Tokenizer:
    scores = [*((name, -9.0) for name in BYTES), ("\u2581", -1.0), ("\u2581aa", -1.0)]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


BOUNDED = {
    "byte-level": byte_level(),
    "NFC": normalized(normalizers.NFC()),
    "NFKC": normalized(normalizers.NFKC()),
    "shrinking": normalized(normalizers.Replace("aaa", "b"), normalizers.NFC()),
    "stripping": normalized(normalizers.Strip()),
    "sentence-piece": sentence_piece(),
    "unigram": unigram(),
}
BOUNDS = {name: length_bound(tokenizer.to_str().encode()) for name, tokenizer in BOUNDED.items()}
TEXTS = (
    st.text(max_size=200)
    | st.text(alphabet="the quick brown<|endoftext|> \u4f60a", max_size=200)
    | st.lists(st.sampled_from(["<|end|>", "   \n", "a b", "aaa", *COMPOSED]), max_size=60).map(
        lambda parts: unicodedata.normalize("NFD", "".join(parts))
    )
)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    bound, tokenizer = BOUNDS[name], BOUNDED[name]
    assert bound is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert bound.least_tokens(text, num_tokens) == 0
    if num_tokens > 1:
        assert bound.least_tokens(text, 1) <= num_tokens


def test_a_text_over_the_bound_is_known_to_be_too_long() -> None:
    assert LengthBound(4).least_tokens("x" * 41, 10) == 11
    assert LengthBound(4).least_tokens("x" * 40, 10) == 0
    assert LengthBound(4, drops_spaces=True).least_tokens(" " * 100 + "x" * 40, 10) == 0
    assert LengthBound(4, drops_spaces=True).least_tokens(" x" * 41, 10) == 11


def test_the_model_that_ships_has_a_bound() -> None:
    text = (DEMO_MODEL / "tokenizer.json").read_bytes()
    bound = length_bound(text)
    longest = max(map(len, Tokenizer.from_str(text.decode()).get_vocab()))
    assert bound is not None
    assert bound.chars_per_token in (longest, 4 * longest)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "Nmt"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "BertNormalizer"}]}},
        {"decoder": {"type": "Metaspace"}},
        {"decoder": None},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Digits"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "behavior": "Removed"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
    ],
)
def test_where_characters_may_vanish_there_is_none(change: dict[str, object]) -> None:
    whole = json.loads(fake_tokenizer().to_str())
    assert length_bound(json.dumps({**whole, **change}).encode()) is None


def test_other_kinds_of_tokenizers_have_none() -> None:
    assert length_bound(Tokenizer(models.Unigram()).to_str().encode()) is None
    assert length_bound(Tokenizer(models.WordLevel()).to_str().encode()) is None
    assert length_bound(b"{") is None
