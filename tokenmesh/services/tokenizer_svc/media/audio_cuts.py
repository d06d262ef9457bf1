"""Where a long recording is cut into clips: at quiet points, each clip at most a window long."""

from typing import Final

import numpy

from tokenmesh.services.tokenizer_svc.media.audio_file import Samples

_SEARCH_SHARE: Final = 1 / 6
"""The share of a window, at its end, where the quietest point is searched."""
_QUIET_S: Final = 0.1
"""Length of a quiet point."""


def cut_points(samples: Samples, rate: int, window_s: float) -> list[tuple[int, int]]:
    """First and last sample of each clip; they follow each other without gaps.

    A point depends only on what is before the end of its window.
    """
    window = int(window_s * rate)
    clips, start = [], 0
    while len(samples) - start > window:
        end = start + window
        first = end - int(window * _SEARCH_SHARE)
        cut = first + _quietest(samples[first:end], int(_QUIET_S * rate))
        clips.append((start, cut))
        start = cut
    clips.append((start, len(samples)))
    return clips


def _quietest(samples: Samples, width: int) -> int:
    """The middle of the quietest `width` samples, the last of several equal ones."""
    count = len(samples) // width
    energy = numpy.square(samples[: count * width].reshape(count, width)).sum(axis=1)
    quietest = count - 1 - int(energy[::-1].argmin())
    return quietest * width + width // 2
