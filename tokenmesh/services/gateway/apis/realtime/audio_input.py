"""The audio of a session: its configuration, what was appended, and where speech begins and ends.

AudioConfig is the `audio` of a session: the format, transcription and turn detection of its input.
InputBuffer holds what a client appends, and finds speech by its energy: a frame of 20 ms is voiced
when it is louder than the threshold and than the noise before it.
"""

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from operator import mul
from typing import Any, Final, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.audio.speech_transcriber import BYTES_PER_SAMPLE
from tokenmesh.services.gateway.apis.openai.translation import Json, read_object
from tokenmesh.services.gateway.apis.realtime.errors import EmptyBuffer
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.shared.errors import InvalidInput

assert sys.byteorder == "little"  # of the samples, as they are sent

_FRAME_S: Final = 0.02
_STEP: Final = 3
"""Every third sample is enough to measure a level."""
_FULL_SCALE: Final = 32768.0
_VOICED_FRAMES: Final = 3
"""In a row: speech begins."""
_QUIETEST: Final = 0.001
"""Level of the threshold 0, as a share of full scale; that of 1 is 100 times as much."""
_OVER_NOISE: Final = 2.5
_ADAPTATION: Final = 0.05
"""Share of a frame in the level of the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDetection:
    """When speech begins and ends by itself."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    create_response: bool = True
    interrupt_response: bool = True


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    at_ms: int
    """From the beginning of the session; with the padding."""


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    at_ms: int
    audio: bytes


