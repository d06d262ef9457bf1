"""A choice with a parser: events, their order, token counts and the finish reason."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.fakes.parsers import BracketParser
from tokenmesh.services.gateway.core.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk, merge
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Reasoning,
)
from tokenmesh.shared.text import StopStrings, Vocabulary

LETTERS = "abcdef<>{}:"
EOS = len(LETTERS)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """One token a character, and an end token."""
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return Vocabulary.load(tokenizer.to_str(), [EOS])


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def run(choice: Choice, outputs: list[Output]) -> OutputChunk:
    pieces = [piece for output in outputs if (piece := choice.push(output)) is not None]
    return merge(pieces, 1)[0]


def parsed(vocabulary: Vocabulary, text: str, **options: object) -> tuple[Choice, OutputChunk]:
    choice = Choice(0, vocabulary, TextOptions(**options), parser=BracketParser())  # type: ignore[arg-type]
    return choice, run(choice, [Output([*ids(text), EOS], finish="stop")])


def test_kinds_of_text_are_separated_and_neighbors_joined(vocabulary: Vocabulary) -> None:
    _, piece = parsed(vocabulary, "<ab>cd{f:ab}{e:}")
    assert piece.all_events() == [
        Reasoning("ab"),
        Content("cd"),
        CallBegin(0, "f"),
        CallArguments(0, "ab"),
        CallBegin(1, "e"),
    ]
    assert piece.text == "<ab>cd{f:ab}{e:}"


def test_a_call_is_the_finish_reason(vocabulary: Vocabulary) -> None:
    choice, piece = parsed(vocabulary, "{f:ab}")
    assert (piece.finish_reason, choice.finish_reason) == ("tool_calls", "stop")


def test_a_call_that_begins_with_the_last_words_counts(vocabulary: Vocabulary) -> None:
    _, piece = parsed(vocabulary, "a{f")
    assert piece.events == [Content("a"), CallBegin(0, "f")]
    assert piece.finish_reason == "tool_calls"


def test_a_call_without_room_ends_by_length(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(), parser=BracketParser())
    assert run(choice, [Output(ids("{f:a"), finish="length")]).finish_reason == "length"


def test_reasoning_is_counted_by_token(vocabulary: Vocabulary) -> None:
    choice, _ = parsed(vocabulary, "<abc>de")
    assert (choice.reasoning_tokens, choice.num_tokens) == (4, 8)
    assert Choice(0, vocabulary, TextOptions()).reasoning_tokens is None


def test_a_stop_string_is_found_before_parsing(vocabulary: Vocabulary) -> None:
    _, piece = parsed(vocabulary, "<ab>cdef", stops=StopStrings([">cd"]))
    assert (piece.events, piece.stop_reason) == ([Reasoning("ab")], ">cd")


def test_an_interval_delays_events_too(vocabulary: Vocabulary) -> None:
    choice = Choice(0, vocabulary, TextOptions(stream_interval=3), parser=BracketParser())
    outputs = [*(Output([each]) for each in ids("a<bcd>")), Output([], finish="length")]
    events = [piece.events for output in outputs if (piece := choice.push(output)) is not None]
    assert events == [[Content("a")], [Reasoning("bc")], [Reasoning("d")]]


def test_without_a_parser_text_is_content(vocabulary: Vocabulary) -> None:
    piece = run(Choice(0, vocabulary, TextOptions()), [Output(ids("a<b>"), finish="length")])
    assert piece.events is None
    assert piece.all_events() == [Content("a<b>")]


@settings(max_examples=300)
@given(
    text=st.text(alphabet=LETTERS, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    stops=st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=3), max_size=2),
    interval=st.integers(1, 4),
)
def test_portions_change_neither_events_nor_counts(
    vocabulary: Vocabulary, text: str, cuts: list[int], stops: list[str], interval: int
) -> None:
    options = TextOptions(stops=StopStrings(stops) if stops else None, stream_interval=interval)
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(borders)]
    cut = Choice(0, vocabulary, options, parser=BracketParser())
    whole = Choice(0, vocabulary, TextOptions(stops=options.stops), parser=BracketParser())
    end = Output([EOS], finish="stop")
    in_parts = run(cut, [*(Output(ids(part)) for part in parts), end])
    assert in_parts == run(whole, [Output([*ids(text), EOS], finish="stop")])
    assert cut.reasoning_tokens == whole.reasoning_tokens
