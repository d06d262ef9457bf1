"""A model gets of a video what transformers' video processors make.

They need torchvision, which is not installed; all arithmetic but the resizing runs without.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from tests.fakes.media_models import without_weights
from tests.fakes.tokenizers import write_json
from tests.fakes.videos import pictures
from tokenmesh.services.tokenizer_svc.loading import read_json
from tokenmesh.services.tokenizer_svc.media.processor import read_options
from tokenmesh.services.tokenizer_svc.media.video_file import VideoFacts, VideoLimits
from tokenmesh.services.tokenizer_svc.media.video_frames import (
    FrameProcessor,
    patches_of,
    resized_frame,
)
from tokenmesh.services.tokenizer_svc.media.video_rules import video_rules
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

LIMITS = VideoLimits(max_s=3600.0, max_pixels=10**8, max_frames=64, max_total_pixels=10**6)


@pytest.fixture(scope="module")
def theirs() -> Iterator[dict[str, Any]]:
    """transformers' modules of the two processors, over an empty torchvision."""
    names = [
        "torchvision",
        *(f"torchvision.{each}" for each in ("transforms", "transforms.v2")),
        "torchvision.transforms.v2.functional",
    ]
    stubs = {name: ModuleType(name) for name in names}
    for name in names[1:]:
        parent, _, child = name.rpartition(".")
        setattr(stubs[parent], child, stubs[name])
    sys.modules.update(stubs)
    try:
        yield {
            name: importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
            for name in ("qwen2_vl", "qwen3_vl")
        }
    finally:
        for name in names:
            sys.modules.pop(name, None)


def ours(tmp_path: Path, name: str, **stated: object) -> FrameProcessor:
    directory = without_weights(tmp_path, name)
    if stated:
        write_json(directory / "video_preprocessor_config.json", stated)
    found = video_rules(directory, read_json(directory / "config.json"))
    assert found is not None
    return FrameProcessor(found)


def facts(total: int, fps: float, height: int = 32, width: int = 48) -> VideoFacts:
    return VideoFacts(total, fps, height, width)


@pytest.mark.parametrize("options", [{"fps": 2}, {"fps": 7.5}, {"num_frames": 8}, {"fps": 30}])
def test_the_frames_of_qwen2_vl(
    tmp_path: Path, theirs: dict[str, Any], options: dict[str, Any]
) -> None:
    processor = ours(tmp_path, "qwen2_vl")
    rules = processor._with(options)
    stand_in = SimpleNamespace(
        num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=768
    )
    sample = theirs["qwen2_vl"].Qwen2VLVideoProcessor.sample_frames
    for total in (8, 9, 30, 77, 100, 333, 1000):
        for fps in (8.0, 23.976, 30.0):
            metadata = SimpleNamespace(total_num_frames=total, fps=fps)
            expected = sample(stand_in, metadata, **options).tolist()
            found = processor.indices(facts(total, fps), rules).tolist()
            assert found == expected[: len(found)], (total, fps)
            # rounding may add a frame after the last one, which the processor cannot take
            assert expected[len(found) :] in ([], [total])


@pytest.mark.parametrize("options", [{}, {"fps": 5}, {"num_frames": 9}, {"fps": 29.97}])
def test_the_frames_of_qwen3_vl(
    tmp_path: Path, theirs: dict[str, Any], options: dict[str, Any]
) -> None:
    kind = {"video_processor_type": "Qwen3VLVideoProcessor"}
    processor = ours(tmp_path, "qwen3_vl", **kind)
    rules = processor._with(options)
    stand_in = SimpleNamespace(num_frames=None, fps=2, min_frames=4, max_frames=768)
    sample = theirs["qwen3_vl"].Qwen3VLVideoProcessor.sample_frames
    for total in (1, 3, 8, 77, 100, 3333):
        for fps in (8.0, 23.976, 30.0):
            metadata = SimpleNamespace(total_num_frames=total, fps=fps)
            expected = sample(stand_in, metadata, **options).tolist()
            assert processor.indices(facts(total, fps), rules).tolist() == expected


def test_sizes_are_those_of_both_processors(tmp_path: Path, theirs: dict[str, Any]) -> None:
    stated: dict[str, Any] = {"patch_size": 14, "size": {"shortest_edge": 3136}}
    stated["size"]["longest_edge"] = 200_000
    by_frame = ours(tmp_path, "qwen2_vl", video_processor_type="Qwen2VLVideoProcessor", **stated)
    whole = ours(tmp_path, "qwen3_vl", video_processor_type="Qwen3VLVideoProcessor", **stated)
    draw = numpy.random.default_rng(1)
    for height, width, count in draw.integers([8, 8, 2], [900, 900, 40], (200, 3)).tolist():
        video = facts(count, 1.0, height, width)
        expected = theirs["qwen2_vl"].smart_resize(height, width, 28, 3136, 200_000)
        assert by_frame.target(video, count, by_frame._rules) == expected
        expected = theirs["qwen3_vl"].smart_resize(count, height, width, 2, 28, 3136, 200_000)
        assert whole.target(video, count, whole._rules) == expected


