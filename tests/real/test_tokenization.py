"""Text becomes the tokens that the models' own tokenizers make of it, and text again."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.real.reference import tokenizer_of, with_single_digits
from tests.real.texts import mixed_text
from tokenmesh.services.tokenizer_svc.encoding import encode_with_ends
from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer, load_model
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared.config.model import ModelSettings

NUM_BYTES = 2_000_000
PART = 20_000
"""Characters of a text, of which the whole consists."""
MOST_CHARS = 250_000
"""At most four bytes each: what can be encoded at once."""
LONGEST_SPACES = 31
"""In one token of Gemma."""
CUT_OFF = "\ufffd"
LOST = {"smollm2": "\x04\x06\x13\x14\x16\x1d", "gemma3-270m": "\u2581"}
"""Characters for which a vocabulary has no tokens; Gemma writes spaces so."""


@dataclass(frozen=True)
class Case:
    name: str
    loaded: LoadedTokenizer
    reference: Tokenizer
    """The model's own."""
    transformers: Tokenizer
    """The tokenizer that transformers reads out of the file."""
    text: str

    @property
    def parts(self) -> list[str]:
        return [self.text[i : i + PART] for i in range(0, len(self.text), PART)]

    @property
    def kept_parts(self) -> list[str]:
        """Those that can be decoded to what they were."""
        return [each.translate(dict.fromkeys(map(ord, LOST[self.name]))) for each in self.parts]


MODELS = ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    file = checkpoint(request.param)
    loaded = load_model(ModelSettings(model=str(file)))
    read = tokenizer_of(file)
    own = with_single_digits(read) if request.param == "smollm2" else read
    added = loaded.tokenizer.get_added_tokens_decoder()
    special = [each.content for each in added.values() if each.special]
    text = mixed_text(NUM_BYTES + NUM_BYTES // 20, special[:40])
    if request.param == "gemma3-270m":
        # See the test of long runs of spaces.
        text = re.sub(f" {{{LONGEST_SPACES},}}", " " * LONGEST_SPACES, text)
    return Case(request.param, loaded, own, read, text)


def without_digits(text: str) -> str:
    return "".join("" if each.isnumeric() else each for each in text)


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def first_difference(case: Case, text: str, ours: list[int], theirs: list[int]) -> str:
    place = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    names = [
        [case.loaded.tokenizer.id_to_token(i) for i in ids[place - 2 : place + 6]]
        for ids in (ours, theirs)
    ]
    return f"{names[0]} instead of {names[1]} in {text!r:.200}"


def test_tokens_of_mixed_text_are_those_of_the_models_own_tokenizer(case: Case) -> None:
    encoder = TextEncoder(case.loaded.tokenizer, case.loaded.lean_json)
    expected = ids_of(case.reference, case.parts)
    different = [
        first_difference(case, text, ours, theirs)
        for text, theirs in zip(case.parts, expected, strict=True)
        if (ours := encoder.ids(text)) != theirs
    ]
    assert len(case.text.encode()) >= NUM_BYTES
    assert different == []
    # long texts are encoded in portions, except for Gemma, whose tokenizer cuts nowhere
    long = case.text if case.name == "smollm2" else case.text[:MOST_CHARS]
    assert encoder.ids(long) == ids_of(case.reference, [long])[0]


def test_tokens_of_text_without_digits_are_those_that_transformers_reads(case: Case) -> None:
    texts = [without_digits(each) for each in case.parts]
    encoder = TextEncoder(case.loaded.tokenizer, case.loaded.lean_json)
    assert encoder.all_ids(texts) == ids_of(case.transformers, texts)


def test_tokens_of_mixed_text_become_the_text_again(case: Case) -> None:
    encoder = TextEncoder(case.loaded.tokenizer, case.loaded.lean_json)
    for text in case.kept_parts:
        ids = encoder.ids(text)
        assert case.loaded.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokens_end_where_their_text_ends(case: Case) -> None:
    for text in case.kept_parts[::10]:
        ids, ends = encode_with_ends(case.loaded.tokenizer, text)
        start, held = 0, []
        for token, end in zip(ids, ends, strict=True):
            held.append(token)
            piece = case.loaded.tokenizer.decode(held, skip_special_tokens=False)
            if CUT_OFF not in piece:
                assert piece == text[start:end]
                start, held = end, []
        assert (start, held) == (len(text), [])


@pytest.mark.slow
def test_a_long_run_of_spaces_begins_with_gemmas_longest_token(
    checkpoint: Callable[[str], Path],
) -> None:
    """As SentencePiece and llama.cpp do with symbols that users have defined; transformers does not
    find these tokens in the text, and builds others of pairs."""
    loaded = load_model(ModelSettings(model=str(checkpoint("gemma3-270m"))))
    ids = TextEncoder(loaded.tokenizer, loaded.lean_json).ids(f"a{' ' * 40}b")
    pieces = [loaded.tokenizer.decode([each], skip_special_tokens=False) for each in ids]
    assert pieces == ["a", " " * LONGEST_SPACES, " " * 9, "b"]
