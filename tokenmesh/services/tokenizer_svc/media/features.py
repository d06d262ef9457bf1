"""Computes the input of the tower of a model that transcribes from a clip, in numpy."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy

from tokenmesh.services.tokenizer_svc.loading import inner_config, read_config
from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.recordings import (
    MIN_S,
    RecordingProcessor,
    takes_recordings,
)
from tokenmesh.services.tokenizer_svc.media.stream_features import STREAMING, StreamFeatures
from tokenmesh.shared.errors import CheckpointError


def load_clip_features(
    directory: Path, window_s: float
) -> "WhisperFeatures | StreamFeatures | RecordingFeatures":
    """window_s: longest clip of a model that hears in chats. Raises CheckpointError."""
    if takes_recordings(inner_config(read_config(directory))):
        return RecordingFeatures(RecordingProcessor(directory), window_s)
    return load_audio_features(directory)


def load_audio_features(directory: Path) -> "WhisperFeatures | StreamFeatures":
    """The checkpoint's feature extractor, in numpy. Raises CheckpointError."""
    config = read_config(directory)
    if config.get("model_type") == STREAMING:
        return StreamFeatures(directory, config)
    from transformers import AutoFeatureExtractor

    try:
        extractor = AutoFeatureExtractor.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{directory}: its feature extractor cannot be loaded: {error}"
        ) from error
    return WhisperFeatures(extractor)


class WhisperFeatures:
    """Log-mel spectrograms of clips, padded with silence to a window."""

    frames_of_token = 0

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor
        self.rate = int(extractor.sampling_rate)
        self.window_s = float(extractor.chunk_length)
        self.options = msgspec.json.encode(extractor.to_dict(), order="sorted")

    def __call__(self, samples: numpy.ndarray) -> numpy.ndarray:
        """float32 samples of a clip -> float32 [bins, frames]"""
        batch = self._extractor(samples, sampling_rate=self.rate, return_tensors="np")
        return numpy.asarray(batch["input_features"][0], dtype=numpy.float32)


class RecordingFeatures:
    """Features of clips for a model that hears in chats, as of a recording in a prompt."""

    def __init__(self, processor: RecordingProcessor, window_s: float) -> None:
        self._processor = processor
        self.rate = processor.rate
        self.window_s = window_s
        self.options = processor.options

    def __call__(self, samples: Samples) -> tuple[bytes, int]:
        """An encoded blob of named tensors, and how many tokens stand for the clip."""
        least = math.ceil(MIN_S * self.rate)
        if len(samples) < least:  # what is left after the last cut
            samples = numpy.pad(samples, (0, least - len(samples)))
        item = self._processor(samples)
        return item.features, sum(item.prepared.runs)
