"""Asks models that take recordings in prompts for a transcript.

The questions are those of the families' own processors in transformers
(`apply_transcription_request`), of Mistral's tokenizers for Voxtral, and for Qwen3-Omni, which has
none, those of vLLM. Fields of a request for which a family has no words are refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer, read_json
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.messages.audio import SpeechAsk
from tokenmesh.shared.messages.media import AUDIO

_CODES: Final[Mapping[str, str]] = {
    **{"ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek"},
    **{"en": "English", "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino"},
    **{"fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian"},
    **{"ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch"},
    **{"pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish"},
    **{"th": "Thai", "tr": "Turkish", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese"},
    "zh": "Chinese",
}
_OF_QWEN3_ASR: Final = {code: name for code, name in _CODES.items() if code != "ur"}


def _named(*codes: str) -> dict[str, str]:
    return {code: _CODES[code] for code in codes}


_OF_OMNI: Final = _named(
    *("ar", "de", "en", "es", "fr", "id", "it", "ja", "ko", "ms", "nl", "pt", "ru"),
    *("tr", "ur", "vi", "yue", "zh"),
)
_OF_VOXTRAL: Final = _named("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")
_OF_FUN_ASR: Final = {"zh": "中文", "en": "英文", "ja": "日文"}
"""The names that its prompts hold."""
_CLIP_S: Final = 30.0
"""The length of recordings on which these models are trained."""
_CLIP_OF_VOXTRAL_S: Final = 1800.0
"""It hears half an hour at once."""
_PROMPT_KEY: Final = "default_transcription_prompt"
_TRANSCRIBE: Final = "[TRANSCRIBE]"


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt of a clip: messages for the chat template, or the text itself."""

    messages: list[JsonObject] = field(default_factory=list)
    continues: bool = False
    """True where the answer goes on with the last message."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The questions that one family understands."""

    write: Callable[[SpeechAsk, LoadedTokenizer], Question]
    languages: Mapping[str, str]
    """Name of each in prompts and answers, by its code; empty: prompts name none."""
    clip_s: float = _CLIP_S
    """Longest clip, where the context of the model holds it."""
    takes_prompt: bool = False
    takes_keywords: bool = False
    translates: bool = False
    marker: str = ""
    """Stands in answers before the transcript."""
    is_framed: bool = False
    """True where answers may be a sentence that quotes the transcript."""


def _user(*parts: JsonObject) -> JsonObject:
    return {"role": "user", "content": list(parts)}


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": text}


_SOUND: Final[JsonObject] = {"type": AUDIO}


def _qwen3_asr(ask: SpeechAsk, _loaded: LoadedTokenizer) -> Question:
    messages: list[JsonObject] = []
    if ask.prompt:
        messages.append({"role": "system", "content": [_text(ask.prompt)]})
    messages.append(_user(_SOUND))
    if ask.language:
        name = _OF_QWEN3_ASR[ask.language]
        begun = _text(f"language {name}<asr_text>")
        messages.append({"role": "assistant", "content": [begun]})
    return Question(messages, continues=bool(ask.language))


def _voxtral(ask: SpeechAsk, loaded: LoadedTokenizer) -> Question:
    start = loaded.special_tokens.get("bos_token") or ""
    language = f"lang:{ask.language}" if ask.language else ""
    return Question(text=f"{start}[INST][BEGIN_AUDIO][AUDIO][/INST]{language}{_TRANSCRIBE}")


def _glm_asr(ask: SpeechAsk, loaded: LoadedTokenizer) -> Question:
    asked = ask.prompt or _own_prompt(loaded, "Please transcribe this audio into text")
    return Question([_user(_SOUND, _text(asked))])


def _audio_flamingo(ask: SpeechAsk, loaded: LoadedTokenizer) -> Question:
    asked = ask.prompt or _own_prompt(loaded, "Transcribe the input speech.")
    return Question([_user(_text(asked), _SOUND)])


def _own_prompt(loaded: LoadedTokenizer, default: str) -> str:
    found = read_json(loaded.directory / "processor_config.json").get(_PROMPT_KEY)
    return found if isinstance(found, str) and found else default


def _fun_asr(ask: SpeechAsk, _loaded: LoadedTokenizer) -> Question:
    parts = [_SOUND]
    if ask.prompt:
        parts.append(_text(ask.prompt))
    if ask.keywords:
        parts.append({"type": "keywords", "keywords": ask.keywords})
    if ask.language:
        parts.append({"type": "language", "language": _OF_FUN_ASR[ask.language]})
    return Question([_user(*parts)])


def _omni(ask: SpeechAsk, _loaded: LoadedTokenizer) -> Question:
    name = _OF_OMNI.get(ask.language, "")
    if ask.translates:
        source = f" from {name}" if name else ""
        asked = f"Translate this audio{source} into English."
    else:
        asked = f"Transcribe this audio into {name}." if name else "Transcribe this audio."
    return Question([_user(_SOUND, _text(f"{asked} {ask.prompt}".rstrip()))])


_FAMILIES: Final[Mapping[str, Asking]] = {
    "qwen3_asr": Asking(
        write=_qwen3_asr, languages=_OF_QWEN3_ASR, takes_prompt=True, marker="<asr_text>"
    ),
    "voxtral": Asking(write=_voxtral, languages=_OF_VOXTRAL, clip_s=_CLIP_OF_VOXTRAL_S),
    "glmasr": Asking(write=_glm_asr, languages={}, takes_prompt=True, is_framed=True),
    "audioflamingo3": Asking(
        write=_audio_flamingo, languages={}, takes_prompt=True, is_framed=True
    ),
    "fun_asr_nano": Asking(
        write=_fun_asr,
        languages=_OF_FUN_ASR,
        takes_prompt=True,
        takes_keywords=True,
        is_framed=True,
    ),
    "qwen3_omni_moe_thinker": Asking(
        write=_omni, languages=_OF_OMNI, takes_prompt=True, translates=True
    ),
}
"""By model type."""


def asking_of(loaded: LoadedTokenizer) -> Asking | None:
    """None for a model that cannot be asked, or whose tokenizer lacks what the question holds."""
    found = _FAMILIES.get(str(loaded.config.get("model_type")))
    if found is not None and found.write is _voxtral:
        return found if loaded.tokenizer.token_to_id(_TRANSCRIBE) is not None else None
    return found if loaded.templates else None
