"""How a checkpoint transcribes recordings: what its prompts hold, from its own files."""

from typing import Final

from tokenmesh.services.tokenizer_svc.loading import (
    LoadedTokenizer,
    positive_int,
    read_json,
    text_config,
)
from tokenmesh.services.tokenizer_svc.media.features import load_audio_features
from tokenmesh.services.tokenizer_svc.media.stream_features import STREAMING, StreamFeatures
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.messages.audio import SpeechFacts

_FAMILY: Final = "whisper"
_PAD: Final = "[STREAMING_PAD]"
"""What the model writes while nothing new was said, and its prompt holds."""


def speech_facts(loaded: LoadedTokenizer) -> SpeechFacts | None:
    """None for a model that does not transcribe. Raises CheckpointError."""
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
    """Of a model that writes while it listens: it names no languages, times or other text."""
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
