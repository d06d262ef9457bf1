"""A text that is divided has the ids of the whole, and what is refused is refused in time."""

import json
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.fakes.tokenizers import CORPUS
from tests.unit.tokenizer_svc.test_word_cache import TEXTS, TOKENIZERS, made, split
from tokenmesh.services.tokenizer_svc import text_encoder as module
from tokenmesh.services.tokenizer_svc.encoding import MOST_BYTES, Side, encode_texts
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.services.tokenizer_svc.text_borders import Borders, find_borders
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared.errors import PayloadTooLarge

GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(model: object, trainer: object, pre: object = None, normal: object = None) -> Tokenizer:
    tokenizer = Tokenizer(model)  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre  # type: ignore[assignment]
    tokenizer.normalizer = normal  # type: ignore[assignment]
    tokenizer.train_from_iterator(CORPUS, trainer)  # type: ignore[arg-type]
    return tokenizer


def sentencepiece_bpe(*before: object) -> Tokenizer:
    spaces = normalizers.Sequence([*before, normalizers.Replace(" ", "\u2581")])
    split_before = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer = trained(models.BPE(), trainer, split_before)
    found = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(
        json.dumps(
            {**found, "pre_tokenizer": None, "normalizer": json.loads(spaces.__getstate__())}
        )
    )


def bert() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    return trained(
        *(models.WordPiece(unk_token="[UNK]"), trainer),
        *(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    )


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())


ALL = {
    **TOKENIZERS,
    "gpt4o": made(split(GPT4O)),
    "bert": bert(),
    "t5": unigram(),
    "gemma": sentencepiece_bpe(),
    "llama2": sentencepiece_bpe(normalizers.Prepend("\u2581")),
}
MARKS = st.just(" a b\nc\u4f60 \u597d, 1 2x.\u4e16\u3002A! b;c ")
WORDS = st.lists(TEXTS | MARKS, max_size=30).map("".join)


HARD = (
    *(
        "\u304c\u3002",
        "\u304c,",
        "\u30d1.",
        "ba.b",
        " b",
        " a",
        "  ",
        "x",
        " foo",
        "foo ",
        " <y> ",
    ),
    *(
        "\uff9e ",
        " \uff9e",
        " \ufe70 ",
        "\uac00\uff0c",
        "\u4f60\u3002",
        " \u4f60 ",
        "\ufdfa",
        "a_",
    ),
)


