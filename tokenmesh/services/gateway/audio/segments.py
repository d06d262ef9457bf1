"""From the tokens of clips to segments, and segments to text, SRT and WebVTT."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenmesh.shared.messages.audio import AudioClip, SpeechFacts
from tokenmesh.shared.messages.tokens import TokenLogprobs

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Transcript:
    """What the model wrote about one clip."""

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
    """How much shorter a text can be made: repetitions make it large."""
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
