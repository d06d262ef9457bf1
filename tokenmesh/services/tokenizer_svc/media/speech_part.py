"""The next part of speech that goes on: features of the tokens that no later sample changes.

Places are counted in samples of the model's rate from the silence before the speech. Parts one
after the other hold the spectrogram that `StreamFeatures` makes of the whole clip, within the
rounding of the resampler.
"""

from math import gcd
from typing import Final

import msgspec
import numpy
import soxr

from tokenmesh.services.tokenizer_svc.media.audio_file import Samples
from tokenmesh.services.tokenizer_svc.media.stream_features import StreamFeatures
from tokenmesh.shared.errors import InvalidInput

_MARGIN_S: Final = 0.05
"""On either side of samples: what the resampler makes of them depends on it."""


class SpeechPart(msgspec.Struct, frozen=True):
    """Names the part that is wanted; the fields are those of `PrepareSpeech`."""

    first_sample: int
    first_token: int
    follows: str
    is_end: bool


class PartFeatures:
    """Makes parts of speech of one rate. Raises InvalidInput for a model that needs all of it."""

    def __init__(self, features: StreamFeatures, rate: int) -> None:
        if not features.is_causal:
            raise InvalidInput("the model's spectrograms need a whole recording", param="model")
        self._features = features
        self._rate = rate
        shared = gcd(rate, features.rate)
        self._given = rate // shared
        """So many samples as they come become `_made` samples of the model's rate."""
        self._made = features.rate // shared
        self._margin = 0 if rate == features.rate else int(_MARGIN_S * features.rate)
        self._before = features.layout.before * features.token_samples

    def __call__(self, samples: Samples, part: SpeechPart) -> tuple[Samples, int]:
        """Features [bins, frames] of whole tokens, perhaps of none, and the number of the first
        sample that the next part needs. `samples` begin at `part.first_sample`.

        Raises InvalidInput.
        """
        if part.first_sample % self._given:
            raise InvalidInput("first_sample is not one that was returned", param="first_sample")
        features = self._features
        first = self._before + part.first_sample // self._given * self._made
        heard = samples
        if self._rate != features.rate:
            heard = numpy.asarray(soxr.resample(samples, self._rate, features.rate), numpy.float32)
        end_token = self._end_token(first + len(heard), is_end=part.is_end)
        count = max(0, end_token - part.first_token)
        start = part.first_token * features.token_samples - features.reach
        if first > self._before and start < first + self._margin:
            raise InvalidInput("first_sample lies after the part", param="first_sample")
        if not count:
            empty: Samples = numpy.zeros((0, 0), numpy.float32)
            return empty, part.first_sample
        end = end_token * features.token_samples - features.hop + features.reach
        found = features.within(_between(heard, first, start, end))
        return found, self._next_sample(end_token)

    def seconds(self, token: int) -> float:
        """Where a token begins in the speech."""
        layout = self._features.layout
        return max(0.0, (token - layout.before) * self._features.token_s)

    def _end_token(self, heard: int, *, is_end: bool) -> int:
        """The token after the last one that can be computed; `heard`: the place after all."""
        size, layout = self._features.token_samples, self._features.layout
        if is_end:
            return -(-heard // size) + layout.after
        certain = heard - self._margin - self._features.reach + self._features.hop
        return max(0, certain // size)

    def _next_sample(self, token: int) -> int:
        start = token * self._features.token_samples - self._features.reach
        least = max(0, start - self._margin - self._before)
        return least // self._made * self._given


def _between(heard: Samples, first: int, start: int, end: int) -> Samples:
    """The samples at places [start, end), silence where there are none; `heard` are at `first`.

    Places before 0 reflect those after it.
    """
    found = numpy.zeros(end - max(0, start), numpy.float32)
    low, high = max(first, start, 0), min(first + len(heard), end)
    if low < high:
        found[low - max(0, start) : high - max(0, start)] = heard[low - first : high - first]
    return found if start >= 0 else numpy.pad(found, (-start, 0), mode="reflect")
