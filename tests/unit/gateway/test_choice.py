"""A choice's text, end and token count, however its ids are split into messages."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tokenmesh.services.gateway.core.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk, merge
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import StopStrings, Vocabulary

LETTERS = "abcdefgh"
EOS = len(LETTERS)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """One token a letter, and an end token."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Vocabulary.load(tokenizer.to_str(), [EOS])


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def run(choice: Choice, outputs: list[Output]) -> OutputChunk:
    pieces = [piece for output in outputs if (piece := choice.push(output)) is not None]
    return merge(pieces, 1)[0]


def test_the_token_that_stopped_a_stream_is_counted_and_not_shown(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(skip_special_tokens=False))
    piece = run(choice, [Output(ids("ab")), Output([*ids("c"), EOS], finish="stop")])
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("abc", [0, 1, 2, EOS], "stop")
    assert (choice.num_tokens, piece.stop_reason) == (4, None)


def test_a_stop_token_is_shown_if_stops_are_included(vocabulary: Vocabulary) -> None:
    options = TextOptions(include_stop=True, skip_special_tokens=False)
    piece = run(Choice(0, vocabulary, options), [Output([0, EOS], finish="stop")])
    assert piece.text == "a<eos>"


def test_a_stop_token_of_the_request_is_the_reason(vocabulary: Vocabulary) -> None:
    output = Output(ids("ab"), finish="stop", stop_token=1)
    piece = run(Choice(0, vocabulary, TextOptions()), [output])
    assert (piece.text, piece.stop_reason) == ("a", 1)


def test_the_last_token_of_a_full_answer_is_shown(vocabulary: Vocabulary) -> None:
    piece = run(Choice(0, vocabulary, TextOptions()), [Output(ids("ab"), finish="length")])
    assert (piece.text, piece.finish_reason) == ("ab", "length")


def test_a_stop_string_ends_the_choice_at_its_token(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(stops=StopStrings(["cd"])))
    entries = [TokenLogprobs(each, -1.0, 1) for each in ids("abcdef")]
    piece = run(choice, [Output(ids("abcdef"), logprobs=entries), Output(ids("gh"), finish="stop")])
    assert (piece.text, piece.token_ids, piece.stop_reason) == ("ab", ids("abcd"), "cd")
    assert (choice.num_tokens, len(piece.logprobs)) == (4, 4)


def test_stop_strings_wait_for_the_least_number_of_tokens(vocabulary: Vocabulary) -> None:
    options = TextOptions(stops=StopStrings(["b"]), min_tokens=3)
    piece = run(Choice(0, vocabulary, options), [Output(ids("abcbd"), finish="length")])
    assert (piece.text, piece.stop_reason) == ("abc", "b")


def test_a_stop_string_may_begin_within_the_least_number_of_tokens(vocabulary: Vocabulary) -> None:
    options = TextOptions(stops=StopStrings(["cb"]), min_tokens=3)
    piece = run(Choice(0, vocabulary, options), [Output(ids("abcbd"), finish="length")])
    assert (piece.text, piece.stop_reason) == ("ab", "cb")


def test_text_withheld_for_a_stop_string_is_released_at_the_end(vocabulary: Vocabulary) -> None:
    options = TextOptions(stops=StopStrings(["cdx"]))
    piece = run(Choice(0, vocabulary, options), [Output(ids("abcd"), finish="length")])
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("abcd", "length", None)


def test_an_interval_delays_all_but_the_first_and_last_tokens(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(stream_interval=3))
    outputs = [*(Output([each]) for each in ids("abcdef")), Output([], finish="length")]
    texts = [piece.text for output in outputs if (piece := choice.push(output)) is not None]
    assert texts == ["a", "bcd", "ef"]


def test_without_output_only_the_prompt_is_returned(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(drops_output=True))
    piece = run(choice, [Output(ids("a"), finish="length", cached_tokens=5)])
    assert (piece.text, piece.token_ids, choice.num_tokens) == ("", [], 0)
    assert choice.cached_tokens == 5


@settings(max_examples=300)
@given(
    text=st.text(alphabet="abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=8),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 5),
)
def test_portions_change_neither_text_nor_count(
    vocabulary: Vocabulary, text: str, cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    options = TextOptions(stops=StopStrings(stops) if stops else None, min_tokens=min_tokens)
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(borders)]
    end = Output([EOS], finish="stop")
    cut, whole = Choice(0, vocabulary, options), Choice(0, vocabulary, options)
    in_parts = run(cut, [*(Output(ids(part)) for part in parts), end])
    at_once = run(whole, [Output([*ids(text), EOS], finish="stop")])
    assert in_parts == at_once
    assert cut.num_tokens == whole.num_tokens
