"""The events of vLLM's realtime clients, which only transcribe.

Their first event is a session.update that names a `model` and has no `session`. They append audio
of 16 kHz, get its text as it is transcribed, and all of it after a commit that is final.
"""

from dataclasses import dataclass, replace
from typing import Final

from tokenmesh.services.gateway.apis.audio.spoken_text import gap_between
from tokenmesh.services.gateway.apis.openai.translation import Json, read_object
from tokenmesh.services.gateway.apis.realtime.audio_input import (
    AudioConfig,
    InputTranscription,
    TurnDetection,
)
from tokenmesh.services.gateway.apis.realtime.events import AudioAppend, ClientEvent
from tokenmesh.services.gateway.apis.realtime.item_transcript import EVENT
from tokenmesh.services.gateway.apis.realtime.session_config import SessionConfig
from tokenmesh.services.gateway.core.http.errors import invalid

DONE: Final = "transcription.done"
_RATE: Final = 16_000


class VllmUpdate(ClientEvent):
    """The model that transcribes; None: the one that is served."""

    model: str | None


class VllmCommit(ClientEvent):
    """Audio follows, or, if it is final, has ended."""

    final: bool = False


_MODEL_BY_TYPE: Final[dict[str, type[ClientEvent]]] = {
    "session.update": VllmUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": VllmCommit,
}


def begins_dialect(value: Json) -> bool:
    """Return whether a session's first event is one of vLLM's clients."""
    return value.get("type") == "session.update" and "model" in value and "session" not in value


def read_vllm_event(value: Json) -> ClientEvent:
    """The validated event. Raises InvalidInput."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _MODEL_BY_TYPE:
        known = ", ".join(_MODEL_BY_TYPE)
        problem = f"{str(kind)[:64]!r} is unknown; known types after a model: {known}"
        raise invalid("type", problem)
    return read_object(_MODEL_BY_TYPE[kind], value, "")


def transcribing(config: SessionConfig, model: str) -> SessionConfig:
    """The configuration of a session whose audio a model transcribes, cut at pauses."""
    audio = AudioConfig(
        rate=_RATE,
        transcription=InputTranscription(),
        detection=TurnDetection(create_response=False, interrupt_response=False),
    )
    return replace(config, model=model, audio=audio, is_transcription=True, is_vllm=True)


@dataclass(slots=True)
class VllmEvents:
    """Translates what a session sends; one stream of text for all its items."""

    _text: str = ""
    _item_id: str | None = None
    _has_failed: bool = False

    def translated(self, event: Json) -> Json | None:
        """The event as vLLM sends it; None: vLLM has none."""
        match event["type"]:
            case "error":
                return self._error(event["error"])
            case kind if kind == f"{EVENT}.failed":
                self._has_failed = True
                return self._error(event["error"])
            case kind if kind == f"{EVENT}.delta":
                return {"type": "transcription.delta", "delta": self._next(event)}
            case kind if kind == DONE:
                text, has_failed = self._text, self._has_failed
                self._text, self._item_id, self._has_failed = "", None, False
                # after an error there is no whole text
                return None if has_failed else {**event, "text": text}
        return None

    def _error(self, error: Json) -> Json:
        return {"type": "error", "error": error["message"], "code": error["code"]}

    def _next(self, event: Json) -> str:
        delta = str(event["delta"])
        if event["item_id"] != self._item_id:
            self._item_id = event["item_id"]
            delta = gap_between(self._text, delta) + delta
        self._text += delta
        return delta
