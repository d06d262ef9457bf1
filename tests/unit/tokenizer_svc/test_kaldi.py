"""Filter banks of Kaldi as torchaudio computes them, without it."""

from pathlib import Path

import numpy
import pytest
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from tests.fakes.recordings import syllables, tones
from tokenmesh.services.tokenizer_svc.media.kaldi import KaldiFeatures
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError

HERE = Path(__file__).parent


def features(**settings: object) -> KaldiFeatures:
    options: JsonObject = dict(settings)
    return KaldiFeatures(HERE, options)


def test_a_filter_bank_is_that_of_torchaudio() -> None:
    # torchaudio 2.11's compliance.kaldi.fbank of the same tones, with the extractor's defaults
    theirs = numpy.load(HERE / "kaldi_filter_bank.npy")
    numpy.testing.assert_allclose(features().filter_bank(tones(0.2, seed=3)), theirs, atol=2e-4)


@pytest.mark.parametrize("samples", [tones(1.3, seed=1), syllables(3), numpy.zeros(1600)])
def test_a_filter_bank_is_that_of_transformers_in_numpy(samples: numpy.ndarray) -> None:
    filters = mel_filter_bank(
        num_frequency_bins=257,
        num_mel_filters=80,
        min_frequency=20,
        max_frequency=8000,
        sampling_rate=16000,
        norm=None,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    theirs = spectrogram(
        samples.astype(numpy.float64),
        window_function(400, "hamming", periodic=False),
        frame_length=400,
        hop_length=160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=filters,
        log_mel="log",
        mel_floor=1.192092955078125e-07,
        remove_dc_offset=True,
    ).T
    ours = features().filter_bank(samples.astype(numpy.float32))
    numpy.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_frames_are_stacked_around_every_sixth_window() -> None:
    make = features(feature_size=4)
    bank = numpy.arange(4 * 14, dtype=numpy.float32).reshape(14, 4)
    stacked = make._stacked(bank).reshape(3, 7, 4)[:, :, 0] / 4
    assert stacked.tolist() == [
        [0, 0, 0, 0, 1, 2, 3],
        [3, 4, 5, 6, 7, 8, 9],
        [9, 10, 11, 12, 13, 13, 13],
    ]


@pytest.mark.parametrize(
    "settings", [{"window": "povey"}, {"feature_size": 3}, {"stride_lfr": 0}, {"frame_shift": "x"}]
)
def test_an_extractor_of_other_rules_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="its feature extractor"):
        features(**settings)
