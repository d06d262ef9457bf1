"""KaldiFeatures: Kaldi's filter banks as FunAsrNanoFeatureExtractor takes them, in numpy.

transformers' extractor needs torch and torchaudio. These are the rules of both for one recording:
logarithms of mel energies of windows, several of which are stacked into one frame of the tower.
"""

from pathlib import Path
from typing import Final

import msgspec
import numpy
import numpy.typing as npt

from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError

_PREEMPHASIS: Final = numpy.float32(0.97)
_LOWEST_HZ: Final = 20.0
_LEAST: Final = numpy.finfo(numpy.float32).eps
"""The least energy, whose logarithm is finite."""
_HAMMING: Final = "hamming"


class _Extractor(msgspec.Struct):
    """The options of FunAsrNanoFeatureExtractor, with its defaults."""

    feature_size: int = 80
    sampling_rate: int = 16_000
    frame_length: int = 25
    """Milliseconds, as the next one."""
    frame_shift: int = 10
    num_frames_lfr: int = 7
    stride_lfr: int = 6
    window: str = _HAMMING


class KaldiFeatures:
    """Computes the features of one checkpoint. Raises CheckpointError when it is made."""

    def __init__(self, directory: Path, settings: JsonObject) -> None:
        try:
            options = msgspec.convert(settings, _Extractor)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{directory}: its feature extractor: {error}") from error
        numbers = [getattr(options, name) for name in options.__struct_fields__ if name != "window"]
        if options.window != _HAMMING or min(numbers) < 1 or options.feature_size < 4:
            raise CheckpointError(
                f"{directory}: its feature extractor: only positive sizes, at least 4 bins and the "
                f"window {_HAMMING!r} are supported"
            )
        self._options = options
        self.sampling_rate = options.sampling_rate
        self._window = options.sampling_rate * options.frame_length // 1000
        self._shift = options.sampling_rate * options.frame_shift // 1000
        self._padded = 1 << (self._window - 1).bit_length()
        self._filters = self._filter_bank()

    def __call__(self, samples: Samples) -> Samples:
        """float32 [frames, stacked windows x bins]. The samples fill at least one window."""
        return self._stacked(self.filter_bank(samples))

    def filter_bank(self, samples: Samples) -> Samples:
        """float32 [windows, bins], as `torchaudio.compliance.kaldi.fbank` computes it."""
        windows = numpy.lib.stride_tricks.sliding_window_view(samples, self._window)[:: self._shift]
        windows = windows - windows.mean(axis=1, keepdims=True, dtype=numpy.float32)
        before = numpy.concatenate([windows[:, :1], windows[:, :-1]], axis=1)
        shaped = (windows - _PREEMPHASIS * before) * self._hamming()
        spectrum = numpy.fft.rfft(shaped, self._padded, axis=1)
        energies = (numpy.abs(spectrum) ** 2).astype(numpy.float32)
        found = numpy.log(numpy.maximum(energies @ self._filters, _LEAST))
        return numpy.asarray(found, numpy.float32)

    def _stacked(self, bank: Samples) -> Samples:
        """Each frame is several windows around every `stride_lfr`-th one; ends are repeated."""
        size, stride = self._options.num_frames_lfr, self._options.stride_lfr
        count = -(-len(bank) // stride)
        places = numpy.arange(count)[:, None] * stride + numpy.arange(size) - (size - 1) // 2
        windows: Samples = bank[places.clip(0, len(bank) - 1)]
        return windows.reshape(count, -1)

    def _hamming(self) -> Samples:
        angles = 2 * numpy.pi * numpy.arange(self._window) / (self._window - 1)
        return numpy.asarray(0.54 - 0.46 * numpy.cos(angles), numpy.float32)

    def _filter_bank(self) -> npt.NDArray[numpy.float32]:
        """[frequencies, bins]: triangles of equal widths on the mel scale."""
        count, rate = self._options.feature_size, self._options.sampling_rate
        low, high = _mel(numpy.array([_LOWEST_HZ, rate / 2]))
        width = (high - low) / (count + 1)
        left = low + numpy.arange(count) * width
        frequencies = numpy.arange(self._padded // 2, dtype=numpy.float64) * rate / self._padded
        mel = _mel(frequencies)[:, None]
        rising, falling = (mel - left) / width, (left + 2 * width - mel) / width
        bins = numpy.maximum(0.0, numpy.minimum(rising, falling))
        highest = numpy.zeros((1, count))  # which takes part in no bin
        return numpy.concatenate([bins, highest]).astype(numpy.float32)


def _mel(hertz: npt.NDArray[numpy.float64]) -> npt.NDArray[numpy.float64]:
    return 1127.0 * numpy.log(1.0 + hertz / 700.0)
