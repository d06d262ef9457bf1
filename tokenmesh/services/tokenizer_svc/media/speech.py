"""Reads from a checkpoint's files how it transcribes recordings."""

import math
from typing import Final

import numpy

from tokenmesh.services.tokenizer_svc.loading import (
    LoadedTokenizer,
    positive_int,
    read_json,
    text_config,
)
from tokenmesh.services.tokenizer_svc.media.asking import Asking, asking_of
from tokenmesh.services.tokenizer_svc.media.features import load_audio_features
from tokenmesh.services.tokenizer_svc.media.media_model import MediaModel
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor, audio_token
from tokenmesh.services.tokenizer_svc.media.stream_features import STREAMING, StreamFeatures
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError, PayloadTooLarge
from tokenmesh.shared.messages.audio import SpeechFacts
from tokenmesh.shared.messages.media import AUDIO

_FAMILY: Final = "whisper"
ONLY_TRANSCRIBING: Final = frozenset((_FAMILY, STREAMING))
"""Model types that answer nothing but recordings."""
_PAD: Final = "[STREAMING_PAD]"
"""The model writes this while nothing new was said, and its prompt holds it."""
_MIN_CLIP_S: Final = 1.0
_MEASURED_S: Final = 30.0
"""Seconds of silence whose tokens are counted."""


def speech_facts(loaded: LoadedTokenizer, media: MediaModel | None) -> SpeechFacts | None:
    """None for a model that does not transcribe. Raises CheckpointError."""
    if media is not None and AUDIO in media.kinds:
        asking = asking_of(loaded)
        return None if asking is None else _asked(loaded, asking)
    if loaded.config.get("model_type") == STREAMING:
        return _streaming(loaded)
    if loaded.config.get("model_type") != _FAMILY:
        return None
    generation = read_json(loaded.directory / "generation_config.json")
    features = load_audio_features(loaded.directory)
    states = positive_int(loaded.config.get("max_source_positions"))
    target = positive_int(loaded.config.get("max_target_positions"))
    no_timestamps = _id(generation, "no_timestamps_token_id")
    if states is None or target is None or no_timestamps < 0:
        raise CheckpointError(
            f"{loaded.directory}: max_source_positions, max_target_positions or "
            "no_timestamps_token_id is missing, without which whisper cannot be prompted"
        )
    tasks = _ids(generation.get("task_to_id"))
    languages = _ids(generation.get("lang_to_id"))
    return SpeechFacts(
        start_id=_id({**loaded.config, **generation}, "decoder_start_token_id"),
        end_id=_id({**loaded.config, **generation}, "eos_token_id"),
        languages={name.strip("<|>"): token for name, token in languages.items()},
        transcribe_id=tasks.get("transcribe", -1),
        translate_id=tasks.get("translate", -1),
        previous_id=_token(loaded, "<|startofprev|>"),
        no_speech_id=no_timestamps - 1,
        no_timestamps_id=no_timestamps,
        first_timestamp_id=no_timestamps + 1,
        num_timestamps=max(0, loaded.vocab_size - no_timestamps - 1),
        timestamp_s=features.window_s / states,
        max_initial_timestamp=_id(generation, "max_initial_timestamp_index"),
        suppress_ids=_list(generation.get("suppress_tokens"), loaded.vocab_size),
        begin_suppress_ids=_list(generation.get("begin_suppress_tokens"), loaded.vocab_size),
        window_s=features.window_s,
        rate=features.rate,
        max_previous_tokens=target // 2 - 1,
        aligns=bool(generation.get("alignment_heads")),
    )


def _streaming(loaded: LoadedTokenizer) -> SpeechFacts:
    """Return the facts of a model that writes while it listens: it names no languages or times."""
    features = StreamFeatures(loaded.directory, loaded.config)
    text, layout = text_config(loaded.config), features.layout
    token_s = features.token_s
    start, pad = _id({"bos_token_id": 1, **text}, "bos_token_id"), _token(loaded, _PAD)
    if start < 0 or pad < 0:
        raise CheckpointError(
            f"{loaded.directory}: bos_token_id or the token {_PAD} is missing, without which the "
            "model cannot be prompted"
        )
    return SpeechFacts(
        start_id=start,
        prompt_ids=[start, *[pad] * (layout.before + layout.delay)],
        hidden_ids=sorted({*loaded.special_ids, *loaded.eos_token_ids}),
        timestamp_s=token_s,
        window_s=features.window_s,
        rate=features.rate,
        max_previous_tokens=0,
        follows_speech=features.is_causal,
    )


def _asked(loaded: LoadedTokenizer, asking: Asking) -> SpeechFacts | None:
    """The facts of a model that hears in chats; None where its context holds no clip."""
    processor, context = RecordingProcessor(loaded.directory), loaded.max_model_len
    window_s = min(asking.clip_s, processor.max_s or asking.clip_s)
    if context is not None:
        # One half of the context is for the recording.
        window_s = min(window_s, context / 2 / tokens_of_second(processor))
    if window_s < _MIN_CLIP_S:
        return None
    hidden = {*loaded.special_ids, *loaded.eos_token_ids} - {_token(loaded, asking.marker)}
    embed = audio_token(loaded.config)
    return SpeechFacts(
        start_id=-1,
        embed_id=-1 if embed is None else embed,
        hidden_ids=sorted(hidden),
        language_names=dict(asking.languages),
        takes_prompt=asking.takes_prompt,
        takes_keywords=asking.takes_keywords,
        translates=asking.translates,
        marker=asking.marker,
        is_framed=asking.is_framed,
        window_s=window_s,
        rate=processor.rate,
        max_previous_tokens=0,
    )


def tokens_of_second(processor: RecordingProcessor) -> float:
    """Tokens that stand for a second of a recording; infinite where none fits the context."""
    seconds = min(_MEASURED_S, processor.max_s or _MEASURED_S)
    while seconds >= _MIN_CLIP_S:
        silence = numpy.zeros(int(seconds * processor.rate), numpy.float32)
        try:
            return sum(processor(silence).prepared.runs) / seconds
        except PayloadTooLarge:
            seconds /= 2
    return math.inf


def _id(values: JsonObject, name: str) -> int:
    found = values.get(name)
    return found if type(found) is int and found >= 0 else -1


def _ids(table: object) -> dict[str, int]:
    if not isinstance(table, dict):
        return {}
    return {str(name): token for name, token in table.items() if type(token) is int}


def _list(values: object, vocab_size: int) -> list[int]:
    found = values if isinstance(values, list) else []
    return [token for token in found if type(token) is int and 0 <= token < vocab_size]


def _token(loaded: LoadedTokenizer, text: str) -> int:
    found = loaded.tokenizer.token_to_id(text)
    return -1 if found is None else found
