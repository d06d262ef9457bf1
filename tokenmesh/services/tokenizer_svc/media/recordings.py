"""RecordingProcessor: what a checkpoint's audio tower takes of one recording, in numpy.

transformers' processors of whole prompts need torch. Each function here is the rule of one of them
for one recording: the tensors, and how many tokens stand for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy

from tokenmesh.services.tokenizer_svc.loading import positive_int, read_config, text_config
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.kaldi import KaldiFeatures
from tokenmesh.services.tokenizer_svc.media.mel import extractor_settings, load_whisper_extractor
from tokenmesh.services.tokenizer_svc.media.processor import ItemText, PreparedItem
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError, InvalidInput, PayloadTooLarge
from tokenmesh.shared.tensor_blob import TensorBlob, encode_named

MIN_S: Final = 0.1
"""A shorter recording has no frames in some families."""

_STATES_OF_CHUNK: Final = 13
"""The frames that three convolutions leave of a chunk, in the code of transformers."""

Tensors = dict[str, numpy.ndarray]
"""By the name that the tower's method has for them."""


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """A feature extractor of log-mel spectrograms, and the sizes of its tower."""

    extractor: Any
    """WhisperFeatureExtractor of transformers, which needs numpy only, or KaldiFeatures."""
    tower: Mapping[str, int]
    """Numbers in the `audio_config` of config.json."""
    settings: JsonObject
    """The settings of the feature extractor."""

    def size(self, name: str, default: int) -> int:
        """A positive number in the tower's config."""
        return self.tower.get(name) or default

    def __call__(self, samples: Any, **options: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Features [clips, bins, frames] and a mask [clips, frames] of what is not padding."""
        found = self.extractor(
            samples,
            sampling_rate=self.extractor.sampling_rate,
            return_attention_mask=True,
            return_tensors="np",
            **options,
        )
        return found["input_features"], found["attention_mask"]

    def windows(self, samples: Samples) -> list[Samples]:
        """The samples in parts, each but the last one a window long."""
        size = self.extractor.n_samples
        return [samples[start : start + size] for start in range(0, len(samples), size)]


def _qwen2_audio(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    features, mask = mel([samples], padding="max_length")
    frames = int(mask.sum())
    tensors = {"input_features": features, "feature_attention_mask": mask}
    return tensors, ((frames - 1) // 2 - 1) // 2 + 1


def _voxtral(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    window = mel.extractor.n_samples
    features, _ = mel([samples], padding=True, truncation=False, pad_to_multiple_of=window)
    bins, frames = features.shape[1], mel.extractor.nb_max_frames
    clips = features[0].reshape(bins, -1, frames).transpose(1, 0, 2)
    values = mel.size("max_source_positions", 1500) * mel.size("hidden_size", 1280)
    return {"input_features": clips}, len(clips) * (values // mel.size("intermediate_size", 5120))


def _qwen3_asr(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    least = positive_int(mel.settings.get("min_length", 8000)) or 0
    whole = numpy.pad(samples, (0, max(0, least - len(samples))))
    features, mask = mel([whole], padding=True, truncation=False)
    chunk = 2 * mel.size("n_window", 50)
    rest = -features.shape[-1] % chunk
    tensors = {
        "input_features": numpy.pad(features, ((0, 0), (0, 0), (0, rest))),
        "input_features_mask": numpy.pad(mask, ((0, 0), (0, rest))),
    }
    return tensors, _after_three_convolutions(int(mask.sum()), chunk)


def _qwen3_omni(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    features, mask = mel([samples], padding=True, truncation=False)
    tensors = {"input_features": features, "feature_attention_mask": mask}
    return tensors, _after_three_convolutions(int(mask.sum()), 2 * mel.size("n_window", 50))


def _after_three_convolutions(frames: int, chunk: int) -> int:
    """Each halves the frames of a chunk, rounded up."""
    rest = frames % chunk
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // chunk * _STATES_OF_CHUNK


def _glm_asr(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    features, mask = mel(mel.windows(samples))
    states = (mask.sum(-1) - 1) // 2 + 1
    count = int(((states - 4) // 4 + 1).sum())
    return {"input_features": features, "input_features_mask": mask}, count


def _audio_flamingo(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    features, mask = mel(mel.windows(samples))
    states = (mask.sum(-1) - 1) // 2 + 1
    count = int(((states - 2) // 2 + 1).sum())
    return {"input_features": features, "input_features_mask": mask}, count


def _fun_asr_nano(mel: Spectrogram, samples: Samples) -> tuple[Tensors, int]:
    features = mel.extractor(samples)[None]
    most = mel.size("max_position_embeddings", 2049) - 1
    if features.shape[1] > most:
        raise PayloadTooLarge(
            f"the recording has {features.shape[1]} frames, the model takes at most {most}"
        )
    mask = numpy.ones(features.shape[:2], numpy.int64)
    return {"input_features": features, "input_features_mask": mask}, features.shape[1]


@dataclass(frozen=True, slots=True)
class _Family:
    prepare: Callable[[Spectrogram, Samples], tuple[Tensors, int]]
    around: tuple[str, str] = ("", "")
    """Texts that prompts of the family hold before and after a recording."""
    max_s: float | None = None
    """transformers cuts off after so many seconds; None: never."""
    is_one_window: bool = False
    """True where a recording must fit the window of the extractor."""
    has_chunks: bool = False
    """True where three convolutions go over chunks of 2 x n_window frames."""


_KALDI: Final = "fun_asr_nano"
"""Whose extractor is not whisper's."""
_QWEN: Final = ("<|audio_bos|>", "<|audio_eos|>")
_QWEN3: Final = ("<|audio_start|>", "<|audio_end|>")
_FAMILIES: Final[Mapping[str, _Family]] = {
    "qwen2_audio": _Family(_qwen2_audio, _QWEN, is_one_window=True),
    "voxtral": _Family(_voxtral, ("[BEGIN_AUDIO]", "")),
    "qwen3_asr": _Family(_qwen3_asr, _QWEN3, has_chunks=True),
    "qwen3_omni_moe_thinker": _Family(_qwen3_omni, _QWEN3, has_chunks=True),
    "glmasr": _Family(_glm_asr, ("<|begin_of_audio|>", "<|end_of_audio|>"), max_s=655),
    "audioflamingo3": _Family(_audio_flamingo, max_s=600),
    _KALDI: _Family(_fun_asr_nano),
}
"""By model type."""


def takes_recordings(config: JsonObject) -> bool:
    """Return whether a model with this config.json has recordings in its prompts."""
    return config.get("model_type") in _FAMILIES


def audio_token(config: JsonObject) -> int | None:
    """The id of the token that takes the embeddings of a recording."""
    found = config.get("audio_token_id", config.get("audio_token_index"))
    return found if type(found) is int and found >= 0 else None


class RecordingProcessor:
    """Prepares recordings for one checkpoint.

    Raises CheckpointError for one whose extractor cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        self._family = _FAMILIES[str(config.get("model_type"))]
        self._mel = _spectrogram(directory, config)
        if self._family.has_chunks:
            _check_chunks(directory, 2 * self._mel.size("n_window", 50))
        self._max_tokens = positive_int(text_config(config).get("max_position_embeddings"))
        self.rate: int = self._mel.extractor.sampling_rate
        self.around = self._family.around
        """Texts that prompts of the family hold before and after a recording."""
        known = [config.get("model_type"), self._mel.settings, self._mel.tower]
        self.options = msgspec.json.encode(known, order="sorted")
        """All options that change a result."""

    @property
    def max_s(self) -> float | None:
        """Longest recording that the model takes; None: as its context allows."""
        if self._family.is_one_window:
            return float(self._mel.extractor.n_samples / self.rate)
        return self._family.max_s

    def __call__(self, samples: Samples) -> PreparedItem:
        """Raises InvalidInput or PayloadTooLarge."""
        seconds = len(samples) / self.rate
        if seconds < MIN_S:
            raise InvalidInput(f"the recording has {seconds:.3f} s, at least {MIN_S:g} s")
        if self.max_s is not None and seconds > self.max_s:
            raise PayloadTooLarge(
                f"the recording has {seconds:.1f} s, the model takes at most {self.max_s:g} s"
            )
        tensors, count = self._family.prepare(self._mel, samples)
        if self._max_tokens is not None and count > self._max_tokens:
            raise PayloadTooLarge(
                f"the recording stands for {count} tokens, the model's context holds "
                f"{self._max_tokens}"
            )
        named = {name: _blob(value) for name, value in tensors.items()}
        return PreparedItem(ItemText("", [count]), encode_named(named))


def _check_chunks(directory: Path, chunk: int) -> None:
    if _after_three_convolutions(chunk - 1, chunk) != _STATES_OF_CHUNK:
        what = f"audio_config.n_window is {chunk // 2}, which is not supported: transformers"
        raise CheckpointError(
            f"{directory}: {what} counts {_STATES_OF_CHUNK} states in a chunk", param="n_window"
        )


def _blob(value: numpy.ndarray) -> TensorBlob:
    dtype = "float32" if value.dtype.kind == "f" else "int64"
    little = numpy.ascontiguousarray(value, dtype=numpy.dtype(dtype).newbyteorder("<"))
    return TensorBlob(dtype, little.shape, little.tobytes())


def _spectrogram(directory: Path, config: JsonObject) -> Spectrogram:
    settings, tower = extractor_settings(directory), config.get("audio_config")
    extractor: Any
    if config.get("model_type") == _KALDI:
        extractor = KaldiFeatures(directory, settings)
    else:
        extractor = load_whisper_extractor(directory)
    sizes = tower if isinstance(tower, dict) else {}
    numbers = {name: value for name, value in sizes.items() if type(value) is int}
    return Spectrogram(extractor, numbers, settings)
