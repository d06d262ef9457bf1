"""FrameProcessor: which frames of a video a model gets, and what it gets of each.

transformers' video processors need torch and torchvision. These are their rules in pillow and
numpy, for the processors of Qwen-VL; a frame is resized by pillow, as images are.
"""

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy
import numpy.typing as npt
from PIL import Image

from tokenmesh.services.tokenizer_svc.media.video_file import (
    Frame,
    VideoFacts,
    VideoFile,
    VideoLimits,
)
from tokenmesh.services.tokenizer_svc.media.video_rules import VideoRules
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

OPTIONS: Final = frozenset({"fps", "num_frames", "min_frames", "max_frames"})
"""That a request may set for videos, in addition to the size."""
_SIZES: Final = ("size", "min_pixels", "max_pixels")
_FPS: Final = 2.0
"""Where neither checkpoint nor request has a rate, as Qwen's own preprocessing does."""
_CHANNELS: Final = 3
_MOST_RATIO: Final = 200
"""The largest ratio of the sides of a frame."""
_PARAM: Final = "mm_processor_kwargs"


class FrameProcessor:
    """The rules of one checkpoint."""

    def __init__(self, rules: VideoRules) -> None:
        self._rules = rules
        self.merge_size = rules.merge_size
        self.temporal_patch_size = rules.temporal_patch_size
        self.options = msgspec.json.encode(rules, order="sorted")
        """All options that change a result."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidInput for a value that no video can have."""
        for name in OPTIONS & options.keys():
            value = options[name]
            is_number = isinstance(value, int | float if name == "fps" else int)
            if not is_number or isinstance(value, bool) or not 0 < value < 1e6:
                raise InvalidInput(f"{_PARAM}: {name} is not a number above 0", param=_PARAM)
        if "fps" in options and "num_frames" in options:
            raise InvalidInput(f"{_PARAM}: fps and num_frames exclude each other", param=_PARAM)

    def rate(self, options: Mapping[str, Any]) -> float | None:
        """Frames that are taken of a second; None: a number of them is stated.

        Raises InvalidInput.
        """
        rules = self._with(options)
        return (rules.fps or _FPS) if rules.num_frames is None else None

    def features(
        self, video: VideoFile, options: Mapping[str, Any], limits: VideoLimits
    ) -> dict[str, Any]:
        """Return what transformers' video processor returns: patches, grid and facts of the frames.

        Raises InvalidInput or PayloadTooLarge.
        """
        self.check(options)
        rules = self._with(options)
        facts = video.facts
        indices = self.indices(facts, rules)
        if len(indices) > limits.max_frames:
            raise PayloadTooLarge(
                f"the model would get {len(indices)} frames of the video, at most "
                f"{limits.max_frames} "
                f"(tokenizer.media.max_video_frames): set a smaller fps or num_frames in {_PARAM}"
            )
        height, width = self.target(facts, len(indices), rules)
        if len(indices) * height * width > limits.max_total_pixels:
            raise PayloadTooLarge(
                f"the model would get {len(indices)} frames of {width}x{height} pixels, at most "
                f"{limits.max_total_pixels} pixels in all: set a smaller fps or size in {_PARAM}"
            )
        resized = (
            resized_frame(frame, height, width, rules.resample)
            for frame in video.frames(indices.tolist())
        )
        patches, grid = patches_of(resized, (len(indices), height, width), rules)
        metadata = SimpleNamespace(
            fps=facts.fps,
            frames_indices=indices,
            total_num_frames=facts.num_frames,
            sampled_fps=len(indices) / facts.num_frames * facts.fps,
        )
        return {
            "pixel_values_videos": patches,
            "video_grid_thw": numpy.array([grid], dtype=numpy.int64),
            "video_metadata": [metadata],
        }

    def _with(self, options: Mapping[str, Any]) -> VideoRules:
        sizes = {name: options[name] for name in _SIZES if name in options}
        counts = {name: options[name] for name in OPTIONS if name in options}
        if "num_frames" in counts:
            counts["fps"] = None
        elif "fps" in counts:
            counts["num_frames"] = None
        try:
            stated = msgspec.to_builtins(self._rules)
            return msgspec.convert({**stated, **counts, **sizes}, VideoRules)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{_PARAM}: {error}", param=_PARAM) from error

    def indices(self, facts: VideoFacts, rules: VideoRules) -> npt.NDArray[numpy.int64]:
        """Return the indices of the frames that are taken, as the video processor samples them."""
        return _spread(facts, rules) if rules.is_total else _stepped(facts, rules)

    def target(self, facts: VideoFacts, count: int, rules: VideoRules) -> tuple[int, int]:
        """Height and width of `count` resized frames. Raises InvalidInput."""
        factor = rules.patch_size * rules.merge_size
        least, most = _pixel_bounds(rules)
        if rules.cap_pixels_per_frame:
            floor = int(least * 1.05)
            if rules.is_total:
                cap = rules.max_video_tokens * factor * factor
                most = max(min(cap, most // count), floor) * count
            else:
                share = int(rules.max_video_tokens * factor * factor * 0.9)
                most = max(min(most, share * rules.temporal_patch_size // count), floor)
        height, width = facts.height, facts.width
        if not rules.is_total:
            return fitted(height, width, factor, least, most)
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        steps = rules.temporal_patch_size
        rounded = round(count / steps) * steps
        return fitted(height, width, factor, least, most, count, rounded)


def _pixel_bounds(rules: VideoRules) -> tuple[int, int]:
    least = rules.min_pixels or rules.size.get("shortest_edge") or 0
    most = rules.max_pixels or rules.size.get("longest_edge") or 0
    if not 0 < least <= most:
        raise InvalidInput(
            f"{_PARAM}: size needs shortest_edge and longest_edge, the least and the most pixels",
            param=_PARAM,
        )
    return least, most


def _stepped(facts: VideoFacts, rules: VideoRules) -> npt.NDArray[numpy.int64]:
    """Frames at even steps from the first one, a multiple of the frames of a patch."""
    total, patch = facts.num_frames, rules.temporal_patch_size
    if rules.num_frames is not None:
        count = round(rules.num_frames / patch) * patch
        if count > total:
            raise InvalidInput(
                f"{_PARAM}: num_frames is {rules.num_frames}, the video has {total}", param=_PARAM
            )
    else:
        most = min(rules.max_frames, total) // patch * patch
        wanted = total / facts.fps * (rules.fps or _FPS)
        count = int(min(max(wanted, rules.min_frames), most, total)) // patch * patch
    if count < 1:  # a video of one frame
        return numpy.arange(total)
    steps = numpy.arange(count) * (total / count)
    return steps.astype(numpy.float32).astype(numpy.int64).clip(0, total - 1)


def _spread(facts: VideoFacts, rules: VideoRules) -> npt.NDArray[numpy.int64]:
    """Frames from the first one to the last one."""
    total, count = facts.num_frames, rules.num_frames
    if count is None:
        wanted = int(total / facts.fps * (rules.fps or _FPS))
        count = min(max(wanted, rules.min_frames), rules.max_frames, total)
    found: npt.NDArray[numpy.int64] = numpy.linspace(0, total - 1, count).round().astype(int)
    return found


def fitted(
    height: int,
    width: int,
    factor: int,
    least: int,
    most: int,
    count: int = 1,
    rounded: int = 1,
) -> tuple[int, int]:
    """Multiples of `factor` near a height and a width, which keep their ratio where they can.

    `count` frames of that size, counted as `rounded`, have between `least` and `most` pixels.
    Raises InvalidInput for a shape that is too long.
    """
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise InvalidInput(
            f"the video has {width}x{height} pixels: one side is more than {_MOST_RATIO} times "
            "as long as the other one"
        )
    sides = (height, width)
    rows, columns = (round(side / factor) for side in sides)
    pixels = rounded * rows * columns * factor * factor
    if pixels > most:
        scale = math.sqrt(count * height * width / most)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in sides)
    elif pixels < least:
        scale = math.sqrt(least / (count * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in sides)
    return rows * factor, columns * factor


def resized_frame(frame: Frame, height: int, width: int, resample: int) -> Frame:
    image = Image.fromarray(frame)
    return numpy.asarray(image.resize((width, height), Image.Resampling(resample)))


def patches_of(
    frames: Iterator[Frame], shape: tuple[int, int, int], rules: VideoRules
) -> tuple[npt.NDArray[numpy.float32], tuple[int, int, int]]:
    """Frames as rows of patches, each of the pixels of `temporal_patch_size` frames; the last
    frame is repeated where they do not suffice. And the grid: patches in time, height and width.
    """
    (count, height, width), patch = shape, rules.patch_size
    steps, merged = rules.temporal_patch_size, rules.merge_size
    padded = count + -count % steps
    pixels = numpy.empty((padded, height, width, _CHANNELS), numpy.float32)
    mean = numpy.array(rules.image_mean, numpy.float32) / numpy.float32(rules.rescale_factor)
    std = numpy.array(rules.image_std, numpy.float32) / numpy.float32(rules.rescale_factor)
    for number, frame in enumerate(frames):
        numpy.subtract(frame, mean, out=pixels[number])
        pixels[number] /= std
    pixels[count:] = pixels[count - 1]
    grid = (padded // steps, height // patch, width // patch)
    cells = pixels.reshape(
        grid[0],
        steps,
        grid[1] // merged,
        merged,
        patch,
        grid[2] // merged,
        merged,
        patch,
        _CHANNELS,
    )
    ordered = cells.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(math.prod(grid), -1), grid
