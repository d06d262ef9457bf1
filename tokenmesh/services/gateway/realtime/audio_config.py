"""The `audio` of a session: the format, transcription and turn detection of its input."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.fields import Bounded
from tokenmesh.services.gateway.openai.sampling_checks import invalid
from tokenmesh.services.gateway.openai.translation import Json, read_object
from tokenmesh.services.gateway.realtime.voice_activity import TurnDetection

_STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
DEFAULT_RATE: Final = 24000
_MAX_PROMPT_CHARS: Final = 4096
_DETECTION: Final = TurnDetection()


class AudioFormat(Bounded):
    model_config = _STRICT

    type: Literal["audio/pcm"]
    rate: int = Field(default=DEFAULT_RATE, ge=8000, le=48000)


class InputTranscription(Bounded):
    model_config = _STRICT

    model: str | None = None
    language: str | None = None
    prompt: str = Field(default="", max_length=_MAX_PROMPT_CHARS)


class ServerVad(Bounded):
    model_config = _STRICT

    type: Literal["server_vad"]
    threshold: float = Field(default=0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(default=300, ge=0, le=5000)
    silence_duration_ms: int = Field(default=500, ge=40, le=10_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class AudioInputFields(Bounded):
    model_config = _STRICT

    format: AudioFormat | None = None
    transcription: InputTranscription | None = None
    turn_detection: ServerVad | None = None
    noise_reduction: None = None


class AudioFields(Bounded):
    model_config = _STRICT

    input: AudioInputFields | None = None
    output: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """How a session's input audio is read."""

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
