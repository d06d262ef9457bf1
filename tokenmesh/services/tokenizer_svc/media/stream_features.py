"""StreamFeatures: clips for a model that writes while it listens, as Voxtral Realtime does.

Such a model hears 80 ms with each token. Silence around a clip gives it time: before the first
word, and after the last one, since it writes a word some tokens after it was said. transformers'
extractor needs torch, and its processor a package of Mistral's.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy
import numpy.typing as npt

from tokenmesh.services.tokenizer_svc.loading import positive_int, read_json, text_config
from tokenmesh.services.tokenizer_svc.media.mel import extractor_settings
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError

STREAMING: Final = "voxtral_realtime"
"""Model type."""
_WINDOW_S: Final = 60.0
_LEFT: Final = 32
_LAST_WORD: Final = 10
"""Tokens that a word takes at most."""
_MAX_HZ: Final = 8_000.0
"""Half of the sampling rate of 16 kHz: there is nothing above it."""
_RANGE: Final = 8.0
"""The range of the logarithm of a spectrogram's energies."""


class _Extractor(msgspec.Struct):
    """The options of VoxtralRealtimeFeatureExtractor, with its defaults."""

    feature_size: int = 128
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    win_length: int = 400
    global_log_mel_max: float | None = 1.5


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Tokens of silence, and what a token hears."""

    before: int
    delay: int
    """From a word to its text."""
    frames: int
    """Frames of the spectrogram for a token."""

    @property
    def after(self) -> int:
        return self.delay + 1 + _LAST_WORD


def stream_layout(directory: Path, config: JsonObject) -> StreamLayout:
    """From tekken.json, else as Mistral's models have it. Raises CheckpointError."""
    delay = config.get("default_num_delay_tokens", 6)
    frames = config.get("audio_length_per_tok", 8)
    if positive_int(delay) is None or positive_int(frames) is None:
        problem = "default_num_delay_tokens or audio_length_per_tok is not a number above 0"
        raise CheckpointError(f"{directory}: config.json: {problem}")
    audio = read_json(directory / "tekken.json").get("audio")
    stated = audio if isinstance(audio, dict) else {}
    before = stated.get("streaming_n_left_pad_tokens", _LEFT)
    if not isinstance(before, int) or before < 0:
        raise CheckpointError(
            f"{directory}: tekken.json: streaming_n_left_pad_tokens is {before!r}"
        )
    layout = StreamLayout(before, int(str(delay)), int(str(frames)))
    delay_ms = stated.get("transcription_delay_ms")
    token_ms = 1000.0 / float(stated.get("frame_rate", 12.5))
    if delay_ms is not None and round(float(delay_ms) / token_ms) != layout.delay:
        raise CheckpointError(
            f"{directory}: tekken.json: transcription_delay_ms is {delay_ms}, "
            f"default_num_delay_tokens of config.json is {layout.delay}, of {token_ms:g} ms each"
        )
    return layout


class StreamFeatures:
    """Log-mel spectrograms of clips between silence. Raises CheckpointError when it is made."""

    def __init__(self, directory: Path, config: JsonObject) -> None:
        from transformers.audio_utils import mel_filter_bank

        try:
            self._extractor = msgspec.convert(extractor_settings(directory), _Extractor)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{directory}: its feature extractor: {error}") from error
        options = self._extractor
        if options.win_length != options.n_fft:
            problem = (
                f"win_length is {options.win_length}, n_fft {options.n_fft}: they must be equal"
            )
            raise CheckpointError(f"{directory}: its feature extractor: {problem}")
        self.layout = stream_layout(directory, config)
        self.rate = options.sampling_rate
        self.is_causal = options.global_log_mel_max is not None
        """True where no later sample changes a frame, but for those within it."""
        self.token_samples = self.layout.frames * options.hop_length
        self.reach = options.n_fft // 2
        """Samples on either side of a frame's middle that it depends on."""
        self.hop = options.hop_length
        self.token_s: float = self.token_samples / self.rate
        around = self.layout.before + self.layout.after
        room = (positive_int(text_config(config).get("max_position_embeddings")) or 4096) - around
        if room < 1:
            raise CheckpointError(f"{directory}: its context is shorter than {around} tokens")
        self.window_s = min(_WINDOW_S, room * self.token_s)
        self.frames_of_token = self.layout.frames
        self.options = msgspec.json.encode([STREAMING, options, repr(self.layout)])
        self._filters: Any = mel_filter_bank(
            num_frequency_bins=1 + options.n_fft // 2,
            num_mel_filters=options.feature_size,
            min_frequency=0.0,
            max_frequency=_MAX_HZ,
            sampling_rate=options.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        ).astype(numpy.float32)

    def __call__(self, samples: npt.NDArray[numpy.float32]) -> npt.NDArray[numpy.float32]:
        """float32 samples of a clip -> float32 [bins, frames], a whole number of tokens."""
        return self.spectrogram(self.padded(samples))

    def padded(self, samples: npt.NDArray[numpy.float32]) -> npt.NDArray[numpy.float32]:
        """A clip between silence."""
        size = self.token_samples
        whole = math.ceil(len(samples) / size) * size
        after = whole - len(samples) + self.layout.after * size
        return numpy.pad(samples, (self.layout.before * size, after))

    def spectrogram(self, samples: npt.NDArray[numpy.float32]) -> npt.NDArray[numpy.float32]:
        """As VoxtralRealtimeFeatureExtractor computes it: the ends are reflected."""
        around = numpy.pad(samples, self._extractor.n_fft // 2, mode="reflect")
        return self.within(around[: len(around) - self._extractor.hop_length])

    def within(self, samples: npt.NDArray[numpy.float32]) -> npt.NDArray[numpy.float32]:
        """The spectrogram of the frames that lie within the samples."""
        options = self._extractor
        size, hop = options.n_fft, options.hop_length
        # torch's window is periodic
        window = numpy.hanning(size + 1)[:-1].astype(numpy.float32)
        framed = numpy.lib.stride_tricks.sliding_window_view(samples, size)[::hop]
        energies = numpy.abs(numpy.fft.rfft(framed * window)).astype(numpy.float32) ** 2
        logs = numpy.log10(numpy.maximum(energies @ self._filters, 1e-10)).T
        top = options.global_log_mel_max
        highest = numpy.float32(logs.max() if top is None else top)
        found = (numpy.maximum(logs, highest - _RANGE) + 4.0) / 4.0
        return numpy.ascontiguousarray(found, dtype=numpy.float32)
