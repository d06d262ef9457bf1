"""Bodies and events of transcriptions, as OpenAI has them."""

import msgspec


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