def of_marks_behind_letters() -> Tokenizer:
    """GPT-2's, with tokens of what stands at both sides of a border."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFD()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([first + last for first in HARD for last in HARD], trainer)
    found = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**found, "normalizer": None}))


VARIED = {name: ALL[name] for name in ("gpt4o", "bert", "t5", "gemma", "llama2")}
VARIED["gpt2"] = of_marks_behind_letters()
CHANGES: list[JsonObject] = [
    {"type": "Nmt"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    {
        **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
        **{"strip_accents": None, "lowercase": False},
    },
]
CHANGES += [{"type": each} for each in ("NFD", "NFKD", "NFC", "NFKC", "Lowercase", "StripAccents")]
CHANGES += [
    {"type": "Replace", "pattern": {"String": before}, "content": after}
    for before, after in (("a.", "x"), (".", "x"), ("b", ".b"), ("b", "\u0301"), ("x", ""))
]
ADDED = st.sampled_from(("foo", "<y>", "_", "x.y", "a.", "\ufdfa", "\u2581", "\u2581\u2581"))


def varied(
    name: str, changes: list[JsonObject], is_first: bool, scheme: str, added: dict[str, bool]
) -> Tokenizer:
    """A tokenizer with more normalizers, and with added tokens behind 40 others."""
    tokenizer = VARIED[name]
    found = json.loads(tokenizer.to_str())
    own = [found["normalizer"]] if found["normalizer"] else []
    steps = [*changes, *own] if is_first else [*own, *changes]
    found["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    if (found["pre_tokenizer"] or {}).get("type") == "Metaspace":
        found["pre_tokenizer"]["prepend_scheme"] = scheme
    changed = Tokenizer.from_str(json.dumps(found))
    changed.add_tokens([AddedToken(f"<x{index}>", normalized=False) for index in range(40)])
    changed.add_tokens([AddedToken(content, normalized=is_n) for content, is_n in added.items()])
    return changed


def find_change(pattern: str) -> JsonObject:
    return next(each for each in CHANGES if each.get("pattern") == {"String": pattern})


def borders_of(tokenizer: Tokenizer) -> Borders | None:
    return find_borders(tokenizer, tokenizer.to_str().encode())


def whole_and_parts(
    tokenizer: Tokenizer, borders: Borders, text: str
) -> tuple[list[int], list[int]]:
    """The ids of a text, and those of its parts."""
    places = borders.all_in(text)
    starts = [0, *(borders.behind(place, text) for place in places)]
    parts = [text[start:end] for start, end in zip(starts, [*places, len(text)], strict=True)]
    whole, *found = encode_texts(tokenizer, [text, *parts])
    return whole, [token for ids in found for token in ids]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12)
@given(text=WORDS)
def test_the_parts_of_a_text_have_its_ids(name: str, text: str) -> None:
    borders = borders_of(ALL[name])
    assert borders is not None
    whole, parts = whole_and_parts(ALL[name], borders, text)
    assert parts == whole


@pytest.mark.parametrize("name", VARIED)
@settings(max_examples=15)
@given(data=st.data())
def test_the_parts_have_the_ids_whatever_the_normalizers_and_added_tokens(
    name: str, data: st.DataObject
) -> None:
    tokenizer = varied(
        name,
        data.draw(st.lists(st.sampled_from(CHANGES), max_size=2)),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(("first", "always", "never"))),
        data.draw(st.dictionaries(ADDED, st.booleans(), max_size=2)),
    )
    borders = borders_of(tokenizer)
    for _ in range(8 if borders else 0):
        assert borders is not None
        text = data.draw(st.lists(st.sampled_from(HARD) | st.just("a b"), max_size=8).map("".join))
        whole, parts = whole_and_parts(tokenizer, borders, text)
        assert parts == whole


@pytest.mark.parametrize(
    ("name", "changes", "added", "text"),
    [
        ("llama2", [], {"foo": False}, "a foo b"),
        ("gpt2", [{"type": "NFD"}], {}, "a \u304c\u3002b"),
        ("gpt2", [{"type": "NFKD"}], {}, "\u304c,b"),
        ("gpt2", [find_change("a.")], {}, "ba.b"),
        ("gpt2", [find_change(".")], {}, "ba.b"),
    ],
)
def test_no_border_is_where_an_added_token_or_a_normalizer_reaches_over_it(
    name: str, changes: list[JsonObject], added: dict[str, bool], text: str
) -> None:
    tokenizer = varied(name, changes, True, "first", added)
    borders = borders_of(tokenizer)
    if borders is not None:
        whole, parts = whole_and_parts(tokenizer, borders, text)
        assert parts == whole


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12)
@given(text=WORDS, most=st.integers(0, 60))
def test_portions_give_at_least_the_ids_that_are_kept(
    name: str, side: Side, text: str, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PORTION_CHARS", 8)
        encoder = TextEncoder(ALL[name])
        (whole,) = encode_texts(ALL[name], [text])
        assert encoder.ids(text) == encoder.ids(text, side="left") == whole
        kept = encoder.ids(text, most, side)
        assert len(kept) >= min(most, len(whole))
        assert kept == (whole[len(whole) - len(kept) :] if side == "left" else whole[: len(kept)])
        work, _ = encoder.work(text, add_special_tokens=False, max_tokens=most, side=side)
        assert work() == (whole[len(whole) - most :] if side == "left" else whole)[:most] or (
            len(whole) <= most and work() == whole
        )
        assert encoder.all_ids([text, "x", text]) == [whole, encoder.ids("x"), whole]


UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "pattern": lambda: made(split(r"[a-z ]+|\s+|.")),
    "added token with a space": lambda: made(pre_tokenizers.ByteLevel(False), None, lstrip=True),
    "one piece with words in its tokens": lambda: trained(
        *(models.BPE(), trainers.BpeTrainer(vocab_size=300, show_progress=False)),
        *(None, normalizers.Replace(" ", "\u2581")),
    ),
    "no whitespace splitter": lambda: trained(
        *(models.Unigram(), trainers.UnigramTrainer(vocab_size=200, show_progress=False)),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_of_which_too_little_is_known_has_no_borders(name: str) -> None:
    tokenizer = UNKNOWN[name]()
    if name.startswith("added"):
        assert borders_of(tokenizer) == Borders(has_marks=True)  # it begins with a bracket
    else:
        assert borders_of(tokenizer) is None
        long = "a b " * (MOST_BYTES // 4 + 1)
        with pytest.raises(PayloadTooLarge, match=f"at most {MOST_BYTES}"):
            TextEncoder(tokenizer).ids(long, 1)


@pytest.mark.parametrize("run", ["w" * (1 + (1 << 19)), "\U0001f600" * (1 + (1 << 17))])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_run_without_borders_is_refused_only_where_its_ids_are_kept(
    side: Side, run: str
) -> None:
    encoder = TextEncoder(TOKENIZERS["gpt2"])
    words = "the quick " * 8000
    with pytest.raises(PayloadTooLarge, match="without a space"):
        encoder.ids(run, 5, side)
    text = f"{run} {words}" if side == "left" else f"{words} {run}"
    assert len(encoder.ids(text, 5, side)) > 5


@pytest.mark.parametrize(
    ("run", "has_marks"),
    [
        pytest.param("iVBORw0KGgoAAAANSUhEUg" * 6300, True, id="base64 of an image of 100 KB"),
        pytest.param("\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 60_000, True, id="Chinese"),
        pytest.param("\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 29_000, False, id="without marks"),
        pytest.param("(a)=>{b(c[d]||e);return!f}" * 12_000, False, id="code without spaces"),
        pytest.param("https://a.test/b?c=d&e=%F0" * 12_000, False, id="an address"),
    ],
)
def test_runs_of_ordinary_prompts_are_not_refused(run: str, has_marks: bool) -> None:
    borders = Borders(has_marks=has_marks)
    assert "".join(module._from_start(run, borders)) == run
    assert "".join(reversed([*module._from_end(run, borders)])) == run


def test_what_truncation_drops_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(tokenizer: Tokenizer, texts: list[str], **options: bool) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return encode_texts(tokenizer, texts, **options)

    encoder = TextEncoder(ALL["bert"])
    monkeypatch.setattr(module, "encode_texts", counted)
    text = "the quick fox " * 280_000
    for side in ("left", "right"):
        work, _ = encoder.work(text, add_special_tokens=False, max_tokens=1, side=side)
        assert len(work()) == 1
    assert len(sizes) == 2
    assert max(accumulate(sizes)) <= 2 * module.PORTION_CHARS
