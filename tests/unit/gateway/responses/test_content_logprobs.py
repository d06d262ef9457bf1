"""Only tokens of the text have log-probabilities."""

import pytest

from tests.fakes.back_end import fake_tokenizer
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.apis.responses.content_logprobs import ContentLogprobs
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.parsers.parser import CallBegin, Content, Event, Reasoning
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import Vocabulary

END = "<|im_end|>"


def ids_of(text: str) -> list[int]:
    return list(fake_tokenizer().encode(text).ids)


@pytest.fixture
def logprobs() -> ContentLogprobs:
    vocabulary = Vocabulary.load(
        fake_tokenizer().to_str(), fake_tokenizer().get_added_tokens_decoder()
    )
    return ContentLogprobs(LogprobShapes(vocabulary))


def written(
    *tokens: tuple[str, int | None], events: list[Event] | None, end: str | None = None
) -> OutputChunk:
    """A chunk of tokens with the content that each completed."""
    ids = [each for text, _ in tokens for each in ids_of(text)]
    assert len(ids) == len(tokens), "each a token of its own"
    entries = [TokenLogprobs(token_id=each, logprob=-1.0, rank=1) for each in ids]
    text = "".join(text for text, _ in tokens if text != END)
    piece = OutputChunk(0, text, ids, entries, end, events=events)
    piece.content_bytes = [num_bytes for _, num_bytes in tokens] if events is not None else []
    return piece


def spelled(logprobs: ContentLogprobs, *pieces: OutputChunk) -> list[list[str]]:
    return [
        ["".join(entry.token for entry in stretch) for stretch in logprobs.push(each)]
        for each in pieces
    ]


def test_without_a_parser_all_but_the_end_is_text(logprobs: ContentLogprobs) -> None:
    piece = written(("a", None), ("b", None), (END, None), events=None, end="stop")
    assert spelled(logprobs, piece) == [["ab"]]


def test_reasoning_and_markers_are_not_text(logprobs: ContentLogprobs) -> None:
    events: list[Event] = [Reasoning("h"), Content("Y")]
    piece = written(
        ("h", 0), ("<", None), (">", None), ("Y", 1), (END, None), events=events, end="stop"
    )
    assert spelled(logprobs, piece) == [["Y"]]


def test_text_that_was_held_back_keeps_its_tokens(logprobs: ContentLogprobs) -> None:
    first = written(("<", None), events=[])
    second = written(("3", 2), events=[Content("<3")])
    assert spelled(logprobs, first, second) == [[""], ["<3"]]


def test_text_that_the_end_releases_keeps_its_tokens(logprobs: ContentLogprobs) -> None:
    events: list[Event] = [Content("<")]
    assert spelled(logprobs, written(("<", None), (END, 1), events=events, end="stop")) == [["<"]]


def test_a_call_separates_two_content_events(logprobs: ContentLogprobs) -> None:
    events: list[Event] = [Content("a"), CallBegin(0, "f"), Content("b")]
    assert spelled(logprobs, written(("a", 1), ("c", 0), ("b", 1), events=events)) == [["a", "b"]]
