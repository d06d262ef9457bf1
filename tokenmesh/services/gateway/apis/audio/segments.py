"""From the tokens of clips to segments, and segments to text, SRT and WebVTT.

Words with their times are divided as transformers divides them.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.shared.messages.audio import AudioClip, SpeechFacts
from tokenmesh.shared.messages.tokens import TokenLogprobs

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Transcript:
    """It holds what the model wrote about one clip."""

    clip: AudioClip
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    temperature: float = 0.0
    """At which the tokens were drawn."""
    no_speech: float | None = None
    """Probability that the clip holds no speech; None: unknown."""
    token_ends: list[int] = field(default_factory=list)
    """The state of the encoder at which each token ends, where words were requested."""

    @property
    def logprob(self) -> float:
        """Mean over all tokens."""
        values = [entry.logprob for entry in self.logprobs]
        return sum(values) / len(values) if values else 0.0

    def replace_tokens(self, other: "Transcript") -> None:
        """Take those of another transcript of the clip, drawn at another temperature."""
        self.token_ids, self.logprobs = other.token_ids, other.logprobs
        self.temperature = other.temperature


@dataclass(frozen=True, slots=True)
class Segment:
    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    """Without timestamps."""
    transcript: Transcript


def text_ids(token_ids: Iterable[int], facts: SpeechFacts) -> list[int]:
    """The tokens that are text."""
    if facts.hidden_ids:
        hidden = frozenset(facts.hidden_ids)
        return [token for token in token_ids if token not in hidden]
    if facts.end_id < 0:
        return list(token_ids)
    return [token for token in token_ids if token < facts.end_id]


def segments_of(transcript: Transcript, facts: SpeechFacts) -> list[Segment]:
    """The parts between timestamps; one for a clip without them."""
    clip, first = transcript.clip, facts.first_timestamp_id
    hidden = frozenset(facts.hidden_ids)
    found: list[Segment] = []
    ids: list[int] = []
    start_s: float | None = None

    def close(end_s: float) -> None:
        begin_s = start_s if start_s is not None else (found[-1].end_s if found else clip.start_s)
        found.append(Segment(begin_s, max(begin_s, end_s), tuple(ids), transcript))
        ids.clear()

    for token in transcript.token_ids:
        if first >= 0 and token >= first:
            time_s = min(clip.end_s, clip.start_s + (token - first) * facts.timestamp_s)
            if ids:
                close(time_s)
                start_s = None
            else:
                start_s = time_s
        elif token not in hidden and (facts.end_id < 0 or token < facts.end_id):
            ids.append(token)
    if ids:
        close(clip.end_s)
    return found


def compression_ratio(text: str) -> float:
    """Return how much shorter a text can be made: repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def to_srt(segments: Sequence[Segment], decode: Decode) -> str:
    parts = [
        f"{number}\n{_clock(each.start_s, ',')} --> {_clock(each.end_s, ',')}\n"
        f"{_line(decode(each.token_ids))}\n\n"
        for number, each in enumerate(segments, start=1)
    ]
    return "".join(parts)


def to_vtt(segments: Sequence[Segment], decode: Decode) -> str:
    parts = [
        f"{_clock(each.start_s, '.')} --> {_clock(each.end_s, '.')}\n"
        f"{_line(decode(each.token_ids))}\n\n"
        for each in segments
    ]
    return "WEBVTT\n\n" + "".join(parts)


def _line(text: str) -> str:
    """A cue on one line: an empty line, or an arrow, would end it."""
    return " ".join(text.replace("-->", "->").split())


def _clock(seconds: float, mark: str) -> str:
    millis = round(seconds * 1000)
    minutes, millis = divmod(millis, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{mark}{millis % 1000:03}"


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
