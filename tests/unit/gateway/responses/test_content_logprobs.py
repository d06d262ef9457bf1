"""Log-probabilities are told of the tokens that the text is made of, and of no others."""

import pytest

from tests.fakes.back_end import fake_tokenizer
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.parsers.events import CallBegin, Content, Event, Reasoning
from tokenmesh.services.gateway.piece import Piece
from tokenmesh.services.gateway.responses.content_logprobs import ContentLogprobs
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


def piece(text: str, *events: Event, written: str | None = None, end: str | None = None) -> Piece:
    """`written`: what the model wrote, where that is more than its text."""
    ids = ids_of(text if written is None else written)
    entries = [TokenLogprobs(token_id=each, logprob=-1.0, rank=1) for each in ids]
    return Piece(0, text, ids, entries, end, events=list(events))


def spelled(logprobs: ContentLogprobs, *pieces: Piece) -> list[str]:
    return ["".join(entry.token for entry in logprobs.push(each)) for each in pieces]


def test_content_alone(logprobs: ContentLogprobs) -> None:
    assert spelled(logprobs, piece("ab", Content("ab")), piece(" c", Content(" c"))) == ["ab", " c"]


def test_the_token_that_ended_it_is_no_text(logprobs: ContentLogprobs) -> None:
    last = piece("ab", Content("ab"), written=f"ab{END}", end="stop")
    assert spelled(logprobs, last) == ["ab"]


def test_reasoning_and_its_marker_are_no_text(logprobs: ContentLogprobs) -> None:
    thought = piece("hm", Reasoning("hm"))
    marker = piece("</think>")
    assert spelled(logprobs, thought, marker, piece("Yes", Content("Yes"))) == ["", "", "Yes"]


def test_reasoning_and_text_in_one_piece(logprobs: ContentLogprobs) -> None:
    mixed = piece("hm</think>Yes", Reasoning("hm"), Content("Yes"))
    assert spelled(logprobs, mixed) == ["Yes"]


def test_text_that_was_held_back_keeps_its_tokens(logprobs: ContentLogprobs) -> None:
    assert spelled(logprobs, piece("<"), piece("3", Content("<3"))) == ["", "<3"]


def test_a_call_has_none(logprobs: ContentLogprobs) -> None:
    assert spelled(logprobs, piece("call", CallBegin(0, "f"))) == [""]