@pytest.mark.parametrize("count", [1, 4, 5])
def test_patches_are_those_of_the_processor(
    tmp_path: Path, theirs: dict[str, Any], count: int
) -> None:
    rules = ours(tmp_path, "qwen2_vl")._rules
    frames = pictures(count, 40, 24)
    found, grid = patches_of(iter(frames), (count, 24, 40), rules)
    tensor = torch.from_numpy(numpy.stack(frames)).permute(0, 3, 1, 2).float()[None] / 255
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (rules.image_mean, rules.image_std))
    kind = theirs["qwen2_vl"].Qwen2VLVideoProcessor
    expected, *their_grid = kind.patchify(None, (tensor - mean) / std, 4, 2, 2)
    assert list(grid) == their_grid
    numpy.testing.assert_allclose(found, expected[0].numpy(), atol=2e-6)


def test_pillow_resizes_as_torch_does_for_torchvision() -> None:
    """By one of 255 levels at most."""
    (frame,) = pictures(1, 97, 61, seed=3)
    frame = frame ^ numpy.random.default_rng(2).integers(0, 64, frame.shape, dtype=numpy.uint8)
    found = resized_frame(frame, 32, 40, Image.Resampling.BICUBIC)
    tensor = torch.from_numpy(frame).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(tensor, (32, 40), mode="bicubic", antialias=True)
    difference = numpy.abs(found.astype(int) - expected[0].permute(1, 2, 0).numpy().astype(int))
    assert difference.max() <= 1


class _Frames:
    """A video of which the facts are known."""

    def __init__(self, known: VideoFacts) -> None:
        self.facts = known

    def frames(self, indices: list[int]) -> Iterator[numpy.ndarray]:
        raise AssertionError("no frame is wanted")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fps": 0}, InvalidInput, "fps is not a number above 0"),
        ({"fps": True}, InvalidInput, "fps is not a number above 0"),
        ({"num_frames": 2.5}, InvalidInput, "num_frames is not a number above 0"),
        ({"fps": 1, "num_frames": 2}, InvalidInput, "exclude each other"),
        ({"num_frames": 2000}, InvalidInput, "the video has 1000"),
        ({"size": {"longest_edge": 9}, "fps": 1}, InvalidInput, "shortest_edge and longest_edge"),
        ({"size": "big"}, InvalidInput, "mm_processor_kwargs"),
        ({"fps": 30}, PayloadTooLarge, "768 frames of the video, at most 64"),
        (
            {"min_pixels": 50_000, "max_pixels": 60_000, "fps": 1},
            PayloadTooLarge,
            "pixels in all",
        ),
    ],
)
def test_options_over_a_bound_are_refused_before_a_frame_is_read(
    tmp_path: Path, options: dict[str, Any], error: type[InvalidInput], message: str
) -> None:
    processor = ours(tmp_path, "qwen2_vl")
    video: Any = _Frames(facts(1000, 30.0, 300, 400))
    with pytest.raises(error, match=message):
        processor.features(video, options, LIMITS)


def test_a_shape_that_is_too_long_is_refused(tmp_path: Path) -> None:
    video: Any = _Frames(facts(10, 5.0, 4, 1000))
    with pytest.raises(InvalidInput, match="more than 200 times"):
        ours(tmp_path, "qwen2_vl").features(video, {}, LIMITS)


def test_a_processor_of_other_rules_takes_no_videos(tmp_path: Path) -> None:
    for name, stated in (
        ("qwen2_vl", {"video_processor_type": "InternVLVideoProcessor"}),
        ("qwen2_vl", {"do_resize": False}),
        ("llava", {}),
    ):
        directory = tmp_path / f"{name}{len(stated)}{sorted(stated)}"
        directory.mkdir()
        without_weights(directory, name)
        write_json(directory / "video_preprocessor_config.json", stated)
        assert video_rules(directory, read_json(directory / "config.json")) is None


def test_options_are_bounded_in_bytes() -> None:
    with pytest.raises(InvalidInput, match="at most 16384"):
        read_options(b'{"size": "' + b"x" * 16_384 + b'"}')
