"""Words of transcripts with their times, divided as transformers divides them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.audio.segments import Decode, Transcript
from tokenmesh.shared.messages.audio import SpeechFacts

_UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages without spaces between words."""
_BEFORE: Final = "\"'“¡¿([{-"
_AFTER: Final = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
"""Punctuation that belongs to the word behind it, or before it."""
_ASCII: Final = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_INCOMPLETE: Final = "\ufffd"


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Part:
    """Text of consecutive tokens."""

    text: str
    first: int
    end: int
    """Places in the transcript; a part without text has none."""


def words_of(
    transcript: Transcript, facts: SpeechFacts, decode: Decode, language: str | None
) -> list[Word]:
    """The words of an aligned transcript; none goes past a timestamp."""
    clip, ends = transcript.clip, transcript.token_ends
    times_s = [min(clip.end_s, clip.start_s + end * facts.timestamp_s) for end in ends]
    found = []
    for first, end in _runs(transcript.token_ids, facts):
        parts = _complete(transcript.token_ids, first, end, decode)
        if language not in _UNSPACED:
            parts = _by_spaces(parts)
        for part in _with_punctuation(parts):
            start_s = times_s[part.first - 1] if part.first else clip.start_s
            found.append(Word(part.text.strip(), start_s, times_s[part.end - 1]))
    return [word for word in found if word.text]


def _runs(token_ids: Sequence[int], facts: SpeechFacts) -> Iterator[tuple[int, int]]:
    """First and last place of tokens that are text and follow each other."""
    first: int | None = None
    for place, token in enumerate([*token_ids, facts.end_id]):
        is_text = place < len(token_ids) and (facts.end_id < 0 or token < facts.end_id)
        if is_text and first is None:
            first = place
        elif not is_text and first is not None:
            yield first, place
            first = None


def _complete(token_ids: Sequence[int], first: int, end: int, decode: Decode) -> list[_Part]:
    """The fewest tokens each that end with a complete character."""
    whole, parts = decode(token_ids[first:end]), list[_Part]()
    start, num_chars = first, 0
    for place in range(first, end):
        text = decode(token_ids[start : place + 1])
        broken = text.find(_INCOMPLETE)
        at = num_chars + broken
        if broken < 0 or at >= len(whole) or whole[at] == _INCOMPLETE:
            parts.append(_Part(text, start, place + 1))
            start, num_chars = place + 1, num_chars + len(text)
    return parts


def _by_spaces(parts: list[_Part]) -> list[_Part]:
    words: list[_Part] = []
    for part in parts:
        if part.text.startswith(" ") or part.text.strip() in _ASCII or not words:
            words.append(part)
        else:
            words[-1] = _Part(words[-1].text + part.text, words[-1].first, part.end)
    return words


def _with_punctuation(words: list[_Part]) -> list[_Part]:
    """Punctuation joins a neighbour: what opens the word behind it, all other the one before."""
    behind: list[_Part] = []
    for word in reversed(words):
        if behind and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            behind[-1] = _Part(word.text + behind[-1].text, word.first, behind[-1].end)
        else:
            behind.append(word)
    joined: list[_Part] = []
    for word in reversed(behind):
        if joined and not joined[-1].text.endswith(" ") and word.text in _AFTER:
            joined[-1] = _Part(joined[-1].text + word.text, joined[-1].first, word.end)
        else:
            joined.append(word)
    return joined