@dataclass(slots=True)
class InputBuffer:
    """Samples of 16 bits, little-endian, mono, that are not committed yet."""

    rate: int
    max_s: float
    """It bounds the length of audio that is not committed; speech that goes on longer is cut."""
    detection: TurnDetection | None
    keeps_silence: bool = False
    """It tells whether what is before speech belongs to the item."""
    cuts_at_pauses: bool = True
    """Unset: detected speech goes on after a pause."""
    _data: bytearray = field(default_factory=bytearray)
    _num_dropped: int = 0
    """Samples of the session before `_data`."""
    _num_seen: int = 0
    """Samples of `_data` in frames that were measured."""
    _num_read: int = 0
    """Samples of `_data` that `read` has returned."""
    _voiced: int = 0
    _silent: int = 0
    _noise: float = 0.0
    is_speech: bool = False

    def append(self, data: bytes) -> Iterator[SpeechStarted | SpeechStopped | None]:
        """Yield what happens in the audio; None after each measured frame. Raises InvalidInput."""
        if len(data) % BYTES_PER_SAMPLE:
            raise invalid("audio", "ends within a sample of 16 bits")
        most = int(self.max_s * self.rate) * BYTES_PER_SAMPLE
        if len(data) > most or (self.detection is None and len(self._data) + len(data) > most):
            raise InvalidInput(
                f"the input audio buffer holds at most {self.max_s:g} s "
                "(gateway.realtime_max_audio_s): commit or clear it",
                param="audio",
            )
        self._data += data
        if self.detection is not None:
            yield from self._measured(self.detection, most)

    def _measured(
        self, detection: TurnDetection, most: int
    ) -> Iterator[SpeechStarted | SpeechStopped | None]:
        frame = int(self.rate * _FRAME_S)
        while (self._num_seen + frame) * BYTES_PER_SAMPLE <= len(self._data):
            start = self._num_seen * BYTES_PER_SAMPLE
            samples = array("h", self._data[start : start + frame * BYTES_PER_SAMPLE])[::_STEP]
            self._num_seen += frame
            self._count(_level(samples), detection)
            if not self.is_speech and self._voiced >= _VOICED_FRAMES:
                self.is_speech = True
                self._drop_before(self._num_seen - self._voiced * frame, detection)
                yield SpeechStarted(self._ms(0))
            silence = self._silent * _FRAME_S * 1000
            is_pause = self.cuts_at_pauses and silence >= detection.silence_duration_ms
            is_full = self._num_seen * BYTES_PER_SAMPLE >= most
            if (self.is_speech and is_pause) or (
                is_full and (self.is_speech or self.keeps_silence)
            ):
                yield self._stopped()
            yield None
        if not self.is_speech:
            self._drop_before(self._num_seen - self._voiced * frame, detection)

    def _count(self, level: float, detection: TurnDetection) -> None:
        needed = max(_QUIETEST * 100**detection.threshold, _OVER_NOISE * self._noise)
        if level >= needed:
            self._voiced, self._silent = self._voiced + 1, 0
            return
        self._voiced, self._silent = 0, self._silent + 1
        if not self.is_speech:
            self._noise += _ADAPTATION * (level - self._noise)

    def _stopped(self) -> SpeechStopped:
        at_ms = self._ms(self._num_seen)
        return SpeechStopped(at_ms, self._taken(self._num_seen))

    def read(self) -> bytes:
        """Return what has arrived since the last call of the audio that the next item will hold."""
        start, all_of_it = self._num_read, len(self._data) // BYTES_PER_SAMPLE
        self._num_read = all_of_it if self.detection is None else max(start, self._num_seen)
        return bytes(self._data[start * BYTES_PER_SAMPLE : self._num_read * BYTES_PER_SAMPLE])

    @property
    def is_empty(self) -> bool:
        return not self._data

    def commit(self) -> bytes:
        """All audio that is there. Raises EmptyBuffer."""
        if not self._data:
            raise EmptyBuffer("the input audio buffer is empty: append audio before the commit")
        return self._taken(len(self._data) // BYTES_PER_SAMPLE)

    def clear(self) -> None:
        self._taken(len(self._data) // BYTES_PER_SAMPLE)

    def _taken(self, count: int) -> bytes:
        data = bytes(self._data[: count * BYTES_PER_SAMPLE])
        del self._data[: count * BYTES_PER_SAMPLE]
        self._num_dropped += count
        self._num_seen = max(0, self._num_seen - count)
        self._num_read = 0
        self._voiced = self._silent = 0
        self.is_speech = False
        return data

    def _drop_before(self, sample: int, detection: TurnDetection) -> None:
        """Forget what is before a sample, but for the padding."""
        if self.keeps_silence:
            return
        count = max(0, sample - self.rate * detection.prefix_padding_ms // 1000)
        del self._data[: count * BYTES_PER_SAMPLE]
        self._num_dropped += count
        self._num_seen -= count
        self._num_read = 0

    def _ms(self, sample: int) -> int:
        return (self._num_dropped + sample) * 1000 // self.rate


def _level(samples: "array[int]") -> float:
    """Root of the mean square, as a share of full scale."""
    return sqrt(sum(map(mul, samples, samples)) / len(samples)) / _FULL_SCALE


DEFAULT_RATE: Final = 24000
_MAX_PROMPT_CHARS: Final = 4096
_DETECTION: Final = TurnDetection()


class _Strict(Bounded, extra="forbid", strict=True, allow_inf_nan=False):
    """Unknown fields are errors."""


class AudioFormat(_Strict):
    type: Literal["audio/pcm"]
    rate: int = Field(default=DEFAULT_RATE, ge=8000, le=48000)


class InputTranscription(_Strict):
    model: str | None = None
    language: str | None = None
    prompt: str = Field(default="", max_length=_MAX_PROMPT_CHARS)


class ServerVad(_Strict):
    type: Literal["server_vad"]
    threshold: float = Field(default=0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(default=300, ge=0, le=5000)
    silence_duration_ms: int = Field(default=500, ge=40, le=10_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class AudioInputFields(_Strict):
    format: AudioFormat | None = None
    transcription: InputTranscription | None = None
    turn_detection: ServerVad | None = None
    noise_reduction: None = None


class AudioFields(_Strict):
    input: AudioInputFields | None = None
    output: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """It says how a session's input audio is read."""

    rate: int = DEFAULT_RATE
    transcription: InputTranscription | None = None
    detection: TurnDetection | None = _DETECTION

    def updated(self, value: Json | None, path: str) -> "AudioConfig":
        """With the fields that a session.update names. Raises InvalidInput."""
        if not value:
            return self
        given = value.get("input")
        detection = given.get("turn_detection") if isinstance(given, dict) else None
        if isinstance(detection, dict) and detection.get("type") == "semantic_vad":
            raise invalid(
                f"{path}.input.turn_detection.type",
                "'semantic_vad' is not supported: use 'server_vad'",
                NotSupported,
            )
        fields = read_object(AudioFields, value, path)
        if fields.output:
            raise invalid(f"{path}.output", "is not supported: answers are text", NotSupported)
        if fields.input is None:
            return self
        changed, named = self, fields.input.model_fields_set
        if fields.input.format is not None:
            changed = replace(changed, rate=fields.input.format.rate)
        if "transcription" in named:
            changed = replace(changed, transcription=fields.input.transcription)
        if "turn_detection" in named:
            vad = fields.input.turn_detection
            values = None if vad is None else vad.model_dump(exclude={"type", "idle_timeout_ms"})
            changed = replace(
                changed, detection=None if values is None else TurnDetection(**values)
            )
        return changed

    def view(self) -> Json:
        """The `audio` of a session."""
        transcription, detection = self.transcription, self.detection
        vad: Json | None = None
        if detection is not None:
            vad = {
                "type": "server_vad",
                "threshold": detection.threshold,
                "prefix_padding_ms": detection.prefix_padding_ms,
                "silence_duration_ms": detection.silence_duration_ms,
                "create_response": detection.create_response,
                "interrupt_response": detection.interrupt_response,
            }
        return {
            "input": {
                "format": {"type": "audio/pcm", "rate": self.rate},
                "transcription": None if transcription is None else transcription.model_dump(),
                "noise_reduction": None,
                "turn_detection": vad,
            }
        }


DEFAULT_AUDIO: Final = AudioConfig()
