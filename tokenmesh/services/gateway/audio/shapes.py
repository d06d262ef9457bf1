"""Bodies and events of transcriptions, as OpenAI has them."""

from dataclasses import dataclass

import msgspec

from tokenmesh.services.gateway.audio.clip_passes import Recording
from tokenmesh.services.gateway.audio.segments import Transcript, text_ids
from tokenmesh.shared.text import Detokenizer, make_detokenizer


class DurationUsage(msgspec.Struct, tag="duration"):
    seconds: float


class InputTokenDetails(msgspec.Struct):
    audio_tokens: int
    text_tokens: int


class AudioTokenUsage(msgspec.Struct, tag="tokens"):
    """States of the encoder count as audio tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class Transcription(msgspec.Struct):
    text: str
    usage: DurationUsage


class TranscriptionSegment(msgspec.Struct):
    id: int
    seek: int
    """Start of the clip in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(msgspec.Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | msgspec.UnsetType
    usage: DurationUsage
    words: list[TranscriptionWord] | msgspec.UnsetType


class TextDelta(msgspec.Struct, tag="transcript.text.delta", omit_defaults=True):
    delta: str
    usage: AudioTokenUsage | None = None


class TextDone(msgspec.Struct, tag="transcript.text.done"):
    text: str
    usage: AudioTokenUsage


@dataclass(slots=True)
class TextStream:
    recording: Recording
    text: str = ""
    _detokenizer: Detokenizer | None = None
    _num_read: int = 0
    _clip: Transcript | None = None

    def push(self, transcript: Transcript, is_done: bool) -> str:
        """What is new; without white space before the first word."""
        recording = self.recording
        if transcript is not self._clip or self._detokenizer is None:
            self._clip, self._num_read = transcript, 0
            self._detokenizer = make_detokenizer(recording.text.vocabulary, ())
        new = transcript.token_ids[self._num_read :]
        self._num_read = len(transcript.token_ids)
        delta = self._detokenizer.push(text_ids(new, recording.task.facts))
        if is_done:
            delta += self._detokenizer.finish()
        if not self.text:
            delta = delta.lstrip()
        self.text += delta
        return delta
